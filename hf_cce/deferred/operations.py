"""Operations on logits [..., V] that can be recorded, and what a record means for the loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# On logits: ("mul" | "div", number), ("tanh", None), ("to", dtype | device), ("mask", (token ids, number)). Distributions:
# ("softmax" | "log_softmax", None), then those of ``_NEXT``; or ("product", (ops, ops)), the product of two results. Finally
# ("kl_div", function that returns (target, log_target)), the terms of ``F.kl_div``.
Op = tuple[str, Any]
# What an operation makes of a distribution
_NEXT = {
    ("log p", "exp"): "p",
    ("p", "log"): "log p",
    ("log p", "softmax"): "p",
    ("log p", "log_softmax"): "log p",
    ("log p", "clamp"): "finite log p",
    ("log p", "kl_div"): "kl_div",
}


def apply_ops(ops: tuple[Op, ...], logits: Tensor) -> Tensor:
    """Apply all ``ops`` to the full ``logits`` [..., V]."""
    for name, value in ops:
        if name == "mask":
            logits[..., value[0].to(logits.device)] = value[1]
        elif name == "product":
            logits = apply_ops(value[0], logits) * apply_ops(value[1], logits)
        elif name == "kl_div":
            target, log_target = value()
            logits = F.kl_div(logits, target, reduction="none", log_target=log_target)
        elif name in ("softmax", "log_softmax"):
            logits = getattr(logits, name)(-1)
        else:
            logits = getattr(logits, name)() if value is None else getattr(logits, name)(value)
    return logits


def closed_form(ops: tuple[Op, ...]) -> tuple[float, float | None] | None:
    """Return the (logit_scale, softcap) with which the loss computes what was recorded; None if there is no such pair.

    Any run of scales, then at most one tanh, then any run of scales is ``c · tanh(s · z)``: a scale of ``s · c`` with a softcap
    of ``c``. Casts and device moves do not matter, because the loss is computed in float32.
    """
    scale, cap = 1.0, None
    for name, value in ops:
        if name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif name in ("mul", "div"):
            if value == 0:
                return None
            factor = value if name == "mul" else 1.0 / value
            if cap is None:
                scale *= factor
            else:
                cap *= factor
        elif name not in ("to", "mask"):
            return None
    if cap is not None:
        scale *= cap
    usable = 0 < scale < math.inf and (cap is None or 0 < cap < math.inf)
    return (scale, cap) if usable else None


class Meaning(NamedTuple):
    """Result of ``ops`` on the output of a head: ``factor`` times logits z or, with p = softmax(z), times p, log p, …"""

    kind: str | None  # "z", "p", "log p", "finite log p", "p log p", "p z", "kl_div"; None for anything else
    factor: float  # always 1 for "z"
    form: tuple[float, float | None] | None  # the ``closed_form`` of the logits
    logit_ops: tuple[Op, ...]  # those that compute z


def meaning(ops: tuple[Op, ...]) -> Meaning:
    names = [name for name, _ in ops]
    kind: str | None
    if "product" in names:
        first = names.index("product")
        x, y = (meaning(ops[:first] + each) for each in ops[first][1])
        kinds = {"log p, p": "p log p", "finite log p, p": "p log p", "p, z": "p z"} if x.form == y.form else {}
        kind, factor = kinds.get(", ".join(sorted((str(x.kind), str(y.kind))))), x.factor * y.factor
        form, logit_ops = x.form, x.logit_ops
    else:
        # Not next(…, default), which Dynamo of torch 2.8 cannot trace
        first = ([i for i, name in enumerate(names) if name in ("softmax", "log_softmax")] or [len(ops)])[0]
        kind = {"softmax": "p", "log_softmax": "log p"}[names[first]] if first < len(ops) else "z"
        factor, form, logit_ops = 1.0, closed_form(ops[:first]), ops[:first]
    for name, value in ops[first + 1 :]:
        if name in ("mul", "div") and value != 0:
            factor = factor * value if name == "mul" else factor / value
        elif name != "to":
            kind = _NEXT.get((str(kind), name)) if factor == 1.0 else None
    return Meaning(kind, factor, form, logit_ops)


def split_index(key: Any, ndim: int) -> tuple[Any, slice | Tensor | None] | None:
    """Split the ``key`` of a [..., V] tensor of ``ndim`` dimensions into a key of a [..., D] tensor and a slice of V, or None.

    Ids of V [K] are only split from a key that has no other tensors. Return None if V is indexed in another way, or for other
    keys (arrays, booleans, strides, too many indices).
    """
    keys = key if isinstance(key, tuple) else (key,)
    keys = tuple(torch.tensor(each) if isinstance(each, list) and _are_integers(each) else each for each in keys)
    used = 0  # dimensions that the key consumes
    for each in keys:
        if isinstance(each, Tensor):
            used += each.dim() if each.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(each, slice) or (isinstance(each, int) and not isinstance(each, bool)):
            used += 1
        elif each is not None and each is not Ellipsis:
            return None
    dots = [i for i, each in enumerate(keys) if each is Ellipsis] or [len(keys)]
    if used > ndim or len(dots) > 1:
        return None
    keys = (*keys[: dots[0]], *[slice(None)] * (ndim - used), *keys[dots[0] + 1 :])
    last = keys[-1]
    if isinstance(last, Tensor) and last.dtype == torch.int64 and last.dim() == 1:
        alone = not any(isinstance(each, Tensor) for each in keys[:-1])
        return ((*keys[:-1], slice(None)), last) if alone else None
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    whole = last.start is None and last.stop is None
    return (*keys[:-1], slice(None)), None if whole else last


def _are_integers(values: list[Any]) -> bool:
    return len(values) > 0 and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def masked_ids(key: Any, value: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """Return the token ids [W] to which ``logits[key] = value`` gives probability zero at every position; None if it does not.

    ``logits`` are [..., V] of ``shape`` and ``dtype``; ``value`` must be the minimum of the dtype, or less.
    """
    keys = key if isinstance(key, tuple) else (key,)
    tokens, ids = keys[:-1], keys[-1]
    everywhere = len(keys) == len(shape) and all(isinstance(each, slice) and each == slice(None) for each in tokens)
    if not everywhere and not (len(tokens) == 1 and tokens[0] is Ellipsis):
        return None
    smallest = isinstance(value, (int, float)) and value <= torch.finfo(dtype).min
    if not smallest or not isinstance(ids, (list, slice, Tensor)):
        return None
    chosen = torch.arange(shape[-1])[ids.cpu() if isinstance(ids, Tensor) else ids]
    return chosen if chosen.dim() == 1 else None


def cast_targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.dtype | torch.device] | None:
    """Return the floating-point dtypes (16 bits or more) and devices passed to ``Tensor.to``; None if anything else is passed."""
    rest = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    targets = [rest.pop(name, None) for name in ("dtype", "device")]
    for arg in args[:2]:
        if hasattr(arg, "dtype"):
            targets = [arg.dtype, arg.device]
        elif not isinstance(arg, bool):
            targets.append(arg)
    targets = [target for target in targets if target is not None]
    dtypes = [target for target in targets if isinstance(target, torch.dtype)]
    devices = [target for target in targets if isinstance(target, (torch.device, str, int))]
    known = len(dtypes) + len(devices) == len(targets)
    # In 8 bits, they would be quantized
    known = known and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)
    if rest or len(args) > 2 or not known:
        return None
    return [*dtypes, *(torch.empty(0, device=each).device for each in devices)]  # with an index, as those of tensors


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_vocab_vector(value: Any, logits: Any) -> Tensor | None:
    """Return ``value`` as [V] if it is a floating-point tensor of V numbers on the device of ``logits`` [..., V], else None."""
    vocab_size = logits.shape[-1]
    fits = isinstance(value, Tensor) and value.dim() in range(1, logits.ndim + 1) and value.shape[-1] == vocab_size
    if not fits or value.numel() != vocab_size or not value.is_floating_point() or value.device != logits.device:
        return None
    return value.reshape(-1)
