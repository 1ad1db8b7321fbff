"""Losses of tokens from rows of full logits, which are overwritten with their gradient.

PyTorch multiplies, and one kernel does the rest. This takes the fewest launches, and float32 products are faster in cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch_config import padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import softcap_slope, softcapped
from hf_cce.spec import LossSpec


@triton.jit
def _scaled(x, logit_scale, softcap):
    x = x.to(tl.float32) * logit_scale
    if softcap is not None:
        x = softcapped(x, softcap)
    return x


@Kernel
@triton.jit(do_not_specialize=["ignore_index"])
def _row_loss_kernel(
    logits,  # [N, V], before scale and softcap; rows `stride` apart; if GRADIENT, overwritten with ∂loss/∂logits · scale
    labels,  # [N]
    loss,  # [N], written; zero where the label is ignored
    lse,  # [N], likewise
    factor,  # scalar factor of the gradient, or None
    vocab_size,
    stride,
    ignore_index,
    logit_scale,
    softcap,
    label_smoothing,
    z_loss,
    scale,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    start = logits + row.to(tl.int64) * stride
    if label == ignore_index:
        tl.store(loss + row, 0.0)
        tl.store(lse + row, 0.0)
        if GRADIENT:
            for first in range(0, vocab_size, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                tl.store(start + cols, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=cols < vocab_size)
        return
    in_vocab = (label >= 0) & (label < vocab_size)
    # Loaded before the first reduction, which all threads wait for: later, another thread may have overwritten it.
    at_label = _scaled(tl.load(start + label, mask=in_vocab, other=0.0), logit_scale, softcap)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_x = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = _scaled(tl.load(start + cols, mask=cols < vocab_size, other=0.0), logit_scale, softcap)
        if label_smoothing is not None:
            sum_x += tl.where(cols < vocab_size, x, 0.0)
        x = tl.where(cols < vocab_size, x, float("-inf"))
        new = tl.maximum(top, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    largest = tl.max(top, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    log_total = tl.log(tl.sum(total * tl.exp(top - largest), 0))
    row_lse = largest + log_total
    row_loss = log_total - (at_label - largest)  # of numbers that are as small as possible
    if label_smoothing is not None:
        row_loss += label_smoothing * (at_label - tl.sum(sum_x, 0) / vocab_size)
    if z_loss is not None:
        row_loss += z_loss * row_lse * row_lse
    tl.store(loss + row, row_loss)
    tl.store(lse + row, row_lse)
    if GRADIENT:
        g = logit_scale * scale
        if factor is not None:
            g *= tl.load(factor).to(tl.float32)
        of_p = g
        if z_loss is not None:
            of_p += g * 2.0 * z_loss * row_lse
        of_label = g
        everywhere = 0.0
        if label_smoothing is not None:
            of_label = g * (1.0 - label_smoothing)
            everywhere = g * label_smoothing / vocab_size
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            x = _scaled(tl.load(start + cols, mask=cols < vocab_size, other=0.0), logit_scale, softcap)
            gradient = tl.exp((x - largest) - log_total) * of_p - tl.where(cols == label, of_label, 0.0) - everywhere
            if softcap is not None:
                gradient *= softcap_slope(x, softcap)
            tl.store(start + cols, gradient.to(logits.dtype.element_ty), mask=cols < vocab_size)


def logits_to_gradients(
    z: Tensor, labels: Tensor, spec: LossSpec, scale: Tensor | float, has_bias: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the same as ``hf_cce.fallback.logits_to_gradients`` in one launch. ``has_bias`` makes no difference."""
    n, v = z.shape
    loss, lse = torch.empty((2, padded(n)), device=z.device, dtype=torch.float32)[:, :n].unbind()
    if n:
        factor, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, float(scale))
        _row_loss_kernel[(n,)](
            z, labels, loss, lse, factor, v, z.stride(0), spec.ignore_index, spec.logit_scale, spec.softcap or None,
            spec.label_smoothing or None, spec.z_loss or None, number, GRADIENT=any(spec.needs), BLOCK=2048, num_warps=8,
        )  # fmt: skip
    return loss, lse
