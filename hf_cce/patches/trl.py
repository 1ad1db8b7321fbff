"""TRL: the fused LM head that it gives to every model computes its per-token log-probabilities by our operator.

Cause: the trainers for SFT, DPO, KTO, GRPO and RLOO replace the model's forward (``trl.trainer.utils.add_fused_lm_head``) and
call ``model(..., fused_lm_head=True)``, which calls neither the head nor the model's loss. What it calls, by a name that is
looked up each time, is ``trl.trainer.utils._ChunkedLogProbFunction.apply``. Versions: TRL 1.16; the arguments are compared with
those known here, and another TRL is left alone. It can go when TRL has a place for another kernel.

How: the name is given to an object whose ``apply`` looks whether a call of a patched model is on its way in this thread, and
passes everything else on to what was there. SFT's gradients go through the filter, as a loss of ours does; the other trainers'
are exact. The calls without gradients, of evaluation and of the old policy, are answered too: their log-probabilities must be
those of the training call to the last bit, or the ratio of policies is not one. Under DeepSpeed ZeRO-3 TRL gathers the head for
the time of this call alone: a frozen one, as under LoRA, is held until the backward pass, which follows; one with a gradient
keeps TRL's function, which makes that gradient at once.
"""

from __future__ import annotations

import inspect
import sys
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
# What SFT asks for, and nobody else: of the others DPO wants mean logits too, and all of them compare their log-probabilities
# with those of a call without gradients, from which the filter's differ by rounding.
FINE_TUNING = {"entropy", "is_top1"}
_current: ContextVar[TrainingCall | None] = ContextVar("hf_cce_trl_call", default=None)


class _Dispatch:
    """Stands where TRL looks for its function."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(self, *args: Any) -> Any:
        call = _current.get()
        return self.original.apply(*args) if call is None else _answer(call, self.original, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def enter(call: TrainingCall) -> bool:
    """From now on ``call`` answers, in this thread; False where this TRL cannot be answered."""
    utils = sys.modules.get("trl.trainer.utils")  # whoever calls with fused_lm_head=True has imported it
    function = getattr(utils, NAME, None)
    if isinstance(function, _Dispatch):
        _current.set(call)
        return True
    forward = getattr(function, "forward", None)
    if forward is None or tuple(inspect.signature(forward).parameters) != ARGUMENTS:
        return False
    setattr(utils, NAME, _Dispatch(function))
    _current.set(call)
    return True


def leave() -> TrainingCall | None:
    """The call that was on its way, if any; it answers no more."""
    call = _current.get()
    if call is not None:
        _current.set(None)
    return call


def _held(parameter: Tensor) -> Tensor:
    """The values of a frozen parameter that ZeRO-3 has gathered, which stay when it lets the parameter go; or the parameter."""
    return parameter.detach() if gathered(parameter) and not parameter.requires_grad else parameter


def _answer(
    call: TrainingCall,
    original: Any,
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    targets: Tensor,  # [N]
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> tuple[Tensor | None, ...]:
    """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], None where not asked for."""
    held, held_bias = _held(weight), None if bias is None else _held(bias)
    reason = why_not_read(held, held_bias)
    if reason is None and any(hasattr(x, "ds_id") for x in (held, held_bias)):
        reason = "DeepSpeed ZeRO-3 gathers the head for TRL's call alone, which makes its gradient at once"
    if reason is not None:
        call.note_refused(reason)
        return original.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
    # softcap · tanh(scale · z / softcap) / T is the softcap / T of scale / T.
    result = linear_log_probs(
        hidden,
        held.to(hidden.dtype),
        targets,
        bias=None if held_bias is None else held_bias.to(hidden.dtype),
        logit_scale=logit_scale / temperature,
        softcap=None if softcap is None else softcap / temperature,
        entropy="entropy" in outputs,
        log_sum_sq_probs="log_sum_sq_probs" in outputs,
        mean_logit="mean_logits" in outputs,
        is_top1="is_top1" in outputs,
        config=call.config,
        filter_state=call.filter_state if FINE_TUNING <= {*outputs} <= FINE_TUNING | {"log_probs"} else None,
    )
    call.note_fused()
    mean_logits = None if result.mean_logit is None else result.mean_logit.detach()
    return result.log_probs, result.entropy, result.log_sum_sq_probs, mean_logits, result.is_top1
