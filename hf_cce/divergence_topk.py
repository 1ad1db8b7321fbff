"""Divergence from a teacher given by its k most probable tokens: needs the student's logits of these, and its logsumexp.

The gradients through both are added in float32, per slab of the vocabulary, and rounded once, as they cancel near the optimum.

Legend: N tokens, D hidden size, V vocabulary; z logits after scale, softcap and temperature.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_passes import (
    DivergenceSpec,
    Head,
    HeadGrads,
    WantedGrads,
    divergence_kernels,
    fp16_unit,
    head_gradients,
    make_slabs,
    portable_column_bytes,
    refuse_second_derivative,
)
from hf_cce.divergence_rows import logits_of, row_chunks
from hf_cce.fallback import empty_logits, logit_products, tokens_per_block
from hf_cce.ops import compute_context
from hf_cce.reference import apply_scale_and_softcap_
from hf_cce.spec import accumulation_dtype


def divergence_on_support(log_ps: Tensor, log_pt: Tensor, beta: float) -> Tensor:
    """Return the divergence [N] of normalized log-probabilities [N, k]; β as in ``hf_cce.divergence_passes``."""

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        possible = log_p != -math.inf  # where p = 0, 0 · ∞ would be NaN
        return torch.where(possible, log_p.exp() * (torch.where(possible, log_p, 0) - log_q), 0).sum(1)

    if beta == 0.0:
        return kl(log_pt, log_ps)
    if beta == 1.0:
        return kl(log_ps, log_pt)
    log_m = torch.logaddexp(log_ps + math.log1p(-beta), log_pt + math.log(beta))
    return beta * kl(log_pt, log_m) + (1 - beta) * kl(log_ps, log_m)


def with_tail(log_p: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, [N, k + 1]. Their probability is at least the machine epsilon."""
    total = log_p.logsumexp(1, keepdim=True).clamp(max=-torch.finfo(log_p.dtype).eps)
    return torch.cat((log_p, torch.log(-torch.expm1(total))), 1)


class SupportLogits(torch.autograd.Function):
    """Autograd function for (z of ``ids`` [N, k], logsumexp of z [N], empty unless ``normalize``), in the accumulation dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, student: Head, ids: Tensor, normalize: bool,
        spec: DivergenceSpec, trains: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        student = student._replace(hidden=hidden, weight=weight, bias=bias)
        ctx.kept = None
        with compute_context(hidden):
            if spec.keeps_logits and normalize and len(hidden):
                z, lse, ctx.kept = _of_all_logits(ids, student, spec, trains)
            else:
                z = _logits_of(ids, student, spec)
                lse = _logsumexp(student, spec) if normalize else z.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, ids, lse, student.logit_derivative(z) * torch.ones_like(z))
        ctx.form, ctx.normalize, ctx.spec = student[3:], normalize, spec
        return z, lse

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        hidden, weight, bias, ids, lse, derivative = ctx.saved_tensors
        student, spec, normalize = Head(hidden, weight, bias, *ctx.form), ctx.spec, ctx.normalize
        grad_z = grad_z * derivative
        unit = fp16_unit(hidden.dtype, grad_z, *([grad_lse] if normalize else []))
        if unit is not None:
            grad_z, grad_lse = grad_z / unit, grad_lse / unit

        def slab_grad(slab: slice) -> Tensor:
            width = slab.stop - slab.start
            inside, columns = (ids >= slab.start) & (ids < slab.stop), (ids - slab.start).clamp_(0, width - 1)
            g = grad_z.new_zeros(len(ids), width)
            if normalize:
                z = student.columns(slab.start, slab.stop).logits()
                derivative = student.logit_derivative(z)
                g = z.sub_(lse[:, None]).exp_().mul_(grad_lse[:, None]).mul_(derivative)
            return g.scatter_add_(1, columns, torch.where(inside, grad_z, 0))

        kept, ctx.kept = ctx.kept, None
        with compute_context(hidden):
            wanted, v = WantedGrads(ctx.needs_input_grad[:3], weight.shape[0]), weight.shape[0]
            if spec.keeps_logits and len(hidden):
                if kept is None:  # no logsumexp is needed, or a second backward pass
                    kept = logits_of(student) if normalize else empty_logits(hidden, v, len(hidden))
                for rows in row_chunks(kept, 2 + 2 * (student.softcap > 0), spec):
                    _write_gradient(kept[rows], student, ids[rows], grad_z[rows], grad_lse[rows] if normalize else None)
                ones = torch.ones(len(hidden), dtype=grad_z.dtype, device=hidden.device)
                found: HeadGrads = logit_products(kept, hidden, weight, wanted.needs, ones, unit)
            else:
                found = head_gradients(student, spec, portable_column_bytes(student), slab_grad, unit, wanted)
        return *found, None, None, None, None, None


def _write_gradient(x: Tensor, student: Head, ids: Tensor, grad_z: Tensor, grad_lse: Tensor | None) -> None:
    """Overwrite the products ``x`` [n, V] with their gradient, given those of z [n, k] and of logsumexp [n]."""
    if grad_lse is None:
        x.copy_(grad_z.new_zeros(x.shape).scatter_add_(1, ids, grad_z))
        return
    z = student.finish(x, grad_z.dtype)
    p, derivative = F.softmax(z, 1, dtype=grad_z.dtype), student.logit_derivative(z)
    by = grad_lse[:, None]
    if isinstance(derivative, Tensor):
        p.mul_(derivative)
    else:
        by = by * derivative
    if x.dtype == p.dtype:
        torch.mul(p, by, out=x).scatter_add_(1, ids, grad_z)
    else:  # rounded once, after the sum
        x.copy_(p.mul_(by).scatter_add_(1, ids, grad_z))


def _of_all_logits(
    ids: Tensor, student: Head, spec: DivergenceSpec, trains: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return z of ``ids`` [N, k], logsumexp of z [N] and, for a backward pass, the products of which z is made [N, V]."""
    hidden, weight, acc_dtype = student.hidden, student.weight, accumulation_dtype(student.hidden.dtype)
    assert weight is not None
    found, lse = (torch.empty(shape, dtype=acc_dtype, device=ids.device) for shape in (ids.shape, len(ids)))
    block, x = len(ids), None
    if not trains:
        block = tokens_per_block(block, len(weight), hidden.dtype, not hidden.is_cuda, spec.memory_budget // 2)
    for start in range(0, len(ids), block):
        of_block = slice(start, start + block)
        del x  # free them before the next ones are allocated
        x = logits_of(student, of_block)
        found[of_block] = student.finish(x.gather(1, ids[of_block]), acc_dtype)
        for rows in row_chunks(x, 3, spec):
            z = student.finish(x[rows], acc_dtype)
            log_p = F.log_softmax(z, 1, dtype=acc_dtype)
            top = ids[of_block][rows, :1] if student.bias is None else z.argmax(1, keepdim=True)  # a bias may be −inf
            torch.sub(z.gather(1, top)[:, 0], log_p.gather(1, top)[:, 0], out=lse[of_block][rows])
            del z, log_p
    return found, lse, x if trains else None


def _logsumexp(student: Head, spec: DivergenceSpec) -> Tensor:
    n = len(student.hidden)
    if spec.triton and n:
        kernels, count = divergence_kernels(), torch.full((), n, device=student.hidden.device)
        return kernels.row_lse(kernels.with_contiguous_rows(student), count, False, spec.memory_budget)[0]
    slabs = make_slabs(student, spec, portable_column_bytes(student))
    parts = student.hidden.new_empty((len(slabs), n), dtype=accumulation_dtype(student.hidden.dtype))
    for part, x in zip(parts, slabs, strict=True):  # allocated before the loop, as in ``divergence_passes``
        torch.logsumexp(student.columns(x.start, x.stop).logits(), 1, out=part)
    return parts.logsumexp(0)


def _logits_of(ids: Tensor, student: Head, spec: DivergenceSpec) -> Tensor:
    """Return z of ``ids`` [N, k], gathering weight rows for a block of tokens at a time."""
    weight, bias, acc_dtype = student.weight, student.bias, accumulation_dtype(student.hidden.dtype)
    assert weight is not None
    found = torch.empty(ids.shape, dtype=acc_dtype, device=ids.device)
    bytes_per_token = ids.shape[1] * weight.shape[1] * (weight.dtype.itemsize + acc_dtype.itemsize)
    block = max(1, spec.memory_budget // 2 // max(bytes_per_token, 1))
    for start in range(0, ids.shape[0], block):
        rows = slice(start, start + block)
        hidden = student.hidden[rows].to(acc_dtype)
        x = torch.bmm(weight[ids[rows]].to(acc_dtype), hidden[:, :, None])[:, :, 0]
        found[rows] = x if bias is None else x.add_(bias[ids[rows]])
    return apply_scale_and_softcap_(found, student.logit_scale, student.softcap)
