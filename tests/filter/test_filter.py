"""The gradient filter: exact if it keeps everything, and bounds on what it changes if it drops tiles."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from forced_strategies import DEVICE, KEEPS_ALL, check_strategy, in_the_interpreter, trained_like_inputs
from losses import PLAIN, Inputs, Options, full_logits, fused_step, make_inputs, plain_step, scaled_and_capped
from numerics import assert_accurate, assert_all_accurate, relative_error
from torch import Tensor

from hf_cce import CCEConfig, FilterState, dispatch, spec
from hf_cce.config import MIB
from hf_cce.quantized import FrozenWeight
from hf_cce.strategies import FilteredStatistics

pytest.importorskip("triton")

from hf_cce.kernels.filter import error, order, select
from hf_cce.kernels.filter import run as filter_run
from hf_cce.kernels.filter.error import sample
from hf_cce.kernels.filter.workspace import Workspace
from hf_cce.kernels.inputs import LogitInputs
from hf_cce.kernels.labels import label_logits
from hf_cce.kernels.launch_config import filter_plan

pytestmark = pytest.mark.usefixtures("filtered")
SOFT = Options(0.7, 5.0, z_loss=1e-2)


@in_the_interpreter
@pytest.mark.parametrize("options", [PLAIN, SOFT], ids=["plain", "softcap"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "hidden", "weight"])
def test_a_bias_without_gradient_and_frozen_inputs(
    needs: tuple[bool, bool], options: Options, filtered: Counter[str]
) -> None:
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE, bias=True)
    exact, baseline = (plain_step(inputs, labels, options, dtype) for dtype in (torch.float64, torch.float32))
    actual = fused_step(inputs, labels, KEEPS_ALL, options, needs=needs)
    for name, a, t, e, need in zip(("loss", "hidden", "weight"), actual, baseline, exact, (True, *needs), strict=True):
        assert (a is not None) == need
        if a is not None:
            assert_accurate(a, t, e, name)
    assert filtered == {"filtered": 1, "filtered gradients": 1}


@pytest.mark.parametrize(
    "options", [Options(label_smoothing=0.1), Options(0.7, 5.0, bias=True, z_loss=1e-2)], ids=["smoothing", "bias"]
)
def test_unsupported_options_bypass_the_filter(options: Options, filtered: Counter[str]) -> None:
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE, bias=options.bias)
    check_strategy("filtered", inputs, labels, options, torch.float32)
    assert filtered["filtered"] == filtered["filtered gradients"] == 0


def filter_data(n: int = 60, d: int = 32, v: int = 230, seed: int = 0) -> tuple[Inputs, Tensor]:
    hidden, weight, labels = trained_like_inputs(n, d, v, device=DEVICE, seed=seed)
    return (hidden, weight, None), labels


def assert_within(factor: float, estimate: float | Tensor | None, actual: float) -> None:
    assert estimate is not None and 0 < actual / factor <= float(estimate) <= factor * actual


@in_the_interpreter
@pytest.mark.parametrize("options", [PLAIN, SOFT], ids=["plain", "softcap"])
def test_errors_are_as_measured_and_fall_with_the_threshold(options: Options) -> None:
    inputs, labels = filter_data()
    exact, baseline = (plain_step(inputs, labels, options, dtype) for dtype in (torch.float64, torch.float32))
    errors = []
    for gradient_filter in (0.1, 0.06, 0.03) if options is SOFT else (0.1, 0.02, 0.004):
        state = FilterState()
        loss, *gradients = fused_step(inputs, labels, gradient_filter, options, state)
        assert_accurate(loss, baseline[0], exact[0], "loss")
        stats = state.stats()
        assert 0 < stats["kept"] < 1 and 0 < stats["dropped_mass"] < 1
        errors.append([relative_error(a, e) for a, e in zip(gradients, exact[1:], strict=True)])
        assert_within(1.1, stats["error"], errors[-1][0])  # every token is measured
        assert_within(2, stats["weight_error"], errors[-1][1])  # measured on a sample of the vocabulary
        # the initial threshold is a guess for logits without a softcap
        assert options is SOFT or errors[-1][0] <= gradient_filter
    for lower, higher in zip(errors[1:], errors, strict=False):
        assert lower[0] < higher[0] and lower[1] < higher[1]


@in_the_interpreter
@pytest.mark.parametrize(
    ("n", "unsure", "gradient_filter", "options", "factors"),
    [
        # with few dropped tiles, one token may have most of the error
        (150, 0, 0.03, Options(reduction="sum"), (3, 2)),
        # one token in 24 is uncertain and has most of the error; they are spread out, so each token block has at most about one
        (600, 25, 0.1, PLAIN, (1.05, 2)),
    ],
)
def test_error_estimate_from_a_sample_of_tokens(
    n: int, unsure: int, gradient_filter: float, options: Options, factors: tuple[float, float]
) -> None:
    """The estimate holds for more tokens than it samples, also with an upstream gradient other than one."""
    inputs, labels = filter_data(n, 32, 400, seed=2 if unsure else 0)
    inputs[0][torch.randperm(n, generator=torch.Generator().manual_seed(2))[:unsure]] *= 0.25
    state = FilterState()
    _, *found = fused_step(inputs, labels, gradient_filter, options, state)
    errors = [relative_error(a, e) for a, e in zip(found, plain_step(inputs, labels, options)[1:], strict=True)]
    assert_within(factors[0], state.stats()["error"], errors[0])
    assert_within(factors[1], state.stats()["weight_error"], errors[1])


@in_the_interpreter
@pytest.mark.parametrize(
    ("n", "measured", "options", "factors"),
    [
        (60, None, PLAIN, (1.1, 1.5)),
        (60, None, Options(0.7, 5.0), (1.1, 1.5)),
        # one token in 24 is uncertain and affected more by rounding
        (600, 64, PLAIN, (1.1, 1.15)),
    ],
    ids=str,
)
def test_estimate_of_the_rounding_error(
    n: int, measured: int | None, options: Options, factors: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimate the effect of rounding logits, in float16: there the interpreter rounds like a GPU."""
    hidden, weight, labels = trained_like_inputs(n, 32, 230, torch.float16, DEVICE, seed=5 if measured else 0)
    if measured:
        monkeypatch.setattr(error, "ROUNDED_TOKENS", measured)
        hidden[torch.randperm(n, generator=torch.Generator().manual_seed(5))[:25]] *= 0.25
    state, gradients = FilterState(), []
    fused_step((hidden, weight, None), labels, 0.02, options, state)
    for rounded in (False, True):
        leaves = [x.double().requires_grad_() for x in (hidden, weight)]
        z = leaves[0] @ leaves[1].t()
        if rounded:
            z = z + (z.detach().half().double() - z.detach())
        loss = torch.nn.functional.cross_entropy(scaled_and_capped(z, options), labels)
        gradients.append(torch.autograd.grad(loss, leaves))
    errors = [relative_error(b, a) for a, b in zip(*gradients, strict=True)]
    assert_within(factors[0], state._last.rounding_error, errors[0])
    assert_within(factors[1], state._last.rounding_weight_error, errors[1])


@in_the_interpreter
def test_dropped_tiles_keep_their_mass() -> None:
    """A column of ones exposes sums of the logits' gradient: per token over the vocabulary, and over everything."""
    (hidden, weight, _), labels = filter_data()
    weight[:, 0] = hidden[:, 0] = 1.0
    options = Options(0.8, z_loss=0.3)  # without a z-loss the sums are zero
    inputs, state = (hidden, weight, None), FilterState()
    exact, baseline = (plain_step(inputs, labels, options, dtype) for dtype in (torch.float64, torch.float32))
    _, grad_hidden, grad_weight = fused_step(inputs, labels, 0.1, options, state)
    assert state.stats()["kept"] < 0.9 and state.stats()["dropped_mass"] > 1e-3
    assert relative_error(grad_hidden, exact[1]) > 100 * relative_error(baseline[1], exact[1])
    assert_accurate(grad_hidden[:, 0], baseline[1][:, 0], exact[1][:, 0], "sums over the vocabulary")
    assert_accurate(grad_weight[:, 0].sum(), baseline[2][:, 0].sum(), exact[2][:, 0].sum(), "sum over everything")


@in_the_interpreter
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_tile_by_tile(softcap: float | None, spy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With identity hidden states, the weight's gradient is the logits' gradient, so each tile can be checked."""
    energies = spy(select, "_tile_energies")
    # Disable the correction of hf_cce.kernels.filter.corrections: it does not belong to a single tile.
    real = filter_run.plan_workspace
    monkeypatch.setattr(filter_run, "plan_workspace", lambda *a: dataclasses.replace(real(*a), corrected=False))
    n, v = 48, 200
    g = torch.Generator().manual_seed(1)
    weight = 2 * torch.randn(v, n, generator=g) + 3 * torch.randn(v, 1, generator=g)
    labels = torch.randperm(v, generator=g)[:n]
    weight[labels, torch.arange(n)] += 6.0
    labels[:3] = -100
    options, state = Options(softcap=softcap, reduction="sum"), FilterState()
    inputs = (torch.eye(n), weight, None)
    exact, baseline = (plain_step(inputs, labels, options, dtype)[2] for dtype in (torch.float64, torch.float32))
    actual = fused_step(inputs, labels, 0.1, options, state)[2]
    assert actual is not None and state._vocabulary is not None
    order, rank = (x.long() for x in (state._vocabulary[1].vocab_perm, state._vocabulary[1].inv_vocab_perm))
    rows = torch.where(labels >= 0, rank[labels.clamp_min(0)], v).argsort(stable=True)
    p = full_logits(inputs[0].double(), weight.double(), None, options).softmax(-1).t()
    (energy, part, _), dropped = energies[0].result, 0
    for first in range(0, v, 32):
        for row in range(0, n, 16):
            cols, tokens = order[first : min(v, first + 32)], rows[row : row + 16]
            a, t, e = (x[cols][:, tokens] for x in (actual, baseline, exact))
            holds_a_label = bool((labels[tokens, None] == cols).any())
            if not holds_a_label:  # stored per token in bfloat16
                deviation = (e - e.mean(0)).square().sum()
                assert abs(energy[first // 32, row // 16] / deviation - 1) < 2**-8 + 0.001
            if holds_a_label or torch.equal(a, a[:1].expand_as(a)) is False:
                assert_accurate(a, t, e, f"kept tile at {row}, {first}")
                continue
            dropped += 1
            mass = p[cols][:, tokens].sum(0) * (labels[tokens] >= 0)
            if softcap is not None:  # the damping is stored in bfloat16
                mass = mass * (e.sum(0) / mass.where(mass > 0, 1.0)).float().bfloat16()
            assert_accurate(a.sum(0), t.sum(0), mass, f"mass of the dropped tile at {row}, {first}", torch.float32)
    tiles = 7 * 3
    assert 0 < dropped == round((1 - state.stats()["kept"]) * tiles)
    valid = labels >= 0
    at_label = (labels[valid], valid.nonzero()[:, 0])
    assert_accurate(actual[at_label], baseline[at_label], exact[at_label], "the target's term")
    size = exact.norm()
    assert (actual - exact).norm() <= 1.01 * state.stats()["tau"] * size  # energies are bfloat16
    # The threshold is relative to the whole gradient's energy: the target terms plus all tiles that may be dropped.
    tile_energy = energy[energy.isfinite()].double().sum()
    total_energies = [(x[at_label].double() ** 2).sum() + tile_energy for x in (baseline, exact)]
    assert_accurate(part.sum(), *total_energies, "energy of the whole gradient", torch.float32)


@in_the_interpreter
def test_auto_is_relative_to_the_rounding_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, ...]] = []
    tile_energies = select._tile_energies

    def watched(saved: Any, by_rounding: bool) -> tuple[Tensor, Tensor, Tensor]:
        assert by_rounding
        found = tile_energies(saved, by_rounding)
        seen.append((saved.rounding.clone(), saved.token_perm.clone(), found[1].clone()))
        return found

    monkeypatch.setattr(select, "_tile_energies", watched)
    hidden, weight, labels = trained_like_inputs(48, 40, 224, torch.bfloat16)
    state = FilterState()
    fused_step((hidden, weight, None), labels, "auto", state=state)
    rounding, rows, part = seen[0]
    assert state._vocabulary is not None
    columns = state._vocabulary[1].vocab_perm.long()
    p = (hidden.double() @ weight.double().t()).softmax(1)[rows][:, columns].view(48, 7, 32)
    energy = (p - p.mean(2, keepdim=True)).square().sum((1, 2))
    # Each tile's energy is rounded to bfloat16, so the total lies between these two.
    between = torch.stack([energy * (1 - 2**-8), energy * (1 + 2**-8)])
    likely = between * (1 - between.sqrt()) * (1 - between).sqrt()
    valid = labels[rows] >= 0
    low, high = (x * y for x, y in zip(likely.aminmax(dim=0), (0.999, 1.001), strict=True))
    assert (rounding[~valid] == 0).all() and (rounding[valid] > 0).all()
    assert ((low <= rounding) & (rounding <= high))[valid].all()
    assert_accurate(part.sum(), rounding.sum(), rounding.double().sum(), "the reference", torch.float32)


@in_the_interpreter
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_a_nan_ignored_token_does_not_affect_the_others(softcap: float | None) -> None:
    """As in plain PyTorch: only the weight's gradient, which sums over all tokens, becomes NaN."""
    (hidden, weight, _), labels = filter_data()
    options, state = Options(softcap=softcap), FilterState()
    labels[::7] = -100
    valid = labels >= 0
    loss, grad_hidden, _ = plain_step((hidden, weight, None), labels, options)
    hidden[~valid] = float("nan")
    actual = fused_step((hidden, weight, None), labels, 0.1, options, state)
    assert state.stats()["kept"] < 1 and 0 < state.stats()["dropped_mass"] < 1 and actual[1] is not None
    assert relative_error(actual[0], loss) <= 1e-6 and relative_error(actual[1][valid], grad_hidden[valid]) <= 0.1


@in_the_interpreter
def test_alternating_heads_match_separate_runs() -> None:
    """Bit for bit, including the state that the filter learns from step to step."""
    data = filter_data(seed=0), filter_data(seed=1)

    def train(*turns: int) -> list[Tensor | None]:
        states = FilterState(), FilterState()
        return [x for i in turns for x in fused_step(*data[i], 0.1, PLAIN, states[i])]

    first, second, both = train(0, 0, 0), train(1, 1, 1), train(0, 1, 0, 1, 0, 1)
    for step in range(3):
        alone = first[3 * step : 3 * step + 3] + second[3 * step : 3 * step + 3]
        assert all(torch.equal(a, b) for a, b in zip(both[6 * step : 6 * step + 6], alone, strict=True))


@in_the_interpreter
def test_no_tile_is_kept_if_all_tokens_are_ignored() -> None:
    inputs, labels = filter_data()
    state = FilterState()
    loss, *gradients = fused_step(inputs, torch.full_like(labels, -100), 0.1, PLAIN, state)
    assert loss == state.stats()["kept"] == 0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("v", [300, 40_001, 2_500_000])
def test_tokens_are_sorted_by_label_column(v: int, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are sorted by column (by column block beyond the most frequent), ignored ones last; ties keep their order."""
    monkeypatch.setattr(order, "MAX_COUNTING_SORT_TOKENS", 2500 if counted else 2499)
    g = torch.Generator().manual_seed(0)
    rank = torch.randperm(v, generator=g).int().to(DEVICE)
    labels = torch.randint(v, (2500,), generator=g).to(DEVICE)
    labels[::7] = -100
    labels[3] = rank.argmax()  # the very last column
    token_perm, found = order.sort_tokens(labels, order.Vocabulary(rank.argsort().int(), rank), -100)
    columns = torch.where(labels < 0, v, rank[labels.clamp_min(0)].long())
    assert torch.equal(found.long(), columns[token_perm])
    keys = torch.where(columns < 16_384, columns, 16_384 + (columns - 16_384) // 128).clamp_max(32_766)
    keys[labels < 0] = 32_767
    assert torch.equal(token_perm, keys.argsort(stable=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "d", "v"), [(1, 8, 40), (70, 72, 131), (200, 600, 300)])
def test_label_logits_kernel_also_reorders_hidden_states(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    (double_width, weight, _), labels = make_inputs(n, 2 * d, v, dtype, DEVICE)
    hidden, weight = double_width[:, :d], weight[:, :d].contiguous()
    g = torch.Generator().manual_seed(0)
    tokens, order = torch.randperm(n, generator=g).to(DEVICE), torch.randperm(v, generator=g).int().to(DEVICE)
    columns = torch.where(labels < 0, v, labels).int()[tokens]
    hidden[tokens[columns == v]] = float("nan")  # padding may be NaN and must not leak into what is read of the token
    in_order, plan = hidden[tokens], filter_plan(hidden, weight)
    inputs, how = LogitInputs(hidden, weight, None, columns, v, 0.5, 5.0), (plan, plan.block_m, order)
    logit, live = label_logits(inputs._replace(hidden=in_order), *how)
    moved = torch.full((n + 1, d), 7.0, dtype=dtype, device=DEVICE)
    at_once, lives = label_logits(inputs, *how, tokens, moved[:n])
    assert torch.equal(moved[:n].view(torch.uint8), in_order.contiguous().view(torch.uint8))
    assert bool((moved[n] == 7.0).all())
    assert torch.equal(at_once, logit) and torch.equal(lives, live)
    assert n == 1 or (bool((columns == v).any()) and bool(logit.any()))


def force_workspace(
    monkeypatch: pytest.MonkeyPatch, blocks: int | None, keep_weight: bool, tiles_per_pass: int | None
) -> list[Any]:
    """Force slabs of ``blocks`` column blocks and that many tiles per pass (None: one slab, one pass)."""
    used: list[Any] = []

    def plan_workspace(shape: Any, plan: Any, softcap: bool, need_weight: bool, budget: int) -> Any:
        n, _, v, _ = shape
        rows, cols = -(-n // plan.block_m), -(-v // plan.block_n)
        slab = v if blocks is None else blocks * plan.block_n
        tiles = rows * cols
        num_slots = tiles if tiles_per_pass is None else tiles_per_pass + rows
        passes = 1 if tiles_per_pass is None else -(-tiles // tiles_per_pass)
        used.append(Workspace((rows, cols), slab, keep_weight, num_slots, tiles_per_pass or num_slots, passes, n, True))
        return used[-1]

    monkeypatch.setattr(filter_run, "plan_workspace", plan_workspace)
    return used


@in_the_interpreter
@pytest.mark.parametrize("gradient_filter", [KEEPS_ALL, 0.03], ids=["everything", "some"])
@pytest.mark.parametrize("need_weight", [True, False], ids=["trained", "frozen"])
def test_passes_and_slabs_change_nothing(
    need_weight: bool, gradient_filter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = filter_data(40, 32, 200)
    results = []
    # In the last three, the weight rows are stored in sorted order where the gradient will be. With one pass per column block,
    # most gradients stay in sorted order until all passes are done, and the scratch holds some of their columns at a time.
    unsplit, slabs = (None, True, None), ((2, False, None), (3, False, 4))
    for workspace in (unsplit, *slabs, (None, True, 1), (None, True, 15), (None, True, 9)):
        used, state = force_workspace(monkeypatch, *workspace), FilterState()
        loss, hidden, weight = fused_step(inputs, labels, gradient_filter, SOFT, state, (True, need_weight))
        assert len(used) == 1
        results.append(([loss, hidden, *([weight] if need_weight else [])], state.stats()))
    first, stats = results[0]
    for other, other_stats in results[1:]:
        assert (other_stats["kept"], other_stats["tau"]) == (stats["kept"], stats["tau"])
        assert_accurate(*(torch.tensor(s["error"]) for s in (other_stats, stats, stats)), "measured error")
        assert_all_accurate(other, first, first)


# Sampling of tokens and rows for the error estimates, and how many are processed at once
@pytest.mark.parametrize(("size", "count"), [(3000, 64), (5003, 200), (200, 5), (40, 39)])
def test_indices_are_drawn_by_their_weights(size: int, count: int) -> None:
    """Counts match their expected value to within one, and the factors make the estimated sum unbiased."""
    g = torch.Generator().manual_seed(0)
    weights = torch.rand(size, generator=g) ** 8
    weights[::3] = 0.0
    indices, factors = (x.cpu() for x in sample(weights.to(DEVICE), count))
    assert indices.dtype == torch.int64 and len(indices) == len(factors) == count
    assert (indices >= 0).all() and (indices < size).all() and (indices.diff() >= 0).all()
    drawn, due = torch.bincount(indices, minlength=size), count * weights.double() / weights.double().sum()
    # With float32 sums, a target may fall on the other side of an index's boundary.
    assert ((drawn - due).abs() < 1.0 + torch.finfo(torch.float32).eps * size * count).all()
    assert not drawn[weights == 0].any()
    exact = weights.double().sum() / (count * weights[indices].double())
    assert_accurate(factors, weights.sum() / (count * weights[indices]), exact, "factors", torch.float32)


def test_sampling_with_zero_nan_or_few_weights() -> None:
    indices, factors = sample(torch.zeros(50, device=DEVICE), 8)
    assert (indices >= 0).all() and (indices < 50).all() and not factors.any()
    _, factors = sample(torch.tensor([1.0, float("nan"), 1.0], device=DEVICE), 2)
    assert factors.isnan().all()
    every, one = sample(torch.zeros(5, device=DEVICE), 8)
    assert every.tolist() == list(range(5)) and one.tolist() == [1.0] * 5


@in_the_interpreter
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_estimates_in_chunks_are_the_same(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = trained_like_inputs(60, 32, 230, torch.float16, DEVICE)
    real, found = filter_run.plan_workspace, []
    for at_once in (60, 7):
        monkeypatch.setattr(
            filter_run, "plan_workspace", lambda *a, m=at_once: dataclasses.replace(real(*a), measured_at_once=m)
        )
        state = FilterState()
        fused_step((hidden, weight, None), labels, 0.05, Options(softcap=softcap), state)
        report = state._last
        found.append([report.error, report.weight_error, report.rounding_error, report.rounding_weight_error])
    for ours, all_at_once in zip(found[1], found[0], strict=True):
        assert DEVICE == "cuda" or ours > 0
        assert_accurate(ours, all_at_once, all_at_once, "estimate", torch.float32)


@in_the_interpreter
def test_statistics_deduct_a_dequantized_weight_from_the_budget() -> None:
    weight = torch.randn(4096, 512)  # 8 MiB
    read = lambda start, stop, dtype: weight[start:stop].to(dtype)  # noqa: E731
    frozen = FrozenWeight.of(read, None, weight.shape, weight.dtype, weight.device)
    hidden, labels = torch.randn(64, 512, requires_grad=True), torch.zeros(64, dtype=torch.long)
    config = CCEConfig("triton", memory_budget="64MiB", gradient_filter=1e-2)
    options = spec.LossSpec.of(config, 64, (True, False, False)), spec.WantedStats(), True, FilterState()
    strategy = dispatch.dispatch_statistics(spec.Inputs(hidden, frozen, None, labels), *options)
    assert isinstance(strategy, FilteredStatistics)
    assert strategy.spec.memory_budget == strategy.unfiltered.spec.memory_budget == 56 * MIB
