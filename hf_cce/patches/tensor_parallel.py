"""Transformers and torch: how tensor parallelism reaches an LM head, and which of its ways the head's input may go.

Cause: the head's weight is spread over processes, and code around the head's forward makes its input a DTensor and gathers
its output. What that code asks of a tensor, HeadInput and ShardedLogits cannot always answer. Versions, read and tested:
torch.distributed.tensor.parallel and transformers 5.0 do it in module hooks, whose DTensors reach the head's forward and
which take ShardedLogits for one. transformers 5.17 to 5.23 put a function in the place of ``head.forward``; it asks for a
DTensor by type, so ``run`` does what it does, with its own parts. transformers 5.8 keeps a plain slice on each process and
gathers in a hook: refused. It can go when Transformers offers a hook between the head and the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_cce.calls import Call
from hf_cce.head_input import HeadInput, ShardedLogits
from hf_cce.sharded import is_dtensor

_MADE_BY = "TensorParallelLayer.install_forward.<locals>.tp_forward"
_PARTS = ("self", "module", "mesh", "original_forward")


def why_not(head: nn.Module, *, compiling: bool = False) -> str | None:
    """Why the input of ``head`` cannot be a ``HeadInput`` under the tensor parallelism that is applied to it; or None."""
    for module in head.modules():
        own = module.__dict__
        forward, below = own.get("forward"), own.get("_old_forward")  # the latter is what accelerate's hooks wrapped
        planned = "_hf_tp_plan" in own or own.get("_distribute_module_applied", False)
        if compiling:  # Dynamo does not see the name of the function; this is Transformers' mark
            planned = planned or own.get("_is_hooked", False)
        if not planned and not _is_tp_forward(forward) and not _is_tp_forward(below):
            continue
        if compiling:
            return "a compiled graph does not defer a head under tensor parallelism"
        if module is not head or _is_tp_forward(below):
            return "tensor parallelism is applied to a layer inside the head, or below accelerate's hooks"
        if _is_tp_forward(forward) and _parts(forward) is None:
            return "this version of Transformers applies tensor parallelism to the head in a way that is not known"
        if not all(is_dtensor(parameter) for parameter in module.parameters(recurse=False)):
            return "tensor parallelism keeps a plain slice of the head's weight on each process (transformers 5.8)"
    return None


def run(forward: Any, hidden_states: Tensor, call: Call) -> Any:
    """What the ``forward`` that Transformers put in the head's place returns, or deferred logits where that is all logits.

    Returns:
        None where ``forward`` is none of Transformers'.
    """
    parts = _parts(forward)
    if parts is None:
        return None
    style, module, mesh, original = parts
    (made, *_), kwargs = style.transform_inputs_pre_forward(module, (hidden_states,), {}, mesh)
    if not is_dtensor(made):
        return forward(hidden_states)
    with style.context_around_forward(module, mesh):
        output = original(HeadInput(made, call), **kwargs)
    if isinstance(output, ShardedLogits):  # what follows asks for the type DTensor
        output = output.redistribute(placements=[style.output_layouts])
        return output.to_local() if style.use_local_output else output
    return style.transform_output_post_forward(module, output, mesh)


def _is_tp_forward(forward: Any) -> bool:
    return getattr(forward, "__qualname__", None) == _MADE_BY


def _parts(forward: Any) -> tuple[Any, ...] | None:
    """The style, the module, the mesh and the replaced forward of Transformers' function; None of any other."""
    if not _is_tp_forward(forward):
        return None
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    parts = tuple(cells[name].cell_contents for name in _PARTS if name in cells)
    known = len(parts) == len(_PARTS) and all(
        hasattr(parts[0], name) for name in ("output_layouts", "use_local_output")
    )
    return parts if known and hasattr(parts[0], "context_around_forward") else None
