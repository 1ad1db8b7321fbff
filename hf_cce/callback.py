"""``CCECallback``: patches a Trainer's model at the right moment, and says so when a run misses the fused loss."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_cce.api import apply_cce, causal_lm, disabled
from hf_cce.config import CCEConfig
from hf_cce.deferred.training_call import Stats, warn
from hf_cce.patches import distillation
from hf_cce.patches.causal_lm import Patch, patch_of

logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """A training run: the model's counters, and what they were when the run, its current step and its last micro-batch began."""

    stats: Stats  # they count on
    start: Stats
    step: Stats
    losses: int = 0  # as meant, when the last micro-batch had ended
    batches: int = 0
    missed: int = 0  # micro-batches of which no loss was ours
    hit: bool = False  # the step has a loss of ours
    told: bool = False  # which way the losses go
    reported: bool = False  # that a step has none of ours

    def begin_step(self, patch: Patch | None) -> None:
        self._follow(patch)
        self.step, self.losses, self.hit = replace(self.stats), self.stats.as_meant, False

    def end_batch(self, patch: Patch | None) -> None:
        self._follow(patch)
        hit = self.stats.as_meant > self.losses
        self.losses = self.stats.as_meant
        self.batches, self.missed, self.hit = self.batches + 1, self.missed + (not hit), self.hit or hit

    def _follow(self, patch: Patch | None) -> None:
        if patch is not None and patch.stats is not self.stats:  # removed and patched anew: it counts from zero
            self.stats, self.start, self.step, self.losses = patch.stats, Stats(), Stats(), 0


class CCECallback(TrainerCallback):
    """Patch the model of a Trainer, and check at every step that the loss is fused.

    The model is patched when the Trainer is built, before accelerate wraps it; with ``model_init``, or for a callback added
    later, when training begins.

    After the first step one line says how the losses are computed. If micro-batches missed the fused loss, another line at the
    end says how many. Both go to the log (level INFO); where that level is off, the main process prints them. For silence, set
    ``disable_tqdm=True`` or ``logging.getLogger("hf_cce").setLevel(logging.ERROR)``.

    The Trainer's logs get ``cce/fused`` and ``cce/materialized``. Trainer calls the reporters of ``report_to`` before the
    callbacks that it is given. To send the keys to W&B or TensorBoard, patch the model with ``apply_cce`` and put this callback
    first: ``trainer.callback_handler.callbacks.insert(0, CCECallback())``.

    Args:
        config: options of the loss. Without ``config`` and ``options``, a patched model keeps its options.
        on_unused: what to do when a step ends without a fused loss: ``"warn"`` once in a run, or ``"raise"`` a RuntimeError.
        details: log the gradient filter's measurements and the peak memory of the GPU as well.
        **options: single options of ``CCEConfig``, which replace those of ``config``.

    Raises:
        ValueError: ``on_unused`` has a wrong value, or, in the Trainer, the model is not supported.
    """

    def __init__(
        self,
        config: CCEConfig | None = None,
        on_unused: Literal["warn", "raise"] = "warn",
        details: bool = False,
        **options: Any,
    ) -> None:
        if on_unused not in ("warn", "raise"):
            raise ValueError(f'on_unused must be "warn" or "raise", got {on_unused!r}')
        self.config = CCEConfig.of(config, **options)
        self._given = config is not None or bool(options)
        self.on_unused, self.details = on_unused, details
        self._run: _Run | None = None
        self._distills = False  # the trainer is the one that patches.distillation knows
        self._token_sums: Tensor | None = None  # at the last entry of the logs

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if disabled():
            return
        if (model := kwargs.get("model")) is not None:  # None with model_init
            self._apply(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if disabled():
            return
        patch = self._apply(kwargs["model"])
        self._run = _Run(patch.stats, replace(patch.stats), replace(patch.stats))
        self._token_sums = patch.token_sums.sums
        self._run.begin_step(patch)
        self._distills = distillation.ready(args)

    def _apply(self, model: Any) -> Patch:
        """Patch the model; one that is patched keeps the options it has where we were given none."""
        known = None if self._given else patch_of(causal_lm(model))
        patch = patch_of(causal_lm(apply_cce(model, self.config if known is None else known.config)))
        assert patch is not None
        return patch

    @contextlib.contextmanager
    def _distillation_step(self, model: Any) -> Iterator[None]:
        """What patches.distillation runs a training step in: the divergence is ours there."""
        patch = patch_of(causal_lm(model)) if self._distills else None
        with contextlib.nullcontext() if patch is None else distillation.answering(patch.config, patch.stats):
            yield

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.begin_step(patch_of(causal_lm(kwargs["model"])))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.end_batch(patch_of(causal_lm(kwargs["model"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._run) is None:
            return
        run.end_batch(patch_of(causal_lm(kwargs["model"])))
        if not run.hit and not run.reported:
            run.reported = True
            self._report(run, args, state, kwargs["model"])
        elif run.hit and not run.told and not run.reported:
            run.told = True
            if run.stats.traced:
                way = "without logits, in a compiled graph"
            elif run.stats.few_tokens > run.step.few_tokens:
                way = "by the model's own loss, which is as fast for so few tokens"
            else:
                way = "without logits"
            _say(args, state, f"hf_cce: the losses of this training run are computed {way}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        patch = patch_of(causal_lm(kwargs["model"])) if logs is not None and "loss" in logs else None
        if patch is not None and logs is not None:
            found: dict[str, float] = {"fused": patch.stats.fused, "materialized": patch.stats.materialized}
            found |= patch.token_sums.means(self._token_sums)
            self._token_sums = patch.token_sums.sums
            if self.details:
                found |= patch.filter_state.stats()
                device = next(causal_lm(kwargs["model"]).parameters()).device
                if device.type == "cuda":
                    found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            told = {
                f"cce/{key}": round(value, 6) for key, value in found.items() if math.isfinite(value)
            }  # JSON has no NaN
            logs.update(told)  # for the callbacks that come after this one
            if state.log_history:
                state.log_history[-1].update(told)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if run.missed:
            made = run.stats.materialized - run.start.materialized
            told = f"{run.missed} of the {run.batches} micro-batches of this training run did not use the fused loss"
            _say(args, state, f"hf_cce: {told}; full logits were materialized {made} times")

    def _report(self, run: _Run, args: Any, state: Any, model: Any) -> None:
        """Say that no loss of the step that has just ended was ours."""
        why = _why(args, model, run)
        message = f"hf_cce: training step {state.global_step} did not use the fused loss: {why}"
        if self.on_unused == "raise":
            raise RuntimeError(message)
        if (run.stats.bypassed and not run.step.bypassed) or (run.stats.read and not run.step.read):
            return  # the patch has just said so, for those who use no callback
        warn(message)


def _say(args: Any, state: Any, message: str) -> None:
    """Log ``message``, and show it where somebody watches: by default the log leaves INFO out."""
    logger.info(message)
    by_default = (
        logging.INFO < logger.getEffectiveLevel() <= logging.WARNING
    )  # below it is in the log, above it is unwanted
    if by_default and state.is_world_process_zero and not args.disable_tqdm:
        tqdm.write(message)  # print would break the progress bar


def _why(args: Any, model: Any, run: _Run) -> str:
    base = causal_lm(model)
    compiled = getattr(args, "torch_compile", False) or _is_compiled(model, base)
    if patch_of(base) is None:
        return "the patch was removed during training"
    if compiled and _is_trl(base.forward):
        return (
            "under torch.compile, TRL's own fused LM head (trl.trainer.utils.add_fused_lm_head) computes the loss; "
            "train without torch_compile to use hf_cce's kernels"
        )
    if run.stats.bypassed > run.step.bypassed:
        return (
            "TRL replaces the model's forward with its own fused LM head (trl.trainer.utils.add_fused_lm_head), "
            "which bypasses the model's forward and loss"
        )
    if compiled:  # where nothing is counted
        return (
            "no torch.compile graph that ran in this step contains the fused loss. Either the trainer calls the model "
            "without labels and computes the loss itself (label_smoothing_factor, compute_loss_func, a preference trainer); "
            "then train without torch_compile, because the logits of such calls are deferred in eager mode only. Or the model "
            "computes its loss in another way; to see the reason, run a step without torch_compile"
        )
    if run.stats.calls == run.step.calls:
        return "the model was never called in training mode with gradients enabled (do you override compute_loss?)"
    if run.stats.materialized == run.step.materialized:
        return "the model computed its loss in another way; an earlier warning gives the reason"
    return "the model computed its loss from full logits; an earlier warning gives the reason"


def _is_compiled(model: nn.Module, base: nn.Module) -> bool:
    """Whether calls of ``base`` run in a graph: it or a module around it was compiled, and not just its layers."""
    return any(
        ("_orig_mod" in module._modules or module._compiled_call_impl is not None)
        and any(inner is base for inner in module.modules())
        for module in model.modules()
    )


def _is_trl(forward: Any) -> bool:
    """True for TRL's forward, also under those of accelerate; each layer copies the signature of the one below."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
