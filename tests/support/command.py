"""Run the command ``hf-cce`` in this process, and Python code in a new one."""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


class Result(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def hf_cce(*arguments: str) -> Result:
    from hf_cce.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as ended:  # raised by argparse for wrong arguments and --help
            code = int(ended.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def environment(*folders: str | Path, **more: str) -> dict[str, str]:
    """Return the variables of a new process, with ``folders`` (relative to the root) first on the import path."""
    path = [*(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def run(
    command: list[str], variables: dict[str, str] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False)


def python(code: str, interpreted: bool = True, folders: tuple[str | Path, ...] = (), **more: str) -> str:
    """Return what ``code`` prints in a new Python process at the root; with ``interpreted=False``, Triton compiles."""
    variables = environment(*folders, **more)
    if not interpreted:
        variables.pop("TRITON_INTERPRET", None)
    done = run([sys.executable, "-c", code], variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
