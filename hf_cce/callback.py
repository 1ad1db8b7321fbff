"""``CCECallback``: patches a Trainer's model at the right moment, and says so when a run misses the fused loss."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from hf_cce.api import apply_cce, causal_lm
from hf_cce.config import CCEConfig
from hf_cce.patches import preference
from hf_cce.patches.causal_lm import patch_of
from hf_cce.patches.handler import stand_first

logger = logging.getLogger(__name__)


class CCECallback(TrainerCallback):
    """``Trainer(..., callbacks=[CCECallback()])`` is ``apply_cce(model)`` plus a check that it took effect.

    It patches when the Trainer has been built (before accelerate wraps the model) and again when training begins, for
    callbacks added later and for ``model_init``, whose model is built only then.

    After the first step a line of the log (level INFO) says which way the loss went. The Trainer's logs get ``cce_fused`` (losses
    without logits so far), ``cce_materialised`` (times real logits were made nevertheless), on a GPU ``cce_peak_gib`` (PyTorch's
    largest allocation on the model's device since the process began, in GiB), and, once the gradient filter has run, ``cce_kept``
    and the others of ``model.cce_stats()``.

    Args:
        config: options of the loss; ``options`` replace single ones.
        on_unused: what to do when the first step has ended, or training has, without one fused loss: ``"warn"`` or
            ``"raise"`` (RuntimeError). One report per training run.

    Raises:
        ValueError: ``on_unused`` is neither, or, in the Trainer, the model cannot be supported.
    """

    def __init__(
        self, config: CCEConfig | None = None, on_unused: Literal["warn", "raise"] = "warn", **options: Any
    ) -> None:
        if on_unused not in ("warn", "raise"):
            raise ValueError(f'on_unused must be "warn" or "raise", got {on_unused!r}')
        self.config = CCEConfig.of(config, **options)
        self.on_unused = on_unused
        self._before: Any = None  # the model's counts at the beginning; None: checked
        self._steps = 0
        self._policy = False  # the trainer is one of those that patches.preference knows

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stand_first(self)
        if (model := kwargs.get("model")) is not None:  # None with model_init
            apply_cce(model, self.config)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stand_first(self)
        patch = patch_of(causal_lm(apply_cce(kwargs["model"], self.config)))
        assert patch is not None
        patch.stats.traced = False
        self._before, self._steps = replace(patch.stats), 0
        self._policy = preference.ready(args)

    @contextlib.contextmanager
    def _policy_step(self, model: Any) -> Iterator[None]:
        """What patches.preference runs a training step in: calls without labels may defer their logits there."""
        patch = patch_of(causal_lm(model)) if self._policy else None
        if patch is None:
            yield
            return
        patch.policy = True
        try:
            yield
        finally:
            patch.policy = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        self._check(args, kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        patch = patch_of(causal_lm(kwargs["model"])) if logs is not None and "loss" in logs else None
        if patch is not None and logs is not None:
            told = {"cce_fused": float(patch.stats.fused), "cce_materialised": float(patch.stats.materialised)}
            device = next(causal_lm(kwargs["model"]).parameters()).device
            if device.type == "cuda":
                told["cce_peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
            told |= {f"cce_{key}": round(value, 6) for key, value in patch.filter_state.stats().items()}
            logs.update(told)  # for the callbacks that come after this one
            if state.log_history:
                state.log_history[-1].update(told)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check(args, kwargs["model"])
        self._before = None

    def _check(self, args: Any, model: Any) -> None:
        """After a step: report, once, that no loss of this run was fused."""
        if self._before is None or self._steps == 0:
            return
        base, before = causal_lm(model), self._before
        patch = patch_of(base)
        self._before = None  # reached, or reported: either way once per run
        if patch is not None and (patch.stats.as_meant > before.as_meant or patch.stats.traced):
            if patch.stats.traced:
                way = "without logits, in a compiled graph"
            elif patch.stats.few_tokens > before.few_tokens:
                way = "by the model's own loss, which is as fast for so few tokens"
            else:
                way = "without logits"
            logger.info("hf_cce: the losses of this training run are computed %s", way)
            return
        message = f"hf_cce: a training step ended without our fused loss: {_why(args, base, before)}"
        if self.on_unused == "raise":
            raise RuntimeError(message)
        if patch is not None and patch.stats.bypassed and not before.bypassed:
            return  # the patch has just said so, for those who use no callback
        warnings.warn(message, stacklevel=2)


def _why(args: Any, base: Any, before: Any) -> str:
    if _is_trl(base.forward):
        return (
            "TRL replaces the model's forward with its own fused LM head (trl.trainer.utils.add_fused_lm_head), so "
            "neither the model's forward nor its loss is called"
        )
    patch = patch_of(base)
    if patch is None:
        return "the patch was removed during training"
    if getattr(args, "label_smoothing_factor", 0):
        return "label_smoothing_factor makes Trainer take the labels away and compute the loss from logits itself"
    if patch.stats.calls == before.calls:
        return "the model was never called with labels in training mode (compute_loss_func, or your own compute_loss?)"
    if patch.stats.materialised == before.materialised:
        return "the model computed its loss another way; the warning of its first training call says why"
    return "the model computed its loss from full logits; the warning of its first training call says why"


def _is_trl(forward: Any) -> bool:
    """True for TRL's forward, also under those of accelerate; each layer copies the signature of the one below."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
