"""Find, by measuring, the largest batch whose training steps fit a GPU of a given size, for each loss.

Batches run on the available GPU, which is larger than the requested sizes: two steps each, from an empty cache. The memory that
PyTorch's allocator reserved counts, and 1 GiB is left for the CUDA context. Nothing is extrapolated.

usage: python -m benchmarks.fits --model qwen2.5-0.5b --sequence 2048 --gib 24 48 80 --json OUT.json
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import tables
from benchmarks.files import write_json
from benchmarks.installed import LOSSES
from benchmarks.largest import CONTEXT
from benchmarks.steps import header, job_of, run_and_store
from hf_cce.diagnostics.shapes import SHAPES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a row")
    parser.add_argument("--gib", type=float, nargs="+", default=[24.0, 48.0, 80.0], help="sizes of GPUs")
    parser.add_argument("--losses", nargs="+", default=["hf_cce", "compiled", "liger", "eager"], choices=LOSSES)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--json", type=Path, help="written anew after each loss")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one loss may take")
    args = parser.parse_args(arguments)
    if torch.device(args.device).type != "cuda":
        parser.error(f"--device {args.device}: memory is measured on a CUDA device only")
    start = time.perf_counter()
    report = {**header("benchmarks.fits", arguments, args), "context_gib": CONTEXT}
    job = job_of(args, report, batch=1, steps=1, warmup=0, gib=tuple(args.gib))
    for name in dict.fromkeys(args.losses):
        run_and_store(report, replace(job, loss=name), args.timeout)
        report["seconds"] = time.perf_counter() - start
        if args.json:
            write_json(args.json, report)
    print("\n".join(tables.largest_batch_rows(report)), flush=True)
    return int(any(row["status"] == "failed" for row in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
