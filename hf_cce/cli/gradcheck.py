"""``hf-cce gradcheck``: is the fused loss as exact on this device as full logits are?"""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_cce.bench.files import put_json
from hf_cce.cli.common import FAILURES, consoles, ending, where

if TYPE_CHECKING:
    from hf_cce.bench.gradcheck import Report, Row


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
        list[DType] | None, typer.Option(help="Only this one; can be given again.", show_default="all there are")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu, cuda, cuda:1, mps.", show_default="the best there is")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="The shape that a TPU study published figures for, in float32 (some minutes)."
        ),
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Show every comparison, not only the worst of each kind.")
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write every comparison here; - is standard output, alone.", dir_okay=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables, errors only.")] = False,
) -> None:
    """Compare loss, log-probabilities and gradients with float64, side by side with those of full logits.

    Exit code 0: everything is as close as plain PyTorch is in the same dtype, plus rounding. 1: something is not. 2: the check
    could not run.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    if reference and (tokens or vocab_size or hidden_size or dtype):
        errors.print("[bold red]Error:[/] --reference has a shape and a dtype of its own; leave out -n, --hidden-size, "
                     "--vocab-size and --dtype")  # fmt: skip
        raise typer.Exit(2)
    with ending(errors, 2, failures=(*FAILURES, MemoryError)):
        from hf_cce.bench import gradcheck as bench

        place = bench.checked_device(device)
        usual = bench.REFERENCE if reference else bench.default_problem(place)
        problem = bench.Problem(
            tokens or usual.tokens, hidden_size or usual.hidden_size, vocab_size or usual.vocab_size, seed
        )
        dtypes = ("float32",) if reference else tuple(x.value for x in dtype) if dtype else bench.DTYPES
        cases = bench.CASES[:1] if reference else bench.CASES
        with console.status("") as status:
            report = bench.gradcheck(problem, place, dtypes, cases, lambda what: status.update(escape(what)), reference)
        if json_path:
            put_json(json_path, {"command": shlex.join(["hf-cce", *sys.argv[1:]]), **report.to_json()})
    _show(console, report, details)
    if json_path:
        console.print(f"Numbers: {numbers}")
    if report.failures:
        raise typer.Exit(1)


def _show(console: Console, report: Report, details: bool) -> None:
    problem = report.problem
    console.print(
        f"{escape(report.device)}: {problem.tokens:,} tokens, width {problem.hidden_size:,}, "
        f"vocabulary {problem.vocab_size:,}, seed {problem.seed}; against float64, absolute (largest) and relative (norm)"
    )
    from hf_cce.bench.gradcheck import worst

    for title, rows in report.groups():
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("case")
        for heading in ("eager\nabs", "eager\nrel", "hf_cce\nabs", "hf_cce\nrel", "allowed\nrel", ""):
            table.add_column(heading, justify="right")
        for row in rows if details else worst(rows):
            figures = (f"{x:.1e}" for x in (*row.eager, *row.hf_cce, row.allowed))
            table.add_row(row.quantity, row.case, *figures, "ok" if row.ok else "[bold red]worse[/]")
        console.print(table)
    if not details:
        console.print(
            "eager: full logits. Of each quantity the case that is closest to what is allowed; --details shows all."
        )
    for note in report.notes:
        console.print(f"Not compared: {escape(note)}")
    for row, figure in report.published():
        verdict = (
            "no worse" if float(f"{row.apart:.1e}") <= figure else "worse"
        )  # as rounded as the published figure is
        console.print(
            f"{row.quantity}, {row.implementation}: {row.apart:.1e} from full logits in float32 (published {figure:.1e}): "
            f"{verdict}"
        )
    console.print(_sentence(report.rows, report.failures))


def _sentence(rows: list[Row], failures: list[Row]) -> str:
    if not failures:
        return f"All {len(rows)} results are as close to the exact ones as plain PyTorch comes in the same dtype, plus rounding."
    row = max(failures, key=lambda row: row.share)
    computed = f"{row.implementation}{', filter ' + row.gradient_filter if row.gradient_filter else ''}"
    return (
        f"[bold red]{len(failures)} of {len(rows)} results are less exact than allowed[/]; the worst is {row.quantity} in "
        f"{row.dtype} ({row.case}; {computed}): relative error {row.hf_cce[1]:.1e}, allowed {row.allowed:.1e}."
    )
