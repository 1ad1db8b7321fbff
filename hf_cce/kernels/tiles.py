"""Device functions for one tile of logits; Triton inlines them into the kernels."""

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, num_row_blocks, num_col_blocks, GROUP_M: tl.constexpr):
    """Return (row block, column block) of a tile, ordered so that neighbouring tiles share rows of hidden and weight in L2."""
    per_group = GROUP_M * num_col_blocks
    group = tile // per_group
    first = group * GROUP_M
    size = min(num_row_blocks - first, GROUP_M)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return a · b + acc; "upcast" multiplies in float32, because Triton's interpreter cannot multiply bfloat16."""
    if PRECISION == "upcast":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def exp(x):
    """Return eˣ, or 0 where that is subnormal, which takes a GPU half as many instructions as ``tl.exp``."""
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def softcapped(x, softcap):
    """Return softcap · tanh(x / softcap), computed from the exponential of a negative number, which cannot overflow.

    Near zero 1 − e⁻²ᵗ would cancel. The Taylor series of tanh is used there; it is exact in float32 up to t² = 0.09.
    """
    t = x / softcap
    t2 = t * t
    near = x + x * (t2 * (-1.0 / 3.0 + t2 * (2.0 / 15.0 + t2 * (-17.0 / 315.0 + t2 * (62.0 / 2835.0)))))
    e = exp(-2.0 * tl.abs(t))
    return tl.where(t2 < 0.09, near, tl.where(x < 0, -1.0, 1.0) * (softcap - 2.0 * softcap * e / (1.0 + e)))


@triton.jit
def softcap_slope(z, softcap):
    """Return the derivative of ``softcapped`` from its value z: 1 − tanh² as (1 − |tanh|) (1 + |tanh|), exact near |tanh| = 1."""
    from_cap = (softcap - tl.abs(z)) * (1.0 / softcap)
    return from_cap * (2.0 - from_cap)


@triton.jit
def tile_logits(
    hidden,  # [N, D] pointer or TMA descriptor
    weight,  # [V, D] pointer or TMA descriptor
    bias,  # [V] pointer
    vocab_perm,  # [V padded to whole tiles] int32: the row of weight of each column; None if they are in order
    row,  # first token of the tile
    col,  # first vocabulary entry of the tile
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return softcap · tanh(logit_scale · (h Wᵀ + b) / softcap) of one tile, [BLOCK_M, BLOCK_N] float32; undefined outside V."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    cols = col + tl.arange(0, BLOCK_N)
    if TMA and vocab_perm is None:
        for k in range(0, hidden_size, BLOCK_K):
            acc = tl.dot(hidden.load([row, k]), weight.load([col, k]).T, acc)
    elif TMA:
        ks = tl.arange(0, BLOCK_K)
        w_rows = tl.load(vocab_perm + cols)
        w_ptr = weight + w_rows.to(tl.int64)[:, None] * weight_stride + ks[None, :]
        for k in range(0, hidden_size, BLOCK_K):
            w = tl.load(w_ptr + k, mask=(ks < hidden_size - k)[None, :], other=0.0)
            acc = tl.dot(hidden.load([row, k]), w.T, acc)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        ks = tl.arange(0, BLOCK_K)
        h_ptr = hidden + rows.to(tl.int64)[:, None] * hidden_stride + ks[None, :]
        w_rows = cols if vocab_perm is None else tl.load(vocab_perm + cols)
        w_ptr = weight + w_rows.to(tl.int64)[:, None] * weight_stride + ks[None, :]
        row_in, col_in = (rows < num_tokens)[:, None], (cols < vocab_size)[:, None]
        for k in range(0, hidden_size, BLOCK_K):
            in_k = (ks < hidden_size - k)[None, :]
            h = tl.load(h_ptr + k, mask=row_in & in_k, other=0.0)
            w = tl.load(w_ptr + k, mask=col_in & in_k, other=0.0)
            acc = dot(h, tl.trans(w), acc, PRECISION)
    if bias is not None:
        acc += tl.load(bias + cols, mask=cols < vocab_size, other=0.0).to(tl.float32)[None, :]
    if logit_scale is not None:
        acc *= logit_scale
    if softcap is not None:
        acc = softcapped(acc, softcap)
    return acc


@triton.jit
def tile_gradient(
    z,  # [BLOCK_M, BLOCK_N] logits after scale and softcap
    rows,
    cols,
    in_rows,
    col,  # first entry of cols
    label,  # [BLOCK_M]
    valid,  # [BLOCK_M], True if not ignored
    row_lse,  # [BLOCK_M], infinite where the label is ignored, so that p = 0 there
    g,  # [BLOCK_M] upstream gradient of lse, zero in ignored rows, where the caller's gradient may be infinite
    entropy,  # pointer to [N], like the next three
    grad_label,
    grad_mean,
    grad_entropy,
    vocab_size,
    logit_scale,
    softcap,
):
    """Return the gradient w.r.t. one tile of h Wᵀ + b, [BLOCK_M, BLOCK_N] float32; zero in ignored rows."""
    p = exp(z - row_lse[:, None])
    if grad_entropy is not None:
        g_entropy = tl.load(grad_entropy + rows, mask=valid, other=0.0)
        expectation = tl.where(valid, row_lse - tl.load(entropy + rows, mask=in_rows, other=0.0), 0.0)
        z_finite = tl.maximum(z, -1e30)  # for z = -inf, p * z would be NaN instead of 0
        gradient = p * (g[:, None] - g_entropy[:, None] * (z_finite - expectation[:, None]))
    else:
        gradient = p * g[:, None]
    if grad_mean is not None:
        g_mean = tl.load(grad_mean + rows, mask=valid, other=0.0)
        gradient += (g_mean / vocab_size)[:, None]
    hit = valid & (label >= col) & (label < col + z.shape[1])
    if tl.sum(hit.to(tl.int32)) > 0:
        g_label = tl.load(grad_label + rows, mask=hit, other=0.0)
        gradient += tl.where(cols[None, :] == label[:, None], g_label[:, None], 0.0)
    if softcap is not None:
        gradient *= softcap_slope(z, softcap)
    if logit_scale is not None:
        gradient *= logit_scale
    return gradient
