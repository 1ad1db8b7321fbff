"""How far off the gradients of the filtered loss are, measured in the step itself on some tokens and rows of the weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.filter import Kept, Mass
from hf_cce.kernels.launch_config import ceil_div
from hf_cce.kernels.layout import FEWEST_SAMPLED, Filtered, Report
from hf_cce.kernels.matmul import multiply_add
from hf_cce.kernels.residual import column_residual, residual, rounding, sample, token_energy
from hf_cce.kernels.tilt import Leaning, leans_of_rows, tilted_rows

# Rounding errors are measured on 4 times as many tokens as the filter's error, since a few tokens have far larger ones.
ROUNDINGS = 4
SAMPLED_COLUMNS = 256


@triton.jit
def _square_sums_kernel(x, out, size, BLOCK: tl.constexpr):
    """Of so many parts of ``x`` as there are programs."""
    total = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + tl.program_id(0), tl.sum(total))


def _whole_norm(x: Tensor) -> Tensor:
    """Of a contiguous tensor; a scalar. (PyTorch's own kernel takes a process's first step longer to load than all of this.)"""
    parts = torch.empty(max(1, min(1024, ceil_div(x.numel(), 4096))), device=x.device, dtype=torch.float32)
    _square_sums_kernel[(parts.numel(),)](x, parts, x.numel(), BLOCK=4096, num_warps=8)
    return parts.sum().sqrt()


def relative(report: Report, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> Report:
    """``report`` with its errors, which are norms, relative to those of the gradients."""
    errors, norms = {}, {}
    for name, error in report._asdict().items():
        of_weight = "weight" in name
        of = grad_weight if of_weight else grad_hidden
        if "error" in name and error is not None and of is not None:
            if of_weight not in norms:
                norms[of_weight] = _whole_norm(of.contiguous())
            errors[name] = error / norms[of_weight]
    return report._replace(**errors)


def _products_of(saved: Filtered, weight: Tensor, sampled: Tensor) -> Tensor:
    """h Wᵀ of some rows, [S, V] float32 in the order of columns."""
    hidden = saved.hidden.index_select(0, sampled)
    z = torch.empty((len(sampled), weight.shape[0]), device=hidden.device, dtype=torch.float32)
    if saved.weight is not None:
        multiply_add(z, hidden, saved.weight.t(), first=True)
        return z
    multiply_add(z, hidden, weight.t(), first=True)
    return z.index_select(1, saved.order.order[: weight.shape[0]])


def _times_weight(saved: Filtered, weight: Tensor, rows: Tensor) -> Tensor:
    """``rows`` [S, V] in the order of columns, times the weight: [S, D] float32."""
    product = torch.empty((len(rows), weight.shape[1]), device=rows.device, dtype=torch.float32)
    if saved.weight is None:
        rows = rows.index_select(1, saved.vocabulary.rank)
    multiply_add(product, rows, weight if saved.weight is None else saved.weight, first=True)
    return product


def _norm(x: Tensor, weights: Tensor) -> Tensor:
    """Of rows [S, D] whose squares are weighted; a scalar. (PyTorch's kernel for squares would be one more to load.)"""
    return ((x * x).sum(1) * weights).sum().sqrt()


def hidden_error(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    grad_lse: Tensor,  # [N]
    logit_scale: float,
    softcap: float,
    kept: Kept,
    mass: Mass,
    tilt: Tensor | None,  # [D, D]
) -> Tensor:
    """The norm of what the filter leaves out of the gradient of the hidden states, estimated from some tokens; a scalar."""
    n, plan = saved.hidden.shape[0], saved.plan
    of_token = token_energy(
        saved.tile_lse, saved.tile_ratio, kept.place, saved.lse, saved.order.labels, grad_lse, weight.shape[0], plan.block_m
    )  # fmt: skip
    sampled, stands_for = sample(of_token, saved.layout.sampled, n, 1)
    left_out = residual(
        _products_of(saved, weight, sampled), sampled, saved.bias, saved.lse, saved.order.labels, kept.place, mass.rows, grad_lse,
        saved.hidden.dtype, logit_scale, softcap, plan.block_m, plan.block_n,
    )  # fmt: skip
    wrong = _times_weight(saved, weight, left_out)
    if tilt is not None:
        some = tilted_rows(saved.hidden.index_select(0, sampled), mass.of_token.index_select(1, sampled), -logit_scale)
        multiply_add(wrong, some, tilt, first=False)
    return _norm(wrong, stands_for)


def weight_error(
    saved: Filtered,
    weight: Tensor,  # [V, D]
    grad_lse: Tensor,  # [N]
    logit_scale: float,
    softcap: float,
    kept: Kept,
    mass: Mass,
    lean: Leaning | None,
) -> Tensor:
    """Likewise of the gradient of the weight, from some of its rows."""
    (n, d), v, plan = saved.hidden.shape, weight.shape[0], saved.plan
    # no more memory than the sampled tokens take
    count = min(v, max(FEWEST_SAMPLED, min(SAMPLED_COLUMNS, saved.layout.sampled * v // n)))
    of_columns = torch.where(kept.place < 0, kept.energy, 0.0).sum(1)  # [T]
    sampled, stands_for = sample(of_columns, count, v, plan.block_n)
    if saved.weight is None:
        some = weight.index_select(0, saved.order.order[sampled])
    else:
        some = saved.weight.index_select(0, sampled)
    z = torch.empty((n, count), device=some.device, dtype=torch.float32)
    multiply_add(z, saved.hidden, some.t(), first=True)
    left_out = column_residual(
        z, sampled, saved.bias, saved.lse, saved.order.labels, kept.place, mass.rows, grad_lse, some.dtype,
        logit_scale, softcap, plan.block_m, plan.block_n, v,
    )  # fmt: skip
    wrong = torch.empty((count, d), device=some.device, dtype=torch.float32)
    multiply_add(wrong, left_out.t(), saved.hidden, first=True)
    if lean is not None:
        some = leans_of_rows(lean, sampled, mass.leaves, v, -logit_scale, plan.block_n)
        multiply_add(wrong, some, lean.back, first=False)
    return _norm(wrong, stands_for)


def rounding_errors(
    saved: Filtered, weight: Tensor, grad_lse: Tensor, grad_label: Tensor, logit_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The norms of what logits rounded to the inputs' dtype change in the gradients of hidden states and weight; scalars.

    Estimated from some tokens. Rounding moves p by p (δ − Σ p δ), δ independent for each logit, which makes (E + E² − 2 Σ p³) δ²
    of E = Σ p²: E (1 − √E)² where one entry has most of the probability, E (1 − E) where several share it evenly. Tokens are
    drawn by the geometric mean of the two. Rounding errors of different tokens are taken for independent, so their outer
    products with the hidden states add up by their squares; were they not, a loss on full logits would be further off.
    """
    (n, _), v, size = saved.hidden.shape, weight.shape[0], saved.layout.sampled
    likely = token_energy(
        saved.tile_lse, saved.tile_ratio, None, saved.lse, saved.order.labels, grad_lse, v, saved.plan.block_m, likely=True
    )  # fmt: skip
    places, stands_for = sample(likely, min(n, ROUNDINGS * size), n, 1, even=0.1)
    of_hidden, of_weight = torch.zeros((2,), device=weight.device, dtype=torch.float32).unbind()
    for start in range(0, len(places), size):
        sampled, stand = places[start : start + size], stands_for[start : start + size]
        moved, squares = rounding(
            _products_of(saved, weight, sampled), sampled, saved.bias, saved.lse, saved.order.labels, grad_lse, grad_label,
            weight.dtype, logit_scale, softcap,
        )  # fmt: skip
        hidden = saved.hidden.index_select(0, sampled).float()
        product = _times_weight(saved, weight, moved)
        lengths = (hidden * hidden).sum(1)
        of_hidden = of_hidden + ((product * product).sum(1) * stand).sum()
        of_weight = of_weight + (squares * lengths * stand).sum()
        del moved  # the next ones take its memory
    return of_hidden.sqrt(), of_weight.sqrt()
