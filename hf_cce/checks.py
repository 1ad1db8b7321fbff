"""Argument checks that ``linear_cross_entropy``, ``linear_log_probs`` and ``linear_divergence`` share."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hf_cce.config import CCEConfig
from hf_cce.head_checks import transformed
from hf_cce.spec import Divisor

Reduction = Literal["mean", "sum", "none"]
_REDUCTIONS = get_args(Reduction)
_DEFAULT = CCEConfig()
# Concrete types come first: the abstract classes, needed for NumPy scalars, make isinstance slow.
_NUMBERS = (float, int, numbers.Real, torch.SymFloat, torch.SymInt)
INTEGERS = (int, numbers.Integral, torch.SymInt)


def check_config(config: CCEConfig | None) -> CCEConfig:
    return _DEFAULT if config is None else CCEConfig.of(config)


def check_reduction(reduction: str, num_items_in_batch: object) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(f"num_items_in_batch needs reduction='mean', got reduction={reduction!r}")


def make_divisor(reduction: str, num_items_in_batch: Tensor | int | float | None, device: torch.device) -> Divisor:
    """Return the divisor of the summed loss. An item count on the device stays a tensor: reading it would synchronize."""
    if reduction != "mean":
        return Divisor(number=1.0)
    if num_items_in_batch is None:
        return Divisor()
    if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.numel() == 1:
        on_host = num_items_in_batch.device.type == "cpu" != device.type and not torch.compiler.is_compiling()
        if on_host:  # reading a CPU tensor is free; copying it to the device would wait for queued work
            num_items_in_batch = num_items_in_batch.item()
    if not isinstance(num_items_in_batch, Tensor):
        if not isinstance(num_items_in_batch, _NUMBERS) or isinstance(num_items_in_batch, bool):
            raise TypeError(f"num_items_in_batch must be a number or a tensor, got {type_name(num_items_in_batch)}")
        if not torch.compiler.is_compiling():
            if not 0 <= num_items_in_batch < math.inf:
                raise ValueError(f"num_items_in_batch must be a finite number, not negative, got {num_items_in_batch}")
            if num_items_in_batch:
                return Divisor(number=float(num_items_in_batch))
        # Zero, or compiling: as a Python number, or in torch.full, each new value of a float would recompile the graph.
        return Divisor(torch.ones((), dtype=torch.float32, device=device) * num_items_in_batch)
    if num_items_in_batch.numel() != 1:
        raise ValueError(f"num_items_in_batch must be one number, got shape {tuple(num_items_in_batch.shape)}")
    return Divisor(num_items_in_batch.detach().reshape(()).to(device))


def check_numbers(**options: object) -> None:
    """Raise unless every option is a finite number. A tensor is none, because reading it would synchronize with a GPU."""
    for name, value in options.items():
        or_none = " or None" if name.endswith("softcap") else ""
        if not isinstance(value, _NUMBERS) or isinstance(value, bool):
            tensor = isinstance(value, Tensor)
            advice = "; pass its .item()" if tensor else ""
            if tensor and name == "logit_scale":
                advice += ", or scale hidden_states by it if it needs a gradient"
            raise TypeError(f"{name} must be a number{or_none}, got {type_name(value)}{advice}")
        if not -math.inf < value < math.inf:  # type: ignore[operator]
            raise ValueError(f"{name} must be a finite number{or_none}, got {value}")


def to_number(value: Any, kind: type = float) -> Any:
    """Convert NumPy scalars to a Python number, as kernels need; leave numbers and PyTorch symbols as they are."""
    return value if type(value) in (float, int) or isinstance(value, (torch.SymFloat, torch.SymInt)) else kind(value)


def check_tensor(name: str, shape: str, value: object) -> None:
    """Raise a TypeError if ``value`` is not a tensor; suggest the tensor that was probably meant."""
    if isinstance(value, Tensor):
        return
    advice = "" if value is None or isinstance(value, nn.Module) else f"; convert it with torch.as_tensor({name})"
    if name in ("weight", "bias") and isinstance(getattr(value, name, None), Tensor):
        advice = f"; pass its .{name}"
    raise TypeError(f"{name} must be a tensor {shape}, got {type_name(value)}{advice}")


def check_device(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def check_tokens(name: str, value: Tensor, shape: torch.Size, like_name: str, like: Tensor) -> None:
    """Raise unless ``value`` is on the device of ``like`` [..., D] and ``shape``, its leading dimensions, is [...]."""
    if shape != like.shape[:-1]:
        want = tuple(like.shape[:-1])
        raise ValueError(f"{name} must have one entry per token of {like_name}, shape {want}, got {tuple(shape)}")
    check_device(name, value, like_name, like)


def check_logit_options(logit_scale: float, softcap: float | None, prefix: str = "") -> None:
    check_numbers(**{f"{prefix}logit_scale": logit_scale})
    if softcap is not None:
        check_numbers(**{f"{prefix}softcap": softcap})
        if not softcap > 0:
            raise ValueError(f"{prefix}softcap must be positive or None, got {softcap}")


def check_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str, str]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a head's logits, cast for autocast, after checking types, shapes, devices and dtypes."""
    check_tensor(names[0], "[..., D]", hidden)
    check_tensor(names[1], "[V, D]", weight)
    if bias is not None:
        check_tensor(names[2], "[V]", bias)
    if transformed(hidden, weight, bias):
        raise RuntimeError(
            "the fused loss does not support torch.func (grad, vmap, jvp) and forward-mode AD; compute its gradients with "
            "torch.autograd.grad, or use full logits"
        )
    if not hidden.is_floating_point():
        raise ValueError(f"{names[0]} must be floating point, got {hidden.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"{names[1]} must be [V, D], got shape {tuple(weight.shape)}")
    if weight.shape[0] == 0:
        raise ValueError(
            f"{names[1]} must have at least one row (V > 0); is it a sharded parameter that was not gathered?"
        )
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        if hidden.dim() > 0 and hidden.shape[-1] == weight.shape[0]:
            raise ValueError(
                f"{names[1]} must be [V, D] with D = {hidden.shape[-1]} as in {names[0]}, got shape {tuple(weight.shape)}, "
                f"which looks transposed; pass {names[1]}.t(), contiguous to avoid a copy in every call"
            )
        raise ValueError(
            f"{names[0]} must be [..., D] with D = {weight.shape[1]} as in {names[1]}, got shape {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{names[2]} must be [V] = [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    for name, tensor in ((names[1], weight), (names[2], bias)):
        if tensor is not None:
            check_device(name, tensor, names[0], hidden)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, tensor in ((names[1], weight), (names[2], bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{name} must have the dtype of {names[0]}, {hidden.dtype}, got {tensor.dtype}; "
                "cast one of them, or run under torch.autocast"
            )
    return hidden, weight, bias


def type_name(value: object) -> str:
    """Name the type, never the value: formatting a CUDA tensor would synchronize."""
    return "None" if value is None else f"a {type(value).__name__}"
