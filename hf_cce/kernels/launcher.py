"""Kernel launches with low host overhead, and parallel compilation of kernels that Triton's cache does not have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
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

COLD_SECONDS = 0.1  # a kernel that takes longer to get was not in Triton's cache

_collected_kernels: ContextVar[list[Any] | None] = ContextVar("hf_cce_collected_kernels", default=None)
_when_cold: ContextVar[Callable[[], None] | None] = ContextVar("hf_cce_when_cold", default=None)


class Kernel:
    """A Triton kernel, launched by ``kernel[grid](*args, **constants)``: runtime arguments by position, constants by name.

    Triton searches for the compiled kernel at every launch, which takes the host longer than the launch itself. This class caches
    compiled kernels under a key of only those properties of the arguments that Triton specializes on.
    """

    _triton_is_loaded = False  # the first kernel of a process is slow even if it is in the cache: it loads Triton

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        function = self.function
        if not isinstance(function, JITFunction):  # Triton's interpreter
            function[grid](*args, **constants)
            return
        pending = _collected_kernels.get()
        if pending is not None:
            pending.append(function.warmup(*args, grid=grid, **constants, **OPTIONS))
            return
        key = (*constants.items(), *map(_specialization, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            began = time.perf_counter()
            compiled = self._compiled[key] = function.warmup(*args, grid=grid, **constants, **OPTIONS)
            took, warm_up = time.perf_counter() - began, _when_cold.get()
            if warm_up is not None and Kernel._triton_is_loaded and took > COLD_SECONDS:
                warm_up()
            Kernel._triton_is_loaded = True
        x, y, z = (*grid, 1, 1)[:3]
        compiled[x, y, z](*args, *[constants[name] for name in function.arg_names[len(args) :]])


def _specialization(arg: Any) -> Any:
    """Return the properties of a runtime argument that select the compiled kernel and its device."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0, arg.get_device()
    if isinstance(arg, int):
        return type(arg), arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31
    if arg is None or isinstance(arg, float):
        return type(arg)
    return type(arg), arg.base.dtype, arg.base.get_device(), *arg.block_shape, getattr(arg, "layout", None)


@contextmanager
def when_cold(warm_up: Callable[[], None]) -> Iterator[None]:
    """Call ``warm_up`` once, if a kernel launched in this context had to be compiled: the other kernels are then missing too."""

    def once() -> None:
        _when_cold.set(None)
        warm_up()

    token = _when_cold.set(once)
    try:
        yield
    finally:
        _when_cold.reset(token)


@contextmanager
def compiling(device: torch.device) -> Iterator[bool]:
    """Compile the kernels launched in this context in parallel, without running them. Yield False if Triton cannot.

    Compilation errors are ignored here; the later launch of the kernel raises them.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield False
        return
    pending: list[Any] = []
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Kernels are loaded onto the current device, which is set per thread.
    with ThreadPoolExecutor(min(MAX_COMPILE_THREADS, processors), initializer=partial(_set_device, device)) as threads:
        token = _collected_kernels.set(pending)
        try:
            with mode(threads, ignore_errors=True):
                yield True
        finally:
            _collected_kernels.reset(token)
        _build_launchers(pending, threads)


def _set_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _build_launchers(kernels: list[Any], threads: Executor) -> None:
    """Build the launchers of compiled kernels: up to Triton 3.8, a C compiler takes as long for that as Triton for the kernel."""

    def load(kernel: Any) -> None:
        done = kernel.result(ignore_errors=True) if hasattr(kernel, "result") else kernel
        if done is not None:
            done.run  # noqa: B018 (a property that is made when first read)

    for each in {id(kernel): kernel for kernel in kernels}.values():
        threads.submit(load, each)
