"""The largest batch of whole training steps that fits a GPU of a given size, found by measuring, with one loss after the other.

Sizes are tried on the GPU at hand, which is to be larger than those asked for: two steps each, from an empty cache, and what
PyTorch's allocator took from the device counts. The CUDA context comes on top, so 1 GiB of each size is left for it. Both
the batch that fits and the next one, which does not, are measured; nothing is extrapolated.

usage: python -m hf_cce.bench.fits --model qwen2.5-0.5b --sequence 2048 --gib 24 48 80 --json OUT.json
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_cce.bench import machine, text
from hf_cce.bench.files import write_json
from hf_cce.bench.installed import LOSSES
from hf_cce.bench.job import Job
from hf_cce.bench.largest import CONTEXT
from hf_cce.bench.shapes import SHAPES
from hf_cce.bench.steps import MAX_ENTRIES, filed


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    sizes = [f"{size:g}" for size in sorted(report["settings"]["gib"])]
    lines = [
        f"### {report['settings']['model']}, rows of {report['settings']['sequence']} tokens: largest batch",
        "",
        "| loss | " + " | ".join(f"{size} GiB" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for name, row in report["results"].items():
        found = [str(row["fits"][size]) if row["status"] == "ok" else row["status"] for size in sizes]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join([*lines, *(f"\n{name} is missing: {reason}" for name, reason in report["missing"].items())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a row")
    parser.add_argument("--gib", type=float, nargs="+", default=[24.0, 48.0, 80.0], help="sizes of GPUs")
    parser.add_argument("--losses", nargs="+", default=["hf_cce", "compiled", "liger", "eager"], choices=LOSSES)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write everything measured; written anew after each loss")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one loss may take")
    args = parser.parse_args(arguments)
    if torch.device(args.device).type != "cuda":
        parser.error(f"--device {args.device}: memory is measured on a CUDA device only")
    start = time.perf_counter()
    corpus = text.prepare(
        min(SHAPES[args.model].vocabulary, MAX_ENTRIES), say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    job = Job(
        loss="eager", model=args.model, batch=1, sequence=args.sequence, steps=1, warmup=0, device=args.device,
        tokens_file=str(corpus.tokens_file), entries=corpus.entries, gib=tuple(args.gib),
        gradient_checkpointing=args.gradient_checkpointing,
    )  # fmt: skip
    report: dict[str, Any] = {
        "command": machine.command("hf_cce.bench.fits", arguments),
        "device": None,
        "versions": machine.versions("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy"),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "context_gib": CONTEXT,
        "results": {},
        "missing": {},
    }
    for name in dict.fromkeys(args.losses):
        result = filed(report, replace(job, loss=name), args.timeout)
        print(f"{name}: {result.get('fits') or result.get('message')}", file=sys.stderr, flush=True)
        report["seconds"] = time.perf_counter() - start
        if args.json:
            write_json(args.json, report)
    print(table(report), flush=True)
    return int(any(row["status"] == "failed" for row in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
