"""``hf-cce check``: does this model train with CCE as it does without, and does it make no logits?"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json

if TYPE_CHECKING:
    from hf_cce.diagnostics.check import Report

SHOWN = 5


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder or a name on the hub; or a model type such as llama.")
    ],
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="A tiny random model of its class instead of its weights; always so for a type."),
    ] = False,
    device: Annotated[str, typer.Option(help="Such as cpu, cuda, cuda:1.")] = "cpu",
    details: Annotated[bool, typer.Option("--details", help="Show every gradient, not only the worst.")] = False,
    json_path: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit code, and errors.")] = False,
) -> None:
    """Train one step of a model on random text without and with CCE, and compare loss, gradients and evaluation.

    Exit code 0: the same but for rounding, and no logits were made. 1: it differs, or logits were made. 2: it could not be
    checked. Holds the weights and two sets of gradients in float32.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    with ending(errors, 2):
        import torch

        from hf_cce.diagnostics import check as diagnostics

        with console.status("") as status:
            report = diagnostics.check(
                diagnostics.load(model, tiny, torch.device(device)), lambda what: status.update(escape(what))
            )
        if json_path:
            write_json(json_path, {"command": shlex.join(["hf-cce", *sys.argv[1:]]), **report.to_json()})
    _show(console, report, details)
    if json_path:
        console.print(f"Numbers: {numbers}")
    if not (report.same and report.saves):
        raise typer.Exit(1)


def _show(console: Console, report: Report, details: bool) -> None:
    console.print(f"{report.model}, {report.parameters:,} parameters, {escape(report.device)}, float32")
    console.print(f"Loss: {report.losses[0]:.7f} without CCE, {report.losses[1]:.7f} with")
    rows = report.differences if details else sorted(report.differences, key=lambda x: -x.apart / x.allowed)[:SHOWN]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("loss, or gradient of", "apart", "rounding allows", ""):
        table.add_column(heading, justify="right" if heading in ("apart", "rounding allows") else "left")
    for row in rows:
        table.add_row(
            escape(row.name), f"{row.apart:.1e}", f"{row.allowed:.1e}", "ok" if row.ok else "[bold red]differs[/]"
        )
    console.print(table)
    if not details and len(report.differences) > SHOWN:
        console.print(f"The {SHOWN} closest to the limit, of {len(report.differences)}; --details shows all.")
    console.print(f"Logits in evaluation: {'identical' if report.evaluation_same else '[bold red]different[/]'}")
    console.print(_verdict(report))


def _verdict(report: Report) -> str:
    wrong = [row.name for row in report.differences if not row.ok]
    if not report.same:
        what = (
            f"{len(wrong)} of {len(report.differences)} results differ by more than rounding"
            if wrong
            else "evaluation differs"
        )
        return f"[bold red]Do not train this model with hf_cce: {what}.[/] Please report it, with the output of --json."
    if not report.saves:
        why = escape(" ".join(report.warnings)) or "its loss was computed from logits."
        return f"[bold]hf_cce trains this model right, but saves no memory.[/] {why}"
    return "[bold green]hf_cce trains this model as it is trained without, and makes no logits.[/]"
