"""``hf-cce bench``: time, memory and gradient error of the loss on this machine, beside full logits."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated

import typer
from rich.markup import escape

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json


class Dtype(str, Enum):
    """Of hidden states and weight."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def bench(
    shape: Annotated[
        list[str] | None, typer.Option(help="N,D,V (tokens, width, vocabulary); can be repeated.", show_default="some")
    ] = None,
    losses: Annotated[
        str, typer.Option(help="Of hf_cce, hf_cce exact, eager (full logits), torch.compile; between commas.")
    ] = "",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed rounds.", show_default="10 on a GPU, 5 on a CPU")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of hidden states and weight.", show_default="bfloat16 on a GPU, float32 on a CPU"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu, cuda, cuda:1.", show_default="the best")] = None,
    json_path: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables, errors only.")] = False,
) -> None:
    """Measure time, memory and gradient error of the loss on random data, beside full logits, interleaved in one process.

    Random data are the worst case: the gradient filter leaves nothing out, as at the start of pretraining.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    with ending(errors, 1):
        from hf_cce.diagnostics import bench as diagnostics

        shapes = tuple(diagnostics.shape_of(word) for text in shape or () for word in text.split())
        names = tuple(word.strip() for word in losses.split(",") if word.strip())
        plan = diagnostics.planned(device, dtype and dtype.value, repeats)
        command = ["hf-cce", *sys.argv[1:]]
        with console.status("") as status:
            report = diagnostics.bench(command, shapes, names, plan, lambda what: status.update(escape(what)))
        console.print(diagnostics.markdown(report), markup=False)
        if json_path:
            write_json(json_path, report)
            console.print(f"Numbers: {numbers}")
