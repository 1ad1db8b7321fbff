"""TRL: compute the per-token log-probabilities of its fused LM head with ``linear_log_probs``.

Cause: the trainers for SFT, DPO, KTO, GRPO and RLOO replace the model's forward (``trl.trainer.utils.add_fused_lm_head``) and
call ``model(..., fused_lm_head=True)``, which uses neither the head's forward nor the model's loss. It calls
``trl.trainer.utils._ChunkedLogProbFunction.apply``. Versions: TRL 1.16; a TRL whose function has other arguments is not patched.
Can be removed when TRL accepts other kernels.

How: ``apply`` is replaced. It handles the calls of patched models in this thread and passes everything else to the original.
Calls without gradients (evaluation, the old policy) are handled too: their log-probabilities must equal those of the training
call bit for bit, or the ratio of policies is not one. Under DeepSpeed ZeRO-3, TRL gathers the head only for this call. A frozen
head, as under LoRA, is kept until the backward pass. A trainable one uses TRL's function, which computes its gradient at once.

The reference model of DPO, KTO, GRPO and RLOO is another model, which is not patched. ``CCECallback`` calls ``set_reference``
during training, so that this model uses the same kernels: with equal weights, its log-probabilities must equal those of the
policy bit for bit, or their divergence is not zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hf_cce.config import CCEConfig
from hf_cce.deferred.training_call import TrainingCall
from hf_cce.head_checks import find_head, is_gathered, why_not_read
from hf_cce.loss import linear_log_probs
from hf_cce.patches import marking

NAME = "_ChunkedLogProbFunction"
ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
# Only SFT requests exactly these, and its gradients are filtered. The other trainers compare log-probabilities with those of a
# call without gradients, from which those of a filtered call would differ by rounding.
SFT_OUTPUTS = {"entropy", "is_top1"}
Handler = Callable[[Any, dict[str, Any]], Any]
_current: ContextVar[TrainingCall | None] = ContextVar("hf_cce_trl_call", default=None)
_reference: ContextVar[TrainingCall | None] = ContextVar("hf_cce_trl_reference", default=None)


def intercept(function: Any, arguments: tuple[str, ...], current: ContextVar[Any], handler: Handler) -> bool:
    """Replace ``apply`` of an autograd function of TRL, once, by one that calls ``handler`` while ``current`` is set.

    ``handler`` gets the value of ``current`` and the arguments by name; if it returns NotImplemented, the original is called.
    Return False, and change nothing, if the function is None or does not have exactly these arguments.
    """
    signature = marking.signature(getattr(function, "forward", None))
    if tuple(signature.parameters) != arguments:
        return False

    def apply(original: Any, *args: Any) -> Any:
        running, found = current.get(), NotImplemented
        if running is not None:
            given = signature.bind(None, *args)
            given.apply_defaults()
            found = handler(running, given.arguments)
        return original(*args) if found is NotImplemented else found

    marking.replace(function, "apply", apply)
    return True


def begin_call(call: TrainingCall) -> bool:
    """Handle TRL's calls in this thread for ``call`` from now on; return False if this TRL is not supported."""
    known = _install()
    if known:
        _current.set(call)
    return known


def _install() -> bool:
    utils = sys.modules.get("trl.trainer.utils")  # imported by any code that calls with fused_lm_head=True
    return intercept(getattr(utils, NAME, None), ARGUMENTS, _current, _handle_call)


def end_call() -> TrainingCall | None:
    """End the current call of this thread and return it, or None if there is none."""
    call = _current.get()
    _current.set(_reference.get())
    return call


def set_reference(config: CCEConfig | None) -> None:
    """Handle calls without gradients of other models in this thread with ``config`` from now on; None: no longer."""
    _reference.set(TrainingCall(config) if config is not None and _install() else None)
    end_call()


def why_not_in_backward(*parameters: Any) -> str | None:
    """Return why the backward pass could not read these parameters, or None."""
    if any(hasattr(x, "ds_id") for x in parameters):
        return "DeepSpeed ZeRO-3 gathers the head only during TRL's call, which also computes its gradient"
    return None


def _is_of_another_model(weight: Tensor, call: TrainingCall) -> bool:
    """Return True if ``call`` was left by Ctrl-C, when torch runs no hook, and another model, with this ``weight``, runs."""
    if call.model is None or not isinstance(weight, nn.Parameter):
        return False
    model: Any = call.model()
    return model is None or getattr(find_head(model), "weight", None) is not weight


def _detach_gathered(parameter: Tensor) -> Tensor:
    """Return a frozen parameter gathered by ZeRO-3 as a tensor that outlives its release; any other parameter unchanged."""
    return parameter.detach() if is_gathered(parameter) and not parameter.requires_grad else parameter


def _handle_call(call: TrainingCall, arguments: dict[str, Any]) -> Any:
    """Return (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], or None if not requested."""
    hidden, bias, temperature, outputs = (arguments[name] for name in ("hidden", "bias", "temperature", "outputs"))
    softcap = arguments["final_logit_softcapping"]
    if _is_of_another_model(arguments["weight"], call):
        return NotImplemented
    if call is _reference.get() and (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return NotImplemented
    weight, bias = _detach_gathered(arguments["weight"]), None if bias is None else _detach_gathered(bias)
    if weight.is_meta:  # TRL has moved the hidden states to meta as well, so their values are lost
        raise RuntimeError(
            "TRL cannot train with an offloaded LM head: it reads lm_head.weight, which is not on the device between calls of "
            "the head; choose a device_map that keeps lm_head on the device (model.embed_tokens may be offloaded)"
        )
    reason = why_not_read(weight, bias) or why_not_in_backward(weight, bias)
    if reason is not None:
        call.reasons = [reason]  # not one for each step of training: the reference model has one call
        return NotImplemented
    # The loss with scale / T and softcap / T uses softcap · tanh(scale · z / softcap) / T.
    result = linear_log_probs(
        hidden,
        weight.to(hidden.dtype),
        arguments["targets"],
        bias=None if bias is None else bias.to(hidden.dtype),
        logit_scale=arguments["logit_scale"] / temperature,
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
