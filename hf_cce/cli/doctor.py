"""``hf-cce doctor``: what is here of what hf_cce needs, what would run, and what to do about the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json

if TYPE_CHECKING:
    from hf_cce.diagnostics.doctor import Diagnosis

STYLE = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[bold red]wrong[/]"}


def doctor(
    json_path: JsonPath = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only what is wrong, with the commands that fix it.")
    ] = False,
) -> None:
    """Look at this machine: packages, GPUs, which implementation runs and why, and a small self-test of each.

    Exit code 0: all is well. 1: something is wrong; the command that fixes it stands beside it. 2: wrong usage.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    with ending(errors, 1):
        from hf_cce.diagnostics.doctor import diagnose

        with console.status("") as status:
            found = diagnose(lambda what: status.update(escape(what)))
        if json_path:
            write_json(json_path, found.to_json())
    _show(console, found)
    if json_path:
        console.print(f"Numbers: {numbers}")
    if quiet and str(json_path) != "-":
        for check in found.wrong:
            errors.print(f"{escape(check.name)}: {escape(check.found)}; {escape(check.fix or '')}")
    if found.wrong:
        raise typer.Exit(1)


def _show(console: Console, found: Diagnosis) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for check in found.checks:
        table.add_row(escape(check.name), STYLE[check.status], escape(check.found))
    console.print(table)
    if found.choices:
        console.print("What [bold]auto[/] runs:")
        for choice in found.choices:
            console.print(f"  {choice.device}, {choice.dtype}: [bold]{choice.implementation}[/] — {escape(choice.why)}")
    fixes = [check for check in found.checks if check.fix]
    if fixes:
        console.print("\nWhat can be done:")
        for check in fixes:
            console.print(f"  {escape(check.name)} ({check.status}): [bold]{escape(check.fix or '')}[/]")
    wrong = len(found.wrong)
    console.print(f"\n[bold red]{wrong} thing{'s' * (wrong > 1)} wrong.[/]" if wrong else "\nAll is well.")
