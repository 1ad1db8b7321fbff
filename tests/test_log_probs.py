"""``linear_log_probs`` with a ``FilterState``: gradients by the filter, statistics and errors as they are without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses import make_inputs
from numerics import budget, relative_error
from test_ahead import described
from torch import Tensor
from ways import KEEPS_ALL, force, peaked

from hf_cce import CCEConfig, FilterState, linear_log_probs, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WANTED = {"entropy": True, "is_top1": True}


def fine_tuned(
    inputs: tuple[Tensor, ...], labels: Tensor, weights: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """(log_probs, entropy, is_top1, gradients of hidden and weight) of a sum of losses, as SFT computes it."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs)
    found = linear_log_probs(hidden, weight, labels, **WANTED, **options)
    ((-found.log_probs) * (1.0 if weights is None else weights)).sum().backward()
    assert (
        found.entropy is not None and found.is_top1 is not None and hidden.grad is not None and weight.grad is not None
    )
    return found.log_probs.detach(), found.entropy.detach(), found.is_top1, hidden.grad, weight.grad


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many forward passes were the filter's."""
    from hf_cce import kernels

    calls: list[int] = []
    real = kernels.filtered_stats
    monkeypatch.setattr(kernels, "filtered_stats", lambda *args: calls.append(1) or real(*args))
    return calls


@pytest.mark.parametrize(("d", "v", "weighed"), [(40, 131, False), (40, 131, True), (520, 150, True)])
def test_with_all_tiles_kept_it_is_the_same(d: int, v: int, weighed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    calls = counted(monkeypatch)
    (hidden, weight, _), labels = make_inputs(70, d, v, torch.float32, DEVICE)
    weights = torch.rand(70, device=DEVICE) if weighed else None
    config = CCEConfig("triton", gradient_filter=KEEPS_ALL)
    state = FilterState()
    for step in range(2):
        exact = fine_tuned((hidden, weight), labels, weights, config=config)
        ours = fine_tuned((hidden, weight), labels, weights, config=config, filter_state=state)
        assert len(calls) == step + 1
        double = fine_tuned((hidden.double(), weight.double()), labels, weights)
        assert torch.equal(ours[2], exact[2])
        for name, a, b, true in zip(("log_probs", "entropy", "", "hidden", "weight"), ours, exact, double, strict=True):
            if name:
                limit = budget(relative_error(b, true), torch.float32)
                assert relative_error(a, true) <= limit, f"{name}, step {step}"
    assert state.stats()["kept"] > 0


def test_what_is_dropped_is_held_to_the_error_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    n, v = (2048, 20_000) if DEVICE == "cuda" else (128, 600)  # of tiles of 128 by 128, or of 16 by 16
    hidden, weight, labels = peaked(n, 48, v, torch.bfloat16, DEVICE)
    config, state = CCEConfig("triton", gradient_filter=0.05), FilterState()
    for _ in range(3):
        ours = fine_tuned((hidden, weight), labels, config=config, filter_state=state)
    true = fine_tuned((hidden.double(), weight.double()), labels)
    exact = fine_tuned((hidden, weight), labels, config=config)
    stats = state.stats()
    assert 0 < stats["kept"] < 1, stats
    assert torch.equal(ours[2], exact[2])
    for a, b, wide in zip(ours[:2], exact[:2], true[:2], strict=True):
        assert relative_error(a, wide) <= budget(relative_error(b, wide), torch.bfloat16)
    assert relative_error(ours[3], true[3]) <= 0.05 + relative_error(exact[3], true[3])


def test_a_gradient_of_the_entropy_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    calls = counted(monkeypatch)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)

    def gradients(dtype: torch.dtype, state: FilterState | None, filtered: float | None) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        how = CCEConfig("triton" if dtype == torch.float32 else "auto", gradient_filter=filtered)
        found = linear_log_probs(*leaves, labels, **WANTED, config=how, filter_state=state)
        assert found.entropy is not None
        (found.entropy.sum() - found.log_probs.sum()).backward()
        return [x.grad for x in leaves if x.grad is not None]

    ours = gradients(torch.float32, FilterState(), 0.1)
    exact, true = gradients(torch.float32, None, None), gradients(torch.float64, None, None)
    assert len(calls) == 1
    for a, b, wide in zip(ours, exact, true, strict=True):
        assert relative_error(a, wide) <= budget(relative_error(b, wide), torch.float32)


def test_a_second_backward_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    config = CCEConfig("triton", gradient_filter=KEEPS_ALL)
    loss = -linear_log_probs(*leaves, labels, **WANTED, config=config, filter_state=FilterState()).log_probs.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    true = fine_tuned((hidden.double(), weight.double()), labels)[3:]
    for a, b, wide in zip(first, torch.autograd.grad(loss, leaves), true, strict=True):
        assert relative_error(b, wide) <= budget(relative_error(a, wide), torch.float32)


@pytest.mark.parametrize("why", ["no state", "no gradient", "no filter", "mean logit", "softcap", "few tokens"])
def test_where_it_is_not_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    monkeypatch.setattr(ops, "FILTER_TOKENS", 71 if why == "few tokens" else 0)
    calls = counted(monkeypatch)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    linear_log_probs(
        hidden.requires_grad_(why != "no gradient"), weight, labels, **WANTED,
        mean_logit=why == "mean logit", softcap=20.0 if why == "softcap" else None,
        config=CCEConfig("triton", gradient_filter=None if why == "no filter" else 0.1),
        filter_state=None if why == "no state" else FilterState(),
    )  # fmt: skip
    assert not calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches in the interpreter")
@pytest.mark.parametrize("needs", [(True, True), (True, False)], ids=["both", "frozen"])
def test_what_is_launched_was_listed(needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rehearsal, of steps that store nothing, that store the first columns, and that rest."""
    from hf_cce.kernels import ahead, launch

    force(monkeypatch, "filtered")
    hidden, weight, labels = peaked(60, 32, 600, torch.bfloat16)
    leaves = [x.requires_grad_(need) for x, need in zip((hidden, weight), needs, strict=True)]
    launched, real = set(), launch.Kernel.__getitem__

    def spy(self: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            launched.add(described(self.jitted.fn.__name__, kwargs))
            real(self, grid)(*args, **kwargs)

        return run

    state = FilterState()
    with monkeypatch.context() as patch:
        patch.setattr(launch.Kernel, "__getitem__", spy)
        for known, resting in ((None, 0), (None, 0), ((1.0, 2), 0), (None, 1)):
            state._seen, state._share, state._dense = known, None, resting
            found = linear_log_probs(*leaves, labels, **WANTED, config=CCEConfig("triton"), filter_state=state)
            found.log_probs.sum().backward()
            state._trying = False
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    problem = ahead.Problem(
        True, None, (*needs, False), torch.bfloat16, 600, 32, (32, 1), (32, 1), False, torch.int64, None, True,
        -100, 1.0, 0.0, 0.0, torch.device("cuda", 0), 60, 256 << 20, (True, True),
    )  # fmt: skip
    with launch.listing() as launches:
        ahead._step(problem)
    assert len(launched) > 10
    assert launched <= {described(jitted.fn.__name__, kwargs) for jitted, _, kwargs in launches}
