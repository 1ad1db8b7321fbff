"""PEFT: run the model's hooks although an adapter calls the model's ``forward`` directly.

Cause: ``BaseTuner.forward`` of PEFT 0.18 to 0.20 is ``return self.model.forward(…)``, which runs no hooks; from 0.21 on it is
``return self.model(…)``. In 0.21.2 two tuners still run none: ``AdaLoraModel.forward`` calls ``self.model.forward(…)`` and adds
a penalty to the loss in place, and ``AdaptionPromptModel.__init__`` uses the model's forward as its own. Versions: read and
tested with PEFT 0.18 and 0.21.2. Can be removed when no supported version of PEFT does so.

How: if PEFT is installed, it is imported when a model is patched. ``BaseTuner`` gets the forward of 0.21. The other two get a
``__call__`` that does the work of the hooks around the original call, and leaves their own code unchanged.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_cce.patches.marking import STATE, replace

TUNERS = {"peft.tuners.adalora": "AdaLoraModel", "peft.tuners.adaption_prompt": "AdaptionPromptModel"}


def install() -> None:
    """Make adapters run the hooks of a patched model, however they call it."""
    try:
        version("peft")
    except PackageNotFoundError:
        return
    replace(import_module("peft.tuners.tuners_utils").BaseTuner, "forward", _forward_with_hooks)
    for name, tuner in TUNERS.items():
        replace(getattr(import_module(name), tuner), "__call__", _call_with_hooks)


def _forward_with_hooks(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.model(*args, **kwargs) if STATE in vars(self.model) else original(self, *args, **kwargs)


def _call_with_hooks(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    patch = vars(self.model).get(STATE)
    if patch is None:
        return original(self, *args, **kwargs)
    return patch.run_with_hooks(self.model, functools.partial(original, self), args, kwargs)
