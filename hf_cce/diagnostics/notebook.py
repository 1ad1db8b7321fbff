"""What the notebooks and the demo share: ``begin`` says what runs here, ``Measured`` takes memory and time, ``show`` compares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from hf_cce.diagnostics import machine
from hf_cce.dispatch import explain_dispatch

LOSS = (8192, 1024, 49_152)  # tokens, hidden size and vocabulary of the loss that ``begin`` asks about
UNTRIED = "hf_cce has not been tested on GPUs below compute capability 8.0, such as a T4. The last table is measured on this GPU."


@dataclass(frozen=True)
class Here:
    """The machine that a notebook runs on.

    Args:
        device: where tensors go.
        dtype: of autocast: bfloat16 on a GPU, float16 on one below compute capability 8.0, float32 on a CPU.
    """

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        """Return autocast in ``dtype``; with float32 it does nothing."""
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if half else None, enabled=half)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the scaler that float16 needs; with another dtype it does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)


@dataclass
class Measured:
    """Memory and times of some steps.

    Args:
        device: where they run.
        extra: the most bytes that a step added to the memory in use before it; None where that cannot be measured.
        seconds: of each step.
    """

    device: torch.device
    extra: int | None
    seconds: list[float]

    @classmethod
    def on(cls, device: torch.device) -> Measured:
        return cls(device, None, [])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step."""
        added = machine.watch_memory(self.device)
        machine.synchronize(self.device)
        start = time.perf_counter()
        yield
        machine.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        if (extra := added()) is not None:
            self.extra = max(self.extra or 0, extra)


def begin(dtype: torch.dtype | None = None) -> Here:
    """Print device, dtype, implementation of the loss and what to expect of it.

    Args:
        dtype: the notebook's own choice; None: the default of a training on this device.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or machine.default_dtype(device)
    found = explain_dispatch(*LOSS, dtype, device)
    name, old = "CPU", False
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name, old = "{}, compute capability {}.{}".format(machine.device_name(device), *capability), capability < (8, 0)
    print(f"device          {name}")
    print(f"dtype           {str(dtype).removeprefix('torch.')}")
    print(f"implementation  {machine.TITLE[found.implementation]}")
    print(f"expect          {machine.EXPECT[found.implementation]}")
    if old:
        print(UNTRIED)
    return Here(device, dtype)


def show(**ways: Measured) -> None:
    """Print a table of memory and time; the first step of several is a warm-up and its time does not count."""
    print(f"{'':14}{'memory a step adds':>20}{'time of a step':>18}")
    for name, way in ways.items():
        extra = "not measurable" if way.extra is None else f"{way.extra / 2**20:,.0f} MiB"
        seconds = median(way.seconds[1:] or way.seconds)
        print(f"{name.replace('_', ' '):14}{extra:>20}{1000 * seconds:>15,.1f} ms")
