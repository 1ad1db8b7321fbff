"""Table of the operations that deferred logits [..., V] support without computing the full logits.

``HANDLERS`` maps the name of a torch function or method to a function that records the operation, or computes its result from
hidden states and weight. Full logits are used if it returns NotImplemented, and for every name that is not in the table.
Single logits, ``topk`` and ``max`` have the dtype of the logits. All other results are float32 (float64 for float64 logits), even
where torch would round them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.checks import Reduction
from hf_cce.deferred.lazy_tensor import LazyTensor, is_watched, version_of
from hf_cce.deferred.logit_statistics import (
    NO_LABEL,
    compute_log_probs,
    gather_log_probs,
    gather_logits,
    is_one_of_many,
    note_gathered_rows,
    note_subtraction,
)
from hf_cce.deferred.operations import (
    Meaning,
    apply_ops,
    as_vocab_vector,
    cast_targets,
    is_number,
    masked_ids,
    split_index,
)
from hf_cce.deferred.recipe import Recipe
from hf_cce.deferred.training_call import is_freed
from hf_cce.divergence import Options, Target, TeacherHead, divergences
from hf_cce.loss import has_few_tokens, linear_cross_entropy, linear_log_probs
from hf_cce.quantized import FrozenWeight
from hf_cce.sharded import is_dtensor
from hf_cce.spec import accumulation_dtype

HANDLERS: dict[str, Callable[..., Any]] = {}
# Operations supported on logits [B, V, S], whose classes come first
CLASS_FIRST = {"to", "float", "contiguous", "detach", "cross_entropy", "nll_loss"}
ON_TERMS = {"sum", "mean", "detach"}  # operations supported on the terms of ``F.kl_div``
_LOGSUMEXP = "hf_cce.logsumexp"  # key of the metadata of a ``grad_fn``
LARGEST_TOPK = 128  # TRL's SDFT uses 100
# Most token ids per token of one ``gather``; beyond, full logits are faster. Log-probabilities also need a pass over the head.
MOST_IDS = {"z": 16, "p": 8, "log p": 8}


def implements(*names: str, by_name: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that adds a function to the table; ``by_name``: its first argument is the name."""

    def register(function: Any) -> Any:
        HANDLERS.update({name: functools.partial(function, name) if by_name else function for name in names})
        return function

    return register


def _meaning_of(x: Any, *kinds: str) -> Meaning | None:
    """Return the ``Meaning`` of ``x`` if its kind is one of ``kinds`` and the fused loss supports its logits, else None."""
    found = x.recipe.meaning
    return None if found.form is None or found.kind not in kinds else found


# Recorded operations


@implements("to")
def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    targets = cast_targets(args, kwargs)
    return NotImplemented if targets is None else functools.reduce(_cast, targets, x)


def _cast(x: Any, target: torch.dtype | torch.device) -> Any:
    if target == (x.dtype if isinstance(target, torch.dtype) else x.device):
        return x  # the same tensor, as in torch
    return _elementwise(x, ("to", target))


_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
for _name, _dtype in _CASTS.items():
    HANDLERS[_name] = functools.partial(_cast, target=_dtype)
HANDLERS["type_as"] = lambda x, other: _to(x, dtype=other.dtype, device=other.device)
HANDLERS["type"] = lambda x, dtype=None: _to(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented
HANDLERS["detach"] = HANDLERS["data"] = lambda x: x._detached()
HANDLERS["clone"] = lambda x: x._derive(torch.clone, lambda r: r.with_ops())


@implements("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", by_name=True)
def _new(name: str, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Only the dtype and device of ``x`` are needed."""
    return getattr(torch.empty(0, dtype=x.dtype, device=x.device), name)(*args, **kwargs)


@implements("contiguous")
def _contiguous(x: Any) -> Any:
    """Return ``x`` itself or, where torch would copy, a view: after a write to either, reading the other raises."""
    r = x.recipe
    whole = not r.leaves or r.weight is r.leaves[1]  # not a part of the vocabulary
    return x if whole and not r.class_first and r.hidden_states.is_contiguous() else _alias(x)


def _alias(x: Any) -> Any:
    return x._derive(lambda z: z.view_as(z), lambda r: r)


def _elementwise(x: Any, op: tuple[str, Any], nonlinear: bool = False) -> Any:
    """Record ``op``. If it is ``nonlinear``, its derivative depends on the logits, and the backward pass may compute them."""
    made = x._derive(lambda z: apply_ops((op,), z), lambda r: r.with_ops(op), nonlinear=nonlinear)
    made.parent = x
    return made


@implements("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", by_name=True)
def _reshape(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Reshape the token dimensions of [..., V]; a shape that does not end in V needs full logits."""
    result = getattr(torch.empty(x.shape, dtype=x.dtype, device="meta"), name)(*args, **kwargs)
    if result.dtype != x.dtype or result.shape[-1:] != x.shape[-1:]:
        return NotImplemented
    if result.shape == x.shape:  # autograd functions that return an argument call view_as
        return x if name == "flatten" else _alias(x)  # the same tensor, as in torch
    tokens = result.shape[:-1]
    return _apply_to_token_dims(x, lambda z: z.reshape(*tokens, z.shape[-1]))


HANDLERS["view_as"] = lambda x, other: _reshape("view", x, other.shape)


def _apply_to_token_dims(x: Any, op: Callable[[Tensor], Tensor], copies: bool = False) -> Any:
    """Apply ``op`` to the token dimensions, which hidden states and logits share; the result is a view unless ``op`` copies."""

    def change(r: Recipe) -> Recipe:
        moved = r.replace(hidden_states=op(r.hidden_states), part_of=(r, op))
        return moved.with_ops() if copies else moved

    return x._derive(op, change)


@implements("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute")
def _class_first(x: Any, *dims: Any) -> Any:
    """Transpose [B, S, V] to [B, V, S]."""
    dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    found = [dim % x.ndim for dim in dims] if all(isinstance(dim, int) for dim in dims) else []
    if x.ndim != 3 or (found != [0, 2, 1] and sorted(found) != [1, 2]) or torch.compiler.is_compiling():
        return NotImplemented
    return x._derive(lambda z: z.transpose(1, 2), lambda r: r.replace(class_first=True))


HANDLERS["mT"] = lambda x: _class_first(x, -2, -1)


@implements("__getitem__")
def _index(x: Any, key: Any) -> Any:
    if isinstance(key, tuple) and len(key) == x.ndim > 1 and all(map(_is_ids, key)) and x.shared_storage.values is None:
        *rows, ids = (torch.as_tensor(each, device=x.device) for each in key)
        rows = torch.broadcast_tensors(*rows)
        if rows[0].shape != ids.shape:  # several ids of a token, which would be computed once for each
            return NotImplemented
        ids = _from_start(ids, x.shape[-1]).long().unsqueeze(-1)
        part = _apply_to_token_dims(x, lambda z: z[rows])
        found = _gather(part, -1, ids)
        if found is NotImplemented:
            return NotImplemented
        note_gathered_rows(x.recipe, part.recipe, tuple(rows))
        return found.squeeze(-1)
    split = split_index(key, x.ndim)
    if split is None:
        return NotImplemented
    tokens, part = split
    if isinstance(part, Tensor):  # a copy in torch, unlike a single id or a slice
        chosen, ids = _index(x, tokens), _from_start(part, x.shape[-1]).to(x.device)
        return _gather(chosen, -1, ids.expand(*chosen.shape[:-1], -1))
    if part is None:
        copies = any(isinstance(each, Tensor) for each in tokens)
        tokens = tuple(each.clone() if isinstance(each, Tensor) else each for each in tokens)  # it may change later
        return _apply_to_token_dims(x, lambda z: z[tokens], copies)
    if x.recipe.mask_ops() or is_dtensor(x.recipe.weight) or x.recipe.meaning.kind != "z":
        return NotImplemented  # masked ids, shards and a softmax refer to all of V
    if not torch.compiler.is_compiling() and is_freed(x.recipe.weight):
        return NotImplemented  # FSDP2 can gather the weight again, but not a part of it
    return x._derive(
        lambda z: z[key],
        lambda r: r.with_operands(r.hidden_states[tokens], r.weight[part], None if r.bias is None else r.bias[part]),
    )


@implements("index_select", "select")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    if dim not in range(-x.ndim, x.ndim):
        return NotImplemented  # torch raises
    return _index(x, (*[slice(None)] * (dim % x.ndim), index, ...))


@implements("narrow")
def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    size = x.shape[dim]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        return NotImplemented  # torch raises
    return _index_select(x, dim, slice(first, first + length))


def _from_start(ids: Tensor, size: int) -> Tensor:
    """Return ids in [−size, size), the negative ones counted from the end, as ids in [0, size)."""
    return torch.where(ids < 0, ids + size, ids)


def _is_ids(key: Any) -> bool:
    if isinstance(key, Tensor):
        return not key.is_floating_point() and key.dtype not in (torch.bool, torch.uint8)
    return isinstance(key, range)


def _split_tokens(name: str, x: Any, *sizes: Any, dim: int = 0) -> Any:
    """Split along a token dimension, into views."""
    if dim not in range(-x.ndim, x.ndim - 1) or dim == -1:
        return NotImplemented
    dim = dim % x.ndim
    with torch.enable_grad():
        parts = getattr(x.recipe.hidden_states, name)(*sizes, dim=dim)
    lengths = [1 if name == "unbind" else part.shape[dim] for part in parts]

    def part(i: int) -> Any:
        start, length = sum(lengths[:i]), lengths[i]
        op = lambda z: z.select(dim, i) if name == "unbind" else z.narrow(dim, start, length)  # noqa: E731
        return x._derive(
            op, lambda r: r.replace(hidden_states=parts[i], part_of=(r, op), split=((name, sizes, dim), i))
        )

    return tuple(map(part, range(len(parts))))


HANDLERS["chunk"] = lambda x, chunks, dim=0: _split_tokens("chunk", x, chunks, dim=dim)
HANDLERS["split"] = lambda x, split_size, dim=0: _split_tokens("split", x, split_size, dim=dim)
HANDLERS["unbind"] = lambda x, dim=0: _split_tokens("unbind", x, dim=dim)


@implements("__setitem__")
def _mask(x: Any, key: Any, value: Any) -> Any:
    """Record vocabulary entries set to finfo.min at every token (Chameleon's image tokens): their probability is zero."""
    known = _records_writes(x) and all(name in ("to", "mask") for name, _ in x.recipe.ops)
    ids = masked_ids(key, value, x.shape, x.dtype) if known and not is_dtensor(x.recipe.weight) else None
    if ids is None:
        return NotImplemented
    x._write(x.recipe.with_ops(("mask", (ids.to(x.recipe.weight.device), value))))
    return None


def _records_writes(x: Any) -> bool:
    """Return True if a change of ``x`` in place can be recorded: nothing was computed from it before."""
    known = len(x.recipe.leaves) > 0 and torch.is_grad_enabled()
    return known and x.shared_storage.values is None and not x.has_results


def _scale_in_place(name: str, x: Any, value: Any) -> Any:
    if not is_number(value) or x.recipe.mask_ops() or not _records_writes(x):
        return NotImplemented
    op = (name, value)
    return x._write(x.recipe.with_ops(op), lambda z: apply_ops((op,), z))


implements("mul_", "multiply_", "__imul__")(functools.partial(_scale_in_place, "mul"))
implements("div_", "divide_", "true_divide_", "__idiv__", "__itruediv__")(functools.partial(_scale_in_place, "div"))


@implements("tanh")
def _tanh(x: Any) -> Any:
    return NotImplemented if x.recipe.mask_ops() else _elementwise(x, ("tanh", None), nonlinear=True)


@implements("mul", "multiply", "__mul__", "__rmul__")
def _mul(x: Any, other: Any) -> Any:
    return _product(x, other) if isinstance(other, LazyTensor) else _scale(x, "mul", other)


def _scale(x: Any, name: str, value: Any) -> Any:
    return _elementwise(x, (name, value)) if is_number(value) and not x.recipe.mask_ops() else NotImplemented


implements("div", "divide", "true_divide", "__truediv__")(lambda x, other: _scale(x, "div", other))
implements("neg", "negative", "__neg__")(lambda x: _scale(x, "mul", -1))


@implements("add", "__add__", "__radd__")
def _add(x: Any, other: Any) -> Any:
    """Add a frozen bias [V] or [1, V] of the same dtype to the head's own, as in Bart; anything else needs full logits."""
    bias = as_vocab_vector(other, x)
    if bias is None or bias.requires_grad or x.recipe.ops or is_dtensor(x.recipe.weight):
        return NotImplemented
    # Under autocast, Bart's bias is more precise than the logits and promotes them
    dtype = x.dtype if x.recipe.cast is None else torch.promote_types(x.dtype, bias.dtype)
    if bias.dtype != dtype:
        return NotImplemented
    cast_ops = () if dtype == x.dtype else (("to", dtype),)
    added = bias.clone()  # as in torch, the bias may change after the addition

    def join(r: Recipe) -> Recipe:
        return r.replace(bias=added if r.bias is None else r.bias + added).with_ops(*cast_ops)

    return x._derive(lambda z: z.to(dtype), join)


# Recorded distributions


@implements("softmax", "log_softmax", by_name=True)
def _normalize(name: str, x: Any, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None) -> Any:
    """Record softmax or log_softmax over the vocabulary; under autocast, cast the logits to float32 first, as torch does."""
    if isinstance(_stacklevel, torch.dtype):  # third argument of torch.softmax and of the method, unlike F.softmax
        dtype = _stacklevel
    found = x.recipe.meaning
    known = found.kind == "z" or (found.kind == "log p" and found.factor == 1.0)
    if not known or dim not in (-1, x.ndim - 1) or x.recipe.mask_ops():
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = getattr(torch.zeros(1, dtype=x.dtype, device=x.device), name)(-1).dtype
    return _elementwise(x if dtype is None else _cast(x, dtype), (name, None), nonlinear=True)


HANDLERS["exp"] = lambda x: _record_on_distribution(x, "exp", "log p")
HANDLERS["log"] = lambda x: _record_on_distribution(x, "log", "p")


def _record_on_distribution(x: Any, name: str, kind: str, value: Any = None) -> Any:
    known = x.recipe.meaning.kind == kind and x.recipe.meaning.factor == 1.0
    return _elementwise(x, (name, value), nonlinear=True) if known else NotImplemented


@implements("clamp")
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Record log-probabilities without minus infinity, as in the entropy of ``Categorical``."""
    known = max is None and is_number(min) and min == torch.finfo(x.dtype).min
    return _record_on_distribution(x, "clamp", "log p", min) if known else NotImplemented


@implements("sub", "subtract", "__sub__")
def _subtract(x: Any, other: Any) -> Any:
    """Record ``x - x.logsumexp(-1, keepdim=True)``, as in ``torch.distributions.Categorical``, as log_softmax."""
    lse, version, token = x.last_logsumexp or (None, None, None)
    if lse is None or not isinstance(other, Tensor) or isinstance(other, LazyTensor):
        return NotImplemented
    layout = (lse.data_ptr(), (*lse.shape, 1), lse.stride(), lse.dtype, version)
    same = layout == (other.data_ptr(), other.shape, other.stride()[:-1], other.dtype, version_of(other))
    same_graph = x.requires_grad == (token is not None) and _comes_from(other.grad_fn, token)
    alike = same_graph or not torch.is_grad_enabled()
    if not same or not alike or any(map(is_watched, (other, other._base))):
        return NotImplemented
    made = _normalize("log_softmax", x, -1, dtype=other.dtype)
    if made is not NotImplemented:
        made.last_logsumexp = lse, version, None
        note_subtraction(x.recipe)
    return made


def _comes_from(node: Any, token: Any) -> bool:
    """Return True if the ``grad_fn`` ``node`` is that of the logsumexp with ``token``, or of a view of it; None: no gradient."""
    while type(node).__name__ in ("UnsqueezeBackward0", "ViewBackward0", "AliasBackward0"):
        node = node.next_functions[0][0]
    if node is None or token is None:
        return node is token
    return node.metadata.get(_LOGSUMEXP) is token


@implements("eq", "__eq__")
def _is_not_nan(x: Any, other: Any) -> Any:
    """Answer ``x == x``, by which distributions check log-probabilities: some are NaN unless the logsumexp is finite."""
    lse = None if x.last_logsumexp is None else x.last_logsumexp[0]
    if other is not x or lse is None or x.recipe.meaning.kind != "log p":
        return NotImplemented
    return lse.isfinite().unsqueeze(-1).expand(x.shape)


@implements("rbroadcast_tensors")
def _broadcast_to(x: Any, other: Any) -> Any:
    """Broadcast a tensor to the shape of these logits, as ``Categorical.log_prob`` does with token ids."""
    return (other.expand(x.shape), x) if torch.broadcast_shapes(other.shape, x.shape) == x.shape else NotImplemented


def _product(x: Any, other: Any) -> Any:
    """Record p · log p, as in entropies, or p · z, of the same logits."""
    ancestors = list(_lineage(x))
    shared = [each for each in _lineage(other) if any(each is known for known in ancestors)]
    if not shared or shared[0]._is_stale or other._is_stale:
        return NotImplemented
    source = shared[0]
    before, start = len(source.recipe.ops), ("to", source.dtype)
    op = ("product", tuple((start, *each.recipe.ops[before:]) for each in (x, other)))
    differentiable = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
    if not differentiable:  # under no_grad, p has no gradient but z may have one
        source = source._detached()
    source = _cast(source, torch.promote_types(x.dtype, other.dtype))  # the dtype of the product
    alike = not differentiable or x.requires_grad == other.requires_grad == source.requires_grad
    alike = alike and x.device == other.device == source.device
    if not alike or source.recipe.with_ops(op).meaning.kind is None:
        return NotImplemented
    made = _elementwise(source, op, nonlinear=True)
    x.has_results = other.has_results = True
    for each in (x, other) if differentiable else ():
        while each is not shared[0]:
            each.is_bypassed, each = True, each.parent
    made.factors = (x, other) if differentiable else ()
    return made


def _lineage(x: Any) -> Iterator[Any]:
    """Yield ``x`` and what it was computed from entry by entry, up to the first with hooks, which a product must not skip."""
    while x is not None:
        yield x
        x = None if is_watched(x) else x.parent


# Computed results


@implements("cross_entropy", "nll_loss", by_name=True)
def _loss(
    name: str,
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    **smoothing: Any,
) -> Any:
    """Compute ``F.cross_entropy`` of logits [N, V] and integer labels [N], or [B, V, S] and [B, S], with the fused loss.

    ``F.nll_loss`` of log_softmax is the same. Probabilities as targets, and class weights with label smoothing, need full logits.
    If every label is ignored, the fused mean is zero, or NaN in evaluation; torch's is NaN.
    """
    call, smooth = x.recipe.call, any(smoothing.values())  # only F.cross_entropy has label_smoothing
    kinds = ("z", "log p") if name == "cross_entropy" else ("log p",)  # log_softmax of log p is log p
    found = _meaning_of(x, *kinds)
    known = found is not None and found.factor == 1.0 and size_average is reduce is None
    known = known and isinstance(target, Tensor) and not target.is_floating_point()
    if not known or x.ndim != 2 + x.recipe.class_first or target.shape != (x.shape[0], *x.shape[2:]):
        return NotImplemented
    if weight is not None:
        # Autocast casts logits and class weights in half precision to float32
        cast = accumulation_dtype(x.dtype) if torch.is_autocast_enabled(x.device.type) else x.dtype
        fits = weight.shape == (x.recipe.weight.shape[0],) and weight.dtype in (x.dtype, cast)
        if smooth or not fits or weight.requires_grad:
            return NotImplemented
    for _, (ids, _) in x.recipe.mask_ops():
        if smooth or torch.isin(target, ids.to(target.device)).any():
            return NotImplemented  # the value written there is part of the loss

    def fused(r: Recipe) -> tuple[Tensor]:
        labels, arguments = target.to(r.hidden_states.device), r.loss_arguments()
        arguments |= {"labels": labels, "ignore_index": ignore_index, "filter_state": call.filter_state}
        sums = None if smooth or is_dtensor(r.weight) else call.token_sums
        if sums is not None:
            found = linear_log_probs(**arguments, entropy=True, is_top1=True)
            sums.add(labels, ignore_index, found, call.loss_groups)
            losses = -found.log_probs
        elif is_one_of_many(r) and not smooth:
            losses = -compute_log_probs(r, labels.masked_fill(labels == ignore_index, NO_LABEL)).log_probs
        elif weight is None:
            return (linear_cross_entropy(**arguments, reduction=reduction, **smoothing),)
        else:
            losses = linear_cross_entropy(**arguments, reduction="none")
        return (_weighted(losses, labels, reduction, ignore_index, weight),)

    def native(z: Tensor) -> tuple[Tensor]:
        labels, z = target.to(z.device), z.to(accumulation_dtype(z.dtype))
        losses = getattr(F, name)(z, labels, ignore_index=ignore_index, reduction="none", **smoothing)
        return (_weighted(losses, labels, reduction, ignore_index, weight),)

    (loss,) = x._compute_fused(fused, native)
    call.note_fused()
    if call.evaluation and reduction == "mean":  # Trainer leaves out batches whose loss is NaN
        loss = torch.where((target != ignore_index).any().to(loss.device), loss, math.nan)
    return loss.to(x.device, torch.promote_types(loss.dtype, x.dtype))


def _weighted(loss: Tensor, labels: Tensor, reduction: str, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Apply class weights to the ``loss`` of each token and reduce it. Without class weights, the mean of no labels is 0."""
    valid = labels != ignore_index
    if weight is not None:
        weights = weight.to(loss.device, loss.dtype)[labels.masked_fill(~valid, 0)] * valid
        loss = loss * weights
    if reduction == "none":
        return loss
    total = 1 if reduction == "sum" else valid.sum().clamp(min=1) if weight is None else weights.sum()
    return loss.sum() / total


@implements("kl_div")
def _kl_div(
    x: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Sum the terms of ``F.kl_div`` for a target without a gradient, or record them, if they are not to be reduced."""
    divisors, found = {"sum": 1, "mean": x.numel(), "batchmean": len(x)}, x.recipe.meaning
    acc_dtype = accumulation_dtype(x.dtype)
    known = found.kind == "log p" and found.factor == 1.0 and size_average is reduce is None
    known = known and found.form is not None and reduction in (*divisors, "none") and can_compute_divergences(x)
    known = known and isinstance(target, Tensor) and not isinstance(target, LazyTensor) and target.is_floating_point()
    if not known or target.shape != x.shape or target.device != x.device or target.requires_grad or not _can_block(x):
        return NotImplemented
    version = version_of(target)

    def given() -> tuple[Tensor, bool]:
        if version_of(target) != version:
            raise RuntimeError(
                "the target of F.kl_div was modified in place before the divergence was used; modify a copy"
            )
        return target, log_target

    x, op = _cast(x, torch.promote_types(x.dtype, target.dtype)), ("kl_div", given)
    if reduction == "none":
        return _elementwise(x, op, nonlinear=True)
    return _divergence_from(x, given, "sum", lambda z: apply_ops((op,), z).sum(dtype=acc_dtype)) / divisors[reduction]


def _divergence_from(x: Any, given: Any, reduction: Reduction, native: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum the terms t (log t − log p) of ``F.kl_div`` over the vocabulary ("none"), or all of them ("sum")."""

    def fused(r: Recipe) -> tuple[Tensor]:
        if has_few_tokens(r.hidden_states, r.weight, r.call.config):
            return (native(r.build()),)
        arguments = r.loss_arguments()
        config, options = arguments.pop("config"), Options(0.0, 1.0, reduction, summed=reduction == "sum")
        return divergences(TeacherHead(**arguments), Target(*given()), options, None, config)[:1]

    return _fused_or_native(x, fused, lambda z: (native(z),))[0]


def log_probs_and_entropy(x: Any, index: Tensor, row_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log p of ``index`` [...], see ``can_compute_log_probs``, and the entropy; zeros where ``row_mask`` [...] is zero."""
    labels = index if row_mask is None else index.masked_fill(row_mask.to(index.device) == 0, NO_LABEL)

    def native(z: Tensor) -> tuple[Any, ...]:
        valid, log_p = (labels != NO_LABEL).to(z.device), z.log_softmax(-1)
        at = log_p.gather(-1, labels.clamp(min=0).to(z.device).unsqueeze(-1)).squeeze(-1)
        return at * valid, -(log_p.exp() * log_p).sum(-1) * valid

    log_p, entropy = _statistics_of_ids(x, labels, lambda each: (each.log_probs, each.entropy), native, entropy=True)
    if row_mask is not None:  # masked rows are zero, so a later request for all rows must not reuse this pass
        x.recipe.call.last_pass = None
    return log_p, entropy


def can_compute_divergences(x: Any) -> bool:
    """Return True unless the head is quantized or sharded: ``linear_divergence`` reads the memory of the whole weight."""
    return not isinstance(x.recipe.weight, FrozenWeight) and not is_dtensor(x.recipe.weight)


def can_compute_log_probs(x: Any, index: Any = None) -> bool:
    """Return True if ``log_probs_and_entropy`` supports ``index``: one token id per token, and no masked ids."""
    one_each = isinstance(index, Tensor) and index.shape == x.shape[:-1] and not index.is_floating_point()
    ready = not x._is_stale and not x.recipe.mask_ops() and _meaning_of(x, "z") is not None
    return ready and (index is None or one_each)


def _statistics_of_ids(x: Any, ids: Tensor | None, result: Any, native: Any, **wanted: Any) -> tuple[Any, ...]:
    """Return ``result(LogProbs)`` for token ids [...] or None; ``native(z)`` computes the same from full logits z."""
    return _fused_or_native(x, lambda r: result(compute_log_probs(r, ids, **wanted)), native, by_token=ids is None)


def _fused_or_native(
    x: Any, fused: Callable[[Recipe], tuple[Any, ...]], native: Any, by_token: bool = False
) -> tuple[Any, ...]:
    """Return ``fused(recipe)``, counted as a fused loss; ``native(z)`` computes the same from full logits z."""
    results = x._compute_fused(fused, lambda z: native(z.to(accumulation_dtype(z.dtype))), by_token)
    if not x.recipe.call.labels:
        x.recipe.call.note_fused()
    # As cross entropy, float64 for float64 logits
    return tuple(v if v is None else v.to(x.device, torch.promote_types(v.dtype, x.dtype)) for v in results)


def _over_vocabulary(x: Any, dim: Any) -> bool:
    return dim in (-1, x.ndim - 1, (-1,), [-1])


@implements("logsumexp")
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """Compute logsumexp over the vocabulary (used by Bamba's z-loss); over other dimensions it needs full logits."""
    if not _over_vocabulary(x, dim) or not _meaning_of(x, "z"):
        return NotImplemented
    native = lambda z: (z.logsumexp(-1),)  # noqa: E731
    (found,) = _statistics_of_ids(x, None, lambda each: (each.logsumexp,), native, logsumexp=True)
    if not torch.compiler.is_compiling():
        token = None if found.grad_fn is None else object()  # not the node, which may lead to ``x``: a reference cycle
        if token is not None:
            found.grad_fn.metadata[_LOGSUMEXP] = token
        x.last_logsumexp = found.detach(), version_of(found), token
    return found.unsqueeze(-1) if keepdim else found


@implements("gather")
def _gather(x: Any, dim: Any, index: Any) -> Any:
    """Return the logits (in their dtype), log-probabilities or probabilities of the token ids ``index`` [..., K]."""
    found = _meaning_of(x, "z", "p", "log p")
    known = dim in (-1, x.ndim - 1) and not x.recipe.mask_ops() and x.shared_storage.values is None
    known = known and isinstance(index, Tensor) and index.dim() == x.ndim and index.shape[:-1] == x.shape[:-1]
    if found is None or not known:
        return NotImplemented
    native = lambda z: (z.gather(-1, index.to(z.device)),)  # noqa: E731
    scaled = lambda log_p: found.factor * (log_p.exp() if found.kind == "p" else log_p)  # noqa: E731
    if found.kind != "z" and index.shape[-1] == 1:
        result = lambda each: (scaled(each.log_probs).unsqueeze(-1),)  # noqa: E731
        values = _statistics_of_ids(x, index.squeeze(-1), result, native, logsumexp=True)[0]
    elif not _can_block(x) or not 0 < index.shape[-1] <= MOST_IDS[str(found.kind)]:
        return NotImplemented
    elif found.kind != "z":
        values = _fused_or_native(x, lambda r: (scaled(gather_log_probs(r, index)),), native)[0]
    else:
        values = x._compute_fused(lambda r: (gather_logits(r, index, x.dtype),), native)[0].to(x.device, x.dtype)
        if values.requires_grad and not x.recipe.call.labels:
            x.recipe.call.note_fused()
    return values if torch.compiler.is_compiling() else _repeat_known_values(x, index, values)


def _repeat_known_values(x: Any, ids: Tensor, values: Tensor) -> Tensor:
    """Overwrite ``values`` of the token ids ``ids``, both [..., K], with those returned earlier for the same ids.

    Code that compares the logit of a label with the largest one (margins, accuracy) must find equal numbers, but products of
    other shapes round differently.
    """
    ids = ids.long()
    with torch.no_grad():  # the gradient stays that of ``values``
        for earlier, known in x.shared_storage.known:
            for i in range(earlier.shape[-1]):
                values.copy_(known[..., i : i + 1].to(values).where(ids == earlier[..., i : i + 1], values))
    x.shared_storage.known.append((ids.clone(), values.detach().clone()))
    return values


@implements("take_along_dim")
def _take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    """Like ``_gather``, but ids from -V to -1 count from the end."""
    if dim is None or not isinstance(indices, Tensor):
        return NotImplemented
    return _gather(x, dim, _from_start(indices, x.shape[dim]))


@implements("sum")
def _sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Sum logits, log p (label smoothing), p · log p, p · z (entropies) or terms of ``F.kl_div``, over the vocabulary or all."""
    found, over = _meaning_of(x, "z", "log p", "p log p", "p z", "kl_div"), _over_vocabulary(x, dim)
    if found is None or x.numel() == 0 or not (over or (dim is None and not keepdim)):
        return NotImplemented
    linear = found.kind in ("z", "log p")
    if linear and (x.recipe.mask_ops() or is_dtensor(x.recipe.weight)):
        return NotImplemented
    if found.kind == "z" and (keepdim or x.shared_storage.values is not None):
        return NotImplemented  # with keepdim, code centers the logits, which needs all of them

    def result(each: Any) -> tuple[Any]:
        if linear:
            mean = each.mean_logit if found.kind == "z" else each.mean_logit - each.logsumexp
            return (found.factor * x.shape[-1] * mean,)
        return (found.factor * (-each.entropy if found.kind == "p log p" else each.logsumexp - each.entropy),)

    wanted = {"mean_logit": linear, "logsumexp": found.kind in ("log p", "p z"), "entropy": not linear}
    if found.kind == "kl_div":
        dims, acc_dtype = -1 if over else None, accumulation_dtype(x.dtype)
        native = lambda z: z.sum(dims, dtype=acc_dtype)  # noqa: E731
        total = _divergence_from(x, x.recipe.ops[-1][1], "none" if over else "sum", native)
    else:
        (total,) = _statistics_of_ids(x, None, result, lambda z: (z.sum(-1),), **wanted)
    total = total if dtype is None else total.to(dtype)
    return total.sum() if not over else total.unsqueeze(-1) if keepdim else total


@implements("mean")
def _mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Average over the vocabulary, or over everything."""
    total = _sum(x, dim, keepdim, dtype)
    return total if total is NotImplemented else total / (x.numel() if dim is None else x.shape[-1])


@implements("topk")
def _topk(x: Any, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest of each token, found in blocks of full logits; their gradient is that of ``_gather``."""
    differentiable = x.requires_grad and torch.is_grad_enabled()
    most = MOST_IDS.get(str(x.recipe.meaning.kind), 0) if differentiable else LARGEST_TOPK
    known = dim in (-1, x.ndim - 1) and largest and 0 < k <= min(most, x.shape[-1] // 2)
    if not known or not _can_block(x) or x.shared_storage.values is not None:
        return NotImplemented
    values, ids = _apply_by_blocks(x, lambda z: tuple(z.topk(k, -1)), (k,))
    values = _repeat_known_values(x, ids, values)
    if differentiable:
        values = _gather(x, -1, ids)  # the same numbers, with a gradient
    return NotImplemented if values is NotImplemented else torch.return_types.topk((values, ids))


@implements("max")
def _max(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    found = _topk(x, 1, dim) if isinstance(dim, int) else NotImplemented
    if found is NotImplemented:
        return NotImplemented
    return torch.return_types.max(tuple(each if keepdim else each.squeeze(-1) for each in found))


@implements("argmax")
def _argmax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the most probable token id of each token, from the full logits of one block of tokens at a time."""
    if dim not in (-1, x.ndim - 1) or not _can_block(x):
        return NotImplemented
    (found,) = _apply_by_blocks(x, lambda z: (z.argmax(-1, keepdim),), (1,) if keepdim else ())
    return found


def _can_block(x: Any) -> bool:
    return not torch.compiler.is_compiling() and not is_dtensor(x.recipe.weight)


def _apply_by_blocks(x: Any, function: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...]) -> list[Tensor]:
    """Apply ``function`` to the full logits of a block of tokens at a time, without a gradient; each result is [..., *shape]."""
    x._check_fresh()
    recipe = x.recipe
    flat = recipe.hidden_states.detach().reshape(-1, recipe.hidden_states.shape[-1])
    rows = max(1, recipe.scratch_bytes() // (8 * x.shape[-1]))  # the logits and a copy for casts
    with torch.no_grad():
        found = [function(recipe.replace(hidden_states=part).build()) for part in flat.split(rows)]
    return [torch.cat(each).view((*x.shape[:-1], *shape)) for each in zip(*found, strict=True)]
