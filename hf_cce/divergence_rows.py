"""Divergences with the whole vocabulary of some rows at hand, from products of PyTorch or of the kernels.

One pass over blocks of tokens computes the divergence of each row and overwrites the student's logits with its gradient. The
backward pass only multiplies: as many products as full logits need, in a fraction of their memory. If the memory budget has no
room for all logits, sums of the gradients are computed with the divergence, for equal upstream gradients of all tokens, or the
backward pass computes the logits of each block again.

Sums in float32 take twice the memory of a 16-bit gradient. If the budget has no room for that, the kernels sum as many rows of
the weight's gradient as fit its own buffer, and compute the logits of the others again, in slabs of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.divergence_spec import DivergenceSpec, Head, HeadGrads, Needs
from hf_cce.fallback import (
    CHUNK_BYTES,
    CHUNK_BYTES_CPU,
    GradSums,
    chunks,
    empty_logits,
    gradient_scale,
    logit_products,
    products,
    split_factors,
    token_blocks,
    tokens_per_block,
)
from hf_cce.matmul import multiply
from hf_cce.spec import Inputs, LossSpec, Tokens, accumulation_dtype

MIN_TOKENS = 512  # rather than sum all of dW over blocks of fewer tokens, the kernels compute some logits again
# If the budget has no room for the logits of MIN_TOKENS of both models, those of the teacher are computed in parts.
PART_TOKENS = 256


def divergence_kernels() -> Any:
    from hf_cce.kernels import divergence  # imported lazily: importing hf_cce must not import Triton

    return divergence


def logits_of(x: Head, rows: slice = slice(None), compute: bool = True) -> Tensor:
    """Return h Wᵀ + b [n, V] of some rows in the inputs' dtype; if not ``compute``, only the memory for it."""
    hidden = x.hidden[rows]
    z = empty_logits(hidden, len(x.weight), len(hidden))
    return products(hidden, x.weight, x.bias, z) if compute else z


def row_chunks(z: Tensor, copies: int, room: int) -> Iterator[slice]:
    """Split the rows of ``z`` [n, V] so that ``copies`` float arrays of a chunk fit ``room`` bytes, or a CPU's cache."""
    room = room if z.is_cuda else min(CHUNK_BYTES_CPU, room)
    return chunks(len(z), copies * accumulation_dtype(z.dtype).itemsize * z.shape[1], room)


class KeptGradient(NamedTuple):
    """The gradient of the divergences with respect to h Wᵀ + b [N, V], times ``scale``."""

    logits: Tensor
    scale: Tensor | float


@dataclass
class DivergenceRows:
    """The divergences of the ``tokens`` of a student, which are the rows, from a teacher given by a head or by logits."""

    student: Head
    teacher: Any
    tokens: Tokens
    spec: DivergenceSpec
    stats: Tensor | None = None  # [3, N] of the kernel, for ``write_weight_gradient``
    part_tokens: int = 1 << 30  # for which the kernels compute the teacher's logits at once

    def divergences(self, factor: Tensor | float | None) -> tuple[Tensor, Tensor, KeptGradient | None]:
        """Return the divergence [N], the student's entropy [N] (empty if not wanted) and, with ``factor``, the logits' gradient.

        ``factor`` is the scalar by which the caller multiplies the divergences.
        """
        student, plan, hidden, v = self.student, self.spec.plan, self.student.hidden, len(self.student.weight)
        n, kept, scale = len(hidden), None, None
        divergence = torch.empty(n, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        entropy = divergence.new_empty(n if self.spec.entropy else 0)
        if factor is not None:
            scale = gradient_scale(hidden, self._largest_slope(), factor)
            kept = KeptGradient(logits_of(student, compute=not plan.multiplies), scale)
        # For blocks of products of the teacher, and of the student if they are not kept. PyTorch needs half for chunks.
        room = plan.memory_budget // (1 if plan.triton else 2) // (1 if kept else 2)
        block = tokens_per_block(n, v, hidden.dtype, not hidden.is_cuda, room)
        for start in range(0, n, block):
            rows = slice(start, min(n, start + block))
            z = logits_of(student, rows, not plan.multiplies) if kept is None else kept.logits[rows]
            self.compute(z, rows, scale, divergence[rows], entropy[rows] if self.spec.entropy else None)
            del z  # free it before the next one is allocated
        return divergence, entropy, kept

    def _largest_slope(self) -> float:
        """Return the order of the largest gradient of a product: that of the reverse KL, p · (gap − KL), is a gap of logits."""
        return self.student.logit_scale * (64.0 if self.spec.beta == 1.0 else 1.0)

    def gradients(self, kept: KeptGradient, grad: Tensor, needs: Needs) -> HeadGrads:
        """Return the gradients of hidden states, weight and bias for upstream gradients ``grad`` [N]; overwrites ``kept``."""
        hidden, weight = self.student[:2]
        factors = split_factors(hidden.dtype, grad / kept.scale)
        return logit_products(kept.logits, hidden, weight, needs, *factors)

    def one_pass(self, needs: Needs, by_row: Tensor | None = None) -> tuple[Tensor, Tensor, GradSums]:
        """Return the divergence [N], the student's entropy [N] (empty if not wanted) and the gradients of the summed divergences.

        Each divergence is multiplied by its factor of ``by_row`` [N], at most 1. ``gradients_of_sums`` completes the gradients.
        """
        plan, (hidden, weight) = self.spec.plan, self.student[:2]
        entropy, stop = hidden.new_empty(0, dtype=accumulation_dtype(hidden.dtype)), 0
        if self.spec.entropy and by_row is None:
            entropy = entropy.new_empty(len(hidden))

        def to_gradients(
            z: Tensor, labels: Tensor, loss_spec: LossSpec, scale: Tensor | float, has_bias: bool
        ) -> tuple[Tensor, Tensor]:
            nonlocal stop
            rows, stop = slice(stop, stop + len(z)), stop + len(z)
            divergence = entropy.new_empty(len(z))
            scale = scale if by_row is None else by_row[rows, None] * scale
            self.compute(z, rows, scale, divergence, entropy[rows] if len(entropy) else None)
            return divergence, divergence

        on_cpu, budget, overflow = hidden.device.type == "cpu", plan.memory_budget, 0
        row_bytes = 2 * hidden.element_size() * len(weight)  # the logits of student and teacher
        if hidden.element_size() < 4:  # float32 sums of dh, and of dW as far as they do not fit its buffer
            budget, overflow = max(budget - 4 * hidden.numel(), budget // 4), needs[1] * weight.nbytes
        sums_all = not (overflow > max(budget - MIN_TOKENS * row_bytes, 0) and self.keep_stats())
        if sums_all:
            budget = max(budget - overflow, plan.memory_budget // 4)
        room = budget // (2 if plan.triton else 4)  # in PyTorch, half of the budget is for chunks
        least = min(MIN_TOKENS * row_bytes // 2, budget - PART_TOKENS * row_bytes // 2)
        if plan.triton and least > room:
            room, self.part_tokens = least, PART_TOKENS
        room += min(CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES, room)  # subtracted again by tokens_per_block
        block = tokens_per_block(len(hidden), len(weight), hidden.dtype, on_cpu, room)
        divergence, _, _, sums = token_blocks(
            *self._block_problem(needs), lambda: entropy.new_ones(()), to_gradients, block, plan.multiplies, sums_all
        )
        return divergence, entropy, sums

    def _block_problem(self, needs: Needs) -> tuple[Inputs, LossSpec]:
        """Return what ``token_blocks`` and its result take: tokens that are not selected have the label that is ignored."""
        hidden, weight, bias = self.student[:3]
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        if self.tokens.mask is not None:
            labels.masked_fill_(~self.tokens.mask, -1)
        return Inputs(hidden, weight, bias, labels), LossSpec(-1, self._largest_slope(), 0.0, needs=needs)

    def gradients_of_sums(self, sums: GradSums, by: Tensor, needs: Needs, by_row: Tensor | None = None) -> HeadGrads:
        """Return the gradients of hidden states, weight and bias from the result of ``one_pass``, times the scalar ``by``."""
        grads: Any = sums.finalize(*self._block_problem(needs), by)
        if self.stats is not None and sums.first_rows is not None:
            scale = sums.scale if by_row is None else by_row[:, None] * sums.scale
            self.write_weight_gradient(grads[1], len(sums.first_rows), scale, by.float() / sums.scale)
        return grads

    def gradients_by_blocks(self, grad: Tensor, needs: Needs) -> HeadGrads:
        """Return the gradients of hidden states, weight and bias for upstream gradients ``grad`` [N], from recomputed logits."""
        by_row, by = split_factors(self.student.hidden.dtype, grad)
        sums = self.one_pass(needs, by_row)[2]
        return self.gradients_of_sums(sums, grad.new_ones(()) if by is None else by, needs, by_row)

    def compute(
        self, z: Tensor, rows: slice, scale: Tensor | float | None, divergence: Tensor, entropy: Tensor | None
    ) -> None:
        """Set the divergences of some rows [n] and, if wanted, the student's entropies [n].

        ``z`` has the student's products h Wᵀ + b [n, V], which this computes, too, if ``DivergencePlan.multiplies``. With a
        ``scale``, which may differ by row ([n, 1]), it overwrites them with the divergences' gradient times the scale.
        """
        student, teacher, spec = self.student, self.teacher, self.spec
        if spec.plan.triton:
            for part in chunks(len(z), 1, self.part_tokens):
                at = slice(rows.start + part.start, rows.start + part.stop)
                stats = None if self.stats is None else self.stats[:, at]
                results = divergence[part], None if entropy is None else entropy[part]
                self._run_kernel((student, teacher), z[part], at, results, stats, scale_of(scale, part))
            return
        zt = self.tokens.gather(teacher.hidden, rows) if teacher.weight is None else logits_of(teacher, rows)
        acc_dtype = accumulation_dtype(z.dtype)
        # Given logits may be −inf, and a bias.
        infinite = teacher.weight is None or student.bias is not None or teacher.bias is not None
        copies = 5 + infinite + 2 * (spec.beta not in (0.0, 1.0)) + (student.softcap > 0)
        for chunk in row_chunks(z, copies, spec.plan.memory_budget // 2):
            x = student.finish(z[chunk], acc_dtype)
            log_ps = F.log_softmax(x, 1, dtype=acc_dtype)
            logit_derivative = 1.0 if scale is None else student.logit_derivative(x)
            del x
            log_pt = teacher.log_probs(zt[chunk], acc_dtype)
            if entropy is not None:
                entropy[chunk] = -expectation(log_ps.exp(), log_ps.clone(), infinite)
            divergence[chunk], neg_grad, p = divergence_and_neg_grad(log_ps, log_pt, spec.beta, infinite)
            del log_ps, log_pt
            if scale is not None:
                if teacher.form != "logits":
                    p.mul_(neg_grad.sum(1, keepdim=True))
                _write_gradient(z[chunk], neg_grad, p, spec.beta, logit_derivative, scale_of(scale, chunk))
            del neg_grad, p, logit_derivative

    def keep_stats(self) -> bool:
        """Keep statistics for ``write_weight_gradient`` from now on; return False if that is not supported."""
        if not self.spec.plan.triton:
            return False
        hidden = self.student.hidden
        # Strides that are multiples of 16: for others Triton compiles another version of the kernel.
        stride = -(-len(hidden) // 16) * 16
        self.stats = torch.empty((3, stride), dtype=torch.float32, device=hidden.device)[:, : len(hidden)]
        return True

    @cached_property
    def shifts(self) -> list[Any]:
        """What is subtracted from the logits of student and teacher, each if the kernels compute them, else None."""
        multiplies, teacher = self.spec.plan.multiplies, self.teacher
        both = multiplies, multiplies and teacher.weight is not None and teacher.hidden.element_size() == 2
        shifts_of = divergence_kernels().shifts_of
        return [shifts_of(x) if each else None for x, each in zip((self.student, teacher), both, strict=True)]

    def _run_kernel(
        self, heads: tuple[Head, Head], z: Tensor, rows: slice, results: tuple[Tensor, Tensor | None] | None,
        stats: Tensor | None, scale: Tensor | float | None,
    ) -> None:  # fmt: skip
        """Compute ``results`` and overwrite ``z`` for both heads, which may have some of the columns if ``results`` is None."""
        kernels, (student, teacher) = divergence_kernels(), heads
        if teacher.weight is None:
            zt = self.tokens.gather(teacher.hidden, rows)
        else:
            zt = logits_of(teacher, rows, self.shifts[1] is None)
        logits, given = (
            kernels.Logits(x, head)
            if shifts is None
            else kernels.shifted_logits(head, rows, x, shifts, results is not None)
            for head, x, shifts in zip(heads, (z, zt), self.shifts, strict=True)
        )
        scale = scale if scale is None or student.logit_scale == 1.0 else scale * student.logit_scale
        kernels.row_divergences(logits, z, given, self.spec.beta, results, stats, scale)

    def write_weight_gradient(self, grad_weight: Tensor, start: int, scale: Tensor | float, by: Tensor) -> None:
        """Write the rows of the weight's gradient from ``start`` on, of the divergences times ``scale``, and times ``by``."""
        hidden, teacher, rows = self.student.hidden, self.teacher, slice(None)
        copies = teacher.weight is not None or any(x is not None for x in self.tokens)
        column_bytes = len(hidden) * (hidden.element_size() + copies * teacher.hidden.element_size())
        column_bytes += 4 * hidden.shape[1]  # of a product
        for part in chunks(len(grad_weight) - start, column_bytes, self.spec.plan.memory_budget):
            columns = slice(start + part.start, start + part.stop)
            student, teacher = (x.columns(columns.start, columns.stop) for x in (self.student, self.teacher))
            z = logits_of(student, compute=not self.spec.plan.multiplies)
            self._run_kernel((student, teacher), z, rows, None, self.stats, scale)
            torch.mul(multiply(z.t(), hidden), by, out=grad_weight[columns])
            del z  # free it before the next one is allocated


def scale_of(scale: Any, rows: slice) -> Any:
    return scale[rows] if isinstance(scale, Tensor) and scale.dim() else scale


def _write_gradient(
    out: Tensor, neg_grad: Tensor, p: Tensor, beta: float, logit_derivative: Tensor | float, scale: Tensor | float
) -> None:
    """Set ``out``, some rows, to (p · Σ neg_grad − neg_grad) · logit_derivative · scale. Overwrites ``neg_grad``."""
    of_logits = isinstance(logit_derivative, Tensor)
    if beta == 0.0:  # the sum is 1
        scaled = of_logits or isinstance(scale, Tensor) or scale * logit_derivative != 1.0
        g = torch.sub(p, neg_grad, out=neg_grad if scaled else out)
    else:
        g, scale, scaled = neg_grad.addcmul_(p, neg_grad.sum(1, keepdim=True), value=-1), -scale, True
    if scaled:
        g, by = (g.mul_(logit_derivative), scale) if of_logits else (g, scale * logit_derivative)
        torch.mul(g, by, out=out)


def expectation(p: Tensor, x: Tensor, infinite: bool = True) -> Tensor:
    """Return Σ p · x of each row, if x may be ``infinite`` without the terms with p = 0, which would be NaN. Overwrites ``x``."""
    x.mul_(p)
    return (x.masked_fill_(p == 0, 0.0) if infinite else x).sum(1)


def log_mixture(log_ps: Tensor, log_pt: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_ps + math.log1p(-beta), log_pt + math.log(beta))


def divergence_and_neg_grad(
    log_ps: Tensor, log_pt: Tensor, beta: float, infinite: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence of each row, its negative gradient with respect to log p of the student, and p.

    The log-probabilities count as independent. Overwrites the arguments.
    """
    if beta == 0.0:
        pt = log_pt.exp()
        return expectation(pt, log_pt.sub_(log_ps), infinite), pt, log_ps.exp_()
    ps, others = log_ps.exp(), None
    if beta == 1.0:
        neg_grad = log_pt.sub_(log_ps).mul_(ps)
    else:
        log_m = log_mixture(log_ps, log_pt, beta)
        others = expectation(log_pt.exp(), log_pt.sub_(log_m), infinite).mul_(beta)
        neg_grad = log_m.sub_(log_ps).mul_(ps).mul_(1 - beta)
    if infinite:
        neg_grad.masked_fill_(ps == 0, 0.0)
    divergence = neg_grad.sum(1).neg_()
    return divergence if others is None else divergence.add_(others), neg_grad, ps
