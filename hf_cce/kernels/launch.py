"""Kernels whose launches can be listed without being made, and what is listed compiled, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

# With more, loading what is cached takes longer, as they wait for each other: 0.75 s instead of 0.59 s for a filtered step.
WORKERS = 8

_listed: ContextVar[Launches | None] = ContextVar("hf_cce_listed", default=None)


class Kernel:
    """A function that ``triton.jit`` made, launched as that is."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        listed = _listed.get()
        return (
            self.jitted[grid]
            if listed is None
            else lambda *args, **options: listed.append((self.jitted, args, options))
        )


class Launches(list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
    """What would have been launched: jitted functions, their arguments, and their constants and options."""

    def compile(self, device: torch.device) -> int:
        """Each kind that Triton compiles apart, several at a time; returns how many.

        Raises the first exception of a compilation.
        """
        kinds: dict[Any, Callable[[], Any]] = {}
        for jitted, args, options in self:
            of_args = (
                type(x) if p.do_not_specialize else _kind(x, not p.do_not_specialize_on_alignment)
                for x, p in zip(args, jitted.params, strict=False)
            )
            kinds[jitted.fn, (*of_args,), (*options.items(),)] = partial(jitted.warmup, *args, grid=(1,), **options)

        def build(warm_up: Callable[[], Any]) -> None:
            with torch.cuda.device(device):
                kernel = warm_up()
                # Makes the launcher and loads the binary, which Triton else leaves to the first launch.
                getattr(kernel, "_init_handles", lambda: None)()

        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(processors, WORKERS)) as pool:
            list(pool.map(build, kinds.values()))
        return len(kinds)


def _kind(x: Any, alignment: bool = True) -> Any:
    """What Triton tells arguments apart by, or something finer."""
    if isinstance(x, Tensor):
        return x.dtype, alignment and x.data_ptr() % 16 == 0
    if hasattr(x, "block_shape"):  # a TMA descriptor
        return x.base.dtype, tuple(x.block_shape)
    if isinstance(x, int) and not isinstance(x, bool):
        return x == 1, x % 16 == 0, abs(x) < 1 << 31
    return type(x), x if x is None or isinstance(x, bool) else None


@contextmanager
def listing() -> Iterator[Launches]:
    """Nothing is launched inside; what would have been is in the list."""
    launches = Launches()
    token = _listed.set(launches)
    try:
        yield launches
    finally:
        _listed.reset(token)
