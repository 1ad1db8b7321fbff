"""The kept tiles of the logits' gradient: computed into slots of a scratch buffer, and multiplied from there.

A slot holds one tile, [BLOCK_M, BLOCK_N]; the slots of a pass follow each other in the order of column blocks. Programs of a
fixed number share what there is, so a pass without tiles costs a launch and no more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.tiles import tile_gradient, tile_logits


# Its arguments are those of the kernels below.
@triton.jit
def kept_tile(
    row,
    col,
    hidden,
    weight,
    bias,
    order,
    labels,
    lse,
    grad_lse,
    grad_label,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of the logits of one tile, [BLOCK_M, BLOCK_N] float32; zero outside N and V."""
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=vocab_size)
    # Loaded before the products, which hide how long that takes.
    row_lse = tl.where(label < vocab_size, tl.load(lse + rows, mask=in_rows, other=0.0), float("inf"))
    g = tl.where(label < vocab_size, tl.load(grad_lse + rows, mask=in_rows, other=0.0), 0.0)
    z = tile_logits(
        hidden, weight, bias, order, row, col, num_tokens, vocab_size, hidden_size, hidden_stride, weight_stride,
        logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TMA, GATHER, PRECISION, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gradient = tile_gradient(
        z, rows, cols, in_rows, col, label, label < vocab_size, row_lse, g, None, grad_label, None, None,
        vocab_size, logit_scale, softcap, False, False, HAS_SCALE, HAS_SOFTCAP, BLOCK_N,
    )  # fmt: skip
    if col + BLOCK_N > vocab_size:
        gradient = tl.where((cols < vocab_size)[None, :], gradient, 0.0)
    if row + BLOCK_M > num_tokens:  # of no token: what is not finite in the weight must not spread from there
        gradient = tl.where(in_rows[:, None], gradient, 0.0)
    return gradient


@triton.jit
def dropped_part(
    acc, block, ds, spread, leans, along, back, vocab_size, hidden_size,
    LEANS: tl.constexpr, DIRECTIONS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``acc`` [BLOCK_N, BLOCK_D] and what the dropped tiles of a column block leave to its rows of the weight's gradient."""
    width = tl.minimum(vocab_size - block * BLOCK_N, BLOCK_N).to(tl.float32)
    even = tl.load(spread + block.to(tl.int64) * hidden_size + ds, mask=ds < hidden_size, other=0.0) / width
    acc += even[None, :]
    if LEANS:
        cols, js = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, DIRECTIONS)
        at = cols.to(tl.int64)[:, None] * DIRECTIONS + js[None, :]
        a = tl.load(along + at, mask=(cols < vocab_size)[:, None], other=0.0)
        b = tl.load(back + js[:, None] * hidden_size + ds[None, :], mask=(ds < hidden_size)[None, :], other=0.0)
        a = (a.to(tl.float32) * (tl.load(leans + block) / width)).to(b.dtype)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "pass_number"])
def _kept_tiles_kernel(
    hidden,  # [N, D] in the order of rows
    weight,  # [V, D] in the order of columns, or as it is if GATHER
    bias,  # [V] in the order of columns
    order,  # [V padded]
    labels,  # [N] the column of each label; V where ignored
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    tiles,  # [kept]
    pass_start,  # [P + 1]
    scratch,  # [slots · BLOCK_M, BLOCK_N]
    pass_number,
    num_tokens,
    num_row_blocks,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FLATTEN: tl.constexpr,  # one loop over tiles and the hidden size, whose loads run on from tile to tile
    TMA: tl.constexpr,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.load(pass_start + pass_number)
    stop = tl.load(pass_start + pass_number + 1)
    for tile in tl.range(first + tl.program_id(0), stop, tl.num_programs(0), flatten=FLATTEN):
        code = tl.load(tiles + tile)
        gradient = kept_tile(
            code % num_row_blocks * BLOCK_M, code // num_row_blocks * BLOCK_N,
            hidden, weight, bias, order, labels, lse, grad_lse, grad_label, num_tokens, vocab_size, hidden_size, hidden_stride,
            weight_stride, logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TMA, GATHER, PRECISION, UPCAST, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        slot = scratch + (tile - first).to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(slot + at, gradient.to(scratch.dtype.element_ty))


@triton.jit
def _add_in_parts(acc, part, a, b, last, PRECISION: tl.constexpr):
    """acc + a · b by way of the sum of one tile: one sum of 100,000 terms would be off by thousands of roundings.

    Tensor cores do not round but truncate: seen on an H200, float16 gradients were 3e-4 too small.
    """
    part = tl.dot(a, b, part, input_precision=PRECISION)
    return tl.where(last, acc + part, acc), tl.where(last, 0.0, part)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_row_blocks", "pass_number", "PASSES"])
def _hidden_gradient_kernel(
    scratch,  # [slots · BLOCK_M, BLOCK_N] pointer or TMA descriptor [BLOCK_M, BLOCK_K]
    weight,  # [V, D] pointer, or TMA descriptor [BLOCK_K, BLOCK_D] of the rows in order
    order,  # [V padded], if GATHER
    row_tiles,  # [row blocks, T] int64
    row_pass,  # [row blocks, P + 1]
    row_order,  # [P, row blocks]
    total,  # [N, D] float32: the sum of dropped tiles and of earlier passes; added to for row blocks with tiles in later ones
    tokens,  # [N] int64
    out,  # [N, D], written where the tokens stand, once a row block has all its tiles
    pass_number,
    num_tokens,
    num_row_blocks,
    num_col_blocks,
    vocab_size,
    hidden_size,
    weight_stride,
    PASSES,
    TMA: tl.constexpr,
    GATHER: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
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
        mine = total + (row_block * BLOCK_M).to(tl.int64) * hidden_size + d
        here = tl.arange(0, BLOCK_M)[:, None] * hidden_size + tl.arange(0, BLOCK_D)[None, :]
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_tokens)[:, None] & (ds < hidden_size)[None, :]
        acc = tl.load(mine + here, mask=mask, other=0.0)
        part = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        listed = row_tiles + row_block * num_col_blocks
        # Read a step before it is used: as a load of the step itself it would keep the products waiting.
        now = tl.load(listed + first // steps, mask=first < stop, other=0)
        for step in range(first, stop):
            k = step % steps * BLOCK_K
            col, slot = (now & 0xFFFFFFFF).to(tl.int32) * BLOCK_N + k, (now >> 32).to(tl.int32) * BLOCK_M
            now = tl.load(listed + (step + 1) // steps, mask=step + 1 < stop, other=0)
            if TMA:
                g = scratch.load([slot, k])
            else:
                at = (slot + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None] * BLOCK_N
                g = tl.load(scratch + at + (k + ks)[None, :])
            if TMA and not GATHER:
                w = weight.load([col, d])
            else:
                w_rows = tl.load(order + col + ks) if GATHER else col + ks
                w_in = (col + ks < vocab_size)[:, None] & (ds < hidden_size)[None, :]
                w = tl.load(weight + w_rows.to(tl.int64)[:, None] * weight_stride + ds[None, :], mask=w_in, other=0.0)
            if UPCAST:
                g, w = g.to(tl.float32), w.to(tl.float32)
            if IN_PARTS:
                acc, part = _add_in_parts(acc, part, g, w, k == BLOCK_N - BLOCK_K, PRECISION)
            else:
                acc = tl.dot(g, w, acc, input_precision=PRECISION)
        if end == tl.load(row_pass + row_block * (PASSES + 1) + PASSES):
            to = tl.load(tokens + rows, mask=rows < num_tokens, other=0)
            tl.store(out + to[:, None] * hidden_size + ds[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(mine + here, acc, mask=mask)


@triton.jit
def rows_stay(pass_block, vocab_size, BLOCK_N: tl.constexpr):
    """Whether gradients must not go to their entries yet: passes after the first have column blocks, whose rows they read."""
    return tl.load(pass_block + 1) < tl.cdiv(vocab_size, BLOCK_N)


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "pass_number"])
def _weight_gradient_kernel(
    scratch,  # [slots · BLOCK_M, BLOCK_N] pointer or TMA descriptor [BLOCK_K, BLOCK_N]
    hidden,  # [N, D] pointer or TMA descriptor [BLOCK_K, BLOCK_D]
    order,  # [V padded]
    tile_rows,  # [kept]: the row block of each tile
    start,  # [T + 1]
    pass_block,  # [P + 1]
    pass_start,  # [P + 1]
    spread,  # [T, D] float32: what the dropped tiles of each column block leave to it as a whole
    leans,  # [T] float32: and what of the next two, see hf_cce.kernels.tilt; all three if LEANS
    along,  # [V, 16] in the order of columns
    back,  # [16, D]
    out,  # [V, D], written: at the entry of each column, or at the column itself where ``rows_stay`` says so
    pass_number,
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    IN_PLACE: tl.constexpr,  # out holds the rows of the weight in the order of columns, which later passes read
    LEANS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    TMA: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunks = tl.cdiv(hidden_size, BLOCK_D)
    steps: tl.constexpr = BLOCK_M // BLOCK_K
    base = tl.load(pass_start + pass_number)
    first_block, stop_block = tl.load(pass_block + pass_number), tl.load(pass_block + pass_number + 1)
    stay = IN_PLACE and rows_stay(pass_block, vocab_size, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    for job in range(first_block * chunks + tl.program_id(0), stop_block * chunks, tl.num_programs(0)):
        block, d = job // chunks, job % chunks * BLOCK_D
        ds = d + tl.arange(0, BLOCK_D)
        first = tl.load(start + block)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        part = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        stop = tl.load(start + block + 1)
        now = tl.load(tile_rows + first, mask=first < stop, other=0)
        for step in range(first * steps, stop * steps):
            k = step % steps * BLOCK_K
            row, slot = now * BLOCK_M + k, (step // steps - base) * BLOCK_M + k
            now = tl.load(tile_rows + (step + 1) // steps, mask=step + 1 < stop * steps, other=0)
            if TMA:
                g, h = scratch.load([slot, 0]), hidden.load([row, d])
            else:
                at = (slot + ks).to(tl.int64)[:, None] * BLOCK_N
                g = tl.load(scratch + at + tl.arange(0, BLOCK_N)[None, :])
                h_in = (row + ks < num_tokens)[:, None] & (ds < hidden_size)[None, :]
                h = tl.load(
                    hidden + (row + ks).to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=h_in, other=0.0
                )
            if UPCAST:
                g, h = g.to(tl.float32), h.to(tl.float32)
            if IN_PARTS:
                acc, part = _add_in_parts(acc, part, tl.trans(g), h, k == BLOCK_M - BLOCK_K, PRECISION)
            else:
                acc = tl.dot(tl.trans(g), h, acc, input_precision=PRECISION)
        acc = dropped_part(
            acc, block, ds, spread, leans, along, back, vocab_size, hidden_size, LEANS, DIRECTIONS, PRECISION, UPCAST, BLOCK_N
        )  # fmt: skip
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        entries = tl.where(stay, cols, tl.load(order + cols))
        mask = (cols < vocab_size)[:, None] & (ds < hidden_size)[None, :]
        at = entries.to(tl.int64)[:, None] * hidden_size + ds[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _reorder_rows_kernel(
    gradient,  # [V, D]: its columns from ``first`` on are read in the order of columns, or with BACK written at their entries
    order,  # [V padded]
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
    """Move a slice of the weight's gradient to the buffer, or from there to the entries of the vocabulary it belongs to."""
    if rows_stay(pass_block, vocab_size, BLOCK_N):
        cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = (cols < vocab_size)[:, None] & (ds < width)[None, :]
        here = buffer + cols.to(tl.int64)[:, None] * width + ds[None, :]
        entries = tl.load(order + cols) if BACK else cols
        there = gradient + entries.to(tl.int64)[:, None] * hidden_size + (first + ds)[None, :]
        if BACK:
            tl.store(there, tl.load(here, mask=mask), mask=mask)
        else:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
