"""Divergences of tokens, and their gradients, from rows of both models' full logits, which PyTorch computes.

Legend as in ``hf_cce.kernels.divergence``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.divergence import kind_of, slope, weighted
from hf_cce.kernels.inputs import scale_and_softcap
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.rows import block_and_warps, largest_and_log_total, load_logits
from hf_cce.kernels.tiles import softcap_slope


@triton.jit
def _log_probs(start, cols, vocab_size, logit_scale, softcap, largest, log_total):
    """Return log p; more accurate than z − lse if p is close to 1."""
    return load_logits(start, None, cols, vocab_size, logit_scale, softcap) - largest - log_total


@triton.jit
def _store_gradient(
    start, cols, log_ps, log_pt, offset, factor, vocab_size, logit_scale, softcap, beta, KIND: tl.constexpr
):
    """Overwrite the student's logits with the gradient of the divergence times ``factor``, a pointer."""
    gradient = slope(log_ps, log_pt, offset, beta, KIND)
    if factor is not None:
        gradient *= tl.load(factor).to(tl.float32)
    if softcap is not None:
        gradient *= softcap_slope(load_logits(start, None, cols, vocab_size, logit_scale, softcap), softcap)
    if logit_scale is not None:
        gradient *= logit_scale
    tl.store(start + cols, gradient.to(start.dtype.element_ty), mask=cols < vocab_size)


@Kernel
@triton.jit
def _row_divergence_kernel(
    logits,  # [N, V] of the student, before scale and softcap; overwritten with their gradient if GRADIENT
    teacher_logits,  # [N, V], before scale and softcap
    divergence,  # [N], written
    entropy,  # [N], written: the student's; None if not requested
    factor,  # [N] or scalar that the gradient is multiplied by; None: 1
    factor_stride,  # 0 for a scalar
    vocab_size,
    stride,
    teacher_stride,
    logit_scale,
    softcap,
    teacher_logit_scale,
    teacher_softcap,
    beta,
    KIND: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    t_start = teacher_logits + row.to(tl.int64) * teacher_stride
    if factor is not None:
        factor += row * factor_stride
    top, log_total = largest_and_log_total(start, None, vocab_size, logit_scale, softcap, BLOCK)
    t_top, t_log_total = largest_and_log_total(t_start, None, vocab_size, teacher_logit_scale, teacher_softcap, BLOCK)
    student = tl.zeros((BLOCK,), tl.float32)  # of KL(p_s ‖ p_t) or KL(p_s ‖ m)
    teacher = tl.zeros((BLOCK,), tl.float32)  # of KL(p_t ‖ p_s) or KL(p_t ‖ m)
    expectation = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        log_ps = _log_probs(start, cols, vocab_size, logit_scale, softcap, top, log_total)
        log_pt = _log_probs(t_start, cols, vocab_size, teacher_logit_scale, teacher_softcap, t_top, t_log_total)
        ps, pt = tl.exp(log_ps), tl.exp(log_pt)
        if KIND == 2:
            log_m = tl.log((1.0 - beta) * ps + beta * pt)
        if KIND != 0:
            student += weighted(ps, log_ps - (log_pt if KIND == 1 else log_m))
        if KIND != 1:
            teacher += weighted(pt, log_pt - (log_ps if KIND == 0 else log_m))
        if entropy is not None:
            expectation += weighted(ps, log_ps)
        if GRADIENT and KIND == 0:  # needs no sum
            _store_gradient(
                start, cols, log_ps, log_pt, 0.0, factor, vocab_size, logit_scale, softcap, beta, KIND,
            )  # fmt: skip
    student_kl, teacher_kl = tl.sum(student, 0), tl.sum(teacher, 0)
    # Unless KIND is 2, one of them is 0
    tl.store(divergence + row, student_kl + teacher_kl if KIND != 2 else (1.0 - beta) * student_kl + beta * teacher_kl)
    if entropy is not None:
        tl.store(entropy + row, -tl.sum(expectation, 0))
    if GRADIENT and KIND != 0:
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            log_ps = _log_probs(start, cols, vocab_size, logit_scale, softcap, top, log_total)
            log_pt = _log_probs(t_start, cols, vocab_size, teacher_logit_scale, teacher_softcap, t_top, t_log_total)
            _store_gradient(
                start, cols, log_ps, log_pt, student_kl, factor, vocab_size, logit_scale, softcap, beta, KIND,
            )  # fmt: skip


def row_divergences(
    logits: Tensor,  # [N, V] of the student: h Wᵀ + b
    teacher_logits: Tensor,  # [N, V], likewise
    student: Any,  # both are a head of ``hf_cce.divergence_spec``
    teacher: Any,
    beta: float,
    divergence: Tensor,  # [N], written
    entropy: Tensor | None,  # [N], written
    scale: Tensor
    | float
    | None,  # overwrite ``logits`` with their gradient times this, a scalar or [N, 1]; None: leave them
) -> None:
    """Compute the divergence of each token, the student's entropy and the gradient of the student's logits."""
    n, v = logits.shape
    _row_divergence_kernel[(n,)](
        logits, teacher_logits, divergence, entropy, *factor_and_stride(scale, logits.device), v, logits.stride(0),
        teacher_logits.stride(0), *scale_and_softcap(student), *scale_and_softcap(teacher), beta, KIND=kind_of(beta),
        GRADIENT=scale is not None, **block_and_warps(n),
    )  # fmt: skip


def factor_and_stride(scale: Tensor | float | None, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the tensor that a kernel multiplies gradients by, or None for 1, and its stride between rows."""
    if scale is None or (isinstance(scale, float) and scale == 1.0):
        return None, 0
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=device)
    return factor, factor.stride(0) if factor.dim() else 0
