"""``hf-cce demo``: the same small training run without and with CCE, side by side."""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hf_cce.cli.common import JsonPath, consoles, ending, where
from hf_cce.diagnostics.files import write_json


class Precision(str, Enum):
    """What the matrix products compute in; the weights stay float32, as under Trainer's ``bf16=True``."""

    float32 = "float32"
    bfloat16 = "bfloat16"


BY_MEMORY = "by the size of the memory"


def demo(
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model.", show_default="2 on a CPU, 30 on a GPU")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="16 on a CPU, 100 on a GPU")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.", show_default=BY_MEMORY)] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.", show_default=BY_MEMORY)] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate (AdamW).")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of both runs.")] = 0,
    dtype: Annotated[
        Precision | None, typer.Option(help="Autocast dtype.", show_default="float32; bfloat16 on an NVIDIA GPU")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu, cuda, cuda:1, mps.", show_default="the best there is")
    ] = None,
    vocab: Annotated[int, typer.Option(min=257, help="Vocabulary of the model.")] = 49_152,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = 576,
    model: Annotated[
        str | None, typer.Option(help="A pretrained causal LM instead: a name on the hub or a folder.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Text file or folder instead of Python's own sources."),
    ] = None,
    json_path: JsonPath = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw losses and memory here (.png, .svg, .pdf).", dir_okay=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table, errors only.")] = False,
) -> None:
    """Train the same model twice from one seed, without and with CCE, and compare.

    By default nothing is downloaded: a model of SmolLM2's shape learns from the sources of Python's standard library,
    and of installed packages where the vocabulary needs more text, with a tokenizer trained on the spot.
    """
    console, errors = consoles(quiet, json_path)
    numbers, picture = where(json_path), where(plot_path)
    with ending(errors, 1, usage=2):  # 2 as typer: an argument is wrong
        if hidden % 64:
            raise ValueError(f"--hidden must be a multiple of 64 (the width of an attention head), got {hidden}")
        if plot_path:
            from hf_cce.diagnostics.plots import draw_demo, require_matplotlib

            require_matplotlib(plot_path)
        if model:
            from hf_cce.diagnostics.hub import config_named

            config_named(model, "leave --model out")
        if device and device != "cpu":
            from hf_cce.diagnostics.machine import checked_device

            checked_device(device)
        options: dict[str, Any] = {
            "model": model, "vocabulary": vocab, "hidden": hidden, "layers": layers, "steps": steps, "batch": batch,
            "sequence": seq, "learning_rate": lr, "seed": seed, "dtype": dtype and dtype.value, "device": device,
        }  # fmt: skip
        report = _run(console, options, dataset)
        report["command"] = shlex.join(["hf-cce", *sys.argv[1:]])
        _show(console, report)
        if json_path:
            write_json(json_path, report)
            console.print(f"Numbers: {numbers}")
        if plot_path:
            draw_demo(report, plot_path)
            console.print(f"Picture: {picture}")


def _run(console: Console, options: dict[str, Any], dataset: str | None) -> dict[str, Any]:
    from hf_cce.diagnostics.demo import Settings, twin
    from hf_cce.diagnostics.text import prepare

    with console.status("reading text") as status:
        corpus = prepare(
            options["vocabulary"], dataset=dataset, model=options["model"], say=lambda message: status.update(message)
        )
    console.print(
        f"Text: {escape(corpus.source)}, {corpus.tokens:,} tokens; "
        f"byte-level BPE tokenizer with {corpus.entries:,} entries"
        f"{_too_little_text(corpus.entries, options)}"
    )
    settings = Settings(str(corpus.tokens_file), str(corpus.tokenizer_file), **options)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        tasks = {
            cce: progress.add_task(f"{name} CCE", total=None, start=False, loss="")
            for cce, name in ((False, "without"), (True, "with   "))
        }

        def follow(event: dict[str, Any]) -> None:
            task = tasks[event["cce"]]
            if event["event"] == "start":
                if not event["cce"]:
                    progress.print(_headline(event["common"]))
                progress.start_task(task)
                progress.update(task, total=event["steps"])
            else:
                progress.update(task, advance=1, loss=f"loss {event['loss']:.4f}")

        return twin(settings, corpus, follow)


def _too_little_text(entries: int, options: dict[str, Any]) -> str:
    """Why the tokenizer has fewer entries than the vocabulary that was asked for; nothing where it has not."""
    vocabulary = options["vocabulary"]
    if options["model"] or entries >= vocabulary:  # a model brings its own tokenizer
        return ""
    return (
        f".\nThe text has too little in it for more entries: the other {vocabulary - entries:,} of the vocabulary of "
        f"{vocabulary:,} never occur in it,\nbut the model has logits for all of them"
    )


def _headline(common: dict[str, Any]) -> str:
    model, settings = common["model"], common["settings"]
    return (
        f"Model: {escape(model['name'])} ({model['class']}), {model['parameters'] / 1e6:,.1f} M parameters, "
        f"{model['layers']} layer{'s' * (model['layers'] > 1)}, vocabulary {model['vocabulary']:,}\n"
        f"Device: {escape(common['device'])}, {settings['dtype']}; "
        f"{settings['batch']} × {settings['sequence']} tokens a step"
    )


def _show(console: Console, report: dict[str, Any]) -> None:
    from hf_cce.diagnostics.demo import why_no_speed

    plain, cce = report["plain"], report["cce"]
    table = Table(title="The same training run, without and with CCE", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("without CCE", "with CCE", "difference"):
        table.add_column(column, justify="right")
    rows = list(zip(plain["losses"], cce["losses"], strict=True))
    every = -(-len(rows) // 16)
    for step, (a, b) in enumerate(rows, 1):
        if (step - 1) % every == 0 or step == len(rows):
            table.add_row(f"loss, step {step}", f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}")
    table.add_section()
    table.add_row("largest difference of the loss", "", "", f"{report['largest_difference']:.1e}")
    table.add_section()

    def figures(name: str, a: float, b: float, least: float = 0.0) -> None:
        values = (f"{x:,.0f}" if x >= least else f"< {least:,.0f}" for x in (a, b))
        table.add_row(name, *values, f"{b / a - 1:+.0%}" if min(a, b) >= least and a > 0 else "")

    cpu = report["settings"]["device"] == "cpu"
    what = "process" if cpu else "device"
    peaks = [run["peak_bytes"] / 1e6 for run in (plain, cce)]
    steps = [max(0.0, peak - run["rest_bytes"] / 1e6) for peak, run in zip(peaks, (plain, cce), strict=True)]
    # A process comes and goes by about a percent of itself; an allocator counts each byte.
    least = 0.01 * max(peaks) if cpu else 1.0
    figures(f"peak memory of the {what} (MB)", *peaks)
    if max(steps) >= least:
        figures("  of which in a step (MB)", steps[0], steps[1], least)
    no_speed = why_no_speed(report)
    if no_speed is None:
        figures("tokens per second", plain["tokens_per_second"], cce["tokens_per_second"])
    console.print(table)
    if every > 1:
        console.print(f"(one step in {every}, and the last; --json writes them all)")
    if max(steps) < least:
        console.print(
            f"What a step holds is too little to be seen in the memory of the {what}; a larger --batch, --seq or --vocab "
            "shows it."
        )
    if no_speed is not None:
        console.print(f"Speed is not compared: {no_speed}.")
    shape, settings = " × ".join(f"{n:,}" for n in cce["eval_logits_shape"]), report["settings"]
    console.print(f"Logits are still there: in evaluation mode the trained model gives {shape} of them.")
    if settings["model"]:
        console.print("It generates")
    else:
        seen = settings["steps"] * settings["batch"] * settings["sequence"]
        console.print(
            f"generate runs as before; after {seen:,} tokens of training from nothing it cannot make sense yet, and writes"
        )
    console.print(f"  {escape(report['prompt'])}[bold]{escape(cce['generated'])}[/]".replace("\n", "\n  "))
    same = plain["generated_ids"] == cce["generated_ids"]
    console.print(f"({'the same' if same else 'not the same'} tokens as the model trained without CCE writes)")
    console.print(f"Both runs took {report['seconds']:.0f} s.")
