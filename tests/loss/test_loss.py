"""linear_cross_entropy and linear_log_probs on the CPU: values, gradients, edges, errors, memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command import python
from forced_strategies import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import (
    EVERYTHING,
    OPTIONS,
    PLAIN,
    SMALL_BUDGET,
    Options,
    check_against_plain,
    full_logits,
    fused_loss,
    loss_and_gradients,
    make_inputs,
    plain_loss,
)
from numerics import assert_accurate, assert_all_accurate
from peak_memory import PeakMemory
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_cce import CCEConfig, dispatch, fallback, linear_cross_entropy, linear_log_probs, ops

# Every N, D and V that the project promises, though not every combination.
SHAPES = [(1, 64, 151936), (7, 64, 128256), (128, 64, 50257), (7, 576, 49152), (128, 64, 32000), (1000, 1000, 99)]
SHAPES += [(128, 2304, 99), (40, 1, 99)]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],  # CPUs multiply float16 slowly
    ids=str,
)
@pytest.mark.parametrize(("n", "d", "v"), SHAPES)
def test_real_sizes(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    inputs, labels = make_inputs(n, d, v, dtype)
    check_against_plain(fused_loss(), inputs, labels, PLAIN, dtype, f"{n}×{d}×{v}")


@pytest.mark.parametrize("config", [None, SMALL_BUDGET], ids=["default", "1 MiB"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_options(options: Options, ignored: str, dtype: torch.dtype, config: CCEConfig | None) -> None:
    inputs, labels = make_inputs(300, 96, 3001, dtype, bias=options.bias, ignored=ignored)
    check_against_plain(fused_loss(config), inputs, labels, options, dtype, f"{options} {ignored}")


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 40),
    # A gradient of fewer terms may be a difference of nearly equal numbers; test_real_sizes and test_property.py have such sizes.
    d=st.integers(2, 40),
    v=st.integers(3, 80),
    options=st.builds(
        Options, st.sampled_from([1.0, 0.3]), st.sampled_from([None, 3.0]), st.booleans(), st.sampled_from([0.0, 0.2]),
        st.sampled_from([0.0, 0.05]), st.sampled_from(["mean", "sum", "none"]),
    ),
    ignored=st.sampled_from(["none", "some", "all"]),
)  # fmt: skip
def test_any_shape(n: int, d: int, v: int, options: Options, ignored: str) -> None:
    # Flat logits: if all p are near 1, p − 1 is mostly rounding error in any implementation.
    inputs, labels = make_inputs(n, d, v, torch.float64, bias=options.bias, ignored=ignored, logit_std=0.3)
    check_against_plain(fused_loss(), inputs, labels, options, torch.float64, str((n, d, v, options)))


def test_shift_matches_transformers() -> None:
    (hidden, weight, _), labels = make_inputs(48, 32, 99, torch.float64)
    hidden, labels = hidden.view(4, 12, 32), labels.view(4, 12)
    logits = hidden @ weight.t()
    for items in (None, 17, torch.tensor(17.0)):
        expected = ForCausalLMLoss(logits, labels, 99, num_items_in_batch=items)
        actual = linear_cross_entropy(hidden, weight, labels, shift=True, num_items_in_batch=items)
        baseline = expected.double()  # Transformers computes the loss in float32
        assert_accurate(actual.float(), baseline.float(), actual, f"num_items_in_batch={items}", torch.float32)
        assert_accurate(expected, expected, actual, f"num_items_in_batch={items}", torch.float32)


def test_no_grad_allocates_no_gradients() -> None:
    (hidden, weight, _), labels = make_inputs(200, 64, 3001, torch.float32)
    peaks = []
    for needed in (False, True):
        leaves = [x.detach().requires_grad_(needed) for x in (hidden, weight)]
        with torch.no_grad(), PeakMemory({x.untyped_storage()._cdata for x in (hidden, weight, labels)}) as memory:
            linear_cross_entropy(*leaves, labels)
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_shift_with_other_label_types_and_ignore_index(dtype: torch.dtype) -> None:
    (hidden, weight, _), labels = make_inputs(48, 32, 99, torch.float64, ignored="none")
    labels, leaves = labels.view(4, 12).to(dtype), [hidden.view(4, 12, 32).requires_grad_(), weight.requires_grad_()]
    for ignore_index in (-100, 3):
        loss = linear_cross_entropy(*leaves, labels, shift=True, ignore_index=ignore_index)
        logits = (leaves[0][:, :-1] @ weight.t()).flatten(0, 1)
        expected = F.cross_entropy(logits, labels[:, 1:].long().flatten(), ignore_index=ignore_index)
        found, exact = ([x, *torch.autograd.grad(x, leaves)] for x in (loss, expected))
        assert_all_accurate(found, exact, exact, str(ignore_index))


@pytest.mark.parametrize("implementation", ["portable", "triton"])
def test_divisors(implementation: str, device: str) -> None:
    (hidden, weight, _), labels = make_inputs(40, 64, 99, torch.float32, device)
    total, config = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum"), CCEConfig(implementation)
    for items in (7, torch.tensor(7), torch.tensor([7.0]), 0.5, torch.tensor([0.5])):  # tensor parallelism divides it
        expected, given = total / float(items), items.to(device) if isinstance(items, torch.Tensor) else items
        loss = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=given, config=config)
        assert loss.shape == ()
        assert_accurate(loss, expected, expected, f"num_items_in_batch={items}")
    none_counts = torch.zeros((), device=device)
    assert linear_cross_entropy(hidden, weight, labels, num_items_in_batch=none_counts, config=config) == 0


@pytest.mark.parametrize("implementation", ["portable", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_and_empty_give_zero(reduction: str, implementation: str, device: str) -> None:
    for n, items in ((5, None), (0, None), (3, 0 if reduction == "mean" else None)):
        hidden, weight = (torch.randn(rows, 8, device=device, requires_grad=True) for rows in (n, 11))
        loss = linear_cross_entropy(
            hidden, weight, torch.full((n,), -100, device=device), reduction=reduction, num_items_in_batch=items,
            config=CCEConfig(implementation),
        )  # fmt: skip
        loss.sum().backward()
        assert not loss.any() and not hidden.grad.any() and not weight.grad.any() and hidden.grad.shape == (n, 8)
    rows, labels = torch.randn(3, 1, 8, device=device), torch.zeros(3, 1, dtype=torch.long, device=device)
    options = {"reduction": reduction, "config": CCEConfig(implementation)}
    assert not linear_cross_entropy(rows, weight, labels, shift=True, **options).any()  # no position has a next one


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream_gradients_raise(reduction: str) -> None:
    inputs, labels = make_inputs(9, 8, 11, torch.float32)
    leaves = [x.requires_grad_() for x in inputs[:2]]
    loss = linear_cross_entropy(*leaves, labels, reduction=reduction)
    with pytest.raises(RuntimeError, match=r"Batching rule|vmap"):
        torch.autograd.grad(loss, leaves, torch.randn(3, *loss.shape), is_grads_batched=True)


def test_frozen_inputs_get_no_gradient_work(spy: Any) -> None:
    (hidden, weight, _), labels = make_inputs(40, 16, 99, torch.float32)
    hidden.requires_grad_()
    products = spy(torch.Tensor, "addmm_")
    linear_cross_entropy(hidden, weight, labels).backward()
    assert not products and weight.grad is None
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert [call.result.shape for call in products] == [weight.shape]


def test_autocast_casts_like_a_matmul() -> None:
    inputs, labels = make_inputs(100, 64, 999, torch.float32, bias=True)

    def run(loss: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        def under_autocast(*given: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(*given)

        return loss_and_gradients(under_autocast, inputs, labels, PLAIN, torch.float32)

    exact = loss_and_gradients(plain_loss, inputs, labels, PLAIN, torch.float64)
    actual, baseline = run(fused_loss()), run(plain_loss)
    for name, value in actual.items():
        assert value.dtype == torch.float32
        assert_accurate(value, baseline[name], exact[name], name, torch.bfloat16)


def test_autocast_leaves_float64_alone() -> None:
    (hidden, weight, _), labels = make_inputs(9, 8, 11, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_cross_entropy(hidden, weight, labels)
    assert inside == linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("half", [0, 0.5])
def test_a_changing_number_of_items_does_not_recompile(half: float) -> None:
    (hidden, weight, _), labels = make_inputs(9, 8, 11, torch.float64)

    def loss(items: float) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels, num_items_in_batch=items)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for items in range(11, 20):
        expected = loss(items + half)
        assert_accurate(compiled(items + half), expected, expected, "loss")
    assert counter.frame_count <= 2  # one for the first value, one for all others


@pytest.mark.slow
def test_compiled_gradients_of_column_major_hidden_states() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs, labels = make_inputs(30, 16, 99, dtype)
        turned = inputs[0].t().contiguous().t().requires_grad_()
        torch.compile(linear_cross_entropy, fullgraph=True)(turned, inputs[1], labels).backward()
        exact, baseline = (
            torch.autograd.grad(plain_loss(hidden, inputs[1].to(hidden.dtype), None, labels, PLAIN), hidden)[0]
            for hidden in (inputs[0].double().requires_grad_(), inputs[0].clone().requires_grad_())
        )
        assert_accurate(turned.grad, baseline, exact, "hidden", dtype)


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING, Options(reduction="none")], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(options: Options, backend: str) -> None:
    inputs, labels = make_inputs(40, 16, 99, torch.float32, bias=options.bias)
    loss = fused_loss()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected = loss_and_gradients(loss, inputs, labels, options, torch.float32)
    actual = loss_and_gradients(compiled, inputs, labels, options, torch.float32)
    exact = loss_and_gradients(plain_loss, inputs, labels, options, torch.float64)
    assert_all_accurate(actual, expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_pass_opcheck(dtype: torch.dtype) -> None:
    inputs, labels = make_inputs(20, 16, 50, dtype, bias=True)
    given = (*(x.requires_grad_() for x in inputs), labels)
    loss, stats = torch.ops.hf_cce.cross_entropy.default, torch.ops.hf_cce.logit_stats.default
    options = (-100, 0.5, 3.0, 0.1, 0.1, [True] * 3, 1 << 20, "auto", None, True)
    for divisor in ((None, 0.0), (torch.tensor(7), 0.0), (None, 7.0)):
        torch.library.opcheck(loss, (*given, *divisor, 0, False, *options))
    for requested in ((True,) * 4, (False,) * 4, (True, False, False, False), (False, True, False, False)):
        torch.library.opcheck(stats, (*given, *requested, *options))


def _on(device: str, x: torch.Tensor) -> torch.Tensor:
    """Move ``x`` to ``device`` with the same strides. ``Tensor.to`` would make overlapping elements contiguous."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("implementation", ["portable", "triton"])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_gradient_strides_match_the_fake_implementation(ignored: str, implementation: str, device: str) -> None:
    """Inductor relies on the strides of the fake implementation: contiguous rows, whatever the inputs' strides."""
    (hidden, weight, _), labels = make_inputs(20, 24, 50, torch.float32, ignored=ignored)
    turned = [x.t().contiguous().t() for x in (hidden, weight)]
    overlapping = [torch.randn(100).unfold(0, 24, 1)[:n] for n in (20, 50)]
    for pair in (turned, overlapping):
        tensors = (torch.rand(20), torch.rand(20), None, None, *pair, None, labels, torch.ones(20), None)
        moved = [None if x is None else _on(device, x) for x in tensors]
        given = (*moved, -100, 1.0, 0.0, 0.0, 0.0, [True, True, False], 1 << 20, implementation, None, False)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
            fake = torch.ops.hf_cce.logit_stats_backward(*fakes)
        real = torch.ops.hf_cce.logit_stats_backward(*given)
        assert [x.stride() for x in real] == [x.stride() for x in fake]


WAYS = ("stored", "slabs", "full")


@pytest.mark.parametrize("options", [PLAIN, Options(0.7, 5.0, True)], ids=str)
@pytest.mark.parametrize(
    ("way", "dtype", "on"),
    [
        ("triton", torch.float32, DEVICE),
        *((way, d, "cpu") for way in WAYS for d in (torch.float64, torch.float32, torch.bfloat16)),
        *(
            pytest.param(way, d, "cuda", marks=pytest.mark.gpu)
            for way in WAYS
            for d in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
def test_log_probs_and_statistics(
    options: Options, way: str, dtype: torch.dtype, on: str, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits kept in several chunks, recomputed in slabs, or full. Upstream gradients of sums have zero strides."""
    n, v = (70, 131) if way == "triton" else (600, 999)
    inputs, labels = make_inputs(n, 64, v, dtype, on, bias=options.bias)
    config = CCEConfig("triton" if way == "triton" else "portable", 1 << 20 if way == "slabs" else "auto")
    monkeypatch.setattr(dispatch, "prefers_full_logits", lambda p, spec: way == "full" and p.dtype == dtype)
    monkeypatch.setattr(fallback, "_chunk_bytes", lambda z, spec, least: 1 << 18)
    monkeypatch.setattr(fallback, "tokens_per_block", lambda *_: 32)
    stored = spy(fallback, "logit_stats")
    valid = labels != -100
    largest = full_logits(*(None if x is None else x.double() for x in inputs), options).argmax(1)
    labels[::2] = labels[::2].where(~valid[::2], largest[::2])

    def plain(hidden, weight, bias):  # type: ignore[no-untyped-def]
        z = full_logits(hidden, weight, bias, options)
        z = z if dtype == torch.float64 or z.dtype == torch.float64 else z.float()
        log_p = z.log_softmax(-1)
        at_label = log_p.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        p = log_p.exp()
        fields = (at_label, -(p * log_p).sum(1), p.square().sum(1).log(), z.mean(1), z.logsumexp(1))
        return [torch.where(valid, x, 0) for x in fields], (z.argmax(1) == labels) & valid

    def fused(hidden, weight, bias):  # type: ignore[no-untyped-def]
        out = linear_log_probs(
            hidden, weight, labels, bias=bias, logit_scale=options.logit_scale, softcap=options.softcap,
            entropy=True, log_sum_sq_probs=True, mean_logit=True, is_top1=True, logsumexp=True,
            config=config if hidden.dtype == dtype else None,
        )  # fmt: skip
        return [out.log_probs, out.entropy, out.log_sum_sq_probs, out.mean_logit, out.logsumexp], out.is_top1

    def run(function, as_dtype):  # type: ignore[no-untyped-def]
        leaves = [None if x is None else x.detach().to(as_dtype).requires_grad_() for x in inputs]
        fields, top1 = function(*leaves)
        # log Σ p² has no gradient
        sum(c * x.sum() for c, x in zip((1.0, 0.3, 0.0, 0.2, 0.1), fields, strict=True) if c).backward()
        return [*(x.detach() for x in fields), *(x.grad for x in leaves if x is not None)], top1

    exact, top1 = run(plain, torch.float64)
    baseline, _ = run(plain, dtype)
    actual, fused_top1 = run(fused, dtype)
    assert len(stored) == (way == "stored")
    assert_all_accurate(actual, baseline, exact, dtype=dtype)
    if way == "stored":  # without a gradient, in blocks of tokens that share one buffer
        with torch.no_grad():
            assert_all_accurate(fused(*inputs)[0], baseline[:5], exact[:5], "in blocks", dtype)
    assert fused_top1.dtype == torch.bool and top1.any()
    # bfloat16 rounding creates ties, and either winner is correct
    assert (fused_top1 != top1).sum() <= (0 if dtype != torch.bfloat16 else 2)


def test_import_calls_mkl_with_one_element_first() -> None:
    """Otherwise MKL may compute the process's first multi-threaded exponential with few correct bits."""
    program = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Spy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func, args[0].numel(), args[0].dtype) if func.overloadpacket.__name__ in ("exp", "log", "tanh") else None
        return func(*args, **(kwargs or {}))
with Spy():
    import hf_cce.loss
"""
    kinds = [
        f"aten.{name}.default 1 {dtype}" for dtype in (torch.float32, torch.float64) for name in ("exp", "log", "tanh")
    ]
    assert python(program).splitlines() == kinds


def test_unrequested_statistics_are_none() -> None:
    (hidden, weight, _), labels = make_inputs(5, 8, 11, torch.float32)
    out = linear_log_probs(hidden, weight, labels)
    assert out.log_probs.shape == labels.shape
    assert all(x is None for x in out[1:])


@pytest.mark.parametrize(
    ("implementation", "dtype", "n", "v"),
    [("portable", torch.float64, 3000, 999), ("triton", torch.float32, 40, 131)],  # several slabs, several tiles
    ids=str,
)
@pytest.mark.parametrize("kept", [slice(0, 20), slice(50, None)], ids=["the first", "the last"])
def test_bias_of_minus_infinity_masks_entries_of_loss_and_entropy(
    kept: slice, implementation: str, dtype: torch.dtype, n: int, v: int, device: str
) -> None:
    (hidden, weight, _), labels = make_inputs(n, 16, v, dtype, device, ignored="none")
    labels = labels % len(weight[kept]) + kept.start
    bias = torch.full((v,), float("-inf"), dtype=dtype, device=device)
    bias[kept] = 0.0

    def ours(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"bias": bias, "config": CCEConfig(implementation, 1 << 20)}
        loss = linear_cross_entropy(h, weight, labels, reduction="none", **options)
        return loss, linear_log_probs(h, weight, labels, entropy=True, **options).entropy

    def plain(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = h @ weight[kept].to(h.dtype).t()
        loss = F.cross_entropy(logits, labels - kept.start, reduction="none")
        return loss, torch.distributions.Categorical(logits=logits).entropy()

    def outcome(function: Callable[..., Any], dtype: torch.dtype) -> list[torch.Tensor]:
        h = hidden.to(dtype, copy=True).requires_grad_()
        loss, entropy = function(h)
        return [loss, entropy, *torch.autograd.grad(entropy.sum(), h)]

    exact, baseline, actual = outcome(plain, torch.float64), outcome(plain, dtype), outcome(ours, dtype)
    assert_all_accurate(actual, baseline, exact)


def test_nan_in_the_hidden_states_gives_a_nan_loss() -> None:
    (hidden, weight, _), labels = make_inputs(9, 8, 11, torch.float32, ignored="none")
    hidden[4, 2] = float("nan")
    assert linear_cross_entropy(hidden, weight, labels).isnan()


def test_explicit_kernels_never_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for dtype, why in ((torch.float32, "the tensors are on the CPU"), (torch.float64, r"tensors are torch\.float64")):
        (hidden, weight, _), labels = make_inputs(4, 8, 11, dtype)
        with pytest.raises(RuntimeError, match=why):
            linear_cross_entropy(hidden, weight, labels, config=CCEConfig(implementation="triton"))
    assert dispatch.choose_implementation(torch.device("cpu"), torch.float32) == "portable"


def test_error_suggests_installing_triton_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device, why in (("cpu", "NVIDIA GPU, but the tensors are on the CPU"), ("meta", "NVIDIA GPU, but .* on meta")):
        with pytest.raises(RuntimeError, match=why) as raised:
            dispatch.choose_implementation(torch.device(device), torch.float32, "triton")
        assert "install" not in str(raised.value) and "use implementation='auto'" in str(raised.value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="pip install triton"):
        dispatch.choose_implementation(torch.device("cpu"), torch.float32, "triton")


@pytest.mark.parametrize(
    ("dtype", "reduction"), [(torch.float32, "mean"), (torch.float32, "none"), (torch.bfloat16, "mean")]
)
def test_memory_stays_below_a_tenth_of_the_logits(dtype: torch.dtype, reduction: str) -> None:
    n, d, v = 2048, 64, 50257
    (hidden, weight, _), labels = make_inputs(n, d, v, dtype, ignored="none")
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    with PeakMemory({x.untyped_storage()._cdata for x in (*leaves, labels)}) as memory:
        linear_cross_entropy(*leaves, labels, reduction=reduction).sum().backward()
    gradients = sum(x.grad.numel() * x.grad.element_size() for x in leaves)
    vectors = 16 * 8 * n  # losses, labels and similar [N] vectors
    assert gradients < memory.peak < gradients + vectors + n * v * 4 / 10


@pytest.mark.parametrize("first", ["import hf_cce.ops", "import torch.utils.flop_counter"])
def test_the_flop_counter_counts_as_for_full_logits(first: str) -> None:
    """The counts do not depend on the import order."""
    code = f"""
import torch
{first}
from hf_cce import linear_cross_entropy, linear_log_probs
import hf_cce.ops
from torch.utils.flop_counter import FlopCounterMode
for dtype in (torch.float32, torch.bfloat16):  # gradients formed in the forward pass, and not
    for head in (True, False):
        hidden = torch.randn(6, 8, dtype=dtype, requires_grad=True)
        weight, labels = torch.randn(11, 8, dtype=dtype, requires_grad=head), torch.arange(6)
        for loss in (
            lambda: torch.nn.functional.cross_entropy(hidden @ weight.T, labels),
            lambda: linear_cross_entropy(hidden, weight, labels),
            lambda: linear_log_probs(hidden, weight, labels).log_probs.sum(),
        ):
            with FlopCounterMode(display=False) as counter:
                loss().backward()
            print(counter.get_total_flops(), (2 + head) * 2 * 6 * 8 * 11)
"""
    counted = [line.split() for line in python(code).splitlines()]
    assert len(counted) == 12 and all(actual == expected for actual, expected in counted)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loss", [linear_cross_entropy, linear_log_probs])
def test_strategies_get_aligned_labels(loss: Any, compiled: bool, spy: Any) -> None:
    """Triton compiles other kernels for addresses that are not a multiple of 16, as those of ``labels[:, 1:]``."""
    calls = spy(ops, "_forward")
    function = loss if loss is linear_cross_entropy else lambda *args: loss(*args).log_probs
    called = torch.compile(function, backend="eager") if compiled else function
    hidden, weight, labels = torch.randn(8, 4), torch.randn(16, 4), torch.randint(16, (9,))
    expected = called(hidden, weight, labels[1:].clone())
    assert torch.equal(called(hidden, weight, labels[1:]), expected)
    assert labels[1:].data_ptr() % 16 == 8
    assert [call.args[1].labels.data_ptr() % 16 for call in calls] == [0, 0]
    # Compiled calls may compute in another way than eager ones
    eager, exact = (
        function(hidden.to(dtype), weight.to(dtype), labels[1:]) for dtype in (torch.float32, torch.float64)
    )
    assert_accurate(expected, eager, exact, "compiled" if compiled else "eager")
