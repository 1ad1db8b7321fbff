"""Per-token statistics of a head whose vocabulary is sharded over ranks (tensor parallelism), without gathering it.

Legend: N tokens, D hidden size, V vocabulary, V_r rows of the weight on this rank. All ranks have the same hidden states and
labels. Each computes the statistics of its slice, of which a few numbers per token are all-reduced, and the gradient of its slice
from the lse of the whole vocabulary; the gradient of the hidden states [N, D] is all-reduced.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_cce import ops
from hf_cce.spec import Inputs, LogitStats, LossSpec, TokenGrads, WantedStats, accumulation_dtype

_IGNORED = -100  # never an index into a slice, as the user's ignore_index may be


class Slice(NamedTuple):
    """The slice of the vocabulary on this rank."""

    group: Any  # the process group that shares the vocabulary
    first: int  # the first vocabulary entry of the slice
    rows: int  # V_r; may be 0
    vocab_size: int  # V


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor. Checks only the type of a plain tensor."""
    return type(value) is not Tensor and type(value) is not nn.Parameter and hasattr(value, "device_mesh")


def why_not_sharded(hidden: Any, weight: Any, bias: Any = None) -> str | None:
    """Return why these hidden states, weight [V, D] and bias [V] or None are not a vocabulary-sharded head; None if they are.

    The hidden states must be a replicated DTensor: only that shows that all ranks have the same tokens. An FSDP2 weight looks
    the same as a tensor-parallel one, but there each rank has tokens of its own.
    """
    from torch.distributed.tensor import Shard

    for name, value in [("weight", weight)] if bias is None else [("weight", weight), ("bias", bias)]:
        placements: Any = value.placements if is_dtensor(value) else ()
        if len(placements) != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
            return f"the head's {name} is not split over its first dimension ({_layout(value)})"
        replicated = is_dtensor(hidden) and all(placement.is_replicate() for placement in hidden.placements)
        if not replicated or value.device_mesh != hidden.device_mesh:
            return f"the hidden states are not replicated over the processes that share the head's {name} ({_layout(hidden)})"
        if not value.is_floating_point():
            return f"the head's {name} is quantised to {value.dtype}"
        if to_local(value).shape[0] != slice_of(value).rows:
            return f"the head's {name} is not split as torch's DTensor splits it"
    return None


def slice_of(weight: Any) -> Slice:
    """Return this rank's slice of a DTensor [V, …]: chunks are equal, except that the last ones may be shorter or empty."""
    mesh, vocab_size = weight.device_mesh, weight.shape[0]
    chunk = -(-vocab_size // mesh.size())
    first = min(vocab_size, chunk * mesh.get_local_rank())
    return Slice(mesh.get_group(), first, min(vocab_size, first + chunk) - first, vocab_size)


def to_local(value: Any) -> Tensor:
    """Return the local tensor of a DTensor, without a gradient; return a plain tensor unchanged."""
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


def as_replicated(hidden: Tensor, weight: Any) -> Any:
    """Wrap plain hidden states, equal on all ranks, in a replicated DTensor if ``weight`` is a DTensor."""
    if not is_dtensor(weight) or is_dtensor(hidden):
        return hidden
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)


def full_logits(logits: Any) -> Tensor:
    """Return all logits [..., V] as a plain tensor on every rank."""
    return logits.full_tensor() if is_dtensor(logits) else logits


def logit_stats(x: Inputs, spec: LossSpec, wanted: WantedStats) -> LogitStats:
    """Compute the statistics over the whole vocabulary, equal on all ranks; ``is_top1`` is empty.

    All but ``log_sum_sq`` are differentiable; every rank must use the same loss.
    """
    hidden, weight, bias, labels = x
    own = (hidden.to_local(), weight.to_local(), None if bias is None else bias.to_local(), labels)  # type: ignore[attr-defined]
    lse, at_label, mean, entropy, log_sum_sq = _Statistics.apply(spec, wanted, slice_of(weight), *own)
    return LogitStats(lse, at_label, mean, entropy, log_sum_sq, labels.new_empty(0))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: LossSpec,
        wanted: WantedStats,
        part: Slice,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
    ) -> tuple[Tensor, ...]:
        valid = labels != spec.ignore_index
        here = valid & (labels >= part.first) & (labels < part.first + part.rows)
        # A label on another rank becomes index 0 of this slice; ``here`` masks what that would add.
        token_ids = torch.where(here, labels - part.first, 0).masked_fill_(~valid, _IGNORED)
        spec = spec._replace(ignore_index=_IGNORED)
        if part.rows:
            no_gradient = spec._replace(needs=(False, False, False))
            _, slice_stats = ops.statistics(Inputs(hidden, weight, bias, token_ids), no_gradient, wanted)
            lse, at_label, mean, entropy, log_sum_sq, _ = slice_stats
        else:
            acc_dtype = accumulation_dtype(hidden.dtype)
            lse = torch.full(labels.shape, -math.inf, dtype=acc_dtype, device=labels.device)
            at_label = mean = entropy = log_sum_sq = torch.zeros_like(lse)

        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
        top.masked_fill_(top == -math.inf, 0.0)
        mass = (lse - top).exp_()
        sums = [mass, torch.where(here, at_label, 0)]
        if wanted.mean:
            sums.append(mean * (part.rows / part.vocab_size))
        if wanted.entropy:  # mass times the mean of z − top over this slice
            sums.append(torch.where(mass > 0, mass * (lse - top - entropy), 0))
        if wanted.log_sum_sq:
            sums.append(torch.where(mass > 0, mass.square() * log_sum_sq.exp(), 0))
        total = torch.stack(sums)
        dist.all_reduce(total, dist.ReduceOp.SUM, part.group)
        mass, at_label, *rest = total.unbind()
        log_mass, nothing = mass.log(), lse.new_empty(0)

        def zero_ignored(x: Tensor) -> Tensor:
            return torch.where(valid, x, 0)

        lse = zero_ignored(top + log_mass)
        mean = zero_ignored(rest.pop(0)) if wanted.mean else nothing
        entropy = zero_ignored(log_mass - rest.pop(0) / mass) if wanted.entropy else nothing
        log_sum_sq = zero_ignored(rest.pop(0).log() - 2 * log_mass) if wanted.log_sum_sq else nothing
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(log_sum_sq)
        ctx.save_for_backward(hidden, weight, bias, token_ids, here, lse, entropy if wanted.entropy else None)
        ctx.spec, ctx.part = spec, part
        return lse, zero_ignored(at_label), mean, entropy, log_sum_sq

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # DTensors of some versions of torch lose a second derivative
            ops.refuse_second_derivative()
        hidden, weight, bias, token_ids, here, lse, entropy = ctx.saved_tensors
        needs, part, spec = ctx.needs_input_grad[3:6], ctx.part, ctx.spec
        gradients: tuple[Any, ...]
        if part.rows:
            given = TokenGrads.of_stats(lse, grads)
            label = given.label if grads[1] is None else torch.where(here, given.label, 0)
            # The operator divides by V_r instead of V.
            mean = None if given.mean is None else given.mean * (part.rows / part.vocab_size)
            stat_grads = given._replace(label=label, mean=mean)
            x = Inputs(hidden, weight, bias, token_ids)
            gradients = ops.recompute_by_operator(x, spec._replace(needs=needs), lse, entropy, stat_grads)
        else:
            gradients = (torch.zeros_like(hidden), torch.zeros_like(weight), None if bias is None else bias * 0)
        if needs[0]:
            dist.all_reduce(gradients[0], dist.ReduceOp.SUM, part.group)
        return (None, None, None, *(g if need else None for g, need in zip(gradients, needs, strict=True)), None)


def _layout(value: Any) -> str:
    return f"a DTensor with {tuple(value.placements)}" if is_dtensor(value) else f"a {type(value).__name__}"
