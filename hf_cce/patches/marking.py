"""How patched objects are marked, and how a function of another library is replaced once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

STATE = "_hf_cce"  # on models and heads: their state; on functions: the function


@functools.cache  # training calls without labels ask for it each time
def signature(function: Any) -> inspect.Signature:
    """Return the signature of a Python function; an empty one for anything else, such as None for a function that is missing."""
    return inspect.signature(function) if inspect.isfunction(function) else inspect.Signature()


def replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function of a module or class, once, by ``ours``, which takes the original before the arguments of a call."""
    original = getattr(owner, name)
    if getattr(original, STATE, None) is original:
        return

    # Not a functools.partial, which would not bind to an instance
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(wrapper, STATE, wrapper)  # itself, because functools.wraps copies attributes to functions of others
    binds = not isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
    setattr(owner, name, wrapper if binds else staticmethod(wrapper))
