"""Options and output shared by all sub-commands."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")


def size(text: str) -> int:
    """Parse "256MiB", "1.5 GiB" or "268435456" to bytes, like ``CCEConfig`` but case-insensitively."""
    from hf_cce import CCEConfig

    try:
        return int(CCEConfig(memory_budget=text.strip().upper().replace("IB", "iB").replace("KB", "kB")).memory_budget)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a size such as 256MiB, got {text!r}") from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def file(text: str) -> Path:
    """Parse the path of a file to write; a folder is refused before the command works for minutes."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    return Path(text)


def add_sizes(parser: argparse.ArgumentParser, defaults: dict[str, str]) -> None:
    """Add options for whole numbers; ``defaults`` maps each name to the default as the help shows it."""
    meanings = {
        "--tokens": "tokens, N",
        "--batch-size": "sequences per step",
        "--seq-length": "tokens per sequence",
        "--hidden-size": "width of the hidden states, D",
        "--vocab-size": "vocabulary entries, V",
        "--layers": "decoder layers",
        "--max-steps": "training steps",
    }
    for name, default in defaults.items():
        parser.add_argument(name, type=positive, metavar="N", help=f"{meanings[name]} (default: {default})")


def add_device(parser: argparse.ArgumentParser, default: str = "a GPU if there is one") -> None:
    parser.add_argument("--device", help=f"cpu, cuda, cuda:1, mps (default: {default})")


class Output:
    """Output of a command: its result to standard output, progress to standard error, numbers to a JSON file."""

    def __init__(self, json_path: Path | None) -> None:
        self.json_path = json_path
        self.only_json = str(json_path) == "-"

    def print(self, *lines: str) -> None:
        if lines and not self.only_json:
            self.progress("")
            print(*lines, sep="\n", flush=True)  # pipes are not line-buffered

    def progress(self, text: str) -> None:
        """Show ``text`` in one line of the terminal, if there is one; an empty text clears it."""
        if not self.only_json and sys.stderr.isatty():
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def save(self, report: Any) -> None:
        """Write ``report`` to the JSON file, or to standard output for "-"; add the command line to a dict."""
        if self.json_path is None:
            return
        if isinstance(report, dict):
            report = {"command": shlex.join(["hf-cce", *sys.argv[1:]]), **report}
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        if self.only_json:
            sys.stdout.write(text)
            return
        self.json_path.parent.mkdir(parents=True, exist_ok=True)
        self.json_path.write_text(text, "utf-8")
        self.print(f"Numbers: {self.json_path}")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows of cells as aligned text: the first ``left`` columns left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
