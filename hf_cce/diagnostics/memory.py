"""How much memory this process, or its GPU, has used: now and at most."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil
import torch


def in_use(device: torch.device) -> int:
    """Bytes in use now: of the GPU's allocator, or of the whole process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return int(psutil.Process().memory_info().rss)


def peak(device: torch.device) -> int:
    """The largest number of bytes in use since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        # MPS counts no peak; its driver's pool is only given back under pressure, so its size is close to one.
        return torch.mps.driver_allocated_memory()
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # Not ru_maxrss: a child process starts with its parent's there, as the kernel carries it over exec.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> bool:
    """Let ``peak`` begin anew, after what was freed has been given back; False where that cannot be done."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu" or sys.platform != "linux":
        return False
    with contextlib.suppress(
        AttributeError, OSError
    ):  # of glibc: else small blocks that were freed still count as in use
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
