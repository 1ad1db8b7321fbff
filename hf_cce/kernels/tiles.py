"""What every kernel does with one tile of logits; inlined into them by Triton."""

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, num_row_blocks, num_col_blocks, GROUP_M: tl.constexpr):
    """(row block, column block) of a tile, in an order in which neighbours share rows of hidden and weight in L2."""
    per_group = GROUP_M * num_col_blocks
    group = tile // per_group
    first = group * GROUP_M
    size = min(num_row_blocks - first, GROUP_M)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def tile_logits(
    hidden,  # [N, D] pointer or TMA descriptor
    weight,  # [V, D] pointer or TMA descriptor
    bias,  # [V] pointer
    row,  # first token of the tile
    col,  # first vocabulary entry of the tile
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
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """softcap · tanh(logit_scale · (h Wᵀ + b) / softcap) of one tile, [BLOCK_M, BLOCK_N] float32. Outside V: whatever."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    cols = col + tl.arange(0, BLOCK_N)
    if TMA:
        for k in range(0, hidden_size, BLOCK_K):
            acc = tl.dot(hidden.load([row, k]), weight.load([col, k]).T, acc)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        ks = tl.arange(0, BLOCK_K)
        h_ptr = hidden + rows.to(tl.int64)[:, None] * hidden_stride + ks[None, :]
        w_ptr = weight + cols.to(tl.int64)[:, None] * weight_stride + ks[None, :]
        row_in, col_in = (rows < num_tokens)[:, None], (cols < vocab_size)[:, None]
        for k in range(0, hidden_size, BLOCK_K):
            in_k = (ks < hidden_size - k)[None, :]
            h = tl.load(h_ptr + k, mask=row_in & in_k, other=0.0)
            w = tl.load(w_ptr + k, mask=col_in & in_k, other=0.0)
            if UPCAST:
                h, w = h.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(h, tl.trans(w), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        acc *= logit_scale
    if HAS_SOFTCAP:
        # tanh from the exponential of a negative number: no overflow, and it runs in the interpreter too
        e = tl.exp(-2.0 * tl.abs(acc) / softcap)
        acc = tl.where(acc < 0, -softcap, softcap) * ((1.0 - e) / (1.0 + e))
    return acc
