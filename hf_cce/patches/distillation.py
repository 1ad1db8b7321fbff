"""TRL: compute the divergence of student and teacher in DistillationTrainer, GKD and GOLD with hf_cce's operator.

Cause: DistillationTrainer runs both models without their heads and calls ``ChunkedDivergenceFunction.apply`` with hidden states
and head weights. Versions: TRL 1.16; a TRL whose functions have other arguments is not patched. Can be removed when TRL accepts
other kernels.

How: ``CCECallback`` recognizes the trainer by the type of its arguments, and sets ``current`` during each step of a patched
model. ``apply`` then uses hf_cce's operator, except in evaluation and for a head that DeepSpeed ZeRO-3 gathers only during TRL's
call. If a step raises, ``current`` stays set until the next training with a callback begins; that changes no result.

GKD and GOLD pass the logits of both models to a static method, ``generalized_jsd_loss``, which is wrapped: it handles deferred
logits of the student with full logits of the teacher, and passes everything else to the original.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hf_cce.deferred.handlers import can_compute_divergences, can_compute_log_probs
from hf_cce.deferred.logits import LazyLogits
from hf_cce.deferred.recipe import Recipe
from hf_cce.divergence import Options, TeacherHead, divergences
from hf_cce.head_checks import why_not_read
from hf_cce.patches import trl
from hf_cce.patches.marking import replace, signature

ARGUMENTS_OF_TRAINER = "trl.trainer.distillation_config.DistillationConfig"
MODULE = "trl.trainer.distillation_trainer"
NAME = "ChunkedDivergenceFunction"
ARGUMENTS = (
    "ctx", "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias", "beta",
    "temperature", "student_logit_scale", "student_final_logit_softcapping", "teacher_logit_scale",
    "teacher_final_logit_softcapping",
)  # fmt: skip
ON_LOGITS = "generalized_jsd_loss"
TRAINERS_ON_LOGITS = {
    "trl.experimental.gkd.gkd_trainer": "GKDTrainer",
    "trl.experimental.gold.gold_trainer": "GOLDTrainer",
}
ARGUMENTS_ON_LOGITS = (
    "student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction", "logits_are_probs",
    "num_items_in_batch",
)  # fmt: skip
# Weak reference to the ``Patch`` of the model whose training step runs in this thread. The patch refers to the head, which must
# not be kept after an exception.
current: ContextVar[Any] = ContextVar("hf_cce_distillation", default=None)


def _handle_call(running: Any, arguments: dict[str, Any]) -> Any:
    patch = running()
    if patch is None or not torch.is_grad_enabled():
        return NotImplemented
    heads = [arguments[f"{side}_{part}"] for side in ("student", "teacher") for part in ("weight", "bias")]
    reason = trl.why_not_in_backward(*heads) or why_not_read(*heads[:2]) or why_not_read(*heads[2:])
    if reason is not None:
        patch.stats.missed += 1
        patch.warn_unfused(reason)
        return NotImplemented
    patch.stats.fused += 1
    student, teacher = (_head(arguments, side) for side in ("student", "teacher"))
    # On other devices, TRL masks the divergences, and masked tokens have another upstream gradient.
    summed = student.hidden_states.device.type in ("cuda", "xpu")
    options = Options(arguments["beta"], arguments["temperature"], entropy=True, summed=summed)
    return divergences(student, teacher, options, None, patch.config)


def _head(arguments: dict[str, Any], side: str) -> TeacherHead:
    """Return hidden states and head of one of the two models in a call of TRL's function, in the dtype of its hidden states."""
    hidden, weight, bias = (arguments[f"{side}_{part}"] for part in ("hidden", "weight", "bias"))
    bias = None if bias is None else bias.to(hidden.dtype)
    scale, softcap = arguments[f"{side}_logit_scale"], arguments[f"{side}_final_logit_softcapping"]
    return TeacherHead(hidden, weight.to(hidden.dtype), bias, scale, softcap)


def install_on_trainer(args: Any) -> bool:
    """Return whether ``args`` belong to a supported DistillationTrainer; if so, handle its divergences in steps."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(args).__mro__]
    module: Any = sys.modules.get(MODULE) if ARGUMENTS_OF_TRAINER in names else None
    return trl.intercept(getattr(module, NAME, None), ARGUMENTS, current, _handle_call)


def install() -> None:
    """Wrap the divergence of GKD and GOLD, once; do nothing if it is not loaded or has other arguments."""
    for module, name in TRAINERS_ON_LOGITS.items():
        trainer: Any = getattr(sys.modules.get(module), name, None)
        original = getattr(trainer, ON_LOGITS, None)
        # GKD's has no ``logits_are_probs``.
        if {*signature(original).parameters, "logits_are_probs"} == {*ARGUMENTS_ON_LOGITS}:
            replace(trainer, ON_LOGITS, _on_logits)


def _on_logits(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    values: Any = map(given.arguments.get, ARGUMENTS_ON_LOGITS)
    student, teacher, labels, beta, temperature, reduction, probs, items = values
    known = isinstance(student, LazyLogits) and isinstance(teacher, Tensor) and not isinstance(teacher, LazyLogits)
    known = known and can_compute_log_probs(student) and can_compute_divergences(student)
    known = known and student.shape == teacher.shape and not teacher.requires_grad
    if not known or probs or reduction not in ("batchmean", "sum") or not 0.0 <= beta <= 1.0:
        return original(*args, **kwargs)
    mask = torch.ones_like(teacher[..., 0], dtype=torch.bool) if labels is None else labels != -100

    def fused(r: Recipe) -> tuple[Tensor]:
        arguments = r.loss_arguments()
        config = arguments.pop("config")
        return divergences(TeacherHead(**arguments), teacher, Options(beta, temperature), mask, config)[:1]

    def native(z: Tensor) -> tuple[Tensor]:
        found = original(z, teacher, beta=beta, temperature=temperature, reduction="none")
        return (found.sum(-1) * mask,)

    total = student._compute_fused(fused, native)[0].sum()
    student.recipe.call.note_fused()
    if items is None:
        items = 1 if reduction == "sum" else max(len(teacher), 1) if labels is None else mask.sum().clamp_min(1)
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)
