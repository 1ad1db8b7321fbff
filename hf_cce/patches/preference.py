"""TRL: the experimental preference trainers that compute log-probabilities from the logits of a call without labels.

Cause: the trainers for ORPO, CPO and TPO call ``model(input_ids, …)`` and give its logits to ``selective_log_softmax``,
``selective_log_softmax_and_entropy`` and ``F.cross_entropy``. Versions: TRL 1.16; the arguments of the functions are compared
with those known here, and another TRL is left alone. It can go when TRL gives these trainers its fused head.

How: ``CCECallback`` knows the trainer by the type of its arguments, and lets the model defer its logits in training calls without
labels while ``training_step`` of the trainer's class runs. That method is wrapped, because callbacks are not told of a step that
raises. The functions that the trainer's module calls by name are given to an object that answers for ``LazyLogits`` and passes
everything else on. One process only: what wraps a model for several looks for tensors in its output. The trainers with a
reference model (A2PO, OnlineDPO) are left out: its log-probabilities, of which they take the difference to the policy's, would
be rounded in another way; and those that need whole distributions (GKD, SDPO …).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from hf_cce.deferred.logits import LazyLogits
from hf_cce.patches.evaluation import contexts

ONE = "selective_log_softmax"
TWO = "selective_log_softmax_and_entropy"
ARGUMENTS = {
    ONE: ("logits", "index", "temperature", "row_mask"),
    TWO: ("logits", "index", "entropy_requires_grad", "temperature", "row_mask"),
}
# The type of a trainer's arguments: the module of the trainer, its class and what it calls there
TRAINERS = {
    "trl.experimental.orpo.orpo_config.ORPOConfig": ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer", ONE),
    "trl.experimental.cpo.cpo_config.CPOConfig": ("trl.experimental.cpo.cpo_trainer", "CPOTrainer", ONE),
    "trl.experimental.tpo.tpo_config.TPOConfig": ("trl.experimental.tpo.tpo_trainer", "TPOTrainer", TWO),
}
# A callback's method of this name takes the model and returns a context manager: a step of a trainer that is ready
STEP = "_policy_step"


class _Dispatch:
    """Stands where a trainer's module looks for its function."""

    def __init__(self, name: str, original: Any) -> None:
        self.original = original
        self.signature = inspect.signature(original)
        self.entropy = name == TWO

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        logits = asked["logits"]
        if not isinstance(logits, LazyLogits):
            return self.original(*args, **kwargs)
        if not logits.can_answer(asked["index"]) or asked["temperature"] <= 0:
            asked["logits"] = logits._real(self.original.__name__)
            return self.original(*given.args, **given.kwargs)
        found = logits.log_probs(asked["index"], asked["temperature"], asked["row_mask"], entropy=self.entropy)
        logits.recipe.call.note_fused()
        if not self.entropy:
            return found.log_probs
        assert found.entropy is not None
        return found.log_probs, found.entropy if asked["entropy_requires_grad"] else found.entropy.detach()


def _known(args: Any) -> list[tuple[str, str, str]]:
    return [
        TRAINERS[name] for kind in type(args).__mro__ if (name := f"{kind.__module__}.{kind.__qualname__}") in TRAINERS
    ]


def knows(args: Any) -> bool:
    """Whether ``args`` are those of a trainer that takes its loss from the logits of calls without labels."""
    return bool(_known(args))


def ready(args: Any) -> bool:
    """Whether the trainer with these arguments may get ``LazyLogits``; its functions answer for them from now on.

    From now on its class also runs every training step within what the trainer's callbacks return from their method ``STEP``.
    """
    known = _known(args)
    if not known or args.world_size != 1 or args.n_gpu > 1 or getattr(args, "torch_compile", False):
        return False
    module, name = sys.modules.get(known[0][0]), known[0][2]
    trainer, function = getattr(module, known[0][1], None), getattr(module, name, None)
    if not callable(getattr(trainer, "training_step", None)):
        return False
    if not isinstance(function, _Dispatch):
        if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters) != ARGUMENTS[name]:
            return False
        setattr(module, name, _Dispatch(name, function))
    if not hasattr(trainer.training_step, STEP):  # type: ignore[union-attr]
        trainer.training_step = _within(trainer.training_step)  # type: ignore[union-attr]
    return True


def _within(original: Any) -> Any:
    """``training_step`` that ends what the callbacks began for it, also when it raises."""

    @functools.wraps(original)
    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with contexts(self, STEP, model):
            return original(self, model, *args, **kwargs)

    setattr(training_step, STEP, True)
    return training_step
