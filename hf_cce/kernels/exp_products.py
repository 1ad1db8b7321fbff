"""Gradients from the stored exponentials of all columns, without a pass that turns them into the gradient of the logits.

The gradient of the logits is these exponentials times a factor per token, except for the label's entry (see
hf_cce.kernels.exp_cache). With S the exponentials, zero at the labels and for ignored tokens, f the factors and c the labels'
entries,

    dh = f · (S W) + c · W[label]        dW = Sᵀ (f · h), plus c · h in the label's row

cuBLAS multiplies S unchanged, into float32. The products are rounded after the labels' entries are added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.exp_cache import Factors
from hf_cce.kernels.inputs import LogitInputs, Shape
from hf_cce.kernels.launch_config import ceil_div, padded
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import dot
from hf_cce.matmul import multiply_add

# Bytes of a float32 product: enough tiles to keep cuBLAS busy, small enough to stay in an H200's L2 cache until rounded.
PRODUCT_BYTES = 32 << 20
BLOCK_R = 16  # rows of the product that one program rounds
# Rounding dW apart moves 8 · V · D bytes and adds launches, a pass over the exponentials moves 4 · N · V. On an H100, the former
# is faster from this N / D on.
TOKENS_PER_WIDTH = 6


@Kernel
@triton.jit(do_not_specialize=["first_block", "num_rows"])
def _finish_kernel(
    product,  # [rows, D]
    scale,  # factor of each row of the product, or None
    matrix,  # for it and the next four, see Addends; None if there are none
    targets,
    sources,
    entries,
    starts,
    grad,  # scalar to multiply by, or None
    out,  # [*, D], its rows are written
    first_block,  # of the rows of out
    num_rows,
    d,
    product_stride,
    matrix_stride,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = first_block + tl.program_id(0)
    at = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (at < num_rows)[:, None] & (ds < d)[None, :]
    x = tl.load(product + at.to(tl.int64)[:, None] * product_stride + ds[None, :], mask=mask, other=0.0).to(tl.float32)
    if scale is not None:
        x *= tl.load(scale + rows, mask=at < num_rows, other=0.0)[:, None]
    if matrix is not None:
        stop = tl.load(starts + block + 1)
        for first in range(tl.load(starts + block), stop, BLOCK_T):
            places = first + tl.arange(0, BLOCK_T)
            target = tl.load(targets + places, mask=places < stop, other=-1)
            source = tl.load(sources + places, mask=places < stop, other=0)
            c = tl.load(entries + places, mask=places < stop, other=0.0)
            y = tl.load(
                matrix + source[:, None] * matrix_stride + ds[None, :],
                mask=(c != 0.0)[:, None] & (ds < d)[None, :],
                other=0.0,
            )
            c = tl.where(target[None, :] == rows[:, None], c[None, :], 0.0)
            # Two numbers in the dtype of y hold 16 bits of c; tensor cores multiply them faster than one float32 number.
            rounded = c.to(y.dtype)
            x = dot(rounded, y, x, PRECISION)
            x = dot((c - rounded.to(tl.float32)).to(y.dtype), y, x, PRECISION)
    if grad is not None:
        x *= tl.load(grad).to(tl.float32)
    tl.store(out + rows.to(tl.int64)[:, None] * d + ds[None, :], x.to(out.dtype.element_ty), mask=mask)


class Addends(NamedTuple):
    """For each token: the label's entry times one row of a matrix, to add to one row of the product. Sorted by ``targets``."""

    matrix: Tensor  # [*, D]
    targets: Tensor  # [N]: row of the product
    sources: Tensor  # [N] int64: row of the matrix
    entries: Tensor  # [N]: the label's entry; if it is zero, the row is not read
    starts: Tensor  # [row blocks + 1]: index of the first addend of each block of BLOCK_R targets


def rows_at_a_time(d: int, max_rows: int) -> int:
    """Return how many of ``max_rows`` rows of the float32 product [rows, D] to compute at a time."""
    return ceil_div(min(PRODUCT_BYTES // (4 * d), max_rows), BLOCK_R) * BLOCK_R


def bytes_per_token(shape: Shape, num_tiles: int, need_weight: bool) -> int:
    """Return the bytes per token of the exponentials, statistics and vectors; with dW also of f · h and the sorted labels."""
    _, d, v, dtype = shape
    return dtype.itemsize * padded(v) + 4 * num_tiles + 36 + (dtype.itemsize * d + 64 if need_weight else 0)


def pays_and_fits(shape: Shape, num_tiles: int, needs: tuple[bool, bool, bool], budget: int) -> bool:
    """Return True if products of the exponentials are faster than ``exp_to_dlogits_``, and their memory fits the budget."""
    n, d, v, _ = shape
    _, need_weight, need_bias = needs
    if need_bias or (need_weight and n < TOKENS_PER_WIDTH * d):
        return False
    rows = rows_at_a_time(d, max(n, v) if need_weight else n)
    return n * bytes_per_token(shape, num_tiles, need_weight) + 4 * d * rows <= budget


def scale_tokens(hidden: Tensor, scale: Tensor) -> Tensor:
    """Return f · h in the dtype of h, with contiguous rows."""
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    add_and_round(hidden, 0, out, scale=scale)
    return out


def label_addends(hidden: Tensor, labels: Tensor, label_entry: Tensor, v: int) -> Addends:
    """Return c · h of each token, to add to the label's row of dW. Tokens without an entry are placed before ``starts``."""
    # A GPU sorts int32 twice as fast as int64.
    ordered, tokens = torch.sort(labels.where(label_entry != 0, -1).int(), stable=True)
    blocks = torch.arange(0, v + BLOCK_R, BLOCK_R, dtype=torch.int32, device=labels.device)
    return Addends(hidden, ordered, tokens, label_entry[tokens], torch.searchsorted(ordered, blocks, out_int32=True))


def add_and_round(
    product: Tensor,  # [rows, D]
    first_row: int,  # of ``out``; a multiple of BLOCK_R
    out: Tensor,  # [*, D], its rows are written
    addends: Addends | None = None,
    scale: Tensor | None = None,  # factor of each row of the product
    grad: Tensor | None = None,  # scalar to multiply by
) -> None:
    """Write (scale · product + addends) · grad to ``out``, rounded to its dtype."""
    rows, d = product.shape
    _finish_kernel[(ceil_div(rows, BLOCK_R), ceil_div(d, 128))](
        product, scale, *(addends or [None] * len(Addends._fields)), grad, out, first_row // BLOCK_R, rows, d, product.stride(0),
        0 if addends is None else addends.matrix.stride(0), PRECISION="upcast" if product.is_cpu else "ieee",
        BLOCK_R=BLOCK_R, BLOCK_T=32, BLOCK_D=128, num_stages=1,
    )  # fmt: skip


def write_hidden_gradient(values: Tensor, factors: Factors, inputs: LogitInputs, out: Tensor) -> None:
    """Write dh = f · (S W) + c · W[label] to ``out`` [N, D], with S the ``values`` [N, V]."""
    n, device = len(values), values.device
    starts = torch.arange(0, n + BLOCK_R, BLOCK_R, dtype=torch.int32, device=device).clamp_(max=n)
    addends = Addends(inputs.weight, torch.arange(n, device=device), inputs.labels, factors.label_entry, starts)
    _multiply_by_rows(values, inputs.weight, addends, out, factors.scale)


def write_weight_gradient(values: Tensor, factors: Factors, inputs: LogitInputs, out: Tensor) -> None:
    """Write dW = Sᵀ (f · h), plus c · h in the label's row, to ``out`` [V, D]."""
    addends = label_addends(inputs.hidden, inputs.labels, factors.label_entry, inputs.shape.v)
    _multiply_by_rows(values.t(), scale_tokens(inputs.hidden, factors.scale), addends, out)


def _multiply_by_rows(a: Tensor, b: Tensor, addends: Addends, out: Tensor, scale: Tensor | None = None) -> None:
    """Write scale · (a b) + addends to ``out``, some rows at a time."""
    (rows, _), d = a.shape, b.shape[1]
    product = torch.empty((rows_at_a_time(d, rows), d), device=a.device, dtype=torch.float32)
    for start in range(0, rows, len(product)):
        stop = min(rows, start + len(product))
        multiply_add(product[: stop - start], a[start:stop], b, first=True)
        add_and_round(product[: stop - start], start, out, addends, scale)
