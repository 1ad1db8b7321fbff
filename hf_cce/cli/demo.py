"""``hf-cce demo``: run the same small training without and with CCE, side by side."""

from __future__ import annotations

import argparse
from typing import Any

from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, table


def add_options(parser: argparse.ArgumentParser) -> None:
    memory = "depends on the memory"
    sizes = {"--max-steps": "16 on a CPU, 100 on a GPU", "--batch-size": memory, "--seq-length": memory}
    add_sizes(parser, sizes | {"--vocab-size": "49,152", "--hidden-size": "576", "--layers": "2 on a CPU, 30 on a GPU"})
    parser.set_defaults(vocab_size=49_152, hidden_size=576)
    text = "dtype of autocast (default: bfloat16 on a GPU, float16 on one without it such as a T4, else float32)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    add_device(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Train the same small model twice, without and with hf_cce, and compare.

    Nothing is downloaded: a new model of SmolLM2's shape is trained on the source code of Python's standard library, with a
    tokenizer trained on the same text.

    Exit codes: 0 if both runs finished, 2 if one could not run.
    """
    if options.hidden_size % 64:
        raise ValueError(f"--hidden-size must be a multiple of 64 (the width of a head), got {options.hidden_size}")
    if options.vocab_size < 256:
        raise ValueError(f"--vocab-size must be at least 256 (one entry for each byte), got {options.vocab_size}")
    from hf_cce.diagnostics import demo
    from hf_cce.diagnostics.machine import checked_device

    settings = demo.Settings(
        str(checked_device(options.device)), options.vocab_size, options.hidden_size, options.layers, options.max_steps,
        options.batch_size, options.seq_length, options.dtype,
    )  # fmt: skip
    report = demo.train_both(settings, out.progress)
    out.print(*_summary(report))
    out.save(report)
    return 0


def _summary(report: dict[str, Any]) -> list[str]:
    settings, data, runs = report["settings"], report["data"], (report["plain"], report["cce"])
    rows = [("", "without hf_cce", "with hf_cce", "difference")]

    def add(name: str, digits: int, a: float, b: float) -> None:
        rows.append((name, f"{a:,.{digits}f}", f"{b:,.{digits}f}", f"{b / a - 1:+.0%}" if a > 0 else ""))

    step_bytes = [run["step_bytes"] for run in runs]
    if None not in step_bytes:
        add("memory added by a step (MB)", 0, *(size / 1e6 for size in step_bytes))
    add("median time per step (s)", 3, *(run["median_seconds"] for run in runs))
    losses = list(zip(*(run["losses"] for run in runs), strict=True))
    every = -(-len(losses) // 16)
    for step, (a, b) in enumerate(losses, 1):
        if (step - 1) % every == 0 or step == len(losses):
            rows.append((f"loss, step {step}", f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}"))
    rows.append(("largest difference of the loss", "", "", f"{report['largest_difference']:.1e}"))
    shape = " × ".join(f"{n:,}" for n in report["cce"]["eval_logits_shape"])
    unknown = ["The memory of a step cannot be measured on this system.", ""] if None in step_bytes else []
    return [
        f"Model: a Llama of SmolLM2's shape, {report['parameters'] / 1e6:,.1f} M parameters, {settings['layers']} layers, "
        f"vocabulary {settings['vocabulary']:,}",
        f"Text: Python source code, {data['tokens']:,} tokens, {data['tokenizer_entries']:,} tokenizer entries; "
        f"{settings['batch']} × {settings['sequence']} tokens per step",
        f"Device: {report['device']}, {settings['dtype']}",
        "",
        table(rows),
        "",
        *unknown,
        f"In evaluation mode, the trained model returns {shape} logits, as before.",
        f"Both runs took {report['seconds']:.0f} s.",
    ]
