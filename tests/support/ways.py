"""The ways that a scalar loss can take on the kernels, forced on inputs of any size; inputs on which the filter drops tiles."""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses import Options
from torch import Tensor

from hf_cce import CCEConfig, dispatch, kernels, strategies

# "dense": real logits in float32; "dense16": in the dtype of the inputs.
# "narrow": a first slab of one tile's width is stored, and the others are computed twice.
# "grouped": of a frozen head; of some tokens all of them are, and gradients are formed in the forward pass, group after group.
# "whole": likewise, with all tokens in one group.
WAYS = ("dense", "dense16", "stored", "narrow", "grouped", "whole", "filtered", "exact")
KEEPS_ALL = 1e-9  # a gradient_filter that drops nothing but what is zero
# FILTER_FROM, DENSE_BYTES, NARROW_BYTES
_THRESHOLDS = {
    "dense": (math.inf, math.inf, 0.0),
    "dense16": (math.inf, 0.0, math.inf),
    "filtered": (0.0, 0.0, 0.0),
}
_FUNCTIONS = {
    "materialized_cross_entropy": "dense",
    "cached_cross_entropy": "stored",
    "grouped_cross_entropy": "grouped",
    "formed_gradients": "formed gradients",
    "filtered_cross_entropy": "filtered",
    "cross_entropy": "exact",
    "materialized_gradients": "dense gradients",
    "filtered_gradients": "filtered gradients",
    "logit_stats_backward": "recomputed gradients",
}


def applies(way: str, options: Options, dtype: torch.dtype) -> bool:
    """Whether a loss with these options can take that way; "exact" takes what no other does, "portable" is PyTorch's."""
    if way == "portable":
        return True
    if options.reduction == "none" or options.label_smoothing:
        return way == "exact"
    if way == "dense16":
        return dtype != torch.float32
    if way in ("stored", "narrow"):
        return dtype != torch.float16  # has no range for it
    if way in ("grouped", "whole"):
        return dtype != torch.float16 and options.frozen
    return way != "filtered" or not options.bias


def plain_options(way: str) -> Options:
    """The default options, if that way is for them; else those of a frozen head."""
    return Options(frozen=way in ("grouped", "whole"))


def takes(way: str) -> str:
    """The name under which ``watch`` counts the forward pass of a way."""
    return {"narrow": "stored", "dense16": "dense", "whole": "grouped"}.get(way, way)


def backward_of(way: str) -> str:
    """The name under which ``watch`` counts the backward pass of a way."""
    own = {
        "dense": "dense gradients",
        "dense16": "dense gradients",
        "filtered": "filtered gradients",
        "grouped": "formed gradients",
        "whole": "formed gradients",
    }
    return own.get(way, "recomputed gradients")


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> Counter[str]:
    """Send every scalar loss that way from now on, if it applies; returns how often each was taken."""
    filter_from, dense_bytes, narrow_bytes = _THRESHOLDS.get(way, (math.inf, 0.0, 0.0))
    monkeypatch.setattr(dispatch, "FILTER_FROM", filter_from)
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 0)
    monkeypatch.setattr(dispatch, "DENSE_BYTES", dense_bytes)
    monkeypatch.setattr(dispatch, "NARROW_BYTES", narrow_bytes)
    from hf_cce.kernels import exp_cache, loss, token_groups

    if way in ("grouped", "whole"):  # several slabs of the product
        monkeypatch.setattr(token_groups, "BUFFER", 4 << 20 if torch.cuda.is_available() else 1 << 12)
    if way in ("narrow", "exact", "grouped", "whole"):
        # a whole tile of every plan, on a GPU and in the interpreter
        width = (256 if torch.cuda.is_available() else 32) if way == "narrow" else 0
        monkeypatch.setattr(
            exp_cache,
            "_scratch_columns",
            lambda shape, *_: 0 if shape.dtype == torch.float16 else min(shape.v, width),
        )

    def group_size(shape: Any, *_: Any) -> int:
        if way not in ("grouped", "whole") or shape.dtype == torch.float16:
            return 0
        few = 256 if torch.cuda.is_available() else 16  # whole row blocks of every plan
        return few if way == "grouped" else -(-shape.n // few) * few

    monkeypatch.setattr(loss, "group_size", group_size)
    return watch(monkeypatch)


def watch(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way is taken from now on."""
    taken: Counter[str] = Counter()

    def counting(function: Any, name: str) -> Any:
        def wrapper(*args: Any) -> Any:
            result = function(*args)
            if result is not None:  # else the budget does not allow it
                taken[name] += 1
            return result

        return wrapper

    for function, name in _FUNCTIONS.items():
        monkeypatch.setattr(kernels, function, counting(getattr(kernels, function), name))
    return taken


def like_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of an H200, and nothing is launched, multiplied or read: for tensors without memory."""
    from triton.runtime.jit import KernelInterface

    from hf_cce.kernels import launch_config

    def validate_labels(labels: Tensor, spec: Any, v: int, divisor: Any, triton: bool) -> Tensor:
        return kernels.validate_labels(labels, spec.ignore_index, v, divisor)[1]

    monkeypatch.setattr(strategies, "validate_labels", validate_labels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(launch_config, "hopper_is_proven", lambda: True)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *args, **options: None)
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_cce.kernels") and hasattr(module, "multiply_add"):
            monkeypatch.setattr(module, "multiply_add", lambda *_, **__: None)


def config_of(way: str, **options: Any) -> CCEConfig:
    implementation = "portable" if way == "portable" else "triton"
    return CCEConfig(implementation, **{"gradient_filter": KEEPS_ALL if way == "filtered" else None, **options})


def peaked(
    n: int, d: int, v: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [N, D], weight [V, D], labels [N]) as late in training: frequent labels, mostly foreseen, some wrongly.

    The logit of what is foreseen is a little above the logsumexp of the others; those have a part common to all tokens, of
    standard deviation 2, which favours frequent entries, and one of their own, of standard deviation 1.
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(v, d, generator=g) / d**0.5
    frequency = 1.0 / torch.arange(1, v + 1)
    labels, other = torch.multinomial(frequency, 2 * n, replacement=True, generator=g).view(2, n)
    foreseen = torch.where(torch.rand(n, generator=g) < 0.8, labels, other)
    hidden = (math.log(v) + 4.5) * weight[foreseen] + torch.randn(n, d, generator=g)
    few = min(v, 2 * d)
    common = weight[:few].t() @ frequency[:few].log()
    hidden += (common / common.norm()) * (2 * d**0.5)
    labels[::7] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)
