"""``hf-cce demo``: the same small training run without and with CCE, side by side."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-name-or-path", metavar="MODEL", help="a pretrained causal LM instead of a fresh one")
    parser.add_argument("--dataset", metavar="PATH", help="text file or folder instead of Python's own sources")
    memory = "by the size of the memory"
    sizes = {"--max-steps": "16 on a CPU, 100 on a GPU", "--batch-size": memory, "--seq-length": memory}
    add_sizes(parser, sizes | {"--vocab-size": "49,152", "--hidden-size": "576", "--layers": "2 on a CPU, 30 on a GPU"})
    parser.set_defaults(vocab_size=49_152, hidden_size=576)
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="RATE", help="of AdamW (default: 1e-3)")
    text = "of autocast (default: bfloat16 on a GPU, float16 on one without it such as a T4, else float32)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default: 0)")


def run(options: argparse.Namespace, out: Output) -> int:
    """Train the same small model twice, without and with CCE, and compare.

    By default nothing is downloaded: a model of SmolLM2's shape learns from the sources of Python's standard library, and of
    installed packages where the vocabulary needs more text, with a tokenizer trained on the spot.

    Exit code 0: both runs ended. 2: one could not run.
    """
    if options.hidden_size % 64:
        raise ValueError(f"--hidden-size must be a multiple of 64 (the width of a head), got {options.hidden_size}")
    if options.vocab_size < 257:
        raise ValueError(f"--vocab-size must be at least 257 (bytes and an end of text), got {options.vocab_size}")
    from hf_cce.diagnostics.demo import Settings, twin
    from hf_cce.diagnostics.machine import checked_device
    from hf_cce.diagnostics.shapes import config_named
    from hf_cce.diagnostics.text import prepare

    model, vocabulary = options.model_name_or_path, options.vocab_size
    if model:
        config_named(model)
    device = str(checked_device(options.device))
    corpus = prepare(vocabulary, dataset=options.dataset, model=model, say=out.progress)
    out.progress("")
    out.print(f"Text: {corpus.source}, {corpus.tokens:,} tokens; tokenizer with {corpus.entries:,} entries")
    if not model and corpus.entries < vocabulary:
        out.print(f"(too little text for more; the model still has logits for all {vocabulary:,} entries)")
    settings = Settings(
        str(corpus.tokens_file), model, vocabulary, options.hidden_size, options.layers, options.max_steps,
        options.batch_size, options.seq_length, options.learning_rate, options.seed, options.dtype, device,
    )  # fmt: skip
    report = twin(settings, corpus, partial(_follow, out))
    out.progress("")
    out.print(*_summary(report))
    out.save(report)
    return 0


def _follow(out: Output, event: dict[str, Any]) -> None:
    """Show how the two runs go on."""
    name = "with CCE" if event["cce"] else "without CCE"
    if event["event"] == "step":
        out.progress(f"{name}, step {event['step'] + 1}: loss {event['loss']:.4f}, {event['seconds']:.2f} s")
        return
    model, settings = event["common"]["model"], event["common"]["settings"]
    if not event["cce"]:
        out.print(
            f"Model: {model['name']} ({model['class']}), {model['parameters'] / 1e6:,.1f} M parameters, "
            f"{model['layers']} layers, vocabulary {model['vocabulary']:,}",
            f"Device: {event['common']['device']}, {settings['dtype']}; "
            f"{settings['batch']} × {settings['sequence']} tokens per step",
        )
    out.print(f"Training {name}, {settings['steps']} steps")


def _summary(report: dict[str, Any]) -> list[str]:
    """Return the lines that compare the runs: memory and speed, losses."""
    from hf_cce.diagnostics.demo import why_no_speed

    runs = report["plain"], report["cce"]
    rows = [("", "without CCE", "with CCE", "difference")]

    def add(name: str, a: float, b: float) -> None:
        rows.append((name, f"{a:,.0f}", f"{b:,.0f}", f"{b / a - 1:+.0%}" if a > 0 else ""))

    cpu = report["settings"]["device"] == "cpu"
    where = "process" if cpu else "device"
    peaks = [run["peak_bytes"] / 1e6 for run in runs]
    steps = [max(0.0, (run["peak_bytes"] - run["rest_bytes"]) / 1e6) for run in runs]
    add(f"peak memory of the {where} (MB)", *peaks)
    seen = min(steps) >= (0.01 * max(peaks) if cpu else 1.0)  # the memory of a process varies by about a percent
    if seen:
        add("  of which in a step (MB)", *steps)
    no_speed = why_no_speed(report)
    if no_speed is None:
        add("tokens per second", *(run["tokens_per_second"] for run in runs))
    losses = list(zip(*(run["losses"] for run in runs), strict=True))
    every = -(-len(losses) // 16)
    for step, (a, b) in enumerate(losses, 1):
        if (step - 1) % every == 0 or step == len(losses):
            rows.append((f"loss, step {step}", f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}"))
    rows.append(("largest difference of the loss", "", "", f"{report['largest_difference']:.1e}"))
    lines = ["", table(rows), ""]
    if not seen:
        more = "a larger --batch-size, --seq-length or --vocab-size shows more"
        lines.append(f"The memory of a step is hardly seen in that of the {where}; {more}.")
    if no_speed is not None:
        lines.append(f"Speed is not compared: {no_speed}.")
    shape = " × ".join(f"{n:,}" for n in report["cce"]["eval_logits_shape"])
    return [
        *lines,
        f"In evaluation mode the trained model gives {shape} logits, as before.",
        f"Both runs took {report['seconds']:.0f} s.",
    ]
