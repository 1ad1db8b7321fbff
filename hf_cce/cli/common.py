"""Shared by all commands: where output goes, and how a command ends when something is in the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

FAILURES: tuple[type[Exception], ...] = (ValueError, RuntimeError, OSError, ImportError, MemoryError)
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write all numbers to this file; - is standard output, alone.", dir_okay=False),
]


def consoles(quiet: bool, json_path: Path | None) -> tuple[Console, Console]:
    """Return (console, error console). The first is silent where JSON goes to standard output."""
    shown = Console(quiet=quiet or str(json_path) == "-", highlight=False, soft_wrap=True)
    return shown, Console(stderr=True, highlight=False, soft_wrap=True)


def where(path: Path | None) -> str:
    """Return how to name ``path`` once it is written; call it before, to notice folders that will be created."""
    if path is None:
        return ""
    made = [folder for folder in path.parents if not os.path.exists(folder)]
    return f"[bold]{escape(str(path))}[/]" + (f" (created the folder {escape(str(made[-1]))})" if made else "")


@contextmanager
def ending(errors: Console, code: int, usage: int | None = None) -> Iterator[None]:
    """End the command with one sentence instead of a traceback on Ctrl-C and on any of ``FAILURES``.

    Args:
        errors: where the sentence goes.
        code: exit status after a failure; after Ctrl-C it is 130.
        usage: exit status after a ValueError, where an argument is to blame; default: ``code``.
    """
    try:
        yield
    except typer.Exit:  # a RuntimeError, too
        raise
    except KeyboardInterrupt:
        errors.print("Interrupted; nothing was written.")
        raise typer.Exit(130) from None
    except FAILURES as error:
        advice = "; hf-cce doctor says what is missing" if isinstance(error, ImportError) else ""
        errors.print(f"[bold red]Error:[/] {escape((str(error) or type(error).__name__) + advice)}")
        raise typer.Exit(code if usage is None or not isinstance(error, ValueError) else usage) from None
