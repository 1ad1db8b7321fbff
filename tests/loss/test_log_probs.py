"""``linear_log_probs`` with a ``FilterState``: gradients by the filter, statistics and errors as they are without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losses import make_inputs
from numerics import budget, relative_error
from torch import Tensor
from ways import KEEPS_ALL, force, peaked

from hf_cce import CCEConfig, FilterState, dispatch, linear_log_probs
from hf_cce.spec import Inputs, LossSpec, TokenGrads, Wanted

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
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 71 if why == "few tokens" else 0)
    calls = counted(monkeypatch)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    linear_log_probs(
        hidden.requires_grad_(why != "no gradient"), weight, labels, **WANTED,
        mean_logit=why == "mean logit", softcap=20.0 if why == "softcap" else None,
        config=CCEConfig("triton", gradient_filter=None if why == "no filter" else 0.1),
        filter_state=None if why == "no state" else FilterState(),
    )  # fmt: skip
    assert not calls


@pytest.mark.parametrize("kind", ["heavy", "both signs"])
def test_the_error_is_measured_with_the_gradients_there_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens weighed apart by orders of magnitude, and of gradients that nearly add up to nothing."""
    from hf_cce import kernels

    monkeypatch.setattr("hf_cce.kernels.filter.error.MEASURED_TOKENS", 16)
    hidden, weight, labels = peaked(128, 48, 600, torch.float32, DEVICE, seed=2)
    x, spec = Inputs(hidden, weight, None, labels), LossSpec(-100, 1.0, 0.0, needs=(True, True, False))
    found = kernels.filtered_stats(x, spec, Wanted(), None)
    assert found is not None
    (lse, *_), saved = found
    noise = torch.randn(128, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    g = (3 * noise).exp() if kind == "heavy" else noise.sign()
    live = labels != -100
    g = torch.where(live, g, 0.0)
    if kind == "both signs":
        g -= torch.where(live, g.sum() / live.sum() - 1e-4, 0.0)
    exact = kernels.logit_stats_backward(x, spec, lse, None, TokenGrads(g, -g))
    tokens, tau = saved.order.token_perm, torch.tensor(3e-2, device=DEVICE)
    request = kernels.BackwardRequest(g[tokens], -g[tokens], tau, True, True, True)
    *ours, report = kernels.filtered_gradients(saved, weight, request)
    wrong = [relative_error(a, b.double()) for a, b in zip(ours, exact, strict=False)]
    assert 0 < report.kept < report.tiles
    assert 0.5 < wrong[0] / float(report.error) < 2
    assert wrong[1] < 2 * wrong[0], "the weight's gradient"


def test_what_comes_back_for_ignored_labels_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    hidden, weight, labels = peaked(70, 40, 131, torch.float32, DEVICE)
    config, state = CCEConfig("triton", gradient_filter=0.05), FilterState()
    ignored = torch.where(labels == -100, 1e6, 1.0)
    for _ in range(2):
        *_, of_hidden, of_weight = fine_tuned((hidden, weight), labels, ignored, config=config, filter_state=state)
        assert of_hidden.isfinite().all() and of_weight.isfinite().all() and not of_hidden[labels == -100].any()
    assert math.isfinite(state.stats()["error"])
    *_, of_hidden, of_weight = fine_tuned(
        (hidden, weight), torch.full_like(labels, -100), config=config, filter_state=state
    )
    assert not of_hidden.any() and not of_weight.any()
    # and the next step is not the worse for it
    *_, of_hidden, of_weight = fine_tuned((hidden, weight), labels, config=config, filter_state=state)
    true = fine_tuned((hidden.double(), weight.double()), labels)
    assert relative_error(of_hidden, true[3]) < 2 * 0.05 and relative_error(of_weight, true[4]) < 2 * 0.05


@pytest.mark.parametrize("which", ["logsumexp", "label"])
def test_a_gradient_of_one_statistic_alone(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    inputs, labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    config = CCEConfig("triton", gradient_filter=KEEPS_ALL)

    def gradients(dtype: torch.dtype, state: FilterState | None) -> tuple[Tensor, ...]:
        # neither is contiguous, nor are the gradients
        hidden, weight = (x.detach().to(dtype).t().contiguous().t().requires_grad_() for x in inputs[:2])
        how = config if dtype == torch.float32 else None
        found = linear_log_probs(hidden, weight, labels, logsumexp=True, config=how, filter_state=state)
        assert found.logsumexp is not None
        wanted = found.logsumexp if which == "logsumexp" else found.log_probs + found.logsumexp
        return torch.autograd.grad(wanted.sum(), (hidden, weight))

    ours, exact, true = (gradients(dtype, state) for dtype, state in (
        (torch.float32, FilterState()), (torch.float32, None), (torch.float64, None)
    ))  # fmt: skip
    for a, b, wide in zip(ours, exact, true, strict=True):
        assert relative_error(a, wide) <= budget(relative_error(b, wide), torch.float32)


@pytest.mark.parametrize("n", [70, 1])
def test_frozen_hidden_states_and_one_token(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    config = CCEConfig("triton", gradient_filter=KEEPS_ALL)
    (hidden, weight, _), labels = make_inputs(n, 40, 131, torch.float32, DEVICE)
    labels[0] = 5

    def gradient(dtype: torch.dtype, state: FilterState | None) -> Tensor:
        leaf = weight.detach().to(dtype).requires_grad_()
        how = config if dtype == torch.float32 else None
        found = linear_log_probs(hidden.detach().to(dtype), leaf, labels, config=how, filter_state=state)
        return torch.autograd.grad(-found.log_probs.sum(), leaf)[0]

    ours, exact, true = (gradient(dtype, state) for dtype, state in (
        (torch.float32, FilterState()), (torch.float32, None), (torch.float64, None)
    ))  # fmt: skip
    assert relative_error(ours, true) <= budget(relative_error(exact, true), torch.float32)


def test_forwards_and_backwards_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward without a backward, two before one, and steps of other sizes between."""
    force(monkeypatch, "filtered")
    config, state = CCEConfig("triton", gradient_filter=KEEPS_ALL), FilterState()
    batches = [make_inputs(n, 40, 131, torch.float32, DEVICE) for n in (70, 33, 50)]
    weight = batches[0][0][1].detach().requires_grad_()
    losses = [
        -linear_log_probs(x[0].detach(), weight, y, **WANTED, config=config, filter_state=state).log_probs.sum()
        for x, y in batches
    ]
    for step in (2, 0):
        ours = torch.autograd.grad(losses[step], weight)[0]
        (hidden, *_), labels = batches[step]
        exact = fine_tuned((hidden, weight), labels, config=config)[4]
        true = fine_tuned((hidden.double(), weight.double()), labels)[4]
        assert relative_error(ours, true) <= budget(relative_error(exact, true), torch.float32)


def test_in_a_graph_it_is_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for any number of tokens, whatever the filter would ask about it."""
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 40)
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    state, config = FilterState(), CCEConfig(gradient_filter=0.1)

    @torch.compile(backend=counting, dynamic=True, fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return -linear_log_probs(hidden, weight, labels, config=config, filter_state=state).log_probs.sum()

    for n in (70, 30, 50):
        (hidden, weight, _), labels = make_inputs(n, 40, 131, torch.float32)
        loss(hidden.detach().requires_grad_(), weight.detach(), labels).backward()
    assert len(graphs) == 1
