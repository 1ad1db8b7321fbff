"""TRL: DistillationTrainer's divergence of student and teacher is computed by ``linear_divergence``.

Cause: the trainer runs both models without their heads and calls, by a name of its module, ``ChunkedDivergenceFunction.apply``
with hidden states and head weights. Versions: TRL 1.16; the arguments are compared with those known here, and another TRL is
left alone. It can go when TRL has a place for another kernel.

How: ``CCECallback`` knows the trainer by the type of its arguments. ``training_step`` of the trainer's class is wrapped, because
callbacks are not told of a step that raises; while it runs for a patched model, the name answers by our operator. Evaluation
keeps TRL's function, as does a head that DeepSpeed ZeRO-3 gathers for the time of TRL's call alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from hf_cce.config import CCEConfig
from hf_cce.deferred.training_call import Stats
from hf_cce.divergence import TeacherHead, token_divergences
from hf_cce.head_checks import why_not_read

ARGUMENTS_OF_TRAINER = "trl.trainer.distillation_config.DistillationConfig"
MODULE = "trl.trainer.distillation_trainer"
NAME = "ChunkedDivergenceFunction"
ARGUMENTS = (
    "ctx", "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias", "beta",
    "temperature", "student_logit_scale", "student_final_logit_softcapping", "teacher_logit_scale",
    "teacher_final_logit_softcapping",
)  # fmt: skip
# A callback's method of this name takes the model and returns a context manager: a step of the trainer
STEP = "_distillation_step"
_current: ContextVar[tuple[CCEConfig, Stats] | None] = ContextVar("hf_cce_distillation", default=None)


class _Dispatch:
    """Stands where the trainer's module looks for its function."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.signature = inspect.signature(original.forward)

    def apply(self, *args: Any) -> Any:
        running = _current.get()
        given = self.signature.bind(None, *args)
        given.apply_defaults()
        asked = given.arguments
        heads = [asked[f"{side}_{part}"] for side in ("student", "teacher") for part in ("weight", "bias")]
        held = any(hasattr(x, "ds_id") for x in heads)
        if running is None or held or why_not_read(*heads[:2]) or why_not_read(*heads[2:]):
            return self.original.apply(*args)
        config, stats = running
        stats.fused += 1
        student, teacher = (_head(asked, side) for side in ("student", "teacher"))
        return token_divergences(student, teacher, asked["beta"], asked["temperature"], None, config, entropy=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _head(asked: dict[str, Any], side: str) -> TeacherHead:
    """One of the two models of a call of TRL's function, in the dtype of its hidden states."""
    hidden, weight, bias = (asked[f"{side}_{part}"] for part in ("hidden", "weight", "bias"))
    bias = None if bias is None else bias.to(hidden.dtype)
    scale, softcap = asked[f"{side}_logit_scale"], asked[f"{side}_final_logit_softcapping"]
    return TeacherHead(hidden, weight.to(hidden.dtype), bias, scale, softcap)


def ready(args: Any) -> bool:
    """Whether ``args`` are a DistillationTrainer's that can be answered; from now on its steps run within ``STEP``."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(args).__mro__]
    module: Any = sys.modules.get(MODULE) if ARGUMENTS_OF_TRAINER in names else None
    function, trainer = getattr(module, NAME, None), getattr(module, "DistillationTrainer", None)
    if function is None or not callable(getattr(trainer, "training_step", None)):
        return False
    if not isinstance(function, _Dispatch):
        if tuple(inspect.signature(function.forward).parameters) != ARGUMENTS:
            return False
        setattr(module, NAME, _Dispatch(function))
    if not hasattr(trainer.training_step, STEP):  # type: ignore[union-attr]
        trainer.training_step = _within(trainer.training_step)  # type: ignore[union-attr]
    return True


@contextmanager
def answering(config: CCEConfig, stats: Stats) -> Iterator[None]:
    """Answer in this thread, and count, until the block ends."""
    token = _current.set((config, stats))
    try:
        yield
    finally:
        _current.reset(token)


def _within(original: Any) -> Any:
    @functools.wraps(original)
    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, STEP):
                    stack.enter_context(getattr(callback, STEP)(model))
            return original(self, model, *args, **kwargs)

    setattr(training_step, STEP, True)
    return training_step
