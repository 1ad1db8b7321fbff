"""What softmax prefers within the tiles that are dropped: the mean row of a tile, weighted by its probabilities.

A dropped tile's mass goes to the mean of its rows of the weight. But among these a token prefers those that its own hidden state
points to, and so does every token: what is left out has a direction. Were the rows of a tile normally distributed, with
covariance C, their mean weighted by exp(h · w) would be that of the rows plus C h, whatever the size of h (the mean of an
exponentially tilted normal distribution). So one product of hidden states with one matrix, the covariance within dropped
tiles, weighted by the mass in them, brings most of it back: 7.8e-3 of the gradient's norm became 2.2e-3 on a head of 128,256
words of which 0.11 of the tiles were kept (hf_cce/bench/results/2026-11-21-h200-tilt-study.txt).

The gradient of the weight lacks the like. To first order p of a row is that of its tile's mean times 1 + h · δ, with δ what the
row differs by from that mean; so the row lacks M G δ, where G is the second moment of the hidden states, weighted by what
of their probability is dropped, and M what the tile's dropped tokens leave to a row. Of G a few directions hold most: with the
first 16 of them, an orthonormal Q, it is M (Gᵀ Q) (Qᵀ δ), where Qᵀ δ [V, 16] can be kept and the rest is one small product more
in the kernel that writes the gradient anyway (same study: 2.8e-3 → 1.9e-3; 1.8e-3 with all directions).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.plan import ceil_div
from hf_cce.kernels.products import multiply_add

CHUNK = 16 << 20  # bytes of the weight's rows that are centred at a time
DIRECTIONS = tl.constexpr(16)  # the fewest that a tensor core multiplies
POWERS = 3  # rounds of subspace iteration: multiply by the second moment, orthonormalise
NEGLIGIBLE = 1e-13  # squared length, of one, that a direction needs beyond those before it


class Leaning(NamedTuple):
    """What the rows of the weight's gradient lean by: ``along`` times ``back``, times what dropped tiles leave to each row."""

    along: Tensor  # [V, 16] Qᵀ δ of each column, in their order
    back: Tensor  # [16, D] Qᵀ G


@Kernel
@triton.jit
def _centred_rows_kernel(
    weight,  # [V, D]
    order,  # [V padded] int32
    scale,  # [T]: what the rows of each block are multiplied by
    out,  # [rows, D], written
    first_block,
    v,
    d,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = first_block + tl.program_id(0)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (cols < v)[:, None] & (ds < d)[None, :]
    x = tl.load(weight + tl.load(order + cols).to(tl.int64)[:, None] * stride + ds[None, :], mask=mask, other=0.0)
    mean = tl.sum(x.to(tl.float32), 0) / tl.minimum(v - block * BLOCK_N, BLOCK_N).to(tl.float32)
    y = tl.where(mask, (x.to(tl.float32) - mean[None, :]) * tl.load(scale + block), 0.0)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], y.to(out.dtype.element_ty), mask=(ds < d)[None, :])


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _tilted_rows_kernel(
    hidden,  # [N, D]
    mass,  # [T, N], or sums of some of its rows each
    out,  # [N, D], written; [D, N] if TRANSPOSED, then up to the stride
    num_tokens,
    d,
    hidden_stride,
    tile_stride,
    out_stride,
    num_tiles,
    logit_scale,
    TRANSPOSED: tl.constexpr,
    ABSOLUTE: tl.constexpr,  # without the sign of the mass, which is that of a token's gradient
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a program
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    total = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for first in range(0, num_tiles, BLOCK_T):
        tiles = first + tl.arange(0, BLOCK_T)
        inside = (tiles < num_tiles)[:, None] & in_rows[None, :]
        total += tl.load(mass + tiles.to(tl.int64)[:, None] * tile_stride + rows[None, :], mask=inside, other=0.0)
    factor = tl.sum(total, 0) * logit_scale
    if ABSOLUTE:
        factor = tl.abs(factor)
    for first in range(0, SPAN, BLOCK_D):
        ds = tl.program_id(1) * SPAN + first + tl.arange(0, BLOCK_D)
        mask = in_rows[:, None] & (ds < d)[None, :]
        x = tl.load(hidden + rows.to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=mask, other=0.0)
        # of an ignored token: what is not finite in its hidden state must not spread from there
        y = tl.where(factor[:, None] == 0.0, 0.0, x.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
        if TRANSPOSED:
            # A mask by the number of tokens, of which nothing is known, would keep stores from being vectors: what is beyond
            # them gets zeros.
            to = out + ds.to(tl.int64)[:, None] * out_stride + rows[None, :]
            tl.store(to, tl.trans(y), mask=(ds < d)[:, None] & (rows < out_stride)[None, :])
        else:
            tl.store(out + rows.to(tl.int64)[:, None] * out_stride + ds[None, :], y, mask=mask)


@Kernel
@triton.jit
def _along_kernel(
    product,  # [V, 16] float32: the rows of the weight along each direction
    order,  # [V padded] int32
    out,  # [V, 16], written: in the order of columns, less the mean of their block
    v,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, SIZE)
    mask = (cols < v)[:, None] & (ks < SIZE)[None, :]
    x = tl.load(product + tl.load(order + cols).to(tl.int64)[:, None] * SIZE + ks[None, :], mask=mask, other=0.0)
    mean = tl.sum(x, 0) / tl.minimum(v - tl.program_id(0) * BLOCK_N, BLOCK_N).to(tl.float32)
    tl.store(
        out + cols.to(tl.int64)[:, None] * SIZE + ks[None, :], (x - mean[None, :]).to(out.dtype.element_ty), mask=mask
    )


def kept_bytes(d: int, v: int, element: int, need_hidden: bool, need_weight: bool) -> int:
    """What ``covariance`` and ``leaning`` leave."""
    return element * (d * d * need_hidden + DIRECTIONS.value * (v + d) * need_weight)


def making_bytes(n: int, d: int, v: int, element: int, block_n: int, need_weight: bool) -> int:
    """What ``covariance`` and ``leaning`` take besides their results, at most."""
    of_weight = 4 * d * d + element * n * d + 4 * DIRECTIONS.value * (v + 8 * d)
    return max(4 * d * d + max(CHUNK, element * block_n * d), of_weight * need_weight)


def covariance(
    weight: Tensor,  # [V, D]
    order: Tensor,  # [V padded]
    mass: Tensor,  # [T] float32: the probability in the dropped rows of each tile
    block_n: int,
) -> Tensor:
    """Of the rows of the weight around the mean of their block, weighted by ``mass``; [D, D] in the weight's dtype."""
    (v, d), tiles = weight.shape, mass.numel()
    # Of the order of one, as float16 has little range; the covariance is divided by what this is too large by.
    whole = mass.sum()
    # Of nothing dropped, as where all labels are ignored, the matrix would be zero, and stay for later steps.
    scale = torch.where(whole > 0, mass * tiles / whole, 1.0).sqrt()
    total = torch.empty((d, d), device=weight.device, dtype=torch.float32)
    at_a_time = max(1, CHUNK // (weight.element_size() * block_n * d))
    for first in range(0, tiles, at_a_time):
        count = min(at_a_time, tiles - first)
        rows = weight.new_empty((count * block_n, d))
        _centred_rows_kernel[(count, ceil_div(d, 128))](
            weight, order, scale, rows, first, v, d, weight.stride(0), BLOCK_N=block_n, BLOCK_D=128
        )
        multiply_add(total, rows.t(), rows, first=first == 0)
        del rows  # before the next ones, and the copy below
    # What is not finite in one step must not stay for those that use this again.
    return total.div_(tiles * block_n).to(weight.dtype).nan_to_num_(0.0, 0.0, 0.0)


def tilted_rows(
    hidden: Tensor, mass: Tensor, logit_scale: float, columns: Tensor | None = None, absolute: bool = False
) -> Tensor:
    """Times the covariance, what the dropped tiles leave to each token beyond their means; [N, D] in the dtype of ``hidden``.

    ``mass`` [T, N]: the gradient that the dropped tiles keep, or sums of some of its rows each. With ``columns`` [D, N] it is
    written there, transposed; zeros up to its stride, beyond N. ``absolute``: by the mass without its sign.
    """
    (n, d), out = hidden.shape, torch.empty_like(hidden) if columns is None else columns
    _tilted_rows_kernel[(ceil_div(n, 32), ceil_div(d, 512))](
        hidden, mass, out, n, d, hidden.stride(0), mass.stride(0), out.stride(0), mass.shape[0], logit_scale,
        TRANSPOSED=columns is not None, ABSOLUTE=absolute, BLOCK_M=32, BLOCK_T=64, BLOCK_D=128, SPAN=512,
    )  # fmt: skip
    return out


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormal columns that span what the columns of ``vectors`` [D, 16] do; near zero for those that add nothing.

    Cholesky QR in float64, as the products of the columns square how far their lengths are apart.
    """
    unit = torch.nn.functional.normalize(vectors.double(), dim=0, eps=torch.finfo(torch.float64).tiny)
    gram = unit.t() @ unit
    gram.diagonal().add_(NEGLIGIBLE)
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.linalg.solve_triangular(factor, unit.t(), upper=False).t().to(vectors.dtype)


def leaning(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    order: Tensor,  # [V padded]
    mass: Tensor,  # as for ``tilted_rows``
    block_n: int,
) -> Leaning:
    """What the kernel of the weight's gradient multiplies; zeros where nothing is dropped."""
    (v, d), size = weight.shape, DIRECTIONS.value
    weighted = tilted_rows(hidden, mass, 1.0, absolute=True)
    moment = torch.empty((d, d), device=weight.device, dtype=torch.float32)
    multiply_add(moment, weighted.t(), hidden, first=True)
    del weighted
    # Divided by all that is dropped it is a mean. Signs would make that nearly nothing where tokens' gradients have both.
    total = torch.linalg.vector_norm(mass, 1, dtype=torch.float32)
    # What is not finite, as where nothing is dropped, must not stay for those that use this again.
    moment.div_(total).nan_to_num_(0.0, 0.0, 0.0)
    directions = torch.empty((d, size), device=weight.device, dtype=torch.float32)
    if d >= size:
        directions.copy_(moment[:, :: d // size][:, :size])
    else:
        torch.index_select(moment, 1, torch.arange(size, device=weight.device) * d // size, out=directions)
    directions = _orthonormal(directions)
    for _ in range(POWERS - 1):
        product = torch.empty_like(directions)
        multiply_add(product, moment, directions, first=True)
        directions = _orthonormal(product)
    back = torch.empty((size, d), device=weight.device, dtype=torch.float32)
    multiply_add(back, directions.t(), moment, first=True)
    product = torch.empty((v, size), device=weight.device, dtype=torch.float32)
    multiply_add(product, weight, directions.to(weight.dtype), first=True)
    along = weight.new_empty((v, size))
    _along_kernel[(ceil_div(v, block_n),)](product, order, along, v, BLOCK_N=block_n, SIZE=size)
    return Leaning(along, back.to(weight.dtype))
