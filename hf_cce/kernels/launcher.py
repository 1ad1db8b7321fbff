"""Kernel launches with low host overhead, and parallel compilation of kernels that Triton's cache does not have."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

# Passed at every launch: Triton 3.9 warns if the option is missing, and its default changes in 3.10.
OPTIONS = {"enable_fp_fusion": True}
MAX_COMPILE_THREADS = 16

_recorded: ContextVar[list[tuple[Any, Callable[[], Any]]] | None] = ContextVar("hf_cce_recorded_launches", default=None)
_listener_lock = threading.RLock()  # of Triton's compilation listener, which all threads share
_when_cold: ContextVar[Callable[[], None] | None] = ContextVar("hf_cce_when_cold", default=None)


class Kernel:
    """A Triton kernel, launched by ``kernel[grid](*args, **constants)``: runtime arguments by position, constants by name.

    Triton searches for the compiled kernel at every launch, which takes the host longer than the launch itself. This class caches
    compiled kernels under a key of only those properties of the arguments that Triton specializes on.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launch, constant_args = self._find(grid, args, constants)
        launch(*args, *constant_args)

    def prepare(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Callable[[int], None]:
        """Return a function that launches the kernel with its first argument, a number in ``do_not_specialize``, replaced."""
        launch, constant_args = self._find(grid, args, constants)
        return lambda first: launch(first, *args[1:], *constant_args)

    def _find(
        self, grid: tuple[int, ...], args: Any, constants: dict[str, Any]
    ) -> tuple[Callable[..., None], Sequence[Any]]:
        """Return (function that launches the kernel, its arguments after ``args``)."""
        function = self.function
        if not isinstance(function, JITFunction):  # Triton's interpreter
            return partial(function[grid], **constants), ()
        recorded = _recorded.get()
        if recorded is not None:  # in ``compiling``
            start = partial(function.warmup, *args, grid=grid, **constants, **OPTIONS)
            if function.is_gluon():
                with suppress(Exception):
                    start()
            else:
                recorded.append((function, start))
            return lambda *args: None, ()
        key = (*constants.items(), *map(_specialization, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = _compile(
                partial(function.warmup, *args, grid=grid, **constants, **OPTIONS)
            )
        x, y, z = (*grid, 1, 1)[:3]
        return compiled[x, y, z], [constants[name] for name in function.arg_names[len(args) :]]


def _specialization(arg: Any) -> Any:
    """Return the properties of a runtime argument that select the compiled kernel and its device."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16, arg.get_device()
    if type(arg) is int:
        return 1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    if arg is None or isinstance(arg, (float, bool)):
        return type(arg)
    # A TMA descriptor
    return type(arg), arg.base.dtype, arg.base.get_device(), *arg.block_shape, getattr(arg, "layout", None)


@contextmanager
def when_cold(warm_up: Callable[[], None]) -> Iterator[None]:
    """Call ``warm_up`` for the first kernel of this context that Triton's cache does not have: the others are missing too."""

    def once() -> None:
        _when_cold.set(None)
        warm_up()

    token = _when_cold.set(once)
    try:
        yield
    finally:
        _when_cold.reset(token)


def _compile(build: Callable[[], Any]) -> Any:
    """Return the kernel of ``build``. If it was not in Triton's cache, also call the function given to ``when_cold``."""
    warm_up, knobs, cached = _when_cold.get(), triton.knobs.compilation, []
    if warm_up is not None and _is_cache_empty():
        warm_up()  # compiles this kernel, too
        warm_up = None
    if warm_up is None:
        return build()
    with _listener_lock:
        users_listener = knobs.listener

        def listener(**event: Any) -> None:
            cached.append(event["cache_hit"])
            if users_listener is not None:
                users_listener(**event)

        knobs.listener = listener
        try:
            compiled = build()
        finally:
            knobs.listener = users_listener
    if not all(cached):
        warm_up()
    return compiled


def _is_cache_empty() -> bool:
    folder = triton.knobs.cache.dir
    if not os.path.isdir(folder):
        return True
    with os.scandir(folder) as entries:
        return not any(entries)


@contextmanager
def compiling(device: torch.device) -> Iterator[bool]:
    """Compile the kernels launched in this context in parallel after it, without running them. Yield False if Triton cannot.

    Compilation errors are ignored here; the later launch of the kernel raises them.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield False
        return
    recorded: list[tuple[Any, Callable[[], Any]]] = []
    # The slowest to compile start first: those in Gluon at once, then those with the longest source. While threads translate the
    # source, which is Python, they wait for each other.
    with _Compiler(device) as compiler, mode(compiler, ignore_errors=True):
        token = _recorded.set(recorded)
        try:
            yield True
        finally:
            _recorded.reset(token)
        for _, start in sorted(recorded, key=lambda launch: -len(launch[0].src)):
            with suppress(Exception):
                start()


class _Compiler(ThreadPoolExecutor):
    """Executor that also loads each kernel and builds its launcher, for which Triton up to 3.8 runs a C compiler."""

    def __init__(self, device: torch.device) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Kernels are loaded onto the current device, which is set per thread.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        super().__init__(min(MAX_COMPILE_THREADS, processors), initializer=set_device)

    def submit(self, build: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def build_and_load() -> Any:
            kernel = build(*args, **kwargs)
            with suppress(Exception):
                kernel.run  # noqa: B018 (a property that is made when first read)
            return kernel

        return super().submit(build_and_load)
