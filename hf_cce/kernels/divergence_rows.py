"""Divergences of tokens, and their gradients, from rows of both models' full logits.

PyTorch computes the logits, or ``shifted_logits``, which hardly rounds them.

Legend as in ``hf_cce.kernels.divergence``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.divergence import kind_of, log_mixture, slope, weighted
from hf_cce.kernels.inputs import scale_and_softcap
from hf_cce.kernels.launch_config import ceil_div, make_plan, operand
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.rows import block_and_warps, largest_and_log_total, load_logits
from hf_cce.kernels.tiles import softcap_slope, tile_logits, tile_position
from hf_cce.matmul import multiply_rounded

SAMPLE = 1024  # vocabulary entries of which the largest logit is the shift of a row
Logits = tuple[Tensor, Tensor | None]  # h Wᵀ + b − shift [N, V], shift [N]; None: 0


@triton.jit
def _log_probs(start, shift, cols, vocab_size, logit_scale, softcap, largest, log_total):
    """Return log p; more accurate than z − lse if p is close to 1."""
    return load_logits(start, None, cols, vocab_size, logit_scale, softcap, shift) - largest - log_total


@triton.jit
def _store_gradient(
    start, shift, out, cols, log_ps, log_pt, offset, factor, vocab_size, logit_scale, softcap, beta, KIND: tl.constexpr
):
    """Write the gradient of the divergence times ``factor``, a pointer, to ``out``, the memory of the student's logits."""
    gradient = slope(log_ps, log_pt, offset, beta, KIND)
    if factor is not None:
        gradient *= tl.load(factor).to(tl.float32)
    if softcap is not None:
        gradient *= softcap_slope(load_logits(start, None, cols, vocab_size, logit_scale, softcap, shift), softcap)
    if logit_scale is not None:
        gradient *= logit_scale
    tl.store(out + cols, gradient.to(out.dtype.element_ty), mask=cols < vocab_size)


@Kernel
@triton.jit
def _row_divergence_kernel(
    logits,  # [N, V] of the student, before scale and softcap
    shift,  # [N], to be added to the logits, or None
    gradient,  # the same memory in the dtype of the gradient, which overwrites the logits if GRADIENT
    teacher_logits,  # [N, V], before scale and softcap
    teacher_shift,  # [N] or None
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
    out = gradient + row.to(tl.int64) * stride
    t_start = teacher_logits + row.to(tl.int64) * teacher_stride
    by = None if shift is None else tl.load(shift + row)
    t_by = None if teacher_shift is None else tl.load(teacher_shift + row)
    if factor is not None:
        factor += row * factor_stride
    top, log_total = largest_and_log_total(start, None, vocab_size, logit_scale, softcap, BLOCK, by)
    t_top, t_log_total = largest_and_log_total(
        t_start, None, vocab_size, teacher_logit_scale, teacher_softcap, BLOCK, t_by
    )
    student = tl.zeros((BLOCK,), tl.float32)  # of KL(p_s ‖ p_t) or KL(p_s ‖ m)
    teacher = tl.zeros((BLOCK,), tl.float32)  # of KL(p_t ‖ p_s) or KL(p_t ‖ m)
    expectation = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        log_ps = _log_probs(start, by, cols, vocab_size, logit_scale, softcap, top, log_total)
        log_pt = _log_probs(t_start, t_by, cols, vocab_size, teacher_logit_scale, teacher_softcap, t_top, t_log_total)
        ps, pt = tl.exp(log_ps), tl.exp(log_pt)
        if KIND == 2:
            log_m = log_mixture(ps, pt, beta)
        if KIND != 0:
            student += weighted(ps, log_ps - (log_pt if KIND == 1 else log_m))
        if KIND != 1:
            teacher += weighted(pt, log_pt - (log_ps if KIND == 0 else log_m))
        if entropy is not None:
            expectation += weighted(ps, log_ps)
        if GRADIENT and KIND == 0:  # needs no sum
            _store_gradient(
                start, by, out, cols, log_ps, log_pt, 0.0, factor, vocab_size, logit_scale, softcap, beta, KIND,
            )  # fmt: skip
    student_kl, teacher_kl = tl.sum(student, 0), tl.sum(teacher, 0)
    # Unless KIND is 2, one of them is 0
    tl.store(divergence + row, student_kl + teacher_kl if KIND != 2 else (1.0 - beta) * student_kl + beta * teacher_kl)
    if entropy is not None:
        tl.store(entropy + row, -tl.sum(expectation, 0))
    if GRADIENT and KIND != 0:
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            log_ps = _log_probs(start, by, cols, vocab_size, logit_scale, softcap, top, log_total)
            log_pt = _log_probs(
                t_start, t_by, cols, vocab_size, teacher_logit_scale, teacher_softcap, t_top, t_log_total
            )
            _store_gradient(
                start, by, out, cols, log_ps, log_pt, student_kl, factor, vocab_size, logit_scale, softcap, beta, KIND,
            )  # fmt: skip


# Do not specialize on the number of tokens, which changes between steps.
@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _shifted_logits_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    shift,  # [N]
    out,  # [N, V], written: h Wᵀ + b − shift
    out_stride,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_row_blocks, num_col_blocks = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(vocab_size, BLOCK_N)
    row_block, col_block = tile_position(tl.program_id(0), num_row_blocks, num_col_blocks, GROUP_M)
    row, col = row_block * BLOCK_M, col_block * BLOCK_N
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    by = tl.load(shift + rows, mask=rows < num_tokens, other=0.0)
    z = tile_logits(
        hidden, weight, bias, None, row, col, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride, None, None,
        TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    at = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(at, (z - by[:, None]).to(tl.float16), mask=(rows < num_tokens)[:, None] & (cols < vocab_size)[None, :])


def shifted_logits(head: Any, rows: slice, out: Tensor) -> Logits:
    """Compute h Wᵀ + b − shift [N, V] of some rows in float16, in the memory of ``out``; return it and the shift [N].

    A shift close to the largest logit of the row makes the errors of the most probable entries as small as those of float32.
    """
    hidden, weight, bias, sample = head.hidden[rows], head.weight, head.bias, slice(0, SAMPLE)
    first = multiply_rounded(hidden, weight[sample].t())
    first = first if bias is None else first + bias[sample]
    shift = first.float().amax(1).nan_to_num_(0.0, 0.0, 0.0)
    plan, (n, d), z = make_plan(hidden, weight), hidden.shape, out.view(torch.float16)
    _shifted_logits_kernel[(ceil_div(n, plan.block_m) * ceil_div(len(weight), plan.block_n),)](
        operand(hidden, plan.block_m, plan), operand(weight, plan.block_n, plan), bias, shift, z, z.stride(0), n, len(weight), d,
        hidden.stride(0), weight.stride(0), **plan.constants(),
    )  # fmt: skip
    return z, shift


def row_divergences(
    logits: Logits,  # of the student
    gradient: Tensor,  # [N, V], the same memory in the dtype of the gradient
    teacher_logits: Logits,
    student: Any,  # both are a head of ``hf_cce.divergence_spec``
    teacher: Any,
    beta: float,
    divergence: Tensor,  # [N], written
    entropy: Tensor | None,  # [N], written
    scale: Tensor | float | None,  # a scalar or [N, 1], by which the gradient is multiplied; None: keep the logits
) -> None:
    """Compute the divergence of each token, the student's entropy and the gradient of the student's logits."""
    n, v = gradient.shape
    _row_divergence_kernel[(n,)](
        *logits, gradient, *teacher_logits, divergence, entropy, *factor_and_stride(scale, gradient.device), v,
        gradient.stride(0), teacher_logits[0].stride(0), *scale_and_softcap(student), *scale_and_softcap(teacher), beta,
        KIND=kind_of(beta), GRADIENT=scale is not None, **block_and_warps(n),
    )  # fmt: skip


def factor_and_stride(scale: Tensor | float | None, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the tensor that a kernel multiplies gradients by, or None for 1, and its stride between rows."""
    if scale is None or (isinstance(scale, float) and scale == 1.0):
        return None, 0
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=device)
    return factor, factor.stride(0) if factor.dim() else 0
