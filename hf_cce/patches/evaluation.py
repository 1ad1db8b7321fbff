"""Transformers: an evaluation whose logits nobody asks for makes none.

Cause: ``Trainer.evaluate`` without ``compute_metrics``, and every evaluation with ``prediction_loss_only``, keep the loss alone,
but the model makes all logits for it: where training fits into memory only without them, evaluation does not. Versions: read and
tested with transformers 5.0 and 5.23, whose own Liger option leaves them out likewise. It can go when Trainer tells its callbacks
that a prediction step begins, and what it is for.

How: ``Trainer.prediction_step`` is wrapped, once for the process, because no event comes before it. Where it is called for the
loss alone, the trainer's callbacks that have a method ``STEP`` are asked for a context; nobody else's evaluation is touched. A
subclass with a ``compute_loss`` of its own, or whose ``prediction_step`` does not call Trainer's (TRL's), is left alone.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack, nullcontext
from typing import Any

# A callback's method of this name takes the model and returns a context manager: a step of an evaluation for the loss alone
STEP = "_loss_only_step"


def enter() -> None:
    """From now on Trainer asks its callbacks; nothing to do where it does, or where its method is another one than is known."""
    from transformers import Trainer

    original = Trainer.prediction_step
    known = list(inspect.signature(original).parameters)[:4] == ["self", "model", "inputs", "prediction_loss_only"]
    if known and not hasattr(original, STEP):
        Trainer.prediction_step = _asking(original)  # type: ignore[method-assign]


def _asking(original: Any) -> Any:
    from transformers import Trainer

    trainers_own = Trainer.compute_loss

    @functools.wraps(original)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        # A compute_loss of the user's own may look at the logits, on one rank of several, or ask whether they are a tensor.
        nobody_looks = prediction_loss_only and getattr(self.compute_loss, "__func__", None) is trainers_own
        with contexts(self, STEP, model) if nobody_looks else nullcontext():
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    setattr(prediction_step, STEP, True)
    return prediction_step


def contexts(trainer: Any, method: str, model: Any) -> ExitStack:
    """What those callbacks of ``trainer`` that have a method of this name return for ``model``: entered, in their order."""
    with ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, method):
                stack.enter_context(getattr(callback, method)(model))
        return stack.pop_all()
