"""Gradients from cached exponentials, without a pass over them that turns them into the gradient of the logits.

What they lack is a factor per token and the label's own entry (see hf_cce.kernels.exp_cache). With S the exponentials, zero
where the labels are, f the factors and c the labels' entries,

    dh = f · (S W) + c · W[label]        dW = Sᵀ (f · h) + Σ c · h over the tokens of each label

so cuBLAS multiplies S as it is, into float32, and the rest is done where its result is rounded. f · h is rounded to the inputs'
dtype; c · h is not, as a label's entry is the largest.

S may be of one group of tokens: then the sum of the other groups' Sᵀ (f · h) is added (see hf_cce.kernels.token_groups).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.exp_cache import LIMIT
from hf_cce.kernels.inputs import LogitInputs, TokenGrads
from hf_cce.kernels.launch_config import ceil_div
from hf_cce.kernels.matmul import multiply_add

# Bytes of a float32 product. They are as many tiles as keep cuBLAS busy, and stay in an H200's L2 cache until they are rounded.
BUFFER = 32 << 20
BLOCK_V = 16  # rows of the weight that a program finishes


@triton.jit(do_not_specialize=["num_tokens", "width", "ignore_index"])
def _factors_kernel(
    values,  # [N, width] S, rows `stride` apart; zeros are written where the labels are
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    flags,  # [row blocks] int32, written: whether the loss of a token of the block is above LIMIT
    scale,  # [N], written: f
    of_label,  # [N], written: c
    num_tokens,
    vocab_size,
    width,  # of the vocabulary
    stride,
    ignore_index,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    row_lse = tl.load(lse + rows, mask=in_rows, other=0.0)
    z = tl.load(label_logit + rows, mask=in_rows, other=0.0)
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    valid = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    beyond = tl.max((in_rows & ((row_lse - z <= LIMIT) == 0)).to(tl.int32), 0)  # true for NaN
    p = tl.exp(z - row_lse)
    g = tl.load(grad_lse + rows, mask=in_rows, other=0.0)
    c = g * p + tl.load(grad_label + rows, mask=in_rows, other=0.0)
    if HAS_SOFTCAP:
        c *= 1.0 - (z / softcap) * (z / softcap)
    # A row block that is computed anew holds the gradient itself, its labels' entries included.
    f = tl.where(beyond != 0, 1.0, tl.where(valid, g * p * logit_scale, 0.0))
    mine = valid & (label < width)
    c = tl.where((beyond == 0) & mine, c * logit_scale, 0.0)
    zero = tl.zeros((BLOCK_M,), values.dtype.element_ty)
    tl.store(values + rows.to(tl.int64) * stride + label, zero, mask=in_rows & mine)
    tl.store(flags + tl.program_id(0), beyond)
    tl.store(scale + rows, f, mask=in_rows)
    tl.store(of_label + rows, c, mask=in_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def _scale_rows_kernel(hidden, scale, out, num_tokens, d, hidden_stride, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """f · h, [N, D]."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < num_tokens)[:, None] & (ds < d)[None, :]
    h = tl.load(hidden + rows.to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=mask, other=0.0).to(tl.float32)
    f = tl.load(scale + rows, mask=rows < num_tokens, other=0.0)
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], (h * f[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _finish_hidden_kernel(
    product,  # [rows, D] float32
    weight,  # [V, D]
    labels,  # [N]
    scale,  # [N]
    of_label,  # [N], zero where the label is ignored
    out,  # [N, D], written
    first_row,
    num_rows,
    d,
    weight_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows, here = first_row + at, at < num_rows
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = here[:, None] & (ds < d)[None, :]
    c = tl.load(of_label + rows, mask=here, other=0.0)
    f = tl.load(scale + rows, mask=here, other=0.0)
    label = tl.load(labels + rows, mask=here & (c != 0.0), other=0)
    w = tl.load(
        weight + label.to(tl.int64)[:, None] * weight_stride + ds[None, :], mask=mask & (c != 0.0)[:, None], other=0.0
    )
    x = tl.load(product + at.to(tl.int64)[:, None] * d + ds[None, :], mask=mask, other=0.0)
    x = x * f[:, None] + w.to(tl.float32) * c[:, None]
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_block"])
def _finish_weight_kernel(
    product,  # [rows, D] float32
    earlier,  # [rows, D] float32, if HAS_EARLIER: the sum of other tokens' products; may share memory with `out` in float32
    hidden,  # [N, D]
    labels,  # [N] in ascending order
    tokens,  # [N] int64: the tokens of these labels
    start,  # [blocks of the vocabulary + 1]: where each block's labels begin
    of_label,  # [N]
    out,  # [V, D], written
    first_row,
    first_block,
    num_rows,
    d,
    hidden_stride,
    HAS_EARLIER: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows, here = first_row + at, at < num_rows
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = ds < d
    mask = here[:, None] & in_d[None, :]
    here_in = at.to(tl.int64)[:, None] * d + ds[None, :]
    acc = tl.load(product + here_in, mask=mask, other=0.0)
    if HAS_EARLIER:
        acc += tl.load(earlier + here_in, mask=mask, other=0.0)
    block = first_block + tl.program_id(0)
    stop = tl.load(start + block + 1)
    for first in range(tl.load(start + block), stop, BLOCK_T):
        place = first + tl.arange(0, BLOCK_T)
        mine = place < stop
        label = tl.load(labels + place, mask=mine, other=-1)
        token = tl.load(tokens + place, mask=mine, other=0)
        c = tl.load(of_label + token, mask=mine, other=0.0)
        h = tl.load(
            hidden + token[:, None] * hidden_stride + ds[None, :], mask=mine[:, None] & in_d[None, :], other=0.0
        )
        # In two parts of the inputs' dtype, whose products are exact in float32.
        high = c.to(h.dtype)
        low = (c - high.to(tl.float32)).to(h.dtype)
        hit = label[None, :] == rows[:, None]
        zero = tl.zeros((BLOCK_V, BLOCK_T), h.dtype)
        a, b = tl.where(hit, high[None, :], zero), tl.where(hit, low[None, :], zero)
        if UPCAST:
            a, b, h = a.to(tl.float32), b.to(tl.float32), h.to(tl.float32)
        acc = tl.dot(a, h, acc, input_precision="ieee")
        acc = tl.dot(b, h, acc, input_precision="ieee")
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], acc.to(out.dtype.element_ty), mask=mask)


def rows_at_a_time(d: int, most: int) -> int:
    """Rows of a float32 product [rows, D], of ``most`` in all."""
    return min(ceil_div(BUFFER // (4 * d), BLOCK_V) * BLOCK_V, ceil_div(most, BLOCK_V) * BLOCK_V)


def sort_bytes(n: int, v: int) -> int:
    """Bytes for sorting the labels, and for vectors of a few numbers per token."""
    return 64 * n + 8 * ceil_div(v, BLOCK_V)


def label_factors(
    values: Tensor,  # [N, width]: of the first columns of the vocabulary
    label_logit: Tensor,  # [N]
    inputs: LogitInputs,
    grads: TokenGrads,
    block_m: int,
    v: int,
    scale: Tensor,  # [N] float32, written: f
    of_label: Tensor,  # [N] float32, written: c; zero where the label is none of the columns
) -> Tensor:
    """Write the factors, and zeros into ``values`` where the labels are.

    Returns:
        Flags of the row blocks, [⌈N / block_m⌉] int32: the values of those that are not zero have to be computed anew.
    """
    n, width = values.shape
    flags = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=values.device)
    _factors_kernel[(ceil_div(n, block_m),)](
        values, label_logit, inputs.labels, grads.lse, grads.grad_lse, grads.grad_label, flags, scale, of_label, n, v, width,
        values.stride(0), inputs.ignore_index, inputs.logit_scale, inputs.softcap or 1.0,
        HAS_SOFTCAP=inputs.softcap > 0, BLOCK_M=block_m,
    )  # fmt: skip
    return flags


def hidden_gradient(
    values: Tensor,  # [N, ·]: of the first columns of the vocabulary
    weight: Tensor,  # [·, D]
    labels: Tensor,  # [N]
    scale: Tensor,  # [N]
    of_label: Tensor,  # [N]
    product: Tensor,  # [rows, D] float32, overwritten
    out: Tensor,  # [N, D], written
) -> None:
    """dh, as many tokens at a time as ``product`` holds."""
    (n, d), at_a_time = out.shape, product.shape[0]
    for start in range(0, n, at_a_time):
        stop = min(n, start + at_a_time)
        multiply_add(product[: stop - start], values[start:stop], weight, first=True)
        _finish_hidden_kernel[(ceil_div(stop - start, 16), ceil_div(d, 256))](
            product, weight, labels, scale, of_label, out, start, stop - start, d, weight.stride(0), BLOCK_R=16, BLOCK_D=256
        )  # fmt: skip


def scale_rows(hidden: Tensor, scale: Tensor, out: Tensor) -> None:
    """f · h, [N, D], into ``out``."""
    n, d = hidden.shape
    _scale_rows_kernel[(ceil_div(n, 16), ceil_div(d, 256))](
        hidden, scale, out, n, d, hidden.stride(0), BLOCK_R=16, BLOCK_D=256
    )


def weight_gradient(
    values: Tensor,  # [rows, V]: of all tokens, or of the last ones
    scaled: Tensor,  # [rows, D]: f · h of the same tokens
    inputs: LogitInputs,  # of all tokens
    of_label: Tensor,  # [N]
    product: Tensor,  # [rows, D] float32, overwritten
    out: Tensor,  # [V, D], written
    earlier: Sequence[Tensor] = (),
) -> None:
    """dW, as many rows at a time as ``product`` holds.

    ``earlier`` is the sum of other tokens' products: float32 [rows, D] each, of consecutive parts of the vocabulary. The first
    may lie in the memory of ``out``, from its beginning; all but the last are whole blocks.
    """
    (v, d), at_a_time, hidden = out.shape, product.shape[0], inputs.hidden
    by_label = torch.sort(inputs.labels.int())
    blocks = torch.arange(ceil_div(v, BLOCK_V) + 1, dtype=torch.int32, device=hidden.device) * BLOCK_V
    first_of = torch.searchsorted(by_label.values, blocks, out_int32=True)
    begin = 0
    parts: Sequence[Tensor | None] = earlier or (None,)
    for part in parts:
        end = v if part is None else begin + part.shape[0]
        for start in range(begin, end, at_a_time):
            stop = min(end, start + at_a_time)
            block, before = product[: stop - start], None if part is None else part[start - begin : stop - begin]
            # `out` row r overwrites the float32 row r / 2: at the beginning, one that another program of this launch reads.
            if before is not None and out.element_size() < 4 and begin == 0 and stop > 2 * start:
                block.copy_(before)
                before = None
                multiply_add(block, values[:, start:stop].t(), scaled, first=False)
            else:
                multiply_add(block, values[:, start:stop].t(), scaled, first=True)
            _finish_weight_kernel[(ceil_div(stop - start, BLOCK_V), ceil_div(d, 128))](
                product, before, hidden, by_label.values, by_label.indices, first_of, of_label, out, start,
                start // BLOCK_V, stop - start, d, hidden.stride(0), HAS_EARLIER=before is not None,
                UPCAST=hidden.is_cpu, BLOCK_V=BLOCK_V, BLOCK_T=16 if hidden.is_cpu else 64, BLOCK_D=128,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        begin = end
