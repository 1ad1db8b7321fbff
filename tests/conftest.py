"""Skip reasons for markers, and environment variables that must be set before torch is imported."""

from __future__ import annotations

import os

# With several test processes on few cores, one thread per process is faster than oversubscribing the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it at import; its kernels then run on the CPU

import pytest


@pytest.fixture
def device(implementation: str) -> str:
    """Return the device to test an implementation on. Kernels run on a GPU if there is one, else in Triton's interpreter."""
    if implementation == "triton":
        pytest.importorskip("triton")
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` if there is no suitable GPU."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    if not torch.cuda.is_available():
        reason = "needs an NVIDIA GPU"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = "needs compute capability 8.0 or newer"
    else:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
