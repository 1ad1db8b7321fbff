"""What all commands have in common: where they print to, and how they end when something is in the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

FAILURES: tuple[type[Exception], ...] = (ValueError, RuntimeError, OSError)


def consoles(quiet: bool, json_path: Path | None) -> tuple[Console, Console]:
    """(what is shown, errors). Nothing is shown where the JSON is standard output: it stands there alone."""
    shown = Console(quiet=quiet or str(json_path) == "-", highlight=False, soft_wrap=True)
    return shown, Console(stderr=True, highlight=False, soft_wrap=True)


def where(path: Path | None) -> str:
    """How a file is named once it is written; asked before, while a folder that has to be made for it is not there yet."""
    if path is None:
        return ""
    made = [folder for folder in path.parents if not os.path.exists(folder)]
    return f"[bold]{escape(str(path))}[/]" + (f" (made the folder {escape(str(made[-1]))})" if made else "")


def can_write(*paths: Path | None) -> None:
    """Say that a file cannot be written before what it is for is measured.

    Raises:
        ValueError: one of ``paths`` cannot; None and - are left out.
    """
    for path in paths:
        if path is None or str(path) == "-":
            continue
        folder = next(each for each in path.absolute().parents if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{path} cannot be written: {folder} is {'not yours' if folder.is_dir() else 'no folder'}")


@contextmanager
def ending(
    errors: Console,
    code: int,
    usage: int | None = None,
    failures: tuple[type[Exception], ...] = FAILURES,
    interrupted: str = "nothing was written.",
    no_import: str = "",
) -> Iterator[None]:
    """Ctrl-C and what is in ``failures`` end the command with one sentence instead of a traceback.

    Args:
        code: exit status after a failure; after Ctrl-C it is 130.
        usage: the same after a ValueError, where an argument is to blame.
        interrupted: what became of the files.
        no_import: what to add to the message of an ImportError.
    """
    try:
        yield
    except typer.Exit:  # a RuntimeError, too
        raise
    except KeyboardInterrupt:
        errors.print(f"Interrupted; {interrupted}")
        raise typer.Exit(130) from None
    except failures as error:
        message = f"{str(error) or type(error).__name__}{no_import if isinstance(error, ImportError) else ''}"
        errors.print(f"[bold red]Error:[/] {escape(message)}")
        raise typer.Exit(code if usage is None or not isinstance(error, ValueError) else usage) from None
