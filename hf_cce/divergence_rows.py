"""Divergences in PyTorch that keep the student's logits once, in the inputs' dtype, for the gradients.

With the whole vocabulary at hand, one pass over blocks of tokens computes the divergence and overwrites the kept logits with its
gradient, so the backward pass only multiplies: as many products as full logits need, in a fraction of their memory. This is the
fastest way for few tokens, and wherever the kernels cannot run.

Legend: N tokens, D hidden size, V vocabulary; β as in ``hf_cce.divergence_passes``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_passes import (
    DivergenceSpec,
    Head,
    HeadGrads,
    Tokens,
    WantedGrads,
    log_mixture,
)
from hf_cce.fallback import CHUNK_BYTES_CPU, LogitGrads, chunks, empty_logits, fp16_scale, token_block
from hf_cce.reference import matmul_supports_fp32_out
from hf_cce.spec import accumulation_dtype


def products(x: Head, rows: slice, out: Tensor | None = None) -> Tensor:
    """Compute h Wᵀ + b [n, V] of some rows in the inputs' dtype; of a teacher given by logits, these."""
    h, weight = x.hidden[rows], x.weight
    if weight is None:
        return h
    if out is None:
        out = empty_logits(h, weight.shape[0], len(h))
    return torch.mm(h, weight.t(), out=out) if x.bias is None else torch.addmm(x.bias, h, weight.t(), out=out)


def row_chunks(z: Tensor, copies: int, spec: DivergenceSpec) -> Iterator[slice]:
    """Split the rows of ``z`` [n, V] so that ``copies`` float arrays of a chunk fit half of the budget, or a CPU's cache."""
    room = spec.memory_budget // 2 if z.is_cuda else min(CHUNK_BYTES_CPU, spec.memory_budget // 2)
    return chunks(len(z), copies * accumulation_dtype(z.dtype).itemsize * z.shape[1], room)


def divergence_of_rows(
    student: Head, teacher: Head, tokens: Tokens, spec: DivergenceSpec, factor: Tensor | None
) -> tuple[Tensor, Tensor, LogitGrads | None]:
    """Return the divergence [N], the student's entropy [N] (empty if not wanted) and, with a ``factor``, the logits' gradient.

    Rows are in the order of ``tokens``, as are those of the hidden states of both heads. Upstream gradients are expected to be
    the scalar ``factor``, or a power of two times it; then no rounding is added where products are rounded to 16 bits.
    """
    hidden, weight = student.hidden, student.weight
    assert weight is not None
    (n, v), dtype, acc_dtype = (len(hidden), len(weight)), hidden.dtype, accumulation_dtype(hidden.dtype)
    if dtype == torch.float64 and teacher.weight is not None:
        bias = None if teacher.bias is None else teacher.bias.to(dtype)
        teacher = teacher._replace(hidden=teacher.hidden.to(dtype), weight=teacher.weight.to(dtype), bias=bias)
    divergence, entropy = (torch.empty(n, dtype=acc_dtype, device=hidden.device) for _ in range(2))
    entropy = entropy if spec.entropy else entropy.new_empty(0)
    grads = None
    scale: Tensor | float = fp16_scale(student.logit_scale) if dtype == torch.float16 else 1.0
    if factor is not None:
        if dtype != acc_dtype and not matmul_supports_fp32_out(hidden):
            scale = torch.where(factor > 0, torch.frexp(factor).mantissa, 1.0).to(acc_dtype) * scale
        grads = LogitGrads(empty_logits(hidden, v, n), hidden, None, scale)
    block = token_block(n, v, dtype, not hidden.is_cuda, spec.memory_budget // 2)
    for start in range(0, n, block):
        rows = slice(start, min(n, start + block))
        zs = products(student, rows, None if grads is None else grads.logits[rows])
        zt = products(teacher, rows) if teacher.weight is not None else tokens.gather(teacher.hidden, rows)
        for chunk in row_chunks(zs, 6 + 2 * (not spec.kl) + (student.softcap > 0), spec):
            x = student.finish(zs[chunk], acc_dtype)
            log_ps = F.log_softmax(x, 1, dtype=acc_dtype)
            derivative = student.logit_derivative(x) if grads else 1.0
            del x
            log_pt = F.log_softmax(teacher.finish(zt[chunk], acc_dtype), 1, dtype=acc_dtype)
            of_chunk = slice(start + chunk.start, start + chunk.stop)
            if spec.entropy:
                entropy[of_chunk] = -_expectation(log_ps.exp(), log_ps.clone())
            divergence[of_chunk], g = _divergence_and_gradient(log_ps, log_pt, spec.beta)
            del log_ps, log_pt
            if grads is not None:
                g = g.mul_(derivative) if isinstance(derivative, Tensor) else g
                torch.mul(g, scale if isinstance(derivative, Tensor) else scale * derivative, out=zs[chunk])
            del g, derivative
        del zs, zt  # free them before the next ones are allocated
    return divergence, entropy, grads


def _expectation(p: Tensor, x: Tensor) -> Tensor:
    """Return Σ p · x of each row, without the terms with p = 0, where 0 · ∞ would be NaN. Overwrites ``x``."""
    return torch.where(p == 0, 0, x.mul_(p)).sum(1)


def _divergence_and_gradient(log_ps: Tensor, log_pt: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row and its gradient with respect to the student's logits. Overwrites the arguments."""
    if beta == 0.0:
        pt = log_pt.exp()
        divergence = _expectation(pt, log_pt.sub_(log_ps))
        return divergence, log_ps.exp_().sub_(pt)
    ps = log_ps.exp()
    if beta == 1.0:
        gap, weight, others = log_ps.sub_(log_pt), 1.0, None
    else:
        log_m = log_mixture(log_ps, log_pt, beta)
        others = _expectation(log_pt.exp(), log_pt.sub_(log_m)).mul_(beta)
        gap, weight = log_ps.sub_(log_m), 1 - beta
    gap = torch.where(ps == 0, 0, gap)
    kl = gap.mul(ps).sum(1)
    return kl if others is None else others + weight * kl, gap.sub_(kl[:, None]).mul_(ps).mul_(weight)


def gradients_of_rows(grads: LogitGrads, student: Head, grad: Tensor, wanted: WantedGrads) -> HeadGrads:
    """Return the gradients of hidden states, weight and bias for upstream gradients ``grad`` [N]; consumes ``grads``."""
    assert student.weight is not None
    largest = grad.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    weights = grad / largest  # exactly 1 for the mean over all tokens
    grads.hidden = student.hidden * weights[:, None].to(student.hidden.dtype)
    return with_rows(grads.products(student.weight, wanted.needs, largest, weights), wanted.rows)


def with_rows(grads: HeadGrads, rows: int) -> HeadGrads:
    """Append zeros to the gradients of weight and bias, for vocabulary entries that were left out."""
    missing = [rows - len(x) if x is not None else 0 for x in grads]
    hidden, weight, bias = grads
    if weight is not None and missing[1]:
        weight = F.pad(weight, (0, 0, 0, missing[1]))
    return hidden, weight, F.pad(bias, (0, missing[2])) if bias is not None and missing[2] else bias
