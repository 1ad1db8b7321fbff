"""The command ``hf-cce``: one parser with a sub-command for each module here. Its help loads neither torch nor Transformers."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import hf_cce
from hf_cce.cli import bench, check, demo, doctor, estimate, gradcheck, models
from hf_cce.cli.common import Output

COMMANDS = (doctor, estimate, check, demo, bench, gradcheck, models)  # in the order of the help: what users need first
FAILURES = (ValueError, RuntimeError, OSError, ImportError, MemoryError)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands. A module has ``run``, whose docstring is the help, and maybe ``add_options``."""
    root = argparse.ArgumentParser(prog="hf-cce", description="Train language models without materializing logits.")
    root.add_argument("--version", action="version", version=f"hf-cce {hf_cce.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name, doc = module.__name__.rpartition(".")[2], inspect.getdoc(module.run) or ""
        subparser = commands.add_parser(
            name, help=doc.splitlines()[0], description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if hasattr(module, "add_options"):
            module.add_options(subparser)
        subparser.add_argument(
            "--json", type=Path, metavar="FILE", help="write all numbers as JSON (-: standard output)"
        )
        subparser.set_defaults(run=module.run)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run ``hf-cce`` and return its exit code; argparse exits with 2 on wrong arguments."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" instead of failing
    options = parser().parse_args(arguments)
    out = Output(options.json)
    try:
        return options.run(options, out)
    except KeyboardInterrupt:
        out.progress("")
        print("Interrupted.", file=sys.stderr)
        return 130
    except FAILURES as error:
        out.progress("")
        advice = "; run hf-cce doctor to see what is missing" if isinstance(error, ImportError) else ""
        print(f"Error: {str(error) or type(error).__name__}{advice}", file=sys.stderr)
        return 2
