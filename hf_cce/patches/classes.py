"""Transformers classes: patch every instance that is created later, however it is created.

Cause: users of class-level patches apply them before ``from_pretrained``. ``cls(config)``, ``from_pretrained`` and the
AutoModel classes all call ``cls.__init__``, which is wrapped here; a subclass that calls ``super().__init__`` is patched too.
Versions: any. Can be removed when users need only the patch of instances.
"""

from __future__ import annotations

from typing import Any

from hf_cce.config import CCEConfig
from hf_cce.patches.causal_lm import patch
from hf_cce.patches.marking import replace

CONFIG = "_hf_cce_config"


def patch_class(cls: type, config: CCEConfig) -> None:
    """Patch instances of ``cls`` created from now on with ``config``; on a patched class, only replace the options."""
    replace(cls, "__init__", _initialize)
    setattr(cls, CONFIG, config)


def unpatch_class(cls: type) -> None:
    """Stop patching new instances of ``cls``. Its ``__init__`` stays wrapped, because others may have wrapped it since."""
    if CONFIG in vars(cls):
        delattr(cls, CONFIG)


def _initialize(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    config = getattr(type(self), CONFIG, None)  # of the nearest patched class
    if config is not None:
        patch(self, config)
