"""Skip reasons for markers, and environment variables that must be set before torch is imported."""

import importlib.util
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# With several test processes on few cores, one thread per process is faster than oversubscribing the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it at import; its kernels then run on the CPU

import interpreter
import pytest


class Call(NamedTuple):
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "deepspeed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="--record=FILE: add versions and results to this JSON")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the versions and results of this run, for the table of versions in docs/reference/trust.md."""
    path, reporter = session.config.option.record, session.config.pluginmanager.get_plugin("terminalreporter")
    if path is None or hasattr(session.config, "workerinput"):  # the workers of xdist leave it to their parent
        return
    environment = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "system": platform.system(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        **{name: version(name) for name in PACKAGES if importlib.util.find_spec(name) is not None},
    }
    run = {key: len(reporter.stats.get(key, ())) for key in ("passed", "failed", "error")}
    rows = json.loads(path.read_text("utf-8")) if path.exists() else []
    row = next((row for row in rows if row["environment"] == environment), None)
    if row is None:
        rows.append(row := {"environment": environment, "runs": {}})
    option = session.config.option
    row["runs"][" ".join(filter(None, [*option.file_or_dir, option.keyword, option.markexpr]))] = run
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


@pytest.fixture
def device(implementation: str) -> str:
    """Return the device to test an implementation on. Kernels run on a GPU if there is one, else in Triton's interpreter."""
    by_kernels = implementation.startswith("triton")
    if by_kernels:
        pytest.importorskip("triton")
    return "cuda" if by_kernels and torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh_gpu() -> Iterator[None]:
    """After each test, return cached memory to the GPU, for other processes, and switch off TF32, which accelerate enables."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Forget what earlier tests compiled, so that a test's graphs do not depend on them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Call]]:
    """Return a function that lists the calls of a function of a module or class from now on; it is called as before."""

    def watch(owner: Any, name: str) -> list[Call]:
        calls: list[Call] = []
        real = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            calls.append(Call(args, options, real(*args, **options)))
            return calls[-1].result

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.fixture
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let argmax-like operations take seven tokens of 99 logits at a time; by default all tokens of a test fit at once."""
    from hf_cce.deferred.recipe import Recipe

    monkeypatch.setattr(Recipe, "scratch_bytes", lambda recipe: 8 * 99 * 7)


@pytest.fixture
def forced(strategy: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Force the ``strategy`` of a test on inputs of any size; return the count of each strategy."""
    from forced_strategies import force_strategy

    return force_strategy(monkeypatch, strategy)


@pytest.fixture
def filtered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Filter losses of any size; return the count of each strategy."""
    from forced_strategies import force_strategy

    return force_strategy(monkeypatch, "filtered")


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's state before and after a test: it is per process and holds the precision, for example."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` if there is no suitable GPU; configure Triton's interpreter if kernels run in it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        interpreter.configure()
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
