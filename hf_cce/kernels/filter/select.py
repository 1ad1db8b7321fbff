"""Selection of the tiles of the logits' gradient to compute, and the approximation of the others.

Rows are tokens and columns are vocabulary entries, ordered so that large probabilities are close together
(hf_cce.kernels.filter.order). For each token and tile, the forward pass saves ``tile_lse``, the logsumexp, which gives the mass
S = Σ p, and ``tile_ratio``, the energy Σ (p − S/width)² divided by S².

The backward pass drops the tiles with the least energy, as long as the sum of their energies is at most τ² times a reference.
A tile with a label is never dropped, so the label term is exact. The mass of a dropped tile is spread evenly over its columns.
The reference depends on gradient_filter:
- a number: Σ_i (1 − p_label)² plus the energy of the tiles without a label, about the energy of the whole gradient;
- "auto": Σ_i ``rounding``, since the share of the gradient that rounding the logits changes differs between batches.

With a softcap, p stands for p (1 − (z/softcap)²), the size of the gradient, except in the S² of ``tile_ratio``. ``tile_damping``
is the mean of the second factor, weighted by p.

``rounding`` is the squared change of a token's gradient if each logit has an independent rounding error of size δ, divided by δ².
Rounding changes p by p (δ − Σ p δ). With E the energy over all tiles, the squared change is about E (1 − √E)² if one entry has
most of the probability, and E (1 − E) if several entries share it evenly. The geometric mean of the two is used.

All decisions are made on the device, in integers or in a fixed order, so results are bitwise reproducible without synchronizing.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.filter.corrections import write_mass_weighted_columns
from hf_cce.kernels.filter.order import WeightCorrection
from hf_cce.kernels.filter.workspace import MASS_GROUP, SavedForward
from hf_cce.kernels.launch_config import ceil_div, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import exp, softcap_slope

# Bins of the histogram of energies, a quarter of an octave each, from 2⁻¹⁰⁰ to 2²⁸. The last bin is for tiles that must be kept.
BINS = tl.constexpr(512)


@triton.jit
def _bin(energy):
    known = (energy > 0.0) & (energy < float("inf"))
    octaves = tl.log2(tl.where(known, energy, 1.0))
    number = tl.minimum(tl.maximum(tl.floor(4.0 * octaves) + 400.0, 0.0), 510.0).to(tl.int32)
    # Tiles with infinite or NaN energy must be kept.
    return tl.where(known, number, tl.where(energy == 0.0, 0, 511))


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "span"])
def _tile_energy_kernel(
    tile_lse,  # [T, N]
    tile_ratio,  # [T, N]
    lse,  # [N]
    label_logit,  # [N]
    labels,  # [N], V if ignored
    rounding,  # [N], if BY_ROUNDING
    energy,  # [T, row blocks], written; infinite for a tile with a label
    reference_sums,  # [programs], written: partial sums of the reference
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    span,  # column blocks per program
    v,
    softcap,
    BY_ROUNDING: tl.constexpr,
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
    if BY_ROUNDING:
        row_reference = tl.load(rounding + rows, mask=in_rows, other=0.0)
    else:
        at_label = tl.load(label_logit + rows, mask=in_rows, other=0.0)
        wrong = tl.where(valid, 1.0 - exp(at_label - row_lse), 0.0)
        if softcap is not None:
            wrong *= softcap_slope(at_label, softcap)
        row_reference = wrong * wrong
    total = tl.where(begin == 0, tl.sum(row_reference), 0.0)
    label_block = label // BLOCK_N
    for first in range(begin, end, BLOCK_T):
        blocks = first + tl.arange(0, BLOCK_T)
        inside = blocks < end
        at = blocks.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        mask = inside[:, None] & valid[None, :]
        mass = exp(tl.load(tile_lse + at, mask=mask, other=float("-inf")) - row_lse[None, :])
        e = tl.sum(mass * mass * tl.load(tile_ratio + at, mask=mask, other=0.0).to(tl.float32), 1)
        has_label = tl.max(((label_block[None, :] == blocks[:, None]) & valid[None, :]).to(tl.int32), 1) > 0
        if not BY_ROUNDING:
            total += tl.sum(tl.where(has_label, 0.0, e))
        tl.store(energy + blocks * num_row_blocks + row_block, tl.where(has_label, float("inf"), e), mask=inside)
    tl.store(reference_sums + program, total)


@Kernel
@triton.jit(do_not_specialize=["num_tiles"])
def _count_kernel(energy, counts, num_tiles, BLOCK: tl.constexpr):
    """Write histograms of tiles by energy, [programs, BINS]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(energy + at, mask=at < num_tiles, other=float("inf"))
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(_bin(e), BINS))


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "num_programs", "num_histograms"])
def _choose_tiles_kernel(
    energy,  # [T, row blocks]
    reference_sums,  # [programs of _tile_energy_kernel]
    histograms,  # [programs of _count_kernel, BINS]
    tau,  # scalar
    kept_slot,  # [T, row blocks] int32, written: see Kept
    kept_counts,  # [T] int32, written: see Kept
    num_row_blocks,
    num_programs,
    num_histograms,
    ROWS: tl.constexpr,  # at least the number of row blocks
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_programs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(reference_sums + at, mask=at < num_programs, other=0.0)
    bins = tl.arange(0, BINS)
    histogram = tl.zeros((BINS,), tl.int32)
    for program in range(num_histograms):
        histogram += tl.load(histograms + program * BINS + bins)
    # The upper edge of a bin is used for all of its energies, so that the sum is never too small.
    below = tl.cumsum(histogram.to(tl.float32) * tl.exp2((bins - 399).to(tl.float32) / 4.0), 0)
    threshold, reference = tl.load(tau), tl.sum(total)
    # If the reference is zero, for example without any label, the tiles with zero energy (the first bin) are still dropped.
    empty = tl.where(reference == 0.0, 1, 0)
    fits = ((below <= threshold * threshold * reference) | (bins < empty)) & (bins < 511)
    cutoff = tl.sum(fits.to(tl.int32))
    block = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    inside = rows < num_row_blocks
    e = tl.load(energy + block * num_row_blocks + rows, mask=inside, other=0.0)
    kept = inside & (_bin(e) >= cutoff)
    before = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(kept_slot + block * num_row_blocks + rows, tl.where(kept, before, -1), mask=inside)
    tl.store(kept_counts + block, tl.sum(kept.to(tl.int32)))


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "tiles_per_pass", "PASSES"])
def _list_tiles_kernel(
    kept_slot,  # [T, row blocks]
    kept_counts,  # [T]
    first_kept,  # [T + 1], written: see Kept
    pass_block,  # [P + 1], written: see Kept
    pass_start,  # [P + 1], written: see Kept
    tiles,  # [kept], written: see Kept
    tile_rows,  # [kept], written: see Kept
    row_tiles,  # [row blocks, T] int64, written: see Kept
    row_pass,  # [row blocks, P + 1], written: see Kept
    num_row_blocks,
    num_col_blocks,
    tiles_per_pass,
    PASSES,
    PASSES_2: tl.constexpr,  # at least PASSES + 1
    BLOCK: tl.constexpr,
):
    row_block = tl.program_id(0)
    passes = tl.arange(0, PASSES_2)
    # For each pass: column blocks in earlier passes, their kept tiles, and those of them in this row block
    blocks_before = tl.zeros((PASSES_2,), tl.int32)
    kept_before = tl.zeros((PASSES_2,), tl.int32)
    row_kept_before = tl.zeros((PASSES_2,), tl.int32)
    total, row_kept = 0, 0
    for first in range(0, num_col_blocks, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        inside = cols < num_col_blocks
        counts = tl.load(kept_counts + cols, mask=inside, other=0)
        block_first = total + tl.cumsum(counts, 0) - counts
        pass_number = block_first // tiles_per_pass
        earlier = inside[:, None] & (pass_number[:, None] < passes[None, :])
        blocks_before += tl.sum(earlier.to(tl.int32), 0)
        kept_before += tl.sum(tl.where(earlier, counts[:, None], 0), 0)
        # Passes are in the order of columns, so ``kept_before`` is complete for those of this loop step.
        pass_first = tl.sum(tl.where(pass_number[:, None] == passes[None, :], kept_before[None, :], 0), 1)
        in_block = tl.load(kept_slot + cols * num_row_blocks + row_block, mask=inside, other=-1)
        kept, list_index = in_block >= 0, block_first + in_block
        at = row_block * num_col_blocks + row_kept + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(tiles + list_index, cols * num_row_blocks + row_block, mask=kept)
        tl.store(tile_rows + list_index, row_block + tl.zeros((BLOCK,), tl.int32), mask=kept)
        tl.store(row_tiles + at, (list_index - pass_first).to(tl.int64) * 4294967296 + cols, mask=kept)
        if row_block == 0:
            tl.store(first_kept + cols, block_first, mask=inside)
        row_kept_before += tl.sum((kept[:, None] & earlier).to(tl.int32), 0)
        total += tl.sum(counts)
        row_kept += tl.sum(kept.to(tl.int32))
    tl.store(row_pass + row_block * (PASSES + 1) + passes, row_kept_before, mask=passes <= PASSES)
    if row_block == 0:
        tl.store(first_kept + num_col_blocks, total)
        tl.store(pass_block + passes, blocks_before, mask=passes <= PASSES)
        tl.store(pass_start + passes, kept_before, mask=passes <= PASSES)


@Kernel
@triton.jit(do_not_specialize=["num_row_blocks", "PASSES"])
def _longest_first_kernel(
    row_pass,  # [row blocks, P + 1]
    row_order,  # [P, row blocks], written: see Kept
    num_row_blocks,
    PASSES,
    ROWS: tl.constexpr,  # at least the number of row blocks
):
    row, pass_number = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    inside = rows < num_row_blocks
    at = row_pass + rows * (PASSES + 1) + pass_number
    lengths = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
    own = tl.sum(tl.where(rows == row, lengths, 0))
    precedes = inside & ((lengths > own) | ((lengths == own) & (rows < row)))
    tl.store(row_order + pass_number * num_row_blocks + tl.sum(precedes.to(tl.int32)), row)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks"], do_not_specialize_on_alignment=["tile_mass"])
def _mass_kernel(
    tile_lse,  # [T, N]
    tile_damping,  # [T, N], or None
    kept_slot,  # [T, row blocks]
    lse,  # [N]
    labels,  # [N], V if ignored
    grad_lse,  # [N]
    mass,  # [T, N], written: DroppedMass.per_row
    probability,  # [T, row blocks], written: sum of p over dropped tiles
    tile_mass,  # [T, row blocks], written: sum of ``mass``
    group_mass,  # [T / GROUP, N], written: sums of ``mass`` over groups of column blocks
    tile_stride,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    v,
    logit_scale,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_block = tl.program_id(0)
    blocks = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows, in_blocks = rows < num_tokens, blocks < num_col_blocks
    # Ignored tokens are set to zero rather than masked, so that loads are vectorized.
    dropped = in_blocks & (tl.load(kept_slot + blocks * num_row_blocks + row_block, mask=in_blocks, other=0) < 0)
    at = blocks.to(tl.int64)[:, None] * tile_stride + rows[None, :]
    inside = dropped[:, None] & in_rows[None, :]
    part = tl.load(tile_lse + at, mask=inside, other=float("-inf"))
    valid = tl.load(labels + rows, mask=in_rows, other=v) < v
    row_lse = tl.where(valid, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    g = tl.where(valid, tl.load(grad_lse + rows, mask=in_rows, other=0.0) * logit_scale, 0.0)
    p = exp(part - row_lse[None, :])
    p = tl.where(valid[None, :], p, 0.0)  # logits of ignored tokens may be NaN
    sums = blocks * num_row_blocks + row_block
    tl.store(probability + sums, tl.sum(p, 1), mask=in_blocks)
    if tile_damping is not None:
        p *= tl.where(valid[None, :], tl.load(tile_damping + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    p *= g[None, :]
    tl.store(tile_mass + sums, tl.sum(p, 1), mask=in_blocks)
    tl.store(group_mass + tl.program_id(1) * tile_stride + rows, tl.sum(p, 0), mask=in_rows)
    tl.store(mass + at, p, mask=in_blocks[:, None] & in_rows[None, :])


class Kept(NamedTuple):
    """Kept tiles, listed by column block, by row block and by pass. Tensors are int32 unless stated otherwise."""

    energy: Tensor  # [T, row blocks] float32, infinite for a tile with a label
    kept_slot: Tensor  # [T, row blocks]: index of a kept tile within its column block; −1 if dropped
    kept_counts: Tensor  # [T]: number of kept tiles in each column block
    first_kept: Tensor  # [T + 1]: number of kept tiles in earlier column blocks
    pass_block: Tensor  # [P + 1]: first column block of each pass
    pass_start: Tensor  # [P + 1]: number of kept tiles in earlier passes
    tiles: Tensor  # [kept]: column block · (number of row blocks) + row block, sorted by column block
    tile_rows: Tensor  # [kept]: row block of each entry of ``tiles``
    row_tiles: Tensor  # [row blocks, T] int64: kept tiles of each row block, as column block + 2³² · (slot in its pass)
    row_pass: Tensor  # [row blocks, P + 1]: number of kept tiles of the row block in earlier passes
    row_order: Tensor  # [P, row blocks]: row blocks of each pass, those with most kept tiles first


def select(saved: SavedForward, tau: Tensor, by_rounding: bool) -> Kept:
    """Choose the tiles to keep for the threshold ``tau``.

    In a pass, at most ``tiles_per_pass`` tiles precede its last column block.
    """
    (rows, cols), passes = saved.workspace.tile_grid, saved.workspace.passes
    energy, reference_sums, histograms = _tile_energies(saved, by_rounding)
    ints = partial(torch.empty, dtype=torch.int32, device=tau.device)
    kept = Kept(
        energy=energy, kept_slot=ints((cols, rows)), kept_counts=ints(cols), first_kept=ints(cols + 1),
        pass_block=ints(passes + 1), pass_start=ints(passes + 1), tiles=ints(rows * cols), tile_rows=ints(rows * cols),
        row_tiles=torch.empty((rows, cols), dtype=torch.int64, device=tau.device), row_pass=ints((rows, passes + 1)),
        row_order=ints((passes, rows)),
    )  # fmt: skip
    rows_2 = max(16, triton.next_power_of_2(rows))
    _choose_tiles_kernel[(cols,)](
        energy, reference_sums, histograms, tau, kept.kept_slot, kept.kept_counts, rows, len(reference_sums), len(histograms),
        ROWS=rows_2, BLOCK=1024,
    )  # fmt: skip
    _list_tiles_kernel[(rows,)](
        kept.kept_slot, kept.kept_counts, kept.first_kept, kept.pass_block, kept.pass_start, kept.tiles, kept.tile_rows,
        kept.row_tiles, kept.row_pass, rows, cols, saved.workspace.tiles_per_pass, passes,
        PASSES_2=max(16, triton.next_power_of_2(passes + 1)), BLOCK=128,
    )  # fmt: skip
    _longest_first_kernel[(rows, passes)](kept.row_pass, kept.row_order, rows, passes, ROWS=rows_2, num_warps=1)
    return kept


def _tile_energies(saved: SavedForward, by_rounding: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tiles' energies [T, row blocks], partial sums of the reference, and histograms of parts of the tiles."""
    plan, (rows, cols), (n, _) = saved.plan, saved.workspace.tile_grid, saved.hidden.shape
    v, device = saved.vocabulary.inv_vocab_perm.numel(), saved.hidden.device
    span = ceil_div(max(32, ceil_div(rows * cols, 2048)), 16) * 16  # gives a few hundred programs
    grid = (rows, ceil_div(cols, span))
    energy = torch.empty((cols, rows), device=device, dtype=torch.float32)
    reference_sums = torch.empty(grid[0] * grid[1], device=device, dtype=torch.float32)
    _tile_energy_kernel[grid](
        saved.tile_lse, saved.tile_ratio, saved.lse, saved.label_logit, saved.labels, saved.rounding, energy,
        reference_sums, padded(n), n, rows, cols, span, v, saved.softcap or None, BY_ROUNDING=by_rounding,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_T=16, num_warps=4,
    )  # fmt: skip
    # Each program of _choose_tiles_kernel reads all histograms
    block = max(2048, triton.next_power_of_2(rows * cols // 128))
    counts = torch.empty((ceil_div(rows * cols, block), BINS.value), dtype=torch.int32, device=device)
    _count_kernel[(len(counts),)](energy, counts, rows * cols, BLOCK=block, num_warps=4)
    return energy, reference_sums, counts


class DroppedMass(NamedTuple):
    """Gradient mass of the dropped tiles, and sums of it."""

    per_row: Tensor  # [T, N]: sum of the gradient over the columns of each tile, zero for kept tiles
    for_hidden: Tensor  # [T, N] or [T + D, N]: ``per_row``, followed by the hidden states times their mass if requested
    probability: Tensor  # [T] float32: sum of p over the dropped tiles of each column block
    per_block: Tensor  # [T] float32: sum of ``per_row``
    per_token: Tensor  # [N] float32: sum of ``per_row``


def dropped_mass(saved: SavedForward, kept: Kept, grad_lse: Tensor, with_hidden: bool) -> DroppedMass:
    """Compute the mass of dropped tiles; ``with_hidden``: ``for_hidden`` has the rows that a covariance is multiplied by."""
    plan, (rows, cols), (n, d) = saved.plan, saved.workspace.tile_grid, saved.hidden.shape
    v, device = saved.vocabulary.inv_vocab_perm.numel(), saved.hidden.device
    # One tensor, because dh needs one product with both parts: a second one would read and write the whole result again.
    mass = torch.empty((cols + with_hidden * d, padded(n)), dtype=saved.hidden.dtype, device=device)
    tile_sums = torch.empty((2, cols, rows), device=device, dtype=torch.float32)  # of p, and of the mass
    group_mass = torch.empty((ceil_div(cols, MASS_GROUP), padded(n)), device=device, dtype=torch.float32)
    _mass_kernel[(rows, len(group_mass))](
        saved.tile_lse, saved.tile_damping, kept.kept_slot, saved.lse, saved.labels, grad_lse, mass, *tile_sums,
        group_mass, padded(n), n, rows, cols, v, saved.logit_scale,
        BLOCK_M=plan.block_m, GROUP=MASS_GROUP, num_warps=2,
    )  # fmt: skip
    (probability, per_block), per_token = tile_sums.sum(2).unbind(), group_mass[:, :n].sum(0)
    if with_hidden:
        write_mass_weighted_columns(saved.hidden, per_token, saved.logit_scale, mass[cols:, :n])
    return DroppedMass(mass[:cols, :n], mass[:, :n], probability, per_block, per_token)


class Selection(NamedTuple):
    """The tiles to keep, and what approximates the others."""

    kept: Kept
    mass: DroppedMass
    covariance: Tensor | None  # [D, D]: correction of dh; None: none
    correction: WeightCorrection | None  # of dW; None: none
