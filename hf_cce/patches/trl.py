"""TRL: the fused LM head that it gives to every model computes its per-token log-probabilities by our operator.

Cause: the trainers for SFT, DPO, KTO, GRPO and RLOO replace the model's forward (``trl.trainer.utils.add_fused_lm_head``) and
call ``model(..., fused_lm_head=True)``, which calls neither the head nor the model's loss. What it calls, by a name that is
looked up each time, is ``trl.trainer.utils._ChunkedLogProbFunction.apply``. Versions: TRL 1.16; the arguments are compared with
those known here, and another TRL is left alone. It can go when TRL has a place for another kernel.

How: the name is given to an object whose ``apply`` looks whether a call of a patched model is on its way in this thread, and
passes everything else on to what was there. SFT's gradients go through the filter, as those of a loss do; the other trainers'
are exact. The calls without gradients, of evaluation and of the old policy, are answered too: their log-probabilities must be
those of the training call to the last bit, or the ratio of policies is not one. Under DeepSpeed ZeRO-3 TRL gathers the head for
the time of this call alone: a frozen one, as under LoRA, is held until the backward pass, which follows; one with a gradient
keeps TRL's function, which makes that gradient at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from hf_cce.deferred.training_call import TrainingCall
from hf_cce.head_checks import gathered, why_not_read
from hf_cce.loss import linear_log_probs

NAME = "_ChunkedLogProbFunction"
ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
# Only SFT asks for these and no more. The others compare their log-probabilities with those of a call without gradients, from
# which the filter's differ by rounding.
SFT_OUTPUTS = {"entropy", "is_top1"}
Answer = Callable[[Any, dict[str, Any]], Any]
_current: ContextVar[TrainingCall | None] = ContextVar("hf_cce_trl_call", default=None)


class Replacement:
    """Stands where TRL looks for an autograd function, and answers while ``current`` holds something.

    ``answer`` gets that value and the function's arguments by name, and may return NotImplemented.
    """

    def __init__(self, original: Any, current: ContextVar[Any], answer: Answer) -> None:
        self.original, self.current, self.answer = original, current, answer
        self.signature = inspect.signature(original.forward)

    def apply(self, *args: Any) -> Any:
        running, found = self.current.get(), NotImplemented
        if running is not None:
            given = self.signature.bind(None, *args)
            given.apply_defaults()
            found = self.answer(running, given.arguments)
        return self.original.apply(*args) if found is NotImplemented else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def replace(module: Any, name: str, arguments: tuple[str, ...], current: ContextVar[Any], answer: Answer) -> bool:
    """Put a ``Replacement`` in the place of a function; False if no function there has exactly these arguments."""
    function = getattr(module, name, None)
    if isinstance(function, Replacement):
        return True
    forward = getattr(function, "forward", None)
    if forward is None or tuple(inspect.signature(forward).parameters) != arguments:
        return False
    setattr(module, name, Replacement(function, current, answer))
    return True


def enter(call: TrainingCall) -> bool:
    """From now on ``call`` answers, in this thread; False where this TRL cannot be answered."""
    utils = sys.modules.get("trl.trainer.utils")  # whoever calls with fused_lm_head=True has imported it
    known = replace(utils, NAME, ARGUMENTS, _current, _answer)
    if known:
        _current.set(call)
    return known


def leave() -> TrainingCall | None:
    """The call that was on its way, if any; it answers no more."""
    call = _current.get()
    if call is not None:
        _current.set(None)
    return call


def _held(parameter: Tensor) -> Tensor:
    """A frozen parameter that ZeRO-3 has gathered as a tensor whose values outlive its release; another parameter as it is."""
    return parameter.detach() if gathered(parameter) and not parameter.requires_grad else parameter


def _answer(call: TrainingCall, asked: dict[str, Any]) -> Any:
    """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], None where not asked for."""
    hidden, bias, temperature, outputs = (asked[name] for name in ("hidden", "bias", "temperature", "outputs"))
    softcap = asked["final_logit_softcapping"]
    held, held_bias = _held(asked["weight"]), None if bias is None else _held(bias)
    if held.is_meta:  # TRL has moved the hidden states there: nothing can be computed of them any more
        raise RuntimeError(
            "TRL cannot train with an offloaded LM head: it reads lm_head.weight, which is not on the device between calls of "
            "the head; choose a device_map that keeps lm_head on the device (model.embed_tokens may be offloaded)"
        )
    reason = why_not_read(held, held_bias)
    if reason is None and any(hasattr(x, "ds_id") for x in (held, held_bias)):
        reason = "DeepSpeed ZeRO-3 gathers the head only during TRL's call, which also computes its gradient"
    if reason is not None:
        call.note_refused(reason)
        return NotImplemented
    # softcap · tanh(scale · z / softcap) / T is what the loss computes with scale / T and softcap / T.
    result = linear_log_probs(
        hidden,
        held.to(hidden.dtype),
        asked["targets"],
        bias=None if held_bias is None else held_bias.to(hidden.dtype),
        logit_scale=asked["logit_scale"] / temperature,
        softcap=None if softcap is None else softcap / temperature,
        entropy="entropy" in outputs,
        log_sum_sq_probs="log_sum_sq_probs" in outputs,
        mean_logit="mean_logits" in outputs,
        is_top1="is_top1" in outputs,
        config=call.config,
        filter_state=call.filter_state if SFT_OUTPUTS <= {*outputs} <= SFT_OUTPUTS | {"log_probs"} else None,
    )
    call.note_fused()
    mean_logits = None if result.mean_logit is None else result.mean_logit.detach()
    return result.log_probs, result.entropy, result.log_sum_sq_probs, mean_logits, result.is_top1
