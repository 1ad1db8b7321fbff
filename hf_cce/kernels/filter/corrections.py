"""First-order corrections for dropped tiles, whose mass is spread evenly over their weight rows.

Softmax, however, prefers the rows w of a tile that the hidden state h points to. If the rows are normally distributed with
covariance C, their mean weighted by exp(h · w) is their plain mean plus C h, for any size of h (exponential tilting). A single
covariance, computed within all dropped tiles and weighted by their mass, corrects dh with one product of hidden states and C.

dW lacks M G δ, where M is the dropped mass of a row, G the second moment of the hidden states weighted by dropped mass, and δ the
row minus the mean of its tile. A few directions Q explain most of G, so M (Gᵀ Q) (Qᵀ δ) of rank 16 corrects dW.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.filter.order import WeightCorrection, gather_rows
from hf_cce.kernels.inputs import Shape
from hf_cce.kernels.launch_config import ceil_div
from hf_cce.kernels.launcher import Kernel
from hf_cce.matmul import multiply, multiply_add

CENTERED_BYTES = 16 << 20  # size of the weight rows that are centered at a time
RANK = tl.constexpr(16)  # the smallest number of columns that a tensor core multiplies
SUBSPACE_ROUNDS = 3  # each round multiplies by the second moment and orthonormalizes
NEGLIGIBLE = 1e-13  # added to the diagonal of a Gram matrix of unit vectors, so that dependent vectors give near zero


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _mass_weighted_columns_kernel(
    hidden,  # [N, D]
    mass,  # [N]
    out,  # [D, N], written, with zeros from N up to the stride
    num_tokens,
    d,
    hidden_stride,
    out_stride,
    logit_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < num_tokens
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    factor = tl.load(mass + rows, mask=in_rows, other=0.0) * logit_scale
    mask = in_rows[:, None] & (ds < d)[None, :]
    x = tl.load(hidden + rows.to(tl.int64)[:, None] * hidden_stride + ds[None, :], mask=mask, other=0.0)
    y = tl.where(factor[:, None] == 0.0, 0.0, x.to(tl.float32) * factor[:, None])
    # Zeros are written up to the stride: with a mask by num_tokens, stores would not be vectorized.
    to = out + ds.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(to, tl.trans(y.to(out.dtype.element_ty)), mask=(ds < d)[:, None] & (rows < out_stride)[None, :])


def correction_bytes(shape: Shape, need_weight: bool) -> int:
    """Return the bytes of the results of ``dropped_covariance`` and ``make_weight_correction``."""
    _, d, v, dtype = shape
    return dtype.itemsize * (d * d + RANK.value * (v + d) * need_weight)


def correction_scratch_bytes(shape: Shape, block_n: int, need_weight: bool) -> int:
    """Return an upper bound on the scratch bytes of ``dropped_covariance`` and ``make_weight_correction``, without results."""
    (n, d, v, _), element = shape, shape.dtype.itemsize
    weight_correction_bytes = 4 * d * d + 32 * RANK.value * d + max(element * n * d, 8 * RANK.value * v)
    return max(4 * d * d + max(CENTERED_BYTES, element * block_n * d), weight_correction_bytes * need_weight)


def dropped_covariance(
    weight: Tensor,  # [V, D]
    vocab_perm: Tensor,  # [V padded]
    mass: Tensor,  # [T] float32: the probability in the dropped tiles of each column block
    block_n: int,
) -> Tensor:
    """Return the covariance [D, D] of weight rows within column blocks, weighted by ``mass``, in the weight's dtype."""
    d, tiles = weight.shape[1], mass.numel()
    total_mass = mass.sum()
    # The mean of scale² is one. If nothing is dropped, all blocks count equally, because later steps reuse the covariance.
    scale = torch.where(total_mass > 0, mass * tiles / total_mass, 1.0).sqrt()
    total = torch.empty((d, d), device=weight.device, dtype=torch.float32)
    size = block_n * max(1, CENTERED_BYTES // (weight.element_size() * block_n * d))
    for first in range(0, tiles * block_n, size):
        rows = gather_rows(weight, vocab_perm, first, min(tiles * block_n, first + size), block_n, scale=scale)
        multiply_add(total, rows.t(), rows, first=first == 0)
        del rows  # before the next rows are allocated, and the copy below
    # Later steps reuse the covariance, so it must not retain an infinity or NaN of this step.
    return total.div_(tiles * block_n).to(weight.dtype).nan_to_num_(0.0, 0.0, 0.0)


def mass_weighted(hidden: Tensor, mass: Tensor) -> Tensor:
    """Return each hidden state [N, D] times the ``mass`` [N] of its dropped tiles, in the dtype of ``hidden``.

    Where the mass is zero, as for ignored tokens, the result is zero even if the hidden state is infinite or NaN.
    """
    out = torch.mul(hidden, mass[:, None], out=torch.empty_like(hidden))
    return out.masked_fill_(mass[:, None] == 0.0, 0.0)


def write_mass_weighted_columns(hidden: Tensor, mass: Tensor, logit_scale: float, out: Tensor) -> None:
    """Write ``mass_weighted(hidden, mass · logit_scale)``, transposed, to ``out`` [D, N], with zeros from N up to the stride."""
    n, d = hidden.shape
    _mass_weighted_columns_kernel[(ceil_div(n, 32), ceil_div(d, 128))](
        hidden, mass, out, n, d, hidden.stride(0), out.stride(0), logit_scale, BLOCK_M=32, BLOCK_D=128
    )


def make_weight_correction(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    vocab_perm: Tensor,  # [V padded]
    means: Tensor,  # [T, D]: mean rows of the column blocks
    mass: Tensor,  # [N]: see ``DroppedMass.per_token``
    block_n: int,
) -> WeightCorrection:
    """Compute the correction of dW by subspace iteration on the second moment; it is zero if nothing is dropped."""
    v, d = weight.shape
    mass = mass.abs()  # otherwise tokens whose gradients differ in sign would cancel
    moment = multiply(mass_weighted(hidden, mass).t(), hidden)  # [D, D] float32
    # Later steps reuse the correction. Replace the NaN of a zero total here, and those from a non-finite weight at the end.
    moment.div_(mass.sum()).nan_to_num_(0.0, 0.0, 0.0)
    sampled_columns = torch.arange(RANK.value, device=weight.device) * d // RANK.value
    directions = _orthonormal(moment.index_select(1, sampled_columns))
    for _ in range(SUBSPACE_ROUNDS - 1):
        directions = _orthonormal(multiply(moment, directions))
    basis = multiply(directions.t(), moment)
    directions = directions.to(weight.dtype)
    coeffs, mean_coeffs = multiply(weight, directions), multiply(means, directions)
    coeffs = coeffs.index_select(0, vocab_perm[:v])
    coeffs -= mean_coeffs.repeat_interleave(block_n, 0)[:v]
    row_coeffs = coeffs.to(weight.dtype)
    return WeightCorrection(row_coeffs.nan_to_num_(0.0, 0.0, 0.0), basis.to(weight.dtype))


def _orthonormal(vectors: Tensor) -> Tensor:
    """Return orthonormal columns with the span of the columns of ``vectors`` [D, 16]; near zero if linearly dependent.

    This is Cholesky QR in float64, since the Gram matrix has the squared condition number of the columns.
    """
    unit = torch.nn.functional.normalize(vectors.double(), dim=0, eps=torch.finfo(torch.float64).tiny)
    gram = unit.t() @ unit
    gram.diagonal().add_(NEGLIGIBLE)
    factor = torch.linalg.cholesky_ex(gram).L
    found = torch.linalg.solve_triangular(factor, unit.t(), upper=False).t()
    return found.to(vectors.dtype, memory_format=torch.contiguous_format)
