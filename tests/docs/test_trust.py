"""trust.md names existing tests, SECURITY.md matches the code, and wrong-calls.md lists the actual messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from promises import PAGE, ROOT, page
from wrong_calls import message, table

CODE = sorted([*(ROOT / "hf_cce").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
CHECKS = re.findall(r"`(\w+/test_\w+\.py::\w+)`", PAGE.read_text("utf-8"))
# Modules that unpickle or open connections, and functions that execute text. torch.load is allowed with weights_only=True.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "socket", "urllib", "http",
                  "requests", "httpx", "aiohttp", "ftplib", "huggingface_hub"}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def complaints(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from (f"import {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in UNSAFE_CALLS:
            yield f"{called}()"
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        if called == "torch.load" and not safe:
            yield "torch.load() without weights_only=True"
        if called.startswith(("torch.hub.", "requests.")):
            yield f"{called}()"


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_unpickling_exec_or_download(path: Path) -> None:
    assert list(complaints(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "source", ["import pickle", "from urllib import request", "eval('1')", "torch.load(path)", "torch.hub.load('a')"]
)
def test_unsafe_code_is_detected(source: str) -> None:
    assert list(complaints(source))


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_remote_code_is_never_trusted(path: Path) -> None:
    """Recipes pass on TRL's own option, which defaults to False."""
    values = re.findall(r"""trust_remote_code["']?\s*[=:]\s*([\w.]+)""", path.read_text("utf-8"))
    assert set(values) <= {"False", "training.trust_remote_code"}


def test_actions_are_pinned_by_commit() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: +([^@\s]+)@(\S+)", text)
    assert len(used) >= 10
    assert [name for name, ref in used if not re.fullmatch("[0-9a-f]{40}", ref)] == []


@pytest.mark.parametrize("check", CHECKS)
def test_promised_tests_exist(check: str) -> None:
    name, test = check.split("::")
    assert f"def {test}(" in (ROOT / "tests" / name).read_text("utf-8")


def test_generated_parts_are_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.support.promises"


@pytest.mark.parametrize("line", table())
def test_wrong_call_messages(line: str) -> None:
    assert message(line) == table()[line]
