"""Transformers classes: every instance made later is patched, whichever way it is made.

Cause: users of class-level patches call them before ``from_pretrained``. ``cls(config)``, ``from_pretrained`` and the
AutoModel classes all go through ``cls.__init__``, which is wrapped here; a subclass that calls ``super().__init__`` is
patched too. Versions: any. It can go when instance patching is all that users ask for.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_cce.config import CCEConfig
from hf_cce.patches.causal_lm import patch

CONFIG = "_hf_cce_config"


def patch_class(cls: type, config: CCEConfig) -> None:
    """Instances of ``cls`` made from now on are patched with ``config``; on a patched class only the options change."""
    if CONFIG not in vars(cls):
        cls.__init__ = _patching(cls.__init__)  # type: ignore[misc]
    setattr(cls, CONFIG, config)


def unpatch_class(cls: type) -> None:
    """Instances of ``cls`` made from now on are left alone."""
    if CONFIG not in vars(cls):
        return
    delattr(cls, CONFIG)
    ours: Any = vars(cls)["__init__"]
    if getattr(ours, "__code__", None) is not _CODE:  # somebody has wrapped it since; ours does nothing more below
        return
    init = ours.__wrapped__
    del cls.__init__  # type: ignore[misc]
    if cls.__init__ is not init:  # type: ignore[misc]  # it was the class's own, not an inherited one
        cls.__init__ = init  # type: ignore[misc]


def _patching(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        config = getattr(type(self), CONFIG, None)  # of the nearest patched class
        if config is not None:  # else taken back, under what somebody else has wrapped around this
            patch(self, config)

    return __init__


_CODE = _patching(object.__init__).__code__
