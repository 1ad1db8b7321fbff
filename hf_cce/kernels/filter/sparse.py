"""Computation of the kept tiles of the logits' gradient in a scratch buffer, and their products with weight and hidden states.

The scratch buffer is divided into slots of one tile, [BLOCK_M, BLOCK_N]; the slots of a pass are sorted by column block. A fixed
number of programs shares the tiles of a pass, so a pass without tiles costs only its launches.

The sorted weight may share its memory with dW. A pass covers consecutive column blocks, and later passes do not read their weight
rows, so the pass writes its rows of dW over them. After the last pass, all are moved to the order of the vocabulary. A pass that
has all tiles writes dW in that order at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.filter.corrections import RANK
from hf_cce.kernels.filter.order import WeightCorrection
from hf_cce.kernels.filter.select import Kept
from hf_cce.kernels.filter.workspace import BackwardRequest, SavedForward
from hf_cce.kernels.inputs import scale_and_softcap
from hf_cce.kernels.launch_config import ceil_div, operand
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import dot, tile_gradient, tile_logits


@triton.jit
def _add_dropped(
    acc, block, ds, block_sums, block_mass, row_coeffs, basis, vocab_size, hidden_size,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` [BLOCK_N, BLOCK_D] plus the contribution of the dropped tiles of a column block to its rows of dW."""
    width = tl.minimum(vocab_size - block * BLOCK_N, BLOCK_N).to(tl.float32)
    even = tl.load(block_sums + block.to(tl.int64) * hidden_size + ds, mask=ds < hidden_size, other=0.0) / width
    acc += even[None, :]
    if row_coeffs is not None:
        cols, js = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
        at = cols.to(tl.int64)[:, None] * RANK + js[None, :]
        a = tl.load(row_coeffs + at, mask=(cols < vocab_size)[:, None], other=0.0)
        b = tl.load(basis + js[:, None] * hidden_size + ds[None, :], mask=(ds < hidden_size)[None, :], other=0.0)
        a = (a.to(tl.float32) * (tl.load(block_mass + block) / width)).to(b.dtype)
        acc = dot(a, b, acc, PRECISION)
    return acc


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "pass_number"])
def _kept_tiles_kernel(
    pass_number,
    hidden,  # [N, D] in the order of rows
    weight,  # [V, D] in the order of columns; in the order of the vocabulary if vocab_perm is given
    bias,  # [V] in the order of columns
    vocab_perm,  # [V padded], or None
    labels,  # [N]: the column of each label; V if ignored
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    tiles,  # [kept]: see hf_cce.kernels.filter.select.Kept
    pass_start,  # [P + 1], likewise
    scratch,  # [slots · BLOCK_M, BLOCK_N], written
    num_tokens,
    num_row_blocks,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    FLATTEN: tl.constexpr,  # use one loop over tiles and the hidden size, so that loads are pipelined across tiles
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.load(pass_start + pass_number)
    stop = tl.load(pass_start + pass_number + 1)
    for tile in tl.range(first + tl.program_id(0), stop, tl.num_programs(0), flatten=FLATTEN):
        code = tl.load(tiles + tile)
        row, col = code % num_row_blocks * BLOCK_M, code // num_row_blocks * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        in_rows = rows < num_tokens
        label = tl.load(labels + rows, mask=in_rows, other=vocab_size)
        # Loaded before the product, which hides the latency.
        row_lse = tl.where(label < vocab_size, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
        g = tl.where(label < vocab_size, tl.load(grad_lse + rows, mask=in_rows, other=0.0), 0.0)
        z = tile_logits(
            hidden, weight, bias, vocab_perm, row, col, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride,
            logit_scale, softcap, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gradient = tile_gradient(
            z, rows, cols, in_rows, col, label, label < vocab_size, row_lse, g, None, grad_label, None, None,
            vocab_size, logit_scale, softcap,
        )  # fmt: skip
        # A slot holds a whole tile: set it to zero outside N and V.
        if col + BLOCK_N > vocab_size:
            gradient = tl.where((cols < vocab_size)[None, :], gradient, 0.0)
        if row + BLOCK_M > num_tokens:  # beyond N, an infinite weight would give NaN
            gradient = tl.where(in_rows[:, None], gradient, 0.0)
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        slot = scratch + (tile - first).to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(slot + at, gradient.to(scratch.dtype.element_ty))


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "pass_number", "PASSES"])
def _hidden_gradient_kernel(
    pass_number,
    scratch,  # [slots · BLOCK_M, BLOCK_N] pointer or TMA descriptor [BLOCK_M, BLOCK_K]
    weight,  # [V, D] as for _kept_tiles_kernel, or TMA descriptor [BLOCK_K, BLOCK_D] of the sorted weight
    vocab_perm,  # [V padded], or None
    row_tiles,  # [row blocks, T] int64
    row_pass,  # [row blocks, P + 1]
    row_order,  # [P, row blocks]
    total,  # [N, D] float32: sum of dropped tiles and earlier passes; updated for row blocks with tiles in later passes
    token_perm,  # [N] int64
    out,  # [N, D] in the original order of tokens, written when all tiles of a row block are added
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    vocab_size,
    hidden_size,
    weight_stride,
    PASSES,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunks = tl.cdiv(hidden_size, BLOCK_D)
    job, d = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BLOCK_D
    row_block = tl.load(row_order + pass_number * num_row_blocks + job)
    steps: tl.constexpr = BLOCK_N // BLOCK_K
    begin = tl.load(row_pass + row_block * (PASSES + 1) + pass_number)
    end = tl.load(row_pass + row_block * (PASSES + 1) + pass_number + 1)
    first, stop = begin * steps, end * steps
    ds = d + tl.arange(0, BLOCK_D)
    ks = tl.arange(0, BLOCK_K)
    if pass_number == 0 or end > begin:
        total_tile = total + (row_block * BLOCK_M).to(tl.int64) * hidden_size + d
        here = tl.arange(0, BLOCK_M)[:, None] * hidden_size + tl.arange(0, BLOCK_D)[None, :]
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_tokens)[:, None] & (ds < hidden_size)[None, :]
        acc = tl.load(total_tile + here, mask=mask, other=0.0)
        tile_list = row_tiles + row_block * num_col_blocks
        # Read one step ahead, so that the product does not wait for it.
        entry = tl.load(tile_list + first // steps, mask=first < stop, other=0)
        for step in range(first, stop):
            k = step % steps * BLOCK_K
            col, slot = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_N + k, (entry >> 32).to(tl.int32) * BLOCK_M
            entry = tl.load(tile_list + (step + 1) // steps, mask=step + 1 < stop, other=0)
            if TMA:
                g = scratch.load([slot, k])
            else:
                at = (slot + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * BLOCK_N
                g = tl.load(scratch + at + (k + ks)[None, :])
            if TMA and vocab_perm is None:
                w = weight.load([col, d])
            else:
                w_rows = col + ks if vocab_perm is None else tl.load(vocab_perm + col + ks)
                w_in = (col + ks < vocab_size)[:, None] & (ds < hidden_size)[None, :]
                w = tl.load(weight + w_rows.to(tl.int64)[:, None] * weight_stride + ds[None, :], mask=w_in, other=0.0)
            acc = dot(g, w, acc, PRECISION)
        if end == tl.load(row_pass + row_block * (PASSES + 1) + PASSES):
            to = tl.load(token_perm + rows, mask=rows < num_tokens, other=0)
            tl.store(out + to[:, None] * hidden_size + ds[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(total_tile + here, acc, mask=mask)


@triton.jit
def _stays_in_column_order(pass_block, vocab_size, BLOCK_N: tl.constexpr):
    """Return True if dW stays in the order of columns for now, because later passes read the sorted weight from its memory."""
    return tl.load(pass_block + 1) < tl.cdiv(vocab_size, BLOCK_N)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "pass_number"])
def _weight_gradient_kernel(
    pass_number,
    scratch,  # [slots · BLOCK_M, BLOCK_N] pointer or TMA descriptor [BLOCK_K, BLOCK_N]
    hidden,  # [N, D] pointer or TMA descriptor [BLOCK_K, BLOCK_D]
    vocab_perm,  # [V padded]
    tile_rows,  # [kept]: see hf_cce.kernels.filter.select.Kept
    first_kept,  # [T + 1], likewise
    pass_block,  # [P + 1], likewise
    pass_start,  # [P + 1], likewise
    block_sums,  # [T, D] float32: contribution of dropped tiles to dW, summed over the rows of each column block
    block_mass,  # [T] float32: mass of dropped tiles; None, like the next two: no correction
    row_coeffs,  # [V, 16]: see hf_cce.kernels.filter.corrections.WeightCorrection
    basis,  # [16, D], likewise
    out,  # [V, D], written in the order of the vocabulary; in the order of columns if IN_PLACE and ``_stays_in_column_order``
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    IN_PLACE: tl.constexpr,  # out is in the memory of the sorted weight
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunks = tl.cdiv(hidden_size, BLOCK_D)
    steps: tl.constexpr = BLOCK_M // BLOCK_K
    base = tl.load(pass_start + pass_number)
    first_block, stop_block = tl.load(pass_block + pass_number), tl.load(pass_block + pass_number + 1)
    in_column_order = IN_PLACE and _stays_in_column_order(pass_block, vocab_size, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    for job in range(first_block * chunks + tl.program_id(0), stop_block * chunks, tl.num_programs(0)):
        block, d = job // chunks, job % chunks * BLOCK_D
        ds = d + tl.arange(0, BLOCK_D)
        first = tl.load(first_kept + block)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        stop = tl.load(first_kept + block + 1)
        row_block = tl.load(tile_rows + first, mask=first < stop, other=0)
        for step in range(first * steps, stop * steps):
            k = step % steps * BLOCK_K
            row, slot = row_block * BLOCK_M + k, (step // steps - base) * BLOCK_M + k
            row_block = tl.load(tile_rows + (step + 1) // steps, mask=step + 1 < stop * steps, other=0)
            if TMA:
                g, h = scratch.load([slot, 0]), hidden.load([row, d])
            else:
                at = (slot + ks).to(tl.int64)[:, None] * BLOCK_N
                g = tl.load(scratch + at + tl.arange(0, BLOCK_N)[None, :])
                h_in = (row + ks < num_tokens)[:, None] & (ds < hidden_size)[None, :]
                h = tl.load(
                    hidden + (row + ks).to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=h_in, other=0.0
                )
            acc = dot(tl.trans(g), h, acc, PRECISION)
        acc = _add_dropped(
            acc, block, ds, block_sums, block_mass, row_coeffs, basis, vocab_size, hidden_size, PRECISION, BLOCK_N
        )
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        entries = tl.where(in_column_order, cols, tl.load(vocab_perm + cols))
        mask = (cols < vocab_size)[:, None] & (ds < hidden_size)[None, :]
        at = entries.to(tl.int64)[:, None] * hidden_size + ds[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _reorder_rows_kernel(
    gradient,  # [V, D]: the slice [:, first : first + width] is read, or written if BACK
    vocab_perm,  # [V padded]
    buffer,  # [V, width]
    pass_block,  # [P + 1]
    first,
    width,
    vocab_size,
    hidden_size,
    BACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy a slice of dW in the order of columns to the buffer, or from the buffer to the order of the vocabulary if BACK."""
    if _stays_in_column_order(pass_block, vocab_size, BLOCK_N):
        cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = (cols < vocab_size)[:, None] & (ds < width)[None, :]
        here = buffer + cols.to(tl.int64)[:, None] * width + ds[None, :]
        entries = tl.load(vocab_perm + cols) if BACK else cols
        there = gradient + entries.to(tl.int64)[:, None] * hidden_size + (first + ds)[None, :]
        if BACK:
            tl.store(there, tl.load(here, mask=mask), mask=mask)
        else:
            tl.store(here, tl.load(there, mask=mask), mask=mask)


def multiply_kept(
    saved: SavedForward,
    weight: Tensor,  # [V, D]
    request: BackwardRequest,
    kept: Kept,
    dropped_hidden: Tensor | None,  # [N, D] float32: what dropped tiles add to dh; overwritten
    dropped_blocks: Tensor | None,  # [T, D] float32: what they add to dW, summed over each column block
    block_mass: Tensor | None,  # [T] float32: factor of ``correction`` for each column block
    correction: WeightCorrection | None,
) -> tuple[Tensor, Tensor]:
    """Return dh [N, D] and dW [V, D] from kept tiles and the contributions of dropped tiles; empty if not needed."""
    plan, workspace, hidden, vocab_perm = saved.plan, saved.workspace, saved.hidden, saved.vocabulary.vocab_perm
    (n, d), v, (rows, cols) = hidden.shape, len(weight), saved.workspace.tile_grid
    # The kernels read the sorted weight or, if it was not saved, gather rows of the weight.
    gather = saved.weight is None
    source, source_perm = (weight, vocab_perm) if saved.weight is None else (saved.weight, None)
    scratch = hidden.new_empty((workspace.num_slots * plan.block_m, plan.block_n))
    grad_hidden = torch.empty_like(hidden) if request.need_hidden else hidden.new_empty(0)
    in_place = request.need_weight and not gather  # dW overwrites the sorted weight
    grad_weight = source if in_place else weight.new_empty(weight.shape if request.need_weight else 0)
    may_reorder = in_place and workspace.passes > 1
    constants = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "TMA": plan.use_tma, "PRECISION": plan.precision}
    # The kept tiles of a pass, written to the scratch buffer
    launches = [_kept_tiles_kernel.prepare(
        (min(plan.programs, rows * cols),), 0, operand(hidden, plan.block_m, plan),
        source if gather else operand(source, plan.block_n, plan), saved.bias, source_perm, saved.labels, saved.lse,
        request.grad_lse, request.grad_label, kept.tiles, kept.pass_start, scratch, n, rows, v, d, hidden.stride(0),
        source.stride(0), *scale_and_softcap(saved), FLATTEN=plan.flatten, BLOCK_K=plan.block_k, num_warps=plan.num_warps,
        num_stages=plan.num_stages, **constants,
    )]  # fmt: skip
    if request.need_hidden:  # tiles · weight, added to dh
        block_k, block_d, *_ = plan.for_hidden
        launches.append(_hidden_gradient_kernel.prepare(
            (rows * ceil_div(d, block_d),), 0, operand(scratch, plan.block_m, plan, block_k),
            source if gather else operand(source, block_k, plan, block_d), source_perm, kept.row_tiles, kept.row_pass,
            kept.row_order, dropped_hidden, saved.token_perm, grad_hidden, n, rows, cols, v, d, source.stride(0),
            workspace.passes, **plan.for_hidden.constants(), **constants,
        ))  # fmt: skip
    if request.need_weight:  # tilesᵀ · hidden plus the contribution of dropped tiles: the pass's rows of dW
        block_k, block_d, *_ = plan.for_weight
        launches.append(_weight_gradient_kernel.prepare(
            (min(plan.programs, cols * ceil_div(d, block_d)),), 0, operand(scratch, block_k, plan, plan.block_n),
            operand(hidden, block_k, plan, block_d), vocab_perm, kept.tile_rows, kept.first_kept, kept.pass_block,
            kept.pass_start, dropped_blocks, block_mass, *(correction or (None, None)), grad_weight, n, v, d,
            hidden.stride(0), IN_PLACE=may_reorder, **plan.for_weight.constants(), **constants,
        ))  # fmt: skip
    for number in range(workspace.passes):
        for launch in launches:
            launch(number)
    if may_reorder:
        _reorder_rows(grad_weight, vocab_perm, scratch, kept.pass_block, plan.block_n)
    return grad_hidden, grad_weight


def _reorder_rows(gradient: Tensor, vocab_perm: Tensor, scratch: Tensor, pass_block: Tensor, block_n: int) -> None:
    """Move the rows of ``gradient`` [V, D] from the order of columns to that of the vocabulary, through ``scratch``.

    The kernel does nothing if one pass had all tiles, because rows are in the order of the vocabulary already.
    """
    v, d = gradient.shape
    width = min(d, scratch.numel() // v)
    width -= width % 16 if width > 16 else 0  # keeps rows aligned
    for first in range(0, d, width):
        stop = min(d, first + width)
        for back in (False, True):
            _reorder_rows_kernel[(ceil_div(v, block_n), ceil_div(stop - first, 128))](
                gradient, vocab_perm, scratch, pass_block, first, stop - first, v, d, BACK=back, BLOCK_N=block_n, BLOCK_D=128,
            )  # fmt: skip
