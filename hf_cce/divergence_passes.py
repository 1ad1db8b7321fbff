"""Divergences by Triton kernels, without kept logits, over slabs of the vocabulary.

One pass computes the statistics of each row (two passes for the JSD), another one the gradients. It recomputes the logits, so it
works for any upstream gradient. Legend: as in ``hf_cce.divergence_spec``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cce.divergence_spec import DivergenceSpec, Head, HeadGrads, Tokens, WantedGrads
from hf_cce.matmul import multiply, multiply_add
from hf_cce.reference import fp16_unit
from hf_cce.spec import accumulation_dtype


def divergence_kernels() -> Any:
    from hf_cce.kernels import divergence  # imported lazily: importing hf_cce must not import Triton

    return divergence


def make_slabs(student: Head, memory_budget: int, column_bytes: int, reserved_bytes: int = 0) -> list[slice]:
    """Return slabs that take ``column_bytes`` bytes per column, next to ``reserved_bytes`` bytes allocated for the whole loop."""
    v, align = len(student.weight), 128  # whole tiles
    width = max(align, max(memory_budget - reserved_bytes, memory_budget // 4) // column_bytes // align * align)
    count = max(1, -(-v // width))
    even = -(-v // count)
    width = -(-even // align) * align  # slabs of equal width
    return [slice(start, min(v, start + width)) for start in range(0, v, width)]


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
    kernels = divergence_kernels()
    # The statistics of a tile and two copies, which folding makes
    block_n = kernels.pair_plan(student, teacher).block_n
    column_bytes = -(-12 * (2 + spec.kl + spec.entropy) * len(student.hidden) // block_n)
    slabs = make_slabs(student, spec.memory_budget, column_bytes + _copied_bytes(teacher, tokens))
    if spec.kl:
        found = []
        for slab in slabs:
            s, t = _slab_heads(student, teacher, tokens, slab)
            found.append(_fold(kernels.pair_stats(s, t, tokens.num_valid, spec.beta, spec.entropy), spec))
        lse, teacher_lse, *means = _fold([torch.stack(parts) for parts in zip(*found, strict=True)], spec)
        entropy = lse - means[-1] if spec.entropy else lse.new_empty(0)
        divergence = means[0] + (lse - teacher_lse if spec.beta == 0.0 else teacher_lse - lse)
        # A copy, which autograd saves: the caller may change the divergence in place.
        return divergence, entropy, (lse, teacher_lse, divergence.clone())
    lse, entropy = kernels.row_lse(student, tokens.num_valid, spec.entropy, spec.memory_budget)
    if teacher.weight is not None:
        teacher_lse = kernels.row_lse(teacher, tokens.num_valid, False, spec.memory_budget)[0]
    else:
        given = (tokens.gather(teacher.columns(slab.start, slab.stop).hidden) for slab in slabs)
        teacher_lse = torch.stack([teacher.finish(z, torch.float32).float().logsumexp(1) for z in given]).logsumexp(0)
    divergence, offset = torch.zeros_like(lse), torch.zeros_like(lse)
    for slab in slabs:
        s, t = _slab_heads(student, teacher, tokens, slab)
        student_kl, jsd = kernels.pair_stats(s, t, tokens.num_valid, spec.beta, False, (lse, teacher_lse))
        divergence += jsd.sum(0)
        offset += student_kl.sum(0)
    return divergence, entropy, (lse, teacher_lse, offset)


def _fold(parts: list[Tensor], spec: DivergenceSpec) -> list[Tensor]:
    """Combine the statistics of slabs or tiles [T, N] into those of rows [N].

    They are the student's logsumexp, the teacher's, the mean of z_t − z_s under p_t (forward KL) or of z_s − z_t under p_s
    (reverse) and, for the entropy, that of z_s under p_s.
    """
    part_lse, part_teacher_lse, *means = parts
    lse, teacher_lse = part_lse.logsumexp(0), part_teacher_lse.logsumexp(0)
    of_gap = (part_teacher_lse, teacher_lse) if spec.beta == 0.0 else (part_lse, lse)
    weights = [of_gap] * spec.kl + [(part_lse, lse)] * spec.entropy
    folded = ((mean * (part - row).exp_()).sum(0) for mean, (part, row) in zip(means, weights, strict=True))
    return [lse, teacher_lse, *folded]


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
    hidden, weight = student.hidden, student.weight
    (n, d), dtype, v = hidden.shape, hidden.dtype, len(weight)
    acc_dtype, unit = accumulation_dtype(dtype), fp16_unit(dtype, grad)
    grad = grad if unit is None else grad / unit
    grad_hidden = hidden.new_zeros((n, d), dtype=acc_dtype) if wanted.needs[0] else None
    grad_weight = weight.new_empty((wanted.rows, d)) if wanted.needs[1] else None
    grad_bias = weight.new_empty(wanted.rows) if wanted.needs[2] else None
    for each in (grad_weight, grad_bias):
        if each is not None:
            each[v:] = 0
    column_bytes = n * dtype.itemsize + _copied_bytes(teacher, tokens)
    reserved_bytes = 4 * n * d if dtype.itemsize < 4 and wanted.needs[0] else 0
    for slab in make_slabs(student, spec.memory_budget, column_bytes, reserved_bytes):
        s, t = _slab_heads(student, teacher, tokens, slab)
        g = divergence_kernels().pair_gradient(s, t, tokens.num_valid, rows, grad, spec.beta)
        if grad_bias is not None:
            grad_bias[slab] = g.sum(0, dtype=acc_dtype) if unit is None else g.sum(0, dtype=acc_dtype) * unit
        if grad_hidden is not None:
            multiply_add(grad_hidden, g, weight[slab])
        if grad_weight is not None and unit is None:
            torch.mm(g.t(), hidden, out=grad_weight[slab])
        elif grad_weight is not None and unit is not None:
            torch.mul(multiply(g.t(), hidden), unit, out=grad_weight[slab])
        del g  # free it before the next one is allocated
    if grad_hidden is not None and unit is not None:
        grad_hidden.mul_(unit)
    return None if grad_hidden is None else grad_hidden.to(dtype), grad_weight, grad_bias
