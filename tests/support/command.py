"""Run the command ``hf-cce`` in this process, and Python code in a new one."""

from __future__ import annotations

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
    """Import a script by its path."""
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
    """Run ``hf-cce`` with ``arguments``."""
    from hf_cce.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as ended:  # raised by argparse for wrong arguments and --help
            code = int(ended.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def python(code: str, interpreted: bool = True, folders: tuple[str | Path, ...] = (), **more: str) -> str:
    """Return what ``code`` prints in a new Python process at the root; with ``interpreted=False``, Triton compiles.

    ``folders``, relative to the root, are put first on the import path.
    """
    environment = {
        name: value for name, value in os.environ.items() if interpreted or name != "TRITON_INTERPRET"
    } | more
    path = [*(str(ROOT / folder) for folder in folders), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
