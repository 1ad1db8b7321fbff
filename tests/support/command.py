"""The command ``hf-cce`` in this process."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from hf_cce.cli.app import main


class Result(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def hf_cce(*arguments: str) -> Result:
    """Run ``hf-cce`` with ``arguments``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as ended:  # argparse's, for wrong arguments and --help
            code = int(ended.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
