"""Checks whether an LM head can defer its matmul, with reasons worded for the user.

A head can defer only if its whole weight [V, D] can still be read when the loss is computed, after the head's forward has
returned. The functions ``why_not_*`` return the reason why it cannot, or None.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

from hf_cce.quantized import FrozenWeight

# Modules of these packages pass their input to the Linear inside and add their own term in plain torch operations, so a lazy
# input is safe there; or they compute the weight, as weight_norm does.
_TRANSPARENT = (
    "peft.", "torch.nn.modules.container", "torch.nn.modules.dropout", "torch.nn.modules.linear", "torch.nn.utils.parametriz",
)  # fmt: skip
# DeepSpeed ZeRO-3 replaces F.linear, permanently and in the whole process, by a function that only takes tensors.
LINEAR = torch._C._nn.linear
_TP_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def output_embeddings(model: nn.Module) -> object:
    """Return ``model.get_output_embeddings()``, or that of its only child that has one (BLIP, Nemotron Omni)."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    if own is not None:
        return own
    getters: list[Any] = [getattr(child, "get_output_embeddings", None) for child in model.children()]
    heads = [head for get in getters if callable(get) and (head := get()) is not None]
    return heads[0] if len(heads) == 1 else None


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the LM head or None. Looked up at every call, because resizing, quantization and adapters replace it."""
    head = output_embeddings(model)
    # Accelerate's regional compilation replaces the head by a torch._dynamo.OptimizedModule, which compiles its calls.
    return getattr(head, "_orig_mod", head) if isinstance(head, nn.Module) else None


def why_not_defer(head: nn.Module, foreign_forward: Any, compiling: bool) -> str | None:
    """Return why ``head`` cannot defer its matmul, or None. ``foreign_forward``: a forward that others have set on it."""
    if transformed():
        return "torch.func (grad, vmap, jvp) or forward-mode AD is active, which the fused loss does not support"
    if not compiling and torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit.trace is active, which cannot record deferred logits"
    plain = type(head).forward is nn.Linear.forward and foreign_forward is None
    if F.linear is not LINEAR and not plain:
        return "torch.nn.functional.linear was replaced, as DeepSpeed ZeRO-3 does, and the head is not a plain torch.nn.Linear"
    for module in head.modules():
        if (reason := _why_not_parallel(module, module is not head, compiling)) is not None:
            return reason
        sharded = hasattr(module, "set_reshard_after_forward")
        kind: Any = type(module).__bases__[-1] if sharded else type(module)  # FSDP2 creates a subclass
        hooked = module._backward_hooks or module._backward_pre_hooks
        if compiling and (hooked or _module._global_backward_hooks or _module._global_backward_pre_hooks):
            return (
                "a backward hook on the head or on all modules (register_full_backward_hook) needs the gradient of the logits, "
                "which a compiled graph does not compute"
            )
        if hooked and module is not head and issubclass(type(module), nn.Linear):
            return "a layer inside the head has a backward hook (register_full_backward_hook), which needs the layer's output"
        if not compiling and module is not head and module._compiled_call_impl is not None:
            return "a layer inside the head is compiled by itself; compile the head or the model instead"
        if compiling and sharded:
            return "FSDP2 may reshard the head's weight right after its forward, which a compiled graph cannot see"
        if sharded and module is not head:
            return "FSDP2 shards a layer inside the head by itself, and frees its weight after its forward; shard the whole head"
        if kind.__name__ == "FullyShardedDataParallel":
            return (
                "the head, or a layer inside it, is a separate FSDP1 unit, which frees its weight after its forward; keep it in "
                "the root unit, and if PEFT made the policy, leave lm_head out of target_modules and modules_to_save"
            )
        if _is_4_bit(kind) and not compiling and not sharded:
            continue
        if kind.__name__ == "Linear8bitLt":
            return "the head holds a bitsandbytes Linear8bitLt, which quantises the hidden states as well as the weight"
        if kind.forward is not nn.Linear.forward and not kind.__module__.startswith(_TRANSPARENT):
            return f"the head holds a {kind.__module__}.{kind.__qualname__}, which is not a plain torch.nn.Linear"
        if compiling and any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
            return "DeepSpeed ZeRO-3 partitions the head's weight, which torch.compile does not support with deferred logits"
    return None


def _why_not_parallel(module: nn.Module, inside: bool, compiling: bool) -> str | None:
    """Return why tensor parallelism does not allow deferring the matmul of the head, or of a layer ``inside`` it, or None.

    The hooks of torch's ``parallelize_module`` and of transformers 5.0 accept ShardedLogits in place of a DTensor. transformers
    5.17 to 5.24 replace the forward by a function that checks for the type; 5.8 keeps a plain slice of the weight.
    """
    own = module.__dict__
    forwards = own.get("forward"), own.get("_old_forward")  # where accelerate's hooks keep the forward that they wrap
    replaced = any(getattr(forward, "__qualname__", None) == _TP_FORWARD for forward in forwards)
    planned = "_hf_tp_plan" in own or own.get("_distribute_module_applied", False)
    if compiling:  # Dynamo does not see the function's name, but it sees this attribute of Transformers
        planned = planned or own.get("_is_hooked", False)
    if not planned and not replaced:
        return None
    if compiling:
        return "torch.compile does not support deferred logits for a head under tensor parallelism"
    if inside:
        return "tensor parallelism is applied to a layer inside the head"
    if replaced or not all(hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False)):
        return "Transformers' tensor parallelism (its tp_plan) does not pass the head's output on as a DTensor"
    return None


def _is_4_bit(kind: Any) -> bool:
    """Return True if ``kind`` is bitsandbytes' Linear4bit, whose matmul ``hf_cce.patches.bnb`` defers."""
    name, package = (getattr(kind.forward, each, "") for each in ("__qualname__", "__module__"))
    return name == "Linear4bit.forward" and package.startswith("bitsandbytes.")


def transformed(*tensors: Tensor | None) -> bool:
    """Return True under a transform of ``torch.func`` or forward-mode AD (given ``tensors``, only if one has a tangent)."""
    if torch.compiler.is_compiling():  # it cannot be detected
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_gathered(parameter: Any) -> bool:
    """Return True if ``parameter`` has all its values; DeepSpeed ZeRO-3 gathers them only for a module's own forward."""
    return not hasattr(parameter, "ds_id") or bool(parameter.shape == getattr(parameter, "ds_shape", None))


def why_not_read(weight: Any, bias: Any = None) -> str | None:
    """Return why this weight [V, D] or bias [V] cannot be read later, or None. Called in the head's forward."""
    for name, value in [("weight", weight)] if bias is None else [("weight", weight), ("bias", bias)]:
        if type(value) not in (Tensor, nn.Parameter, FrozenWeight):
            return f"the head's {name} is a {type(value).__name__} (tensor parallel, sharded or quantised)"
        if not value.is_floating_point():
            return f"the head's {name} is quantised to {value.dtype}"
        if not is_gathered(value):
            return f"DeepSpeed ZeRO-3 has not gathered the head's {name} for its forward"
    if weight.dim() != 2 or weight.numel() == 0:
        return f"the head's weight has shape {tuple(weight.shape)}, not [vocabulary, hidden]"
    return None


def adapter_in(head: nn.Module) -> str | None:
    """Return the PEFT method that currently changes the output of ``head`` ("lora", "ia3", …), or None."""
    for module in head.modules():
        library, _, name = type(module).__module__.partition(".tuners.")
        active = not getattr(module, "merged", False) and not getattr(module, "disable_adapters", False)
        if library == "peft" and active:
            return name.split(".")[0]
    return None
