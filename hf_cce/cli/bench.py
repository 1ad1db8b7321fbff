"""``hf-cce bench``: measure time and memory of the loss on this machine, compared with full logits."""

from __future__ import annotations

import argparse

from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, size


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, {"--tokens": "8,192", "--hidden-size": "1,024", "--vocab-size": "49,152"})
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU (float16 on a T4), else float32")
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help="as in CCEConfig, such as 256MiB")
    add_device(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Measure time and memory of the loss on random data.

    All losses take turns in one process: hf_cce with and without the gradient filter, full logits and, on a GPU, torch.compile
    of full logits. Random data are the worst case: the gradient filter drops nothing, as at the start of pretraining.
    Without --tokens, --hidden-size and --vocab-size, shapes that suit the device are measured.

    Exit codes: 0 if everything was measured, 1 if one of the losses failed, 2 if the benchmark could not run.
    """
    import torch

    from hf_cce.diagnostics import bench
    from hf_cce.diagnostics.machine import checked_device, default_dtype

    given = (options.tokens, options.hidden_size, options.vocab_size)
    shapes = ((given[0] or 8192, given[1] or 1024, given[2] or 49_152),) if any(given) else ()
    device = checked_device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else default_dtype(device)
    report = bench.bench(shapes, device, dtype, options.memory_budget, out.progress)
    out.progress("")
    out.print(bench.markdown(report))
    out.save(report)
    failed = any("failed" in row for result in report["results"].values() for row in result["rows"].values())
    return int(failed)
