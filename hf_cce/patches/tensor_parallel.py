"""Transformers and torch: heads whose weight tensor parallelism has spread over processes, and which of them defer.

Cause: code around the head's forward makes its input a DTensor and gathers its output. Versions, read and tested:
torch.distributed.tensor.parallel and transformers 5.0 do it in module hooks, whose DTensors reach the head's forward and
which take ShardedLogits for one: these defer. transformers 5.17 to 5.23 put a function in the place of ``head.forward`` that
asks for a DTensor by type, and transformers 5.8 keeps a plain slice on each process and gathers in a hook: full logits. It can
go when Transformers offers a hook between the head and the loss.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cce.sharded import is_dtensor

_MADE_BY = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def why_not(head: nn.Module, *, compiling: bool = False) -> str | None:
    """Why ``head`` cannot put its multiplication off under the tensor parallelism that is applied to it; or None."""
    for module in head.modules():
        own = module.__dict__
        # The latter is what accelerate's hooks wrapped
        replaced = any(_is_tp_forward(own.get(name)) for name in ("forward", "_old_forward"))
        planned = "_hf_tp_plan" in own or own.get("_distribute_module_applied", False)
        if compiling:  # Dynamo does not see the name of the function; this is Transformers' mark
            planned = planned or own.get("_is_hooked", False)
        if not planned and not replaced:
            continue
        if compiling:
            return "torch.compile does not support deferred logits for a head under tensor parallelism"
        if module is not head:
            return "tensor parallelism is applied to a layer inside the head"
        if replaced:
            return "Transformers' tensor parallelism (transformers 5.17 and newer) replaces the head's forward"
        if not all(is_dtensor(parameter) for parameter in module.parameters(recurse=False)):
            return "tensor parallelism keeps a plain slice of the head's weight on each process (transformers 5.8)"
    return None


def _is_tp_forward(forward: Any) -> bool:
    return getattr(forward, "__qualname__", None) == _MADE_BY
