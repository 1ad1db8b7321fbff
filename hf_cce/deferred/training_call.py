"""What happened in a model's training calls: counted, so that a run which misses the fused loss can say so."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_cce.config import CCEConfig, CCEWarning
from hf_cce.filter_state import FilterState
from hf_cce.loss import LogProbs
from hf_cce.sharded import local

CHANGED = (
    "cannot compute these deferred logits: the hidden states or the LM head have changed since the forward pass "
    "(optimizer.step()?); read outputs.logits before the step, or keep outputs.logits.materialize()"
)
_LIBRARIES = {"accelerate", "deepspeed", "hf_cce", "peft", "torch", "transformers", "trl"}


@dataclass
class Stats:
    """What happened in the training calls of one model: ``model._hf_cce.stats``.

    Under ``torch.compile`` Python counters would recompile the graph at every step: there the loss's operator counts.
    """

    calls: int = 0  # training calls, with labels or without
    fused: int = 0  # cross entropies answered without logits
    few_tokens: int = 0  # training calls left as they were: for so few tokens full logits are faster, and small
    materialized: int = 0  # times full logits were made: from deferred ones, or by a head that could not defer
    read: int = 0  # of these, times it was for somebody who used outputs.logits after a training call
    missed: int = 0  # training calls that ended without a fused cross entropy
    bypassed: int = 0  # training calls that TRL answered with a fused head of its own; not among ``calls``
    traced: bool = False  # a compiled graph holds a fused cross entropy; it sets this whenever it runs

    @property
    def as_meant(self) -> int:
        """Losses without logits, and calls of so few tokens that logits are the better way."""
        return self.fused + self.few_tokens


@dataclass
class TokenSums:
    """Sums over the labels of training losses, on their device: how many, −log p, how many were the most likely, entropy."""

    sums: Tensor | None = None  # [4]

    def add(self, valid: Tensor, found: LogProbs) -> None:
        """Those of ``found`` [...] where ``valid`` [...]; nobody waits for the device."""
        values = valid, -found.log_probs, found.is_top1, found.entropy
        wide = torch.float32 if valid.device.type == "mps" else torch.float64
        with torch.no_grad():
            new = torch.stack([(x * valid).sum(dtype=wide) for x in values if x is not None])
            self.sums = new if self.sums is None else self.sums + new.to(self.sums.device)

    def means(self, before: Tensor | None = None) -> dict[str, float]:
        """Over all labels, or those since the sums were ``before``; nothing where there are none. Waits for the device."""
        if self.sums is None:
            return {}
        count, *sums = (self.sums if before is None else self.sums - before).tolist()
        if count == 0:
            return {}
        loss, right, entropy = (total / count for total in sums)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"token_accuracy": right, "entropy": entropy, "perplexity": perplexity}


@dataclass
class TrainingCall:
    """One training call: the options it runs with and what happened in it."""

    config: CCEConfig | None = None
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState | None = None
    owner: Any = None  # the Patch of the model that was called
    head: Any = None
    labels: bool = True  # without them, what becomes of the logits is known after the call has returned
    evaluation: bool = False  # in evaluation mode, or without gradients; nobody counts it
    fused: int = 0
    few_tokens: bool = False
    adapted: bool = False  # PEFT has wrapped the head
    vocab_size: int | None = None  # of the logits that were deferred
    reasons: list[str] = field(default_factory=list)
    full_logits: bool = False  # they were made, and counted, at least once
    traced: int = 0  # of the fused, those in a graph
    closed: bool = False  # it has returned
    versions: Any = None  # of the head's parameters then
    last_pass: Any = None  # through the head, and what of; until a backward pass

    @property
    def token_sums(self) -> TokenSums | None:
        """Where the statistics of tokens are added up, where they are wanted."""
        wanted = self.config is not None and self.config.token_stats and self.owner is not None
        return None if not wanted or self.evaluation or torch.compiler.is_compiling() else self.owner.token_sums

    @contextlib.contextmanager
    def weight_at_hand(self, weight: Any) -> Iterator[None]:
        """Have FSDP2 gather the head's ``weight`` where it has freed it right after the head's forward, for this block."""
        part = weight if torch.compiler.is_compiling() else local(weight)
        if torch.compiler.is_compiling() or part.numel() == 0 or part.untyped_storage().nbytes() > 0:
            yield
            return
        groups = (
            [] if self.head is None else [x for x in self.head.modules() if hasattr(x, "set_reshard_after_forward")]
        )
        if not groups or self.versions not in (None, versions_in(self.head)):
            raise RuntimeError(CHANGED)
        for group in groups:
            group.unshard()
        try:
            yield
        finally:
            for group in groups:
                group.reshard()

    def close(self) -> None:
        self.closed = True
        self.versions = None if self.head is None else versions_in(self.head)

    def note_fused(self) -> None:
        self.fused += 1
        if torch.compiler.is_compiling():  # the operator counts whenever the graph runs
            self.traced += 1
            self.stats.traced = True
        else:
            self.stats.fused += self.labels or self.fused == 1

    def note_few_tokens(self) -> None:
        if not self.few_tokens:
            self.few_tokens = True
            self.stats.few_tokens += 1

    def note_materialized(self, why: str) -> None:
        if self.evaluation:
            return
        self.full_logits = True
        self.stats.materialized += not torch.compiler.is_compiling()
        if not self.closed:
            self.reasons.append(f"{why} needs the full logits")
        elif why != "materialize":  # that one is asked for by name
            self.stats.read += 1
            if self.stats.read == 1:
                warn(
                    f"hf_cce: outputs.logits of a training call was used ({why}), so full logits were materialized. They are "
                    "correct, but at every step they take the memory that hf_cce saves. Use logits in evaluation mode, or call "
                    "outputs.logits.materialize() if you need them; for per-token log-probabilities or entropy, use "
                    "linear_log_probs."
                )

    def note_full_logits(self) -> None:
        """The head has made them itself; once a call, as the layers of an adapted head may each have to."""
        if not (torch.compiler.is_compiling() or self.full_logits):
            self.full_logits = True
            self.stats.materialized += 1

    def note_refused(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.reasons.append(why)


def versions_in(head: Any) -> list[int]:
    """Of the parameters of a head, as an optimizer's step changes them."""
    return [x._version for x in head.parameters() if not x.is_inference()]


def warn(message: str) -> None:
    """Warn with the user's line, and none of the libraries that the call went through.

    Python shows a text once for each line: so each model that a notebook trains is told of, and a loop not at every step.
    """
    if torch.compiler.is_compiling():
        warnings.warn(message, CCEWarning, stacklevel=3)
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CCEWarning, stacklevel=level)
