"""The error of the gradient filter, measured: what dropped tiles leave out, for some tokens or some columns of the vocabulary.

The rows of the logits' gradient that belong to some tokens give the error of those tokens' hidden states exactly; its columns
give that of some rows of the weight's gradient. Both cost a few thousandths of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.filter import Kept
from hf_cce.kernels.tiles import softcapped


@triton.jit(do_not_specialize=["num_row_blocks"])
def _residual_kernel(
    z,  # [S, V]: h Wᵀ of some rows, in the order of columns
    sampled,  # [S] int64: which rows
    bias,  # [V], if HAS_BIAS
    lse,  # [N]
    labels,  # [N], V where ignored
    place,  # [T, row blocks]
    mass,  # [T, N]
    grad_lse,  # [N]
    out,  # [S, V], written: the gradient of z less what stands for it, zero in kept tiles
    tile_stride,
    num_row_blocks,
    v,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(sampled + tl.program_id(0))
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < v
    at = tl.program_id(0).to(tl.int64) * v + cols
    x = tl.load(z + at, mask=inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    x *= logit_scale
    slope = 1.0
    if HAS_SOFTCAP:
        x = softcapped(x, softcap)
        slope = 1.0 - (x / softcap) * (x / softcap)
    gradient = tl.exp(x - tl.load(lse + row)) * slope * tl.load(grad_lse + row) * logit_scale
    tile = cols // BLOCK_N
    width = tl.minimum(v - tile * BLOCK_N, BLOCK_N).to(tl.float32)
    spread = tl.load(mass + tile.to(tl.int64) * tile_stride + row, mask=inside, other=0.0).to(tl.float32) / width
    gone = inside & (tl.load(place + tile * num_row_blocks + row // BLOCK_M, mask=inside, other=0) < 0)
    gone &= tl.load(labels + row) < v
    tl.store(out + at, tl.where(gone, gradient - spread, 0.0), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks"])
def _column_residual_kernel(
    z,  # [N, S]: h Wᵀ of some columns
    sampled,  # [S] int64: which columns
    bias,  # [V] in the order of columns, if HAS_BIAS
    lse,  # [N] and so on: as for _residual_kernel
    labels,
    place,
    mass,
    grad_lse,
    out,  # [N, S], written
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_sampled,
    v,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    these = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_rows, known = rows < num_tokens, these < num_sampled
    inside = in_rows[:, None] & known[None, :]
    cols = tl.load(sampled + these, mask=known, other=0).to(tl.int32)
    at = rows.to(tl.int64)[:, None] * num_sampled + these[None, :]
    x = tl.load(z + at, mask=inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + cols, mask=known, other=0.0).to(tl.float32)[None, :]
    x *= logit_scale
    slope = 1.0
    if HAS_SOFTCAP:
        x = softcapped(x, softcap)
        slope = 1.0 - (x / softcap) * (x / softcap)
    valid = tl.load(labels + rows, mask=in_rows, other=v) < v
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    g = tl.load(grad_lse + rows, mask=in_rows, other=0.0)
    gradient = tl.exp(x - row_lse[:, None]) * slope * (g * logit_scale)[:, None]
    tile = cols // BLOCK_N
    width = tl.minimum(v - tile * BLOCK_N, BLOCK_N).to(tl.float32)
    spread = tl.load(mass + tile.to(tl.int64)[None, :] * tile_stride + rows[:, None], mask=inside, other=0.0)
    gone = tl.load(place + tile * num_row_blocks + tl.program_id(0), mask=known, other=0) < 0
    left = tl.where(gone[None, :] & valid[:, None], gradient - spread.to(tl.float32) / width[None, :], 0.0)
    tl.store(out + at, left, mask=inside)


def residual(
    z: Tensor,  # [S, V]
    sampled: Tensor,  # [S]
    bias: Tensor | None,
    lse: Tensor,  # [N]
    labels: Tensor,  # [N]
    place: Tensor,
    mass: Tensor,  # [T, N]
    grad_lse: Tensor,  # [N]
    dtype: torch.dtype,
    logit_scale: float,
    softcap: float,
    block_m: int,
    block_n: int,
) -> Tensor:
    """What the dropped tiles leave out of the gradient of some rows' logits, [S, V]."""
    v = z.shape[1]
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    _residual_kernel[(z.shape[0], triton.cdiv(v, 1024))](
        z, sampled, bias, lse, labels, place, mass, grad_lse, out, mass.stride(0), place.shape[1], v, logit_scale, softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK=1024,
    )  # fmt: skip
    return out


def sample_columns(kept: Kept, count: int, v: int, block_n: int) -> tuple[Tensor, Tensor]:
    """(columns [S] int64, what each stands for [S] float32): more from where more energy was dropped, for an unbiased sum."""
    dropped = torch.where(kept.place < 0, kept.energy, 0.0).sum(1)  # of each column block
    upto = dropped.cumsum(0)
    at = torch.arange(count, device=upto.device)
    block = torch.searchsorted(upto, (at + 0.5) * (upto[-1] / count)).clamp_max(len(upto) - 1)
    width = (v - block * block_n).clamp_max(block_n)
    of = dropped[block]
    return block * block_n + at * 37 % width, torch.where(of > 0, width * upto[-1] / (count * of), 0.0)


def column_residual(
    z: Tensor,  # [N, S]
    sampled: Tensor,  # [S]
    bias: Tensor | None,
    lse: Tensor,  # [N]
    labels: Tensor,  # [N]
    place: Tensor,
    mass: Tensor,  # [T, N]
    grad_lse: Tensor,  # [N]
    dtype: torch.dtype,
    logit_scale: float,
    softcap: float,
    block_m: int,
    block_n: int,
    v: int,
) -> Tensor:
    """As ``residual``, of some columns instead of some rows, [N, S]."""
    (n, count), out = z.shape, torch.empty(z.shape, dtype=dtype, device=z.device)
    _column_residual_kernel[(triton.cdiv(n, block_m), triton.cdiv(count, 16))](
        z, sampled, bias, lse, labels, place, mass, grad_lse, out, mass.stride(0), n, place.shape[1], count, v, logit_scale,
        softcap or 1.0, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_S=16,
    )  # fmt: skip
    return out
