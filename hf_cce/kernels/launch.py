"""Kernels whose launches can be listed without being made, and what is listed compiled, several at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# With more, loading what is cached takes longer, as they wait for each other: 0.75 s instead of 0.59 s for a filtered step.
WORKERS = 8

_listed: ContextVar[Launches | None] = ContextVar("hf_cce_listed", default=None)


class Kernel:
    """A function that ``triton.jit`` made, launched as that is, once it is loaded if that is under way."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.any_number = {p.name for p in getattr(jitted, "params", ()) if p.do_not_specialize}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        listed = _listed.get()
        if listed is not None:
            return lambda *args, **options: listed.append((self, args, options))
        launch: Callable[..., Any] = self.jitted[grid]
        if not LOADING.under_way:
            return launch

        def when_loaded(*args: Any, **options: Any) -> Any:
            kind = self.kind(torch.cuda.current_device(), args, options)
            if (future := LOADING.under_way.get((self, kind))) is not None:
                future.exception()  # of which the launch itself has to tell
            return launch(*args, **options)

        return when_loaded

    def kind(self, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What Triton compiles apart on one device, or something finer."""
        of_args = (
            type(x) if p.do_not_specialize else _kind(x, not p.do_not_specialize_on_alignment)
            for x, p in zip(args, self.jitted.params, strict=False)
        )
        of_options = ((name, type(x) if name in self.any_number else x) for name, x in options.items())
        return device, (*of_args,), (*of_options,)


class Loading:
    """Kernels that are compiled, or loaded from Triton's cache, by threads, while the steps that need them begin.

    One for the whole process: the step that began a load may never finish, and other steps need the same kernels.
    """

    def __init__(self) -> None:
        self.under_way: dict[tuple[Kernel, Any], Future[None]] = {}
        self.adding = Lock()

    def finish(self) -> None:
        """Wait for all: a thread that loads one while a CUDA graph is captured would break the capture."""
        for key, future in list(self.under_way.items()):
            if error := future.exception():  # of Triton: where it matters, the launch says what is wrong
                logger.debug("%s was not compiled ahead: %s", key[0].jitted.fn.__name__, error)
            if self.under_way.get(key) is future:  # only now: another thread that needs it waits too
                self.under_way.pop(key, None)


LOADING = Loading()


class Launches(list[tuple[Kernel, tuple[Any, ...], dict[str, Any]]]):
    """What would have been launched: kernels, their arguments, and their constants and options."""

    def load(self, device: torch.device, ready: Callable[[], None] = lambda: None) -> int:
        """Begin to compile each kind that Triton compiles apart, or to load it, in this order and several at a time.

        ``ready`` is called before, by each thread. Returns how many are begun; ``LOADING`` has them.
        """
        index = torch.cuda.current_device() if device.index is None else device.index

        def build(warm_up: Callable[[], Any]) -> None:
            if getattr(pools, "_shutdown", False):  # the process ends, and would wait for all that is queued
                return
            ready()
            with torch.cuda.device(device):
                kernel = warm_up()
                # Makes the launcher and loads the binary, which Triton else leaves to the first launch.
                getattr(kernel, "_init_handles", lambda: None)()

        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        pool, count = ThreadPoolExecutor(min(processors, WORKERS)), 0
        with LOADING.adding:
            for kernel, args, options in self:
                key = kernel, kernel.kind(index, args, options)
                if key not in LOADING.under_way:
                    warm_up = partial(kernel.jitted.warmup, *args, grid=(1,), **options)
                    LOADING.under_way[key] = pool.submit(build, warm_up)
                    count += 1
        pool.shutdown(wait=False)
        return count


def _kind(x: Any, alignment: bool = True) -> Any:
    """What Triton tells arguments apart by, or something finer."""
    if isinstance(x, Tensor):
        return x.dtype, alignment and x.data_ptr() % 16 == 0
    if hasattr(x, "block_shape"):  # a TMA descriptor
        return x.base.dtype, tuple(x.block_shape)
    if isinstance(x, int) and not isinstance(x, bool):
        return x == 1, x % 16 == 0, abs(x) < 1 << 31
    return type(x), x if x is None or isinstance(x, bool) else None


class _Forgotten(Launches):
    """Holds no argument, and with it no memory."""

    def append(self, launch: Any) -> None:
        pass


@contextmanager
def listing(keep: bool = True) -> Iterator[Launches]:
    """Nothing is launched inside; what would have been is in the list, unless that is not to be kept."""
    launches = Launches() if keep else _Forgotten()
    token = _listed.set(launches)
    try:
        yield launches
    finally:
        _listed.reset(token)
