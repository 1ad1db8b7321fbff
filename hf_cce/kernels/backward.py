"""Backward pass: for one slab of the vocabulary at a time, recompute the logits, write their gradient, and multiply it.

The rows of dW of a slab are written once, from float32 accumulators; dh is accumulated over slabs in float32. No atomics are
used, so results are bitwise reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.exp_cache import ExpCache, Factors, Slab, exp_factors, exp_to_dlogits_
from hf_cce.kernels.exp_products import pays_and_fits, write_hidden_gradient, write_weight_gradient
from hf_cce.kernels.inputs import GradInputs, LogitInputs, scale_and_softcap
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, make_plan, operand, slab_width, uses_hopper
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import exp, tile_gradient, tile_logits, tile_position
from hf_cce.matmul import ALIGNED, multiply_add
from hf_cce.spec import Inputs, LossSpec, TokenGrads


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "slab_start", "ignore_index"])
def _logit_gradient_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    labels,  # [N] int64
    lse,  # [N]
    entropy,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    grad_mean,  # [N]
    grad_entropy,  # [N]
    flags,  # [row blocks], or None: compute only row blocks with a nonzero flag
    out,  # [N, width], written: the gradient w.r.t. h Wᵀ + b
    slab_start,
    slab_width,
    out_stride,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_row_blocks, num_col_blocks = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(slab_width, BLOCK_N)
    if flags is not None:
        row_block, first, step = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        stop = tl.where(tl.load(flags + row_block) == 0, 0, num_col_blocks)
    else:
        row_block, first = tile_position(tl.program_id(0), num_row_blocks, num_col_blocks, GROUP_M)
        stop, step = first + 1, 1
    for col_block in range(first, stop, step):
        row, col = row_block * BLOCK_M, slab_start + col_block * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        in_rows = rows < num_tokens
        # Counted from the start of the slab, so that Triton can infer alignment and vectorize the stores.
        slab_cols = col_block * BLOCK_N + tl.arange(0, BLOCK_N)
        label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
        valid = label != ignore_index
        # Skip the product if all tokens of the tile are ignored.
        depth = tl.where(tl.sum(valid.to(tl.int32)) > 0, hidden_size, 0)
        # Loaded before the product, which hides the latency.
        row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
        g = tl.where(valid, tl.load(grad_lse + rows, mask=in_rows, other=0.0), 0.0)
        z = tile_logits(
            hidden, weight, bias, None, row, col, num_tokens, vocab_size, depth, hidden_stride, weight_stride,
            logit_scale, softcap, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gradient = tile_gradient(
            z, rows, cols, in_rows, col, label, valid, row_lse, g, entropy, grad_label, grad_mean, grad_entropy,
            vocab_size, logit_scale, softcap,
        )  # fmt: skip
        at = out + row.to(tl.int64) * out_stride
        here = tl.arange(0, BLOCK_M)[:, None] * out_stride + slab_cols[None, :]
        tl.store(
            at + here, gradient.to(out.dtype.element_ty), mask=in_rows[:, None] & (slab_cols < slab_width)[None, :]
        )


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "slab_start", "ignore_index"])
def _label_entries_kernel(
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    label_logit,  # [N]
    out,  # [N, width], written at the labels that are in the slab
    slab_start,
    slab_width,
    out_stride,
    num_tokens,
    ignore_index,
    logit_scale,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    column = label - slab_start
    hit = in_rows & (label != ignore_index) & (column >= 0) & (column < slab_width)
    p = exp(tl.load(label_logit + rows, mask=hit, other=0.0) - tl.load(lse + rows, mask=hit, other=0.0))
    gradient = p * tl.load(grad_lse + rows, mask=hit, other=0.0) + tl.load(grad_label + rows, mask=hit, other=0.0)
    at = out + rows.to(tl.int64) * out_stride + column
    tl.store(at, (gradient * logit_scale).to(out.dtype.element_ty), mask=hit)


def write_logit_gradient(
    slab: Slab,  # its values are written
    inputs: LogitInputs,
    grads: GradInputs,
    plan: Plan,
    flags: Tensor | None = None,  # [row blocks] int32: compute only row blocks with a nonzero flag
    label: LabelLogits | None = None,  # if given and flags is None, hf_cce.kernels.hopper computes the tiles
) -> None:
    """Write the gradient of the logits for the columns of a slab."""
    (start, stop, out), (n, d, v, _) = slab, inputs.shape
    hidden, weight, bias, labels, ignore_index, *_ = inputs
    if label is not None and flags is None:
        from hf_cce.kernels import hopper

        hopper.launch(inputs, label, start, stop, out, grads)
        _label_entries_kernel[(ceil_div(n, 256),)](
            labels, grads.lse, *grads.upstream[:2], label.logit, out, start, stop - start, out.stride(0), n,
            ignore_index, inputs.logit_scale, BLOCK=256, num_warps=4,
        )  # fmt: skip
        return
    rows, cols = ceil_div(n, plan.block_m), ceil_div(stop - start, plan.block_n)
    # Flags are hardly ever set, so a few programs look at them, instead of one for each tile.
    _logit_gradient_kernel[(rows * cols,) if flags is None else (rows, min(cols, 16))](
        operand(hidden, plan.block_m, plan), operand(weight, plan.block_n, plan), bias, labels, grads.lse, grads.entropy,
        *grads.upstream, flags, out, start, stop - start, out.stride(0),
        n, v, d, hidden.stride(0), weight.stride(0), ignore_index, *scale_and_softcap(inputs), **plan.constants(),
    )  # fmt: skip


def finish_exponentials(slab: Slab, label_logit: Tensor, inputs: LogitInputs, grads: GradInputs, plan: Plan) -> Factors:
    """Prepare the exponentials of all columns for hf_cce.kernels.exp_products, in place; return their factors.

    Zeros are written at the labels, and row blocks whose exponentials overflow become the gradient itself.
    """
    factors = exp_factors(label_logit, inputs, grads, plan.block_m, slab.values)
    write_logit_gradient(slab, inputs, grads, plan, factors.flags)
    return factors


@dataclass(frozen=True)
class _Backward:
    """Gradients of one loss from slabs of the logits' gradient, which are multiplied one after the other."""

    inputs: LogitInputs
    grads: GradInputs
    plan: Plan
    cache: ExpCache | None
    label: LabelLogits | None  # not None if hf_cce.kernels.hopper computes the tiles
    grad_hidden: Tensor  # [N, D], written; empty if not needed
    grad_weight: Tensor  # [V, D], likewise
    grad_bias: Tensor  # [V], likewise
    budget: int

    def run(self) -> None:
        """Compute all gradients in one pass over the logits if possible.

        The sum of dh over slabs needs a float32 accumulator. If one for all tokens would take more than half of the budget, a
        second pass computes the logits again for dh (a fifth product of full size), one group of tokens at a time.
        """
        (n, d, v, dtype), budget = self.inputs.shape, self.budget
        for_hidden, for_vocabulary = self.grad_hidden.numel() > 0, self.grad_weight.numel() + self.grad_bias.numel() > 0
        one_slab = slab_width(n, v, dtype.itemsize, self.plan.block_n, budget) == v
        accumulates = for_hidden and dtype.itemsize < 4 and not one_slab
        if self.cache is not None or not accumulates or 4 * n * d <= budget // 2:
            self.one_pass(slice(0, n), for_hidden, for_vocabulary)
            return
        if for_vocabulary:
            self.one_pass(slice(0, n), False, True)
        groups = ceil_div(4 * n * d, budget // 2)
        size = ceil_div(ceil_div(n, groups), self.plan.block_m) * self.plan.block_m
        for start in range(0, n, size):
            self.one_pass(slice(start, min(n, start + size)), True, False)

    def one_pass(self, rows: slice, for_hidden: bool, for_vocabulary: bool) -> None:
        """Compute gradients from the tokens ``rows``; dW and the bias gradient (``for_vocabulary``) require all tokens."""
        inputs, grads = self.inputs.tokens(rows), self.grads.map(itemgetter(rows))
        hidden, weight = inputs.hidden, inputs.weight
        label = None if self.label is None else self.label.tokens(rows, self.plan.block_m)
        slabs = self.slabs(inputs, for_hidden)
        multiple_products = len(slabs) > 1 or weight.shape[0] % ALIGNED > 0  # products are summed
        # Accumulate directly in grad_hidden if it is float32 or there is only one product.
        separate_accumulator = for_hidden and multiple_products and hidden.element_size() < 4
        total = torch.empty_like(hidden, dtype=torch.float32) if separate_accumulator else self.grad_hidden[rows]
        factors, cached_columns = None, 0
        if self.cache is not None:
            cached_columns = self.cache.slabs[-1].stop
            factors = exp_factors(self.cache.label.logit, inputs, grads, self.plan.block_m)
        for slab in slabs:
            # The gradient of a cached slab is computed from its exponentials, except in flagged row blocks.
            is_cached = slab.start < cached_columns
            flags = exp_to_dlogits_(slab, factors, inputs.labels) if is_cached and factors is not None else None
            write_logit_gradient(slab, inputs, grads, self.plan, flags, label)
            start, stop, values = slab
            gradient = values[:, : stop - start]  # [tokens, slab]
            if for_vocabulary and self.grad_weight.numel():
                multiply_add(self.grad_weight[start:stop], gradient.t(), hidden, first=True)
            if for_vocabulary and self.grad_bias.numel():
                self.grad_bias[start:stop] = gradient.sum(0, dtype=torch.float32)
            if for_hidden:
                multiply_add(total, gradient, weight[start:stop], first=start == 0)
        if separate_accumulator:
            self.grad_hidden[rows] = total

    def slabs(self, inputs: LogitInputs, for_hidden: bool) -> list[Slab]:
        """Return the cached slabs, then the slabs to compute, which share one buffer: that of the last cached slab, if any."""
        n, d, v, dtype = inputs.shape
        if self.cache is not None:
            cached = self.cache.slabs
            first, scratch = cached[-1].stop, cached[-1].values
        else:
            width = slab_width(n, v, dtype.itemsize, self.plan.block_n, self.budget)
            if (width < v or v % ALIGNED) and for_hidden and dtype.itemsize < 4:  # leave room for the accumulator
                width = slab_width(n, v, dtype.itemsize, self.plan.block_n, self.budget - 4 * n * d)
            cached, first, scratch = [], 0, empty_slab(inputs.hidden, n, width)
        width = scratch.shape[1]
        return [*cached, *(Slab(start, min(v, start + width), scratch) for start in range(first, v, width))]


def logit_stats_backward(
    x: Inputs, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads, cache: ExpCache | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as ``hf_cce.reference.logit_stats_backward``, from exponentials of the first columns if in the ``cache``.

    Scratch, within the budget: one slab [N, width] and, with more than one slab, the float32 accumulator of dh [N, D].
    """
    (need_hidden, need_weight, need_bias), inputs = spec.needs, LogitInputs.from_spec(x, spec)
    n, d, v, _ = inputs.shape
    grad_hidden = x.hidden.new_empty((n, d) if need_hidden else 0)  # contiguous, even if rows of hidden overlap
    if cache is not None and cache.grad_weight is not None:
        grad_weight = cache.grad_weight
    else:
        grad_weight = x.weight.new_empty((v, d) if need_weight else 0)
    grad_bias = x.weight.new_empty(v if need_bias else 0)
    if n == 0:
        return grad_hidden, grad_weight.zero_(), grad_bias.zero_()
    plan = make_plan(inputs.hidden, inputs.weight, backward=True)
    grad_inputs = GradInputs(lse, grads, entropy).map(Tensor.contiguous)
    num_tiles, budget = ceil_div(v, plan.block_n), spec.memory_budget
    if cache is not None and cache.slabs[0].stop == v and pays_and_fits(inputs.shape, num_tiles, spec.needs, budget):
        slab = cache.slabs[0]
        factors = finish_exponentials(slab, cache.label.logit, inputs, grad_inputs, plan)
        if need_weight:
            write_weight_gradient(slab.values, factors, inputs, grad_weight)
        if need_hidden:
            write_hidden_gradient(slab.values, factors, inputs, grad_hidden)
        return grad_hidden, grad_weight, grad_bias
    label = None
    if uses_hopper(plan, x.bias, spec.softcap, grads.mean is not None or grads.entropy is not None):
        label = label_logits(inputs, plan, plan.block_m) if cache is None or cache.label.active is None else cache.label
    _Backward(inputs, grad_inputs, plan, cache, label, grad_hidden, grad_weight, grad_bias, budget).run()
    return grad_hidden, grad_weight, grad_bias
