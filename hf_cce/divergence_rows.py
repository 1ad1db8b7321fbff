"""Divergences that keep the student's logits once, in the inputs' dtype, for the gradients.

PyTorch multiplies. With the whole vocabulary at hand, one pass over blocks of tokens computes the divergence and overwrites the
kept logits with its gradient, in one kernel or in PyTorch. The backward pass only multiplies: as many products as full logits
need, in a fraction of their memory. This is the fastest way if the memory budget has room for these logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_passes import DivergenceSpec, Head, HeadGrads, Tokens, WantedGrads, expectation, log_mixture
from hf_cce.fallback import (
    CHUNK_BYTES_CPU,
    chunks,
    empty_logits,
    gradient_scale,
    logit_products,
    products,
    split_factors,
    tokens_per_block,
)
from hf_cce.spec import accumulation_dtype


def logits_of(x: Head, rows: slice = slice(None)) -> Tensor:
    """Return h Wᵀ + b [n, V] of some rows in the inputs' dtype."""
    hidden, weight = x.hidden[rows], x.weight
    assert weight is not None
    return products(hidden, weight, x.bias, empty_logits(hidden, len(weight), len(hidden)))


def row_chunks(z: Tensor, copies: int, room: int) -> Iterator[slice]:
    """Split the rows of ``z`` [n, V] so that ``copies`` float arrays of a chunk fit ``room`` bytes, or a CPU's cache."""
    room = room if z.is_cuda else min(CHUNK_BYTES_CPU, room)
    return chunks(len(z), copies * accumulation_dtype(z.dtype).itemsize * z.shape[1], room)


def divergence_of_rows(
    student: Head, teacher: Head, tokens: Tokens, spec: DivergenceSpec, factor: Tensor | float | None
) -> tuple[Tensor, Tensor, KeptGradient | None]:
    """Return the divergence [N], the student's entropy [N] (empty if not wanted) and, with a ``factor``, the logits' gradient.

    Rows are in the order of ``tokens``, as are those of the hidden states of both heads. ``factor`` is the scalar by which the
    caller multiplies the divergences.
    """
    hidden, weight = student.hidden, student.weight
    assert weight is not None
    (n, v), dtype, acc_dtype = (len(hidden), len(weight)), hidden.dtype, accumulation_dtype(hidden.dtype)
    if dtype == torch.float64 and teacher.weight is not None:
        bias = None if teacher.bias is None else teacher.bias.to(dtype)
        teacher = teacher._replace(hidden=teacher.hidden.to(dtype), weight=teacher.weight.to(dtype), bias=bias)
    divergence = torch.empty(n, dtype=acc_dtype, device=hidden.device)
    entropy = divergence.new_empty(n if spec.entropy else 0)
    kept = None if factor is None else kept_gradient(student, factor, spec.beta)
    # Given logits may be −inf, and a bias.
    infinite = teacher.weight is None or student.bias is not None or teacher.bias is not None
    copies = 5 + infinite + 2 * (not spec.kl) + (student.softcap > 0)
    # The budget is for blocks of products of the teacher, and of the student if they are not kept. PyTorch needs half for chunks.
    room = spec.memory_budget // (1 if spec.triton else 2) // (1 if kept else 2)
    block = tokens_per_block(n, v, dtype, not hidden.is_cuda, room)
    if spec.triton:
        from hf_cce.kernels.divergence_rows import row_divergences  # importing hf_cce must not import Triton
    for start in range(0, n, block):
        rows = slice(start, min(n, start + block))
        zs = logits_of(student, rows) if kept is None else kept.logits[rows]
        zt = logits_of(teacher, rows) if teacher.weight is not None else tokens.gather(teacher.hidden, rows)
        if spec.triton:
            row_divergences(
                zs, zt, student, teacher, spec.beta, divergence[rows], entropy[rows] if spec.entropy else None,
                None if kept is None else kept.scale,
            )  # fmt: skip
        else:
            for chunk in row_chunks(zs, copies, spec.memory_budget // 2):
                x = student.finish(zs[chunk], acc_dtype)
                log_ps = F.log_softmax(x, 1, dtype=acc_dtype)
                derivative = 1.0 if kept is None else student.logit_derivative(x)
                del x
                log_pt = F.log_softmax(teacher.finish(zt[chunk], acc_dtype), 1, dtype=acc_dtype)
                of_chunk = slice(start + chunk.start, start + chunk.stop)
                if spec.entropy:
                    entropy[of_chunk] = -expectation(log_ps.exp(), log_ps.clone(), infinite)
                divergence[of_chunk], g, minus = _divergence_and_gradient(log_ps, log_pt, spec.beta, infinite)
                del log_ps, log_pt
                if kept is not None:
                    kept.write(zs[chunk], g, minus, derivative)
                del g, minus, derivative
        del zs, zt  # free them before the next ones are allocated
    return divergence, entropy, kept


def kept_gradient(student: Head, factor: Tensor | float, beta: float) -> KeptGradient:
    """Compute the student's products, which are to be overwritten with the gradient of divergences multiplied by ``factor``."""
    logits, scale = logits_of(student), gradient_scale(student.hidden, student.logit_scale, factor, exact=True)
    if logits.dtype == torch.float16 and beta == 1.0:  # p · (gap − KL) may be as large as a gap of log-probabilities
        scale = scale / 64
    return KeptGradient(logits, scale)


@dataclass
class KeptGradient:
    """The gradient of the divergences with respect to h Wᵀ + b [N, V], times ``scale``."""

    logits: Tensor
    scale: Tensor | float

    def write(self, out: Tensor, g: Tensor, minus: Tensor | None, derivative: Tensor | float) -> None:
        """Set ``out``, some rows, to (g − minus) · derivative · scale."""
        if isinstance(derivative, Tensor) or isinstance(self.scale, Tensor) or self.scale * derivative != 1.0:
            g = g if minus is None else g.sub_(minus)
            by = self.scale if isinstance(derivative, Tensor) else self.scale * derivative
            torch.mul(g.mul_(derivative) if isinstance(derivative, Tensor) else g, by, out=out)
        elif minus is None:
            out.copy_(g)
        else:
            torch.sub(g, minus, out=out)


def _divergence_and_gradient(
    log_ps: Tensor, log_pt: Tensor, beta: float, infinite: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the divergence of each row, and two tensors whose difference is its gradient with respect to the student's logits.

    Overwrites the arguments.
    """
    if beta == 0.0:
        pt = log_pt.exp()
        divergence = expectation(pt, log_pt.sub_(log_ps), infinite)
        return divergence, log_ps.exp_(), pt
    ps = log_ps.exp()
    if beta == 1.0:
        gap, weight, others = log_ps.sub_(log_pt), 1.0, None
    else:
        log_m = log_mixture(log_ps, log_pt, beta)
        others = expectation(log_pt.exp(), log_pt.sub_(log_m), infinite).mul_(beta)
        gap, weight = log_ps.sub_(log_m), 1 - beta
        del log_m
    gap = gap.masked_fill_(ps == 0, 0.0) if infinite else gap
    kl = (gap * ps).sum(1)
    g = gap.sub_(kl[:, None]).mul_(ps)
    return (kl, g, None) if others is None else (others + weight * kl, g.mul_(weight), None)


def gradients_of_rows(kept: KeptGradient, student: Head, grad: Tensor, wanted: WantedGrads) -> HeadGrads:
    """Return the gradients of hidden states, weight and bias for upstream gradients ``grad`` [N]; overwrites ``kept``.

    Those of vocabulary entries that were left out are zeros.
    """
    assert student.weight is not None
    factors = split_factors(student.hidden.dtype, grad / kept.scale)
    hidden, weight, bias = logit_products(kept.logits, student.hidden, student.weight, wanted.needs, *factors)
    left_out = wanted.rows - len(student.weight)
    weight = F.pad(weight, (0, 0, 0, left_out)) if weight is not None and left_out else weight
    return hidden, weight, F.pad(bias, (0, left_out)) if bias is not None and left_out else bias
