"""Which tokens and rows are drawn to estimate the filter's errors, and that how many fit at once changes nothing.

How near the estimates come to the errors themselves is tested in test_filter.py, on a GPU in test_filter_gpu.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from numerics import assert_as_good
from ways import force, peaked

from hf_cce import CCEConfig, FilterState, linear_cross_entropy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("size", "count"), [(3000, 64), (5003, 200), (200, 5), (40, 39)])
def test_indices_are_drawn_by_their_weights(size: int, count: int) -> None:
    """Each as often as its share says, to less than one; a square stands for as many as make the sum right on average."""
    from hf_cce.kernels.filter.error import sample

    g = torch.Generator().manual_seed(0)
    weights = torch.rand(size, generator=g) ** 8
    weights[::3] = 0.0
    indices, factors = (x.cpu() for x in sample(weights.to(DEVICE), count))
    assert indices.dtype == torch.int64 and len(indices) == len(factors) == count
    assert (indices >= 0).all() and (indices < size).all() and (indices.diff() >= 0).all()
    drawn, due = torch.bincount(indices, minlength=size), count * weights.double() / weights.double().sum()
    # In sums of float32, a target may fall on the other side of an index's share.
    assert ((drawn - due).abs() < 1.0 + torch.finfo(torch.float32).eps * size * count).all()
    assert not drawn[weights == 0].any()
    exact = weights.double().sum() / (count * weights[indices].double())
    assert_as_good(factors, weights.sum() / (count * weights[indices]), exact, "factors", torch.float32)


def test_where_nothing_is_dropped_samples_stand_for_nothing() -> None:
    from hf_cce.kernels.filter.error import sample

    indices, factors = sample(torch.zeros(50, device=DEVICE), 8)
    assert (indices >= 0).all() and (indices < 50).all() and not factors.any()
    _, factors = sample(torch.tensor([1.0, float("nan"), 1.0], device=DEVICE), 2)
    assert factors.isnan().all()
    every, one = sample(torch.zeros(5, device=DEVICE), 8)
    assert every.tolist() == list(range(5)) and one.tolist() == [1.0] * 5


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_a_few_at_a_time_give_the_same_estimates(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small budget only means more rounds."""
    from hf_cce.kernels.filter import run as filter_run

    force(monkeypatch, "filtered")
    hidden, weight, labels = peaked(60, 32, 230, torch.float16, DEVICE)
    real, found = filter_run.plan_workspace, []
    for at_once in (60, 7):
        monkeypatch.setattr(
            filter_run, "plan_workspace", lambda *a, m=at_once: dataclasses.replace(real(*a), measured_at_once=m)
        )
        leaves, state = [x.clone().requires_grad_() for x in (hidden, weight)], FilterState()
        config = CCEConfig("triton", gradient_filter=0.05)
        linear_cross_entropy(*leaves, labels, softcap=softcap, config=config, filter_state=state).backward()
        report = state._last
        found.append([report.error, report.weight_error, report.rounding_error, report.rounding_weight_error])
    for ours, all_at_once in zip(found[1], found[0], strict=True):
        assert DEVICE == "cuda" or ours > 0
        assert_as_good(ours, all_at_once, all_at_once, "estimate", torch.float32)
