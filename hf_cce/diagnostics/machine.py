"""Describe this machine: device names, package versions, default dtypes, memory in use."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hf_cce

TORCH_ERROR: Exception | None = None  # ``hf-cce doctor`` runs without torch and reports it
try:
    import torch
except Exception as error:
    TORCH_ERROR = error

# By implementation of the loss.
TITLE = {"triton": "Triton kernels", "portable": "PyTorch fallback"}
EXPECT = {
    "triton": "less memory and less time than full logits",
    "portable": "less memory than full logits, about the same time",
}
GIB = 1 << 30
Progress = Callable[[str], object]  # called with a text about what runs now


def report_header(device: torch.device, *packages: str) -> dict[str, Any]:
    """Return the header of a result file: date, device and versions of ``packages``."""
    own = {"hf_cce": hf_cce.__version__, "python": platform.python_version()}
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "versions": {**own, **versions("torch", "triton", *packages)},
    }


def versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of a CPU with its architecture, system and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type.upper()} ({platform.machine()}, {platform.system()})"
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    found = re.search(r"^model name\s*:\s*(\S.*)$", info.read_text("utf-8"), re.MULTILINE) if info.exists() else None
    name, count = found[1] if found else platform.processor() or "CPU", torch.get_num_threads()
    return f"{name} ({platform.machine()}, {platform.system()}, {count} thread{'s' * (count != 1)})"


def driver_gpus() -> list[str] | None:
    """Return "name, driver version" of each GPU that NVIDIA's driver lists, None without a driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def gpu_facts(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / GIB, 1),
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver_gpus(),
    }


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the 16-bit dtype for ``device``: float16 on NVIDIA GPUs below compute capability 8.0 such as a T4."""
    old = device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products in training on ``device``: 16-bit on a CUDA GPU, else float32."""
    return half_dtype(device) if device.type == "cuda" else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checked_device(name: str | None) -> torch.device:
    """Return the device called ``name``; for None the first NVIDIA GPU, else Apple's GPU, else the CPU."""
    try:
        mps = torch.backends.mps.is_available()
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"))
        if device.type != "cuda":
            torch.empty(0, device=device)
        elif (device.index or 0) >= torch.cuda.device_count():  # creates no CUDA context in this process
            raise RuntimeError(f"torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = first_line(error).split(". ")[0]  # the rest lists torch's backends
        raise ValueError(f"--device {name} cannot be used here: {why}") from None
    return device


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes of a GPU's allocator, or of the process (Linux only), since ``reset_peak_memory`` or the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak_memory(device: torch.device) -> bool:
    """Reset ``peak_memory`` to the memory in use now; return False if memory cannot be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu" or sys.platform != "linux":
        return False
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it; it returns freed small blocks to the system
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def watch_memory(device: torch.device) -> Callable[[], int | None]:
    """Return a function that returns the peak of bytes added since now, or None if memory cannot be measured."""
    if not reset_peak_memory(device):
        return lambda: None
    before = peak_memory(device)
    return lambda: max(0, peak_memory(device) - before)
