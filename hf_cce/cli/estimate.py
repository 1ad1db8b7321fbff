"""``hf-cce estimate``: estimate the GPU memory of a training step, without and with CCE, from the configuration alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from hf_cce.cli.common import DTYPES, Output, add_sizes, positive, size, table

if TYPE_CHECKING:
    from hf_cce.diagnostics.estimate import Estimate

GIB = 1 << 30


def gpu_size(text: str) -> int:
    """Return the bytes of "24GiB"; a plain number is GiB."""
    found = size(f"{text}GiB" if text.replace(".", "").isdecimal() else text)
    if found < GIB:  # MiB written by mistake
        raise argparse.ArgumentTypeError(f"expected a size such as 24GiB, got {text!r}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name_or_path",
        metavar="MODEL",
        help="a folder or config.json, a name on the Hub, a type such as llama, or qwen2.5-0.5b, smollm2-135m, llama-3.2-1b",
    )
    add_sizes(parser, {"--batch-size": "1", "--seq-length": "2,048"})
    parser.set_defaults(batch_size=1, seq_length=2048)
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument("--lora", action="store_true", help="train LoRA adapters instead of all weights")
    adapters.add_argument("--qlora", action="store_true", help="train LoRA adapters on weights quantised to 4 bits")
    text = "rank of the adapters (default: 16)"
    parser.add_argument("--lora-rank", type=positive, default=16, metavar="N", help=text)
    text = "dtype of training; mixed is float32 weights under bfloat16 autocast, as with Trainer's bf16=True (default: bfloat16)"
    parser.add_argument("--dtype", choices=(*DTYPES, "mixed"), default="bfloat16", help=text)
    text = "memory of the GPU, such as 24GiB (default: of this machine's GPU, or 24GiB)"
    parser.add_argument("--gpu-memory", type=gpu_size, metavar="SIZE", help=text)
    text = 'memory_budget of CCEConfig, such as 256MiB (default: as with "auto")'
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help=text)


def run(options: argparse.Namespace, out: Output) -> int:
    """Estimate the memory of a training step, and whether it fits.

    No weights are loaded, and no GPU is needed. The estimate is for one process with AdamW and without gradient accumulation. A
    step fits if the GPU also has room for the overhead of PyTorch's allocator and of CUDA.

    Exit codes: 0 if the memory was estimated, 2 if it could not be estimated.
    """
    import torch

    from hf_cce.diagnostics import estimate

    memory = options.gpu_memory
    if memory is None:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 24 * GIB
    out.progress("running the model on tensors without data")
    found = estimate.estimate(
        options.model_name_or_path,
        options.batch_size,
        options.seq_length,
        options.dtype,
        memory,
        options.memory_budget,
        lora=estimate.LoRA(options.lora_rank, options.qlora) if options.lora or options.qlora else None,
    )
    model = found.model
    out.print(
        estimate.verdict(found),
        "",
        f"{model.name}: {model.architecture}, {model.parameters / 1e6:,.0f} million parameters, vocabulary "
        f"{model.vocabulary:,}, hidden size {model.hidden:,}, {model.layers} layers; {found.dtype}",
        f"{found.batch} × {found.sequence:,} tokens make {found.logits / 1e6:,.0f} million logits. In GiB:\n",
        _table(found),
        "",
        *(f"Note: {note}." for note in found.notes),
    )
    out.save({**asdict(found), "verdict": estimate.verdict(found)})
    return 0


def _table(found: Estimate) -> str:
    steps = sorted(found.steps.items(), key=lambda item: item[0].endswith("checkpointing"))
    rows = [("", *(variant.replace("full", "full logits").replace("cce", "with hf_cce") for variant, _ in steps))]

    def add(title: str, sizes: list[int | None]) -> None:
        rows.append((title, *("unknown" if size is None else f"{size / GIB:,.2f}" for size in sizes)))

    held = {"weights": found.model.weights, "optimizer": found.optimizer, "gradients": found.model.gradients}
    for title, constant in held.items():
        add(title, [constant] * len(steps))
    add("activations", [step.activations for _, step in steps])
    add("logits and loss", [step.loss for _, step in steps])
    add("peak", [step.peak for _, step in steps])
    if found.steps["full"].peak is not None:
        rows.append((f"fits in {found.gpu_memory / GIB:.4g} GiB", *("yes" if step.fits else "no" for _, step in steps)))
    return table(rows)
