"""What happened in a model's training calls: counted, so that a run which misses the fused loss can say so."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_cce.config import CCEConfig


@dataclass
class Stats:
    """What happened in the training calls of one model: ``model._hf_cce.stats``.

    Under ``torch.compile`` Python counters would recompile the graph at every step, so there only ``traced`` is set.
    """

    calls: int = 0  # training calls with labels
    fused: int = 0  # cross entropies answered without logits
    materialised: int = 0  # times real logits were made from deferred ones
    missed: int = 0  # training calls that ended without a fused cross entropy
    traced: bool = False  # a compiled graph holds a fused cross entropy


@dataclass
class Call:
    """One training call: the options it runs with and what happened in it."""

    config: CCEConfig | None = None
    stats: Stats = field(default_factory=Stats)
    fused: int = 0
    reasons: list[str] = field(default_factory=list)

    def note_fused(self) -> None:
        if torch.compiler.is_compiling():
            self.stats.traced = True
        else:
            self.fused += 1
            self.stats.fused += 1

    def note_materialised(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.stats.materialised += 1
            self.reasons.append(f"{why} asked for the logits themselves")

    def note_refused(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.reasons.append(why)
