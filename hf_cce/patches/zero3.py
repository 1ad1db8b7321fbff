"""DeepSpeed ZeRO-3: an LM head whose weight is whole only inside its own call.

Cause: DeepSpeed gathers a module's parameters in a hook before its forward and frees them in one after it; gathers them anew
where the gradient of the module's output arrives, and frees them where that of its input has gone by. It puts a function that
takes tensors only in the place of ``F.linear``, and its hooks look for tensors in what a module returns. Versions: read and
tested with 0.19.8. It can go when DeepSpeed's hooks take an object with ``__torch_function__`` for a tensor.

How: the head's forward returns the weight itself, gathered, in a tuple (``Passage``). DeepSpeed's hooks put their node on it, as
on any output: it gathers the parameter before the weight's gradient arrives there, which is what DeepSpeed's reduction waits
for. A hook behind theirs then makes deferred logits of that. They hold the memory that was gathered, so that the weight is
whole for the loss and its backward pass, which follow at once; nothing is gathered once more for them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from hf_cce.calls import Call
from hf_cce.head import PARTITIONED
from hf_cce.head_input import HeadInput

_PRE_BACKWARD = "pre_bwd_fn"  # what DeepSpeed's hook applies to the tensors that a module returns


class Passage(tuple[Any, ...]):
    """(HeadInput, weight [V, D], bias [V] or None) on the way through DeepSpeed's hooks on the head; some perhaps ``_Frozen``."""

    __slots__ = ()


def why_not(head: nn.Module, *, compiling: bool = False) -> str | None:
    """Why the loss of a ``head`` that DeepSpeed partitions takes real logits; or None."""
    if compiling:
        return f"{PARTITIONED}, and a compiled graph does not defer it"
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return f"{PARTITIONED}, and the head is no plain torch.nn.Linear"
    if not hasattr(head.__dict__.get(_PRE_BACKWARD), "apply"):
        return f"{PARTITIONED}, and its hooks on the head are not those that are known"
    hooks = [*head._forward_hooks.values(), *_module._global_forward_hooks.values()]
    if any(getattr(hook, "__module__", "").partition(".")[0] != "deepspeed" for hook in hooks):
        return f"{PARTITIONED}, and the head has forward hooks besides DeepSpeed's, which would not see logits"
    return None


def gathered(parameter: Tensor) -> bool:
    """Whether this is a parameter of DeepSpeed's that has all its values at present."""
    return bool(parameter.shape == getattr(parameter, "ds_shape", None))


def enter(head: nn.Module, call: Call) -> None:
    """For the time of a call: ``run`` is what the head does, and behind DeepSpeed's hooks is one of ours."""
    call.handles.append(head.register_forward_hook(_leave))


def run(head: nn.Module, hidden_states: Tensor, call: Call) -> Any:
    """What the head's forward returns; None where its weight is not gathered, as it should be."""
    weight: Any = head.weight
    bias: Any = head.bias
    for parameter in (weight, bias):
        if parameter is not None and not gathered(parameter):
            call.note_refused("DeepSpeed ZeRO-3 has not gathered the head's weight for its forward")
            return None
    return Passage((HeadInput(hidden_states, call), _seen(weight), None if bias is None else _seen(bias)))


def _leave(head: nn.Module, args: Any, output: Any) -> Any:
    if not isinstance(output, Passage):
        return None
    head_input, *parameters = output
    return head_input.linear(*(x.value if isinstance(x, _Frozen) else x for x in parameters))


class _Frozen:
    """Hides a tensor whose gradient nobody waits for: DeepSpeed counts the nodes that it has put on tensors."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _seen(parameter: Tensor) -> Any:
    """A view: the parameter itself, returned by the head, would make DeepSpeed keep it for the whole model's call."""
    return parameter.view_as(parameter) if parameter.requires_grad else _Frozen(parameter.detach())
