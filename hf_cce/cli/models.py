"""``hf-cce models``: which model types of the installed Transformers train without logits, and which do not and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json


def models(
    json_path: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the supported types, one a line.")] = False,
) -> None:
    """List the model types of the installed Transformers: supported, special and refused.

    Supported: training makes no logits. Special: the loss is right, but as much memory as for logits is held all the same.
    Refused: `apply_cce` raises an error that says why.
    """
    alone, (_, errors) = str(json_path) == "-", consoles(quiet, json_path)
    names = where(json_path)
    with ending(errors, 1):
        import transformers

        from hf_cce.families import families

        known = families()
        if json_path:
            rows = ({"type": x.model_type, "class": x.cls, "status": x.status, "reason": x.reason} for x in known)
            write_json(json_path, list(rows))
    if alone:
        return
    if quiet:
        typer.echo("\n".join(family.model_type for family in known if family.status == "supported"))
        return
    console = Console(highlight=False)
    supported = [escape(family.model_type) for family in known if family.status == "supported"]
    console.print(
        f"[bold]Supported[/] by apply_cce, of transformers {transformers.__version__}: {len(supported)} model types"
    )
    console.print(Columns(supported, column_first=True, padding=(0, 2)))
    for status, meaning in (("special", "trained right, memory as before"), ("refused", "apply_cce raises an error")):
        table = Table(
            title=f"[bold]{status.capitalize()}[/]: {meaning}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("model type", no_wrap=True)
        table.add_column("reason")
        for family in known:
            if family.status == status:
                table.add_row(escape(family.model_type), escape(family.reason))
        console.print(table)
    console.print(
        "Instances of other classes with an LM head work too: apply_cce(model) looks at the model, not at this list."
    )
    if json_path:
        console.print(f"List: {names}")
