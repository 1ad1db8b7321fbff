"""State of a training call, counters of all calls of a model, and warnings of calls that miss the fused loss."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_cce.config import CCEConfig, CCEWarning
from hf_cce.deferred.token_sums import TokenSums
from hf_cce.filter_state import FilterState
from hf_cce.sharded import to_local

FREED = (
    "cannot compute these deferred logits: FSDP has freed the LM head's weight; call apply_cce on the model that was given to "
    "fully_shard, read outputs.logits before loss.backward(), or keep outputs.logits.materialize()"
)
_LIBRARIES = {"accelerate", "deepspeed", "hf_cce", "peft", "torch", "transformers", "trl"}


@dataclass
class Stats:
    """Counters of the training calls of one model: ``model._hf_cce.stats``.

    Under ``torch.compile``, Python counters would recompile the graph at every step, so the loss's operator counts instead.
    """

    calls: int = 0  # training calls, with labels or without
    fused: int = 0  # cross entropies computed without logits
    few_tokens: int = 0  # training calls that kept full logits: with so few tokens these are faster, and small
    materialized: int = 0  # times full logits were computed: from deferred ones, or by a head that could not defer
    read: int = 0  # of these, times because outputs.logits was used after a training call
    missed: int = 0  # training calls that ended without a fused cross entropy
    bypassed: int = 0  # training calls that used TRL's own fused head; not included in ``calls``
    traced: bool = False  # a compiled graph contains a fused cross entropy; set whenever it runs

    @property
    def without_fallback(self) -> int:
        """Losses computed without logits, plus calls with so few tokens that full logits are better."""
        return self.fused + self.few_tokens


@dataclass
class TrainingCall:
    """One training call, or an evaluation call with labels: its options, and what happened in it."""

    config: CCEConfig | None = None
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState | None = None
    owner: Any = None  # the Patch of the model that was called
    model: Any = None  # weak reference to it or its outermost wrapper: logits that are kept must not keep the model
    head: Any = None
    labels: bool = True  # False: the caller uses the logits after the call has returned
    evaluation: bool = False  # evaluation mode, or no gradients; not counted
    loss_groups: tuple[Tensor, Tensor] | None = None  # of ``token_sums.label_groups``
    fused: int = 0
    few_tokens: bool = False
    has_fused_result: bool = False  # a differentiable result was computed from hidden states and weight
    without_gradients: bool = False  # the head ran in no_grad
    adapted: bool = False  # PEFT has wrapped the head
    unknown_adapter: bool = False  # the adapter's own operations need the full logits
    vocab_size: int | None = None  # of the deferred logits
    reasons: list[str] = field(default_factory=list)  # why full logits were computed
    full_logits: bool = False  # they were computed, and counted, at least once
    traced: int = 0  # number of ``fused`` that are in a compiled graph
    closed: bool = False  # the call has returned
    # Cleared by the backward pass
    last_pass: Any = None  # the last ``Pass`` over the head
    shared_passes: list[Any] = field(default_factory=list)  # those that the parts of split logits share
    gathered: Any = None  # the ``Origin`` of the logits gathered last
    boundaries: list[Any] = field(default_factory=list)  # see ``lazy_tensor.graph_boundary``; taken by ``FusedResult``

    @property
    def token_sums(self) -> TokenSums | None:
        """The accumulator of token statistics, or None if they are not collected."""
        wanted = self.config is not None and self.config.token_stats and self.owner is not None
        return None if not wanted or self.evaluation or torch.compiler.is_compiling() else self.owner.token_sums

    def unsharded(self, *parameters: Any) -> Any:
        """Return a context in which FSDP2 gathers the head's ``parameters`` if it freed one after a forward or backward pass."""
        if torch.compiler.is_compiling() or not any(map(is_freed, parameters)):
            return contextlib.nullcontext()
        with contextlib.ExitStack() as gathered:
            for group in self._fsdp2_groups():
                group.unshard()
                gathered.callback(group.reshard)
                if not any(map(is_freed, parameters)):
                    return gathered.pop_all()
            raise RuntimeError(FREED)

    def may_gather_head_again(self) -> bool:
        """Return True if FSDP2 may free the head before the loss. Gathering is collective, so all processes must then defer."""
        if torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized()):
            return False
        return any(True for _ in self._fsdp2_groups(around=not self.labels))

    def _fsdp2_groups(self, around: bool = True) -> Iterator[Any]:
        """Yield the modules whose FSDP2 group may hold the head's weight: those in the head, then those ``around`` it."""
        model = self.model() if around and self.model is not None else None
        inside, all_modules = ([] if x is None else list(x.modules()) for x in (self.head, model))
        for module in itertools.chain(inside, (x for x in reversed(all_modules) if x not in inside)):
            if hasattr(module, "set_reshard_after_forward") and (module in inside or self.head in module.modules()):
                yield module

    def note_fused(self) -> None:
        self.fused += 1
        if torch.compiler.is_compiling():  # the operator counts each run of the graph
            self.traced += 1
            self.stats.traced = True
        else:
            self.stats.fused += self.labels or self.fused == 1  # without labels, the losses of a call count once

    def note_materialized(self, why: str) -> None:
        if self.evaluation:
            return
        self.full_logits = True
        self.stats.materialized += not torch.compiler.is_compiling()
        if not self.closed:
            self.reasons.append(f"{why} needs the full logits")
        elif why != "materialize":  # an explicit materialize() gets no warning
            self.stats.read += 1
            if self.stats.read == 1:
                warn(
                    f"hf_cce: outputs.logits of a training call was used ({why}), so full logits were materialized. They are "
                    "correct, but at every step they take the memory that hf_cce saves. Use logits in evaluation mode, or call "
                    "outputs.logits.materialize() if you need them; for per-token log-probabilities or entropy, use "
                    "linear_log_probs, and for distillation linear_divergence."
                )

    def note_full_logits(self) -> None:
        """Count full logits computed by the head, once per call, although each layer of an adapted head may compute some."""
        if not (self.full_logits or torch.compiler.is_compiling()):
            self.stats.materialized += 1
        self.full_logits = True


def is_freed(parameter: Any) -> bool:
    """Return True if FSDP has freed the memory of ``parameter``; False for None."""
    part = None if parameter is None else to_local(parameter)
    return part is not None and part.numel() > 0 and part.untyped_storage().nbytes() == 0


class OptimizerSteps:
    """The number of steps of all optimizers of this process since ``watch``."""

    taken = 0

    @staticmethod
    @functools.cache
    def watch() -> None:
        def count(*_: Any) -> None:
            OptimizerSteps.taken += 1

        register_optimizer_step_post_hook(count)


def warn(message: str) -> None:
    """Warn with the user's line, not that of a library: Python shows a text once per line, so once for each trained model."""
    if torch.compiler.is_compiling():
        warnings.warn(message, CCEWarning, stacklevel=3)
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CCEWarning, stacklevel=level)
