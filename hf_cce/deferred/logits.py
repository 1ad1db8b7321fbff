"""Lazy logits: what an LM head returns instead of multiplying, and what answers the model's own loss.

They record what the model's forward does to the logits (scale, tanh, casts, slices, views) and answer ``F.cross_entropy``,
``logsumexp`` and a few others from hidden states and weight. ``ANSWERS`` is the one table of what is known; anything else is
asked of real logits, as the head and the recorded operations would have made them: slower, never wrong.

Shapes: hidden_states [..., D], weight [V, D], bias [V] or None, logits [..., V].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.deferred.lazy_tensor import LazyTensor, Like, StandIn, Wrapper, multiply
from hf_cce.deferred.operations import (
    Op,
    apply_ops,
    cast_targets,
    closed_form,
    forbidden_ids,
    per_token_id,
    split_index,
)
from hf_cce.deferred.training_call import TrainingCall
from hf_cce.loss import LogProbs, linear_cross_entropy, linear_log_probs
from hf_cce.sharded import is_dtensor, replicated


class Recipe(NamedTuple):
    """How to make the logits, or what the loss makes of them, from hidden states, weight and bias.

    In eager code these are cut off from the model's graph: ``leaves`` stand there for what the head was given, and the lazy
    gradient brings what they receive back to it (``hf_cce.deferred.lazy_tensor``).
    """

    hidden_states: Any
    weight: Any
    bias: Any
    call: TrainingCall
    cast: torch.dtype | None = None  # the dtype in which autocast would have multiplied
    ops: tuple[Op, ...] = ()
    leaves: tuple[Tensor | None, ...] = ()
    versions: tuple[int | None, ...] = ()  # logits read after optimizer.step() would be other logits
    family: Any = ()  # real logits that share memory with these, as torch would have it, and their versions when made

    @property
    def like(self) -> Like:
        dtype, device = self.weight.dtype if self.cast is None else self.cast, self.hidden_states.device
        for name, value in self.ops:
            if name == "to":
                dtype, device = (value, device) if isinstance(value, torch.dtype) else (dtype, value)
        return Like(torch.Size((*self.hidden_states.shape[:-1], self.weight.shape[0])), dtype, device)

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.hidden_states, self.weight, self.bias

    def with_parts(self, hidden_states: Any, weight: Any, bias: Any) -> Recipe:
        return self._replace(hidden_states=hidden_states, weight=weight, bias=bias)

    def without_parts(self) -> Recipe:
        return self._replace(hidden_states=None, weight=None, bias=None, leaves=(), family=())

    def then(self, *op: Op) -> Recipe:
        """With one more operation, whose result has memory of its own."""
        return self._replace(ops=(*self.ops, *op), family=[])

    def build(self) -> Tensor:
        with self.call.weight_at_hand(self.weight):
            return apply_ops(self.ops, multiply(*self.parts, self.cast))

    def forbidden(self) -> list[Op]:
        return [op for op in self.ops if op[0] == "forbid"]

    def operands(self) -> dict[str, Any]:
        """What the fused loss takes. Forbidden words have so low a bias that their probability is zero in every dtype."""
        hidden_states, weight, bias = (x if x is None or self.cast is None else x.to(self.cast) for x in self.parts)
        for _, (ids, _) in self.forbidden():
            bias = (weight.new_zeros(len(weight)) if bias is None else bias).index_fill(0, ids, -6e4)
        form = closed_form(self.ops)
        assert form is not None
        inputs = {"hidden_states": replicated(hidden_states, weight), "weight": weight, "bias": bias}
        return {**inputs, "logit_scale": form[0], "softcap": form[1], "config": self.call.config}

    def without_autocast(self) -> Any:
        return torch.autocast(self.hidden_states.device.type, enabled=False)

    def check_fresh(self) -> None:
        if self.versions and self.versions != versions_of(*self.leaves[:3]):
            raise RuntimeError(
                "these logits were deferred, and hidden states or LM head have changed since (optimizer.step()?); "
                "read outputs.logits before the step, or keep outputs.logits.materialize()"
            )


def versions_of(*parts: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if x is None or x.is_inference() else x._version for x in parts)


def lazy_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    call: TrainingCall | None = None,
    cast: torch.dtype | None = None,
) -> Any:
    """The logits [..., V] of a head, not multiplied out.

    Args:
        hidden_states: [..., D], what the head was given.
        weight: [V, D]; a DTensor where every process has a part of the vocabulary, and then the bias as well.
        bias: [V] or None.
        call: the training call it belongs to; carries the options of the loss and the counters.
        cast: the dtype in which autocast would have multiplied, or None.
    """
    recipe = Recipe(hidden_states, weight, bias, TrainingCall() if call is None else call, cast)
    if torch.compiler.is_compiling():
        return LazyLogitsInGraph(recipe._replace(family=[]))
    return to_wrapper(recipe)


def to_wrapper(recipe: Recipe) -> Any:
    """Lazy logits for eager code, of a recipe whose parts belong to the model's graph."""
    parts = recipe.parts
    leaves = tuple(None if x is None else x.detach().requires_grad_(x.requires_grad) for x in parts)
    versions = versions_of(*leaves)
    return LazyLogitsTensor.of(recipe.with_parts(*leaves)._replace(leaves=leaves, versions=versions, family=[]), *parts)


Answers = dict[str, Callable[..., Any]]
_ANSWERS: Answers = {}


def answers(*names: str) -> Callable[[Any], Any]:
    """The function answers the torch functions and methods of these names; NotImplemented asks for real logits."""

    def enter(function: Any) -> Any:
        _ANSWERS.update(dict.fromkeys(names, function))
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
    return x._derive(lambda z: z.to(target), lambda r: r.then(("to", target)))


_ANSWERS["float"] = lambda x: _cast(x, torch.float32)
_ANSWERS["double"] = lambda x: _cast(x, torch.float64)
_ANSWERS["half"] = lambda x: _cast(x, torch.float16)
_ANSWERS["bfloat16"] = lambda x: _cast(x, torch.bfloat16)
_ANSWERS["type_as"] = lambda x, other: _to(x, dtype=other.dtype, device=other.device)
_ANSWERS["contiguous"] = lambda x, *args, **kwargs: NotImplemented if args or kwargs else x
_ANSWERS["data"] = lambda x: x._expose()
_ANSWERS["detach"] = lambda x: x._detached()


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


def _of_tokens(x: Any, op: Callable[[Tensor], Tensor]) -> Any:
    """``op`` of the tokens' dimensions, which hidden states and logits have in common: a view."""
    return x._derive(op, lambda r: r._replace(hidden_states=op(r.hidden_states)))


@answers("__getitem__")
def _index(x: Any, key: Any) -> Any:
    split = split_index(key, x.ndim)
    if split is None:
        return NotImplemented
    tokens, ids = split
    if ids is None:
        return _of_tokens(x, lambda z: z[tokens])
    if x.recipe.forbidden() or is_dtensor(x.recipe.weight):
        return NotImplemented  # its ids are numbered otherwise
    return x._derive(
        lambda z: z[key],
        lambda r: r.with_parts(r.hidden_states[tokens], r.weight[ids], None if r.bias is None else r.bias[ids]),
    )


@answers("chunk")
def _chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    if dim % x.ndim == x.ndim - 1:
        return NotImplemented
    parts = torch.arange(x.shape[dim]).chunk(chunks)
    before = (slice(None),) * (dim % x.ndim)
    return tuple(_index(x, (*before, slice(int(part[0]), int(part[-1]) + 1))) for part in parts)


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
    return _apply(x, "tanh", None)


@answers("mul", "multiply", "__mul__", "__rmul__")
def _mul(x: Any, other: Any) -> Any:
    return _apply(x, "mul", other)


@answers("div", "divide", "true_divide", "__truediv__")
def _div(x: Any, other: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _apply(x, "div", other)


def _apply(x: Any, name: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (name == "tanh" or is_number) or x.recipe.forbidden():
        return NotImplemented
    op = (name, value)
    return x._derive(lambda z: apply_ops((op,), z), lambda r: r.then(op), nonlinear=name == "tanh")


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
    """``F.cross_entropy`` of these logits [N, V] and integer labels [N] by the fused loss.

    Class weights, probabilities as targets, a class dimension that is not the last, and whatever has no closed form need real
    logits. Where every label is ignored the fused mean is zero, torch's is NaN.
    """
    form, call = closed_form(x.recipe.ops), x.recipe.call
    plain_target = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    for _, (ids, _) in x.recipe.forbidden() if plain_target else ():
        if label_smoothing or torch.isin(target, ids.to(target.device)).any():
            form = None  # the number written there is a part of the loss
    if form is None or x.ndim != 2 or not plain_target or not (weight is size_average is reduce is None):
        return NotImplemented
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def fused(r: Recipe) -> tuple[Tensor]:
        labels = target.to(r.hidden_states.device)
        with r.without_autocast():
            more = {**options, "reduction": reduction, "filter_state": r.call.filter_state}
            return (linear_cross_entropy(labels=labels, **r.operands(), **more),)

    def native(z: Tensor) -> tuple[Tensor]:
        loss = F.cross_entropy(_wide(z), target.to(z.device), reduction="none", **options)
        count = (target != ignore_index).sum().clamp(min=1).to(z.device)
        return (loss if reduction == "none" else loss.sum() / count if reduction == "mean" else loss.sum(),)

    (loss,) = x._answer(fused, native)
    call.note_fused()
    if call.evaluation and reduction == "mean":  # Trainer leaves out batches of which this is NaN
        loss = torch.where((target != ignore_index).any().to(loss.device), loss, math.nan)
    return loss.to(x.device, torch.promote_types(loss.dtype, x.dtype))


@answers("logsumexp")
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """Over the vocabulary [...] without logits (Bamba's z-loss asks for it); over anything else with them."""
    if dim not in (-1, x.ndim - 1, (-1,), [-1]) or closed_form(x.recipe.ops) is None:
        return NotImplemented
    result = x.log_probs(None, logsumexp=True).logsumexp
    return result.unsqueeze(-1) if keepdim else result


@answers("mean")
def _mean(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over all, or over the vocabulary: the product of hidden states with the mean of the weight's rows. In float32."""
    over_vocabulary = dim in (-1, x.ndim - 1)
    form = None if x.recipe.forbidden() or is_dtensor(x.recipe.weight) else closed_form(x.recipe.ops)
    if form is None or keepdim or kwargs or not (dim is None or over_vocabulary) or x.numel() == 0:
        return NotImplemented
    if form[1] is not None:
        means = x.log_probs(None, mean_logit=True).mean_logit
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


@answers("argmax")
def _argmax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The most likely word of each token: real logits of a few tokens at a time."""
    if keepdim or dim not in (-1, x.ndim - 1) or torch.compiler.is_compiling() or is_dtensor(x.recipe.weight):
        return NotImplemented
    x._check()
    recipe = x.recipe
    flat = recipe.hidden_states.detach().reshape(-1, recipe.hidden_states.shape[-1])
    scratch = (recipe.call.config or CCEConfig()).scratch(len(flat))
    rows = max(1, scratch // (8 * x.shape[-1]))  # logits and one copy, where they are cast
    with torch.no_grad():
        ids = [recipe._replace(hidden_states=part).build().argmax(-1) for part in flat.split(rows)]
    found = torch.cat(ids) if ids else torch.empty(0, dtype=torch.long, device=x.device)
    return found.view(x.shape[:-1])


def _wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


class LazyLogits(LazyTensor):
    """Logits [..., V] that have not been multiplied out, in either shell: see the module's docstring."""

    ANSWERS: ClassVar[Answers] = _ANSWERS
    recipe: Recipe

    def materialize(self) -> Tensor:
        """The logits [..., V] as the head and the recorded operations would have made them: same dtype, differentiable.

        Raises:
            RuntimeError: hidden states or weight were changed in place since, as ``optimizer.step()`` does.
        """
        return self._real("materialize")

    def to_local(self, **_: Any) -> Any:
        """What a hook of tensor parallelism asks of the DTensor that it takes this for: every process has all the logits."""
        return self

    def can_answer(self, index: Any) -> bool:
        """Whether ``log_probs`` of ``index`` is known: one token id for each token, and no id was forbidden."""
        one_each = isinstance(index, Tensor) and index.shape == self.shape[:-1] and not index.is_floating_point()
        return (
            one_each and not self._written and not self.recipe.forbidden() and closed_form(self.recipe.ops) is not None
        )

    def log_probs(
        self, index: Tensor | None, temperature: float = 1.0, row_mask: Tensor | None = None, **wanted: Any
    ) -> LogProbs:
        """What ``linear_log_probs`` gives for the token ids ``index`` [...]; zero where ``row_mask`` [...] is.

        Without ``index`` only what does not depend on it is meant. Where ``can_answer`` says no, nobody may ask.
        """
        labels = torch.zeros(self.shape[:-1], dtype=torch.long) if index is None else index
        labels = labels.to(self.recipe.hidden_states.device)
        if row_mask is not None:
            labels = labels.masked_fill(row_mask.to(labels.device) == 0, -100)

        def fused(r: Recipe) -> tuple[Any, ...]:
            operands = r.operands()
            operands["logit_scale"] /= temperature
            operands["softcap"] = None if operands["softcap"] is None else operands["softcap"] / temperature
            with r.without_autocast():
                return tuple(linear_log_probs(labels=labels, **operands, **wanted))

        def native(z: Tensor) -> tuple[Any, ...]:
            z, valid = _wide(z) / temperature, (labels != -100).to(z.device)
            log_p = z.log_softmax(-1)
            at = log_p.gather(-1, labels.clamp(min=0).to(z.device).unsqueeze(-1)).squeeze(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            return tuple(x if x is None else x * valid for x in (at, entropy, None, z.mean(-1), None, z.logsumexp(-1)))

        return LogProbs(*(None if x is None else x.to(self.device) for x in self._answer(fused, native)))  # type: ignore

    # Of either shell
    shape: Any
    device: Any
    _answer: Any


class LazyLogitsTensor(LazyLogits, Wrapper):
    @staticmethod
    def _leaf(value: Tensor) -> Tensor:
        return value.detach().requires_grad_(value.requires_grad)

    def _detached(self) -> Any:
        return self._alias()


class LazyLogitsInGraph(LazyLogits, StandIn):
    """Inside a compiled graph: autograd sees hidden states, weight and bias themselves, and nobody hooks the logits."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._made: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.recipe.shape if self._made is None else self._made.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.dtype

    @property
    def device(self) -> torch.device:
        return self.recipe.device

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.recipe.parts)

    @property
    def _written(self) -> bool:  # type: ignore[override]
        return self._made is not None  # who has them may write into them, and a graph does not know their version

    def _leaf(self, value: Tensor) -> Tensor:
        return value

    def _detached(self) -> Any:
        return LazyLogitsInGraph(
            self.recipe.with_parts(*(None if x is None else x.detach() for x in self.recipe.parts))
        )

    def _expose(self) -> Tensor:
        return self._real("data").data

    def _derive(self, op: Any, change: Any, nonlinear: bool = False, other: Tensor | None = None) -> Any:
        self._check()
        new = LazyLogitsInGraph(change(self.recipe))
        return new if torch.is_grad_enabled() else new._detached()

    def _answer(self, compute: Any, native: Any) -> Any:
        self._check()
        return compute(self.recipe)

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._do(name, *args, **kwargs)
        if name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__setitem"))):
            self.recipe.family.append(self)
        return result

    def _real(self, why: str) -> Tensor:
        if self._made is None:
            self._check()
            self.recipe.call.note_materialised(why)
            with torch.enable_grad():
                self._made = self.recipe.build()
        return self._made

    def _check(self) -> None:
        if any(each is not self for each in self.recipe.family):
            raise RuntimeError(
                "these deferred logits are a view of logits that were written to since; write before viewing, or use the model "
                "without CCE (remove_cce)"
            )
