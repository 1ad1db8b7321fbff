"""Markers with the reason why a test is skipped, and what a test process needs before torch is loaded."""

from __future__ import annotations

import os

# Tests run in several processes on few cores: one thread each is faster than all of them fighting for the same cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it at import: its kernels then run on the CPU

import pytest


@pytest.fixture
def device(implementation: str) -> str:
    """Where an implementation is tested: kernels on a GPU if there is one, else in Triton's interpreter."""
    if implementation == "triton":
        pytest.importorskip("triton")
    return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no suitable GPU."""
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
