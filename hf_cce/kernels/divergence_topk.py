"""Divergences of tokens from a teacher's k most probable tokens, and their gradients, from rows of the student's full logits.

The same formulas as in ``hf_cce.divergence_topk``, in one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.divergence import factor_and_stride, kind_of, terms_of
from hf_cce.kernels.inputs import scale_and_softcap
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.rows import block_and_warps, largest_and_log_total, load_logits
from hf_cce.kernels.tiles import exp, softcap_slope

LOWEST = tl.constexpr(-8e37)  # a log-probability whose probability is 0, and of which differences are finite
EPS = tl.constexpr(2.0**-23)  # the least probability of the tail


@triton.jit
def _log_softmax(x):
    x -= tl.max(x, 0)
    return x - tl.log(tl.sum(exp(x), 0))


@Kernel
@triton.jit
def _top_k_kernel(
    logits,  # [N, V] of the student, before scale and softcap; overwritten with their gradient if GRADIENT
    ids,  # [N, k]
    log_probs,  # [N, k] of the teacher, minus infinity where padding
    divergence,  # [N], written
    in_range,  # [N] bool, written: all ids that are not padding lie in [0, V)
    factor,  # [N] or scalar that the gradient is multiplied by; None: 1
    factor_stride,  # 0 for a scalar
    k,
    vocab_size,
    stride,
    logit_scale,
    softcap,
    beta,
    KIND: tl.constexpr,
    LUMP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    each = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64) * k + each
    log_pt = tl.load(log_probs + at, mask=each < k, other=float("-inf"))
    given = log_pt != float("-inf")
    cols = tl.load(ids + at, mask=given, other=0)
    tl.store(in_range + row, tl.min(((cols >= 0) & (cols < vocab_size)).to(tl.int32), 0) == 1)
    z = load_logits(start, None, cols, vocab_size, logit_scale, softcap)
    log_pt = tl.where(given, log_pt, LOWEST)
    if LUMP:
        largest, log_total = largest_and_log_total(start, None, vocab_size, logit_scale, softcap, BLOCK)
        log_ps = tl.where(given, (z - largest) - log_total, LOWEST)
        tail = tl.maximum(1.0 - tl.sum(exp(log_ps), 0), EPS)
        teacher_tail = tl.maximum(1.0 - tl.sum(exp(log_pt), 0), EPS)
        of_tail, tail_derivative = terms_of(tl.log(tail), tl.log(teacher_tail), beta, KIND)
    else:
        log_ps, log_pt = _log_softmax(tl.where(given, z, LOWEST)), _log_softmax(log_pt)
        of_tail, tail_derivative, tail = 0.0, 0.0, 1.0
    terms, derivatives = terms_of(log_ps, log_pt, beta, KIND)
    tl.store(divergence + row, tl.sum(terms, 0) + of_tail)
    if GRADIENT:
        tail_derivative = tl.where(tail < 1.25 * EPS, 0.0, tail_derivative)  # the tail was replaced by a constant
        ps, of_ids = exp(log_ps), tl.sum(derivatives, 0)
        inside = derivatives - ps * (of_ids + tail_derivative)
        by = 1.0 if logit_scale is None else logit_scale
        if factor is not None:
            by *= tl.load(factor + row * factor_stride).to(tl.float32)
        # Minus the factor of p outside of the k tokens
        outside = by * (tail_derivative * tl.sum(tl.where(given, ps, 0.0), 0) / tail - of_ids)
        for first in range(0, vocab_size, BLOCK):
            others = first + tl.arange(0, BLOCK)
            gradient = tl.zeros((BLOCK,), tl.float32)
            if LUMP:
                x = load_logits(start, None, others, vocab_size, logit_scale, softcap)
                gradient = exp((x - largest) - log_total) * outside
                if softcap is not None:
                    gradient *= softcap_slope(x, softcap)
            tl.store(start + others, gradient.to(logits.dtype.element_ty), mask=others < vocab_size)
        inside *= by
        if softcap is not None:
            inside *= softcap_slope(z, softcap)
        tl.debug_barrier()  # after all threads have written the whole row
        tl.store(start + cols, inside.to(logits.dtype.element_ty), mask=given & (cols >= 0) & (cols < vocab_size))


def row_top_k_divergences(
    logits: Tensor,  # [N, V] of the student: h Wᵀ + b
    teacher: tuple[Tensor, Tensor, bool],  # ids [N, k], log-probabilities [N, k], whether the tail is lumped
    student: Any,  # a head of ``hf_cce.divergence_spec``
    beta: float,
    divergence: Tensor,  # [N], written
    scale: Tensor | float | None,  # as in ``row_divergences``
) -> Tensor:
    """Compute the divergence of each token and the gradient of the student's logits. Return whether the ids are in range [N]."""
    (ids, log_probs, lump), (n, v) = teacher, logits.shape
    in_range = torch.empty(n, dtype=torch.bool, device=logits.device)
    _top_k_kernel[(n,)](
        logits, ids.contiguous(), log_probs.contiguous(), divergence, in_range, *factor_and_stride(scale, logits.device),
        ids.shape[1], v, logits.stride(0), *scale_and_softcap(student), beta, KIND=kind_of(beta), LUMP=lump,
        GRADIENT=scale is not None, BLOCK_K=triton.next_power_of_2(ids.shape[1]), **block_and_warps(n),
    )  # fmt: skip
    return in_range
