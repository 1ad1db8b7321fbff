"""The scalar loss in PyTorch, loss and gradients in one pass: three GEMMs, as many as full logits need.

Blocks of tokens, each with the whole vocabulary: the gradient of the loss is one scalar for all tokens, so a block's gradients
are formed while its logits are there, and only their sums are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.reference import scratch_bytes
from hf_cce.spec import Inputs, LossSpec, accumulation_dtype

# Fewer tokens at a time and adding each block's product to the weight's gradient costs more than the product.
LEAST_TOKENS = 128


class PrecomputedGrads(NamedTuple):
    """Gradients of hidden, weight and bias formed in the forward pass, for an upstream gradient of one."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def one_pass(x: Inputs, spec: LossSpec, factor: Tensor) -> tuple[Tensor, Tensor, PrecomputedGrads]:
    """``factor`` · Σ over tokens of the loss, the tokens' lse [N], and the gradients of that sum; float32 and float64."""
    (hidden, weight, _, labels), (need_hidden, need_weight, need_bias) = x, spec.needs
    n_all, v, wide = labels.numel(), weight.shape[0], accumulation_dtype(hidden.dtype)
    picked = (labels != spec.ignore_index).nonzero().squeeze(1)
    n = picked.numel()
    lse_all = torch.zeros(n_all, dtype=wide, device=hidden.device)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    grads = PrecomputedGrads(
        hidden.new_zeros(hidden.shape) if need_hidden else None,
        (weight.new_empty if n else weight.new_zeros)(weight.shape) if need_weight else None,
        weight.new_zeros(v) if need_bias else None,
    )
    block = _token_block(
        n, v, hidden.dtype.itemsize * (2 if spec.softcap and any(spec.needs) else 1), spec.memory_budget
    )
    # [V, tokens], not [tokens, V]: measured on two cores at 96 tokens, the three GEMMs take 25 % less in this orientation.
    scratch = hidden.new_empty(v * max(16, min(block, n)) if n else 0)
    scale = float(factor) * spec.logit_scale
    for start in range(0, n, block):
        stop = min(n, start + block)
        rows = slice(start, stop) if n == n_all else picked[start:stop]
        h, y, size = hidden[rows], labels[rows], stop - start
        if size < 16:  # measured: with fewer columns MKL sums over V naively, ten times the rounding error
            h, y, size = F.pad(h, (0, 0, 0, 16 - size)), F.pad(y, (0, 16 - size)), 16
        z = torch.mm(weight, h.t(), out=scratch[: v * size].view(v, size))
        loss, lse, norm = _scaled_logit_gradients(z, x.bias, y, spec)
        lse_all[rows] = lse[: stop - start]
        total += loss[: stop - start].sum()
        # The division by norm costs nothing on the small factors h and grad_hidden.
        weights = scale / norm
        weights[stop - start :] = 0
        if grads.hidden is not None:
            grads.hidden[rows] = torch.mm(weight.t(), z).mul_(weights).t()[: stop - start]
        if grads.weight is not None:
            # beta=0 ignores what is in the fresh buffer, so it need not be zeroed first
            grads.weight.addmm_(z, h * weights[:, None], beta=0.0 if start == 0 else 1.0)
        if grads.bias is not None:
            grads.bias.add_(torch.mv(z, weights))
    return total * factor, lse_all, grads


def _token_block(n: int, v: int, bytes_per_logit: int, memory_budget: int) -> int:
    """Tokens of a block; multiples of 32, which GEMM and softmax over the first dimension like."""
    wanted = max(scratch_bytes(n, v, bytes_per_logit, memory_budget), LEAST_TOKENS * v * bytes_per_logit)
    block = min(wanted, memory_budget) // (v * bytes_per_logit)
    return max(16, block if block < 32 else block - block % 32)  # of fewer than 16, rounding suffers


def _scaled_logit_gradients(
    z: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [n], lse [n], norm [n]) of the products ``z`` [V, n], which become norm · ∂loss/∂z if a gradient is needed."""
    v, need_any, smoothing = z.shape[0], any(spec.needs), spec.label_smoothing
    if bias is not None:
        z.add_(bias[:, None])
    if spec.logit_scale != 1.0:
        z.mul_(spec.logit_scale)
    if spec.softcap:
        z.div_(spec.softcap).tanh_().mul_(spec.softcap)
    top, at_label = z.amax(0), z.gather(0, labels[None])[0]
    mean = z.mean(0) if smoothing else None
    jacobian = z.div(spec.softcap).square_().neg_().add_(1) if spec.softcap and need_any else None
    # Not torch.softmax: over the first dimension it sums naively, and its error grows with V.
    norm = z.sub_(top).exp_().sum(0)
    lse = top + norm.log()
    loss = lse - at_label
    if mean is not None:
        loss = loss + smoothing * (at_label - mean)
    if spec.z_loss:
        loss = loss + spec.z_loss * lse.square()
    if need_any:
        if spec.z_loss:
            z.mul_(1 + 2 * spec.z_loss * lse)
        z.scatter_add_(0, labels[None], (norm * (smoothing - 1))[None])
        if smoothing:
            z.sub_(norm * (smoothing / v))
        if jacobian is not None:
            z.mul_(jacobian)
    return loss, lse, norm
