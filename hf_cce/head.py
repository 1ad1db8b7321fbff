"""The one place that judges an LM head: which module it is, and whether its weight may be read after its forward.

A head defers only when its weight is still there, whole, when the loss reads it, some lines after the head's forward
has returned. Quantised heads, sharded heads and heads whose memory an engine releases after the forward do not; each
function below returns the reason in words, or None. A head that accelerate offloads does: it takes the parameter out of
the module, and the tensor that the head's forward used stays as long as somebody holds it, as autograd would.
"""

from __future__ import annotations

import dis
import functools
import inspect
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

# Modules of these packages pass their input to the Linear inside and add their own term in plain torch operations
# (PEFT's LoRA layers and modules_to_save wrapper; containers and dropout of torch.nn): a symbolic input is safe there.
_TRANSPARENT = ("peft.", "torch.nn.modules.container", "torch.nn.modules.dropout", "torch.nn.modules.linear")
# Whose hooks are known to take a symbolic output for a tensor, or to be refused elsewhere
_NOT_THE_USERS = (
    "accelerate.", "deepspeed.", "hf_cce.", "lightning.", "lightning_fabric.", "peft.", "pytorch_lightning.", "torch.",
    "transformers.", "trl.",
)  # fmt: skip
# DeepSpeed ZeRO-3 puts a function that takes tensors only in its place, for every module of the process and for good.
LINEAR = torch._C._nn.linear
# All of its hooks do, by way of methods of their own
_ASKING = ("transformers.debug_utils",)
_QUESTIONS = {"isinstance", "is_tensor", "tree_map_only", "checkpoint"}
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
ASKS = "asks for the type of the logits (isinstance), which are no torch.Tensor yet"
_WANTS_GRADIENTS = "(register_full_backward_hook) asks for the gradient of the logits, which the fused loss never makes"


def output_embeddings(model: nn.Module) -> object:
    """``model.get_output_embeddings()``, or that of the one language model inside that has any (BLIP, Nemotron Omni)."""
    own = model.get_output_embeddings()  # type: ignore[operator]
    if own is not None:
        return own
    getters: list[Any] = [getattr(child, "get_output_embeddings", None) for child in model.children()]
    heads = [head for get in getters if callable(get) and (head := get()) is not None]
    return heads[0] if len(heads) == 1 else None


RESHARDS = (
    "FSDP2 reshards the head's weight right after its forward; put it in one group with the final norm and "
    "reshard_after_forward=False, as accelerate does"
)
PARTITIONED = "DeepSpeed ZeRO-3 partitions the head's weight"


def find_head(model: nn.Module) -> nn.Module | None:
    """The LM head: resolved at every call, so that resizing, quantising and adapters are seen."""
    head = output_embeddings(model)
    return head if isinstance(head, nn.Module) else None


def why_not_defer(head: nn.Module) -> str | None:
    """Why the multiplication of ``head`` cannot be put off, judged by its structure; None where it can."""
    if transformed():
        return "torch.func (grad, vmap, jvp) or forward-mode AD is at work, for which the fused loss has no rule"
    if _module._global_backward_hooks or _module._global_backward_pre_hooks:
        return f"a backward hook on all modules {_WANTS_GRADIENTS}"
    if F.linear is not LINEAR and not is_plain(head):
        return "torch.nn.functional.linear was replaced, as DeepSpeed ZeRO-3 does, and the head is no plain torch.nn.Linear"
    for module in head.modules():
        kind = type(module)
        if hasattr(module, "_get_fsdp_state"):  # FSDP2 makes a class of its own, derived from the module's
            kind = kind.__bases__[-1]
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook on the head {_WANTS_GRADIENTS}"
        if not torch.compiler.is_compiling() and any(map(asks_for_a_tensor, _on_its_way(module))):
            return f"a forward hook on the head, or a function in the place of its forward, {ASKS}"
        if kind.__name__ == "FullyShardedDataParallel":
            return "the head is an FSDP1 unit of its own, which frees its weight after its forward; leave it to the root unit"
        if kind.forward is not nn.Linear.forward and not kind.__module__.startswith(_TRANSPARENT):
            return f"the head holds a {kind.__module__}.{kind.__qualname__}, which is no plain torch.nn.Linear"
        if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
            # It also replaces F.linear by a function that takes tensors only.
            return PARTITIONED
    return RESHARDS if any(_reshards(module) for module in head.modules()) else None


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of ``torch.func`` is at work, or forward-mode AD (on these ``tensors``, where any are given).

    In a graph that is compiled nobody can tell.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _on_its_way(module: nn.Module) -> list[Any]:
    """What takes the output of ``module`` before its caller does; or in its place, with its input."""
    replaced = module.__dict__.get("forward")
    return [*module._forward_hooks.values(), *([] if replaced is None else [replaced])]


def why_others_not(model: nn.Module, path: str) -> str | None:
    """As ``why_not_defer``, judged by what stands around the head: at all modules, and at those of ``path`` that lead to it."""
    if any(map(asks_for_a_tensor, _module._global_forward_hooks.values())):
        return f"a forward hook on all modules {ASKS}"
    names = path.split(".")[:-1]
    for last in range(1, len(names) + 1):
        name = ".".join(names[:last])
        module = model.get_submodule(name)
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook on {name} {_WANTS_GRADIENTS}"
        if any(map(asks_for_a_tensor, _on_its_way(module))):
            return f"a forward hook on {name}, or a function in the place of its forward, {ASKS}"
    return None


def path_to(model: nn.Module, head: nn.Module, known: str | None = None) -> str:
    """The name of ``head`` in ``model``; ``known``, if that is still it; empty where it lies elsewhere."""
    if known == "":
        return known  # not looked for at each call
    with suppress(AttributeError):
        if known is not None and model.get_submodule(known) is head:
            return known
    return next((name for name, module in model.named_modules() if module is head), "")


def asks_for_a_tensor(hook: Any, depth: int = 3) -> bool:
    """Whether a hook of the user's own may leave alone what is no ``torch.Tensor``, itself or by what it calls.

    That is functions that it names and methods that it takes from its ``self``. A checkpoint takes no other for an input, either.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    function, owner = getattr(hook, "__func__", hook), getattr(hook, "__self__", None)
    if not hasattr(function, "__code__"):
        function, owner = getattr(type(hook), "__call__", None), hook  # noqa: B004 - the function, not whether there is one
    known = getattr(function, "__module__", None) or ""
    if known.startswith(_NOT_THE_USERS) and known not in _ASKING:
        return False
    code = getattr(function, "__code__", None)
    found = {name for each in _codes(code) for name in each.co_names}
    if known in _ASKING or not found.isdisjoint(_QUESTIONS):
        return True
    if code is None or depth == 0:
        return False
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    captured = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    called = [getattr(function, "__globals__", {}).get(name) for name in found]
    # What a decorator was put around (torch.no_grad) has the same ``self``
    inner = None if owner is None else getattr(function, "__wrapped__", None)
    called += [MethodType(x, owner) if inner is x and isinstance(x, FunctionType) else x for x in captured.values()]
    if owner is None:  # a function that a method made
        called += _methods(captured.get("self"), code, "self")
    elif code.co_argcount:
        called += _methods(owner, code, code.co_varnames[0])
    return any(asks_for_a_tensor(x, depth - 1) for x in called if isinstance(x, _FUNCTIONS))


def _codes(code: Any) -> list[CodeType]:
    """``code`` and that of the functions that it defines."""
    return [code, *(x for const in code.co_consts for x in _codes(const))] if isinstance(code, CodeType) else []


def _methods(owner: Any, code: CodeType, name: str) -> list[Any]:
    """The functions that ``code`` takes from ``owner``, which it calls ``name``; no property is asked for its value.

    No others that ``owner`` has: what takes ``output.float`` means the tensor's, and LightningModule has one, too.
    """
    if owner is None:
        return []
    own, inherited = _taken(code, name)
    found: list[Any] = [inspect.getattr_static(owner, each, None) for each in own]
    line = (owner if isinstance(owner, type) else type(owner)).__mro__
    # Which of them super() means depends on where the code stands
    found += [vars(kind)[each] for each in inherited for kind in line if each in vars(kind)]
    bare = [x.__func__ if isinstance(x, (classmethod, staticmethod)) else x for x in found]
    return [
        MethodType(x, owner) if isinstance(x, FunctionType) and not isinstance(as_found, staticmethod) else x
        for x, as_found in zip(bare, found, strict=True)
    ]


@functools.lru_cache(maxsize=256)  # it is asked anew in each training call
def _taken(code: CodeType, name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that ``code`` reads from the variable ``name``, and those from ``super()``."""
    found: dict[str, set[str]] = {name: set(), "super": set()}
    for each in _codes(code):
        of = None
        for step in dis.get_instructions(each):
            if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
                if of is not None:
                    found[of].add(step.argval)
                of = None
            elif step.opname.startswith("LOAD_") and step.argval == "super":
                of = "super"
            elif of != "super" and step.opname != "EXTENDED_ARG":
                # Python 3.13 loads two variables in one step
                last = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
                of = name if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and last == name else None
    return frozenset(found[name]), frozenset(found["super"])


def is_plain(head: nn.Module) -> bool:
    """Whether ``head`` does what ``torch.nn.Linear`` does, and nobody has wrapped it."""
    return type(head).forward is nn.Linear.forward and "forward" not in head.__dict__


class KeptWhole:
    """An FSDP2 group of its own inside a head, told to keep its weight from this forward to its backward.

    It would free it right after the head's forward, before the loss reads it. accelerate groups a head with the final norm, and
    sets the same.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        # Of all ranks, or of some where ``reshard_after_forward`` is an integer, which FSDP2 takes when it is made and no more
        self.meshes = [(group, group.post_forward_mesh_info) for group in _groups(module)]
        if any(group.is_sharded_post_forward for group, _ in self.meshes):  # over some, by an evaluation: back to all
            module.reshard()
        module.set_reshard_after_forward(False, recurse=False)

    def unshard(self) -> None:
        self.module.unshard()

    def restore(self) -> None:
        self.module.set_reshard_after_forward(True, recurse=False)
        for group, mesh in self.meshes:
            group.post_forward_mesh_info = mesh


def keep_whole(head: nn.Module) -> list[KeptWhole]:
    """Of all such groups inside ``head``."""
    return [KeptWhole(module) for module in head.modules() if _reshards(module)]


def adapter_in(head: nn.Module) -> str | None:
    """What PEFT adds to the output of ``head`` at present ("lora", "ia3" …); None where it adds nothing."""
    for module in head.modules():
        room, _, name = type(module).__module__.partition(".tuners.")
        if room == "peft" and not getattr(module, "merged", False) and not getattr(module, "disable_adapters", False):
            return name.split(".")[0]
    return None


def why_not_read(weight: object, bias: object = None) -> str | None:
    """Why this weight [V, D] (with bias [V] or None) cannot be read later, judged at the head's forward; or None."""
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None and name == "bias":
            continue
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return f"the head's {name} is a {type(value).__name__} (tensor parallel, sharded or quantised)"
        if not value.is_floating_point():
            return f"the head's {name} is quantised to {value.dtype}"
        if hasattr(value, "ds_id"):
            return f"DeepSpeed ZeRO-3 partitions the head's {name}"
    assert isinstance(weight, Tensor)
    if weight.dim() != 2 or weight.numel() == 0:
        return f"the head's weight has shape {tuple(weight.shape)}, not [vocabulary, hidden]"
    return None


def _reshards(module: nn.Module) -> bool:
    """True when ``module`` belongs to an FSDP2 group that frees its weight after its forward."""
    return hasattr(module, "_get_fsdp_state") and any(group._reshard_after_forward for group in _groups(module))


def _groups(module: Any) -> list[Any]:
    """Of the parameters that FSDP2 shards together, from ``module`` on."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.10; one group before
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
