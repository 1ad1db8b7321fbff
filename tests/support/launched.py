"""A pytest plugin that says which kernels the tests of a run have launched, and which none has: ``pytest -p launched …``.

Under compute-sanitizer, which looks at launches and knows nothing of what was left out:

    compute-sanitizer --tool memcheck python -m pytest -p launched -m "not slow" tests/triton_kernels/test_ways.py …

Tests that weigh memory fail there: the sanitizer holds Python's frames, and their tensors, after functions have returned.
In one process: those of pytest-xdist would each say what theirs were.
"""

from __future__ import annotations

import pkgutil
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

launched: Counter[str] = Counter()


def pytest_sessionstart() -> None:
    from hf_cce.kernels.launch import Kernel, _listed

    launch = Kernel.__getitem__

    def counting(self: Any, grid: Any) -> Any:
        if _listed.get() is None:  # else it is only to be compiled
            launched[self.jitted.fn.__name__] += 1
        return launch(self, grid)

    Kernel.__getitem__ = counting  # type: ignore[method-assign]


def kernels() -> set[str]:
    """All of ours, by name; Hopper's own where this Triton has what they are written in."""
    from hf_cce import kernels
    from hf_cce.kernels.launch import Kernel

    names = set()
    for module in pkgutil.iter_modules(kernels.__path__, "hf_cce.kernels."):
        try:
            found = vars(import_module(module.name)).values()
        except ImportError:
            continue
        names |= {value.jitted.fn.__name__ for value in found if isinstance(value, Kernel)}
    return names


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("kernels")
    for name in sorted(launched):
        terminalreporter.line(f"{launched[name]:8,} {name}")
    missing = sorted(kernels() - set(launched))
    terminalreporter.line(f"not launched: {', '.join(missing) or 'none'}")
