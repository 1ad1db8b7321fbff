"""Kept tiles beyond the passes that were launched: whoever needs one computes it, several times over.

How many passes there can be is decided from shapes, and a launch without work still costs the host and the device their time:
of ten passes one or two had any on a trained head of 128,256 words. How many tiles there will be the host knows from an earlier
step. It launches passes for half as many more, and these two kernels for the case that more still are kept: slow, since each
computes a tile hidden_size / BLOCK_D times, but as right as any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_cce.kernels.sparse import dropped_part, kept_tile, put_back


@triton.jit(do_not_specialize=["num_tokens", "first_pass", "PASSES"])
def _rest_hidden_kernel(
    hidden,  # [N, D] in the order of rows
    weight,  # [V, D] in the order of columns, or as it is if GATHER
    bias,  # [V] in the order of columns
    order,  # [V padded]
    labels,  # [N], and so on: as for _kept_tiles_kernel
    lse,
    grad_lse,
    grad_label,
    row_tiles,  # [row blocks, T] int64
    row_pass,  # [row blocks, P + 1]
    total,  # [N, D] float32: sums over the passes that were launched
    tokens,  # [N] int64
    out,  # [N, D], written where the tokens stand
    first_pass,  # that was not launched
    num_tokens,
    num_col_blocks,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    PASSES,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunks = tl.cdiv(hidden_size, BLOCK_D)
    row_block, d = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BLOCK_D
    first = tl.load(row_pass + row_block * (PASSES + 1) + first_pass)
    stop = tl.load(row_pass + row_block * (PASSES + 1) + PASSES)
    if stop > first:
        ds = d + tl.arange(0, BLOCK_D)
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        mine = total + rows.to(tl.int64)[:, None] * hidden_size + ds[None, :]
        mask = (rows < num_tokens)[:, None] & (ds < hidden_size)[None, :]
        acc = tl.load(mine, mask=mask, other=0.0)
        for tile in range(first, stop):
            col = (tl.load(row_tiles + row_block * num_col_blocks + tile) & 0xFFFFFFFF).to(tl.int32) * BLOCK_N
            gradient = kept_tile(
                row_block * BLOCK_M, col, hidden, weight, bias, order, labels, lse, grad_lse, grad_label, num_tokens, vocab_size,
                hidden_size, hidden_stride, weight_stride, logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, False, GATHER,
                PRECISION, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            cols = col + tl.arange(0, BLOCK_N)
            w_rows = tl.load(order + cols) if GATHER else cols
            w_in = (cols < vocab_size)[:, None] & (ds < hidden_size)[None, :]
            w = tl.load(weight + w_rows.to(tl.int64)[:, None] * weight_stride + ds[None, :], mask=w_in, other=0.0)
            g = gradient.to(w.dtype)
            if UPCAST:
                g, w = g.to(tl.float32), w.to(tl.float32)
            acc += tl.dot(g, w, input_precision=PRECISION)
        put_back(acc, tokens, out, rows, ds, mask, num_tokens, hidden_size)


@triton.jit(do_not_specialize=["num_tokens", "first_pass"])
def _rest_weight_kernel(
    hidden,  # [N, D] in the order of rows
    weight,  # [V, D] as it is
    bias,  # [V] in the order of columns
    order,  # [V padded]
    labels,  # [N], and so on: as for _kept_tiles_kernel
    lse,
    grad_lse,
    grad_label,
    tile_rows,  # [kept]
    start,  # [T + 1]
    pass_block,  # [P + 1]
    spread,  # [T, D] float32, and the next three: as for _weight_gradient_kernel
    leans,
    along,
    back,
    out,  # [V, D], written at the entry of each column
    first_pass,  # that was not launched
    num_tokens,
    num_col_blocks,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LEANS: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunks = tl.cdiv(hidden_size, BLOCK_D)
    first_block = tl.load(pass_block + first_pass)
    for job in range(first_block * chunks + tl.program_id(0), num_col_blocks * chunks, tl.num_programs(0)):
        block, d = job // chunks, job % chunks * BLOCK_D
        ds = d + tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for tile in range(tl.load(start + block), tl.load(start + block + 1)):
            row = tl.load(tile_rows + tile) * BLOCK_M
            gradient = kept_tile(
                row, block * BLOCK_N, hidden, weight, bias, order, labels, lse, grad_lse, grad_label, num_tokens, vocab_size,
                hidden_size, hidden_stride, weight_stride, logit_scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, False, True,
                PRECISION, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            rows = row + tl.arange(0, BLOCK_M)
            h_in = (rows < num_tokens)[:, None] & (ds < hidden_size)[None, :]
            h = tl.load(hidden + rows.to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=h_in, other=0.0)
            g = tl.trans(gradient.to(h.dtype))
            if UPCAST:
                g, h = g.to(tl.float32), h.to(tl.float32)
            acc += tl.dot(g, h, input_precision=PRECISION)
        acc = dropped_part(
            acc, block, ds, spread, leans, along, back, vocab_size, hidden_size, LEANS, DIRECTIONS, PRECISION, UPCAST, BLOCK_N
        )  # fmt: skip
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (cols < vocab_size)[:, None] & (ds < hidden_size)[None, :]
        at = tl.load(order + cols).to(tl.int64)[:, None] * hidden_size + ds[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
