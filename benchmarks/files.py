"""Files that are written completely or not at all."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, remove it otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")  # NumPy and matplotlib look at the suffix
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON to ``path``, or to standard output for "-"; each list of numbers takes one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\n[-+.\w\s,]*\]", lambda found: " ".join(found[0].split()), text) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8")
