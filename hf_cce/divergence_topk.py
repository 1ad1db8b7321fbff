"""Divergence from a teacher given by its k most probable tokens.

It depends on the student's probabilities of these tokens and of all others together ("lump"), or on the former relative to each
other. Its gradient with respect to the logit of entry v is e_v for one of the k tokens, else −c · p_v, with a number c for each
position. Legend: as in ``hf_cce.divergence_spec``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_rows import DivergenceRows, divergence_and_neg_grad, row_chunks, scale_of
from hf_cce.divergence_spec import Head


class TopK(NamedTuple):
    """A teacher, checked and flattened."""

    ids: Tensor  # [N, k] int64
    log_p: Tensor  # [N, k], minus infinity where padding
    lump: bool


class Support(NamedTuple):
    """The k tokens of a teacher. Padding has the id and later the gradient of the most probable one, which is written twice."""

    ids: Tensor  # [N, k]
    log_p: Tensor  # [N, k]; very low where padding: minus infinity would give NaN
    padding: Tensor  # [N, k] bool
    best: Tensor  # [N, 1], the index of the most probable token

    @classmethod
    def of(cls, ids: Tensor, log_p: Tensor, v: int) -> Support:
        """Check that the ids that are not padding lie in [0, v)."""
        padding = log_p == -math.inf
        log_p, ids = log_p.clamp(min=lowest(log_p.dtype)), ids.masked_fill(padding, 0)
        check_range(ids.clamp(0, v - 1) == ids, ids, v)
        best = log_p.argmax(1, keepdim=True)
        return cls(torch.where(padding, ids.gather(1, best), ids), log_p, padding, best)

    def rows(self, rows: slice) -> Support:
        return Support(*(x[rows] for x in self))


def check_range(in_range: Tensor, ids: Tensor, v: int) -> None:
    ok = in_range.all()
    if ok.is_cuda:
        torch._assert_async(ok, f"hf_cce: ids must lie in [0, {v})")
    elif not bool(ok):
        raise ValueError(
            f"ids must lie in [0, {v}), the student's vocabulary, got {int(ids.min())} to {int(ids.max())}"
        )


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
    divergence, neg_grad, ps = divergence_and_neg_grad(log_ps, log_pt, beta)
    g, k = neg_grad.neg_(), support.ids.shape[1]
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


@dataclass
class TopKRows(DivergenceRows):
    """The divergences of the rows from a top-k teacher."""

    support: Support | None = None

    def keep_stats(self) -> bool:
        return False  # the kernel of top-k teachers has none

    def compute(
        self, z: Tensor, rows: slice, scale: Tensor | float | None, divergence: Tensor, entropy: Tensor | None
    ) -> None:
        student, (ids, log_pt, lump), acc_dtype = self.student, self.teacher, divergence.dtype
        if self.spec.plan.triton:
            from hf_cce.kernels.divergence_topk import row_top_k_divergences  # importing hf_cce must not import Triton

            teacher = (self.tokens.gather(ids, rows), self.tokens.gather(log_pt, rows, -math.inf), lump)
            in_range = row_top_k_divergences(z, teacher, student, self.spec.beta, divergence, scale)
            check_range(in_range, ids, z.shape[1])
            return
        # Made while a GPU computes the first GEMM. Tokens that are not selected have only padding.
        if self.support is None:
            ids, log_pt = self.tokens.gather(ids), self.tokens.gather(log_pt, fill=-math.inf)
            self.support = Support.of(ids, log_pt, z.shape[1])
        # log p, its input if that is not the kept logits themselves (converted, or a copy of padded rows), and with a softcap its
        # derivative
        copied = z.dtype != acc_dtype or z.shape[1] % 8 > 0 or student.logit_scale != 1.0 or student.softcap > 0
        for chunk in row_chunks(z, 1 + copied + (student.softcap > 0), self.spec.plan.memory_budget // 2):
            support = self.support.rows(slice(rows.start + chunk.start, rows.start + chunk.stop))
            x = student.finish(z[chunk], acc_dtype)
            log_p = F.log_softmax(x, 1, dtype=acc_dtype) if lump else x
            found = divergence_on_support(log_p.gather(1, support.ids).to(acc_dtype), support, self.spec.beta, lump)
            divergence[chunk] = found.divergence
            if scale is not None:
                p = log_p.exp_() if lump else None
                _write_gradient(z[chunk], x, p, found, support, student, scale_of(scale, chunk))
            del x, log_p


def _write_gradient(
    out: Tensor, z: Tensor, p: Tensor | None, found: SupportGrads, support: Support, student: Head, by: Tensor | float
) -> None:
    """Set ``out``, which ``z`` may alias, to the gradient times ``by``. Overwrites ``p``, which is None if c = 0."""
    inside = found.inside.masked_fill_(support.padding, 0.0)
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
