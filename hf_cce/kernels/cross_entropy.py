"""One scalar loss from the statistics of the tokens, and the gradients of those from the gradient of the scalar."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.forward import logit_stats


@triton.jit(do_not_specialize=["num_tokens"])
def _total_loss_kernel(
    lse,  # [N], zero where the label is ignored, like all that follow
    label_logit,  # [N]
    mean_logit,  # [N], if SMOOTH
    factor,  # scalar
    loss,  # scalar
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_tokens
        row_lse = tl.load(lse + at, mask=mask, other=0.0)
        z = tl.load(label_logit + at, mask=mask, other=0.0)
        row = row_lse - z
        if SMOOTH:
            row += label_smoothing * (z - tl.load(mean_logit + at, mask=mask, other=0.0))
        if Z_LOSS:
            row += z_loss * row_lse * row_lse
        total += row
    tl.store(loss, tl.sum(total) * tl.load(factor))


def cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``hf_cce.portable.cross_entropy``; gradients are formed in the backward pass only, from recomputed tiles."""
    lse, label_logit, mean_logit, *_ = logit_stats(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, label_smoothing > 0, False, False, False,
        memory_budget,
    )  # fmt: skip
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    _total_loss_kernel[(1,)](
        lse, label_logit, mean_logit, factor, loss, labels.numel(), label_smoothing, z_loss,
        SMOOTH=label_smoothing > 0, Z_LOSS=z_loss > 0, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return loss, lse, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
