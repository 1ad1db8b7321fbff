"""The one table of what deferred logits [..., V] answer without being multiplied out.

``ANSWERS`` holds a function for each name of a torch function or method: it records an operation, or computes a result from
hidden states and weight. A function that returns NotImplemented asks for real logits, as does every name that is not here.
Results are float32 (float64 for float64 logits), also where torch would round them to the dtype of the logits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_cce.config import CCEConfig
from hf_cce.deferred.lazy_tensor import LazyTensor
from hf_cce.deferred.operations import (
    apply_ops,
    cast_targets,
    closed_form,
    distribution,
    forbidden_ids,
    per_token_id,
    split_index,
)
from hf_cce.deferred.recipe import Recipe
from hf_cce.loss import LogProbs, linear_cross_entropy, linear_log_probs
from hf_cce.sharded import is_dtensor

Answers = dict[str, Callable[..., Any]]
ANSWERS: Answers = {}
# What may be asked of logits whose classes come first
CLASS_FIRST = {
    "to", "float", "double", "half", "bfloat16", "type_as", "clone", "contiguous", "detach", "data", "mul", "multiply",
    "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__", "tanh", "log_softmax", "cross_entropy", "nll_loss",
}  # fmt: skip
LARGEST_TOPK = 64
NO_LABEL = -(2**31)  # an ``ignore_index`` that no token id can be


def answers(*names: str) -> Callable[[Any], Any]:
    """Enter the function into the table under ``names``."""

    def enter(function: Any) -> Any:
        ANSWERS.update(dict.fromkeys(names, function))
        return function

    return enter


# What is recorded


@answers("to")
def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    targets = cast_targets(args, kwargs)
    if targets is None:
        return NotImplemented
    for target in targets:
        x = _cast(x, target)
    return x


def _cast(x: Any, target: torch.dtype | torch.device) -> Any:
    if target == (x.dtype if isinstance(target, torch.dtype) else x.device):
        return x  # as torch does: the same tensor
    return _elementwise(x, ("to", target))


ANSWERS["float"] = lambda x: _cast(x, torch.float32)
ANSWERS["double"] = lambda x: _cast(x, torch.float64)
ANSWERS["half"] = lambda x: _cast(x, torch.float16)
ANSWERS["bfloat16"] = lambda x: _cast(x, torch.bfloat16)
ANSWERS["type_as"] = lambda x, other: _to(x, dtype=other.dtype, device=other.device)
ANSWERS["contiguous"] = lambda x, *args, **kwargs: NotImplemented if args or kwargs else x
ANSWERS["data"] = lambda x: x._expose()
ANSWERS["detach"] = lambda x: x._detached()


def _elementwise(x: Any, op: tuple[str, Any], nonlinear: bool = False) -> Any:
    made = x._derive(lambda z: apply_ops((op,), z), lambda r: r.then(op), nonlinear=nonlinear)
    made.base = x.base
    return made


@answers("clone")
def _clone(x: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else x._derive(lambda z: z.clone(), lambda r: r.then())


@answers("view_as")
def _view_as(x: Any, other: Any) -> Any:
    return _reshape(x, *other.shape)


@answers("view", "reshape")
def _reshape(x: Any, *shape: Any, **named: Any) -> Any:
    """[..., V] to other token dimensions; a shape that does not end in V needs real logits."""
    if "shape" in named:
        shape = (named.pop("shape"),)
    if named or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    ends_in_vocabulary = len(sizes) > 0 and sizes[-1] == x.shape[-1]
    if len(sizes) > 0 and sizes[-1] == -1:
        ends_in_vocabulary = math.prod(sizes[:-1]) == math.prod(x.shape[:-1])
    if not ends_in_vocabulary:
        return NotImplemented
    return _of_tokens(x, lambda z: z.reshape(*sizes[:-1], z.shape[-1]))


@answers("flatten")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = end_dim % x.ndim
    return NotImplemented if last == x.ndim - 1 else _of_tokens(x, lambda z: z.flatten(start_dim, last))


@answers("squeeze")
def _squeeze(x: Any, dim: Any = None) -> Any:
    known = isinstance(dim, int) and dim % x.ndim != x.ndim - 1
    return _of_tokens(x, lambda z: z.squeeze(dim % x.ndim)) if known else NotImplemented


@answers("unsqueeze")
def _unsqueeze(x: Any, dim: int) -> Any:
    position = dim % (x.ndim + 1)
    return NotImplemented if position == x.ndim else _of_tokens(x, lambda z: z.unsqueeze(position))


def _of_tokens(x: Any, op: Callable[[Tensor], Tensor]) -> Any:
    """``op`` of the tokens' dimensions, which hidden states and logits have in common: a view."""
    return x._derive(op, lambda r: r._replace(hidden_states=op(r.hidden_states)))


@answers("transpose", "permute")
def _class_first(x: Any, *dims: Any) -> Any:
    """[B, S, V] to [B, V, S]."""
    dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    found = [dim % x.ndim for dim in dims] if all(isinstance(dim, int) for dim in dims) else []
    if x.ndim != 3 or (found != [0, 2, 1] and sorted(found) != [1, 2]) or torch.compiler.is_compiling():
        return NotImplemented
    return x._derive(lambda z: z.transpose(1, 2), lambda r: r._replace(class_first=True))


@answers("__getitem__")
def _index(x: Any, key: Any) -> Any:
    if isinstance(key, tuple) and len(key) == x.ndim and all(map(_is_ids, key)):
        *tokens, ids = torch.broadcast_tensors(*(torch.as_tensor(each, device=x.device) for each in key))
        ids = torch.where(ids < 0, ids + x.shape[-1], ids).long()
        found = _gather(_of_tokens(x, lambda z: z[tuple(tokens)]), -1, ids.unsqueeze(-1))
        return found if found is NotImplemented else found.squeeze(-1)
    split = split_index(key, x.ndim)
    if split is None:
        return NotImplemented
    tokens, vocabulary = split
    if vocabulary is None:
        return _of_tokens(x, lambda z: z[tokens])
    if x.recipe.forbidden() or is_dtensor(x.recipe.weight) or distribution(x.recipe.ops):
        return NotImplemented  # its ids are numbered otherwise, or a softmax is of all of them
    part = vocabulary
    return x._derive(
        lambda z: z[key],
        lambda r: r.with_parts(r.hidden_states[tokens], r.weight[part], None if r.bias is None else r.bias[part]),
    )


def _is_ids(key: Any) -> bool:
    if isinstance(key, Tensor):
        return not key.is_floating_point() and key.dtype not in (torch.bool, torch.uint8)
    return isinstance(key, range)


def _parts(x: Any, sizes: Any, dim: int, name: str = "split") -> Any:
    """Along the tokens, as views."""
    if dim % x.ndim == x.ndim - 1:
        return NotImplemented
    parts = getattr(torch.arange(x.shape[dim]), name)(sizes)
    before = (slice(None),) * (dim % x.ndim)
    ends = [0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()]
    return tuple(_index(x, (*before, slice(*pair))) for pair in itertools.pairwise(ends))


ANSWERS["chunk"] = lambda x, chunks, dim=0: _parts(x, chunks, dim, "chunk")
ANSWERS["split"] = lambda x, split_size=None, dim=0: _parts(x, split_size, dim)


@answers("unbind")
def _unbind(x: Any, dim: int = 0) -> Any:
    if x.ndim == 1 or dim % x.ndim == x.ndim - 1:
        return NotImplemented
    before = (slice(None),) * (dim % x.ndim)
    return tuple(_index(x, (*before, i)) for i in range(x.shape[dim]))


@answers("__setitem__")
def _forbid(x: Any, key: Any, value: Any) -> Any:
    """Words set to the smallest number at every token (Chameleon's image tokens) have probability zero from now on."""
    known = not torch.compiler.is_compiling() and torch.is_grad_enabled() and x._logits is None
    known = known and all(name in ("to", "forbid") for name, _ in x.recipe.ops) and not is_dtensor(x.recipe.weight)
    ids = forbidden_ids(key, value, x.shape, x.dtype) if known else None
    if ids is None:
        return NotImplemented
    x._check()
    x.recipe.family.append((torch.empty(0), -1))  # for its views, which do not know of it
    x.recipe = x.recipe.then(("forbid", (ids.to(x.recipe.weight.device), value)))
    return None


@answers("tanh")
def _tanh(x: Any) -> Any:
    return NotImplemented if x.recipe.forbidden() else _elementwise(x, ("tanh", None), nonlinear=True)


@answers("mul", "multiply", "__mul__", "__rmul__")
def _mul(x: Any, other: Any) -> Any:
    return _product(x, other) if isinstance(other, LazyTensor) else _scale(x, "mul", other)


@answers("div", "divide", "true_divide", "__truediv__")
def _div(x: Any, other: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _scale(x, "div", other)


@answers("neg", "negative", "__neg__")
def _neg(x: Any) -> Any:
    return _scale(x, "mul", -1)


def _scale(x: Any, name: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _elementwise(x, (name, value)) if is_number and not x.recipe.forbidden() else NotImplemented


@answers("add", "__add__", "__radd__")
def _add(x: Any, other: Any, **kwargs: Any) -> Any:
    """A bias per vocabulary entry, [V] or [1, V] of the same dtype, joins the head's own; anything else needs real logits."""
    bias = per_token_id(other, x)
    if bias is None or kwargs or x.recipe.ops or is_dtensor(x.recipe.weight):
        return NotImplemented
    # Under autocast Bart's is wider than the logits, which then become as wide
    dtype = x.dtype if x.recipe.cast is None else torch.promote_types(x.dtype, bias.dtype)
    if bias.dtype != dtype:
        return NotImplemented
    leaf = x._leaf(bias)

    def join(r: Recipe) -> Recipe:
        joined = leaf if r.bias is None else r.bias + leaf
        widened = () if dtype == x.dtype else (("to", dtype),)
        return r._replace(bias=joined, leaves=(*r.leaves, leaf)).then(*widened)

    return x._derive(lambda z: z.to(dtype), join, other=bias)


# Distributions, recorded


@answers("softmax")
def _softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _normalize(x, "softmax", dim, dtype)


@answers("log_softmax")
def _log_softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _normalize(x, "log_softmax", dim, dtype)


def _normalize(x: Any, name: str, dim: Any, dtype: torch.dtype | None) -> Any:
    """Over the vocabulary; autocast would make it of float32 logits."""
    vocabulary = 1 if x.recipe.class_first else x.ndim - 1
    if dim not in (vocabulary, vocabulary - x.ndim) or distribution(x.recipe.ops) or x.recipe.forbidden():
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = getattr(torch.zeros(1, dtype=x.dtype, device=x.device), name)(-1).dtype
    source = x if dtype is None else _cast(x, dtype)
    made = source._derive(lambda z: getattr(z, name)(dim), lambda r: r.then((name, None)), nonlinear=True)
    if not x.recipe.class_first:
        made.base = source
    return made


@answers("exp")
def _exp(x: Any) -> Any:
    return _of_distribution(x, "exp", "log p")


@answers("log")
def _log(x: Any) -> Any:
    return _of_distribution(x, "log", "p")


def _of_distribution(x: Any, name: str, kind: str) -> Any:
    found = distribution(x.recipe.ops)
    known = found is not None and found.kind == kind and found.factor == 1.0
    return _elementwise(x, (name, None), nonlinear=True) if known else NotImplemented


def _product(x: Any, other: Any) -> Any:
    """p · log p, as entropies are written, or p · z, of the same logits."""
    base = x.base if x.base is not None else getattr(other, "base", None)
    same = all(each is base or getattr(each, "base", None) is base for each in (x, other))
    if base is None or base._written or not same:
        return NotImplemented
    before = len(base.recipe.ops)
    op = ("product", (x.recipe.ops[before:], other.recipe.ops[before:]))
    found = distribution((*base.recipe.ops, op))
    hooked = any(getattr(each, "_backward_hooks", None) for each in (x, other))  # autograd goes past them
    alike = x.requires_grad == other.requires_grad == base.requires_grad  # neither factor is detached
    if found is None or found.kind is None or hooked or not alike:
        return NotImplemented
    return base._derive(lambda z: apply_ops((op,), z), lambda r: r.then(op), nonlinear=True)


# What is computed


@answers("cross_entropy")
def _cross_entropy(
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` of these logits [N, V] and integer labels [N], or of [B, V, S] and [B, S], by the fused loss.

    Probabilities as targets, class weights with label smoothing, and whatever has no closed form need real logits. Where every
    label is ignored the fused mean is zero, torch's is NaN.
    """
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    known = size_average is reduce is None and not (weight is not None and label_smoothing)
    return _loss(x, F.cross_entropy, target, reduction, options) if known else NotImplemented


@answers("nll_loss")
def _nll_loss(
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """``F.nll_loss`` of the log_softmax of logits: their cross entropy."""
    options = {"weight": weight, "ignore_index": ignore_index}
    found = distribution(x.recipe.ops)
    if found is None or found.kind != "log p" or found.factor != 1.0 or not (size_average is reduce is None):
        return NotImplemented
    return _loss(x, F.nll_loss, target, reduction, options)


def _loss(x: Any, function: Any, target: Any, reduction: str, options: dict[str, Any]) -> Any:
    found = distribution(x.recipe.ops)
    ops = x.recipe.ops if found is None or function is F.cross_entropy else found.logit_ops
    form, call, shape = closed_form(ops), x.recipe.call, (x.shape[0], *x.shape[2:])
    plain_target = isinstance(target, Tensor) and not target.is_floating_point() and target.shape == shape
    weight, ignore_index = options["weight"], options["ignore_index"]
    for _, (ids, _) in x.recipe.forbidden() if plain_target else ():
        if options.get("label_smoothing") or torch.isin(target, ids.to(target.device)).any():
            form = None  # the number written there is a part of the loss
    if form is None or x.ndim != 2 + x.recipe.class_first or not plain_target or not _is_class_weight(weight, x):
        return NotImplemented

    def fused(r: Recipe) -> tuple[Tensor]:
        labels, operands = target.to(r.hidden_states.device), r._replace(ops=ops).operands()
        more = {name: value for name, value in options.items() if name != "weight"}
        with r.without_autocast():
            sums = None if options.get("label_smoothing") or is_dtensor(r.weight) else call.token_sums
            if sums is not None:
                operands |= {"filter_state": call.filter_state, "ignore_index": ignore_index}
                found = linear_log_probs(labels=labels, entropy=True, is_top1=True, **operands)
                sums.add(labels != ignore_index, found)
                return (_weighted(-found.log_probs, labels, reduction, options),)
            more |= {"reduction": "none" if weight is not None else reduction, "filter_state": r.call.filter_state}
            loss = linear_cross_entropy(labels=labels, **operands, **more)
        return (loss if weight is None else _weighted(loss, labels, reduction, options),)

    def native(z: Tensor) -> tuple[Tensor]:
        labels = target.to(z.device)
        loss = function(_wide(z), labels, reduction="none", **{**options, "weight": None})
        return (_weighted(loss, labels, reduction, options),)

    (loss,) = x._answer(fused, native)
    call.note_fused()
    if call.evaluation and reduction == "mean":  # Trainer leaves out batches of which this is NaN
        loss = torch.where((target != ignore_index).any().to(loss.device), loss, math.nan)
    return loss.to(x.device, torch.promote_types(loss.dtype, x.dtype))


def _is_class_weight(weight: Any, x: Any) -> bool:
    v = x.recipe.weight.shape[0]
    return weight is None or (weight.shape == (v,) and not weight.requires_grad and weight.dtype == x.dtype)


def _weighted(loss: Tensor, labels: Tensor, reduction: str, options: dict[str, Any]) -> Tensor:
    """The ``loss`` of each token times its class weight, reduced; the mean without class weights is 0 where there is no label."""
    valid, weight = labels != options["ignore_index"], options["weight"]
    if weight is not None:
        weights = weight.to(loss.device, loss.dtype)[labels.masked_fill(~valid, 0)] * valid
        loss = loss * weights
    if reduction == "none":
        return loss
    total = 1 if reduction == "sum" else valid.sum().clamp(min=1) if weight is None else weights.sum()
    return loss.sum() / total


def log_probs(x: Any, index: Tensor, row_mask: Tensor | None = None, **wanted: Any) -> LogProbs:
    """What ``linear_log_probs`` gives for the token ids ``index`` [...]; zero where ``row_mask`` [...] is.

    Where ``can_answer`` says no, nobody may ask.
    """
    labels = index if row_mask is None else index.masked_fill(row_mask.to(index.device) == 0, NO_LABEL)

    def native(z: Tensor) -> tuple[Any, ...]:
        valid, log_p = (labels != NO_LABEL).to(z.device), z.log_softmax(-1)
        at = log_p.gather(-1, labels.clamp(min=0).to(z.device).unsqueeze(-1)).squeeze(-1)
        return at * valid, -(log_p.exp() * log_p).sum(-1) * valid

    found = _statistics(x, labels, lambda each: (each.log_probs, each.entropy), native, **wanted)
    return LogProbs(*found)


def can_answer(x: Any, index: Any = None) -> bool:
    """Whether ``log_probs`` of ``index`` is known: one token id for each token, and no id was forbidden."""
    one_each = isinstance(index, Tensor) and index.shape == x.shape[:-1] and not index.is_floating_point()
    return (
        (index is None or one_each)
        and not x._written
        and not x.recipe.forbidden()
        and closed_form(x.recipe.ops) is not None
    )


def _statistics(x: Any, ids: Tensor | None, result: Any, native: Any, **wanted: Any) -> tuple[Any, ...]:
    """``result(LogProbs)`` of the logits of ``x``, for token ids [...] or None; ``native(z)`` is the same of its values z."""
    found = distribution(x.recipe.ops)
    ops = x.recipe.ops if found is None else found.logit_ops

    def fused(r: Recipe) -> tuple[Any, ...]:
        labels = torch.zeros(r.hidden_states.shape[:-1], dtype=torch.long) if ids is None else ids
        labels, operands = labels.to(r.hidden_states.device), r._replace(ops=ops).operands()
        with r.without_autocast():
            return result(linear_log_probs(labels=labels, ignore_index=NO_LABEL, **operands, **wanted))

    results = x._answer(fused, lambda z: native(_wide(z)))
    if not x.recipe.call.labels:
        x.recipe.call.note_fused()
    return tuple(value if value is None else value.to(x.device) for value in results)


def _over_vocabulary(x: Any, dim: Any) -> bool:
    return dim in (-1, x.ndim - 1, (-1,), [-1])


@answers("logsumexp")
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """Over the vocabulary [...] without logits (Bamba's z-loss asks for it); over anything else with them."""
    if not _over_vocabulary(x, dim) or closed_form(x.recipe.ops) is None:
        return NotImplemented
    (found,) = _statistics(x, None, lambda each: (each.logsumexp,), lambda z: (z.logsumexp(-1),), logsumexp=True)
    return found.unsqueeze(-1) if keepdim else found


@answers("gather")
def _gather(x: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """The logits, log-probabilities or probabilities of some token ids [..., K] of each token."""
    found = distribution(x.recipe.ops)
    ops = x.recipe.ops if found is None else found.logit_ops
    known = dim in (-1, x.ndim - 1) and isinstance(index, Tensor) and index.shape[:-1] == x.shape[:-1]
    known = known and index.dim() == x.ndim and not kwargs and closed_form(ops) is not None
    if not known or x.recipe.forbidden() or (found is not None and found.kind not in ("p", "log p")):
        return NotImplemented
    native = lambda z: (z.gather(-1, index.to(z.device)),)  # noqa: E731
    if found is not None and index.shape[-1] == 1:
        of = lambda log_p: found.factor * (log_p.exp() if found.kind == "p" else log_p)  # noqa: E731
        return _statistics(x, index.squeeze(-1), lambda each: (of(each.log_probs).unsqueeze(-1),), native)[0]
    if found is not None or torch.compiler.is_compiling() or is_dtensor(x.recipe.weight):
        return NotImplemented
    return x._answer(lambda r: (_selected(r, index),), native)[0].to(x.device)


@answers("take_along_dim")
def _take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    return _gather(x, dim, indices)


def _selected(r: Recipe, index: Tensor) -> Tensor:
    """The logits [..., K] of the token ids ``index`` [..., K]; the rows of the weight are gathered again for the gradient."""
    operands, form = r.operands(), closed_form(r.ops)
    assert form is not None
    hidden, weight, bias = operands["hidden_states"], operands["weight"], operands["bias"]
    ids, (scale, cap) = index.to(hidden.device).reshape(-1, index.shape[-1]), form
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def product(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return (F.embedding(ids, weight).to(wide) @ hidden.to(wide).unsqueeze(-1)).squeeze(-1)

    rows = max(1, _scratch(r) // (8 * max(1, ids.shape[-1]) * hidden.shape[-1]))
    blocks = zip(hidden.reshape(len(ids), -1).split(rows), ids.split(rows), strict=True)
    with r.without_autocast():
        found = torch.cat([checkpoint(product, h, weight, part, use_reentrant=False) for h, part in blocks])
        found = scale * (found if bias is None else found + bias.to(wide)[ids])
    return (found if cap is None else cap * (found / cap).tanh()).view(index.shape)


def _scratch(r: Recipe) -> int:
    return (r.call.config or CCEConfig()).scratch(math.prod(r.hidden_states.shape[:-1]))


@answers("sum")
def _sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Of log-probabilities (label smoothing), p · log p or p · z (entropies) over the vocabulary, or over everything."""
    found, over = distribution(x.recipe.ops), _over_vocabulary(x, dim)
    if found is None or found.kind in (None, "p") or closed_form(found.logit_ops) is None or not (over or dim is None):
        return NotImplemented
    smoothed = found.kind == "log p"
    if (keepdim and not over) or (smoothed and (x.recipe.forbidden() or is_dtensor(x.recipe.weight))):
        return NotImplemented

    def result(each: Any) -> tuple[Any]:
        if smoothed:
            return (found.factor * x.shape[-1] * (each.mean_logit - each.logsumexp),)
        return (found.factor * (-each.entropy if found.kind == "p log p" else each.logsumexp - each.entropy),)

    wanted = {"mean_logit": smoothed, "logsumexp": smoothed or found.kind == "p z", "entropy": not smoothed}
    (total,) = _statistics(x, None, result, lambda z: (z.sum(-1),), **wanted)
    total = total if dtype is None else total.to(dtype)
    return total.sum() if dim is None else total.unsqueeze(-1) if keepdim else total


@answers("mean")
def _mean(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over all, or over the vocabulary: the product of hidden states with the mean of the weight's rows. In float32."""
    if distribution(x.recipe.ops):
        total = _sum(x, dim, keepdim, **kwargs)
        return total if total is NotImplemented else total / (x.numel() if dim is None else x.shape[-1])
    over_vocabulary = dim in (-1, x.ndim - 1)
    form = None if x.recipe.forbidden() or is_dtensor(x.recipe.weight) else closed_form(x.recipe.ops)
    if form is None or keepdim or kwargs or not (dim is None or over_vocabulary) or x.numel() == 0:
        return NotImplemented
    if form[1] is not None:
        (means,) = _statistics(x, None, lambda each: (each.mean_logit,), lambda z: (z.mean(-1),), mean_logit=True)
        return means if over_vocabulary else means.mean()

    def fused(r: Recipe) -> tuple[Tensor]:
        wide = torch.float64 if r.hidden_states.dtype == torch.float64 else torch.float32
        with r.without_autocast():
            hidden_states = (
                r.hidden_states.to(wide) if over_vocabulary else r.hidden_states.flatten(0, -2).mean(0, dtype=wide)
            )
            means = hidden_states @ r.weight.mean(0, dtype=wide)
            return (form[0] * (means if r.bias is None else means + r.bias.mean(dtype=wide)),)

    return x._answer(fused, lambda z: (_wide(z).mean(dim),))[0]


@answers("topk")
def _topk(x: Any, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest of each token, from real logits of a few tokens at a time; their gradient as ``gather`` has it."""
    if dim not in (-1, x.ndim - 1) or not largest or not 0 < k <= LARGEST_TOPK or not _can_block(x):
        return NotImplemented
    values, ids = _by_blocks(x, lambda z: tuple(z.topk(k, -1)), (k,))
    if x.requires_grad and torch.is_grad_enabled():
        values = _gather(x, -1, ids)
    return NotImplemented if values is NotImplemented else torch.return_types.topk((values, ids))


@answers("max")
def _max(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    found = _topk(x, 1, dim) if isinstance(dim, int) else NotImplemented
    if found is NotImplemented:
        return NotImplemented
    return torch.return_types.max(tuple(each if keepdim else each.squeeze(-1) for each in found))


@answers("amax")
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    found = _max(x, dim, keepdim)
    return found if found is NotImplemented else found.values


@answers("argmax")
def _argmax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The most likely word of each token: real logits of a few tokens at a time."""
    if dim not in (-1, x.ndim - 1) or not _can_block(x):
        return NotImplemented
    (found,) = _by_blocks(x, lambda z: (z.argmax(-1, keepdim),), (1,) if keepdim else ())
    return found


def _can_block(x: Any) -> bool:
    return not torch.compiler.is_compiling() and not is_dtensor(x.recipe.weight)


def _by_blocks(x: Any, ask: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...]) -> list[Tensor]:
    """``ask`` of the real logits of a few tokens at a time, without a gradient; each result is [..., *shape]."""
    x._check()
    recipe = x.recipe
    flat = recipe.hidden_states.detach().reshape(-1, recipe.hidden_states.shape[-1])
    rows = max(1, _scratch(recipe) // (8 * x.shape[-1]))  # logits and one copy, where they are cast
    with torch.no_grad():
        found = [ask(recipe._replace(hidden_states=part).build()) for part in flat.split(rows)]
    return [torch.cat(each).view(*x.shape[:-1], *shape) for each in zip(*found, strict=True)]


def _wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()
