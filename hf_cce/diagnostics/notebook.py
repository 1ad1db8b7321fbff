"""Helpers of the notebooks and the demo: ``begin`` prints the setup, ``Measured`` measures steps, ``show`` prints a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from hf_cce.diagnostics import machine
from hf_cce.dispatch import explain_dispatch

LOSS = (8192, 1024, 49_152)  # tokens, hidden size and vocabulary of the loss that ``begin`` describes
UNTRIED = "hf_cce has not been tested on GPUs below compute capability 8.0, such as a T4. The last table is measured on this GPU."


@dataclass(frozen=True)
class Setup:
    """The device and dtype that a notebook runs with."""

    device: torch.device
    dtype: torch.dtype  # of autocast

    def autocast(self) -> torch.autocast:
        """Return autocast in ``dtype``; disabled for float32."""
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if half else None, enabled=half)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler that float16 needs; disabled for other dtypes."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)


@dataclass
class Measured:
    """Memory and times of some steps."""

    device: torch.device
    extra: int | None = None  # the most bytes that a step added to the memory in use before it; None if unknown
    seconds: list[float] = field(default_factory=list)  # of each step

    @contextmanager
    def step(self) -> Iterator[None]:
        added = machine.watch_memory(self.device)
        machine.synchronize(self.device)
        start = time.perf_counter()
        yield
        machine.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        if (extra := added()) is not None:
            self.extra = max(self.extra or 0, extra)


def begin(dtype: torch.dtype | None = None) -> Setup:
    """Print device, dtype (by default the one for training on this device), implementation of the loss and what to expect."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or machine.default_dtype(device)
    found = explain_dispatch(*LOSS, dtype, device)
    name, old = "CPU", False
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name, old = "{}, compute capability {}.{}".format(machine.device_name(device), *capability), capability < (8, 0)
    print(f"device          {name}")
    print(f"dtype           {machine.dtype_name(dtype)}")
    print(f"implementation  {machine.TITLE[found.implementation]}")
    print(f"expect          {machine.EXPECT[found.implementation]}")
    if old:
        print(UNTRIED)
    return Setup(device, dtype)


def show(**variants: Measured) -> None:
    """Print a table of memory and time. Of several steps, the first is a warm-up, and its time is not counted."""
    print(f"{'':14}{'memory a step adds':>20}{'time of a step':>18}")
    for name, measured in variants.items():
        extra = "not measurable" if measured.extra is None else f"{measured.extra / 2**20:,.0f} MiB"
        seconds = median(measured.seconds[1:] or measured.seconds)
        print(f"{name.replace('_', ' '):14}{extra:>20}{1000 * seconds:>15,.1f} ms")
