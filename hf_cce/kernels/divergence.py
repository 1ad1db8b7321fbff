"""Divergence of a student's distribution from a teacher's: each tile computes both models' logits, which stay on chip.

``_pair_kernel`` writes a few numbers per row and tile for ``hf_cce.divergence_passes`` or, if GRADIENT, the gradient of a slab of
the student's logits. No atomics are used, so results are bitwise reproducible.

Legend: z logits after scale, softcap and temperature; p = exp(z − lse); m = (1 − β) p_student + β p_teacher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.inputs import scale_and_softcap
from hf_cce.kernels.inputs import with_contiguous_rows as with_contiguous_rows  # for hf_cce.divergence
from hf_cce.kernels.launch_config import Plan, ceil_div, empty_slab, make_plan, operand, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import softcap_slope, tile_logits, tile_position
from hf_cce.spec import Inputs, LossSpec, WantedStats


def kind_of(beta: float) -> int:
    """Return KIND of the kernels: 0 for the forward KL, 1 for the reverse KL, 2 for the JSD."""
    return {0.0: 0, 1.0: 1}.get(beta, 2)


@triton.jit
def _teacher_tile(
    hidden, weight, bias, row, col, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride, logit_scale, softcap,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the teacher's logits of one tile: loaded from ``hidden`` [N, V] if ``weight`` is None, else computed."""
    if weight is None:
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        at = hidden + rows.to(tl.int64)[:, None] * hidden_stride + cols[None, :]
        inside = (rows < num_tokens)[:, None] & (cols < vocab_size)[None, :]
        z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if logit_scale is not None:
            z *= logit_scale
    else:
        z = tile_logits(
            hidden, weight, bias, None, row, col, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride, logit_scale,
            softcap, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return z


@triton.jit
def weighted(p, x):
    """Return p · x, or 0 where p is 0 and x may be infinite. NaN stays NaN."""
    return tl.where(p == 0, 0.0, p * x)


@triton.jit
def log_mixture(ps, pt, beta):
    """Return log((1 − β) p_student + β p_teacher), finite also where a product underflows and its p does not."""
    return tl.log(tl.maximum((1.0 - beta) * ps + beta * pt, 1.2e-38))


@triton.jit
def _store_means(zs, zt, out, in_rows, tile_lse, tile_teacher_lse, tile_gap, tile_expectation, KIND: tl.constexpr):
    """Write the logsumexps of a tile, and the means under the softmax over the tile."""
    top = tl.max(zs, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # a row of only -inf must give -inf, not NaN
    teacher_top = tl.max(zt, 1)
    teacher_top = tl.where(teacher_top == float("-inf"), 0.0, teacher_top)
    es, et = tl.exp(zs - top[:, None]), tl.exp(zt - teacher_top[:, None])
    total, teacher_total = tl.sum(es, 1), tl.sum(et, 1)
    tl.store(tile_lse + out, top + tl.log(total), mask=in_rows)
    tl.store(tile_teacher_lse + out, teacher_top + tl.log(teacher_total), mask=in_rows)
    safe_total = tl.where(total > 0, total, 1.0)
    if KIND == 0:
        gap = tl.sum(weighted(et, zt - zs), 1) / tl.where(teacher_total > 0, teacher_total, 1.0)
    else:
        gap = tl.sum(weighted(es, zs - zt), 1) / safe_total
    tl.store(tile_gap + out, gap, mask=in_rows)
    if tile_expectation is not None:
        expectation = tl.sum(weighted(es, zs), 1) / safe_total
        tl.store(tile_expectation + out, expectation, mask=in_rows)


@triton.jit
def slope(log_ps, log_pt, offset, beta, KIND: tl.constexpr):
    """Return the derivative of a row's divergence w.r.t. the student's logits; ``offset`` is not used if KIND is 0."""
    ps = tl.exp(log_ps)
    if KIND == 0:
        found = ps - tl.exp(log_pt)
    elif KIND == 1:
        found = weighted(ps, log_ps - log_pt - offset)
    else:
        found = (1.0 - beta) * weighted(ps, log_ps - log_mixture(ps, tl.exp(log_pt), beta) - offset)
    return found


# do_not_specialize: values that change between steps must not trigger recompilation.
@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _pair_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]; here, V is the width of the slab
    bias,  # [V]
    teacher_hidden,  # [N, D_t], or [N, V] logits
    teacher_weight,  # [V, D_t]; None if logits are given
    teacher_bias,  # [V]
    num_valid,  # scalar int64: rows from here on are ignored
    lse,  # [N], if GRADIENT or KIND is 2
    teacher_lse,  # [N], likewise
    offset,  # [N], if GRADIENT; makes the gradient of a row sum to zero: the reverse KL, or KL(p_s ‖ m)
    grad,  # [N], if GRADIENT: upstream gradient of each token's divergence
    out,  # [N, V], written if GRADIENT: gradient w.r.t. the student's h Wᵀ + b; zero where ignored
    # The others are written unless GRADIENT; None if not requested.
    tile_lse,  # [T, N] logsumexp of the tile, unless KIND is 2
    tile_teacher_lse,  # [T, N], likewise
    tile_gap,  # [T, N] KIND 0: mean of z_t − z_s under the tile's p_t; 1: of z_s − z_t under p_s; 2: Σ p_s log(p_s / m)
    tile_expectation,  # [T, N] mean of z_s under the tile's p_s
    tile_divergence,  # [T, N] Σ (1 − β) p_s log(p_s / m) + β p_t log(p_t / m), if KIND is 2
    out_stride,  # between rows of ``out``, or between tiles
    num_tokens,
    vocab_size,
    hidden_size,
    teacher_hidden_size,
    hidden_stride,
    weight_stride,
    teacher_hidden_stride,
    teacher_weight_stride,
    logit_scale,
    softcap,
    teacher_logit_scale,
    teacher_softcap,
    beta,
    KIND: tl.constexpr,
    GRADIENT: tl.constexpr,
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
    valid_rows = tl.load(num_valid)
    # Skip the products if all tokens of the tile are ignored.
    depth, teacher_depth = hidden_size, teacher_hidden_size
    if GRADIENT:
        depth = tl.where(row < valid_rows, hidden_size, 0)
        teacher_depth = tl.where(row < valid_rows, teacher_hidden_size, 0)
    elif row >= valid_rows:
        return
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    in_rows, in_cols = rows < num_tokens, (cols < vocab_size)[None, :]
    valid = in_rows & (rows < valid_rows)
    # Loaded before the products, which hide the latency. Infinite logsumexps give p = 0.
    if GRADIENT or KIND == 2:
        row_lse = tl.load(lse + rows, mask=valid, other=float("inf"))
        row_teacher_lse = tl.load(teacher_lse + rows, mask=valid, other=float("inf"))
    if GRADIENT:
        g = tl.load(grad + rows, mask=valid, other=0.0)
        row_offset = tl.load(offset + rows, mask=valid, other=0.0)
    zt = _teacher_tile(
        teacher_hidden, teacher_weight, teacher_bias, row, col, num_tokens, vocab_size, teacher_depth, teacher_hidden_stride,
        teacher_weight_stride, teacher_logit_scale, teacher_softcap, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    zs = tile_logits(
        hidden, weight, bias, None, row, col, num_tokens, vocab_size, depth, hidden_stride, weight_stride, logit_scale, softcap,
        TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if GRADIENT:
        gradient = slope(zs - row_lse[:, None], zt - row_teacher_lse[:, None], row_offset[:, None], beta, KIND)
        gradient = tl.where(valid[:, None], gradient * g[:, None], 0.0)
        if softcap is not None:
            gradient *= softcap_slope(zs, softcap)
        if logit_scale is not None:
            gradient *= logit_scale
        at = out + row.to(tl.int64) * out_stride
        here = tl.arange(0, BLOCK_M)[:, None] * out_stride + cols[None, :]
        tl.store(at + here, gradient.to(out.dtype.element_ty), mask=in_rows[:, None] & in_cols)
    else:
        tile = col_block.to(tl.int64) * out_stride + rows
        if col + BLOCK_N > vocab_size:
            zs = tl.where(in_cols, zs, float("-inf"))
            zt = tl.where(in_cols, zt, float("-inf"))
        if KIND == 2:
            log_ps, log_pt = zs - row_lse[:, None], zt - row_teacher_lse[:, None]
            ps, pt = tl.exp(log_ps), tl.exp(log_pt)
            log_m = log_mixture(ps, pt, beta)
            student = tl.sum(weighted(ps, log_ps - log_m), 1)
            teacher = tl.sum(weighted(pt, log_pt - log_m), 1)
            tl.store(tile_divergence + tile, (1.0 - beta) * student + beta * teacher, mask=in_rows)
            tl.store(tile_gap + tile, student, mask=in_rows)
        else:
            _store_means(zs, zt, tile, in_rows, tile_lse, tile_teacher_lse, tile_gap, tile_expectation, KIND)


def pair_plan(student: Any, teacher: Any) -> Plan:
    """Choose tiles of at most 128 by 128, since two are accumulated at once.

    Fewer row blocks share weight tiles than with one model, because the hidden states of both models must stay in L2.
    """
    plan = replace(make_plan(student.hidden, student.weight, backward=True), group_m=16)
    if teacher.weight is not None and plan.use_tma:
        plan = replace(plan, use_tma=make_plan(teacher.hidden, teacher.weight, backward=True).use_tma)
    return replace(plan, num_stages=4) if plan.use_tma else plan


def _launch(student: Any, teacher: Any, plan: Plan, beta: float, *rest: Any, gradient: bool = False) -> None:
    """Launch ``_pair_kernel``; ``rest`` are its arguments from ``num_valid`` to ``out_stride``."""
    (n, d), v, given = student.hidden.shape, student.weight.shape[0], teacher.weight is None
    _pair_kernel[(ceil_div(n, plan.block_m) * ceil_div(v, plan.block_n),)](
        operand(student.hidden, plan.block_m, plan), operand(student.weight, plan.block_n, plan), student.bias,
        teacher.hidden if given else operand(teacher.hidden, plan.block_m, plan),
        None if given else operand(teacher.weight, plan.block_n, plan), teacher.bias, *rest,
        n, v, d, 0 if given else teacher.hidden.shape[1], student.hidden.stride(0), student.weight.stride(0),
        teacher.hidden.stride(0), 0 if given else teacher.weight.stride(0), *scale_and_softcap(student),
        *scale_and_softcap(teacher), beta, KIND=kind_of(beta), GRADIENT=gradient, **plan.constants(),
    )  # fmt: skip


def row_lse(head: Any, num_valid: Tensor, entropy: bool, memory_budget: int) -> tuple[Tensor, Tensor]:
    """Return (logsumexp [N], entropy [N] or empty) of one head; zero for ignored tokens."""
    n = head.hidden.shape[0]
    labels = torch.where(torch.arange(n, device=head.hidden.device) < num_valid, 0, -100)
    spec = LossSpec(-100, head.logit_scale, head.softcap, memory_budget=memory_budget)
    stats = logit_stats(Inputs(head.hidden, head.weight, head.bias, labels), spec, WantedStats(entropy=entropy))
    return stats.lse, stats.entropy


def pair_stats(
    student: Any,  # both are the slab's part of a head of ``hf_cce.divergence_spec``, after ``with_contiguous_rows``
    teacher: Any,
    num_valid: Tensor,
    beta: float,
    entropy: bool,
    lse: tuple[Tensor, Tensor] | None = None,  # for the JSD: logsumexps [N] of student and teacher
) -> list[Tensor]:
    """Return the statistics of ``_pair_kernel``, [T, N] each."""
    n, plan = student.hidden.shape[0], pair_plan(student, teacher)
    tiles, kl = ceil_div(student.weight.shape[0], plan.block_n), lse is None
    # Zeros rather than uninitialized memory: rows of ignored tokens are not written, and NaN times zero is NaN.
    parts = [
        torch.zeros((tiles, padded(n)), dtype=torch.float32, device=student.hidden.device)[:, :n] if want else None
        for want in (kl, kl, True, kl and entropy, not kl)
    ]
    rest = (num_valid, *(lse or (None, None)), None, None, None, *parts, padded(n))
    _launch(student, teacher, plan, beta, *rest)
    return [part for part in parts if part is not None]


def pair_gradient(
    student: Any,
    teacher: Any,
    num_valid: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],  # lse of the student, lse of the teacher, offset
    grad: Tensor,  # [N] float32
    beta: float,
) -> Tensor:
    """Return the gradient of ``_pair_kernel``, [N, V] in the dtype of the student's hidden states."""
    plan = pair_plan(student, teacher)
    out = empty_slab(student.hidden, student.hidden.shape[0], student.weight.shape[0])
    _launch(student, teacher, plan, beta, num_valid, *rows, grad, out, *(None,) * 5, out.stride(0), gradient=True)
    return out
