"""The filter on a GPU: no synchronization, repeatable bits, CUDA graphs, memory budgets, gradients as good as full logits'."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from forced_strategies import count_strategies, force_strategy, forward_counter, trained_like_inputs
from losses import PLAIN, Options, check_against_plain, fused_loss, plain_step
from numerics import assert_accurate, assert_all_accurate, relative_error
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy
from hf_cce import filter_state as state_module

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

SHAPE = (4096, 512, 32000)


def leaves_of(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in (hidden, weight)]


def gradients(
    leaves: list[Tensor], labels: Tensor, config: CCEConfig, state: FilterState | None = None
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(linear_cross_entropy(*leaves, labels, config=config, filter_state=state), leaves)


def make_config(strategy: str) -> CCEConfig:
    # full logits of SHAPE take 500 MiB
    return CCEConfig("triton", memory_budget=1 << 30, gradient_filter="auto" if strategy == "filtered" else None)


@pytest.fixture
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make five steps include two measurements, one check of the kept share, and making and using orders."""
    for name, value in (("MEASURE_EVERY", 3), ("READ_EVERY", 2), ("SORT_EVERY", 2)):
        monkeypatch.setattr(state_module, name, value)


@pytest.mark.usefixtures("short_periods")
@pytest.mark.parametrize("strategy", ["filtered", "exp_cache", "token_groups", "exact", "one_block", "full"])
def test_no_step_waits_for_the_device(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = trained_like_inputs(*SHAPE, torch.bfloat16, "cuda")
    if strategy == "full":  # a few tokens, computed by PyTorch
        hidden, labels, config, counts = hidden[:100], labels[:100], CCEConfig(), count_strategies(monkeypatch)
    else:
        config, counts = make_config(strategy), force_strategy(monkeypatch, strategy)
    leaves, state, items = leaves_of(hidden, weight), FilterState(), torch.tensor(500.0, device="cuda")

    def step() -> None:
        for options in ({}, {"num_items_in_batch": items}, {"num_items_in_batch": items, "label_smoothing": 0.1}):
            linear_cross_entropy(*leaves, labels, **options, config=config, filter_state=state).backward()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if strategy not in ("full", "one_block"):  # only "exact" and "one_block" smooth labels
        counts.subtract({"exact": 9, "recomputed gradients": 9})
    if strategy == "filtered":  # the first steps only probe
        assert counts.pop("recomputed gradients") == 2
    expected = {"full": 0, "one_block": 27}.get(strategy, 18)
    assert counts[strategy] == expected and sum(counts.values()) == 2 * expected


@pytest.mark.parametrize("strategy", ["filtered", "exp_cache", "token_groups", "exact", "one_block"])
def test_two_streams_match_one_stream_bit_for_bit(
    strategy: str, monkeypatch: pytest.MonkeyPatch, forced: Counter[str]
) -> None:
    """Two heads run concurrently, each on its own stream. Then both switch streams at every step, with waits."""
    here = torch.cuda.current_stream()
    monkeypatch.setattr(state_module, "PAUSE_SHARE", 1.0)
    batches = [trained_like_inputs(*SHAPE, torch.bfloat16, "cuda", seed=seed) for seed in (0, 1)]
    sides = torch.cuda.Stream(), torch.cuda.Stream()

    def run(choose: Callable[[int, int], torch.cuda.Stream]) -> tuple[list[Tensor], list[dict[str, float]]]:
        heads = [(leaves_of(*batch[:2]), batch[2], FilterState()) for batch in batches]
        last, found = [here, here], []
        for step in range(4):
            for number, (leaves, labels, state) in enumerate(heads):
                stream = choose(number, step)
                stream.wait_stream(last[number])
                last[number] = stream
                with torch.cuda.stream(stream):
                    if step == 0:  # the device sleeps while the host enqueues, so that the streams overlap
                        torch.cuda._sleep(200_000_000)
                    loss = linear_cross_entropy(*leaves, labels, config=make_config(strategy), filter_state=state)
                    found += [loss.detach(), *torch.autograd.grad(loss, leaves)]
        torch.cuda.synchronize()
        return found, [state.stats() for *_, state in heads]

    alone, stats = run(lambda number, step: here)
    for choose in (lambda number, step: sides[number], lambda number, step: sides[(number + step) % 2]):
        found, stream_stats = run(choose)
        assert stream_stats == stats and all(map(torch.equal, found, alone))
    assert forced[strategy] == 24
    if strategy == "filtered":
        assert all(0 < each["kept"] < 1 for each in stats)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.usefixtures("short_periods")
def test_compiled_steps_equal_eager_code(mode: str | None, filtered: Counter[str]) -> None:
    """No synchronization under compile either. The operator stays out of CUDA graphs, so its state is updated at every step."""
    hidden, weight, labels = trained_like_inputs(*SHAPE, torch.bfloat16, "cuda")

    def loss_of(hidden: Tensor, weight: Tensor, state: FilterState) -> Tensor:
        config = make_config("filtered")
        return linear_cross_entropy(2 * hidden, weight, labels, config=config, filter_state=state)

    compiled = torch.compile(loss_of, fullgraph=True, mode=mode)
    leaves, states = leaves_of(hidden, weight), (FilterState(), FilterState())
    for number in range(9):
        eager_loss = loss_of(*leaves, states[0])
        eager = torch.autograd.grad(eager_loss, leaves)
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number > 5 and mode is None else "default")
        try:
            loss = compiled(*leaves, states[1])
            ours = torch.autograd.grad(loss, leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(loss, eager_loss) and all(map(torch.equal, ours, eager))
        assert states[0].stats() == states[1].stats()
    assert 0 < states[1].stats()["kept"] < 1 and filtered["filtered gradients"] == 18


@pytest.mark.parametrize("strategy", ["filtered", "exp_cache", "token_groups", "exact", "one_block"])
def test_a_cuda_graph_replays_a_step(strategy: str, forced: Counter[str]) -> None:
    hidden, weight, labels = trained_like_inputs(2048, 512, 16384, torch.bfloat16, "cuda")
    leaves, state, config = leaves_of(hidden, weight), FilterState(), make_config(strategy)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(leaves, labels, config, state)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    before = forced[strategy]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(*leaves, labels, config=config, filter_state=state)
        found = torch.autograd.grad(loss, leaves)
    assert forced[strategy] == before + 1
    graph.replay()
    fresh = FilterState()
    if strategy == "filtered":
        fresh.threshold("auto", hidden)
        fresh._probing = False
        fresh._tau = torch.tensor(state.stats()["tau"], dtype=torch.float32, device="cuda")
    expected_loss = linear_cross_entropy(*leaves, labels, config=config, filter_state=fresh)
    expected = torch.autograd.grad(expected_loss, leaves)
    assert_accurate(loss, expected_loss, expected_loss, "loss")
    assert_all_accurate(found, expected, expected)
    with torch.no_grad():
        new_hidden, _, new_labels = trained_like_inputs(2048, 512, 16384, torch.bfloat16, "cuda", seed=1)
        # The weight rows stay the same. The other seed's tokens predict other rows, so shift half of our own tokens instead.
        even = torch.arange(2048, device="cuda") % 2 == 0
        leaves[0].copy_(torch.where(even[:, None], hidden.roll(64, 0), new_hidden))
        labels.copy_(torch.where(even, labels.roll(64, 0), new_labels))
    graph.replay()
    (_, *exact), (_, *baseline) = (
        plain_step((*leaves, None), labels, PLAIN, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    assert_all_accurate(found, baseline, exact, "after new inputs")


OPTIONS = [*product(("auto", None), (64, 96, 256), (False, True))]  # gradient_filter, MiB, frozen


@pytest.mark.parametrize(
    ("d", "v", "gradient_filter", "budget", "frozen", "strategy"),
    [
        *((*sizes, *row, None) for sizes in ((1024, 49152), (768, 128256)) for row in OPTIONS),
        *((1024, 50257, None, mib, False, "exp_cache") for mib in (256, 320)),
        (1024, 50257, None, 1280, False, "exp_products"),
        (1024, 110001, None, 1280, False, "token_groups"),
    ],
)
def test_memory_budgets_hold(
    d: int, v: int, gradient_filter: Any, budget: int, frozen: bool, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers steps with and without an error measurement, and with and without sorting the vocabulary."""
    hidden, weight, labels = trained_like_inputs(n := 8192, d, v, torch.bfloat16, "cuda")
    leaves = leaves_of(hidden, weight)
    del hidden, weight
    leaves[1].requires_grad_(not frozen)
    config, state = CCEConfig(memory_budget=budget << 20, gradient_filter=gradient_filter), FilterState()
    monkeypatch.setattr(state_module, "PAUSE_SHARE", 1.0)
    counts = count_strategies(monkeypatch)
    gradient_bytes = sum(x.numel() * x.element_size() for x in leaves if x.requires_grad)

    def step() -> None:
        linear_cross_entropy(*leaves, labels, config=config, filter_state=state).backward()
        for x in leaves:
            x.grad = None

    step()  # compiles kernels and allocates cuBLAS's workspace
    state._steps = 0
    for number in range(6):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        step()
        # Requested, not allocated: the allocator rounds the size of a large tensor up by as much as 1 MiB.
        used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - gradient_bytes
        # Plus a few [N] vectors: losses, labels, upstream gradients.
        assert used <= (budget << 20) + 64 * n, f"step {number}: {used / 2**20:.1f} of {budget} MiB, {dict(counts)}"
    if gradient_filter is None:
        assert "filtered" not in counts and (strategy is None or counts[forward_counter(strategy)] == 7)
    elif budget == 256 and not frozen:
        assert counts["filtered"] == 7 and state.stats()["kept"] < 1


@pytest.mark.parametrize("options", [PLAIN, Options(0.7, 30.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    ("n", "d", "v"), [(4096, 512, 32000), (2048, 768, 50257), (1000, 1000, 49152), (3000, 576, 128256)]
)
def test_bfloat16_gradients_are_no_worse_than_eager(
    n: int, d: int, v: int, options: Options, filtered: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "PAUSE_SHARE", 1.0)
    hidden, weight, labels = trained_like_inputs(n, d, v, torch.bfloat16, "cuda")
    inputs, state = (hidden, weight, None), FilterState()
    loss = fused_loss(CCEConfig("triton"), state)
    for number in range(5):  # all tiles, then the first threshold, then thresholds moved by measurements
        check_against_plain(loss, inputs, labels, options, torch.bfloat16, f"{n}×{d}×{v}, step {number}")
        torch.cuda.synchronize()
    assert filtered["filtered"] == filtered["filtered gradients"] == 5
    assert 0 < state.stats()["kept"] < 1 and not state.probe_only()


@pytest.mark.usefixtures("filtered")
@pytest.mark.parametrize("gradient_filter", [0.005, 0.03])
def test_the_requested_error_is_met(gradient_filter: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error measured on a sample is close to the true and to the requested error, which is above that of rounding."""
    monkeypatch.setattr(state_module, "MEASURE_EVERY", 1)
    hidden, weight, labels = trained_like_inputs(*SHAPE, torch.bfloat16, "cuda")
    config = CCEConfig("triton", gradient_filter=gradient_filter)
    state, leaves = FilterState(), leaves_of(hidden, weight)
    for _ in range(8):
        found = gradients(leaves, labels, config, state)
    _, *exact = plain_step((hidden, weight, None), labels)
    stats = state.stats()
    errors = [relative_error(x, y) for x, y in zip(found, exact, strict=True)]
    assert errors[0] / 2 <= stats["error"] <= 2 * errors[0]
    assert errors[1] / 2 <= stats["weight_error"] <= 2 * errors[1]
    assert gradient_filter / 2 <= max(errors) <= 2 * gradient_filter


def test_the_filter_pauses_while_it_keeps_too_much(filtered: Counter[str]) -> None:
    """With the real asynchronous copy to the host: an untrained head keeps nearly everything; the filter pauses and resumes."""
    g = torch.Generator().manual_seed(0)
    n, d, v = 1024, 256, 8192
    hidden, weight = torch.randn(n, d, generator=g), torch.randn(v, d, generator=g) * (3 / d**0.5)
    labels = torch.randint(v, (n,), generator=g).cuda()
    leaves, state = leaves_of(hidden.cuda().bfloat16(), weight.cuda().bfloat16()), FilterState()
    config = CCEConfig("triton", gradient_filter=1e-6)
    seen: Counter[str] = Counter()
    for _ in range(state_module.PAUSE_STEPS + 3 * state_module.READ_EVERY):
        before = filtered["filtered"]
        gradients(leaves, labels, config, state)
        torch.cuda.synchronize()  # the kept share arrives by the next step
        seen["filtered" if filtered["filtered"] > before else "paused"] += 1
    assert state.stats()["kept"] > state_module.PAUSE_SHARE
    assert seen["paused"] >= state_module.PAUSE_STEPS and seen["filtered"] >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 3, 64, 300])
def test_few_tokens_with_the_default_config(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token counts on both sides of the limit for full logits."""
    torch.manual_seed(0)
    for v in (997, 128256):
        hidden, weight, labels = trained_like_inputs(n, 192, v, dtype, "cuda")
        labels[-1] = v - 1
        for options in (PLAIN, Options(0.7, 5.0, z_loss=1e-2, reduction="sum"), Options(label_smoothing=0.1)):
            inputs = (hidden, weight, torch.randn(v, device="cuda").to(dtype) if options.z_loss else None)
            check_against_plain(fused_loss(), inputs, labels, options, dtype, f"{n}×{v} {options}")
