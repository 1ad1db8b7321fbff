"""Statistics of deferred logits, such as log-probabilities and entropy, and the logits of chosen token ids.

A pass over the head computes the statistics (``hf_cce.loss.linear_log_probs``) and is reused until the backward pass. Gathered
logits are cheap products. The backward pass computes the gradients of all results of the same logits in one pass if it can, see
``Origin.merge``.

Shapes: hidden_states [..., D], weight [V, D], logits [..., V].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_cce.deferred.lazy_tensor import SourceGrad, graph_boundary
from hf_cce.deferred.recipe import Recipe
from hf_cce.loss import LogProbs, has_few_tokens, linear_log_probs, rounds_logits
from hf_cce.sharded import is_dtensor
from hf_cce.spec import accumulation_dtype

NO_LABEL = -(2**31)  # an ``ignore_index`` that is never a token id
_recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


@dataclass(eq=False)
class Origin:
    """What has computed results: a pass over the head, or products with its rows for some token ids."""

    identity: tuple[Any, ...]  # of the logits
    labels: Tensor  # [...], one token id of each token. Only the backward pass needs those of a pass: they may be written later
    has_labels: bool = True  # False: nobody has asked for log-probabilities, so the labels are zeros
    ids: Tensor | None = None  # [..., K], of the products; ``labels`` are those of the largest logits
    rows: Any = None  # index of the tokens of ``ids`` among those of ``labels``; None: the same tokens

    @staticmethod
    def merge(found: dict[Origin, dict[str, SourceGrad]]) -> None:
        """Let one pass compute the gradients of all logsumexps of the same logits, and of logits from which they are subtracted.

        For probable tokens the two nearly cancel, and would be lost if each was rounded by itself.
        """
        used = {x: {name for name, result in found[x].items() if result.grad is not None} for x in reversed(found)}
        groups: dict[Any, list[Origin]] = {}  # of a loop over slices, there may be hundreds
        for x in used:
            groups.setdefault((x.identity[1].shape, x.identity[1].storage_offset()), []).append(x)
        for group in groups.values():
            passes = [x for x in group if used[x] and "logsumexp" in found[x]]
            while passes:
                alike = [x for x in group if used[x] and _is_same(x.identity, passes[0].identity)]
                gathered = [x for x in alike if x.ids is not None]
                several, passes = [x for x in passes if x in alike], [x for x in passes if x not in alike]
                # If possible one whose labels can be written, or else one that has to be made anyway
                chosen = min(several, key=lambda x: (x.has_labels and len(gathered) > 0, used[x] == {"logsumexp"}))
                for other in (found[x]["logsumexp"] for x in several if x is not chosen):
                    found[chosen]["logsumexp"].add(other.grad)
                    other.grad = None
                for i, each in enumerate(gathered):
                    chosen._take(found[chosen], each, found[each]["logits"], is_free=i == 0 and not chosen.has_labels)

    def _take(self, results: dict[str, SourceGrad], gathered: Origin, logits: Any, is_free: bool) -> None:
        """Add the gradient of the gathered ``logits`` with the labels of this pass to that of the label's logits."""
        if is_free:
            self.labels.data.copy_(gathered.labels)
        labels = self.labels if gathered.rows is None else self.labels[gathered.rows]
        is_label: Any = gathered.ids == labels.unsqueeze(-1)
        grad = logits.grad.to(results["logsumexp"].source.dtype).where(is_label, 0.0).sum(-1)
        all_are_labels = is_free and gathered.rows is None and is_label.shape[-1] == 1
        logits.grad = None if all_are_labels else logits.grad.masked_fill(is_label, 0.0)
        if gathered.rows is not None:
            grad = grad.new_zeros(self.labels.shape).index_put(gathered.rows, grad, accumulate=True)
        for name in ("log_probs", "logsumexp"):  # their sum is the label's logit
            results[name].add(grad)


class Pass(NamedTuple):
    """A pass over the head, which is kept until the backward pass, for other statistics of the same logits."""

    origin: Origin
    found: LogProbs
    is_subtracted: bool = False  # the logsumexp was subtracted from the logits, so log p may be computed in this way
    split: Any = None  # the split of the logits whose parts share this pass; each part writes its own labels
    parts: set[int] | None = None  # indices of the parts that have written their labels


def _results(r: Recipe, made: Pass) -> LogProbs:
    """Return what a pass has found, from which the results of a loss are computed."""
    found = ((name, getattr(made.found, name)) for name in LogProbs._fields)
    return LogProbs(*(x if x is None else graph_boundary(r, x, made.origin, name) for name, x in found))  # type: ignore[arg-type]


def _identity(r: Recipe) -> tuple[Any, ...]:
    """Return the objects that determine the logits and who gets their gradient; casts do not change statistics."""
    return (r.leaves, *r.operands, *(op for op in r.meaning.logit_ops if op[0] != "to"))


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and a[0] is b[0] and all(map(_is_same_object, a[1:], b[1:]))


def _is_same_object(a: Any, b: Any) -> bool:
    """Return True for one object, two views of the same memory, as of ``logits[:, :-1]`` written twice, or equal operations."""
    if a is b or type(a) is not Tensor or type(b) is not Tensor:
        return a is b or (type(a) is type(b) is tuple and a[0] == b[0] != "mask" and a[1] == b[1])
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def compute_log_probs(r: Recipe, ids: Tensor | None, **wanted: Any) -> LogProbs:
    """Call ``linear_log_probs``. Its result is cached until the backward pass, for statistics of the same logits.

    If ``r`` is a part of logits whose other tokens are likely to be asked for, too, this pass computes all of them. A training
    loop that asks for log-probabilities and then for the entropy gets both in one pass from its second step on.
    """
    if wanted.get("mean_logit") and r.leaves and not is_dtensor(r.weight) and r.meaning.form[1] is None:  # type: ignore[index]
        mean, wanted["mean_logit"] = _mean_logit(r), False  # needs no pass without a softcap
        others = compute_log_probs(r, ids, **wanted) if any(wanted.values()) else LogProbs(mean)  # required, not used
        return others._replace(mean_logit=mean)
    is_part = is_one_of_many(r) and {name for name, value in wanted.items() if value} <= {"logsumexp", "entropy"}
    if ids is not None:
        found = _log_probs_of_part(r, ids, wanted.get("entropy", False)) if is_part else None
        if found is None and _can_label(r, wanted):
            r.call.last_pass.origin.has_labels = True
            found = _with_labels(r, r.call.last_pass, ids, lambda x: x)
        return _pass_over_head(r, ids, wanted) if found is None else found
    # For one gradient with gathered logits of the same or of a larger tensor, see ``Origin.merge``
    gathered = r.call.gathered if wanted.get("logsumexp") and torch.is_grad_enabled() else None
    source = None if gathered is None else _ancestor(r, gathered.identity)
    if source is None:
        if not is_part:
            return _pass_over_head(r, None, wanted)
        parent, op = r.part_of  # type: ignore[misc]
        source = parent.replace(ops=r.ops), [op]
    whole, ops = source
    found = _pass_over_head(whole, None, wanted)
    parts = (x if x is None else functools.reduce(lambda x, op: op(x), ops, x.unsqueeze(-1)).squeeze(-1) for x in found)
    return LogProbs(*parts)  # type: ignore[arg-type]


def _ancestor(r: Recipe, identity: tuple[Any, ...]) -> tuple[Recipe, list[Any]] | None:
    """Return the logits of this ``identity`` that ``r`` is a part of, and the operations that take this part; or None."""
    ops: list[Any] = []
    while not _is_same(_identity(r), identity):
        if r.part_of is None:
            return None
        whole, op = r.part_of
        r, ops = whole.replace(ops=r.ops), [op, *ops]  # such as a temperature, applied to this part only
    return r, ops


def is_one_of_many(r: Recipe) -> bool:
    """Return True if a loop over all parts of the logits is likely, as in ``for row in logits``."""
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in r.operands)
    if r.split is None or not trains or not r.leaves or is_dtensor(r.weight):
        return False
    whole = r.part_of[0]  # type: ignore[index]
    return not has_few_tokens(whole.hidden_states, whole.weight, r.call.config)


def _log_probs_of_part(r: Recipe, ids: Tensor, entropy: bool) -> LogProbs | None:
    """Return the statistics of one part from a pass over all of them; None if its labels were written before."""
    (parent, op), (how, index), call = r.part_of, r.split, r.call  # type: ignore[misc]
    whole = parent.replace(ops=r.ops)
    identity, made = _identity(whole), None
    for each in call.shared_passes:
        if each.split == how and _is_same(each.origin.identity[:4], identity[:4]):
            if not _is_same(each.origin.identity, identity):  # other operations, such as a temperature of each part
                return None
            if index not in each.parts and not (entropy and each.found.entropy is None):
                made = each
    if made is None:
        labels = torch.zeros(whole.hidden_states.shape[:-1], dtype=torch.long, device=r.hidden_states.device)
        _pass_over_head(whole, labels, {"logsumexp": True, "entropy": entropy})
        made = call.last_pass = call.last_pass._replace(split=how, parts=set())
        call.shared_passes.append(made)
    made.parts.add(index)
    return _with_labels(r, made, ids, lambda x: op(x.unsqueeze(-1)).squeeze(-1))


def _can_label(r: Recipe, wanted: dict[str, Any]) -> bool:
    """Return True if the last pass has what is ``wanted`` of these logits, but no labels yet."""
    last = r.call.last_pass
    if last is None or not last.is_subtracted or last.origin.has_labels or not torch.is_grad_enabled():
        return False
    known = all(getattr(last.found, name) is not None for name, is_wanted in wanted.items() if is_wanted)
    return known and not is_dtensor(r.weight) and _is_same(last.origin.identity, _identity(r))


def note_subtraction(r: Recipe) -> None:
    """Let log-probabilities of these logits, less their logsumexp, come from the pass that has computed the logsumexp."""
    last = r.call.last_pass
    if last is not None and _is_same(last.origin.identity, _identity(r)):
        r.call.last_pass = last._replace(is_subtracted=True)


def _with_labels(r: Recipe, made: Pass, ids: Tensor, part: Callable[[Tensor], Tensor]) -> LogProbs:
    """Write the labels ``ids`` of a ``part`` of the tokens into a pass: only its backward pass needs them."""
    ids, lse = ids.to(r.hidden_states.device), cast(Tensor, made.found.logsumexp)
    valid = ids != NO_LABEL
    labels = ids.masked_fill(~valid, 0)
    with torch.no_grad():  # .data: autograd need not know
        logits = _products_of_ids(r, labels.unsqueeze(-1), lse.dtype).squeeze(-1)
        part(made.origin.labels.data).copy_(labels)
        part(made.found.log_probs.data).copy_(logits - part(lse))
    parts = (x if x is None else part(x).where(valid, 0) for x in _results(r, made))
    return LogProbs(*parts)  # type: ignore[arg-type]


def _pass_over_head(r: Recipe, ids: Tensor | None, wanted: dict[str, Any]) -> LogProbs:
    """See ``compute_log_probs``."""
    identity, owner, last = _identity(r), r.call.owner if r.leaves else None, r.call.last_pass
    if last is not None and not _is_same(last.origin.identity, identity):
        last = None
    if owner is not None and ids is None and wanted.get("entropy"):
        owner.expects_entropy = last is not None
    lacking = last is None or any(is_wanted and getattr(last.found, name) is None for name, is_wanted in wanted.items())
    if lacking or ids is not None:
        if owner is not None and torch.is_grad_enabled() and not wanted.get("entropy"):
            wanted["entropy"], owner.expects_entropy = owner.expects_entropy, False  # until it is asked for again
        if ids is None and last is not None and last.found.logsumexp is not None:
            wanted["logsumexp"] = True  # as in ``last``, in whose place this pass is reused
        device = r.hidden_states.device
        labels = (
            torch.zeros(r.hidden_states.shape[:-1], dtype=torch.long, device=device) if ids is None else ids.to(device)
        )
        found = linear_log_probs(labels=labels, ignore_index=NO_LABEL, **r.loss_arguments(), **wanted)
        last = Pass(Origin(identity, labels, ids is not None), found)
        if torch.is_grad_enabled() and r.leaves:
            r.call.last_pass = last
    return _results(r, last)


def _mean_logit(r: Recipe) -> Tensor:
    """Compute the mean logit [...]: the product of the hidden states with the weight's mean row, by blocks of tokens."""
    arguments, acc_dtype = r.loss_arguments(), accumulation_dtype(r.hidden_states.dtype)
    hidden, bias = arguments["hidden_states"], arguments["bias"]
    mean = arguments["weight"].mean(0, dtype=acc_dtype)
    rows = max(1, r.scratch_bytes() // (4 * acc_dtype.itemsize * hidden.shape[-1]))
    parts = hidden.reshape(-1, hidden.shape[-1]).split(rows)
    products = [_recomputed(lambda h, mean: h.to(acc_dtype) @ mean, part, mean) for part in parts]
    found = torch.cat(products).view(hidden.shape[:-1])
    return arguments["logit_scale"] * (found if bias is None else found + bias.mean(dtype=acc_dtype))


def gather_logits(r: Recipe, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the logits [..., K] of the token ids ``index`` [..., K] in ``dtype``."""
    logits = _products_of_ids(r, index, dtype)
    if not logits.requires_grad:
        return logits
    # Cloned, because the index may change before the backward pass
    r.call.gathered = Origin(_identity(r), _largest(logits, index)[0].clone(), ids=index.to(logits.device, copy=True))
    return graph_boundary(r, logits, r.call.gathered, "logits")


def gather_log_probs(r: Recipe, index: Tensor) -> Tensor:
    """Compute the log-probabilities [..., K] of ``index`` [..., K]; that of the largest of each token by the pass itself."""
    logits = _products_of_ids(r, index, accumulation_dtype(r.weight.dtype))
    labels, is_label = _largest(logits, index)
    found: Any = compute_log_probs(r, labels, logsumexp=True)
    return found.log_probs.unsqueeze(-1).where(is_label, logits - found.logsumexp.unsqueeze(-1))


def _largest(logits: Tensor, index: Tensor) -> tuple[Tensor, Any]:
    """Return the token ids [...] of the largest ``logits`` [..., K] among ``index`` [..., K], and a mask of them if K > 1."""
    index, k = index.to(logits.device), index.shape[-1]
    if k == 1:
        return index.squeeze(-1), None
    largest = logits.detach().argmax(-1, keepdim=True)
    return index.gather(-1, largest).squeeze(-1), torch.arange(k, device=logits.device) == largest


def note_gathered_rows(whole: Recipe, part: Recipe, rows: tuple[Tensor, ...]) -> None:
    """Let a pass of ``whole`` compute the gradient of the logits gathered last, if they are those of its ``rows``."""
    gathered = whole.call.gathered
    if gathered is not None and _is_same(gathered.identity, _identity(part)):
        gathered.identity, gathered.rows = _identity(whole), rows  # with two ids of a token, only one is a label
        gathered.labels = gathered.labels.new_zeros(whole.hidden_states.shape[:-1]).index_put(rows, gathered.labels)


def _products_of_ids(r: Recipe, index: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``gather_logits``."""
    arguments = r.loss_arguments()
    hidden, weight, bias = arguments["hidden_states"], arguments["weight"], arguments["bias"]
    scale, cap = arguments["logit_scale"], arguments["softcap"]
    ids = index.to(hidden.device).reshape(math.prod(index.shape[:-1]), index.shape[-1])
    found = _ProductsOfIds.apply(hidden.reshape(-1, hidden.shape[-1]), weight, ids, r.scratch_bytes())
    found = found if bias is None else found + bias.to(found.dtype)[ids]
    if rounds_logits(hidden, weight, arguments["config"]):  # as do the statistics, with which these may be compared
        found = found.to(hidden.dtype)
    found = scale * found.to(dtype)
    return (found if cap is None else cap * (found / cap).tanh()).view(index.shape)


class _ProductsOfIds(torch.autograd.Function):
    """Products [N, K] of the hidden states [N, D] with the rows ``ids`` [N, K] of the weight; float32 for 16-bit inputs.

    The weight's gradient is summed in float32: all tokens may have the same id. ``scratch_bytes`` limits the temporaries.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, scratch_bytes: int) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        ctx.scratch_bytes, acc_dtype = scratch_bytes, accumulation_dtype(hidden.dtype)
        rows = max(1, scratch_bytes // (2 * acc_dtype.itemsize * max(1, ids.shape[-1]) * hidden.shape[-1]))
        blocks = zip(hidden.split(rows), ids.split(rows), strict=True)
        found = [F.embedding(part, weight).to(acc_dtype) @ h.to(acc_dtype).unsqueeze(-1) for h, part in blocks]
        return torch.cat(found).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (hidden, weight, ids), room = ctx.saved_tensors, ctx.scratch_bytes // grad.element_size()
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = max(1, room // (2 * max(1, ids.shape[-1]) * hidden.shape[-1]))
            blocks = zip(grad.split(rows), ids.split(rows), strict=True)
            found = [g.unsqueeze(1) @ F.embedding(part, weight).to(grad.dtype) for g, part in blocks]
            grad_hidden = torch.cat([x.squeeze(1).to(hidden.dtype) for x in found])
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            columns = max(1, room // (2 * ids.numel() + len(weight)))
            for part, h in zip(grad_weight.split(columns, 1), hidden.split(columns, 1), strict=True):
                terms = grad.unsqueeze(-1) * h.to(grad.dtype).unsqueeze(1)
                part.copy_(terms.new_zeros(part.shape).index_add_(0, ids.flatten(), terms.flatten(0, 1)))
        return grad_hidden, grad_weight, None, None
