"""``linear_log_probs`` with a ``FilterState``: filtered gradients; statistics and errors are as without the filter."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_strategies import DEVICE, KEEPS_ALL, in_the_interpreter, trained_like_inputs
from losses import make_inputs
from numerics import assert_accurate, assert_all_accurate, relative_error
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from hf_cce import CCEConfig, FilterState, dispatch, kernels, linear_log_probs
from hf_cce.loss import LogProbs
from hf_cce.spec import Inputs, LossSpec, TokenGrads, WantedStats

pytestmark = pytest.mark.usefixtures("filtered")
STATISTICS = {"entropy": True, "is_top1": True}


def sft_step(
    inputs: tuple[Tensor, ...], labels: Tensor, weights: Tensor | float = 1.0, **options: Any
) -> tuple[Tensor, ...]:
    """Return (log_probs, entropy, is_top1, gradients of hidden and weight) for a sum of token losses, as in SFT."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs)
    found = linear_log_probs(hidden, weight, labels, **STATISTICS, **options)
    ((-found.log_probs) * weights).sum().backward()
    return found.log_probs.detach(), found.entropy.detach(), found.is_top1, hidden.grad, weight.grad


LOSSES: dict[str, Callable[[LogProbs], Tensor]] = {
    "fine-tuning": lambda x: -x.log_probs.sum(),
    "weighed": lambda x: -(x.log_probs * torch.linspace(0.1, 1.0, len(x.log_probs), device=DEVICE)).sum(),
    "entropy": lambda x: x.entropy.sum() - x.log_probs.sum(),  # its gradient is computed unfiltered
    "logsumexp": lambda x: x.logsumexp.sum(),
    "label": lambda x: (x.log_probs + x.logsumexp).sum(),
}
SIZES = [(name, 70, 40, 131, (True, True)) for name in LOSSES]
SIZES += [
    ("weighed", 70, 520, 150, (True, True)),
    ("fine-tuning", 70, 40, 131, (False, True)),
    ("label", 1, 40, 131, (False, True)),
]


@in_the_interpreter
@pytest.mark.parametrize(("name", "n", "d", "v", "needs"), SIZES)
def test_matches_unfiltered_if_all_tiles_are_kept(
    name: str, n: int, d: int, v: int, needs: tuple[bool, bool], filtered: Counter[str]
) -> None:
    """Two steps with one state, each computing its gradients twice; the inputs are column-major."""
    inputs, labels = make_inputs(n, d, v, torch.float32, DEVICE)
    labels[0] = 5

    def run(dtype: torch.dtype, state: FilterState | None) -> list[list[Tensor]]:
        hidden, weight = (
            x.detach().to(dtype).t().contiguous().t().requires_grad_(need)
            for x, need in zip(inputs, needs, strict=False)
        )
        leaves = [x for x in (hidden, weight) if x.requires_grad]
        config = CCEConfig("triton" if dtype == torch.float32 else "auto", gradient_filter=KEEPS_ALL)
        found = linear_log_probs(
            hidden, weight, labels, **STATISTICS, logsumexp=True, config=config, filter_state=state
        )
        loss = LOSSES[name](found)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        values = [found.log_probs.detach(), found.entropy.detach(), found.is_top1.to(dtype)]
        return [[*values, *first], [*values, *torch.autograd.grad(loss, leaves)]]

    exact, baseline, state = run(torch.float64, None), run(torch.float32, None), FilterState()
    for step in range(2):
        ours = run(torch.float32, state)
        assert filtered["filtered statistics"] == step + 1
        for backward in range(2):
            where = f"step {step}, backward {backward}"
            assert_all_accurate(ours[backward], baseline[backward], exact[backward], where)
    assert name == "entropy" or state.stats()["kept"] > 0


@pytest.mark.slow
def test_error_of_dropped_tiles_is_bounded() -> None:
    n, v = (2048, 20_000) if DEVICE == "cuda" else (128, 600)  # tiles are 128 by 128, or 16 by 16
    hidden, weight, labels = trained_like_inputs(n, 48, v, torch.bfloat16, DEVICE)
    config, state = CCEConfig("triton", gradient_filter=0.05), FilterState()
    for _ in range(3):
        ours = sft_step((hidden, weight), labels, config=config, filter_state=state)
    true = sft_step((hidden.double(), weight.double()), labels)
    exact = sft_step((hidden, weight), labels, config=config)
    stats = state.stats()
    assert 0 < stats["kept"] < 1, stats
    assert torch.equal(ours[2], exact[2])
    assert_all_accurate(ours[:2], exact[:2], true[:2], "statistics", torch.bfloat16)
    assert relative_error(ours[3], true[3]) <= 0.05 + relative_error(exact[3], true[3])


@pytest.mark.parametrize("why", ["no state", "no gradient", "no filter", "mean logit", "softcap", "few tokens"])
def test_cases_that_bypass_the_filter(why: str, filtered: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 71 if why == "few tokens" else 0)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    linear_log_probs(
        hidden.requires_grad_(why != "no gradient"), weight, labels, **STATISTICS,
        mean_logit=why == "mean logit", softcap=20.0 if why == "softcap" else None,
        config=CCEConfig("triton", gradient_filter=None if why == "no filter" else 0.1),
        filter_state=None if why == "no state" else FilterState(),
    )  # fmt: skip
    assert not filtered["filtered statistics"]


@pytest.mark.parametrize("kind", ["heavy", "both signs"])
def test_error_estimate_with_uneven_upstream_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token weights that differ by orders of magnitude, and gradients that nearly cancel."""
    monkeypatch.setattr("hf_cce.kernels.filter.error.MEASURED_TOKENS", 16)
    n, v = (128, 600) if DEVICE == "cpu" else (1024, 16_384)  # tiles are larger on a GPU
    hidden, weight, labels = trained_like_inputs(n, 48, v, torch.float32, DEVICE, seed=2)
    x, spec = Inputs(hidden, weight, None, labels), LossSpec(-100, 1.0, 0.0, needs=(True, True, False))
    found = kernels.filtered_stats(x, spec, WantedStats(), None)
    assert found is not None
    (lse, *_), saved = found
    noise = torch.randn(n, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    g = (3 * noise).exp() if kind == "heavy" else noise.sign()
    live = labels != -100
    g = torch.where(live, g, 0.0)
    if kind == "both signs":
        g -= torch.where(live, g.sum() / live.sum() - 1e-4, 0.0)
    exact = kernels.logit_stats_backward(x, spec, lse, None, TokenGrads(g, -g))
    tokens, tau = saved.token_perm, torch.tensor(3e-2, device=DEVICE)
    request = kernels.BackwardRequest(g[tokens], -g[tokens], tau, True, True, True, False)
    *ours, report = kernels.filtered_gradients(saved, weight, request)
    wrong = [relative_error(a, b.double()) for a, b in zip(ours, exact, strict=False)]
    assert 0 < report.kept < report.tiles
    assert 0.5 < wrong[0] / float(report.error) < 2
    assert wrong[1] < 2 * wrong[0], "the weight's gradient"


@in_the_interpreter
def test_ignored_labels_get_no_gradient() -> None:
    hidden, weight, labels = trained_like_inputs(70, 40, 131, torch.float32, DEVICE)
    config, state = CCEConfig("triton", gradient_filter=0.05), FilterState()
    ignored = torch.where(labels == -100, 1e6, 1.0)
    sft_step((hidden, weight), labels, ignored, config=config, filter_state=state)
    assert math.isfinite(state.stats()["error"])
    *_, grad_hidden, grad_weight = sft_step(
        (hidden, weight), torch.full_like(labels, -100), config=config, filter_state=state
    )
    assert not grad_hidden.any() and not grad_weight.any()
    # and the next step is not affected
    *_, grad_hidden, grad_weight = sft_step((hidden, weight), labels, config=config, filter_state=state)
    true = sft_step((hidden.double(), weight.double()), labels)
    assert relative_error(grad_hidden, true[3]) < 2 * 0.05 and relative_error(grad_weight, true[4]) < 2 * 0.05


def test_forwards_and_backwards_in_any_order() -> None:
    """One forward without a backward, two before one, and steps of other sizes in between."""
    config, state = CCEConfig("triton", gradient_filter=KEEPS_ALL), FilterState()
    batches = [make_inputs(n, 40, 131, torch.float32, DEVICE) for n in (70, 33, 50)]
    weight = batches[0][0][1].detach().requires_grad_()
    losses = [
        -linear_log_probs(x[0].detach(), weight, y, **STATISTICS, config=config, filter_state=state).log_probs.sum()
        for x, y in batches
    ]
    for step in (2, 0):
        ours = torch.autograd.grad(losses[step], weight)[0]
        (hidden, *_), labels = batches[step]
        exact = sft_step((hidden, weight), labels, config=config)[4]
        true = sft_step((hidden.double(), weight.double()), labels)[4]
        assert_accurate(ours, exact, true, f"step {step}")


def test_one_compiled_graph_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 40)
    counter, state, config = CompileCounter(), FilterState(), CCEConfig(gradient_filter=0.1)

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return -linear_log_probs(hidden, weight, labels, config=config, filter_state=state).log_probs.sum()

    for n in (70, 30, 50):
        (hidden, weight, _), labels = make_inputs(n, 40, 131, torch.float32)
        loss(hidden.detach().requires_grad_(), weight.detach(), labels).backward()
    assert counter.frame_count == 1
