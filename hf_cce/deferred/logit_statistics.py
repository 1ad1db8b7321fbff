"""Statistics of deferred logits, such as log-probabilities and entropy, and the logits of chosen token ids.

A pass over the head computes the statistics (``hf_cce.loss.linear_log_probs``) and is reused until the backward pass. Gathered
logits are cheap products; their gradient is computed by a pass over the head if there is one.

Shapes: hidden_states [..., D], weight [V, D], logits [..., V].
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_cce.deferred.lazy_tensor import graph_boundary, share_gradient
from hf_cce.deferred.recipe import Recipe
from hf_cce.loss import LogProbs, has_few_tokens, linear_log_probs, rounds_logits
from hf_cce.sharded import is_dtensor
from hf_cce.spec import accumulation_dtype

NO_LABEL = -(2**31)  # an ``ignore_index`` that is never a token id
_recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Pass(NamedTuple):
    """A pass over the head. It is kept until the backward pass, for other statistics of the same logits and their gradients."""

    identity: tuple[Any, ...]  # of the logits
    found: LogProbs
    labels: Tensor  # [...]; only the backward pass needs them, so they may be written later
    has_labels: bool  # False: nobody has asked for log-probabilities, so the labels are zeros
    mark: object  # of this pass alone; the id of ``found`` may be that of a later pass
    split: Any = None  # the split of the logits whose parts share this pass; each part writes its own labels
    parts: set[int] | None = None  # indices of the parts that have written their labels


class Gathered(NamedTuple):
    """Gathered logits whose gradient the next pass of statistics of the same logits is to compute."""

    identity: tuple[Any, ...]
    logits: Tensor  # [..., K]
    labels: Tensor  # [...], one token id of each token
    is_label: Tensor | None  # [..., K], True for the entries of ``logits`` that belong to ``labels``; None: all
    rows: Any = None  # index of the tokens of ``logits`` among those of ``labels``; None: the same tokens


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
        return _pass_over_head(r, ids, wanted) if found is None else found
    # Gathered logits of the same or of a larger tensor get their gradient from this pass
    gathered = r.call.gathered if wanted.get("logsumexp") and torch.is_grad_enabled() else None
    source = None if gathered is None else _ancestor(r, gathered.identity)
    if source is None:
        if not is_part:
            return _pass_over_head(r, None, wanted)
        parent, op = r.part_of  # type: ignore[misc]
        source, gathered = (parent.replace(ops=r.ops), [op]), None
    whole, ops = source
    found = _pass_over_head(whole, None, wanted, gathered)
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
    """Return the statistics of one part from a pass over all of them; None if its labels were written before.

    Only the backward pass needs the labels, so each part writes its own when they are known.
    """
    (parent, op), (how, index), call = r.part_of, r.split, r.call  # type: ignore[misc]
    whole, ids = parent.replace(ops=r.ops), ids.to(r.hidden_states.device)
    identity, made = _identity(whole), None
    for each in call.shared_passes:
        if each.split == how and _is_same(each.identity[:4], identity[:4]):
            if not _is_same(each.identity, identity):  # other operations, such as a temperature of each part
                return None
            if index not in each.parts and not (entropy and each.found.entropy is None):
                made = each
    if made is None:
        labels = torch.zeros(whole.hidden_states.shape[:-1], dtype=torch.long, device=ids.device)
        _pass_over_head(whole, labels, {"logsumexp": True, "entropy": entropy})
        made = call.last_pass = call.last_pass._replace(split=how, parts=set())
        call.shared_passes.append(made)
    made.parts.add(index)
    valid, found = ids != NO_LABEL, made.found
    labels = ids.masked_fill(~valid, 0)

    def part(x: Tensor) -> Tensor:
        return op(x.unsqueeze(-1)).squeeze(-1)

    with torch.no_grad():  # .data: autograd need not know
        logits = _products_of_ids(r, labels.unsqueeze(-1), found.logsumexp.dtype).squeeze(-1)
        part(made.labels.data).copy_(labels)
        part(found.log_probs.data).copy_(logits - part(found.logsumexp))
    parts = (x if x is None else part(graph_boundary(r, x, made.mark)).where(valid, 0) for x in found)
    return LogProbs(*parts)  # type: ignore[arg-type]


def _pass_over_head(r: Recipe, ids: Tensor | None, wanted: dict[str, Any], gathered: Any = None) -> LogProbs:
    """See ``compute_log_probs``. A new pass also computes the gradient of ``gathered`` logits."""
    identity, owner, last = _identity(r), r.call.owner if r.leaves else None, r.call.last_pass
    if last is not None and not _is_same(last.identity, identity):
        last = None
    if owner is not None and ids is None and wanted.get("entropy"):
        owner.expects_entropy = last is not None
    lacking = last is None or any(is_wanted and getattr(last.found, name) is None for name, is_wanted in wanted.items())
    if lacking or ids is not None:
        if owner is not None and torch.is_grad_enabled() and not wanted.get("entropy"):
            wanted["entropy"], owner.expects_entropy = owner.expects_entropy, False  # until it is asked for again
        last = _make_pass(r, identity, ids, wanted, gathered, last)
    return LogProbs(*(x if x is None else graph_boundary(r, x, last.mark) for x in last.found))  # type: ignore[arg-type]


def _make_pass(r: Recipe, identity: Any, ids: Tensor | None, wanted: dict[str, Any], gathered: Any, last: Any) -> Pass:
    """Make and store a pass, which also computes the gradients of ``gathered`` and of ``last``, a pass of the same logits."""
    ids = ids if gathered is None else gathered.labels
    if last is not None and last.parts is not None:
        wanted["logsumexp"] = True  # as in ``last``, in whose place this pass is reused
    labels = torch.zeros(r.hidden_states.shape[:-1], dtype=torch.long) if ids is None else ids
    labels = labels.to(r.hidden_states.device)
    found = linear_log_probs(labels=labels, ignore_index=NO_LABEL, **r.loss_arguments(), **wanted)
    made = Pass(identity, found, labels, ids is not None, object())
    if torch.is_grad_enabled() and r.leaves:
        r.call.last_pass = made
    earlier, lse = None if last is None else last.found.logsumexp, found.logsumexp
    if earlier is not None and lse is not None and lse.requires_grad:
        share_gradient(earlier, lse, made.mark)
    if gathered is not None:
        _share_with(found, gathered, made.mark)
    return made


def _share_with(found: Any, gathered: Gathered, of_pass: object) -> None:
    """Let the pass of ``found``, whose labels are those of ``gathered``, compute the gradient of these logits."""
    label_logits = (found.log_probs + found.logsumexp).unsqueeze(-1).to(gathered.logits.dtype)
    label_logits = label_logits if gathered.rows is None else label_logits[gathered.rows]
    share_gradient(gathered.logits, label_logits, of_pass, gathered.is_label)


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
    """Compute the logits [..., K] of the token ids ``index`` [..., K] in ``dtype``, and note the largest of each token."""
    logits = _products_of_ids(r, index, dtype)
    if logits.requires_grad:
        _note_gathered(r, Gathered(_identity(r), logits, *_largest(logits, index)))
    return graph_boundary(r, logits, object())


def gather_log_probs(r: Recipe, index: Tensor) -> Tensor:
    """Compute the log-probabilities [..., K] of ``index`` [..., K]; for the largest of each token, see ``_note_gathered``."""
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


def _note_gathered(r: Recipe, gathered: Gathered) -> None:
    """Let one pass compute the gradients of ``gathered`` logits and of a logsumexp from which they are subtracted.

    For probable tokens the two nearly cancel, and would be lost if each was rounded by itself.
    """
    r.call.gathered, before = gathered, r.call.last_pass
    same = before is not None and _is_same(before.identity, gathered.identity)
    if same and not before.has_labels and before.found.logsumexp is not None:
        before.labels.data.copy_(gathered.labels)
        r.call.last_pass = before._replace(has_labels=True)
        _share_with(before.found, gathered, before.mark)


def note_gathered_rows(whole: Recipe, part: Recipe, rows: tuple[Tensor, ...]) -> None:
    """Repeat for ``whole`` what ``_gather`` noted for its ``rows``; with two ids of a token, only one is noted."""
    gathered = whole.call.gathered
    if gathered is not None and _is_same(gathered.identity, _identity(part)):
        labels = gathered.labels.new_zeros(whole.hidden_states.shape[:-1]).index_put(rows, gathered.labels)
        is_label = (labels[rows] == gathered.labels).unsqueeze(-1)
        _note_gathered(whole, Gathered(_identity(whole), gathered.logits, labels, is_label, rows))


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
