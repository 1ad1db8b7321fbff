"""PEFT: an adapter calls the ``forward`` of the model that it wraps, and with it none of the model's hooks.

Cause: ``peft.tuners.tuners_utils.BaseTuner.forward`` of PEFT 0.18 to 0.20 is ``return self.model.forward(…)``; from 0.21 on it is
``return self.model(…)``, and this file changes nothing. It can go when 0.21 is the oldest PEFT that is supported.

How: the class gets a forward that does what 0.21 does where the wrapped model is patched, and passes everything else on. PEFT
must have been imported when ``apply_cce`` is called, or a callback's training begins.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def enter(state: str) -> None:
    """From now on adapters call a model that has the attribute ``state``, hooks and all."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
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
