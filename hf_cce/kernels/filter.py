"""The gradient filter: which tiles of the logits' gradient are computed, and what stands for the others.

Vocabulary and tokens are in an order in which what matters lies together (hf_cce.kernels.order). The forward pass leaves,
for each row of each tile, its mass S = Σ p (as a logsumexp) and its energy Σ (p − S/width)² over S²; both come from the tile
alone. In the backward pass the tiles of least energy are dropped while their sum stays under
τ² Σ_i [(1 − p_label)² + Σ (p − S/width)²]. A dropped tile keeps its mass, spread evenly over its columns. A tile that holds a
label is never dropped, so the label's term is exact. With a softcap all of it is of p (1 − (z/softcap)²), the gradient's size.

Everything is decided on the device, in integers or in a fixed order: results repeat bit for bit and the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.plan import ceil_div, padded, power_of_2

# Energies are sorted into bins of a quarter of an octave, from 2⁻¹⁰⁰ to 2²⁸; the last holds what must be kept.
BINS = tl.constexpr(512)
MASS_GROUP = 16  # column blocks whose mass one program makes


@triton.jit
def _bin(energy):
    known = (energy > 0.0) & (energy < float("inf"))
    octaves = tl.log2(tl.where(known, energy, 1.0))
    place = tl.minimum(tl.maximum(tl.floor(4.0 * octaves) + 400.0, 0.0), 510.0).to(tl.int32)
    # infinite or not a number: kept
    return tl.where(known, place, tl.where(energy == 0.0, 0, 511))


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "span"])
def _score_kernel(
    tile_lse,  # [T, N]
    tile_ratio,  # [T, N]
    lse,  # [N]
    label_logit,  # [N]
    labels,  # [N], V where ignored
    energy,  # [T, row blocks], written; infinite for a tile that holds a label
    part,  # [programs], written: this program's part of what the energies are compared with
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    span,  # column blocks of a program
    v,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row_block, begin = tl.program_id(0), tl.program_id(1) * span
    program = tl.program_id(1) * num_row_blocks + row_block
    end = tl.minimum(begin + span, num_col_blocks)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=v)
    valid = label < v
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    at_label = tl.load(label_logit + rows, mask=in_rows, other=0.0)
    wrong = tl.where(valid, 1.0 - tl.exp(at_label - row_lse), 0.0)
    if HAS_SOFTCAP:
        wrong *= 1.0 - (at_label / softcap) * (at_label / softcap)
    total = tl.where(begin == 0, tl.sum(wrong * wrong), 0.0)
    label_block = label // BLOCK_N
    for first in range(begin, end, BLOCK_T):
        blocks = first + tl.arange(0, BLOCK_T)
        inside = blocks < end
        at = blocks.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        mask = inside[:, None] & valid[None, :]
        mass = tl.exp(tl.load(tile_lse + at, mask=mask, other=float("-inf")) - row_lse[None, :])
        e = tl.sum(mass * mass * tl.load(tile_ratio + at, mask=mask, other=0.0).to(tl.float32), 1)
        held = tl.max(((label_block[None, :] == blocks[:, None]) & valid[None, :]).to(tl.int32), 1) > 0
        total += tl.sum(tl.where(held, 0.0, e))
        tl.store(energy + blocks * num_row_blocks + row_block, tl.where(held, float("inf"), e), mask=inside)
    tl.store(part + program, total)


@Kernel
@triton.jit(do_not_specialize=["num_tiles"])
def _count_kernel(energy, counts, num_tiles, BLOCK: tl.constexpr):
    """Tiles by energy, [programs, BINS]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(energy + at, mask=at < num_tiles, other=float("inf"))
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(_bin(e), BINS))


@Kernel
@triton.jit(do_not_specialize=["num_programs"])
def _sum_counts_kernel(counts, sums, num_programs, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    bins = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, num_programs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.sum(
            tl.load(counts + at[:, None] * BINS + bins[None, :], mask=(at < num_programs)[:, None], other=0), 0
        )
    tl.store(sums + bins, total)


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "num_programs"])
def _columns_kernel(
    energy,  # [T, row blocks]
    part,  # [programs of _score_kernel]
    sums,  # [BINS]: tiles by energy
    tau,  # scalar
    place,  # [T, row blocks] int32, written: which of the kept tiles of its column block it is, from 0; -1 where dropped
    count,  # [T] int32, written: tiles that are kept
    num_row_blocks,
    num_programs,
    ROWS: tl.constexpr,  # row blocks, or more
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_programs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(part + at, mask=at < num_programs, other=0.0)
    bins = tl.arange(0, BINS)
    # A bin's upper edge stands for its energies, so the sum is never taken too small.
    below = tl.cumsum(tl.load(sums + bins).to(tl.float32) * tl.exp2((bins - 399).to(tl.float32) / 4.0), 0)
    limit, whole = tl.load(tau), tl.sum(total)
    # Where nothing is wrong, as with no label at all, tiles without energy are still nothing to compute.
    empty = tl.where(whole == 0.0, 1, 0)  # bins
    fits = ((below <= limit * limit * whole) | (bins < empty)) & (bins < 511)
    cutoff = tl.sum(fits.to(tl.int32))
    block = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    inside = rows < num_row_blocks
    e = tl.load(energy + block * num_row_blocks + rows, mask=inside, other=0.0)
    kept = inside & (_bin(e) >= cutoff)
    before = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(place + block * num_row_blocks + rows, tl.where(kept, before, -1), mask=inside)
    tl.store(count + block, tl.sum(kept.to(tl.int32)))


@Kernel
@triton.jit(do_not_specialize=["room", "PASSES"])
def _scan_kernel(
    count,  # [T]
    start,  # [T + 1], written: kept tiles in the column blocks before
    pass_of,  # [T], written
    pass_block,  # [P + 1], written: first column block of each pass
    pass_start,  # [P + 1], written: kept tiles before each pass
    num_col_blocks,
    room,
    PASSES,
    COLS: tl.constexpr,  # column blocks, or more
):
    cols = tl.arange(0, COLS)
    inside = cols < num_col_blocks
    counts = tl.load(count + cols, mask=inside, other=0)
    upto = tl.cumsum(counts, 0)
    number = (upto - counts) // room
    tl.store(start + cols, upto - counts, mask=inside)
    tl.store(start + num_col_blocks, tl.sum(counts))
    tl.store(pass_of + cols, number, mask=inside)
    for p in range(PASSES + 1):
        earlier = inside & (number < p)
        tl.store(pass_block + p, tl.sum(earlier.to(tl.int32)))
        tl.store(pass_start + p, tl.sum(tl.where(earlier, counts, 0)))


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "PASSES"])
def _rows_kernel(
    place,  # [T, row blocks]
    start,  # [T + 1]
    pass_of,  # [T]
    pass_start,  # [P + 1]
    tiles,  # [kept], written: column block · row blocks + row block, in the order of column blocks
    tile_rows,  # [kept], written: the row block alone
    row_tiles,  # [row blocks, T] int64, written: of the kept tiles of a row block, column block and, times 2³², slot in its pass
    row_pass,  # [row blocks, P + 1], written: how many of them come before each pass
    num_row_blocks,
    num_col_blocks,
    PASSES,
    PASSES_2: tl.constexpr,  # PASSES + 1, or more
    BLOCK: tl.constexpr,
):
    row_block = tl.program_id(0)
    passes = tl.arange(0, PASSES_2)
    before = tl.zeros((PASSES_2,), tl.int32)
    done = 0
    for first in range(0, num_col_blocks, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        inside = cols < num_col_blocks
        index = tl.load(place + cols * num_row_blocks + row_block, mask=inside, other=-1)
        kept = index >= 0
        number = tl.load(pass_of + cols, mask=inside, other=0)
        slot = tl.load(start + cols, mask=inside, other=0) + index
        at = row_block * num_col_blocks + done + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(tiles + slot, cols * num_row_blocks + row_block, mask=kept)
        tl.store(tile_rows + slot, row_block + tl.zeros((BLOCK,), tl.int32), mask=kept)
        in_pass = slot - tl.load(pass_start + number, mask=inside, other=0)
        tl.store(row_tiles + at, in_pass.to(tl.int64) * 4294967296 + cols, mask=kept)
        before += tl.sum((kept[:, None] & (number[:, None] < passes[None, :])).to(tl.int32), 0)
        done += tl.sum(kept.to(tl.int32))
    tl.store(row_pass + row_block * (PASSES + 1) + passes, before, mask=passes <= PASSES)


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "PASSES"])
def _longest_first_kernel(
    row_pass,  # [row blocks, P + 1]
    row_order,  # [P, row blocks], written: the row blocks of each pass, those with most kept tiles first
    num_row_blocks,
    PASSES,
    ROWS: tl.constexpr,  # row blocks, or more
):
    row, number = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    inside = rows < num_row_blocks
    at = row_pass + rows * (PASSES + 1) + number
    lengths = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
    own = tl.sum(tl.where(rows == row, lengths, 0))
    ahead = inside & ((lengths > own) | ((lengths == own) & (rows < row)))
    tl.store(row_order + number * num_row_blocks + tl.sum(ahead.to(tl.int32)), row)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks"], do_not_specialize_on_alignment=["leaves"])
def _mass_kernel(
    tile_lse,  # [T, N]
    tile_damping,  # [T, N], if HAS_DAMPING
    place,  # [T, row blocks]
    lse,  # [N]
    labels,  # [N], V where ignored
    grad_lse,  # [N]
    mass,  # [T, N], written: the gradient that a dropped tile's row keeps, zero for the others
    dropped,  # [T, row blocks], written: share of the tokens' probability in the dropped tiles
    leaves,  # [T, row blocks], written: the sum of what is written to mass
    of_token,  # [T / GROUP, N], written: likewise, over the column blocks of a program
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    v,
    logit_scale,
    HAS_DAMPING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_block = tl.program_id(0)
    blocks = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows, known = rows < num_tokens, blocks < num_col_blocks
    # Ignored tokens are left out by their numbers, not by masks: those of whole rows let loads stay vectors.
    gone = known & (tl.load(place + blocks * num_row_blocks + row_block, mask=known, other=0) < 0)
    at = blocks.to(tl.int64)[:, None] * tile_stride + rows[None, :]
    inside = gone[:, None] & in_rows[None, :]
    part = tl.load(tile_lse + at, mask=inside, other=float("-inf"))
    valid = tl.load(labels + rows, mask=in_rows, other=v) < v
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    g = tl.where(valid, tl.load(grad_lse + rows, mask=in_rows, other=0.0) * logit_scale, 0.0)
    p = tl.exp(part - row_lse[None, :])
    p = tl.where(valid[None, :], p, 0.0)  # also where the logits of an ignored token are not numbers
    sums = blocks * num_row_blocks + row_block
    tl.store(dropped + sums, tl.sum(p, 1), mask=known)
    if HAS_DAMPING:
        p *= tl.where(valid[None, :], tl.load(tile_damping + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    p *= g[None, :]
    tl.store(leaves + sums, tl.sum(p, 1), mask=known)
    tl.store(of_token + tl.program_id(1) * tile_stride + rows, tl.sum(p, 0), mask=in_rows)
    tl.store(mass + at, p, mask=known[:, None] & in_rows[None, :])


class Kept(NamedTuple):
    """Which tiles are kept, for each kernel as it needs it; all on the device. See the kernels for what each array holds."""

    energy: Tensor
    place: Tensor
    counts: Tensor
    start: Tensor
    pass_block: Tensor
    pass_start: Tensor
    tiles: Tensor
    tile_rows: Tensor
    row_tiles: Tensor
    row_pass: Tensor
    row_order: Tensor


def select(
    tile_lse: Tensor,  # [T, N]
    tile_ratio: Tensor,  # [T, N]
    lse: Tensor,  # [N]
    label_logit: Tensor,  # [N]
    labels: Tensor,  # [N]
    tau: Tensor,  # scalar
    v: int,
    softcap: float,
    block_m: int,
    block_n: int,
    room: int,
    passes: int,
) -> Kept:
    """Choose the tiles to keep, and list them by column block, by row block and by pass.

    A pass holds at most ``room`` tiles before its last column block.
    """
    device, n = lse.device, lse.numel()
    rows, cols = ceil_div(n, block_m), ceil_div(v, block_n)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    span = ceil_div(max(32, ceil_div(rows * cols, 2048)), 16) * 16  # some hundreds of programs
    grid = (rows, ceil_div(cols, span))
    programs, counting = grid[0] * grid[1], ceil_div(rows * cols, 2048)
    energy, part = (
        torch.empty((cols, rows), device=device, dtype=torch.float32),
        torch.empty(programs, device=device, dtype=torch.float32),
    )
    counts, sums = ints(counting, BINS.value), ints(BINS.value)
    _score_kernel[grid](
        tile_lse, tile_ratio, lse, label_logit, labels, energy, part, padded(n), n, rows, cols, span, v,
        softcap or 1.0, HAS_SOFTCAP=softcap > 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_T=16, num_warps=4,
    )  # fmt: skip
    _count_kernel[(counting,)](energy, counts, rows * cols, BLOCK=2048, num_warps=4)
    _sum_counts_kernel[(BINS.value // 16,)](counts, sums, counting, BLOCK=32, WIDTH=16, num_warps=1)
    kept = Kept(
        energy=energy, place=ints(cols, rows), counts=ints(cols), start=ints(cols + 1), pass_block=ints(passes + 1),
        pass_start=ints(passes + 1), tiles=ints(rows * cols), tile_rows=ints(rows * cols),
        row_tiles=torch.empty((rows, cols), dtype=torch.int64, device=device), row_pass=ints(rows, passes + 1),
        row_order=ints(passes, rows),
    )  # fmt: skip
    pass_of = ints(cols)
    rows_2 = max(16, power_of_2(rows))
    _columns_kernel[(cols,)](energy, part, sums, tau, kept.place, kept.counts, rows, programs, ROWS=rows_2, BLOCK=1024)
    _scan_kernel[(1,)](
        kept.counts, kept.start, pass_of, kept.pass_block, kept.pass_start, cols, room,
        PASSES=passes, COLS=max(16, power_of_2(cols)),
    )  # fmt: skip
    _rows_kernel[(rows,)](
        kept.place, kept.start, pass_of, kept.pass_start, kept.tiles, kept.tile_rows, kept.row_tiles, kept.row_pass,
        rows, cols, PASSES=passes, PASSES_2=max(16, power_of_2(passes + 1)), BLOCK=128,
    )  # fmt: skip
    _longest_first_kernel[(rows, passes)](kept.row_pass, kept.row_order, rows, PASSES=passes, ROWS=rows_2, num_warps=1)
    return kept


class Mass(NamedTuple):
    """What the dropped tiles leave, and its sums."""

    rows: Tensor  # [T, N]: the gradient that a dropped tile's row keeps, zero for the others
    every: Tensor  # [T + beyond, N]: ``rows`` and, in the same memory, rows below them that somebody else will write
    dropped: Tensor  # [T, row blocks]: share of the tokens' probability
    leaves: Tensor  # [T, row blocks]: sums of ``rows``
    of_token: Tensor  # [T / MASS_GROUP, N]: likewise


def mass_bytes(n: int, cols: int, element: int, block_m: int, beyond: int) -> int:
    """The memory of a ``Mass``."""
    of_tokens = element * (cols + beyond) + 4 * ceil_div(cols, MASS_GROUP)
    return of_tokens * padded(n) + 8 * cols * ceil_div(n, block_m)


def dropped_mass(
    kept: Kept,
    tile_lse: Tensor,  # [T, N]
    tile_damping: Tensor | None,  # [T, N]
    lse: Tensor,  # [N]
    labels: Tensor,  # [N]
    grad_lse: Tensor,  # [N]
    v: int,
    logit_scale: float,
    dtype: torch.dtype,
    block_m: int,
    beyond: int,
) -> Mass:
    """``beyond``: rows to allocate below those of the mass matrix."""
    n, (cols, rows) = lse.numel(), kept.place.shape
    mass = torch.empty((cols + beyond, padded(n)), dtype=dtype, device=lse.device)
    dropped, leaves = torch.empty((2, cols, rows), device=lse.device, dtype=torch.float32).unbind()
    of_token = torch.empty((ceil_div(cols, MASS_GROUP), padded(n)), device=lse.device, dtype=torch.float32)
    _mass_kernel[(rows, len(of_token))](
        tile_lse, tile_damping, kept.place, lse, labels, grad_lse, mass, dropped, leaves, of_token,
        padded(n), n, rows, cols, v, logit_scale,
        HAS_DAMPING=tile_damping is not None, BLOCK_M=block_m, GROUP=MASS_GROUP, num_warps=2,
    )  # fmt: skip
    return Mass(mass[:cols, :n], mass[:, :n], dropped, leaves, of_token[:, :n])
