"""Transformers classes: patch every instance that is created later, however it is created.

Cause: users of class-level patches apply them before ``from_pretrained``. ``cls(config)``, ``from_pretrained`` and the
AutoModel classes all call ``cls.__init__``, which is wrapped here; a subclass that calls ``super().__init__`` is patched too.
Versions: any. Can be removed when users need only the patch of instances.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_cce.config import CCEConfig
from hf_cce.patches.causal_lm import patch

CONFIG = "_hf_cce_config"


def patch_class(cls: type, config: CCEConfig) -> None:
    """Patch instances of ``cls`` created from now on with ``config``; on a patched class, only replace the options."""
    if CONFIG not in vars(cls):
        cls.__init__ = _wrap_init(cls.__init__)  # type: ignore[misc]
    setattr(cls, CONFIG, config)


def unpatch_class(cls: type) -> None:
    """Stop patching new instances of ``cls``."""
    if CONFIG not in vars(cls):
        return
    delattr(cls, CONFIG)
    ours: Any = vars(cls)["__init__"]
    if getattr(ours, "__code__", None) is not _CODE:  # it was wrapped since; without CONFIG ours does nothing
        return
    init = ours.__wrapped__
    del cls.__init__  # type: ignore[misc]
    if cls.__init__ is not init:  # type: ignore[misc]  # it was the class's own, not an inherited one
        cls.__init__ = init  # type: ignore[misc]


def _wrap_init(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        config = getattr(type(self), CONFIG, None)  # of the nearest patched class
        if config is not None:  # None: unpatched, but still inside another wrapper
            patch(self, config)

    return __init__


_CODE = _wrap_init(object.__init__).__code__
