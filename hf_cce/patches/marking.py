"""How patched objects are marked, and how a function of another library is replaced once."""

from __future__ import annotations

import functools
from typing import Any

STATE = "_hf_cce"  # on models and heads: their state; on functions: True


def is_wrapped(function: Any) -> bool:
    return hasattr(function, STATE)


def wrap(original: Any, replacement: Any) -> Any:
    """Return ``replacement``, with ``original`` as its first argument, under the name of ``original`` and marked."""
    wrapper: Any = functools.wraps(original)(functools.partial(replacement, original))
    setattr(wrapper, STATE, True)
    return wrapper
