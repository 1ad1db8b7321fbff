"""Device name, package versions, date: where and when a figure was measured. Imports torch only where it is needed."""

from __future__ import annotations

import datetime
import platform
import shlex
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


def best_device() -> torch.device:
    """Return the first NVIDIA GPU, else Apple's GPU, else the CPU."""
    import torch

    mps = torch.backends.mps.is_available()
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")


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


class OtherPrograms:
    """Share of all CPU cores that other programs use from now on."""

    def __init__(self) -> None:
        self._since = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Return CPU seconds: of all cores, of those busy, of this process."""
        import psutil  # not at the top: hf-cce doctor runs where packages are missing

        times, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        # Linux counts guest time as user time, too.
        whole = sum(value for name, value in times.items() if not name.startswith("guest"))
        return whole, whole - times["idle"] - times.get("iowait", 0.0), own.user + own.system

    def share(self) -> float:
        """Return the share, 0 to 1; 0 where the system counts no CPU time."""
        whole, busy, own = (now - then for now, then in zip(self._seconds(), self._since, strict=True))
        return min(1.0, max(0.0, busy - own) / whole) if whole > 0 else 0.0
