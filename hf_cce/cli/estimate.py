"""``hf-cce estimate``: what a training step will hold in GPU memory, without and with CCE, from the configuration alone."""

from __future__ import annotations

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
    from hf_cce.diagnostics.estimate import Estimate

WAYS = {"eager": "full logits", "compiled": "torch.compile\nof the loss", "cce": "with CCE"}
ROWS = {"weights and optimizer": "weights, optimizer", "backward": "gradients"}
CHECKPOINTED = {**ROWS, "backward": "gradients, a layer once more"}


class DType(str, Enum):
    """Of weights, activations, gradients and optimizer; mixed: float32 weights under bfloat16 autocast."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    mixed = "mixed"


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with a config.json, that file, a name on the hub, or qwen2.5-0.5b, smollm2-135m, "
            "llama-3.2-1b; or a model type such as llama for its class's default sizes.",
            metavar="MODEL_OR_CONFIG",
            show_default=False,
        ),
    ],
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Rows a step.")] = 1,
    seq: Annotated[int, typer.Option("--seq", "-s", min=2, help="Tokens a row.")] = 2048,
    dtype: Annotated[
        DType, typer.Option(help="Of everything; mixed is float32 weights under bfloat16 autocast (Trainer's bf16).")
    ] = DType.bfloat16,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of the GPU.", show_default="this machine's GPU, or 24")
    ] = None,
    memory_budget: Annotated[
        int | None, typer.Option(min=1, help="MiB, as CCEConfig's.", show_default="256 for each 8,192 tokens")
    ] = None,
    json_path: JsonPath = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the sentence that says what CCE brings.")] = False,
) -> None:
    """Estimate the memory of a training step without and with CCE, and the largest batch that fits, from the configuration alone.

    No weights are loaded. Counted is one process with AdamW that trains all weights, without gradient accumulation. The
    largest batch leaves room for what PyTorch's allocator takes beyond the peak, and for CUDA's own memory.
    """
    console, errors = consoles(quiet, json_path)
    numbers = where(json_path)
    with ending(errors, 1, usage=2):  # 2 as typer: an argument is wrong
        with console.status("running the model's code on tensors without data"):
            from hf_cce.diagnostics import estimate as diagnostics

            size = diagnostics.this_gpu() or 24.0 if gpu_memory is None else gpu_memory
            budget = None if memory_budget is None else memory_budget << 20
            found = diagnostics.estimate(model, batch, seq, dtype.value, size, budget)
        if json_path:
            write_json(json_path, found.to_json())
    _show(console, found)
    if str(json_path) != "-":
        typer.echo(diagnostics.verdict(found))
    if json_path:
        console.print(f"Numbers: {numbers}")


def _show(console: Console, found: Estimate) -> None:
    model = found.model
    console.print(
        f"{escape(model.name)}: {model.architecture}, {model.parameters / 1e6:,.0f} million parameters, vocabulary "
        f"{model.vocabulary:,}, width {model.hidden:,}, {model.layers} layers; {found.dtype}\n"
        f"{found.batch} × {found.sequence:,} tokens make {found.logits / 1e6:,.0f} million logits. In GiB"
        f"{', what is held at the peak' if found.plain else ''}:"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in WAYS.values():
        table.add_column(heading, justify="right")
    if not found.plain:
        table.add_row("weights, optimizer", *[_gib(found.weights + found.optimizer)] * 3)
        table.add_row("gradients, when all are there", *[_gib(found.gradients)] * 3)
        table.add_row("logits and loss", *(_gib(found.loss[way]) for way in WAYS))
    for title, names, steps in (
        ("", ROWS, found.plain),
        ("[bold]with gradient checkpointing[/]", CHECKPOINTED, found.checkpointing),
    ):
        if not steps:
            continue
        if title:
            table.add_section()
            table.add_row(title)
        for part in steps["cce"].at_peak:
            sizes = (steps[way].at_peak[part] for way in WAYS)
            table.add_row(names.get(part, part), *(_gib(size) if size else "–" for size in sizes))
        table.add_row("[bold]peak[/]", *(f"[bold]{_gib(steps[way].peak)}[/]" for way in WAYS))
        rows = (f"{steps[way].largest_batch:,}" if steps[way].largest_batch else "none" for way in WAYS)
        table.add_row(f"largest batch in {found.gpu_memory / 2**30:.4g} GiB", *rows)
    console.print(table)
    if found.plain:
        from hf_cce.diagnostics.estimate import reserve

        console.print(reserve())
    if any(not all(step.at_peak.values()) for step in (*found.plain.values(), *found.checkpointing.values())):
        console.print("–: nothing of it is held at that moment, which with CCE is often after the loss.")
    if found.unknown:
        console.print(f"Activations, peak and largest batch are not known: {escape(found.unknown)}.")
    for note in found.notes:
        console.print(f"Note: {escape(note)}.")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
