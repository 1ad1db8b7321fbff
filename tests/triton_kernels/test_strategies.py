"""Tests for every strategy on the kernels: strided inputs, PyTorch's newer TF32 switch, no labels at all, and others."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from command import python
from forced_strategies import (
    DEVICE,
    PRODUCT_STRATEGIES,
    STRATEGIES,
    applies,
    backward_counter,
    check_strategy,
    config_for,
    count_strategies,
    dtype_for,
    force_strategy,
    forward_counter,
)
from losses import (
    PLAIN,
    Options,
    check_against_plain,
    fused_loss,
    loss_and_gradients,
    make_inputs,
    plain_loss,
    plain_step,
)
from numerics import assert_all_accurate, relative_error
from torch import Tensor

from hf_cce import CCEConfig, FilterState, TeacherHead, linear_cross_entropy, linear_divergence, linear_log_probs
from hf_cce import filter_state as state_module

pytest.importorskip("triton")

from hf_cce.kernels import exact as kernel_exact
from hf_cce.kernels.exp_cache import _dw_slabs
from hf_cce.kernels.exp_products import add_and_round, label_addends
from hf_cce.kernels.inputs import Shape


@pytest.mark.parametrize(
    ("strategy", "reduction"),
    [*((name, "mean") for name in STRATEGIES), *((name, "none") for name in ("exact", "one_block", "portable"))],
)
def test_strided_labels_and_inputs_with_leading_dimensions(strategy: str, reduction: str, forced: Counter[str]) -> None:
    options = Options(bias=strategy not in ("filtered", *PRODUCT_STRATEGIES), reduction=reduction)
    dtype = dtype_for(strategy)
    assert applies(strategy, options, dtype)
    inputs, labels = make_inputs(39, 40, 131, dtype, DEVICE, bias=options.bias)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
        labels = torch.stack([labels, labels.flip(0)], 1)[:, 0]
        if bias is not None:
            bias = torch.stack([bias, bias.flip(0)], 1)[:, 0]
            assert not bias.is_contiguous()
        assert not labels.is_contiguous()
        hidden, weight = (x.t().contiguous().t() for x in (hidden, weight))
        assert not hidden.is_contiguous() and not weight.is_contiguous()
        hidden, labels = (x.unflatten(0, (3, 13)).transpose(0, 1) for x in (hidden, labels))
        found = fused_loss(config_for(strategy))(hidden, weight, bias, labels, options)
        return found.t().flatten() if found.dim() else found

    check_against_plain(loss, inputs, labels, options, dtype, f"strided, {strategy}")
    counted = reduction == "mean" or strategy in ("one_block", "exact")
    assert forced[forward_counter(strategy)] == counted


@pytest.mark.parametrize("strategy", ["one_block", "exact", "portable"])
def test_the_sum_of_losses_has_one_upstream_gradient_for_all_tokens(strategy: str, forced: Counter[str]) -> None:
    """Autograd expands it: its stride is 0."""
    (hidden, weight, _), labels = make_inputs(40, 72, 131, torch.float32, DEVICE)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    losses = linear_cross_entropy(*leaves, labels, reduction="none", config=config_for(strategy))
    expanded = torch.autograd.grad(losses.sum(), leaves)
    losses = linear_cross_entropy(*leaves, labels, reduction="none", config=config_for(strategy))
    assert all(map(torch.equal, expanded, torch.autograd.grad(losses, leaves, torch.ones_like(losses))))


@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("strategy", ["one_block", "exact", "portable"])
def test_losses_of_tokens_may_be_changed_in_place(strategy: str, ignored: str, forced: Counter[str]) -> None:
    """As those of ``F.cross_entropy``: code that weights tokens writes ``loss *= weights``."""
    options = Options(reduction="none")
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE, ignored=ignored)
    weights = torch.linspace(0.5, 2.0, 37, device=DEVICE)

    loss = fused_loss(config_for(strategy))
    check_against_plain(loss, inputs, labels, options, torch.float32, strategy, lambda losses: losses.mul_(weights))


@pytest.mark.parametrize(
    ("strategy", "dtype", "reduction"),
    [
        *((name, dtype_for(name), "mean") for name in (*STRATEGIES, "portable")),
        *((name, torch.float32, "none") for name in ("exact", "portable")),
        *(("one_block", dtype, name) for dtype in (torch.float16, torch.bfloat16) for name in ("mean", "none")),
    ],
    ids=str,
)
def test_a_second_backward_gives_the_same_gradients(
    strategy: str, dtype: torch.dtype, reduction: str, forced: Counter[str]
) -> None:
    """The first one uses up what the forward has kept, and overwrites 16-bit logits: others would not fit the saved logsumexp."""
    (hidden, weight, _), labels = make_inputs(37, 40, 131, dtype, DEVICE, logit_std=6.0)
    leaves, smooths = [hidden.requires_grad_(), weight.requires_grad_()], strategy in ("one_block", "exact", "portable")
    options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1 if smooths else 0.0}
    for scale in (1.0, 3.0):
        forced.clear()
        state, config = FilterState(), config_for(strategy)
        loss = scale * linear_cross_entropy(*leaves, labels, **options, config=config, filter_state=state).sum()
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        first = [x.clone() for x in found]
        found[1].mul_(100)  # in place, as gradient clipping does
        second = torch.autograd.grad(loss, leaves, retain_graph=True)
        baseline = exact = first
        if strategy == "filtered" and dtype == torch.bfloat16:  # the second pass is not filtered and rounds differently
            baseline, exact = (
                [scale * x for x in plain_step((hidden, weight, None), labels, Options(z_loss=0.1), each)[1:]]
                for each in (dtype, torch.float64)
            )
            assert_all_accurate(first, baseline, exact)
        assert_all_accurate(second, baseline, exact)
        assert strategy != "one_block" or all(map(torch.equal, second, first))
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(torch.autograd.grad(loss, leaves, create_graph=True)[0].square().sum(), leaves)
        passes = 2 if strategy == "one_block" else 1  # which computes again from the start
        if strategy != "portable" and reduction == "mean":
            assert forced[forward_counter(strategy)] == passes
            assert "recomputed" in backward_counter(strategy) or forced[backward_counter(strategy)] == passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "portable"])
def test_ignore_index_may_be_a_vocabulary_entry(strategy: str, dtype: torch.dtype, forced: Counter[str]) -> None:
    """Labels padded with the tokenizer's pad token give bit for bit the result of -100."""
    if not applies(strategy, PLAIN, dtype):
        pytest.skip("the strategy does not apply")
    n, d, v = 40, 40, 131
    if DEVICE == "cuda":
        n, d, v = 16 * n, 4 * d, 16 * v
    inputs, labels = make_inputs(n, d, v, dtype, DEVICE)
    labels[labels == 3] = 4
    usual, padded = (
        loss_and_gradients(fused_loss(config_for(strategy)), inputs, given, Options(ignore_index=index), dtype)
        for given, index in ((labels, -100), (labels.where(labels >= 0, 3), 3))
    )
    for name, value in usual.items():
        assert torch.equal(value, padded[name]), name
    assert strategy == "portable" or forced[forward_counter(strategy)] == 2


@pytest.mark.parametrize("same", [0, 100], ids=["all different", "many the same"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_entry_of_the_vocabulary_as_a_label(strategy: str, same: int, forced: Counter[str]) -> None:
    dtype = dtype_for(strategy)
    inputs, _ = make_inputs(131 + same, 40, 131, dtype, DEVICE)
    labels = torch.randperm(131, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = torch.cat([labels, labels.new_full((same,), 5)])  # more than finish_weight adds at a time
    check_strategy(strategy, inputs, labels, PLAIN, dtype)
    assert forced[forward_counter(strategy)] == 1


def scaled_gradients(strategy: str, inputs: tuple[Tensor, ...], labels: Tensor, factor: float = 1.0) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = linear_cross_entropy(*leaves, labels, config=config_for(strategy), filter_state=FilterState())
    return list(torch.autograd.grad(factor * loss, leaves))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "portable"])
def test_half_the_loss_has_half_the_gradients(strategy: str, forced: Counter[str]) -> None:
    (hidden, weight, _), labels = make_inputs(40, 72, 131, dtype_for(strategy), DEVICE)
    wholes, halves = (scaled_gradients(strategy, (hidden, weight), labels, by) for by in (1.0, 0.5))
    assert all(whole.any() and torch.equal(0.5 * whole, half) for whole, half in zip(wholes, halves, strict=True))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "portable"])
def test_ignored_tokens_may_have_logits_beyond_the_range_of_exp(strategy: str, forced: Counter[str]) -> None:
    (hidden, weight, _), labels = make_inputs(40, 72, 131, dtype_for(strategy), DEVICE)
    ignored = (labels < 0)[:, None]
    quiet, loud = (
        scaled_gradients(strategy, (hidden.where(~ignored, by * hidden), weight), labels) for by in (0.0, 1e4)
    )
    assert all(gradient.any() for gradient in quiet)
    assert_all_accurate(loud, quiet, quiet, strategy)  # the filter may process tokens in another order


def test_ignored_tokens_are_not_added_to_a_label() -> None:
    """Thousands of them, with the label 3 here, would otherwise keep one program busy."""
    addends = label_addends(
        torch.empty(5, 8), torch.tensor([3, -100, 3, 5, 3]), torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0]), 99
    )
    assert addends.starts[:2].tolist() == [3, 5] and addends.entries[3:].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_labels_entries_are_added_with_twice_the_bits_of_the_hidden_states(dtype: torch.dtype) -> None:
    """Frequent labels, too, which take several blocks of tokens: the entries cancel most of their rows of the product."""
    torch.manual_seed(0)
    hidden = torch.randn(150, 40).to(DEVICE, dtype)
    labels, entries = torch.randint(20, (150,)).clamp(max=5).to(DEVICE), torch.randn(150).to(DEVICE)
    sums = torch.zeros(20, 40, dtype=torch.float64, device=DEVICE)
    sums.index_add_(0, labels, entries.double()[:, None] * hidden.double())
    product = sums.float() * -0.99
    found = torch.empty_like(product)
    add_and_round(product, 0, found, label_addends(hidden, labels, entries, 20))
    assert relative_error(found, sums + product.double()) < 4e-4


@pytest.mark.parametrize("far", [slice(20, 21), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["exp_cache", "partial_exp_cache", "token_groups", "exp_products"])
def test_values_beyond_the_range_of_the_cache_are_recomputed(
    strategy: str, dtype: torch.dtype, far: slice, forced: Counter[str]
) -> None:
    """exp(z − z_label) overflows for tokens whose label is 100 nats away; the blocks of their neighbors stay cached."""
    (hidden, weight, _), labels = make_inputs(70, 40, 131, dtype, DEVICE)
    weight[7] = weight[8] = 0.0
    weight[7, 0] = 10.0
    hidden[far, 0], labels[far] = 10.0, 8
    assert torch.nn.functional.cross_entropy(hidden[20] @ weight.t(), labels[20]) > 80
    check_strategy(strategy, (hidden, weight, None), labels, PLAIN, dtype, "far")
    assert forced[forward_counter(strategy)] == 1


def test_the_newer_switch_for_tf32() -> None:
    """Transformers sets it for TrainingArguments(tf32=True); reading the older setting then raises."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip(f"torch {torch.__version__} has no fp32_precision")
    program = f"""
import torch
from hf_cce import CCEConfig, linear_cross_entropy as f
for switch in (torch.backends, torch.backends.cuda.matmul):
    switch.fp32_precision = "tf32"
    h, w = (torch.randn(rows, 16, device="{DEVICE}").half() for rows in (20, 40))
    y = torch.arange(20, device="{DEVICE}")
    h.requires_grad_()
    for x in ((h, w), (h.float(), w.float())):
        f(*x, y, reduction="none", config=CCEConfig("triton")).sum().backward()
    assert h.grad.isfinite().all()
    switch.fp32_precision = "none"
"""
    python(program)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "portable"])
def test_the_default_dtype_changes_nothing(strategy: str, default: torch.dtype, forced: Counter[str]) -> None:
    """Users may set it while building a model and forget to reset it; the kernels' buffers must be float32 anyway."""
    config, found = config_for(strategy), []
    for dtype in (torch.float32, default):
        (hidden, weight, _), labels = make_inputs(40, 40, 131, dtype_for(strategy), DEVICE)
        leaves, state = [hidden.requires_grad_(), weight.requires_grad_()], FilterState()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            loss = linear_cross_entropy(*leaves, labels, config=config, filter_state=state)
            loss.backward()
            stats = linear_log_probs(hidden.detach(), weight.detach(), labels, entropy=True, config=config)
            more = [stats.log_probs, stats.entropy]
            if strategy in ("exact", "portable"):  # a divergence has no other strategies
                teacher = TeacherHead(hidden.detach(), -weight.detach())
                divergence = linear_divergence(*leaves, teacher, kind="jsd", config=config)
                more += [divergence, *torch.autograd.grad(divergence, leaves)]
        finally:
            torch.set_default_dtype(before)
        found.append([loss, *(x.grad for x in leaves), *more])
    for ours, usual in zip(*reversed(found), strict=True):
        assert ours.dtype == usual.dtype and torch.equal(ours, usual)


# On a CPU, bfloat16 matmuls on padded rows read the padding.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "portable"])
def test_no_labels_give_zero_gradients_even_divided_by_zero(
    strategy: str, dtype: torch.dtype, forced: Counter[str]
) -> None:
    """Trainer divides by a step's number of labels, even if it is zero: 0 · inf must not become NaN."""
    if not applies(strategy, PLAIN, dtype):
        pytest.skip(f"{strategy} is not for {dtype}")
    config = config_for(strategy)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, dtype, DEVICE, ignored="all")
    leaves, state = [hidden.requires_grad_(), weight.requires_grad_()], FilterState()
    total = linear_cross_entropy(*leaves, labels, reduction="sum", config=config, filter_state=state)
    (total / torch.zeros((), device=DEVICE)).backward()
    assert strategy == "portable" or forced[forward_counter(strategy)] == 1
    assert all(x.grad.count_nonzero() == 0 for x in leaves)  # NaN forced as nonzero


@pytest.mark.parametrize("upstream", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", ["filtered", "exact", "portable"])
def test_upstream_gradients_of_ignored_tokens_are_ignored(
    strategy: str, upstream: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CCEConfig("portable" if strategy == "portable" else "triton", gradient_filter=0.03)
    if strategy == "filtered":
        force_strategy(monkeypatch, strategy)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, dtype_for(strategy), DEVICE)
    found = []
    for value in (0.0, upstream):
        leaves, state = [x.detach().clone().requires_grad_() for x in (hidden, weight)], FilterState()
        upstream_grads = torch.where(labels < 0, value, torch.linspace(0.5, 1.5, 70, device=DEVICE))
        result = linear_log_probs(
            *leaves, labels, entropy=True, config=config, filter_state=state if strategy == "filtered" else None
        )
        torch.autograd.backward([result.log_probs], [upstream_grads])
        assert (strategy == "filtered") == bool(state.stats())
        found.append([x.grad for x in leaves])
    for quiet, loud in zip(*found, strict=True):
        assert quiet.any() and torch.equal(quiet, loud)


@pytest.mark.skipif(DEVICE == "cuda", reason="pretends to capture")
def test_tensors_read_by_a_cuda_graph_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    force_strategy(monkeypatch, "filtered")
    (hidden, weight, _), labels = make_inputs(37, 40, 131, torch.float32, DEVICE)
    leaves, state = [x.requires_grad_() for x in (hidden, weight)], FilterState()

    def step() -> None:
        linear_cross_entropy(*leaves, labels, config=config_for("filtered"), filter_state=state).backward()

    for _ in range(3):
        step()
    order, tau = state._vocabulary, state._tau
    monkeypatch.setattr(state_module, "_capturing", lambda: True)
    assert state.vocabulary(weight) is None and not state.should_measure()
    step()
    assert state._vocabulary is order and any(x is tau for x in state._pinned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "d", "v"), [(71, 67, 303), (40, 150, 203), (33, 600, 163), (450, 40, 410)])
def test_cached_columns_share_the_weight_gradient_buffer(
    n: int, d: int, v: int, dtype: torch.dtype, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some labels are in the columns cached in the dW buffer. One token's loss exceeds the limit; its values are recomputed."""
    force_strategy(monkeypatch, "partial_exp_cache")
    if DEVICE == "cuda":  # larger tiles need a larger dW buffer
        n, d, v = 16 * n, max(d, 320), 16 * v
    plans = spy(kernel_exact, "plan_cache")
    (hidden, weight, _), labels = make_inputs(n, d, v, dtype, DEVICE)
    labels[:2] = torch.tensor([8, v - 1])
    weight[7] = weight[8] = 0.0
    weight[7, 0] = hidden[20, 0] = 10.0
    labels[20] = 8
    options, inputs = Options(z_loss=1e-2), (hidden, weight, None)
    ours = fused_loss(config_for("partial_exp_cache"))
    found = [loss_and_gradients(ours, inputs, labels, options, dtype)]
    slabs = _dw_slabs(Shape(n, d, v, dtype))
    # All exponentials fit with one slab's rows of dW, or all rows with one slab's exponentials
    assert all(
        columns >= 32 * slabs and width > 0 and columns * max(n, d) + columns // slabs * min(n, d) < d * v
        for columns, width in (plan.result for plan in plans if plan.result)
    )
    if dtype == torch.float32:
        check_against_plain(ours, inputs, labels, options, dtype, f"shared buffer, {n}, {d}")
        return
    # With so few values, cached bfloat16 is less accurate than full logits, but not less than without sharing the buffer.
    exact = loss_and_gradients(plain_loss, inputs, labels, options, torch.float64)
    monkeypatch.setattr("hf_cce.kernels.exp_cache._dw_buffer_columns", lambda *_: 0)
    found.append(loss_and_gradients(ours, inputs, labels, options, dtype))
    assert plans[-1].result[0] == 0
    for name in ("hidden", "weight"):
        shared, separate = (relative_error(each[name], exact[name]) for each in found)
        assert shared < 1.1 * separate, name


def above_gradients(leaves: list[Tensor], loss: Callable[[], Tensor]) -> int:
    """Return the peak GPU memory of a step, excluding the gradients of ``leaves``."""
    for _ in range(2):  # the first step compiles and allocates cuBLAS's workspace
        leaves[0].grad = leaves[1].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss().backward()
    return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "d", "v"), [(2048, 576, 49_152), (600, 896, 151_937)])
def test_memory_of_16_bit_logits_on_the_gpu(
    n: int, d: int, v: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default thresholds, memory stays within the budget and below that of PyTorch's full logits."""
    counts = count_strategies(monkeypatch)
    (hidden, weight, _), labels = make_inputs(n, d, v, dtype, DEVICE)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    config = CCEConfig("triton", gradient_filter=None)
    ours = above_gradients(leaves, lambda: linear_cross_entropy(*leaves, labels, config=config))
    assert counts["one_block"] == counts["one_block gradients"] == 2
    assert 2 * n * v < ours <= 2 * n * (v + 15) + 4 * n * d * (v % 8 > 0) + 64 * n <= config.workspace_bytes(n)
    assert ours <= above_gradients(leaves, lambda: plain_loss(*leaves, None, labels, PLAIN))
