"""A step stays within its memory budget, counted on meta tensors with the plan of a Hopper GPU."""

from itertools import product

import pytest
import torch
from forced_strategies import use_hopper_plans
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peak_memory import PeakMemory

from hf_cce import FilterState, kernels
from hf_cce.config import MIB
from hf_cce.spec import Divisor, Inputs, LossSpec
from hf_cce.strategies import Exact, Filtered, Strategy

pytest.importorskip("triton")

from hf_cce.kernels.exp_cache import plan_cache
from hf_cce.kernels.inputs import Shape
from hf_cce.kernels.token_groups import group_size


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    use_hopper_plans(monkeypatch)


def check(filtered: bool, n: int, d: int, v: int, dtype: torch.dtype, spec: LossSpec) -> str:
    """Return which strategy saved something in the forward pass, or ""; fail if a step takes more than the budget.

    Inputs, gradients and a few [N] vectors are not counted.
    """
    hidden, weight = (torch.empty(rows, d, dtype=dtype, device="meta") for rows in (n, v))
    labels, scalar = torch.empty(n, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    strategy: Strategy = Exact(spec, Divisor(), True)
    if filtered:
        strategy = Filtered(spec, Divisor(), FilterState(), scalar, True, strategy)
    x = Inputs(hidden, weight, None, labels)
    with PeakMemory({t.untyped_storage()._cdata for t in (hidden, weight, labels, scalar)}) as memory:
        outputs, saved = strategy.forward(x)
        if strategy.cache is None:
            return ""
        grouped = isinstance(strategy.cache, kernels.PrecomputedGradients)
        gradients = strategy.backward(x, saved, [torch.empty_like(loss) for loss in outputs], spec.needs)
        assert gradients is not None
        own = sum(grad.numel() * grad.itemsize for grad in gradients if grad is not None)
        assert own == dtype.itemsize * d * (n + v * spec.needs[1])
    assert memory.peak - own <= spec.memory_budget + 64 * n, f"{memory.peak - own:,} of {spec.memory_budget:,}"
    return "filtered" if filtered else "groups of tokens" if grouped else "cache"


def spec_of(budget: int, frozen: bool, softcap: float = 0.0) -> LossSpec:
    return LossSpec(-100, 1.0, softcap, needs=(True, not frozen, False), memory_budget=budget)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "d", "v"),
    [
        (8192, 1024, 49_152), (4096, 4096, 128_256), (8192, 896, 151_937), (16_384, 2048, 128_256), (8192, 768, 128_256),
        (32_768, 896, 151_936), (32_768, 4096, 32_000),
    ],
)  # fmt: skip
def test_saved_tensors_without_a_filter_fit_the_budget(
    n: int, d: int, v: int, dtype: torch.dtype, frozen: bool
) -> None:
    found = {mib: check(False, n, d, v, dtype, spec_of(mib * MIB, frozen)) for mib in (256, 512, 1024, 1280, 2048)}
    assert any(found.values())
    for mib in (512, 1024, 1280, 2048):
        # Groups are used if not all exponentials fit. For a trained head, they must be large enough.
        all_fit = dtype.itemsize * n * v < 0.98 * mib * MIB
        if frozen:
            assert found[mib] == ("cache" if all_fit else "groups of tokens"), mib
        elif dtype == torch.bfloat16 and mib == 1280:
            assert found[mib] == ("cache" if all_fit or (n, d) == (4096, 4096) else "groups of tokens")


def test_the_cache_is_not_wider_than_the_vocabulary() -> None:
    shape = Shape(2000, 64, 157, torch.bfloat16)
    plans = [plan_cache(shape, 5, 32, 32, False, budget) for budget in range(900_000, 1_400_000, 10_000)]
    assert {sum(plan) for plan in plans if plan} == {128, 157}


@given(
    n=st.integers(64, 40_000), d=st.integers(64, 8192), v=st.integers(8000, 300_000), budget=st.integers(MIB, 1 << 32)
)  # fmt: skip
@example(n=39_088, d=8192, v=36_000, budget=2918 * MIB)  # the sum of dh takes more than the buffer of dW saves
def test_the_buffer_of_dw_costs_neither_columns_nor_memory(n: int, d: int, v: int, budget: int) -> None:
    shape, tiles = Shape(n, d, v, torch.bfloat16), -(-v // 256)
    plan, scratch_only = (plan_cache(shape, tiles, 256, 512, allowed, budget) for allowed in (True, False))
    assert (plan is None) == (scratch_only is None)
    if plan is None or scratch_only is None:
        return
    assert sum(plan) >= sum(scratch_only)
    if scratch_only.in_scratch == v and plan.in_dw:
        assert 2 * plan.in_scratch + 4 * d <= 2 * v


def test_groups_need_dh_and_no_bias_gradient() -> None:
    shape, yes, no = Shape(8192, 1024, 49_152, torch.bfloat16), True, False
    sizes = {needs: group_size(shape, 384, 128, needs, 0, 1280 * MIB) for needs in product((yes, no), repeat=3)}
    assert {needs for needs, size in sizes.items() if size} == {(yes, yes, no), (yes, no, no)}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mib", [32, 64, 96, 128, 256, 1024])
def test_the_filter_fits_the_budget_at_real_sizes(mib: int, frozen: bool) -> None:
    found = [
        check(True, n, d, v, torch.bfloat16, spec_of(mib * MIB, frozen))
        for n, d, v in (
            (2048, 896, 151936), (8192, 768, 128256), (8192, 1024, 49152), (4096, 4096, 32000), (16384, 2048, 151936),
            (8192, 4096, 128256),
        )
    ]  # fmt: skip
    assert any(found) or mib < 64


@example(n=6982, d=1, v=93_586, budget=213_066_469, softcap=5.0, frozen=False)  # the error estimate is the peak
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 40_000), d=st.integers(1, 8192), v=st.integers(1, 300_000), budget=st.integers(MIB, 1 << 31),
    softcap=st.sampled_from([0.0, 5.0]), frozen=st.booleans(),
)  # fmt: skip
def test_the_filter_fits_any_budget(n: int, d: int, v: int, budget: int, softcap: float, frozen: bool) -> None:
    check(True, n, d, v, torch.bfloat16, spec_of(budget, frozen, softcap))
