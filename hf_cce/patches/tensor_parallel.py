"""Transformers and torch: which LM heads under tensor parallelism can defer.

Cause: code around the head's forward makes its input a DTensor and gathers its output. Versions, read and tested:
torch.distributed.tensor.parallel and transformers 5.0 do this in module hooks. Their DTensors reach the head's forward, and they
accept ShardedLogits in place of a DTensor, so these heads defer. transformers 5.17 to 5.23 replace ``head.forward`` by a function
that checks for the DTensor type, and transformers 5.8 keeps a plain slice on each process and gathers in a hook: full logits.
Can be removed when Transformers offers a hook between the head and the loss.
"""

from __future__ import annotations

from torch import nn

from hf_cce.sharded import is_dtensor

_TP_FORWARD_QUALNAME = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def why_not(head: nn.Module, *, compiling: bool = False) -> str | None:
    """Return why ``head`` cannot defer its product under the tensor parallelism that is applied to it, or None."""
    for module in head.modules():
        own = module.__dict__
        # accelerate's hooks keep the forward that they wrap as ``_old_forward``
        forwards = own.get("forward"), own.get("_old_forward")
        replaced = _TP_FORWARD_QUALNAME in (getattr(forward, "__qualname__", None) for forward in forwards)
        planned = "_hf_tp_plan" in own or own.get("_distribute_module_applied", False)
        if compiling:  # Dynamo does not see the function's name, but it sees this attribute of Transformers
            planned = planned or own.get("_is_hooked", False)
        if not planned and not replaced:
            continue
        if compiling:
            return "torch.compile does not support deferred logits for a head under tensor parallelism"
        if module is not head:
            return "tensor parallelism is applied to a layer inside the head"
        if replaced or not all(is_dtensor(parameter) for parameter in module.parameters(recurse=False)):
            return "Transformers' tensor parallelism (its tp_plan) does not pass the head's output on as a DTensor"
    return None
