"""Losses of tokens, and their gradients, from rows of logits that PyTorch computes.

One kernel turns each row into its loss, and one overwrites the row with its gradient. These are the fewest launches, and in
float32 cuBLAS multiplies faster than Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch_config import empty_slab, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import exp, softcap_slope, softcapped
from hf_cce.matmul import multiply_add, multiply_rounded
from hf_cce.spec import Inputs, LossSpec

BLOCK = 2048  # vocabulary entries that a program loads at once
# Of these, entries per warp. At least 32: two threads of a warp must not share an entry, which one would overwrite too early.
PER_WARP = 256
FEW_ROWS = 256  # up to this many rows, each one needs more threads to keep a GPU busy


def block_and_warps(rows: int) -> dict[str, int]:
    """Return constants of a launch with one program per row, measured on an H200."""
    block = 4 * BLOCK if rows <= FEW_ROWS else BLOCK
    return {"BLOCK": block, "num_warps": max(1, block // PER_WARP)}


@triton.jit
def load_logits(row, bias, cols, vocab_size, logit_scale, softcap, shift=None, stride=1):
    """Return the logits after shift, bias, scale and softcap; −inf outside of V."""
    inside = (cols >= 0) & (cols < vocab_size)
    x = tl.load(row + cols * stride, mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        x += shift
    if bias is not None:
        x += tl.load(bias + cols, mask=inside, other=0.0)
    if logit_scale is not None:
        x = x * logit_scale
    if softcap is not None:
        x = softcapped(x, softcap)
    return tl.where(inside, x, float("-inf"))


@triton.jit
def largest_and_log_total(row, bias, vocab_size, logit_scale, softcap, BLOCK: tl.constexpr, shift=None, stride=1):
    """Return the largest logit of a row, 0 if all are −inf, and log Σ exp(z − largest)."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x = load_logits(row, bias, first + tl.arange(0, BLOCK), vocab_size, logit_scale, softcap, shift, stride)
        # One exponential for each logit: that of the larger of x and top, less itself, is 1. Two infinities count as equal.
        larger, ratio = x > top, tl.where(x == top, 1.0, exp(-tl.abs(x - top)))
        total = tl.where(larger, total * ratio + 1.0, total + ratio)
        top = tl.where(larger, x, top)
    largest = tl.max(top, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.log(tl.sum(total * exp(top - largest), 0))


@Kernel
@triton.jit(do_not_specialize=["ignore_index"])
def _row_loss_kernel(
    logits,  # [N, V], before bias, scale and softcap; rows `stride` apart
    bias,  # [V] or None
    labels,  # [N]
    loss,  # [N], written; zero where the label is ignored
    lse,  # [N], likewise
    largest,  # [N], written: the largest logit, 0 if all are −inf; not where the label is ignored
    log_total,  # [N], written: log Σ exp(logit − largest), likewise
    vocab_size,
    stride,
    ignore_index,
    logit_scale,
    softcap,
    label_smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    if label == ignore_index:
        tl.store(loss + row, 0.0)
        tl.store(lse + row, 0.0)
        return
    start = logits + row.to(tl.int64) * stride
    row_largest, row_log_total = largest_and_log_total(start, bias, vocab_size, logit_scale, softcap, BLOCK)
    row_lse = row_largest + row_log_total
    at_label = load_logits(start, bias, label, vocab_size, logit_scale, softcap)
    row_loss = row_log_total - (at_label - row_largest)  # more accurate than lse − z if p(label) is close to 1
    if label_smoothing is not None:
        sum_x = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            x = load_logits(start, bias, cols, vocab_size, logit_scale, softcap)
            sum_x += tl.where(cols < vocab_size, x, 0.0)
        row_loss += label_smoothing * (at_label - tl.sum(sum_x, 0) / vocab_size)
    if z_loss is not None:
        row_loss += z_loss * row_lse * row_lse
    tl.store(loss + row, row_loss)
    tl.store(lse + row, row_lse)
    tl.store(largest + row, row_largest)
    tl.store(log_total + row, row_log_total)


@Kernel
@triton.jit(do_not_specialize=["ignore_index"])
def _row_gradient_kernel(
    logits,  # [N, V], as in _row_loss_kernel; overwritten with their gradient
    bias,
    labels,  # [N]
    largest,  # [N]
    log_total,  # [N]
    grad,  # [N] or scalar
    factor,  # scalar, or None: 1
    vocab_size,
    stride,
    grad_stride,
    ignore_index,
    logit_scale,
    softcap,
    label_smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    valid = label != ignore_index
    start = logits + row.to(tl.int64) * stride
    row_largest = tl.load(largest + row)
    row_log_total = tl.load(log_total + row)
    # The gradient of a logit is p_factor · p − uniform, minus label_factor at the label, times the slope of the softcap.
    label_factor = tl.load(grad + row.to(tl.int64) * grad_stride).to(tl.float32) * logit_scale
    if factor is not None:
        label_factor *= tl.load(factor).to(tl.float32)
    p_factor = label_factor
    if z_loss is not None:
        p_factor *= 1.0 + 2.0 * z_loss * (row_largest + row_log_total)
    uniform = 0.0
    if label_smoothing is not None:
        uniform = label_factor * label_smoothing / vocab_size
        label_factor *= 1.0 - label_smoothing
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = load_logits(start, bias, cols, vocab_size, logit_scale, softcap)
        p = exp((x - row_largest) - row_log_total)
        gradient = p * p_factor - tl.where(cols == label, label_factor, 0.0) - uniform
        if softcap is not None:
            gradient *= softcap_slope(x, softcap)
        gradient = tl.where(valid, gradient, 0.0)
        tl.store(start + cols, gradient.to(logits.dtype.element_ty), mask=cols < vocab_size)


class RowLosses(NamedTuple):
    """Losses of tokens, and the inputs of their gradient. A probability is exp(z − largest − log_total)."""

    loss: Tensor  # [N], zero where ignored
    lse: Tensor  # [N], zero where ignored
    largest: Tensor  # [N]
    log_total: Tensor  # [N]
    logits: Tensor  # [N, V], without the bias
    bias: Tensor | None  # [V], added in float32: cuBLAS rounds the product once more before it adds one


def all_logits(x: Inputs) -> Tensor:
    """Return h Wᵀ [N, V] in the inputs' dtype, with aligned rows; the caller may check the labels meanwhile."""
    logits = empty_slab(x.hidden, x.hidden.shape[0], x.weight.shape[0])
    multiply_add(logits, x.hidden, x.weight.t(), first=True)
    return logits


def row_losses(logits: Tensor, labels: Tensor, spec: LossSpec, bias: Tensor | None = None) -> RowLosses:
    """Return the losses of ``logits`` + ``bias``, zero where ignored."""
    (n, v), bias = logits.shape, None if bias is None else bias.contiguous()
    # Not a row of the others' buffer: callers change a loss in place, which autograd refuses for a view.
    loss = torch.empty(n, device=logits.device, dtype=torch.float32)
    lse, largest, log_total = loss.new_empty((3, padded(n)))[:, :n].unbind()
    if n:
        _row_loss_kernel[(n,)](
            logits, bias, labels, loss, lse, largest, log_total, v, logits.stride(0), *_options(spec), **block_and_warps(n),
        )  # fmt: skip
    return RowLosses(loss, lse, largest, log_total, logits, bias)


def _options(spec: LossSpec) -> tuple[int, float, float | None, float | None, float | None]:
    return spec.ignore_index, spec.logit_scale, spec.softcap or None, spec.label_smoothing or None, spec.z_loss or None


def overwrite_with_gradient(
    rows: RowLosses, labels: Tensor, spec: LossSpec, grad: Tensor, factor: Tensor | None = None
) -> Tensor:
    """Overwrite the logits with their gradient for upstream gradients ``grad`` [N] or a scalar, times a scalar ``factor``."""
    logits, (n, v) = rows.logits, rows.logits.shape
    if n:
        _row_gradient_kernel[(n,)](
            logits, rows.bias, labels, rows.largest, rows.log_total, grad, factor, v, logits.stride(0),
            grad.stride(0) if grad.dim() else 0, *_options(spec), **block_and_warps(n),
        )  # fmt: skip
    return logits


def logits_to_gradients(
    z: Tensor, labels: Tensor, spec: LossSpec, scale: Tensor | float, has_bias: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the same as ``hf_cce.fallback.logits_to_gradients``, for which a bias of minus infinity is a special case."""
    rows = row_losses(z, labels, spec)
    if any(spec.needs):
        grad = scale if isinstance(scale, Tensor) else torch.full((), scale, device=z.device)
        overwrite_with_gradient(rows, labels, spec, grad)
    return rows.loss, rows.lse


def gradients(
    rows: RowLosses, x: Inputs, spec: LossSpec, grad: Tensor, factor: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias, None if not needed; see ``overwrite_with_gradient``."""
    g, (need_hidden, need_weight, need_bias) = overwrite_with_gradient(rows, x.labels, spec, grad, factor), spec.needs
    return (
        multiply_rounded(g, x.weight) if need_hidden else None,
        g.t() @ x.hidden if need_weight else None,
        g.sum(0, dtype=torch.float32).to(x.weight.dtype) if need_bias else None,
    )
