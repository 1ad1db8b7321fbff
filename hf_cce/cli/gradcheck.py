"""``hf-cce gradcheck``: is the fused loss as exact on this device as full logits are?"""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json

if TYPE_CHECKING:
    from hf_cce.diagnostics.gradcheck import Report, Row


class DType(str, Enum):
    """Of hidden states and weight."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


BY_DEVICE = "{} on a CPU, {} on an NVIDIA GPU"


def gradcheck(
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", "-n", min=1, help="Tokens.", show_default=BY_DEVICE.format("150", "2,500")),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Width of the model.", show_default=BY_DEVICE.format("72", "2,048"))
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Vocabulary.", show_default=BY_DEVICE.format("2,003", "32,003"))
    ] = None,
    dtype: Annotated[
        list[DType] | None, typer.Option(help="Only this one; can be repeated.", show_default="all there are")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu, cuda, cuda:1, mps.", show_default="the best there is")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    details: Annotated[bool, typer.Option("--details", help="Show every comparison, not only the worst.")] = False,
    json_path: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables, errors only.")] = False,
) -> None:
    """Compare loss, log-probabilities and gradients with float64, side by side with those of full logits.

    Exit code 0: everything is as close as full logits are in the same dtype, plus rounding. 1: something is not. 2: the
    check could not run.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    with ending(errors, 2):
        from hf_cce.diagnostics import gradcheck as diagnostics
        from hf_cce.diagnostics.machine import checked_device

        place = checked_device(device)
        usual = diagnostics.default_problem(place)
        sizes = tokens or usual.tokens, hidden_size or usual.hidden_size, vocab_size or usual.vocab_size
        dtypes = tuple(x.value for x in dtype) if dtype else diagnostics.DTYPES
        with console.status("") as status:
            report = diagnostics.gradcheck(
                diagnostics.Problem(*sizes, seed), place, dtypes, lambda what: status.update(escape(what))
            )
        if json_path:
            write_json(json_path, {"command": shlex.join(["hf-cce", *sys.argv[1:]]), **report.to_json()})
    _show(console, report, details)
    if json_path:
        console.print(f"Numbers: {numbers}")
    if report.failures:
        raise typer.Exit(1)


def _show(console: Console, report: Report, details: bool) -> None:
    problem = report.problem
    console.print(
        f"{escape(report.device)}: {problem.tokens:,} tokens, width {problem.hidden_size:,}, vocabulary "
        f"{problem.vocab_size:,}, seed {problem.seed}; errors against float64, absolute (largest) and relative (norm)"
    )
    for title, rows in report.groups():
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("case")
        for heading in ("full logits\nabs", "full logits\nrel", "hf_cce\nabs", "hf_cce\nrel", "allowed\nrel", ""):
            table.add_column(heading, justify="right")
        for row in rows if details else _worst(rows):
            figures = (f"{x:.1e}" for x in (*row.full_logits, *row.hf_cce, row.allowed))
            table.add_row(row.quantity, row.case, *figures, "ok" if row.ok else "[bold red]worse[/]")
        console.print(table)
    if not details:
        console.print("The case of each quantity that is closest to the limit; --details shows all.")
    for note in report.notes:
        console.print(f"Not compared: {escape(note)}")
    console.print(_verdict(report.rows, report.failures))


def _worst(rows: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row.quantity not in found or row.share > found[row.quantity].share:
            found[row.quantity] = row
    return list(found.values())


def _verdict(rows: list[Row], failures: list[Row]) -> str:
    if not failures:
        return f"All {len(rows)} results are as close to the exact ones as full logits are, plus rounding."
    row = max(failures, key=lambda row: row.share)
    computed = f"{row.implementation}{', filter ' + row.gradient_filter if row.gradient_filter else ''}"
    return (
        f"[bold red]{len(failures)} of {len(rows)} results are less exact than allowed[/]; the worst is {row.quantity} in "
        f"{row.dtype} ({row.case}; {computed}): relative error {row.hf_cce[1]:.1e}, allowed {row.allowed:.1e}."
    )
