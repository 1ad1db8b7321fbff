"""What softmax prefers within the tiles that are dropped: the mean row of a tile, weighted by its probabilities.

A dropped tile's mass goes to the mean of its rows of the weight. But among these a token prefers those that its own hidden state
points to, and so does every token: what is left out has a direction. Were the rows of a tile normally distributed, with
covariance C, their mean weighted by exp(h · w) would be that of the rows plus C h, whatever the size of h (the mean of an
exponentially tilted normal distribution). So one product of hidden states with one matrix, the covariance within dropped
tiles, weighted by the mass in them, brings most of it back: 7.8e-3 of the gradient's norm became 2.2e-3 on a head of 128,256
words of which 0.11 of the tiles were kept (hf_cce/bench/results/2026-11-21-h200-tilt-study.txt).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.products import multiply_add

CHUNK = 16 << 20  # bytes of the weight's rows that are centred at a time


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
    mass,  # [T, N]
    out,  # [N, D], written
    num_tokens,
    d,
    hidden_stride,
    tile_stride,
    num_tiles,
    logit_scale,
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
    for first in range(0, SPAN, BLOCK_D):
        ds = tl.program_id(1) * SPAN + first + tl.arange(0, BLOCK_D)
        mask = in_rows[:, None] & (ds < d)[None, :]
        x = tl.load(hidden + rows.to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=mask, other=0.0)
        # of an ignored token: what is not finite in its hidden state must not spread from there
        y = tl.where(factor[:, None] == 0.0, 0.0, x.to(tl.float32) * factor[:, None])
        tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], y.to(out.dtype.element_ty), mask=mask)


def making_bytes(d: int, element: int, block_n: int) -> int:
    """What ``covariance`` takes besides its result."""
    return 4 * d * d + max(CHUNK, element * block_n * d)


def covariance(
    weight: Tensor,  # [V, D]
    order: Tensor,  # [V padded]
    mass: Tensor,  # [T] float32: the probability in the dropped rows of each tile
    block_n: int,
) -> Tensor:
    """Of the rows of the weight around the mean of their block, weighted by ``mass``; [D, D] in the weight's dtype."""
    (v, d), tiles = weight.shape, mass.numel()
    # Of the order of one, as float16 has little range; the covariance is divided by what this is too large by.
    scale = (mass * (tiles / mass.sum().clamp_min(1e-30))).sqrt()
    total = torch.empty((d, d), device=weight.device)
    at_a_time = max(1, CHUNK // (weight.element_size() * block_n * d))
    for first in range(0, tiles, at_a_time):
        count = min(at_a_time, tiles - first)
        rows = weight.new_empty((count * block_n, d))
        _centred_rows_kernel[(count, triton.cdiv(d, 128))](
            weight, order, scale, rows, first, v, d, weight.stride(0), BLOCK_N=block_n, BLOCK_D=128
        )
        multiply_add(total, rows.t(), rows, first=first == 0)
    return (total / (tiles * block_n)).to(weight.dtype)


def tilted_rows(hidden: Tensor, mass: Tensor, logit_scale: float) -> Tensor:
    """Times the covariance, what the dropped tiles leave to each token beyond their means; [N, D] in the dtype of ``hidden``.

    ``mass`` [T, N]: the gradient that the dropped tiles keep.
    """
    (n, d), out = hidden.shape, torch.empty_like(hidden)
    _tilted_rows_kernel[(triton.cdiv(n, 32), triton.cdiv(d, 512))](
        hidden, mass, out, n, d, hidden.stride(0), mass.stride(0), mass.shape[0], logit_scale,
        BLOCK_M=32, BLOCK_T=64, BLOCK_D=128, SPAN=512,
    )  # fmt: skip
    return out
