"""Common header entries of result files."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import torch

from hf_cce.diagnostics import machine


def origin(module: str, arguments: list[str] | None, device: torch.device, *packages: str) -> dict[str, Any]:
    """Return date, device, versions and the command ``python -m module``; ``arguments`` defaults to those of this process."""
    command = ["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]
    return {**machine.report_header(device, *packages), "command": shlex.join(command)}
