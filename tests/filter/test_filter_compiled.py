"""The loss under torch.compile: same strategies, filter and counters as eager code, in a single graph."""

import copy
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from forced_strategies import STRATEGIES, applies, config_for, force_strategy, forward_counter, trained_like_inputs
from losses import PLAIN, make_inputs
from models import batch, tiny_llama
from numerics import assert_accurate, assert_all_accurate, relative_error
from test_filter_state import COUNTS, KEYS
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hf_cce import CCEConfig, FilterState, apply_cce, dispatch, linear_cross_entropy
from hf_cce import filter_state as state_module
from hf_cce.patches.causal_lm import patch_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in the interpreter, which a process that sees a GPU has not switched on"
)
FILTERED = CCEConfig("triton", gradient_filter=0.05)


@pytest.fixture(autouse=True)
def no_pauses(filtered: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "PAUSE_SHARE", 1.0)


def compile(function: Any) -> tuple[Any, CompileCounterWithBackend]:
    """Compile forward and backward into one graph, as Inductor would receive it."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden, weight, labels) of which the filter drops some tiles; hidden and weight require gradients."""
    hidden, weight, labels = trained_like_inputs(40, 16, 130, dtype, seed=seed)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, state: FilterState | None, config: CCEConfig) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, config=config, filter_state=state)


@pytest.mark.parametrize(
    ("dtype", "gradient_filter"),
    [
        *(pytest.param(x, 0.05, marks=pytest.mark.slow) for x in (torch.float32, torch.bfloat16)),
        (torch.bfloat16, "auto"),
    ],
    ids=["float32", "bfloat16", "auto"],
)
def test_every_step_equals_eager_code(dtype: torch.dtype, gradient_filter: Any, filtered: Any) -> None:
    compiled, counter = compile(loss_of)
    config = CCEConfig("triton", gradient_filter=gradient_filter)
    eager_state, compiled_state = FilterState(), FilterState()
    for number in range(4):
        found = []
        for function, state in ((loss_of, eager_state), (compiled, compiled_state)):
            hidden, weight, labels = problem(dtype, number)
            loss = function(hidden, weight, labels, state, config)
            loss.backward()
            found.append((loss.detach(), hidden.grad, weight.grad))
        for name, eager, ours in zip(("loss", "hidden", "weight"), *found, strict=True):
            assert torch.equal(ours, eager), name
        assert compiled_state.stats() == eager_state.stats()
    assert compiled_state.stats()["dropped_mass"] > 0 and filtered["filtered gradients"] == 8
    assert counter.frame_count == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_eager_code(strategy: str, forced: Counter[str]) -> None:
    upstream = 1 / 3
    dtype = torch.bfloat16
    assert applies(strategy, PLAIN, dtype)
    inputs, labels = make_inputs(40, 16, 70, dtype)
    config, state = config_for(strategy, memory_budget=1 << 20), FilterState()
    compiled, _ = compile(lambda h, w: upstream * loss_of(h, w, labels, state, config))

    def gradients(function: Any, dtype: torch.dtype) -> list[Tensor]:
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs[:2])
        return list(torch.autograd.grad(function(hidden, weight), (hidden, weight)))

    ours = gradients(compiled, dtype)
    assert forced[forward_counter(strategy)] == 1
    unscaled = gradients(lambda h, w: loss_of(h, w, labels, FilterState(), config), dtype)
    for mine, eager in zip(ours, unscaled, strict=True):
        assert torch.equal(mine, (eager.float() * upstream).to(dtype))


def test_the_budget_equals_that_of_eager_code(spy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force_strategy(monkeypatch, "exact")
    budgets = spy(dispatch, "_budget")
    monkeypatch.setattr(dispatch, "_head_gradient_bytes", lambda p, spec: 1 << 30 if spec.needs[1] else 0)
    hidden, weight, labels = problem(torch.bfloat16)
    for function in (loss_of, compile(loss_of)[0]):
        function(hidden, weight, labels, None, CCEConfig("triton"))
    assert [call.result for call in budgets] == [1 << 30] * 2


def test_float16_gradients_are_scaled_before_they_underflow() -> None:
    hidden, weight, labels = problem(torch.float16)
    found = {}
    for name, dtype in (("exact", torch.float64), ("eager", torch.float16), ("compiled", torch.float16)):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        function = compile(loss_of)[0] if name == "compiled" else loss_of
        config = CCEConfig("triton" if dtype == torch.float16 else "auto", gradient_filter=None)
        (function(h, w * 2e-4, labels, None, config) * 4096).backward()
        found[name] = h.grad
    assert_accurate(found["compiled"], found["eager"], found["exact"], "hidden")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_summed_losses_and_a_retained_graph(dtype: torch.dtype, filtered: Any) -> None:
    compiled, _ = compile(loss_of)
    state = FilterState()
    hidden, weight, labels = problem(dtype)
    losses = [compiled(h, weight, y, state, FILTERED) for h, y in zip(hidden.chunk(2), labels.chunk(2), strict=True)]
    total = losses[0] + 2 * losses[1]
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(total, (hidden, weight))
    state = FilterState()
    parts = []
    for h, y, factor in zip(hidden.chunk(2), labels.chunk(2), (1, 2), strict=True):
        parts.append(torch.autograd.grad(factor * loss_of(h, weight, y, state, FILTERED), (hidden, weight)))
    for name, a, b, x, y in zip(("hidden", "weight"), first, again, *parts, strict=True):
        assert torch.equal(a, b)
        assert_accurate(a, x + y, x.double() + y.double(), name, dtype)


def test_a_checkpoint_in_the_graph(filtered: Any) -> None:
    def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor, state: FilterState) -> Tensor:
        return checkpoint(lambda h, w: loss_of(2 * h, w, labels, state, FILTERED), hidden, weight, use_reentrant=False)

    hidden, weight, labels = problem()
    expected = torch.autograd.grad(loss_of(2 * hidden, weight, labels, FilterState(), FILTERED), (hidden, weight))
    state = FilterState()
    actual = torch.autograd.grad(compile(checkpointed)[0](hidden, weight, labels, state), (hidden, weight))
    assert_all_accurate(actual, expected, expected)
    assert state.stats()["kept"] < 1


def test_a_state_is_found_by_its_handle_until_it_is_deleted() -> None:
    state = FilterState()
    handle = state.handle
    assert FilterState.of(handle) is state and FilterState.of(0) is None
    del state
    gc.collect()
    assert FilterState.of(handle) is None
    # Without a state nothing measures the error that "auto" promises, so nothing is dropped.
    hidden, weight, labels = problem(torch.bfloat16)
    numbers = (None, 0.0, handle, False, -100, 1.0, 0.0, 0.0, 0.0, [True, True, False], 1 << 28, "triton", -1.0, True)
    gradients = torch.ops.hf_cce.cross_entropy(hidden, weight, None, labels, *numbers)[3:5]
    loss_of(hidden, weight, labels, None, CCEConfig("triton")).backward()
    assert torch.equal(gradients[0], hidden.grad) and torch.equal(gradients[1], weight.grad)


def test_unneeded_gradients_are_not_computed(filtered: Any) -> None:
    hidden, weight, labels = problem()
    compiled, _ = compile(loss_of)
    with torch.no_grad():
        compiled(hidden, weight, labels, FilterState(), FILTERED)
    compiled(hidden.detach(), weight.detach(), labels, FilterState(), FILTERED)
    assert set(filtered) == {"exact"}
    state = FilterState()
    compiled(hidden, weight.detach(), labels, state, FILTERED).backward()
    assert filtered["filtered gradients"] == 1 and hidden.grad is not None and weight.grad is None


def test_the_operator_is_excluded_from_cuda_graphs() -> None:
    """A replay would repeat the decisions of one step."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.hf_cce.cross_entropy.default.tags


def test_patched_models_count_as_in_eager_code_and_have_their_own_state(filtered: Any) -> None:
    """One code object means one chain of graphs. A copy continues its model's counts but has its own filter state."""
    model = apply_cce(tiny_llama(), implementation="triton", gradient_filter=0.05)
    eager, inputs = copy.deepcopy(model), {**batch(), "use_cache": False}
    run, counter = compile(lambda model: model(**inputs).loss)
    run(model).backward()
    other = copy.deepcopy(model)
    for each in (other, other, model, other):
        run(each).backward()
    assert (model.cce_stats()["calls"], other.cce_stats()["calls"]) == (2, 4)
    assert patch_of(model).filter_state._steps == 2 and patch_of(other).filter_state._steps == 3
    assert counter.frame_count <= 4 and filtered["filtered gradients"] == 5
    for _ in range(2):
        eager(**inputs).loss.backward()
    expected, found = ({name: p.grad for name, p in each.named_parameters()} for each in (eager, model))
    assert_all_accurate(found, expected, expected)
    expected, counted = eager.cce_stats(), model.cce_stats()
    assert set(counted) == COUNTS | KEYS and counted["traced"] and 0 < counted["kept"] < 1
    assert {key: counted[key] for key in COUNTS - {"traced"}} == {key: expected[key] for key in COUNTS - {"traced"}}
    for key in KEYS:
        assert relative_error(torch.tensor(counted[key] + 1), torch.tensor(expected[key] + 1)) < 1e-4
