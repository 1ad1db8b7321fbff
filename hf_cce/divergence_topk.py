"""Divergence from a teacher given by its k most probable tokens.

It depends on the student's probabilities of these tokens and of all others together ("lump"), or on the former relative to each
other. Its gradient with respect to the logit of entry v is e_v for one of the k tokens, else −c · p_v, with a number c for each
position. Both are computed in the forward pass, for an upstream gradient of one; ``hf_cce.divergence_rows`` describes how the
logits are kept until the backward pass. If the memory budget has no room for them, the backward pass recomputes them, one slab of
the vocabulary at a time.

Legend: as in ``hf_cce.divergence_passes``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_passes import (
    DivergenceSpec,
    Head,
    WantedGrads,
    expectation,
    head_gradients,
    log_mixture,
    portable_column_bytes,
    refuse_second_derivative,
)
from hf_cce.divergence_rows import KeptGradient, gradients_of_rows, kept_gradient, logits_of, row_chunks
from hf_cce.fallback import tokens_per_block
from hf_cce.ops import compute_context
from hf_cce.reference import fp16_unit
from hf_cce.spec import accumulation_dtype


class Support(NamedTuple):
    """The k tokens of a teacher.

    Where padding, the id and later the gradient are those of the most probable token, so that ``scatter_`` writes it twice.
    """

    ids: Tensor  # [N, k]
    log_p: Tensor  # [N, k]; very low where padding: minus infinity would give NaN
    padding: Tensor  # [N, k] bool
    best: Tensor  # [N, 1], the index of the most probable token

    @classmethod
    def of(cls, ids: Tensor, log_p: Tensor, v: int) -> Support:
        """Check that the ids that are not padding lie in [0, v)."""
        padding = log_p == -math.inf
        log_p, ids = log_p.clamp(min=lowest(log_p.dtype)), ids.masked_fill(padding, 0)
        ok = (ids.clamp(0, v - 1) == ids).all()
        if ok.is_cuda:
            torch._assert_async(ok, f"hf_cce: ids must lie in [0, {v})")
        elif not bool(ok):
            raise ValueError(
                f"ids must lie in [0, {v}), the student's vocabulary, got {int(ids.min())} to {int(ids.max())}"
            )
        best = log_p.argmax(1, keepdim=True)
        return cls(torch.where(padding, ids.gather(1, best), ids), log_p, padding, best)

    def rows(self, rows: slice) -> Support:
        return Support(*(x[rows] for x in self))


def lowest(dtype: torch.dtype) -> float:
    """Return a log-probability whose probability is exactly 0, and which may be added to others."""
    return torch.finfo(dtype).min / 4


class SupportGrads(NamedTuple):
    """The divergence of each token, and its gradient with respect to the student's logits."""

    divergence: Tensor  # [N]
    inside: Tensor  # [N, k], e
    outside: Tensor | None  # [N, 1], c; None: 0


def divergence_on_support(log_ps: Tensor, support: Support, beta: float, lump: bool) -> SupportGrads:
    """Return the divergence for the student's log-probabilities of the k tokens, which need not be normalized if not ``lump``."""
    log_ps, log_pt = (
        _with_tail(x) if lump else x.log_softmax(1)
        for x in (log_ps.masked_fill(support.padding, lowest(log_ps.dtype)), support.log_p)
    )
    ps, k = log_ps.exp(), support.ids.shape[1]
    if beta == 0.0:
        pt = log_pt.exp()
        divergence, g = expectation(pt, log_pt - log_ps, True), pt.neg_()
    else:
        log_m = log_pt if beta == 1.0 else log_mixture(log_ps, log_pt, beta)
        g = (log_ps - log_m).mul_(ps).masked_fill_(ps == 0, 0.0)
        g = g if beta == 1.0 else g.mul_(1 - beta)
        divergence = g.sum(1)
        if beta != 1.0:
            divergence += beta * expectation(log_pt.exp(), log_pt - log_m, True)
    # g is the gradient with respect to the log-probabilities as if they were independent.
    if not lump:
        return SupportGrads(divergence, g.addcmul_(ps, g.sum(1, keepdim=True), value=-1), None)
    of_tail, tail = g[:, k:], ps[:, k:]
    of_tail.masked_fill_(tail < 1.25 * torch.finfo(ps.dtype).eps, 0.0)  # clamped to a constant, see _with_tail
    total, ps_inside = g.sum(1, keepdim=True), ps[:, :k].sum(1, keepdim=True)
    # That is total − of_tail / tail, which would cancel where the student gives the k tokens hardly any probability.
    outside = torch.addcdiv(g[:, :k].sum(1, keepdim=True), of_tail * ps_inside, tail, value=-1)
    return SupportGrads(divergence, torch.addcmul(g, ps, total, value=-1)[:, :k], outside)


def _with_tail(log_p: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, [N, k + 1]. Their probability is at least the machine epsilon."""
    others = 1 - log_p.exp().sum(1, keepdim=True)
    return torch.cat((log_p, others.clamp_(min=torch.finfo(log_p.dtype).eps).log_()), 1)


class TopKDivergence(torch.autograd.Function):
    """Autograd function for the divergence [N]. ``factor``: a scalar that upstream gradients contain; None: no gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, student: Head, teacher: tuple[Tensor, Tensor],
        lump: bool, spec: DivergenceSpec, factor: Tensor | float | None,
    ) -> Tensor:  # fmt: skip
        student = student._replace(hidden=hidden, weight=weight, bias=bias)
        with compute_context(hidden):
            divergence, ctx.kept, rows = _of_all_logits(student, teacher, lump, spec, factor)
        # save_for_backward refuses tensors made in inference mode; ctx may hold the teacher's, since they get no gradients.
        ctx.teacher = teacher if any(x.is_inference() for x in teacher) else None
        ctx.save_for_backward(hidden, weight, bias, *((None, None) if ctx.teacher else teacher), *rows)
        ctx.options = student[3:], lump, spec, factor
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        hidden, weight, bias, ids, log_p, *rows = ctx.saved_tensors
        form, lump, spec, factor = ctx.options
        teacher = ctx.teacher or (ids, log_p)
        student, wanted = Head(hidden, weight, bias, *form), WantedGrads(ctx.needs_input_grad[:3], weight.shape[0])
        with compute_context(hidden):
            if spec.keeps_logits:
                kept: Any = ctx.kept or _of_all_logits(student, teacher, lump, spec, factor)[1]
                ctx.kept = None  # a second backward pass computes it again
                grads = gradients_of_rows(kept, student, grad, wanted)
            else:
                grads = _gradients_by_slabs(student, teacher, rows, grad[:, None], spec, wanted)
        return *grads, None, None, None, None, None


def _of_all_logits(
    student: Head, teacher: tuple[Tensor, Tensor], lump: bool, spec: DivergenceSpec, factor: Tensor | float | None
) -> tuple[Tensor, KeptGradient | None, list[Tensor]]:
    """Return the divergence [N] and, with a ``factor``, the logits' gradient, or what ``_gradients_by_slabs`` needs."""
    hidden, weight, n = student.hidden, student.weight, len(student.hidden)
    assert weight is not None
    acc_dtype, block, room, kept = accumulation_dtype(hidden.dtype), n or 1, spec.memory_budget, None
    saved: list[Tensor] = []
    by_slabs = factor is not None and not spec.keeps_logits
    if factor is not None and not by_slabs:
        kept = kept_gradient(student, factor, spec.beta)
    else:
        room //= 2
        block = tokens_per_block(n, len(weight), hidden.dtype, not hidden.is_cuda, room)
    # log p, its input if that is not the kept logits themselves (converted, or a copy of padded rows), and with a softcap its
    # derivative
    copied = hidden.dtype != acc_dtype or len(weight) % 8 > 0 or student.logit_scale != 1.0 or student.softcap > 0
    copies = 1 + copied + (student.softcap > 0)
    support = Support.of(*teacher, len(weight))  # while a GPU computes the first GEMM
    divergence = torch.empty(n, dtype=acc_dtype, device=hidden.device)
    if by_slabs:
        saved = [divergence.new_empty(n, width) for width in (support.ids.shape[1], 1, 1)]
    for start in range(0, n, block):
        of_block = slice(start, start + block)
        if by_slabs:  # not rounded, as in the backward pass
            x = student._replace(hidden=hidden[of_block]).logits()
        else:
            x = logits_of(student, of_block) if kept is None else kept.logits
        for chunk in row_chunks(x, copies, room):
            rows = slice(start + chunk.start, start + chunk.stop)
            of_rows = support.rows(rows)
            z = x[chunk] if by_slabs else student.finish(x[chunk], acc_dtype)
            log_p = F.log_softmax(z, 1, dtype=acc_dtype) if lump else z
            found = divergence_on_support(log_p.gather(1, of_rows.ids).to(acc_dtype), of_rows, spec.beta, lump)
            divergence[rows] = found.divergence
            if kept is not None:
                _write_gradient(kept, x[chunk], z, log_p.exp_() if lump else None, found, of_rows, student)
            for whole, part in zip(saved, _for_slabs(z, found, of_rows, student) if saved else (), strict=True):
                whole[rows] = part
            del z, log_p
        del x  # free them before the next ones are allocated
    return divergence, kept, saved


def _for_slabs(z: Tensor, found: SupportGrads, support: Support, student: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gradient at the ids [n, k], c [n, 1], logsumexp of z [n, 1])."""
    inside = found.inside * student.logit_derivative(z.gather(1, support.ids).to(found.inside.dtype))
    outside = torch.zeros_like(found.divergence)[:, None] if found.outside is None else found.outside
    return inside, outside, z.to(inside.dtype).logsumexp(1, keepdim=True)


def _write_gradient(
    kept: KeptGradient, out: Tensor, z: Tensor, p: Tensor | None, found: SupportGrads, support: Support, student: Head
) -> None:
    """Set ``out``, some rows of ``kept``, which ``z`` may alias. Overwrites ``p``, which is None if c = 0."""
    inside, by = found.inside.masked_fill_(support.padding, 0.0), kept.scale
    derivative = student.logit_derivative(z)
    if isinstance(derivative, Tensor):
        inside = inside.mul_(derivative.gather(1, support.ids))
        p = None if p is None else p.mul_(derivative)
    else:
        by = by * derivative
    if isinstance(by, Tensor) or by != 1.0:
        inside = inside * by
    if p is None or found.outside is None:
        out.zero_()
    else:
        torch.mul(p, found.outside * -by, out=out)
    inside = torch.where(support.padding, inside.gather(1, support.best), inside)
    out.scatter_(1, support.ids, inside.to(out.dtype))


def _gradients_by_slabs(
    student: Head,
    teacher: tuple[Tensor, Tensor],
    rows: list[Tensor],
    grad: Tensor,
    spec: DivergenceSpec,
    wanted: WantedGrads,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias for upstream gradients ``grad`` [N, 1], from recomputed logits."""
    (inside, outside, lse), (ids, log_p) = rows, teacher
    real = log_p != -math.inf
    inside, outside = inside * grad, outside * -grad
    unit = fp16_unit(student.hidden.dtype, inside, outside)
    if unit is not None:
        inside, outside = inside / unit, outside / unit

    def slab_grad(slab: slice) -> Tensor:
        width = slab.stop - slab.start
        here, columns = real & (ids >= slab.start) & (ids < slab.stop), (ids - slab.start).clamp_(0, width - 1)
        z = student.columns(slab.start, slab.stop).logits()
        derivative = student.logit_derivative(z)
        g = z.sub_(lse).exp_().mul_(outside).mul_(derivative)
        g.scatter_add_(1, columns, torch.where(here, -g.gather(1, columns), 0))  # exactly zero
        return g.scatter_add_(1, columns, torch.where(here, inside, 0))

    return head_gradients(student, spec, portable_column_bytes(student), slab_grad, unit, wanted)
