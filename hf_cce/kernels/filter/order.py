"""Order of vocabulary and tokens before the logits are divided into tiles, so that few tiles hold most of the gradient.

Columns are vocabulary entries, sorted by their average logit. Rows are tokens, sorted by the column of their label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.launch_config import ceil_div
from hf_cce.kernels.launcher import Kernel

SAMPLE_TOKENS = 1024  # tokens sampled for the average logits
EXACT_COLUMNS = tl.constexpr(1 << 14)  # tokens with labels beyond these columns are sorted by blocks of 128 columns
MAX_COUNTING_SORT_TOKENS = 1 << 13  # up to this many tokens, counting smaller keys is faster than sorting


@Kernel
@triton.jit(do_not_specialize=["ignore_index", "num_tokens"])
def _sort_keys_kernel(labels, inv_vocab_perm, columns, keys, num_tokens, v, ignore_index, BLOCK: tl.constexpr):
    """Write the column of each label (V if ignored), and the sort keys of ``sort_tokens``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + at, mask=at < num_tokens, other=ignore_index)
    in_vocab = (label != ignore_index) & (label >= 0) & (label < v)
    column = tl.load(inv_vocab_perm + label, mask=in_vocab, other=v)
    key = tl.minimum(column, EXACT_COLUMNS) + tl.maximum(column - EXACT_COLUMNS, 0) // 128
    key = tl.minimum(key, 32766)  # of more than 2 million columns, the last ones are one block
    tl.store(columns + at, column, mask=at < num_tokens)
    tl.store(keys + at, tl.where(in_vocab, key, key + 1), mask=at < num_tokens)


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _sort_by_counting_kernel(
    keys,  # [N] int16
    columns,  # [N] int32
    token_perm,  # [N] int64, written: the tokens by ascending key; tokens with equal keys keep their order
    labels,  # [N] int32, written: the columns of these tokens
    num_tokens,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < num_tokens
    # Key and token index in one integer, so that no two are equal.
    mine = tl.load(keys + rows, mask=inside, other=0).to(tl.int32) * 65536 + rows
    signs = tl.zeros((BLOCK_R, BLOCK), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        other = tl.load(keys + at, mask=at < num_tokens, other=32767).to(tl.int32) * 65536 + at
        # −1 where `other` is smaller; this takes fewer instructions than a comparison.
        signs += (other[None, :] - mine[:, None]) >> 31
    before = -tl.sum(signs, 1)
    tl.store(token_perm + before, rows.to(tl.int64), mask=inside)
    tl.store(labels + before, tl.load(columns + rows, mask=inside, other=0), mask=inside)


@Kernel
@triton.jit
def _gather_rows_kernel(
    weight,  # [V, D]
    vocab_perm,  # [V padded] int32
    scale,  # [T], or None: see ``gather_rows``
    out,  # [columns, D], written
    means,  # [T, D], written unless scale is given
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
    x = tl.load(weight + tl.load(vocab_perm + cols).to(tl.int64)[:, None] * stride + ds[None, :], mask=mask, other=0.0)
    width = tl.minimum(v - block * BLOCK_N, BLOCK_N).to(tl.float32)
    rows = cols - first_block * BLOCK_N
    if scale is None:
        tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], x, mask=mask)
        tl.store(means + block.to(tl.int64) * d + ds, tl.sum(x.to(tl.float32), 0) / width, mask=ds < d)
    else:
        mean = tl.sum(x.to(tl.float32), 0) / width
        y = tl.where(mask, (x.to(tl.float32) - mean[None, :]) * tl.load(scale + block), 0.0)
        tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], y.to(out.dtype.element_ty), mask=(ds < d)[None, :])


class WeightCorrection(NamedTuple):
    """Rank-16 correction of dW: ``row_coeffs`` · ``basis``, times the dropped mass of each row."""

    row_coeffs: Tensor  # [V, 16]: Qᵀ δ of each column
    basis: Tensor  # [16, D]: Qᵀ G


@dataclass
class Vocabulary:
    """Order of the columns, and corrections that are computed once and reused by all steps with this order."""

    vocab_perm: Tensor  # [V padded to whole tiles] int32: the vocabulary entry of each column
    inv_vocab_perm: Tensor  # [V] int32: the column of each vocabulary entry
    covariance: Tensor | None = None  # [D, D]: see hf_cce.kernels.filter.corrections
    weight_correction: WeightCorrection | None = None  # likewise


def sort_vocabulary(hidden: Tensor, weight: Tensor, bias: Tensor | None, block_n: int) -> Vocabulary:
    """Sort the vocabulary by the average logit over a sample of tokens, the largest first, so that most tiles can be dropped."""
    v = weight.shape[0]
    sampled = hidden[:: max(1, hidden.shape[0] // SAMPLE_TOKENS)]
    average = torch.mv(weight, sampled.mean(0))
    if bias is not None:
        average = average + bias
    by_logit = torch.sort(average, descending=True).indices
    columns = torch.arange(v, dtype=torch.int32, device=hidden.device)
    inv_vocab_perm = torch.empty_like(columns).scatter_(0, by_logit, columns)
    return Vocabulary(F.pad(by_logit.int(), (0, -v % block_n)), inv_vocab_perm)


def sort_tokens(labels: Tensor, vocabulary: Vocabulary, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sort tokens by the column of their label; ignored tokens come last. Return ``SavedForward.token_perm`` and ``labels``.

    Keys have 16 bits because a radix sort takes one pass per byte. They distinguish the first EXACT_COLUMNS columns, which have
    most labels, and after these only blocks of 128. Few tokens are sorted by counting, in one launch instead of eight.
    """
    n, v = labels.numel(), vocabulary.inv_vocab_perm.numel()
    columns = torch.empty(n, dtype=torch.int32, device=labels.device)
    keys = torch.empty(n, dtype=torch.int16, device=labels.device)
    _sort_keys_kernel[(ceil_div(n, 1024),)](
        labels, vocabulary.inv_vocab_perm, columns, keys, n, v, ignore_index, BLOCK=1024
    )
    if n <= MAX_COUNTING_SORT_TOKENS:
        token_perm = torch.empty(n, dtype=torch.int64, device=labels.device)
        ordered = torch.empty_like(columns)
        _sort_by_counting_kernel[(ceil_div(n, 16),)](
            keys, columns, token_perm, ordered, n, BLOCK_R=16, BLOCK=512, num_warps=4
        )
        return token_perm, ordered
    token_perm = torch.sort(keys, stable=True).indices
    return token_perm, columns.index_select(0, token_perm)


def gather_rows(
    weight: Tensor,  # [V, D]
    vocab_perm: Tensor,  # [V padded]
    first: int,  # a multiple of block_n, like the length of ``vocab_perm``
    stop: int,
    block_n: int,
    means: Tensor | None = None,  # [T, D], written unless ``scale`` is given: mean over the rows of each block
    scale: Tensor | None = None,  # [T], factor of the rows of each block
) -> Tensor:
    """Return the rows of ``weight`` for columns ``first`` to ``stop``; with ``scale``, minus their block's mean, and scaled.

    Scaled rows outside V are zero.
    """
    v, d = weight.shape
    out = weight.new_empty((stop - first, d))
    _gather_rows_kernel[(ceil_div(stop - first, block_n), ceil_div(d, 128))](
        weight, vocab_perm, scale, out, means, first // block_n, v, d, weight.stride(0), BLOCK_N=block_n, BLOCK_D=128
    )
    return out
