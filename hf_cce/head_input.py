"""The input of an LM head that is to put off its multiplication; the head's own forward runs on it.

And what a head answers whose vocabulary is spread over processes, until somebody asks for all of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.calls import Call
from hf_cce.deferred import DeferredLogits
from hf_cce.head import LINEAR, why_not_read
from hf_cce.loss import few_tokens
from hf_cce.sharded import is_dtensor, why_not_share
from hf_cce.symbolic import Symbolic, plain
from hf_cce.terms import Term, TermSum


class HeadInput(Symbolic):
    """Hidden states [..., D] on their way through the head; ``F.linear`` on them gives ``DeferredLogits``.

    Where PEFT has wrapped the head (``call.adapted``) it gives a ``TermSum``. LoRA adds two more products, x Aᵀ and B on that:
    the first, which is no product with a whole vocabulary, is done and goes on as the input of the second; VeRA and IA3 scale
    such an input. Every other operation gets the hidden states themselves.
    """

    _ANSWERS: ClassVar[dict[Any, str]] = {LINEAR: "linear", F.dropout: "dropout", torch.mul: "mul"}
    _COMMUTES: ClassVar[dict[Any, str]] = {torch.mul: "mul", Tensor.mul: "mul"}

    def __init__(self, hidden_states: Tensor, call: Call) -> None:
        self.hidden_states = hidden_states
        self.call = call

    @property
    def shape(self) -> torch.Size:
        return self.hidden_states.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device

    def to(self, *args: Any, **kwargs: Any) -> HeadInput:
        return HeadInput(self.hidden_states.to(*args, **kwargs), self.call)

    def dropout(self, *args: Any, **kwargs: Any) -> HeadInput:
        return HeadInput(F.dropout(self.hidden_states, *args, **kwargs), self.call)

    def mul(self, other: Any) -> Any:
        """By a number per hidden dimension, within a head that PEFT has wrapped."""
        made = self.hidden_states * plain(other)
        return HeadInput(made, self.call) if self.call.adapted and made.shape == self.shape else made

    __mul__ = __rmul__ = mul

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """The head's multiplication: put off where that pays and the weight will still be there for the loss; else done."""
        hidden_states, device = self.hidden_states, self.hidden_states.device.type
        if self.call.words is not None and weight.shape[0] != self.call.words:
            return HeadInput(F.linear(hidden_states, weight, bias), self.call)
        if device == "meta":  # nor does anybody know of autocast there
            self.call.note_refused("the model is on the meta device, where tensors have no data")
            self.call.note_full_logits()
            return F.linear(hidden_states, weight, bias)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if hidden_states.dtype == torch.float64:
            cast = None  # autocast leaves float64 alone
        shared = is_dtensor(hidden_states)
        reason = why_not_share(hidden_states, weight, bias) if shared else why_not_read(weight, bias)
        if shared and torch.compiler.is_compiling():
            reason = "a compiled graph does not defer a head whose vocabulary is spread over processes"
        fits = cast is not None or hidden_states.dtype == weight.dtype
        if reason is None and (hidden_states.device != weight.device or not fits):
            reason = "hidden states and head differ in dtype or device"  # torch's own error is the right one
        if reason is not None:
            self.call.note_refused(reason)
            self.call.note_full_logits()
            return F.linear(hidden_states, weight, bias)
        begun = self.call.adapted and self.call.words is not None  # the terms of one head go one way
        if not begun and few_tokens(hidden_states, weight, self.call.config):
            self.call.note_few_tokens()
            return F.linear(hidden_states, weight, bias)
        self.call.words = weight.shape[0]
        if not torch.is_grad_enabled():  # what these logits become has no gradient, whenever it is computed
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        if shared:
            return ShardedLogits(hidden_states, weight, bias, self.call, cast)
        if self.call.adapted:
            dtype = weight.dtype if cast is None else cast
            return TermSum((Term(hidden_states, weight),), bias, dtype, self.call, cast)
        return (self.call.kind or DeferredLogits)(hidden_states, weight, bias, call=self.call, cast=cast)

    def _real(self, why: str) -> Tensor:
        return self.hidden_states


class ShardedLogits(Symbolic):
    """Stands for the DTensor [..., V], split over V, that ``F.linear`` of a spread vocabulary gives.

    Asked for the logits of the whole vocabulary, as the loss of every process needs them, it answers with ``DeferredLogits``.
    """

    def __init__(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: Call, cast: torch.dtype | None
    ) -> None:
        self.hidden_states = hidden_states  # a DTensor, as weight and bias
        self.weight = weight
        self.bias = bias
        self.call = call
        self.cast = cast

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden_states.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype if self.cast is None else self.cast

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device

    @property
    def device_mesh(self) -> Any:
        return self.weight.device_mesh  # type: ignore[attr-defined]

    @property
    def placements(self) -> Any:
        from torch.distributed.tensor import Shard

        return (Shard(self.ndim - 1),)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """To every process: deferred logits. To any other placement: of the real ones."""
        whole = placements is not None and all(each.is_replicate() for each in placements)
        if not whole or device_mesh not in (None, self.device_mesh) or kwargs.get("forward_dtype") is not None:
            return self._real("redistribute").redistribute(device_mesh, placements, **kwargs)  # type: ignore[attr-defined]
        return self.full_tensor()

    def full_tensor(self, **kwargs: Any) -> Any:
        if kwargs.get("grad_placements") is not None:
            return self._real("full_tensor").full_tensor(**kwargs)  # type: ignore[attr-defined]
        hidden_states: Any = self.hidden_states
        return DeferredLogits(hidden_states.to_local(), self.weight, self.bias, call=self.call, cast=self.cast)

    def to_local(self, **kwargs: Any) -> Tensor:
        return self._real("to_local").to_local(**kwargs)  # type: ignore[attr-defined]

    def _real(self, why: str) -> Tensor:
        self.call.note_materialised(why)
        return F.linear(self.hidden_states, self.weight, self.bias)
