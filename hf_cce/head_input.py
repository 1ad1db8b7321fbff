"""The input of an LM head that is to put off its multiplication; the head's own forward runs on it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.calls import Call
from hf_cce.deferred import DeferredLogits
from hf_cce.head import why_not_read
from hf_cce.loss import few_tokens
from hf_cce.symbolic import Symbolic


class HeadInput(Symbolic):
    """Hidden states [..., D] on their way through the head; ``F.linear`` on them gives ``DeferredLogits``.

    LoRA on the head adds two more products, x Aᵀ and B on that: the first, which is no product with a whole vocabulary, is
    done and goes on as the input of the second. Every other operation gets the hidden states themselves.
    """

    _ANSWERS: ClassVar[dict[Any, str]] = {F.linear: "linear", F.dropout: "dropout"}

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

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """The head's multiplication: put off where that pays and the weight will still be there for the loss; else done."""
        hidden_states, device = self.hidden_states, self.hidden_states.device.type
        if self.call.words is not None and weight.shape[0] != self.call.words:
            return HeadInput(F.linear(hidden_states, weight, bias), self.call)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if hidden_states.dtype == torch.float64:
            cast = None  # autocast leaves float64 alone
        reason = why_not_read(weight, bias)
        fits = cast is not None or hidden_states.dtype == weight.dtype
        if reason is None and (hidden_states.device != weight.device or not fits):
            reason = "hidden states and head differ in dtype or device"  # torch's own error is the right one
        if reason is not None:
            self.call.note_refused(reason)
            return F.linear(hidden_states, weight, bias)
        if few_tokens(hidden_states, weight, self.call.config):
            self.call.note_few_tokens()
            return F.linear(hidden_states, weight, bias)
        self.call.words = weight.shape[0]
        return DeferredLogits(hidden_states, weight, bias, call=self.call, cast=cast)

    def _real(self, why: str) -> Tensor:
        return self.hidden_states
