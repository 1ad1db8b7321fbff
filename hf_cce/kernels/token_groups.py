"""Gradients computed in the forward pass, for one group of tokens at a time.

The exponentials of all columns of a group are stored, so its logits are computed only once. The gradient of the logits is these
exponentials times a factor per token, except for the label's entry (see hf_cce.kernels.exp_cache). With S the exponentials, zero
at the labels and for ignored tokens, f the factors and c the labels' entries,

    dh = f · (S W) + c · W[label]        dW = Sᵀ (f · h), plus c · h in the label's row

cuBLAS multiplies S unchanged. S W stays in float32 until f and c are applied; dW is summed over the groups in float32. The
gradients are for an upstream gradient of one; the backward pass multiplies them by the actual one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.backward import write_logit_gradient
from hf_cce.kernels.exp_cache import LOSS_LIMIT, Slab
from hf_cce.kernels.inputs import GradInputs, LogitInputs, Shape
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.matmul import multiply_add
from hf_cce.kernels.tiles import softcap_slope

MIN_GROUP_TOKENS = 512  # smaller groups leave the GPU idle
# Measured on an H200. The product for dW of each group costs as much as ADDING more tokens, because it reads and writes the sums.
# Per token, groups save SAVED of one product; a cache of all columns would save SAVED_BY_CACHE of that.
ADDING, SAVED, SAVED_BY_CACHE = 1150, 0.95, 0.7
# Bytes of the float32 product S W: enough tiles to keep cuBLAS busy, small enough to stay in an H200's L2 cache until rounded.
PRODUCT_BYTES = 32 << 20
BLOCK_R = 16  # rows of the product that one program rounds
LABEL_ROWS, LABEL_D = 64, 128  # tokens with the same label, and columns of h, that one program adds at a time


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _factors_kernel(
    values,  # [N, V] S, rows `stride` apart; zeros are written at the labels
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    flags,  # [row blocks] int32, written: 1 if the loss of any token of the block is above LOSS_LIMIT
    scale,  # [N], written: f
    label_entry,  # [N], written: c
    num_tokens,
    vocab_size,
    stride,
    ignore_index,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    row_lse = tl.load(lse + rows, mask=in_rows, other=0.0)
    z = tl.load(label_logit + rows, mask=in_rows, other=0.0)
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    valid = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    over_limit = tl.max((in_rows & ((row_lse - z <= LOSS_LIMIT) == 0)).to(tl.int32), 0)  # true for NaN
    p = tl.exp(z - row_lse)
    g = tl.load(grad_lse + rows, mask=in_rows, other=0.0)
    c = g * p + tl.load(grad_label + rows, mask=in_rows, other=0.0)
    if HAS_SOFTCAP:
        c *= softcap_slope(z, softcap)
    # A flagged row block is recomputed: its values become the gradient itself, including the labels' entries.
    f = tl.where(over_limit != 0, 1.0, tl.where(valid, g * p * logit_scale, 0.0))
    c = tl.where((over_limit == 0) & valid, c * logit_scale, 0.0)
    zero = tl.zeros((BLOCK_M,), values.dtype.element_ty)
    tl.store(values + rows.to(tl.int64) * stride + label, zero, mask=in_rows & valid)
    tl.store(flags + tl.program_id(0), over_limit)
    tl.store(scale + rows, f, mask=in_rows)
    tl.store(label_entry + rows, c, mask=in_rows)


@Kernel
@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _finish_hidden_kernel(
    product,  # [rows, D] float32
    weight,  # [V, D]
    labels,  # [N]
    scale,  # [N]
    label_entry,  # [N], zero where the label is ignored
    out,  # [N, D], written
    first_row,
    num_rows,
    d,
    weight_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows, in_rows = first_row + at, at < num_rows
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = in_rows[:, None] & (ds < d)[None, :]
    c = tl.load(label_entry + rows, mask=in_rows, other=0.0)
    f = tl.load(scale + rows, mask=in_rows, other=0.0)
    label = tl.load(labels + rows, mask=in_rows & (c != 0.0), other=0)
    w = tl.load(
        weight + label.to(tl.int64)[:, None] * weight_stride + ds[None, :], mask=mask & (c != 0.0)[:, None], other=0.0
    )
    x = tl.load(product + at.to(tl.int64)[:, None] * d + ds[None, :], mask=mask, other=0.0)
    x = x * f[:, None] + w.to(tl.float32) * c[:, None]
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], x.to(out.dtype.element_ty), mask=mask)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _add_label_rows_kernel(
    sums,  # [V, D] float32, c · h is added to the label's row
    hidden,  # [N, D]
    sorted_labels,  # [N] int64
    order,  # [N] int64: the tokens of the sorted labels
    label_entry,  # [N]
    num_tokens,
    vocab_size,
    d,
    hidden_stride,
    ignore_index,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The program of a label's first token adds all tokens with this label."""
    first = tl.program_id(0)
    label = tl.load(sorted_labels + first)
    is_first = tl.load(sorted_labels + first - 1, mask=first > 0, other=ignore_index) != label
    if is_first and label != ignore_index and label >= 0 and label < vocab_size:
        ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        at = sums + label * d + ds
        total = tl.load(at, mask=ds < d, other=0.0)
        found = BLOCK_R
        while found == BLOCK_R:
            rows = first + tl.arange(0, BLOCK_R)
            same = tl.load(sorted_labels + rows, mask=rows < num_tokens, other=ignore_index) == label
            tokens = tl.load(order + rows, mask=same, other=0)
            c = tl.load(label_entry + tokens, mask=same, other=0.0)
            h = tl.load(
                hidden + tokens[:, None] * hidden_stride + ds[None, :],
                mask=same[:, None] & (ds < d)[None, :],
                other=0.0,
            )
            total += tl.sum(h.to(tl.float32) * c[:, None], 0)
            found = tl.sum(same.to(tl.int32), 0)
            first += BLOCK_R
        tl.store(at, total, mask=ds < d)


@Kernel
@triton.jit
def _multiply_kernel(x, by, out, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Write x · by, for a scalar ``by``. Zero stays zero: without tokens, ``by`` may be non-finite (division by zero)."""
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0 or not IN_PLACE:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(out + at, tl.where(value == 0, 0.0, value * factor).to(out.dtype.element_ty), mask=at < size)


class PrecomputedGradients(NamedTuple):
    """Gradients for an upstream gradient of one."""

    grad_hidden: Tensor  # [N, D]
    weight_sums: Tensor | None  # [V, D] float32: dW before it is rounded; None if it is not needed


def rows_at_a_time(d: int, max_rows: int) -> int:
    """Return how many of ``max_rows`` rows of the float32 product [rows, D] to compute at a time."""
    return ceil_div(min(PRODUCT_BYTES // (4 * d), max_rows), BLOCK_R) * BLOCK_R


def group_size(
    shape: Shape, num_tiles: int, block_m: int, needs: tuple[bool, bool, bool], cached: int, budget: int
) -> int:
    """Return the number of tokens per group; 0 if other gradients are needed, or the budget has no room for groups that pay.

    ``cached``: number of columns that hf_cce.kernels.exp_cache would cache for all tokens if groups were not used.
    """
    n, d, v, dtype = shape
    element = dtype.itemsize
    need_hidden, need_weight, need_bias = needs
    if need_bias or not need_hidden or dtype == torch.float16 or n == 0:  # float16 lacks range for the exponentials
        return 0
    per_token = element * padded(v) + 4 * num_tiles + 32
    left = budget - 4 * d * rows_at_a_time(d, n)
    if need_weight:
        # In the forward pass, the sums replace dW, which the budget does not count. In the backward pass, both exist.
        per_token += element * d + 64
        left -= (4 - element) * v * d
        if element < 4 and 4 * v * d > budget:
            return 0
    max_tokens = left // per_token // block_m * block_m
    if max_tokens < min(n, MIN_GROUP_TOKENS):
        return 0
    groups = ceil_div(n, max_tokens)
    if need_weight and n / groups * (SAVED - SAVED_BY_CACHE * cached / v) < ADDING:
        return 0
    return ceil_div(ceil_div(n, groups), block_m) * block_m


def group_gradients(
    inputs: LogitInputs,
    slab: Slab,  # the exponentials of all logits; overwritten
    label_logit: Tensor,  # [N]
    grads: GradInputs,
    plan: Plan,
    out: PrecomputedGradients,  # grad_hidden of these tokens is written; weight_sums is written if ``first``, else added to
    first: bool,  # the first group
) -> None:
    """Compute the gradients of one group of tokens."""
    (n, d, v, _), values, (grad_hidden, sums) = inputs.shape, slab.values, out
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    scale, label_entry = empty_slab(label_logit, 2, n).unbind()
    blocks = ceil_div(n, plan.block_m)
    flags = torch.empty(blocks, dtype=torch.int32, device=values.device)
    _factors_kernel[(blocks,)](
        values, label_logit, labels, grads.lse, grads.grad_lse, grads.grad_label, flags, scale, label_entry, n, v,
        values.stride(0), inputs.ignore_index, inputs.logit_scale, inputs.softcap or 1.0,
        HAS_SOFTCAP=inputs.softcap > 0, BLOCK_M=plan.block_m,
    )  # fmt: skip
    write_logit_gradient(slab, inputs, grads, plan, flags)
    if sums is not None:
        scaled = torch.mul(hidden, scale[:, None], out=torch.empty_like(hidden, memory_format=torch.contiguous_format))
        multiply_add(sums, values.t(), scaled, first)
        del scaled
        sorted_labels, order = torch.sort(labels, stable=True)
        _add_label_rows_kernel[(n, ceil_div(d, LABEL_D))](
            sums, hidden, sorted_labels, order, label_entry, n, v, d, hidden.stride(0), inputs.ignore_index,
            BLOCK_R=LABEL_ROWS, BLOCK_D=LABEL_D,
        )  # fmt: skip
    product = torch.empty((rows_at_a_time(d, n), d), device=values.device, dtype=torch.float32)
    for start in range(0, n, len(product)):
        stop = min(n, start + len(product))
        multiply_add(product[: stop - start], values[start:stop], weight, first=True)
        _finish_hidden_kernel[(ceil_div(stop - start, BLOCK_R), ceil_div(d, 256))](
            product, weight, labels, scale, label_entry, grad_hidden, start, stop - start, d, weight.stride(0), BLOCK_R=BLOCK_R,
            BLOCK_D=256,
        )  # fmt: skip


def scale_precomputed_gradients(
    gradients: PrecomputedGradients, grad: Tensor, dtype: torch.dtype, needs: tuple[bool, bool, bool]
) -> list[Tensor | None]:
    """Return the gradients of hidden states, weight and bias, in ``dtype``, for the scalar upstream gradient ``grad``.

    Consumes ``gradients``: their memory is reused if they already have this dtype.
    """
    scaled: list[Tensor | None] = [None, None, None]
    for i, x in enumerate(gradients):
        if x is not None and needs[i]:
            out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            blocks = min(1024, ceil_div(x.numel(), 4096))
            _multiply_kernel[(blocks,)](x, grad, out, x.numel(), IN_PLACE=out is x, BLOCK=4096, num_warps=8)
            scaled[i] = out
    return scaled
