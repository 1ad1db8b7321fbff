"""The order of vocabulary and tokens in which tiles are cut, so that what matters lies together.

The vocabulary by its average logit, the tokens by the place of their label in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.plan import ceil_div
from hf_cce.kernels.tilt import Leaning

SAMPLE = 1024  # tokens whose mean gives the average logits
FINE = 1 << 14  # columns in whose exact order tokens are sorted
LARGEST = 128 * (1 << 14)  # vocabulary for which 16 bits do
COUNTED = 1 << 13  # tokens up to which counting those before each of them is faster than sorting


@Kernel
@triton.jit
def _order_kernel(by_logit, order, rank, v, padded, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(by_logit + at, mask=at < v, other=0).to(tl.int32)
    tl.store(order + at, entry, mask=at < padded)
    tl.store(rank + entry, at, mask=at < v)


@Kernel
@triton.jit(do_not_specialize=["ignore_index", "num_tokens"])
def _key_kernel(labels, rank, columns, keys, num_tokens, v, ignore_index, FINE: tl.constexpr, BLOCK: tl.constexpr):
    """The column of each label, V where it is ignored, and what tokens are sorted by: see ``sort_tokens``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + at, mask=at < num_tokens, other=ignore_index)
    good = (label != ignore_index) & (label >= 0) & (label < v)
    column = tl.load(rank + label, mask=good, other=v)
    key = tl.minimum(column, FINE) + tl.maximum(column - FINE, 0) // 128
    tl.store(columns + at, column, mask=at < num_tokens)
    tl.store(keys + at, tl.where(good, key, key + 1), mask=at < num_tokens)


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _place_kernel(
    keys,  # [N] int16
    columns,  # [N] int32
    tokens,  # [N] int64, written: the token at each place, by ascending key; of equal keys the first token first
    labels,  # [N] int32, written: its column
    num_tokens,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < num_tokens
    # Keys and the tokens' numbers in one, so that no two are equal.
    mine = tl.load(keys + rows, mask=inside, other=0).to(tl.int32) * 65536 + rows
    signs = tl.zeros((BLOCK_R, BLOCK), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        other = tl.load(keys + at, mask=at < num_tokens, other=32767).to(tl.int32) * 65536 + at
        signs += (
            other[None, :] - mine[:, None]
        ) >> 31  # minus one where it is smaller: fewer instructions than to compare
    before = -tl.sum(signs, 1)
    tl.store(tokens + before, rows.to(tl.int64), mask=inside)
    tl.store(labels + before, tl.load(columns + rows, mask=inside, other=0), mask=inside)


@Kernel
@triton.jit
def _permute_rows_kernel(
    weight,  # [V, D]
    order,  # [V padded] int32
    out,  # [columns, D], written
    means,  # [T, D]: mean over the rows of each block
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
    tl.store(out + (cols - first_block * BLOCK_N).to(tl.int64)[:, None] * d + ds[None, :], x, mask=mask)
    width = tl.minimum(v - block * BLOCK_N, BLOCK_N).to(tl.float32)
    tl.store(means + block.to(tl.int64) * d + ds, tl.sum(x.to(tl.float32), 0) / width, mask=ds < d)


@dataclass
class Vocabulary:
    """The vocabulary in the order in which tiles are cut, and what was learnt of it."""

    order: Tensor  # [V padded to whole tiles] int32: the vocabulary entry at each column
    rank: Tensor  # [V] int32: the column of each entry
    tilt: Tensor | None = None  # [D, D]: see hf_cce.kernels.tilt, as of the next
    leaning: Leaning | None = None


class Order(NamedTuple):
    """Vocabulary and tokens in the order in which tiles are cut."""

    order: Tensor  # [V padded to whole tiles] int32: the vocabulary entry at each column
    tokens: Tensor  # [N] int64: the token at each row
    labels: Tensor  # [N] int32: the column of each row's label; V where it is ignored


def sort_vocabulary(hidden: Tensor, weight: Tensor, bias: Tensor | None, block_n: int) -> Vocabulary:
    """By the average logit over some tokens, the largest first.

    Any order gives right gradients; this one lets most tiles be dropped, and what they lose has no common direction.
    """
    v = weight.shape[0]
    some = hidden[:: max(1, hidden.shape[0] // SAMPLE)]
    average = torch.mv(weight, some.mean(0))
    if bias is not None:
        average = average + bias
    by_logit = torch.sort(average, descending=True).indices
    padded = ceil_div(v, block_n) * block_n
    order = torch.empty(padded, dtype=torch.int32, device=hidden.device)
    rank = torch.empty(v, dtype=torch.int32, device=hidden.device)
    _order_kernel[(ceil_div(padded, 1024),)](by_logit, order, rank, v, padded, BLOCK=1024)
    return Vocabulary(order, rank)


def sort_tokens(labels: Tensor, vocabulary: Vocabulary, ignore_index: int) -> Order:
    """By the column of their label; those without one come last.

    Sorting takes a pass for each byte of the keys, so these are of 16 bits: the first FINE columns, which most labels are in,
    and blocks of 128 after them. To sort by blocks alone would be as right, but then 2 to 15 % more tiles matter. Of few tokens
    each counts those before it: one launch instead of eight.
    """
    n, v = labels.numel(), vocabulary.rank.numel()
    columns = torch.empty(n, dtype=torch.int32, device=labels.device)
    keys = torch.empty(n, dtype=torch.int16 if v < LARGEST else torch.int32, device=labels.device)
    _key_kernel[(ceil_div(n, 1024),)](
        labels, vocabulary.rank, columns, keys, n, v, ignore_index, FINE=FINE if v < LARGEST else v, BLOCK=1024
    )
    if n <= COUNTED and v < LARGEST:
        tokens, ordered = torch.empty(n, dtype=torch.int64, device=labels.device), torch.empty_like(columns)
        _place_kernel[(ceil_div(n, 16),)](keys, columns, tokens, ordered, n, BLOCK_R=16, BLOCK=512, num_warps=4)
        return Order(vocabulary.order, tokens, ordered)
    tokens = torch.sort(keys, stable=True).indices
    return Order(vocabulary.order, tokens, columns.index_select(0, tokens))


def permute_rows(weight: Tensor, order: Tensor, first: int, stop: int, means: Tensor, block_n: int) -> Tensor:
    """Rows ``first`` to ``stop`` of ``weight`` in that order; their blocks' means into ``means`` [T, D]."""
    v, d = weight.shape
    out = weight.new_empty((stop - first, d))
    _permute_rows_kernel[(ceil_div(stop - first, block_n), ceil_div(d, 128))](
        weight, order, out, means, first // block_n, v, d, weight.stride(0),
        BLOCK_N=block_n, BLOCK_D=128, num_warps=4,
    )  # fmt: skip
    return out
