"""Deferred logits: what an LM head returns instead of multiplying, and what answers the model's own loss.

The ``F.linear`` inside the head answers with ``DeferredLogits`` (see hf_cce.head_input). That object records what the
model's forward does to the logits (scale, tanh, casts, slices, views) and answers
``F.cross_entropy`` and ``logsumexp`` without ever making them. Whatever else is asked of it, it makes the real logits, as
the head and the recorded operations would have, and goes on with those: slower, never wrong.

Shapes: hidden_states [..., D], weight [V, D], bias [V] or None, logits [..., V].
"""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.calls import Call
from hf_cce.loss import linear_cross_entropy, linear_log_probs
from hf_cce.sharded import gathered, is_dtensor, local, replicated
from hf_cce.symbolic import (
    Op,
    Symbolic,
    cast_targets,
    closed_form,
    forbidden_words,
    function_applied_to,
    is_op,
    plain,
    split_index,
)

Number = float  # inside DeferredLogits ``float`` is the method
_STALE_VIEW = (
    "these deferred logits are a view of logits that were written to since; write before viewing, "
    "or use the model without CCE (remove_cce)"
)


class DeferredLogits(Symbolic):
    """Logits [..., V] that have not been multiplied out; behaves like the tensor, see the module's docstring.

    Args:
        hidden_states: [..., D], what the head was given.
        weight: [V, D]; a DTensor where every process has a part of the vocabulary, and then the bias as well.
        bias: [V] or None.
        call: the training call it belongs to; carries the options of the loss and the counters.
        cast: the dtype in which autocast would have multiplied, or None.
        ops: what was done to the logits since, in order.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        call: Call | None = None,
        cast: torch.dtype | None = None,
        ops: tuple[Op, ...] = (),
    ) -> None:
        self.hidden_states = hidden_states
        self.weight = weight
        self.bias = bias
        self.call = Call() if call is None else call
        self.cast = cast
        self.ops = ops
        self._made: Tensor | None = None  # real logits, once somebody asked for them
        self._made_version = 0
        self._rewritten = False
        self._used = False  # something was computed from the recipe: a hook on the logits would not see its gradient
        self._writes = [0]  # how often this object or a view of it was written to; one list for all of them
        self._seen = 0
        self._aliases: list[Any] = []  # weak references to views of this object, and to what it is a view of
        # A recipe is only as good as its ingredients: logits read after optimizer.step() would be other logits.
        self._versions = None if torch.compiler.is_compiling() else self._ingredient_versions()

    @property
    def _written(self) -> bool:
        """An in-place write, here or through an alias of the real logits, made the recipe stale: they are the truth."""
        if self._rewritten or self._made is None:
            return self._rewritten
        return not torch.compiler.is_compiling() and self._made._version != self._made_version

    @property
    def data(self) -> Tensor:
        """Writes into it leave no trace: from now on the real logits are the truth."""
        made = self._real("data")
        self._rewritten = True
        return made.data

    # What a tensor says about itself
    @property
    def shape(self) -> torch.Size:
        if self._written:
            return self._real("shape").shape
        return torch.Size((*self.hidden_states.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        for name, value in reversed(self.ops):
            if name == "to" and isinstance(value, torch.dtype):
                return value
        return self.weight.dtype if self.cast is None else self.cast

    @property
    def device(self) -> torch.device:
        for name, value in reversed(self.ops):
            if name == "to" and isinstance(value, torch.device):
                return value
        return self.hidden_states.device

    @property
    def _sharded(self) -> bool:
        """Whether every process has a part of the vocabulary."""
        return is_dtensor(self.weight)

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in (self.hidden_states, self.weight, self.bias))

    def __repr__(self) -> str:
        state = "made" if self._made is not None else "not made"
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', {state})"

    # What it records
    def float(self) -> DeferredLogits:
        return self._cast(torch.float32)

    def double(self) -> DeferredLogits:
        return self._cast(torch.float64)

    def half(self) -> DeferredLogits:
        return self._cast(torch.float16)

    def bfloat16(self) -> DeferredLogits:
        return self._cast(torch.bfloat16)

    def type_as(self, other: Any) -> Any:
        return self.to(dtype=other.dtype, device=other.device)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        if self._written or args or kwargs:
            return self._real("contiguous").contiguous(*args, **kwargs)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.to`` for floating dtypes and devices; ``copy=True`` and memory formats need real logits."""
        targets = None if self._written else cast_targets(args, kwargs)
        if targets is None:
            return self._real("to").to(*args, **kwargs)
        result = self
        for target in targets:
            result = result._cast(target)
        return result

    def _cast(self, target: torch.dtype | torch.device) -> DeferredLogits:
        if self._written:
            return self._made.to(target)  # type: ignore[union-attr, return-value]
        if target == (self.dtype if isinstance(target, torch.dtype) else self.device):
            return self  # as torch does: the same tensor
        return self._copy(ops=(*self.ops, ("to", target)))

    def to_local(self, **_: Any) -> DeferredLogits:
        """What a hook of tensor parallelism asks of the DTensor that it takes this for: every process has all the logits."""
        return self

    def view(self, *shape: Any, **named: Any) -> Any:
        if named or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
            return self._real("view").view(*shape, **named)
        return self.reshape(*shape)

    def reshape(self, *shape: Any, **named: Any) -> Any:
        """[..., V] to other token dimensions; a shape that does not end in V needs real logits."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        vocabulary = self.shape[-1]
        ends_in_vocabulary = len(sizes) > 0 and sizes[-1] == vocabulary
        if len(sizes) > 0 and sizes[-1] == -1:
            ends_in_vocabulary = math.prod(sizes[:-1]) == math.prod(self.shape[:-1])
        if named or self._written or not ends_in_vocabulary:
            return self._real("view").reshape(*shape, **named)
        return self._view(self.hidden_states.reshape(*sizes[:-1], self.hidden_states.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.ndim
        if self._written or last == self.ndim - 1:
            return self._real("flatten").flatten(start_dim, end_dim)
        return self._view(self.hidden_states.flatten(start_dim, last))

    def __getitem__(self, key: Any) -> Any:
        index = None if self._written else split_index(key, self.ndim)
        if index is None:
            return self._real("indexing")[plain(key)]
        tokens, vocabulary = index
        if vocabulary is None:
            return self._view(self.hidden_states[tokens])
        if self._forbidden() or self._sharded:
            return self._real("indexing")[plain(key)]  # its words are numbered otherwise
        return self._view(
            self.hidden_states[tokens], self.weight[vocabulary], None if self.bias is None else self.bias[vocabulary]
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        """Words set to the smallest number at every token (Chameleon's image tokens) have probability zero from now on."""
        plain_logits = not self._written and self._made is None and not torch.compiler.is_compiling()
        plain_logits = plain_logits and not self._sharded
        plain_logits = plain_logits and torch.is_grad_enabled()  # else the write has no gradient, and the recipe would
        words = forbidden_words(key, value, self.shape, self.dtype) if plain_logits else None
        if words is None:
            self._write("__setitem__", key, value)
            return
        self._refuse_if_shared("__setitem__")
        self.ops = (*self.ops, ("forbid", (words.to(self.weight.device), value)))

    def _forbidden(self) -> list[Tensor]:
        return [value[0] for name, value in self.ops if name == "forbid"]

    def _bias(self) -> Tensor | None:
        """The head's bias [V], so low for forbidden words that their probability is zero in every dtype; their gradient too."""
        bias = self.bias
        for words in self._forbidden():
            bias = (self.weight.new_zeros(len(self.weight)) if bias is None else bias).index_fill(0, words, -6e4)
        return bias

    def tanh(self) -> Any:
        return self._apply("tanh", None)

    def mul(self, other: Any) -> Any:
        return self._apply("mul", other)

    def div(self, other: Any, **kwargs: Any) -> Any:
        return self._real("div").div(plain(other), **kwargs) if kwargs else self._apply("div", other)

    def add(self, other: Any, **kwargs: Any) -> Any:
        """A bias per word, [V] or [1, V] of the same dtype, joins the head's own; anything else needs real logits."""
        words = self.shape[-1]
        fits = isinstance(other, Tensor) and other.dim() in range(1, self.ndim + 1) and other.shape[-1] == words
        fits = fits and other.numel() == words and other.device == self.device and other.is_floating_point()
        # Under autocast Bart's is wider than the logits, which then become as wide
        of = self.dtype if self.cast is None or not fits else torch.promote_types(self.dtype, other.dtype)
        fits = fits and other.dtype == of
        if self._written or self.ops or kwargs or not fits or self._sharded:
            return self._real("add").add(plain(other), **kwargs)
        bias = other.reshape(-1)
        return self._copy(bias=bias if self.bias is None else self.bias + bias)._cast(of)

    __mul__ = __rmul__ = multiply = mul
    __truediv__ = divide = true_divide = div
    __add__ = __radd__ = add

    def mul_(self, other: Any) -> Any:
        return self._apply_("mul", other)

    def div_(self, other: Any, **kwargs: Any) -> Any:
        return self._write("div_", other, **kwargs) if kwargs else self._apply_("div", other)

    def tanh_(self) -> Any:
        return self._apply_("tanh", None)

    __imul__ = mul_
    __itruediv__ = div_

    def _apply(self, name: str, value: Any) -> Any:
        if self._written or not is_op(name, value):
            made = self._real(name)
            return made.tanh() if name == "tanh" else getattr(made, name)(plain(value))
        return self._copy(ops=(*self.ops, (name, value)))

    def _apply_(self, name: str, value: Any) -> Any:
        if self._written or not is_op(name, value):
            return self._write(f"{name}_", *(() if name == "tanh" else (value,)))
        # Without gradients the write has none, and the recipe would; and somebody may hold the real logits, or a part of them
        if self._made is not None or not torch.is_grad_enabled():
            return self._write(f"{name}_", *(() if name == "tanh" else (value,)))
        self._refuse_if_shared(f"{name}_")
        self.ops = (*self.ops, (name, value))
        return self

    # What answers the loss
    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
    ) -> Tensor:
        """``F.cross_entropy`` of these logits [N, V] and integer labels [N] by the fused loss.

        Class weights, probabilities as targets, a class dimension that is not the last, and whatever has no closed
        form go to torch on real logits. Where every label is ignored the fused mean is zero, torch's is NaN.
        """
        self._check_fresh()
        form = None if self._written else closed_form(self.ops)
        plain_target = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
        for words in self._forbidden() if form is not None and plain_target else ():
            if label_smoothing or torch.isin(target, words.to(target.device)).any():
                form = None  # the number written there is a part of the loss
        if form is None or self.ndim != 2 or not plain_target or not (weight is size_average is reduce is None):
            rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
            return F.cross_entropy(self._real("cross_entropy"), plain(target), *rest)
        scale, softcap = form
        self._used = True
        with self._as_multiplied():
            loss = linear_cross_entropy(
                replicated(self.hidden_states, self.weight),
                self.weight,
                target.to(self.hidden_states.device),
                bias=self._bias(),
                logit_scale=scale,
                softcap=softcap,
                ignore_index=ignore_index,
                reduction=reduction,  # type: ignore[arg-type]
                label_smoothing=label_smoothing,
                config=self.call.config,
                filter_state=self.call.filter_state,
            )
        self.call.note_fused()
        self.call.unshard_before(loss)
        if self.call.evaluation and reduction == "mean":  # Trainer leaves out batches of which this is NaN
            loss = torch.where((target != ignore_index).any().to(loss.device), loss, math.nan)
        return loss.to(self.device, torch.promote_types(loss.dtype, self.dtype))

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Any:
        """Over the vocabulary [...] without logits (Bamba's z-loss asks for it); over anything else with them."""
        self._check_fresh()
        form = None if self._written else closed_form(self.ops)
        over_vocabulary = dim in (-1, self.ndim - 1, (-1,), [-1])
        if form is None or not over_vocabulary:
            return torch.logsumexp(self._real("logsumexp"), dim, keepdim)
        scale, softcap = form
        self._used = True
        labels = torch.zeros(self.hidden_states.shape[:-1], dtype=torch.long, device=self.hidden_states.device)
        with self._as_multiplied():
            result = linear_log_probs(
                replicated(self.hidden_states, self.weight),
                self.weight,
                labels,
                bias=self._bias(),
                logit_scale=scale,
                softcap=softcap,
                logsumexp=True,
                config=self.call.config,
            ).logsumexp
        assert result is not None
        self.call.unshard_before(result)
        result = result.to(self.device)
        return result.unsqueeze(-1) if keepdim else result

    # What asks for the gradient of the logits
    def register_hook(self, hook: Any) -> Any:
        return self._watched("register_hook").register_hook(hook)

    def retain_grad(self) -> None:
        self._watched("retain_grad").retain_grad()

    def _watched(self, name: str) -> Tensor:
        """Be real logits from now on, so that gradients pass through; an error once something was computed past them."""
        if self._used and not self._written:
            raise RuntimeError(
                f"{name}: the loss of this call does not pass through these logits, so their gradient is never made. "
                f"Use the model without CCE (remove_cce), or call {name} in a forward hook of the LM head, which makes "
                "full logits; for a loss of your own, outputs.logits.materialize() has the gradient of what you compute"
            )
        made = self._real(name)
        self._rewritten = True
        return made

    # What makes real logits
    def materialize(self) -> Tensor:
        """The logits [..., V] as the head and the recorded operations would have made them: same dtype, differentiable.

        Raises:
            RuntimeError: hidden states or weight were changed in place since, as ``optimizer.step()`` does.
        """
        return self._real("materialize")

    def _real(self, why: str) -> Tensor:
        if self._made is not None and (self._written or self._made.requires_grad >= self.requires_grad):
            return self._made
        self._check_fresh()
        self.call.note_materialised(why)
        made = self._multiplied()
        if torch.compiler.is_compiling():  # who has them may write into them, and a graph does not know their version
            self._rewritten = True
        self._made, self._made_version = made, 0 if self._versions is None else made._version
        return made

    def _multiplied(self) -> Tensor:
        """The real logits, newly made."""
        # Wherever they are asked for, they are what the head would have made during the call: with a gradient.
        as_in_call = contextlib.nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)
        with as_in_call, torch.enable_grad():
            with self._as_multiplied():
                made = gathered(F.linear(replicated(self.hidden_states, self.weight), self.weight, self.bias))
            for name, value in self.ops:
                if name == "forbid":
                    made[..., value[0].to(made.device)] = value[1]
                else:
                    made = made.tanh() if name == "tanh" else getattr(made, name)(value)
            return made

    def _ingredient_versions(self) -> tuple[int | None, ...]:
        parts = (self.hidden_states, self.weight, self.bias)
        return tuple(None if x is None or x.is_inference() else x._version for x in parts)

    def _check_fresh(self) -> None:
        """Refuse to answer from a recipe whose ingredients have changed since it was written."""
        if self._seen != self._writes[0] and not self._rewritten:
            raise RuntimeError(_STALE_VIEW)
        if self._versions is None or self._written:
            return
        unseen = not torch.is_grad_enabled() and self.requires_grad
        if unseen and (name := function_applied_to(lambda each: getattr(each, "call", None) is self.call)):
            raise RuntimeError(
                f"{name}.apply: autograd does not see these logits, which are a stand-in for a tensor, and they would get "
                "no gradient; pass outputs.logits.materialize()"
            )
        weight = local(self.weight)
        freed = weight.numel() > 0 and weight.untyped_storage().nbytes() == 0  # by FSDP2, as after the backward pass
        if freed or self._versions != self._ingredient_versions():
            raise RuntimeError(
                "these logits were deferred, and hidden states or LM head have changed since (optimizer.step()?); "
                "read outputs.logits before the step, or keep outputs.logits.materialize()"
            )
        if any((relative := reference()) is not None and relative._written for reference in self._aliases):
            raise RuntimeError(_STALE_VIEW)

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An in-place operation that has no recipe: make the logits, write into them, and be them from now on."""
        self._refuse_if_shared(name)
        made = self._real(name)
        getattr(made, name)(*plain(args), **plain(kwargs))
        self._rewritten = True
        return self

    def _refuse_if_shared(self, name: str) -> None:
        self._seen = self._writes[0] = self._writes[0] + 1
        if any(reference() is not None for reference in self._aliases):
            raise RuntimeError(
                f"{name}: deferred logits cannot be written to while a view of them is alive; write before viewing, "
                "or use the model without CCE (remove_cce)"
            )

    def _as_multiplied(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast state in which the head was called; it may be another one by now."""
        kind = self.hidden_states.device.type
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if now == self.cast:
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype=self.cast, enabled=self.cast is not None)

    def _copy(self, **changes: Any) -> DeferredLogits:
        parts = [changes.get(name, getattr(self, name)) for name in ("hidden_states", "weight", "bias")]
        if not torch.is_grad_enabled():  # what torch computes then has no gradient, whenever it is used
            parts = [None if x is None else x.detach() for x in parts]
        new = type(self)(
            *parts,
            call=self.call,
            cast=self.cast,
            ops=changes.get("ops", self.ops),
        )
        if self._versions is not None:
            self._check_fresh()  # or the copy would take the changed ingredients for fresh ones
        self._used = True
        return new

    def _view(self, hidden_states: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> DeferredLogits:
        """Other tokens, and with ``weight`` other words, of the same logits: what torch would share memory with."""
        new = self._copy(hidden_states=hidden_states, **({} if weight is None else {"weight": weight, "bias": bias}))
        new._writes, new._seen = self._writes, self._seen
        if not torch.compiler.is_compiling():
            family = [*self._aliases, weakref.ref(self)]
            for reference in family:
                if (relative := reference()) is not None:
                    relative._aliases.append(weakref.ref(new))
            new._aliases.extend(family)
        return new

    _ANSWERS: ClassVar[dict[Any, str]] = {
        F.cross_entropy: "cross_entropy",
        F.tanh: "tanh",
        torch.add: "add",
        torch.div: "div",
        torch.divide: "div",
        torch.flatten: "flatten",
        torch.logsumexp: "logsumexp",
        torch.mul: "mul",
        torch.multiply: "mul",
        torch.reshape: "reshape",
        torch.tanh: "tanh",
        torch.true_divide: "div",
    }
