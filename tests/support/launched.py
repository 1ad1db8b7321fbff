"""A pytest plugin that says which kernels the tests of a run have launched, and which none has: ``pytest -p launched …``.

Under compute-sanitizer, which looks at launches and knows nothing of what was left out:

    compute-sanitizer --tool memcheck python -m pytest -p launched -m "not slow" tests/triton_kernels/test_ways.py …

Tests that weigh memory fail there: the sanitizer holds Python's frames, and their tensors, after functions have returned.
In one process: those of pytest-xdist would each say what theirs were.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import aot
import pytest

launched: Counter[str] = Counter()


def pytest_sessionstart() -> None:
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def counting(self: Any, grid: Any) -> Any:
        launched[self.fn.__name__] += 1
        return launch(self, grid)

    KernelInterface.__getitem__ = counting  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    names = {name.rpartition(".")[2] for name in aot.jitted_kernels()}
    terminalreporter.section("kernels")
    for name in sorted(names & launched.keys()):
        terminalreporter.line(f"{launched[name]:8,} {name}")
    terminalreporter.line(f"not launched: {', '.join(sorted(names - launched.keys())) or 'none'}")
