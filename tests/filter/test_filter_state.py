"""State that the gradient filter keeps between steps, and where it is stored: FilterState, a patched model."""

import copy
import itertools
import math
import pickle
from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forced_strategies import KEEPS_ALL, config_for, force_strategy, trained_like_inputs
from losses import PLAIN, check_against_plain, fused_loss, fused_step, make_inputs
from models import batch, loss_and_grads, tiny_llama
from numerics import assert_accurate, assert_all_accurate
from torch import Tensor

from hf_cce import CCEConfig, FilterState, apply_cce, linear_cross_entropy, remove_cce
from hf_cce import filter_state as state_module
from hf_cce.kernels.filter import run as filter_run
from hf_cce.kernels.filter.workspace import FilterReport
from hf_cce.patches.causal_lm import patch_of

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
KEYS = {"kept", "dropped_mass", "tau", "error", "weight_error", "dense"}
COUNTS = {"calls", "fused", "few_tokens", "materialized", "read", "missed", "bypassed", "traced"}
cpu_only = pytest.mark.skipif(CUDA, reason="Triton's interpreter is off in a process that sees a GPU")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    if CUDA:
        pytest.skip(cpu_only.kwargs["reason"])
    return force_strategy(monkeypatch, "filtered")


def step(
    state: FilterState | None,
    gradient_filter: Any = KEEPS_ALL,
    n: int = 16,
    d: int = 16,
    v: int = 40,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    gradient = fused_step(*make_inputs(n, d, v, dtype), gradient_filter, state=state)[2]
    assert gradient is not None
    return gradient


# Rounding errors of the hidden and weight gradients that tests report to "auto".
ROUNDING = (5e-3, 2e-3)


def make_report(error: float, weight_error: float | None = None) -> FilterReport:
    """Return a backward pass's report; without ``weight_error``, that of a frozen weight."""
    weight_errors = (None, None) if weight_error is None else (torch.tensor(weight_error), torch.tensor(ROUNDING[1]))
    errors = (torch.tensor(error), weight_errors[0], torch.tensor(ROUNDING[0]), weight_errors[1])
    counts = (torch.tensor(10, dtype=torch.int32), 100, torch.tensor([1.0]), 50)
    return FilterReport(*counts, torch.tensor(1e-3), *errors)


def target_errors(gradient_filter: Any, frozen: bool = False) -> tuple[float, float]:
    if gradient_filter != "auto":
        return gradient_filter, gradient_filter
    share = state_module.AUTO_SHARE_FROZEN if frozen else state_module.AUTO_SHARE
    return share * ROUNDING[0], share * ROUNDING[1]


@pytest.mark.parametrize(
    ("gradient_filter", "dtype"), [("auto", torch.float32), ("auto", torch.float16), (None, torch.float32)], ids=str
)
def test_auto_filters_only_bfloat16(gradient_filter: Any, dtype: torch.dtype, counts: Counter[str]) -> None:
    state = FilterState()
    step(state, gradient_filter, dtype=dtype)
    assert "filtered" not in counts and state.stats() == {}


def test_another_requested_error_resets_the_threshold() -> None:
    state, hidden = FilterState(), torch.zeros(1)
    first = state.threshold(0.06, hidden)
    assert first is state.threshold(0.06, hidden)
    second = state.threshold(0.03, hidden)
    assert first is not None and second is not None and second < first


def test_after_a_number_auto_probes_and_measures_as_at_the_start() -> None:
    state, hidden = FilterState(), torch.zeros(1)
    for _ in range(10):
        state.threshold(0.06, hidden)
        state.end_step(make_report(0.05))
    assert not state.should_measure()
    state.threshold("auto", hidden)
    assert state.probe_only() and state.should_measure()


def next_tau(state: FilterState, gradient_filter: Any) -> float:
    tau = state.threshold(gradient_filter, torch.zeros(1, dtype=torch.bfloat16))
    assert tau is not None
    return float(tau)


def assert_near(x: float, expected: float, what: str) -> None:
    assert_accurate(*(torch.tensor(y) for y in (x, expected, expected)), what)


@pytest.mark.parametrize("gradient_filter", ["auto", 0.02])
def test_the_threshold_follows_the_measured_error(gradient_filter: Any) -> None:
    """The first correction is full, later ones half (in octaves), within limits; without a finite error there is none."""
    target, _ = target_errors(gradient_filter, frozen=True)
    state = FilterState()
    before = next_tau(state, gradient_filter)
    state.end_step(make_report(2 * target))
    assert_near(next_tau(state, gradient_filter) / before, 0.5, "an octave down")
    before = next_tau(state, gradient_filter)
    state.end_step(make_report(2 * target))
    assert_near(next_tau(state, gradient_filter) / before, 0.5**0.5, "half an octave down")
    state.end_step(make_report(target / 2))
    back = next_tau(state, gradient_filter)
    assert_near(back, before, "and up again")
    state.end_step(make_report(float("nan")))
    state.end_step(make_report(target)._replace(error=None))
    assert next_tau(state, gradient_filter) == back
    for _ in range(40):
        state.end_step(make_report(0.0))
    assert_near(next_tau(state, gradient_filter), state_module.LARGEST_TAU, "the largest")
    for _ in range(40):
        state.end_step(make_report(1e9))
    assert_near(next_tau(state, gradient_filter), state_module.SMALLEST_TAU, "the smallest")


@pytest.mark.parametrize("gradient_filter", ["auto", 0.02])
@pytest.mark.parametrize("worse", ["hidden", "weight"])
def test_the_worse_of_both_errors_counts(worse: str, gradient_filter: Any) -> None:
    targets = target_errors(gradient_filter)
    factors = (3, 1.5) if worse == "hidden" else (0.1, 3)
    state = FilterState()
    before = next_tau(state, gradient_filter)
    errors = [factor * target for factor, target in zip(factors, targets, strict=True)]
    state.end_step(make_report(errors[0], weight_error=errors[1]))
    assert_near(next_tau(state, gradient_filter) / before, 1 / 3, "a third")
    found = state.stats()
    assert_near(found["error"], errors[0], "error")
    assert_near(found["weight_error"], errors[1], "weight_error")
    state.end_step(make_report(1.0, weight_error=1.0)._replace(error=None))  # everything below the head is frozen
    assert state.stats()["weight_error"] == 1.0


def test_the_threshold_of_a_captured_graph_is_at_most_the_initial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph replays measure nothing for new data. A threshold requested as a number is unaffected."""
    for gradient_filter, bold in (("auto", False), (0.02, True)):
        state = FilterState()
        for _ in range(5):
            next_tau(state, gradient_filter)
            state.end_step(make_report(1e-6))
        found = next_tau(state, gradient_filter)
        assert found > 2 * state_module.AUTO_TAU
        with monkeypatch.context() as patch:
            patch.setattr(state_module, "_capturing", lambda: True)
            captured = next_tau(state, gradient_filter)
        assert_near(captured, found if bold else state_module.AUTO_TAU, "captured")
        assert next_tau(state, gradient_filter) == found


def test_measurement_schedule() -> None:
    state, measured = FilterState(), []
    for number in range(70):
        if state.should_measure():
            measured.append(number)
        state.end_step(make_report(0.01))
    assert measured == [0, 1, 2, 3, 32, 64]


@pytest.mark.slow
def test_the_requested_error_is_reached(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On repeated inputs, the measured error gets closer to the requested one than with the initial guess."""
    monkeypatch.setattr(state_module, "MEASURE_EVERY", 1)
    hidden, weight, labels = trained_like_inputs(120, 32, 460)
    gradient_filter, state, errors = 0.06, FilterState(), []
    for _ in range(5):
        fused_step((hidden, weight, None), labels, gradient_filter, state=state)
        errors.append(state.stats()["error"])
    away = [abs(math.log(error / gradient_filter)) for error in errors]
    assert away[-1] < away[0] / 2 and min(away) == min(away[-2:])


def test_pauses_while_too_much_is_kept_and_resumes() -> None:
    state, hidden, event = FilterState(), torch.zeros(1), Mock()
    state._pending = state_module._PendingCount(torch.tensor(90), event, 100, state_module.READ_AFTER)
    for state._steps in range(state_module.READ_AFTER):  # read at a fixed step, however early it arrives
        assert state.threshold(0.01, hidden) is not None and not event.synchronize.called
    state._steps = state_module.READ_AFTER
    paused = 0
    while state.threshold(0.01, hidden) is None:
        paused += 1
    assert paused == state_module.PAUSE_STEPS and state._pending is None
    event.synchronize.assert_called_once()
    state._pending = state_module._PendingCount(torch.tensor(50), event, 100, 0)
    assert state.threshold(0.01, hidden) is not None and state._pending is None


@pytest.mark.parametrize("gradient_filter", ["auto", 0.02])
def test_after_a_pause_it_measures_as_at_the_start(gradient_filter: Any) -> None:
    """The head keeps training while the filter pauses, so the earlier threshold says little about it."""
    target, _ = target_errors(gradient_filter, frozen=True)
    state = FilterState()
    for _ in range(10):
        next_tau(state, gradient_filter)
        state.end_step(make_report(target))
    assert not state.should_measure()
    state._pending = state_module._PendingCount(torch.tensor(90), Mock(), 100, 0)
    for _ in range(state_module.PAUSE_STEPS):
        assert state.threshold(gradient_filter, torch.zeros(1, dtype=torch.bfloat16)) is None
    before, measured = next_tau(state, gradient_filter), 0
    state.end_step(make_report(target / 3))
    assert_near(next_tau(state, gradient_filter) / before, 3.0, "all the way")
    before = next_tau(state, gradient_filter)
    for _ in range(9):
        measured += state.should_measure()
        state.end_step(make_report(target))
    assert measured == state_module.MEASURE_FIRST - 1
    state.end_step(make_report(target / 4))
    assert_near(next_tau(state, gradient_filter) / before, 2.0, "half the way")


def test_a_step_during_a_pause(counts: Counter[str]) -> None:
    state = FilterState()
    filtered = step(state)
    state._pending = state_module._PendingCount(torch.tensor(99), Mock(), 100, 0)
    exact = step(state)
    assert counts["filtered"] == counts["filtered gradients"] == 1 and sum(counts.values()) == 4
    assert state.stats()["dense"] == 1.0
    assert_accurate(exact, filtered, filtered, "weight")
    state._paused = 0
    step(state)
    assert counts["filtered"] == 2 and state.stats()["dense"] == 0.0


def test_the_vocabulary_order_and_covariance_are_reused(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # with a share of 1, no step pauses the filter
    for name, value in (("SORT_EVERY", 2), ("COVARIANCE_EVERY", 4), ("PAUSE_SHARE", 1.0)):
        monkeypatch.setattr(state_module, name, value)
    state, found = FilterState(), []
    for _ in range(9):
        step(state)
        assert state._vocabulary is not None and state._vocabulary[1].covariance is not None
        found.append(state._vocabulary[1])
    for number, (before, after) in enumerate(itertools.pairwise(found), 1):
        assert (after is before) == (after.vocab_perm is before.vocab_perm) == (number % 2 != 0)
        assert (after.covariance is before.covariance) == (number % 4 != 0)
    # Another head, or another dtype with other tile sizes, gets its own order.
    for options in ({"v": 70}, {"d": 24, "v": 70}, {"d": 24, "v": 70, "dtype": torch.float16}):
        state._steps = 1
        before = state._vocabulary[1].vocab_perm
        step(state, **options)  # type: ignore[arg-type]
        assert state._vocabulary[1].vocab_perm is not before
        assert torch.equal(state._vocabulary[1].vocab_perm.sort().values[-70:], torch.arange(70, dtype=torch.int32))


@pytest.mark.slow
def test_auto_drops_nothing_until_it_has_measured_a_benefit(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto", nothing is dropped until a measured threshold gives the share it would keep; likewise after each pause."""
    monkeypatch.setattr(state_module, "AUTO_TAU", 0.05)
    monkeypatch.setattr(state_module, "PAUSE_STEPS", 2)
    hidden, weight, labels = trained_like_inputs(60, 32, 230, torch.bfloat16)

    def gradients(gradient_filter: Any, state: FilterState, again: bool = False) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        config = CCEConfig("triton", gradient_filter=gradient_filter)
        loss = linear_cross_entropy(*leaves, labels, config=config, filter_state=state)
        if again:  # runs without the filter: the first backward consumed what the forward stored
            torch.autograd.grad(loss, leaves, retain_graph=True)
        return list(torch.autograd.grad(loss, leaves))

    unfiltered = gradients("auto", FilterState(), again=True)
    for pointless, expected in ((0.99, "uuffff"), (0.0, "uudduudduud")):
        monkeypatch.setattr(state_module, "PAUSE_SHARE", pointless)
        state, found = FilterState(), ""
        for _ in expected:
            before = counts["filtered gradients"]
            same = all(torch.equal(a, b) for a, b in zip(gradients("auto", state), unfiltered, strict=True))
            found += ("u" if same else "f") if counts["filtered gradients"] > before else "d"
            assert 0 < state.stats()["kept"] < 0.99
        assert found == expected
    counts.clear()  # without a state nothing would bound the error
    fused_step((hidden, weight, None), labels, "auto")
    assert "filtered" not in counts


def test_the_first_probe_uses_the_estimated_threshold(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept share that decides whether filtering pays is that of the estimated threshold, not that of the initial guess."""
    hidden, weight, labels = trained_like_inputs(60, 32, 230, torch.bfloat16)
    probe = partial(fused_step, (hidden, weight, None), labels, "auto", needs=(False, True))
    kept = []
    for first in (0.002, 0.05, 0.2):
        monkeypatch.setattr(state_module, "AUTO_TAU", first)
        state = FilterState()
        probe(state=state)
        moved = state.stats()["tau"]
        assert_near(moved, next_tau(state, "auto"), "where the threshold goes")
        assert abs(moved / first - 1) > 0.1
        kept.append(state.stats()["kept"])
        again = FilterState()
        again.threshold("auto", torch.zeros(1, dtype=torch.bfloat16))
        again._steps, again._tau = state_module.MEASURE_FIRST, torch.tensor(moved)
        probe(state=again)  # measures nothing
        assert again.stats()["kept"] == kept[-1] and again.stats()["tau"] == moved
    assert kept[0] > kept[-1]


def test_a_stale_order_gives_correct_gradients(counts: Counter[str]) -> None:
    state = FilterState()
    step(state)
    (hidden, weight, _), labels = make_inputs(37, 16, 40, torch.float32)
    loss = fused_loss(CCEConfig("triton", gradient_filter=KEEPS_ALL), state)
    check_against_plain(loss, (hidden.flip(0), weight.flip(0), None), labels, PLAIN, torch.float32, "stale")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_start_without_history(how: Any, counts: Counter[str]) -> None:
    state = FilterState()
    step(state)
    other = how(state)
    assert isinstance(other, FilterState) and other.handle != state.handle and FilterState.of(other.handle) is other
    assert {**other.__dict__, "handle": 0} == {**FilterState().__dict__, "handle": 0}
    assert set(state.stats()) == KEYS and all(type(value) is float for value in state.stats().values())


def test_nothing_is_measured_without_a_state(counts: Counter[str], spy: Any) -> None:
    measured = spy(filter_run, "estimate_errors")
    step(None)
    assert not measured
    step(FilterState())
    assert len(measured) == 1


@cpu_only
@pytest.mark.parametrize("strategy", ["filtered", "one_block", "exp_cache", "token_groups", "exact", "portable"])
def test_micro_batches_add_up(strategy: str, forced: Counter[str]) -> None:
    """Micro-batches run one after the other, or both losses before any gradient; they share one state."""
    (hidden, weight, _), labels = make_inputs(40, 16, 70, torch.float32)
    items = int((labels != -100).sum())
    config, state = config_for(strategy, gradient_filter=KEEPS_ALL), FilterState()

    ours = partial(linear_cross_entropy, num_items_in_batch=items, config=config, filter_state=state)

    def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum") / items

    def gradients(loss: Any, dtype: torch.dtype, at_once: bool) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        losses = []
        for rows in (slice(0, 17), slice(17, 40)):
            losses.append(loss(leaves[0][rows], leaves[1], labels[rows]))
            if not at_once:
                losses.pop().backward()
        if at_once:
            torch.stack(losses).sum().backward()
        return [x.grad for x in leaves]

    exact, baseline = (gradients(plain, dtype, False) for dtype in (torch.float64, torch.float32))
    for at_once in (False, True):
        assert_all_accurate(gradients(ours, torch.float32, at_once), baseline, exact, f"at once: {at_once}")
    assert strategy == "portable" or forced[strategy] == 4


def test_the_state_lives_on_the_model(counts: Counter[str]) -> None:
    plain, model, other = (tiny_llama() for _ in range(3))
    for patched in (model, other):
        apply_cce(patched, implementation="triton", gradient_filter=KEEPS_ALL)
    assert set(model.cce_stats()) == COUNTS
    expected = loss_and_grads(plain, batch())
    assert_all_accurate(loss_and_grads(model, batch()), expected, expected)
    stats = model.cce_stats()
    assert set(stats) == COUNTS | KEYS
    assert (stats["calls"], stats["fused"], stats["materialized"]) == (1, 1, 0) and stats["kept"] > 0
    assert counts["filtered"] == counts["filtered gradients"] == 1
    # each model has its own, kept when options change and fresh in a copy
    assert not KEYS & set(other.cce_stats())
    state = patch_of(model).filter_state
    assert apply_cce(model, implementation="triton", gradient_filter=0.05) is model
    assert patch_of(model).filter_state is state
    assert not KEYS & set(copy.deepcopy(model).cce_stats())
    assert not hasattr(plain, "cce_stats") and not hasattr(remove_cce(other), "cce_stats")
