"""The command ``hf-cce``: puts the sub-commands together. Loads neither torch nor Transformers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import hf_cce
from hf_cce.cli.bench import bench
from hf_cce.cli.check import check
from hf_cce.cli.demo import demo
from hf_cce.cli.doctor import doctor
from hf_cce.cli.estimate import estimate
from hf_cce.cli.gradcheck import gradcheck
from hf_cce.cli.models import models

app = typer.Typer(
    name="hf-cce",
    help="Train Hugging Face language models without ever materialising logits.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(bench)
app.command()(gradcheck)
app.command()(models)
app.command()(check)
app.command()(doctor)
app.command()(estimate)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-cce {hf_cce.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train Hugging Face language models without ever materialising logits."""


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" instead of failing
    app(prog_name="hf-cce")
