"""``hf-cce bench``: time, memory and error of the loss and of its peers, on flat and on trained heads."""

from __future__ import annotations

import os
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hf_cce.bench.files import put_json, whole_file
from hf_cce.cli.common import can_write, consoles, ending, where


class Dtype(str, Enum):
    """Of hidden states and weight."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


SMALL = "a few of each that suit the device"


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="N,D,V of a flat head; repeat it, or list several between spaces.", show_default=SMALL),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="NAME:TOKENS of a trained head (V49152, V128256, V512); likewise.", show_default=SMALL),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Losses to measure, repeated or between commas.", show_default="all on a GPU, 3 on a CPU"),
    ] = None,
    modes: Annotated[str, typer.Option(help="Among both, forward, frozen; between commas.")] = "both,forward,frozen",
    sweep: Annotated[
        str | None, typer.Option(help="Gradient filters to run hf_cce with on every head, such as 1e-3,3e-3,1e-2.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed rounds.", show_default="10 on a GPU, 5 on a CPU")
    ] = None,
    head_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Training time of a head.", show_default="60 on a GPU, 3 on a CPU")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Text for the heads instead of Python's own sources: a file or a folder.")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of hidden states and weight.", show_default="bfloat16 on a GPU, float32 on a CPU"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu, cuda, cuda:1.", show_default="the best")] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all the numbers here, anew after each head; - is standard output, alone, at the end.",
            dir_okay=False,
        ),
    ] = None,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here too.", dir_okay=False)
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw time, memory and error here (.png, .svg, .pdf).", dir_okay=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables, errors only.")] = False,
) -> None:
    """Measure the loss against its peers: time, memory and error, interleaved in one process.

    Flat heads are random numbers, as at the start of pretraining. Trained ones come from a small model that learns local
    text on the spot, once; they are kept in the user's cache folder. Nothing is downloaded.
    """
    console, errors = consoles(quiet, json_path)
    numbers, tables, picture = where(json_path), where(markdown_path), where(plot_path)
    with ending(errors, 1, interrupted="--json holds the heads that were done, if any."):
        # Before torch is loaded: who mistyped an option should not wait.
        can_write(json_path, markdown_path, plot_path)
        if plot_path:
            from hf_cce.bench.plots import require_matplotlib

            require_matplotlib(plot_path)
        thresholds = _numbers(sweep)
        from hf_cce.bench.grid import Settings, head_of, shape_of

        settings = Settings(
            shapes=tuple(map(shape_of, _words(shape, None))) if shape else None,
            heads=tuple(map(head_of, _words(head, None))) if head else None,
            peers=tuple(_words(peers, ",")) or None,
            modes=tuple(_words([modes], ",")),
            sweep=thresholds,
            repeats=repeats,
            head_seconds=head_seconds,
            dtype=dtype and dtype.value,
            device=device,
            dataset=dataset,
        )
        report = _run(console, settings, json_path)
        from hf_cce.bench.tables import markdown

        text = markdown(report)
        console.print(text, markup=False)
        if report["settings"]["device"] == "cpu" and (busy := _busy(report, os.cpu_count() or 1)):
            console.print(busy)
        if json_path:
            put_json(json_path, report)
            console.print(f"Numbers: {numbers}")
        if markdown_path:
            with whole_file(markdown_path) as temporary:
                temporary.write_text(text, "utf-8")
            console.print(f"Tables: {tables}")
        if plot_path:
            from hf_cce.bench.bench_plots import draw_bench

            draw_bench(report, plot_path)
            console.print(f"Picture: {picture}")


def _busy(report: dict[str, Any], cores: int) -> str | None:
    """What is said where other programs used so much of the processor that times say little."""
    used = report["cpu_used_by_others_before"]
    # Where only the load average is known, what has ended counts too: it has to be more.
    load, limit = (report["load_average_before"], cores / 2) if used is None else (used * cores, cores / 4)
    if load <= limit:
        return None
    return f"The machine was busy when it began (load {load:.1f}, {cores} cores): times say little."


def _words(given: list[str] | None, separator: str | None) -> list[str]:
    return [word.strip() for text in given or () for word in text.split(separator) if word.strip()]


def _numbers(given: str | None) -> tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in (given or "").split(",") if word.strip())
    except ValueError:
        raise ValueError(f"--sweep {given!r}: expected numbers between commas, such as 1e-3,3e-3") from None
    if any(not 0 < x <= 0.1 for x in numbers):  # as CCEConfig has it, which torch is not yet loaded for
        raise ValueError(f"--sweep {given!r}: each gradient filter lies above 0, and 0.1 is the most")
    return numbers


def _run(console: Console, settings: Any, json_path: Path | None) -> dict[str, Any]:
    from hf_cce.bench.grid import run

    done, total = 0, 0
    with console.status("starting") as status:

        def follow(event: dict[str, Any]) -> None:
            nonlocal done, total
            if event["event"] == "say":
                where = f"{min(done + 1, total)}/{total} " if total else ""
                status.update(escape(where + event["text"]))
                return
            event["report"]["command"] = shlex.join(["hf-cce", *sys.argv[1:]])
            if event["event"] == "start":
                total = event["problems"]
                for name, why in event["report"]["missing"].items():
                    console.print(f"[dim]left out: {escape(name)}: {escape(why)}[/]")
                for name, about in event["report"]["heads"].items():
                    how = "from the cache" if about["from_cache"] else f"trained, {about['steps']:,} steps"
                    console.print(f"head {name}: {how}, held-out loss {about['held_out_loss']:.2f}")
                return
            done += 1
            console.print(f"measured {done} of {total}: {escape(event['title'])}")
            if json_path and str(json_path) != "-":
                put_json(json_path, event["report"])

        return run(settings, follow)
