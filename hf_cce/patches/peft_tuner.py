"""PEFT: an adapter calls the ``forward`` of the model that it wraps, and with it none of the model's hooks.

Cause: ``BaseTuner.forward`` of PEFT 0.18 to 0.20 (``peft.tuners.tuners_utils``) is ``return self.model.forward(…)``; from 0.21
on it is ``return self.model(…)``. Two tuners do so in 0.21.2 still: ``AdaLoraModel.forward`` calls ``self.model.forward(…)`` and
adds a penalty to the loss in place, ``AdaptionPromptModel.__init__`` makes the model's forward its own. A class that does not
is left alone, and this file can go when none of the oldest PEFT that is supported does.

How: ``BaseTuner`` gets a forward that does what 0.21 does where the wrapped model is patched, and passes everything else on. The
two get a ``__call__`` that does what our hooks do around what it did: what they do with model and loss stays their own, also
where somebody (accelerate) has replaced their forward. Where PEFT is installed and not yet imported, ``sys.meta_path`` gets a
finder that does it once the classes' modules have been executed, and then goes: a model can be patched before PEFT is imported,
and a plain loop never comes back to us.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from typing import Any

BASE = "peft.tuners.tuners_utils"
CALLS_THE_MODEL = (0, 21)  # ``BaseTuner`` does from this release on
# The tuners that call past the hooks by themselves: where each is, and its method that takes the model's forward
TUNERS = {
    "peft.tuners.adalora.model": ("AdaLoraModel", "forward"),
    "peft.tuners.adaption_prompt.model": ("AdaptionPromptModel", "__init__"),
}


def enter(state: str) -> None:
    """From now on adapters do with a model that has the attribute ``state`` what its hooks do, whichever way they call it.

    Its value has a method ``around(model, call, args, kwargs)``: ``call(*args, **kwargs)``, which calls the model's forward,
    with what the hooks of the patch do before it and after it.
    """
    for name in (BASE, *TUNERS):
        if (module := sys.modules.get(name)) is not None:
            _mend(name, module, state)
    late = _late()
    if late and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(state, late))


def _late() -> set[str]:
    """The modules of the installed PEFT that are to be mended when they are imported; PEFT is not imported for it."""
    names = {name for name in (BASE, *TUNERS) if name not in sys.modules}
    if not names:
        return names
    try:
        release = re.match(r"(\d+)\.(\d+)", version("peft"))
    except PackageNotFoundError:
        return set()
    calls_the_model = release is not None and tuple(map(int, release.groups())) >= CALLS_THE_MODEL
    return names - {BASE} if calls_the_model else names


def _mend(name: str, module: Any, state: str) -> None:
    if name == BASE:
        _mend_base(module, state)
    else:
        _mend_tuner(module, state, *TUNERS[name])


def _mend_base(module: Any, state: str) -> None:
    tuner = getattr(module, "BaseTuner", None)
    original = getattr(tuner, "forward", None)
    if tuner is None or _names(original) != ("model", "forward"):
        return

    @functools.wraps(original)  # type: ignore[arg-type]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = self.model if state in vars(self.model) else self.model.forward
        return called(*args, **kwargs)

    tuner.forward = forward


def _mend_tuner(module: Any, state: str, name: str, method: str) -> None:
    tuner = getattr(module, name, None)
    if tuner is None or "__call__" in vars(tuner) or "forward" not in _names(vars(tuner).get(method)):
        return
    original = tuner.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = vars(self.model).get(state)
        if patch is None:
            return original(self, *args, **kwargs)
        return patch.around(self.model, functools.partial(original, self), args, kwargs)

    tuner.__call__ = call


def _names(function: Any) -> tuple[str, ...]:
    """What the code of a function looks up by name."""
    return getattr(getattr(function, "__code__", None), "co_names", ())


class _Finder(MetaPathFinder):
    """Finds what the other finders find, and lets the loaders of PEFT's modules do one thing more, once."""

    def __init__(self, state: str, late: set[str]) -> None:
        self.state = state
        self.late = late

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.late:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            # On the loader itself, so that the module keeps the one that found its source; one with slots is left alone
            with contextlib.suppress(AttributeError):
                spec.loader.exec_module = functools.partial(self._execute, spec.loader)  # type: ignore
        return spec

    def _execute(self, loader: Any, module: Any) -> None:
        del loader.exec_module
        loader.exec_module(module)
        _mend(module.__name__, module, self.state)
        self.late.discard(module.__name__)  # an import that failed is tried again
        if not self.late and self in sys.meta_path:
            sys.meta_path.remove(self)
