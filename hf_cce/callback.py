"""``CCECallback``: patches the model of a Trainer, and reports training steps without a fused loss."""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_cce.api import apply_cce, causal_lm
from hf_cce.config import CCEConfig
from hf_cce.deferred.training_call import Stats, warn
from hf_cce.patches import distillation, trl
from hf_cce.patches.causal_lm import Patch, patch_of

logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """The model's counters in a training run, with their values when its current step began."""

    stats: Stats  # the live counters
    step: Stats
    announced: bool = False  # the line on how losses are computed was shown
    warned: bool = False  # a step without fused loss was reported


class CCECallback(TrainerCallback):
    """Trainer callback that patches the model and checks at every step that the loss is fused.

    The model is patched when the Trainer is created, before accelerate wraps it. With ``model_init``, or if the callback is added
    later, it is patched when training begins.

    After the first step one line says how the losses are computed. It is logged at level INFO; if the log hides that level by
    default, the main process prints it. To silence it, set ``disable_tqdm=True`` or
    ``logging.getLogger("hf_cce").setLevel(logging.ERROR)``.

    ``cce/fused`` and ``cce/materialized`` are added to the Trainer's logs. Trainer calls the integrations of ``report_to`` before
    user callbacks. To send the keys to W&B or TensorBoard, patch the model with ``apply_cce`` and insert this callback first:
    ``trainer.callback_handler.callbacks.insert(0, CCECallback())``.

    Args:
        config: options of the loss. Without ``config`` and ``options``, a model that is already patched keeps its options.
        on_unused: what to do when a step ends without a fused loss: ``"warn"`` once per run, or ``"raise"`` a RuntimeError.
        details: also log the gradient filter's measurements and the peak GPU memory.
        **options: individual options of ``CCEConfig``, which override those of ``config``.

    Raises:
        ValueError: ``on_unused`` has an invalid value, or, in the Trainer, the model is not supported.
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
        self._distills = False  # the trainer is supported by patches.distillation
        self._token_sums: Tensor | None = None  # at the last log entry

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (model := kwargs.get("model")) is not None:  # None with model_init
            self._apply(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        distillation.current.set(None)  # the last training may have ended with an exception
        patch = self._apply(kwargs["model"])
        compiled = getattr(args, "torch_compile", False)  # then TRL's own head computes the model's log-probabilities
        trl.set_reference(None if patch is None or compiled else patch.config)
        if patch is None:  # disabled
            return
        self._run = _Run(patch.stats, replace(patch.stats))
        self._token_sums = patch.token_sums.sums
        self._distills = distillation.install_on_trainer(args)

    def _apply(self, model: Any) -> Patch | None:
        """Patch the model. If this callback was given no options, a model that is already patched keeps its own."""
        known = None if self._given else patch_of(causal_lm(model))
        return patch_of(causal_lm(apply_cce(model, self.config if known is None else known.config)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._run) is not None:
            patch = patch_of(causal_lm(kwargs["model"]))
            run.stats = run.stats if patch is None else patch.stats
            run.step = replace(run.stats)
            if self._distills:
                distillation.current.set(None if patch is None else weakref.ref(patch))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        distillation.current.set(None)
        if (run := self._run) is None:
            return
        patch = patch_of(causal_lm(kwargs["model"]))
        if patch is not None and patch.stats is not run.stats:  # patched again: the new counters start at zero
            run.stats, run.step = patch.stats, Stats()
        if run.warned:
            return
        if run.stats.without_fallback == run.step.without_fallback:
            run.warned = True
            self._report(run, args, state, kwargs["model"])
        elif not run.announced:
            run.announced = True
            if run.stats.traced:
                how = "without logits, in a compiled graph"
            elif run.stats.few_tokens > run.step.few_tokens:
                how = "by the model's own loss, which is as fast for so few tokens"
            else:
                how = "without logits"
            _say(args, state, f"hf_cce: the losses of this training run are computed {how}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or (patch := patch_of(causal_lm(kwargs["model"]))) is None:
            return
        found: dict[str, float] = {"fused": patch.stats.fused, "materialized": patch.stats.materialized}
        found |= patch.token_sums.means(self._token_sums)
        self._token_sums = patch.token_sums.sums
        if self.details:
            found |= patch.filter_state.stats()
            device = next(causal_lm(kwargs["model"]).parameters()).device
            if device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        # Finite values only: JSON has no NaN.
        entry = {f"cce/{key}": round(value, 6) for key, value in found.items() if math.isfinite(value)}
        logs.update(entry)  # for the callbacks that come after this one
        if state.log_history:
            state.log_history[-1].update(entry)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run = None
        trl.set_reference(None)

    def _report(self, run: _Run, args: Any, state: Any, model: Any) -> None:
        """Warn or raise because the step that just ended had no fused loss."""
        message = f"hf_cce: training step {state.global_step} did not use the fused loss: {_why(args, model, run)}"
        if self.on_unused == "raise":
            raise RuntimeError(message)
        if (run.stats.bypassed and not run.step.bypassed) or (run.stats.read and not run.step.read):
            return  # the patch itself has just warned
        warn(message)


def _say(args: Any, state: Any, message: str) -> None:
    """Log ``message`` at INFO, and print it if the default log level hides it."""
    logger.info(message)
    # At INFO and below the log shows it; above WARNING the user wants silence.
    by_default = logging.INFO < logger.getEffectiveLevel() <= logging.WARNING
    if by_default and state.is_world_process_zero and not args.disable_tqdm:
        tqdm.write(message)  # print() would break the progress bar


def _why(args: Any, model: Any, run: _Run) -> str:
    base = causal_lm(model)
    compiled = getattr(args, "torch_compile", False) or _is_compiled(model, base)
    if patch_of(base) is None:
        return "the patch was removed during training"
    if run.stats.bypassed > run.step.bypassed:
        return (
            "TRL replaces the model's forward with its own fused LM head (trl.trainer.utils.add_fused_lm_head), "
            "which bypasses the model's forward and loss"
        )
    if compiled:  # calls in compiled graphs are not counted
        return (
            "no torch.compile graph that ran in this step contains the fused loss. Either the trainer calls the model "
            "without labels and computes the loss itself (label_smoothing_factor, compute_loss_func, a preference trainer, "
            "TRL's own fused LM head); then train without torch_compile, because such losses are fused in eager mode only. "
            "Or the model computes its loss in another way; to see the reason, run a step without torch_compile"
        )
    if run.stats.calls == run.step.calls and run.stats.missed == run.step.missed:
        return "the model was never called in training mode with gradients enabled (do you override compute_loss?)"
    return "the model computed its loss from full logits or in another way; an earlier warning gives the reason"


def _is_compiled(model: nn.Module, base: nn.Module) -> bool:
    """Return True if ``base`` runs in a compiled graph: it or a module around it was compiled, not only its layers."""
    return any(
        ("_orig_mod" in module._modules or module._compiled_call_impl is not None)
        and any(inner is base for inner in module.modules())
        for module in model.modules()
    )
