"""The error of the gradient filter, measured on some tokens and some columns of the vocabulary, and that of bfloat16 logits.

What dropped tiles leave out of the rows of the logits' gradient gives the error of some tokens' hidden states; of its columns,
that of some rows of the weight's gradient. Tokens are sampled by the energy that they lost, rows by that of their tiles. What
rounding the logits to bfloat16, as a loss on full logits does, makes of some tokens' rows is what "auto" compares with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch_config import ceil_div
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


@triton.jit
def _rounding_kernel(
    z,  # [S, V]: h Wᵀ of some rows
    sampled,  # [S] int64: which rows
    bias,  # [V], if HAS_BIAS
    lse,  # [N]
    labels,  # [N], V where ignored
    grad_lse,  # [N]
    grad_label,  # [N], if HAS_SOFTCAP
    out,  # [S, V], written: what the gradient of z changes by when z is rounded to the dtype of out
    squares,  # [S], written: the sum of the squares of a row of out
    v,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(sampled + tl.program_id(0))
    label = tl.load(labels + row)
    valid = label < v
    row_lse = tl.load(lse + row)
    g = tl.where(valid, tl.load(grad_lse + row) * logit_scale, 0.0)
    if HAS_SOFTCAP:
        of_label = tl.where(valid, tl.load(grad_label + row) * logit_scale, 0.0)
    start = tl.program_id(0).to(tl.int64) * v
    total = tl.zeros((BLOCK,), tl.float32)
    found = tl.zeros((BLOCK,), tl.float32)
    rounded_lse = row_lse
    # Once for the logsumexp of the rounded row, which moves with them, and once for the difference.
    for turn in tl.static_range(2):
        for first in range(0, v, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            inside = cols < v
            x = tl.load(z + start + cols, mask=inside, other=0.0)
            if HAS_BIAS:
                x += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
            y = x.to(out.dtype.element_ty).to(tl.float32) * logit_scale
            x *= logit_scale
            if HAS_SOFTCAP:
                x, y = softcapped(x, softcap), softcapped(y, softcap)
            q = tl.where(inside, tl.exp(y - rounded_lse), 0.0)
            if turn == 0:
                total += q
            else:
                p = tl.exp(x - row_lse)
                if HAS_SOFTCAP:
                    before = 1.0 - (x / softcap) * (x / softcap)
                    after = 1.0 - (y / softcap) * (y / softcap)
                    moved = (q * after - p * before) * g
                    moved += tl.where(cols == label, (after - before) * of_label, 0.0)
                else:
                    moved = (q - p) * g
                tl.store(out + start + cols, moved, mask=inside)
                found += tl.where(inside, moved * moved, 0.0)
        if turn == 0:
            rounded_lse += tl.log(tl.sum(total))
    tl.store(squares + tl.program_id(0), tl.sum(found))


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
    _residual_kernel[(z.shape[0], ceil_div(v, 1024))](
        z, sampled, bias, lse, labels, place, mass, grad_lse, out, mass.stride(0), place.shape[1], v, logit_scale, softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK=1024,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "num_col_blocks"])
def _token_energy_kernel(
    tile_lse,  # [T, N]
    tile_ratio,  # [T, N]
    place,  # [T, row blocks], if DROPPED
    lse,  # [N]
    labels,  # [N], V where ignored
    grad_lse,  # [N]
    # [N], written, times the square of grad_lse: the energy of the token's rows in dropped tiles, or in all, as in
    # hf_cce.kernels.filter; if LIKELY, how likely rounding is to matter there, as in hf_cce.kernels.measure
    out,
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    v,
    DROPPED: tl.constexpr,
    LIKELY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row_block = tl.program_id(0)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    valid = tl.load(labels + rows, mask=in_rows, other=v) < v
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, num_col_blocks, BLOCK_T):
        blocks = first + tl.arange(0, BLOCK_T)
        known = blocks < num_col_blocks
        if DROPPED:
            known = known & (tl.load(place + blocks * num_row_blocks + row_block, mask=known, other=0) < 0)
        at = blocks.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        inside = known[:, None] & valid[None, :]
        p = tl.exp(tl.load(tile_lse + at, mask=inside, other=float("-inf")) - row_lse[None, :])
        e = p * p * tl.load(tile_ratio + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(inside, e, 0.0), 0)
    if LIKELY:
        total = tl.minimum(total, 1.0)
        total *= (1.0 - tl.sqrt(total)) * tl.sqrt(1.0 - total)
    g = tl.load(grad_lse + rows, mask=in_rows & valid, other=0.0)
    tl.store(out + rows, total * g * g, mask=in_rows)


def token_energy(
    tile_lse: Tensor,  # [T, N]
    tile_ratio: Tensor,  # [T, N]
    place: Tensor | None,  # [T, row blocks], of dropped tiles alone; None: of all
    lse: Tensor,  # [N]
    labels: Tensor,  # [N]
    grad_lse: Tensor,  # [N]
    v: int,
    block_m: int,
    likely: bool = False,
) -> Tensor:
    """E = Σ_tiles Σ (p − S/width)² of each token, [N] float32; E (1 − √E) √(1 − E) if ``likely``; times ``grad_lse``²."""
    n, cols = lse.numel(), len(tile_lse)
    rows = ceil_div(n, block_m)
    out = torch.empty(n, device=lse.device, dtype=torch.float32)
    _token_energy_kernel[(rows,)](
        tile_lse, tile_ratio, place, lse, labels, grad_lse, out, tile_lse.stride(0), n, rows, cols, v,
        DROPPED=place is not None, LIKELY=likely, BLOCK_M=block_m, BLOCK_T=16,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_blocks", "count", "size"])
def _sample_kernel(
    dropped,  # [blocks]
    places,  # [S] int64, written
    stands_for,  # [S], written
    num_blocks,
    count,  # S
    size,
    block,
    even,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    each = tl.arange(0, BLOCK)
    parts = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_blocks, BLOCK):
        parts += tl.load(dropped + first + each, mask=first + each < num_blocks, other=0.0)
    added = tl.sum(parts) * (even / num_blocks)
    total = tl.sum(parts) + added * num_blocks
    at = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    target = (at.to(tl.float32) + 0.5) * (total / count)
    chosen = tl.zeros((BLOCK_S,), tl.int32)
    before = 0.0
    for first in range(0, num_blocks, BLOCK):
        inside = first + each < num_blocks
        x = tl.where(inside, tl.load(dropped + first + each, mask=inside, other=0.0) + added, 0.0)
        upto = before + tl.cumsum(x, 0)
        chosen += tl.sum((inside[None, :] & (upto[None, :] < target[:, None])).to(tl.int32), 1)
        before += tl.sum(x)
    chosen = tl.minimum(chosen, num_blocks - 1)
    of = tl.load(dropped + chosen) + added
    width = tl.minimum(size - chosen * block, block)
    tl.store(places + at, (chosen * block + at * 37 % width).to(tl.int64), mask=at < count)
    # Of nothing dropped nothing; what is no number stays none.
    share = tl.where(of == 0.0, 0.0, width.to(tl.float32) * total / (count * tl.where(of == 0.0, 1.0, of)))
    tl.store(stands_for + at, share, mask=at < count)


def sample(dropped: Tensor, count: int, size: int, block: int, even: float = 0.0) -> tuple[Tensor, Tensor]:
    """(places [S] int64 in ``size``, what each stands for [S] float32), for a sum of squares over all places without bias.

    More come from blocks with more ``dropped`` energy [blocks], to each of which ``even`` times their mean is added.
    """
    if count >= size:
        return torch.arange(size, device=dropped.device), torch.ones(size, device=dropped.device, dtype=torch.float32)
    places = torch.empty(count, dtype=torch.int64, device=dropped.device)
    stands_for = torch.empty(count, device=dropped.device, dtype=torch.float32)
    _sample_kernel[(ceil_div(count, 16),)](
        dropped, places, stands_for, len(dropped), count, size, block, even, BLOCK=1024, BLOCK_S=16
    )
    return places, stands_for


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
    _column_residual_kernel[(ceil_div(n, block_m), ceil_div(count, 16))](
        z, sampled, bias, lse, labels, place, mass, grad_lse, out, mass.stride(0), n, place.shape[1], count, v, logit_scale,
        softcap or 1.0, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_S=16,
    )  # fmt: skip
    return out


def rounding(
    z: Tensor,  # [S, V]
    sampled: Tensor,  # [S]
    bias: Tensor | None,
    lse: Tensor,  # [N]
    labels: Tensor,  # [N]
    grad_lse: Tensor,  # [N]
    grad_label: Tensor,  # [N]
    dtype: torch.dtype,
    logit_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """(what rounding to ``dtype`` does to some rows of the logits' gradient [S, V], the sums of their squares [S])."""
    count, v = z.shape
    out, squares = (
        torch.empty(z.shape, dtype=dtype, device=z.device),
        torch.empty(count, device=z.device, dtype=torch.float32),
    )
    _rounding_kernel[(count,)](
        z, sampled, bias, lse, labels, grad_lse, grad_label, out, squares, v, logit_scale, softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap > 0, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return out, squares
