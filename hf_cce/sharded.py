"""The logits' statistics of a head whose vocabulary is spread over processes (tensor parallel), without gathering it.

Legend: N tokens, D hidden size, V vocabulary, of which this process holds V_r rows of the weight. Every process has the same
hidden states and labels. Each computes the statistics of its own slice with the operator that a whole head has; three or four
numbers per token are then reduced over the processes. Backward, each forms the gradient of its slice from the lse of the whole
vocabulary, and the gradient of the hidden states [N, D] is summed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_cce import ops

_IGNORED = -100  # never the number of a word within a slice, as the user's ignore_index may be


class Slice(NamedTuple):
    """What this process holds of the vocabulary."""

    group: Any  # the processes that share it
    first: int  # number of the first word that is here
    rows: int  # V_r; may be 0
    words: int  # V


def is_dtensor(value: object) -> bool:
    """True for a DTensor; asks nothing of a plain tensor but its type."""
    return type(value) is not Tensor and type(value) is not nn.Parameter and hasattr(value, "device_mesh")


def why_not_share(hidden: Any, weight: Any, bias: Any = None) -> str | None:
    """Why these are not the hidden states, weight [V, D] and bias [V] or None of a head whose vocabulary is spread; or None.

    The hidden states must be a DTensor too: they alone say that the processes hold the same ones. The weight of FSDP2 looks the
    same, and there every process has tokens of its own.
    """
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None and name == "bias":
            continue
        if not is_dtensor(value) or not _split_first(value):
            return f"the head's {name} is not split over its first dimension ({_layout(value)})"
        if not is_dtensor(hidden) or value.device_mesh != hidden.device_mesh or not _replicated(hidden):
            return f"the hidden states are not replicated over the processes that share the head's {name} ({_layout(hidden)})"
        if not value.is_floating_point():
            return f"the head's {name} is quantised to {value.dtype}"
        if local(value).shape[0] != slice_of(value).rows:
            return f"the head's {name} is not split as torch splits it"
    return None


def slice_of(weight: Any) -> Slice:
    """The slice of the vocabulary that belongs to this process, of a DTensor [V, …]: equal chunks, the last ones shorter."""
    mesh, words = weight.device_mesh, weight.shape[0]
    chunk = -(-words // mesh.size())
    first = min(words, chunk * mesh.get_local_rank())
    return Slice(mesh.get_group(), first, min(words, first + chunk) - first, words)


def local(value: Any) -> Tensor:
    """What this process holds of a DTensor, without a gradient; a plain tensor itself."""
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


def replicated(hidden: Tensor, weight: Any) -> Any:
    """Plain hidden states that every process has, as what multiplies with ``weight``: a DTensor where that is one."""
    if not is_dtensor(weight) or is_dtensor(hidden):
        return hidden
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)


def gathered(logits: Any) -> Tensor:
    """All logits [..., V] as a plain tensor on every process."""
    if not is_dtensor(logits):
        return logits
    from torch.distributed.tensor import Replicate

    return logits.redistribute(placements=[Replicate()]).to_local()


def logit_stats(
    hidden: Any,  # DTensor [N, D], replicated
    weight: Any,  # DTensor [V, D], split over V
    bias: Any,  # DTensor [V], split likewise, or None
    labels: Tensor,  # [N], in [0, V) or ignored
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    want_mean: bool,
    want_entropy: bool,
    want_log_sum_sq: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, ...]:
    """(lse, label_logit, mean_logit, entropy, log_sum_sq) of the whole vocabulary, as of ``hf_cce::logit_stats``.

    The same on every process, and all but the last differentiable: each process must go backward from the same loss.
    """
    return _Statistics.apply(
        hidden.to_local(), weight.to_local(), None if bias is None else bias.to_local(), labels, ignore_index,
        (logit_scale, softcap), (want_mean, want_entropy, want_log_sum_sq), slice_of(weight), memory_budget, implementation,
    )  # fmt: skip


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        form: tuple[float, float],
        wanted: tuple[bool, bool, bool],
        part: Slice,
        *how: Any,
    ) -> tuple[Tensor, ...]:
        want_mean, want_entropy, want_log_sum_sq = wanted
        valid = labels != ignore_index
        here = valid & (labels >= part.first) & (labels < part.first + part.rows)
        # A label that lives elsewhere gets any word of this slice; ``here`` takes out what that would add.
        words = torch.where(here, labels - part.first, 0).masked_fill_(~valid, _IGNORED)
        if part.rows:
            lse, at_label, mean, entropy, log_sum_sq, _ = ops.logit_stats(
                hidden, weight, bias, words, _IGNORED, *form, *wanted, False, *how
            )
        else:
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            lse = torch.full(labels.shape, -math.inf, dtype=wide, device=labels.device)
            at_label = mean = entropy = log_sum_sq = torch.zeros_like(lse)

        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
        top.masked_fill_(top == -math.inf, 0.0)
        mass = (lse - top).exp_()
        sums = [mass, torch.where(here, at_label, 0)]
        if want_mean:
            sums.append(mean * (part.rows / part.words))
        if want_entropy:  # the mass times the mean of z − top under it
            sums.append(torch.where(mass > 0, mass * (lse - top - entropy), 0))
        if want_log_sum_sq:
            sums.append(torch.where(mass > 0, mass.square() * log_sum_sq.exp(), 0))
        total = torch.stack(sums)
        dist.all_reduce(total, dist.ReduceOp.SUM, part.group)
        mass, at_label, *rest = total.unbind()
        log_mass, nothing = mass.log(), lse.new_empty(0)

        def of_valid(x: Tensor) -> Tensor:
            return torch.where(valid, x, 0)

        lse = of_valid(top + log_mass)
        mean = of_valid(rest.pop(0)) if want_mean else nothing
        entropy = of_valid(log_mass - rest.pop(0) / mass) if want_entropy else nothing
        log_sum_sq = of_valid(rest.pop(0).log() - 2 * log_mass) if want_log_sum_sq else nothing
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(log_sum_sq)
        ctx.save_for_backward(hidden, weight, bias, words, here, lse, entropy if want_entropy else None)
        ctx.form, ctx.part, ctx.how = form, part, how
        return lse, of_valid(at_label), mean, entropy, log_sum_sq

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, words, here, lse, entropy = ctx.saved_tensors
        grad_lse, grad_label, grad_mean, grad_entropy = (None if g is None else g.contiguous() for g in grads[:4])
        needs, part = ctx.needs_input_grad[:3], ctx.part
        if part.rows:
            gradients = ops.logit_stats_backward(
                torch.zeros_like(lse) if grad_lse is None else grad_lse,
                torch.zeros_like(lse) if grad_label is None else torch.where(here, grad_label, 0),
                # The operator takes it for the mean over this slice, and divides by its words.
                None if grad_mean is None else grad_mean * (part.rows / part.words),
                grad_entropy, hidden, weight, bias, words, lse, entropy, _IGNORED, *ctx.form, *needs, *ctx.how,
            )  # fmt: skip
        else:
            gradients = (torch.zeros_like(hidden), torch.zeros_like(weight), None if bias is None else bias * 0)
        if needs[0]:
            # Detached for create_graph=True, with which the operator has recorded that it refuses a second derivative.
            dist.all_reduce(gradients[0].detach(), dist.ReduceOp.SUM, part.group)
        return (*(x if need else None for x, need in zip(gradients, needs, strict=True)), *[None] * 7)


def _split_first(value: Any) -> bool:
    from torch.distributed.tensor import Shard

    (first, *more) = value.placements
    return not more and type(first) is Shard and first.dim == 0


def _replicated(value: Any) -> bool:
    return all(placement.is_replicate() for placement in value.placements)


def _layout(value: Any) -> str:
    return f"a DTensor with {tuple(value.placements)}" if is_dtensor(value) else f"a {type(value).__name__}"
