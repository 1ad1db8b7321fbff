"""Logits of a training call without labels, for a trainer that is known to read log-probabilities and metrics from them.

``DeferredLogits`` answer a model's own loss. A trainer that computes the loss itself asks for more: parts, without a gradient,
means, the most likely words. ``PolicyLogits`` answer these too, each as exactly as real logits would; hf_cce.patches.preference
says for whom they are made. For everybody else such calls return real logits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.deferred import DeferredLogits
from hf_cce.loss import LogProbs, linear_log_probs
from hf_cce.symbolic import closed_form


class PolicyLogits(DeferredLogits):
    """``DeferredLogits`` [..., V] that also answer ``detach``, ``chunk``, ``mean``, ``argmax`` and ``log_probs``."""

    def detach(self) -> Any:
        if self._written:
            return self._real("detach").detach()
        bias = None if self.bias is None else self.bias.detach()
        return self._view(self.hidden_states.detach(), self.weight.detach(), bias)

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        """Over the tokens' dimensions."""
        if self._written or dim % self.ndim == self.ndim - 1:
            return self._real("chunk").chunk(chunks, dim)
        parts = torch.arange(self.shape[dim]).chunk(chunks)
        before = (slice(None),) * (dim % self.ndim)
        keys = [(*before, slice(int(part[0]), int(part[-1]) + 1)) for part in parts]
        return tuple(self[key] for key in keys)

    def mean(self, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        """Over all, or over the vocabulary: the product of hidden states with the mean of the weight's rows. In float32."""
        over_vocabulary = dim in (-1, self.ndim - 1)
        form = None if self._written or self._forbidden() else closed_form(self.ops)
        if form is None or keepdim or kwargs or not (dim is None or over_vocabulary) or self.numel() == 0:
            return self._real("mean").mean(dim, keepdim, **kwargs)
        self._check_fresh()
        scale, softcap = form
        if softcap is not None:
            means = self.log_probs(None, mean_logit=True).mean_logit
            assert means is not None
        else:
            wide = torch.float64 if self.hidden_states.dtype == torch.float64 else torch.float32
            with torch.autocast(self.hidden_states.device.type, enabled=False):
                hidden_states = (
                    self.hidden_states.mean(tuple(range(self.ndim - 1)), dtype=wide) if dim is None else None
                )
                hidden_states = self.hidden_states.to(wide) if hidden_states is None else hidden_states
                means = hidden_states @ self.weight.mean(0, dtype=wide)
                means = scale * (means if self.bias is None else means + self.bias.mean(dtype=wide))
        return means if over_vocabulary else means.mean()

    def argmax(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The most likely word of each token: real logits of a few tokens at a time."""
        if self._written or keepdim or dim not in (-1, self.ndim - 1):
            return self._real("argmax").argmax(dim, keepdim)
        self._check_fresh()
        flat = self.hidden_states.detach().reshape(-1, self.hidden_states.shape[-1])
        scratch = (self.call.config or CCEConfig()).scratch(len(flat))
        rows = max(1, scratch // (8 * self.shape[-1]))  # logits and one copy, where they are cast
        with torch.no_grad():
            words = [self._copy(hidden_states=part)._multiplied().argmax(-1) for part in flat.split(rows)]
        found = torch.cat(words) if words else torch.empty(0, dtype=torch.long, device=self.device)
        return found.view(self.shape[:-1])

    def log_probs(
        self, index: Tensor | None, temperature: float = 1.0, row_mask: Tensor | None = None, **wanted: bool
    ) -> LogProbs:
        """What ``linear_log_probs`` gives for the words ``index`` [...]; zero where ``row_mask`` [...] is.

        Without ``index`` only what does not depend on it is meant. Where ``answers`` says no, nobody may ask.
        """
        form = closed_form(self.ops)
        assert form is not None and not self._written
        self._check_fresh()
        scale, softcap = form
        self._used = True
        device = self.hidden_states.device
        labels = torch.zeros(self.shape[:-1], dtype=torch.long) if index is None else index
        labels = labels.to(device)
        if row_mask is not None:
            labels = labels.masked_fill(row_mask.to(device) == 0, -100)
        with self._as_multiplied():
            result = linear_log_probs(
                self.hidden_states,
                self.weight,
                labels,
                bias=self._bias(),
                logit_scale=scale / temperature,
                softcap=None if softcap is None else softcap / temperature,
                config=self.call.config,
                **wanted,  # type: ignore[arg-type]
            )
        return LogProbs(*(None if each is None else each.to(self.device) for each in result))  # type: ignore[arg-type]

    def answers(self, index: Any) -> bool:
        """Whether ``log_probs`` of these words is known: one word a token, none of them forbidden."""
        one_each = isinstance(index, Tensor) and index.shape == self.shape[:-1] and not index.is_floating_point()
        return one_each and not self._written and not self._forbidden() and closed_form(self.ops) is not None

    _ANSWERS: ClassVar[dict[Any, str]] = {
        **DeferredLogits._ANSWERS, torch.argmax: "argmax", torch.chunk: "chunk", torch.detach: "detach", torch.mean: "mean",
    }  # fmt: skip
