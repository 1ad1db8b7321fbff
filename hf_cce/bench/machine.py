"""What a figure was measured on: the device's name, the packages' versions; and waiting until the device has finished.

torch is loaded by the functions that need it: the demo's parent process asks for versions without it.
"""

from __future__ import annotations

import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def command(module: str, arguments: list[str] | None) -> str:
    """What a shell repeats this run of ``python -m module`` by; ``arguments``: None for those of the process."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)])


def versions(*packages: str) -> dict[str, str | None]:
    """By package; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    """The model of the processor, such as "AMD EPYC 9654", or "CPU" where the system does not say."""
    # platform.processor() is empty on most Linux systems, and names only the instruction set on others.
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "CPU"


def device_name(device: torch.device) -> str:
    """Of the GPU as its driver calls it; of a CPU with architecture, system and torch's number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count != 1)}" if device.type == "cpu" else ""
    name = cpu_name() if device.type == "cpu" else device.type.upper()
    return f"{name} ({platform.machine()}, {platform.system()}{threads})"


class Others:
    """What other programs use of the processor, as a share of all its cores, from now on until asked."""

    def __init__(self) -> None:
        self._since = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """(of all cores, of these busy, of these in this process)."""
        import psutil  # not above: hf-cce doctor runs where packages are missing

        times, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        # Linux counts what guests use as user time as well
        whole = sum(value for name, value in times.items() if not name.startswith("guest"))
        return whole, whole - times["idle"] - times.get("iowait", 0.0), own.user + own.system

    def share(self) -> float:
        """Between 0 and 1; by the ticks of the system's clock, so of less than a second it says little."""
        return self.known_share() or 0.0

    def known_share(self) -> float | None:
        """The same; None where the system counts no time, as some containers do not."""
        whole, busy, own = (now - then for now, then in zip(self._seconds(), self._since, strict=True))
        return min(1.0, max(0.0, busy - own) / whole) if whole > 0 else None


def used_before(seconds: float = 0.3) -> float | None:
    """The share of all cores that other programs use now; None where the system does not say.

    The load average would not do: for minutes it carries what has ended, such as the command before this one.
    """
    try:
        others = Others()
        time.sleep(seconds)
        return others.known_share()
    except OSError:  # no /proc/stat, or none that may be read
        return None


def synchronize(device: torch.device) -> None:
    """Wait for all that was queued."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
