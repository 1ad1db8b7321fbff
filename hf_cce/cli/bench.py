"""``hf-cce bench``: time, memory and gradient error of the loss on this machine, beside full logits."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, command, positive, size


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, {"--tokens": "8,192", "--hidden-size": "1,024", "--vocab-size": "49,152"})
    parser.add_argument(
        "--losses", default="", help="of hf_cce, hf_cce exact, eager, torch.compile; separated by commas"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: 16-bit on a GPU (float16 on a T4), float32 elsewhere")
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help="such as 256MiB; as in CCEConfig")
    parser.add_argument("--repeats", type=positive, metavar="N", help="timed rounds (default: 10 on a GPU, else 5)")
    add_device(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write Markdown to attach to an issue")


def run(options: argparse.Namespace, out: Output) -> int:
    """Measure time, memory and gradient error of the loss on random data.

    All losses are measured in turns in one process: hf_cce with and without gradient filter, full logits ("eager"), and on a
    GPU torch.compile of these. Random data are the worst case: the gradient filter drops nothing, as at the start of
    pretraining. Without --tokens, --hidden-size and --vocab-size, shapes that suit the device.

    Exit code 0: measured. 1: one of the losses failed. 2: could not run.
    """
    from hf_cce.diagnostics import bench
    from hf_cce.diagnostics.files import whole_file
    from hf_cce.diagnostics.machine import checked_device, default_dtype

    given = (options.tokens, options.hidden_size, options.vocab_size)
    shapes = ((given[0] or 8192, given[1] or 1024, given[2] or 49_152),) if any(given) else ()
    device = checked_device(options.device)
    names = [word.strip() for word in options.losses.split(",") if word.strip()]
    losses = bench.chosen_losses(names, device, options.memory_budget)
    dtype = bench.DTYPES[options.dtype] if options.dtype else default_dtype(device)
    repeats = options.repeats or (10 if device.type == "cuda" else 5)
    report = bench.bench(shapes, losses, device, dtype, repeats, out.progress) | {"command": command()}
    out.progress("")
    out.print(bench.markdown(report))
    if options.report:
        with whole_file(options.report) as temporary:
            temporary.write_text(bench.issue_report(report), "utf-8")
        out.print(f"Report: {options.report}")
    out.save(report)
    failed = any("failed" in row for result in report["results"].values() for row in result["rows"].values())
    return int(failed)
