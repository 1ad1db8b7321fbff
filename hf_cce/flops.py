"""Our operators for ``torch.utils.flop_counter.FlopCounterMode``, which would count them as nothing.

That module loads Triton, so it is not imported here. Where it is not loaded yet, ``sys.meta_path`` gets a finder that registers
the formulas once it is, and then goes: a counter copies what is registered when it is made.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"


# What full logits would count, the products alone: so that shares of a GPU's peak (MFU) stay comparable. What is computed anew in
# the backward pass, or left out by the filter, changes no figure.
def _product(hidden: Any, weight: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


def _forward(hidden: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return _product(hidden, weight)


def _cross_entropy(hidden: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Gradients that portable PyTorch forms in the forward pass are counted there: no operator runs in the backward pass."""
    formed = sum(len(shape) == 2 for shape in out_shape[3:5])
    return (1 + formed) * _product(hidden, weight)


def _backward(
    g1: Any, g2: Any, g3: Any, g4: Any, hidden: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    needed = sum(len(shape) == 2 for shape in out_shape[:2])  # that of the bias is a sum, no product
    return needed * _product(hidden, weight)


def enter() -> None:
    """Register the formulas, now or when the counter is imported. The operators exist by now."""
    if (module := sys.modules.get(COUNTER)) is not None:
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: Any) -> None:
    register = getattr(module, "register_flop_formula", None)
    registered = getattr(module, "flop_registry", {})
    formulas: dict[str, Callable[..., int]] = {
        "cross_entropy": _cross_entropy,
        "logit_stats": _forward,
        "logit_stats_backward": _backward,
    }
    for name, formula in formulas.items():
        operator = getattr(torch.ops.hf_cce, name)
        if register is not None and operator not in registered:
            register(operator)(formula)


class _Finder(MetaPathFinder):
    """Finds what the other finders find, and lets the counter's loader do one thing more, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            with contextlib.suppress(AttributeError):  # a loader with slots is left alone
                spec.loader.exec_module = functools.partial(self._execute, spec.loader)  # type: ignore
        return spec

    def _execute(self, loader: Any, module: Any) -> None:
        del loader.exec_module
        loader.exec_module(module)
        _register(module)
        if self in sys.meta_path:  # an import that failed is tried again
            sys.meta_path.remove(self)
