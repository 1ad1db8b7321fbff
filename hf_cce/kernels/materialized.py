"""Scalar loss for few tokens: materialize the full logits once and reuse their memory for their gradient.

With few tokens a step is bound by the host, not the GPU, and this strategy takes the fewest launches. The logits are float32, or
have the dtype of the inputs if float32 does not fit. They are then rounded once, like PyTorch's; the rest is computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch_config import empty_slab, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.loss import total_loss
from hf_cce.kernels.matmul import multiply, multiply_add
from hf_cce.kernels.tiles import softcap_slope, softcapped
from hf_cce.spec import Inputs, LossSpec


@dataclass
class SavedLogits:
    """Tensors saved for the backward pass."""

    logits: Tensor | None  # [N, V], from ``compute_logits``; None after the backward pass has consumed them
    lse: Tensor  # [N]


@triton.jit
def _scaled_logits(x, cols, bias, vocab_size, logit_scale, softcap):
    if bias is not None:
        x += tl.load(bias + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)
    x *= logit_scale
    if softcap is not None:
        x = softcapped(x, softcap)
    return x


@Kernel
@triton.jit(do_not_specialize=["ignore_index"])
def _row_stats_kernel(
    logits,  # [N, V] in float32 or the dtype of hidden and weight; rows `stride` apart
    bias,  # [V]
    labels,  # [N]
    lse,  # [N], written; zero where the label is ignored
    label_logit,  # [N], likewise
    vocab_size,
    stride,
    ignore_index,
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    if label == ignore_index:
        tl.store(lse + row, 0.0)
        tl.store(label_logit + row, 0.0)
        return
    start = logits + row.to(tl.int64) * stride
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    at_label = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(start + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)
        x = _scaled_logits(x, cols, bias, vocab_size, logit_scale, softcap)
        at_label += tl.where(cols == label, x, 0.0)
        x = tl.where(cols < vocab_size, x, float("-inf"))
        new = tl.maximum(top, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    largest = tl.max(top, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse + row, safe + tl.log(tl.sum(total * tl.exp(top - safe), 0)))
    tl.store(label_logit + row, tl.sum(at_label, 0))


@Kernel
@triton.jit(do_not_specialize=["ignore_index"])
def _row_gradient_kernel(
    logits,  # [N, V] in float32 or the dtype of `out`
    out,  # [N, V] in the dtype of hidden and weight; may alias the logits if each row starts at the same address
    bias,  # [V]
    labels,  # [N]
    lse,  # [N]
    grad,  # scalar
    factor,  # scalar
    vocab_size,
    stride,
    out_stride,
    ignore_index,
    logit_scale,
    softcap,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    valid = label != ignore_index
    row_lse = tl.load(lse + row)
    g = tl.where(valid, tl.load(grad).to(tl.float32) * tl.load(factor), 0.0)
    grad_lse = g * (1.0 + 2.0 * z_loss * row_lse)
    start = logits + row.to(tl.int64) * stride
    to = out + row.to(tl.int64) * out_stride
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(start + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)
        x = _scaled_logits(x, cols, bias, vocab_size, logit_scale, softcap)
        gradient = tl.where(valid, tl.exp(x - row_lse), 0.0) * grad_lse - tl.where(cols == label, g, 0.0)
        if softcap is not None:
            gradient *= softcap_slope(x, softcap)
        # If `out` aliases the logits, all threads must have read this block before any thread writes.
        tl.debug_barrier()
        tl.store(to + cols, (gradient * logit_scale).to(out.dtype.element_ty), mask=cols < vocab_size)


def compute_logits(x: Inputs, dtype: torch.dtype) -> Tensor:
    """Return h Wᵀ [N, V] in ``dtype``, with aligned rows; for 16-bit dtypes, the bias is already added.

    No labels are needed, so the GPU computes this while the host checks the labels.
    """
    logits = empty_slab(torch.empty(0, dtype=dtype, device=x.hidden.device), x.hidden.shape[0], x.weight.shape[0])
    bias = x.bias if _is_low_precision(logits) else None
    if bias is not None:
        logits.copy_(bias)
    multiply_add(logits, x.hidden, x.weight.t(), first=bias is None)
    return logits


def _is_low_precision(logits: Tensor) -> bool:
    """Return True for 16-bit logits: they include the bias, as in PyTorch. To float32 logits, the kernels add the bias."""
    return logits.element_size() < 4


def _bias_and_labels(x: Inputs, logits: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return contiguous bias and labels for the kernels; the bias is None if the logits already include it."""
    return None if x.bias is None or _is_low_precision(logits) else x.bias.contiguous(), x.labels.contiguous()


def cross_entropy(
    logits: Tensor,  # [N, V], from ``compute_logits``; overwritten by ``gradients``
    x: Inputs,
    spec: LossSpec,
    factor: Tensor,  # scalar
) -> tuple[Tensor, SavedLogits]:
    """Return (loss, tensors saved for ``gradients``)."""
    (n, v), (bias, labels) = logits.shape, _bias_and_labels(x, logits)
    lse, label_logit = torch.empty((2, padded(n)), device=logits.device, dtype=torch.float32)[:, :n].unbind()
    _row_stats_kernel[(n,)](
        logits, bias, labels, lse, label_logit, v, logits.stride(0), spec.ignore_index, spec.logit_scale, spec.softcap or None,
        BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return total_loss(lse, label_logit, factor, spec), SavedLogits(logits, lse)


def gradients(
    saved: SavedLogits,
    x: Inputs,
    spec: LossSpec,
    grad: Tensor,  # scalar
    factor: Tensor,  # scalar
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias; None if not needed. Consumes ``saved``."""
    assert saved.logits is not None
    (n, v), element, (need_hidden, need_weight, need_bias) = saved.logits.shape, x.hidden.element_size(), spec.needs
    bias, labels = _bias_and_labels(x, saved.logits)
    logits = saved.logits.as_strided((n, saved.logits.stride(0)), saved.logits.stride())  # with padding
    saved.logits = None
    # If dW needs at least as much memory as float32 logits, write their gradient to a separate 16-bit buffer: the logits are then
    # freed before dW is allocated.
    if element < logits.element_size() and need_weight and element * x.weight.numel() >= 4 * logits.numel():
        dlogits = empty_slab(x.hidden, n, v)
    else:
        dlogits = logits.view(x.hidden.dtype)  # in place
    _row_gradient_kernel[(n,)](
        logits, dlogits, bias, labels, saved.lse, grad, factor, v, logits.stride(0), dlogits.stride(0), spec.ignore_index,
        spec.logit_scale, spec.softcap or None, spec.z_loss, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    del logits
    gradient = dlogits[:, :v]
    return (
        multiply(gradient, x.weight) if need_hidden else None,
        gradient.t() @ x.hidden if need_weight else None,
        gradient.sum(0, dtype=torch.float32).to(x.weight.dtype) if need_bias else None,
    )
