"""PEFT: an adapter calls the ``forward`` of the model that it wraps, and with it none of the model's hooks.

Cause: ``peft.tuners.tuners_utils.BaseTuner.forward`` of PEFT 0.18 to 0.20 is ``return self.model.forward(…)``; from 0.21 on it is
``return self.model(…)``, and this file changes nothing. It can go when 0.21 is the oldest PEFT that is supported.

How: the class gets a forward that does what 0.21 does where the wrapped model is patched, and passes everything else on. Where
such a PEFT is installed and not yet imported, ``sys.meta_path`` gets a finder that does it once the class's module has been
executed, and then goes: a model can be patched before PEFT is imported, and a plain loop never comes back to us.
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

MODULE = "peft.tuners.tuners_utils"
CALLS_THE_MODEL = (0, 21)  # from this release on


def enter(state: str) -> None:
    """From now on adapters call a model that has the attribute ``state``, hooks and all."""
    utils = sys.modules.get(MODULE)
    if utils is not None:
        _mend(utils, state)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path) and _old():
        sys.meta_path.insert(0, _Finder(state))


def _mend(utils: Any, state: str) -> None:
    tuner = getattr(utils, "BaseTuner", None)
    original = getattr(tuner, "forward", None)
    code = getattr(original, "__code__", None)
    if tuner is None or code is None or code.co_names != ("model", "forward"):
        return

    @functools.wraps(original)  # type: ignore[arg-type]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = self.model if state in vars(self.model) else self.model.forward
        return called(*args, **kwargs)

    tuner.forward = forward


def _old() -> bool:
    """Whether the installed PEFT may be one that calls past the hooks; not imported for it."""
    try:
        release = re.match(r"(\d+)\.(\d+)", version("peft"))
    except PackageNotFoundError:
        return False
    return release is None or tuple(map(int, release.groups())) < CALLS_THE_MODEL


class _Finder(MetaPathFinder):
    """Finds what the other finders find, and lets the loader of PEFT's module do one thing more, once."""

    def __init__(self, state: str) -> None:
        self.state = state

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
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
        _mend(module, self.state)
        if self in sys.meta_path:  # an import that failed is tried again
            sys.meta_path.remove(self)
