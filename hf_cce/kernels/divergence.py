"""Divergences of tokens, and their gradients, from rows of both models' logits.

PyTorch computes the logits, or ``shifted_logits``, which hardly rounds them. No atomics are used, so results are bitwise
reproducible.

Legend: z logits after scale, softcap and temperature; p = exp(z − lse); m = (1 − β) p_student + β p_teacher.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.inputs import LogitInputs, TileStats, scale_and_softcap
from hf_cce.kernels.inputs import with_contiguous_rows as with_contiguous_rows  # for hf_cce.divergence
from hf_cce.kernels.labels import LabelLogits
from hf_cce.kernels.launch_config import ceil_div, make_plan, operand, padded, uses_hopper
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.rows import block_and_warps, largest_and_log_total, load_logits
from hf_cce.kernels.tiles import exp, softcap_slope, tile_logits, tile_position
from hf_cce.matmul import multiply_rounded

SAMPLE = 1024  # vocabulary entries of which the largest logit is the shift of a row


class Logits(NamedTuple):
    """Logits of one model, which may lack a number per row, or the probabilities of a teacher; see ``Head.form``."""

    values: Tensor  # [N, V]
    head: Any  # its scale and softcap are still to be applied
    shift: Tensor | None = None  # [N], to be added first
    lse: Tensor | None = None  # [parts, N], logsumexps of parts of the vocabulary; None: not computed


class Shifts(NamedTuple):
    """What is subtracted from the logits of each row, before they are rounded to float16."""

    values: Tensor  # [N]
    active: Tensor  # [blocks of 128 rows] int32, all 1: the Hopper kernel skips blocks with a 0


def kind_of(beta: float) -> int:
    """Return KIND of the kernels: 0 for the forward KL, 1 for the reverse KL, 2 for the JSD."""
    return {0.0: 0, 1.0: 1}.get(beta, 2)


@triton.jit
def weighted(p, x):
    """Return p · x, or 0 where p is 0 and x may be infinite. NaN stays NaN."""
    return tl.where(p == 0, 0.0, p * x)


@triton.jit
def log_mixture(ps, pt, beta):
    """Return log((1 − β) p_student + β p_teacher), finite also where a product underflows and its p does not."""
    return tl.log(tl.maximum((1.0 - beta) * ps + beta * pt, 1.2e-38))


@triton.jit
def terms_of(log_ps, log_pt, beta, KIND: tl.constexpr):
    """Return the terms of the divergence, and their derivatives with respect to log p of the student."""
    ps, pt = exp(log_ps), exp(log_pt)
    if KIND == 0:
        terms, derivatives = weighted(pt, log_pt - log_ps), -pt
    elif KIND == 1:
        terms = weighted(ps, log_ps - log_pt)
        derivatives = terms
    else:
        log_m = log_mixture(ps, pt, beta)
        derivatives = (1.0 - beta) * weighted(ps, log_ps - log_m)
        terms = derivatives + beta * weighted(pt, log_pt - log_m)
    return terms, derivatives


@triton.jit
def _normalizer(row, start, shift, lse, num_parts, lse_stride, vocab_size, logit_scale, softcap, BLOCK: tl.constexpr):
    """Return (largest logit, logsumexp less it) of a row, from the logsumexps of parts of the vocabulary if there are any."""
    if lse is not None:
        found = largest_and_log_total(lse + row, None, num_parts, None, None, BLOCK, None, lse_stride)
    else:
        found = largest_and_log_total(start, None, vocab_size, logit_scale, softcap, BLOCK, shift)
    return found


@triton.jit
def _log_probs(start, shift, cols, vocab_size, logit_scale, softcap, largest, log_total):
    """Return log p; more accurate than z − lse if p is close to 1."""
    return load_logits(start, None, cols, vocab_size, logit_scale, softcap, shift) - largest - log_total


@triton.jit
def _log_targets(start, shift, cols, vocab_size, logit_scale, softcap, largest, log_total, FORM: tl.constexpr):
    """Return log p of a teacher given in this form."""
    if FORM == "logits":
        log_p = _log_probs(start, shift, cols, vocab_size, logit_scale, softcap, largest, log_total)
    else:
        log_p = load_logits(start, None, cols, vocab_size, None, None)
        if FORM == "p":
            log_p = tl.log(tl.where(cols < vocab_size, log_p, 0.0))
    return log_p


@triton.jit
def _store_gradient(
    start, shift, out, cols, log_ps, log_pt, d_sum, factor, vocab_size, logit_scale, softcap, beta, KIND: tl.constexpr
):
    """Write the gradient of the divergence times ``factor``, a pointer, to ``out``, the memory of the student's logits.

    ``d_sum``: the sum of the derivatives with respect to log p.
    """
    gradient = terms_of(log_ps, log_pt, beta, KIND)[1] - weighted(exp(log_ps), d_sum)
    if factor is not None:
        gradient *= tl.load(factor).to(tl.float32)
    if softcap is not None:
        gradient *= softcap_slope(load_logits(start, None, cols, vocab_size, logit_scale, softcap, shift), softcap)
    tl.store(out + cols, gradient.to(out.dtype.element_ty), mask=cols < vocab_size)


@Kernel
@triton.jit
def _row_divergence_kernel(
    logits,  # [N, V] of the student, before scale and softcap
    shift,  # [N], to be added to the logits, or None
    lse,  # [num_parts, N], logsumexps of parts of the vocabulary, or None: computed from ``logits``
    gradient,  # the same memory in the dtype of the gradient, which overwrites the logits if GRADIENT
    teacher_logits,  # [N, V], before scale and softcap
    teacher_shift,  # [N] or None
    teacher_lse,  # [num_parts, N] or None
    num_parts,  # of the vocabulary
    lse_stride,  # between the parts
    divergence,  # [N], written
    entropy,  # [N], written: the student's; None if not requested
    row_stats,  # [3, N] of the whole vocabulary: logsumexps, sum of derivatives (see ``terms_of``); read if KNOWN, or written
    row_stats_stride,
    factor,  # [N] or scalar that the gradient is multiplied by; None: 1
    factor_stride,  # 0 for a scalar
    vocab_size,
    stride,
    teacher_stride,
    logit_scale,
    softcap,
    t_logit_scale,
    t_softcap,
    beta,
    KIND: tl.constexpr,
    T_FORM: tl.constexpr,  # of the teacher's "logits": may also be "p" or "log p", with KIND 0
    GRADIENT: tl.constexpr,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the divergence of a row and its gradient or, if KNOWN, only the gradient; ``logits`` may then be some columns."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    out = gradient + row.to(tl.int64) * stride
    t_start = teacher_logits + row.to(tl.int64) * teacher_stride
    by = None if shift is None else tl.load(shift + row)
    t_by = None if teacher_shift is None else tl.load(teacher_shift + row)
    if factor is not None:
        factor += row * factor_stride
    if row_stats is not None:
        row_stats += row
    top, log_total = _normalizer(row, start, by, lse, num_parts, lse_stride, vocab_size, logit_scale, softcap, BLOCK)
    t_top, t_log_total = 0.0, 0.0
    if T_FORM == "logits":
        t_top, t_log_total = _normalizer(
            row, t_start, t_by, teacher_lse, num_parts, lse_stride, vocab_size, t_logit_scale, t_softcap, BLOCK
        )
    d_sum = -1.0  # the sum of the derivatives with respect to log p, if KIND is 0 and the teacher is normalized
    if KNOWN:
        d_sum = tl.load(row_stats + 2 * row_stats_stride)
    else:
        if T_FORM != "logits":
            pt = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, vocab_size, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                pt += exp(_log_targets(t_start, t_by, cols, vocab_size, None, None, t_top, t_log_total, T_FORM))
            d_sum = -tl.sum(pt, 0)
        total, d_sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        expectation = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            log_ps = _log_probs(start, by, cols, vocab_size, logit_scale, softcap, top, log_total)
            log_pt = _log_targets(t_start, t_by, cols, vocab_size, t_logit_scale, t_softcap, t_top, t_log_total, T_FORM)
            terms, derivatives = terms_of(log_ps, log_pt, beta, KIND)
            total += terms
            d_sums += derivatives
            if entropy is not None:
                expectation += weighted(exp(log_ps), log_ps)
            if GRADIENT and KIND == 0:
                _store_gradient(
                    start, by, out, cols, log_ps, log_pt, d_sum, factor, vocab_size, logit_scale, softcap, beta, KIND
                )
        tl.store(divergence + row, tl.sum(total, 0))
        if KIND != 0:
            d_sum = tl.sum(d_sums, 0)
        if entropy is not None:
            tl.store(entropy + row, -tl.sum(expectation, 0))
        if row_stats is not None:
            tl.store(row_stats, top + log_total)
            tl.store(row_stats + row_stats_stride, t_top + t_log_total)
            tl.store(row_stats + 2 * row_stats_stride, d_sum)
    if GRADIENT and (KIND != 0 or KNOWN):
        for first in range(0, vocab_size, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            log_ps = _log_probs(start, by, cols, vocab_size, logit_scale, softcap, top, log_total)
            log_pt = _log_targets(t_start, t_by, cols, vocab_size, t_logit_scale, t_softcap, t_top, t_log_total, T_FORM)
            _store_gradient(
                start, by, out, cols, log_ps, log_pt, d_sum, factor, vocab_size, logit_scale, softcap, beta, KIND
            )


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


def shifts_of(head: Any) -> Shifts:
    """Return numbers about as large as the largest product h Wᵀ + b of each row."""
    first = multiply_rounded(head.hidden, head.weight[:SAMPLE].t())
    first = first if head.bias is None else first + head.bias[:SAMPLE]
    largest = first.amax(1).float().nan_to_num_(0.0, 0.0, 0.0)
    return Shifts(largest, largest.new_ones(ceil_div(len(largest), 128), dtype=torch.int32))


def shifted_logits(head: Any, rows: slice, out: Tensor, shifts: Shifts, lse: bool = True) -> Logits:
    """Compute h Wᵀ + b − shift [N, V] of some rows in float16, in the memory of ``out``.

    A shift close to the largest logit of the row makes the errors of the most probable entries as small as those of float32.
    The Hopper kernel applies the scale and, if ``lse``, computes the logsumexps, too; both results are less the shift.
    """
    hidden, weight, bias, shift = head.hidden[rows], head.weight, head.bias, shifts.values[rows]
    plan, (n, d), z = make_plan(hidden, weight), hidden.shape, out.view(torch.float16)
    if uses_hopper(plan, bias, head.softcap):
        from hf_cce.kernels import hopper

        v, scale, active = len(weight), head.logit_scale, shifts.active
        parts = shift.new_empty((ceil_div(v, hopper.BLOCK_N.value), padded(n))) if lse else None
        inputs = LogitInputs(hidden, weight, None, active, 0, scale, 0.0)  # the labels are not used
        tiles, shift = None if parts is None else TileStats(parts), shift if scale == 1.0 else shift * scale
        hopper.launch(inputs, LabelLogits(shift, active), 0, v, z, tiles=tiles, shift=shift)
        return Logits(z, head._replace(logit_scale=1.0), None, parts)
    _shifted_logits_kernel[(ceil_div(n, plan.block_m) * ceil_div(len(weight), plan.block_n),)](
        operand(hidden, plan.block_m, plan), operand(weight, plan.block_n, plan), bias, shift, z, z.stride(0), n, len(weight), d,
        hidden.stride(0), weight.stride(0), **plan.constants(),
    )  # fmt: skip
    return Logits(z, head, shift)


def row_divergences(
    logits: Logits,  # of the student
    gradient: Tensor,  # [N, V], the same memory in the dtype of the gradient
    teacher_logits: Logits,
    beta: float,
    results: tuple[Tensor, Tensor | None] | None,  # written: divergence, entropy; None if ``row_stats`` are known
    row_stats: Tensor | None,  # [3, N], see ``_row_divergence_kernel``
    scale: Tensor | float | None,  # a scalar or [N, 1], by which the gradient is multiplied; None: keep the logits
) -> None:
    """Compute the divergence of each token, the student's entropy and the gradient of the student's logits."""
    n, v = gradient.shape
    if results is None and row_stats is not None:
        logits, teacher_logits = logits._replace(lse=row_stats[:1]), teacher_logits._replace(lse=row_stats[1:2])
    parts = teacher_logits.lse if logits.lse is None else logits.lse
    num_parts, lse_stride = (1, 16) if parts is None else (len(parts), parts.stride(0))
    _row_divergence_kernel[(n,)](
        logits.values, logits.shift, logits.lse, gradient, teacher_logits.values, teacher_logits.shift, teacher_logits.lse,
        num_parts, lse_stride, *(results or (None, None)), row_stats, 0 if row_stats is None else row_stats.stride(0),
        *factor_and_stride(scale, gradient.device), v, gradient.stride(0), teacher_logits.values.stride(0),
        *scale_and_softcap(logits.head), *scale_and_softcap(teacher_logits.head), beta, KIND=kind_of(beta),
        T_FORM=teacher_logits.head.form,
        GRADIENT=scale is not None, KNOWN=results is None, **block_and_warps(n),
    )  # fmt: skip


def factor_and_stride(scale: Tensor | float | None, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the tensor that a kernel multiplies gradients by, or None for 1, and its stride between rows."""
    if scale is None or (isinstance(scale, float) and scale == 1.0):
        return None, 0
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=device)
    return factor, factor.stride(0) if factor.dim() else 0
