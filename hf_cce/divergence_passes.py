"""Divergences over slabs of the vocabulary: one pass for the statistics of each row (two for the JSD), one for the gradients.

Each slab's rows of the weight's gradient are written once, from float32 accumulators; the gradient of the hidden states is
accumulated over slabs in float32. The backward pass recomputes the logits, so it works for any upstream gradient.

Legend: N tokens, D hidden size, V vocabulary; z logits after scale, softcap and temperature; p = softmax(z); β: 0 for the forward
KL(p_teacher ‖ p_student), 1 for the reverse KL(p_student ‖ p_teacher), else the JSD with the mixture
m = (1 − β) p_student + β p_teacher, as in TRL's ``DistillationTrainer``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cce.matmul import multiply, multiply_add, supports_fp32_out
from hf_cce.reference import apply_scale_and_softcap_, fp16_unit, scratch_bytes
from hf_cce.spec import accumulation_dtype


class Head(NamedTuple):
    """Operands of the logits softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap)."""

    hidden: Tensor  # [N, D]; the logits [N, V] if weight is None
    weight: Tensor | None  # [V, D]
    bias: Tensor | None  # [V]
    logit_scale: float  # includes the temperature, like softcap
    softcap: float  # 0: none

    def columns(self, start: int, stop: int) -> Head:
        """Return the head for the vocabulary entries [start, stop)."""
        if self.weight is None:
            return self._replace(hidden=self.hidden[:, start:stop])
        bias = None if self.bias is None else self.bias[start:stop]
        return self._replace(weight=self.weight[start:stop], bias=bias)

    def logits(self, at_least: torch.dtype = torch.float32) -> Tensor:
        """Return the logits [N, V] in the accumulation dtype, or in ``at_least`` if that is wider."""
        acc_dtype = torch.promote_types(accumulation_dtype(self.hidden.dtype), at_least)
        if self.weight is None:
            z = self.hidden.to(acc_dtype, copy=True)
        elif acc_dtype == torch.float64:
            z = self.hidden.to(acc_dtype) @ self.weight.t().to(acc_dtype)
        else:
            z = multiply(self.hidden, self.weight.t())
        return apply_scale_and_softcap_(z if self.bias is None else z.add_(self.bias), self.logit_scale, self.softcap)

    def finish(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits from hidden · weightᵀ + bias: in ``dtype``, or ``z`` itself without scale and softcap."""
        if self.logit_scale == 1.0 and not self.softcap:
            return z
        return apply_scale_and_softcap_(z.to(dtype, copy=True), self.logit_scale, self.softcap)

    def logit_derivative(self, z: Tensor) -> Tensor | float:
        """Return ∂z/∂x at ``z``, where x is the logit before scale and softcap."""
        if not self.softcap:
            return self.logit_scale
        return (z / self.softcap).square_().neg_().add_(1).mul_(self.logit_scale)


class Tokens(NamedTuple):
    """An order of the tokens in which those selected by the mask come first."""

    order: Tensor | None  # [N], on a CPU only the selected tokens; None if all are selected
    num_valid: Tensor  # scalar int64

    @classmethod
    def of(cls, mask: Tensor | None, n: int, device: torch.device) -> Tokens:
        """Create the order for ``mask`` [N], True for selected tokens. Does not synchronize with a GPU."""
        if mask is None:
            return cls(None, torch.full((), n, dtype=torch.int64, device=device))
        if device.type == "cpu":
            order = mask.nonzero().squeeze(1)
            return cls(order, torch.tensor(order.numel()))
        return cls(torch.argsort(~mask, stable=True), mask.sum())

    def gather(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return ``rows`` of ``x`` [N, ·] in this order, zeroed where not selected so that NaN there cannot propagate."""
        if self.order is None:
            return x[rows]
        return torch.where(self.valid(x)[rows, None], x.index_select(0, self.order[rows]), 0)

    def valid(self, x: Tensor) -> Tensor:
        assert self.order is not None
        return torch.arange(self.order.numel(), device=x.device) < self.num_valid

    def scatter(self, values: Tensor, n: int) -> Tensor:
        """Return ``values`` in the original order [N, ·]; zero for tokens that are not selected."""
        if self.order is None:
            return values
        valid = self.valid(values).view(-1, *[1] * (values.dim() - 1))
        return values.new_zeros(n, *values.shape[1:]).index_copy_(0, self.order, torch.where(valid, values, 0))


@dataclass(frozen=True)
class DivergenceSpec:
    """The checked options of one divergence, on the host."""

    beta: float
    entropy: bool  # also return the student's entropy, for logging
    memory_budget: int  # bytes, beside kept logits
    triton: bool
    keeps_logits: bool = False  # in PyTorch, see ``hf_cce.divergence_rows``

    @property
    def kl(self) -> bool:
        return self.beta in (0.0, 1.0)


class WantedGrads(NamedTuple):
    """Which gradients are needed, and the rows of the weight's gradient, including truncated vocabulary entries."""

    needs: tuple[bool, bool, bool]  # of hidden states, weight and bias
    rows: int


HeadGrads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden states, weight and bias


def refuse_second_derivative() -> None:
    """Raise in a backward pass with ``create_graph=True``, where autograd would treat the result as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("linear_divergence has no second derivative; remove create_graph=True, or use full logits")


def divergence_kernels() -> Any:
    from hf_cce.kernels import divergence  # imported lazily: importing hf_cce must not import Triton

    return divergence


def make_slabs(student: Head, spec: DivergenceSpec, column_bytes: int, reserved_bytes: int = 0) -> list[slice]:
    """Return slabs that take ``column_bytes`` bytes per column, next to ``reserved_bytes`` bytes allocated for the whole loop."""
    assert student.weight is not None
    n, v, room = student.hidden.shape[0], student.weight.shape[0], spec.memory_budget
    if not spec.triton:
        room = scratch_bytes(n, v, accumulation_dtype(student.hidden.dtype).itemsize, spec.memory_budget)
    align = 128 if spec.triton else 16  # whole tiles
    width = max(align, max(room - reserved_bytes, room // 4) // max(column_bytes, 1) // align * align)
    count = max(1, -(-v // width))
    even = -(-v // count)
    width = -(-even // align) * align  # slabs of equal width
    return [slice(start, min(v, start + width)) for start in range(0, v, width)]


def portable_column_bytes(*heads: Head) -> int:
    """Return the bytes per slab column in PyTorch: seven float arrays [N, width]; on a CPU also 16-bit weights in float32."""
    acc_dtype = accumulation_dtype(heads[0].hidden.dtype)
    copied = [x for x in heads if x.weight is not None and x.hidden.dtype != acc_dtype and not x.hidden.is_cuda]
    return acc_dtype.itemsize * (7 * heads[0].hidden.shape[0] + sum(x.hidden.shape[1] for x in copied))


def _slab_heads(student: Head, teacher: Head, tokens: Tokens, slab: slice) -> tuple[Head, Head]:
    student, teacher = student.columns(slab.start, slab.stop), teacher.columns(slab.start, slab.stop)
    if teacher.weight is None:  # per slab: a copy of all logits would be N × V
        teacher = teacher._replace(hidden=tokens.gather(teacher.hidden))
    return student, teacher


def _copied_bytes(teacher: Head, tokens: Tokens) -> int:
    """Return the bytes per column of a slab's copy of the teacher's logits."""
    copies = teacher.weight is None and tokens.order is not None
    return 2 * teacher.hidden.shape[0] * teacher.hidden.dtype.itemsize if copies else 0


def row_stats(
    student: Head, teacher: Head, tokens: Tokens, spec: DivergenceSpec
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the divergence of each row [N], the student's entropy (empty if not requested), and ``rows`` of ``gradients``."""
    n, column_bytes = student.hidden.shape[0], portable_column_bytes(student, teacher)
    if spec.triton:  # the statistics of a tile and two copies, which folding makes
        block_n = divergence_kernels().pair_plan(student, teacher).block_n
        column_bytes = -(-12 * (2 + spec.kl + spec.entropy) * n // block_n)
    column_bytes += _copied_bytes(teacher, tokens)
    slabs, means = make_slabs(student, spec, column_bytes), list[Tensor]()
    if spec.triton and not spec.kl:
        lse, entropy = divergence_kernels().row_lse(student, tokens.num_valid, spec.entropy, spec.memory_budget)
        teacher_lse = _teacher_lse(teacher, tokens, spec, slabs)
    else:
        # Allocated before the loop. Small tensors of each slab would lie between its large temporaries, and a CPU's heap could
        # then neither reuse the gaps for the next slab nor return them.
        dtype, count = accumulation_dtype(student.hidden.dtype), 2 + spec.kl + spec.entropy
        parts = [student.hidden.new_empty((len(slabs), n), dtype=dtype) for _ in range(count)]
        for index, slab in enumerate(slabs):
            found = _slab_parts(*_slab_heads(student, teacher, tokens, slab), tokens, spec)
            for part, values in zip(parts, found, strict=True):
                part[index] = values
        lse, teacher_lse, *means = _fold(parts, spec)
        entropy = lse - means[-1] if spec.entropy else lse.new_empty(0)
    if spec.kl:
        divergence = means[0] + (lse - teacher_lse if spec.beta == 0.0 else teacher_lse - lse)
        # A copy, which autograd saves: the caller may change the divergence in place.
        return divergence, entropy, (lse, teacher_lse, divergence.clone())
    divergence, offset = torch.zeros_like(lse), torch.zeros_like(lse)
    for slab in slabs:
        s, t = _slab_heads(student, teacher, tokens, slab)
        if spec.triton:
            tiles = divergence_kernels().pair_stats(s, t, tokens.num_valid, spec.beta, False, (lse, teacher_lse))
            student_kl, jsd = (x.sum(0) for x in tiles)
        else:
            student_kl, jsd = _mixture_sums(s.logits(), t.logits(lse.dtype), lse, teacher_lse, spec.beta)
        divergence += jsd
        offset += student_kl
    return divergence, entropy, (lse, teacher_lse, offset)


def _teacher_lse(teacher: Head, tokens: Tokens, spec: DivergenceSpec, slabs: list[slice]) -> Tensor:
    if teacher.weight is not None:
        return divergence_kernels().row_lse(teacher, tokens.num_valid, False, spec.memory_budget)[0]
    given = (tokens.gather(teacher.columns(slab.start, slab.stop).hidden) for slab in slabs)
    return torch.stack([teacher._replace(hidden=z).logits().logsumexp(1) for z in given]).logsumexp(0)


def _slab_parts(student: Head, teacher: Head, tokens: Tokens, spec: DivergenceSpec) -> list[Tensor]:
    """Return statistics of one slab's part of each row, [N] each: lse, the teacher's lse and, if needed, two means.

    The first mean, for KL divergences, is that of z_t − z_s under p_t (forward) or of z_s − z_t under p_s (reverse), the second,
    for the entropy, that of z_s under p_s.
    """
    if spec.triton:
        return _fold(divergence_kernels().pair_stats(student, teacher, tokens.num_valid, spec.beta, spec.entropy), spec)
    zs = student.logits()
    zt = teacher.logits(zs.dtype)
    lse, teacher_lse = zs.logsumexp(1), zt.logsumexp(1)
    found = [lse, teacher_lse]
    if spec.beta == 0.0:
        found.append(expectation((zt - teacher_lse[:, None]).exp_(), zt - zs))
    elif spec.beta == 1.0:
        found.append(expectation((zs - lse[:, None]).exp_(), zs - zt))
    if spec.entropy:
        found.append(expectation((zs - lse[:, None]).exp_(), zs))
    return found


def _fold(parts: list[Tensor], spec: DivergenceSpec) -> list[Tensor]:
    """Combine the statistics of slabs or tiles [T, N] into those of rows [N]."""
    part_lse, part_teacher_lse, *means = parts
    lse, teacher_lse = part_lse.logsumexp(0), part_teacher_lse.logsumexp(0)
    of_gap = (part_teacher_lse, teacher_lse) if spec.beta == 0.0 else (part_lse, lse)
    weights = [of_gap] * spec.kl + [(part_lse, lse)] * spec.entropy
    folded = ((mean * (part - row).exp_()).sum(0) for mean, (part, row) in zip(means, weights, strict=True))
    return [lse, teacher_lse, *folded]


def expectation(p: Tensor, x: Tensor, infinite: bool = True) -> Tensor:
    """Return Σ p · x of each row, if x may be ``infinite`` without the terms with p = 0, which would be NaN. Overwrites ``x``."""
    x.mul_(p)
    return (x.masked_fill_(p == 0, 0.0) if infinite else x).sum(1)


def log_mixture(log_ps: Tensor, log_pt: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_ps + math.log1p(-beta), log_pt + math.log(beta))


def _mixture_sums(zs: Tensor, zt: Tensor, lse: Tensor, teacher_lse: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return a slab's part of (KL(p_s ‖ m), JSD), [N] each. Overwrites the logits."""
    log_ps, log_pt = zs.sub_(lse[:, None]), zt.sub_(teacher_lse[:, None])
    log_m = log_mixture(log_ps, log_pt, beta)
    teacher = expectation(log_pt.exp(), log_pt - log_m)
    student = expectation(log_ps.exp(), log_ps.sub_(log_m))
    return student, (1 - beta) * student + beta * teacher


def _slab_gradient(
    student: Head, teacher: Head, rows: tuple[Tensor, Tensor, Tensor], grad: Tensor, beta: float
) -> Tensor:
    """Return the gradient of a slab [N, width] of the student's logits before scale and softcap."""
    lse, teacher_lse, offset = (x[:, None] for x in rows)
    zs = student.logits()
    derivative = student.logit_derivative(zs)
    log_ps, log_pt = zs.sub_(lse), teacher.logits(zs.dtype).sub_(teacher_lse)
    p = log_ps.exp()
    if beta == 0.0:
        g = p.sub_(log_pt.exp_())
    elif beta == 1.0:
        g = torch.where(p > 0, p * log_ps.sub_(log_pt).sub_(offset), 0)
    else:
        log_m = log_mixture(log_ps, log_pt, beta)
        g = torch.where(p > 0, p * log_ps.sub_(log_m).sub_(offset), 0).mul_(1 - beta)
    return g.mul_(grad[:, None]).mul_(derivative)


def gradients(
    student: Head,
    teacher: Head,
    tokens: Tokens,
    rows: tuple[Tensor, Tensor, Tensor],  # the student's lse, the teacher's, the offset: [N] each
    grad: Tensor,  # [N], zero for tokens that are not selected
    spec: DivergenceSpec,
    wanted: WantedGrads,
) -> HeadGrads:
    """Return the gradients of the student's hidden states, weight and bias; None where not needed."""
    unit = fp16_unit(student.hidden.dtype, grad)
    grad = grad if unit is None else grad / unit

    def slab_grad(slab: slice) -> Tensor:
        s, t = _slab_heads(student, teacher, tokens, slab)
        if spec.triton:
            return divergence_kernels().pair_gradient(s, t, tokens.num_valid, rows, grad, spec.beta)
        return _slab_gradient(s, t, rows, grad, spec.beta)

    n, itemsize = student.hidden.shape[0], student.hidden.dtype.itemsize
    column_bytes = n * itemsize if spec.triton else portable_column_bytes(student, teacher)
    return head_gradients(student, spec, column_bytes + _copied_bytes(teacher, tokens), slab_grad, unit, wanted)


def head_gradients(
    student: Head,
    spec: DivergenceSpec,
    column_bytes: int,  # see make_slabs
    slab_grad: Callable[[slice], Tensor],
    unit: Tensor | None,
    wanted: WantedGrads,
) -> HeadGrads:
    """Return the gradients of the hidden states, weight and bias; None where not needed.

    ``slab_grad`` returns the gradient of a slab of logits before scale and softcap [N, width], divided by ``unit``.
    """
    hidden, weight = student.hidden, student.weight
    assert weight is not None
    (n, d), dtype, v = hidden.shape, hidden.dtype, weight.shape[0]
    acc_dtype = accumulation_dtype(dtype)
    grad_hidden = hidden.new_zeros((n, d), dtype=acc_dtype) if wanted.needs[0] else None
    grad_weight = weight.new_empty((wanted.rows, d)) if wanted.needs[1] else None
    grad_bias = weight.new_empty(wanted.rows) if wanted.needs[2] else None
    for grad in (grad_weight, grad_bias):
        if grad is not None:
            grad[v:] = 0
    reserved_bytes = 4 * n * d if dtype.itemsize < 4 and wanted.needs[0] else 0
    for slab in make_slabs(student, spec, column_bytes, reserved_bytes):
        g = slab_grad(slab)
        if grad_bias is not None:
            grad_bias[slab] = g.sum(0, dtype=acc_dtype) if unit is None else g.sum(0, dtype=acc_dtype) * unit
        g = g.to(dtype) if supports_fp32_out(g) else g
        if grad_hidden is not None:
            multiply_add(grad_hidden, g, weight[slab])
        if grad_weight is not None and g.dtype == dtype and unit is None:
            torch.mm(g.t(), hidden, out=grad_weight[slab])
        elif grad_weight is not None:
            product = multiply(g.t(), hidden.to(g.dtype))
            grad_weight[slab] = product if unit is None else product.mul_(unit)
        del g  # free it before the next one is allocated
    if grad_hidden is not None and unit is not None:
        grad_hidden.mul_(unit)
    return None if grad_hidden is None else grad_hidden.to(dtype), grad_weight, grad_bias


def prepare_heads(student: Head, teacher: Head, v: int, tokens: Tokens, spec: DivergenceSpec) -> tuple[Head, Head]:
    """Return both heads truncated to ``v`` vocabulary entries, with the rows in the order of ``tokens``."""
    heads = [x.columns(0, v) for x in (student, teacher)]
    heads = [x if x.weight is None else x._replace(hidden=tokens.gather(x.hidden)) for x in heads]
    if spec.triton:
        heads = [divergence_kernels().with_contiguous_rows(x) for x in heads]
    return heads[0], heads[1]
