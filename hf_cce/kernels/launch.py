"""Kernels whose launches can be listed without being made, and what is listed compiled, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_listed: ContextVar[Launches | None] = ContextVar("hf_cce_listed", default=None)


class Kernel:
    """A function that ``triton.jit`` made, launched as that is."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        listed = _listed.get()
        return self.jitted[grid] if listed is None else lambda *args, **options: listed.add(self.jitted, args, options)


@dataclass(frozen=True)
class Blank:
    """Stands for a tensor where nothing but its kind is asked: its address tells how it is aligned, no more."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    address: int

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def data_ptr(self) -> int:
        return self.address

    @staticmethod
    def ptr_range() -> int:
        return 0

    def element_size(self) -> int:
        return self.dtype.itemsize


def addressed(x: Any) -> Any:
    """``x``, or what stands for it where it is fake: PyTorch aligns what it allocates, so the offset tells the address."""
    if not isinstance(x, FakeTensor):
        return x
    return Blank(x.dtype, x.shape, tuple(x.stride()), x.storage_offset() * x.element_size() % 16)


class Launches:
    """What would have been launched: one of each kind that Triton compiles apart."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Callable[[], Any]] = {}

    def add(self, jitted: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        args = tuple(map(addressed, args))
        kinds = tuple(
            type(x) if p.do_not_specialize else _kind(x) for x, p in zip(args, jitted.params, strict=False)
        )
        given = tuple((name, type(x) if not isinstance(x, (bool, int, str)) else x) for name, x in options.items())
        self._kinds.setdefault(
            (jitted.fn, kinds, given), lambda: jitted.warmup(*args, grid=(1,), **options)
        )

    def compile(self, device: torch.device) -> int:
        """All of them, as far as the processors go; the first exception of a compilation is raised. Returns how many."""

        def build(warm_up: Callable[[], Any]) -> None:
            with torch.cuda.device(device):
                kernel = warm_up()
                # Makes the launcher and loads the binary, which Triton else leaves to the first launch.
                getattr(kernel, "_init_handles", lambda: None)()

        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(workers, max(1, len(self._kinds)))) as pool:
            list(pool.map(build, self._kinds.values()))
        return len(self._kinds)


def _kind(x: Any) -> Any:
    """What Triton tells arguments apart by, or something finer."""
    if isinstance(x, (Tensor, Blank)):
        return x.dtype, x.data_ptr() % 16 == 0
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
