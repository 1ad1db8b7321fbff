"""The machine: device names, package versions, usable dtypes and memory. Imports torch only where it is needed."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def origin(command: list[str], device: torch.device, *packages: str) -> dict[str, Any]:
    """Return date, command, device and versions of ``packages`` for the head of a result file."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(command),
        "device": device_name(device),
        "versions": {"python": platform.python_version(), **versions("torch", "triton", *packages)},
    }


def this_command(module: str, arguments: list[str] | None) -> list[str]:
    """Return the words of ``python -m module``; ``arguments`` None: those of this process."""
    return ["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]


def versions(*packages: str) -> dict[str, str | None]:
    """Return the installed version of each package, None where it is missing."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    """Return the processor model, such as "AMD EPYC 9654", or "CPU" where the system does not tell."""
    # platform.processor() is empty on most Linux systems.
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "CPU"


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for a CPU also architecture, system and number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count != 1)}" if device.type == "cpu" else ""
    name = cpu_name() if device.type == "cpu" else device.type.upper()
    return f"{name} ({platform.machine()}, {platform.system()}{threads})"


def driver_gpus() -> list[str] | None:
    """Return "name, driver version" of each GPU that NVIDIA's driver lists, None without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return what decides the speed of a CUDA device, for a report from a GPU that nobody here has."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver_gpus(),
    }


def best_device() -> torch.device:
    """Return the first NVIDIA GPU, else Apple's GPU, else the CPU."""
    import torch

    mps = torch.backends.mps.is_available()
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the 16-bit dtype that ``device`` trains in: float16 on NVIDIA GPUs below compute capability 8.0 such as a T4."""
    import torch

    old = device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def checked_device(name: str | None) -> torch.device:
    """Return the device called ``name``, the best one for None.

    Raises:
        ValueError: torch cannot use that device here.
    """
    import torch

    why = ""
    try:
        device = torch.device(name) if name else best_device()
        if device.type != "cuda":
            torch.empty(0, device=device)
        elif (device.index or 0) >= torch.cuda.device_count():  # creates no CUDA context in this process
            why = f"torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]  # torch goes on with its backends
    if why:
        raise ValueError(f"--device {name} cannot be used here: {why}")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now: of the GPU's allocator, or of the whole process on a CPU."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return int(psutil.Process().memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes in use since the process began, or since ``reset_peak_memory``."""
    import psutil
    import torch

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


def reset_peak_memory(device: torch.device) -> bool:
    """Let ``peak_memory`` begin anew, after what was freed has been given back; False where that cannot be done."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu" or sys.platform != "linux":
        return False
    with contextlib.suppress(AttributeError, OSError):  # of glibc: else freed small blocks still count as in use
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
