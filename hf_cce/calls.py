"""What happened in a model's training calls: counted, so that a run which misses the fused loss can say so."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.filter_state import FilterState

_LIBRARIES = {"accelerate", "deepspeed", "hf_cce", "peft", "torch", "transformers", "trl"}


@dataclass
class Stats:
    """What happened in the training calls of one model: ``model._hf_cce.stats``.

    Under ``torch.compile`` Python counters would recompile the graph at every step, so there only ``traced`` is set.
    """

    calls: int = 0  # training calls with labels
    fused: int = 0  # cross entropies answered without logits
    few_tokens: int = 0  # training calls left as they were: for so few tokens full logits are faster, and small
    materialised: int = 0  # times full logits were made: from deferred ones, or by a head that could not defer
    read: int = 0  # of these, times it was for somebody who used outputs.logits after a training call
    missed: int = 0  # training calls that ended without a fused cross entropy
    bypassed: int = 0  # training calls that TRL answered with a fused head of its own; not among ``calls``
    traced: bool = False  # a compiled graph holds a fused cross entropy

    @property
    def as_meant(self) -> int:
        """Losses without logits, and calls of so few tokens that logits are the better way."""
        return self.fused + self.few_tokens


@dataclass
class Call:
    """One training call: the options it runs with and what happened in it."""

    config: CCEConfig | None = None
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState | None = None
    fused: int = 0
    few_tokens: bool = False
    adapted: bool = False  # PEFT has wrapped the head
    # Of the deferred logits of a call without labels; what becomes of them is known after it has returned
    kind: Any = None
    words: int | None = None  # of the vocabulary whose logits were deferred
    reasons: list[str] = field(default_factory=list)
    full_logits: bool = False  # they were made, and counted, at least once
    traced: bool = False  # a graph that holds a fused cross entropy ran in it
    closed: bool = False  # it has returned
    owner: Any = None  # the Patch of the model that was called
    evaluation: bool = False  # without gradients, for the loss alone; nobody counts it
    checkpoint: int | None = None  # in which the model is called
    handles: list[Any] = field(default_factory=list)  # of hooks on the head, for the time of the call
    kept_whole: list[Any] = field(default_factory=list)  # FSDP2 groups that keep their weights when the head has run

    def unshard_before(self, result: Tensor) -> None:
        """Have FSDP2 gather the head's weight for the gradient of ``result``: another forward may have freed it by then."""
        if self.kept_whole and result.requires_grad:
            result.register_hook(lambda _: [group.unshard() for group in self.kept_whole] and None)

    def note_fused(self) -> None:
        if torch.compiler.is_compiling():
            self.stats.traced = self.traced = True
        else:
            self.fused += 1
            self.stats.fused += self.kind is None or self.fused == 1

    def note_few_tokens(self) -> None:
        if not self.few_tokens:
            self.few_tokens = True
            self.stats.few_tokens += 1

    def note_materialised(self, why: str) -> None:
        if torch.compiler.is_compiling() or self.evaluation:
            return
        self.full_logits = True
        self.stats.materialised += 1
        if not self.closed:
            self.reasons.append(f"{why} asked for the logits themselves")
        elif why != "materialize":  # that one is asked for by name
            self.stats.read += 1
            if self.stats.read == 1:
                warnings.warn(
                    f"hf_cce: outputs.logits of a training call was used ({why}), so full logits were made for it after "
                    "all. They are right; made at every step they cost the memory that CCE saves. Use logits in evaluation "
                    "mode, or outputs.logits.materialize() where you mean it; for per-token log-probabilities or entropy "
                    "there is linear_log_probs.",
                    stacklevel=outside(),
                )

    def note_full_logits(self) -> None:
        """The head has made them itself; once a call, as the layers of an adapted head may each have to."""
        if not (torch.compiler.is_compiling() or self.full_logits):
            self.full_logits = True
            self.stats.materialised += 1

    def note_refused(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.reasons.append(why)


def outside() -> int:
    """The ``stacklevel`` with which the caller's warning shows the user's line, and none of the libraries that it went through.

    Python shows a text once for each line: so each model that a notebook trains is told of, and a loop not at every step.
    """
    if torch.compiler.is_compiling():
        return 2
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
