"""Files that are whole or not there at all, whenever the program is stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, renamed to it when the block ends well and removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib picks the picture's format by it.
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """``value`` as JSON, whole or not at all; lists of numbers take one line each, as they may be long."""
    lines = re.sub(r"\[\n[-+.\w\s,]*\]", lambda found: " ".join(found[0].split()), json.dumps(value, indent=1))
    with whole_file(path) as temporary:
        temporary.write_text(lines + "\n", "utf-8")


def put_json(path: Path, value: Any) -> None:
    """``value`` as JSON into the file ``path``, or on standard output where that is "-"."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The same for a folder that is filled once. Who comes second, after another process, throws its own copy away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield temporary
        try:
            os.replace(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
