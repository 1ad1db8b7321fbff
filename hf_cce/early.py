"""What the first step of a process would wait for, begun when a model is patched."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from functools import lru_cache
from threading import Thread

import torch


def begin() -> None:
    """Let Triton read its own files, in a thread.

    It names what it has compiled by a hash of them, compiler included: 400 MB and as many milliseconds, once a process,
    before its first kernel of all. Nothing is begun where no kernel will run, and nothing here touches the GPU, so that
    processes can be forked afterwards (``is_available`` would initialise CUDA, where ``device_count`` asks NVML).
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # Asked only where CUDA is in use already, since asking initialises it.
    if torch.cuda.is_initialized() and torch.cuda.get_device_capability() < (8, 0):
        return
    if torch.version.cuda and torch.cuda.device_count() and not interpreted and importlib.util.find_spec("triton"):
        with suppress(RuntimeError):  # no thread can be started: the first kernel has the files read
            _reading()


def finish() -> None:
    """Wait for what ``begin`` began; without that a caller would read the same files a second time."""
    if _reading.cache_info().currsize:
        _reading().join()


@lru_cache(maxsize=1)
def _reading() -> Thread:
    thread = Thread(target=_read, name="hf_cce: Triton's files", daemon=True)
    thread.start()
    return thread


def _read() -> None:
    try:
        from triton.runtime.cache import triton_key  # Triton 3.0 to 3.9; it remembers the result
    except ImportError:  # another version: the first kernel has it read
        return
    triton_key()
