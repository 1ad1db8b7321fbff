"""The largest batch of whole training steps that fits a GPU of a given size, found by measuring, with one loss after the other.

Sizes are tried on the GPU at hand, which is to be larger than those asked for: two steps each, from an empty cache, and what
PyTorch's allocator took from the device counts. The CUDA context comes on top, so 1 GiB of each size is left for it. Both
the batch that fits and the next one, which does not, are measured; nothing is extrapolated.

usage: python -m hf_cce.bench.fits --model qwen2.5-0.5b --sequence 2048 --gib 24 48 80 --json OUT.json
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_cce.bench import machine, text
from hf_cce.bench.files import write_json
from hf_cce.bench.installed import LOSSES, install
from hf_cce.bench.job import Job, token_ids
from hf_cce.bench.shapes import SHAPES

GIB = 1 << 30
CONTEXT = 1.0  # GiB of a GPU that are not the allocator's: an H200's context and libraries took 0.6
ROWS = 32  # of text, taken again and again for larger batches
WARMUP = 6  # steps of one row before, in which kernels are compiled and the filter finds out what pays


def search(job: Job) -> dict[str, Any]:
    """Peaks in GiB by batch, and for each of ``job.gib`` the largest batch below it (0: not even one row fits)."""
    from hf_cce.bench.onestep import build, out_of_memory

    device = torch.device(job.device)
    model = build(job, torch.bfloat16)
    done = install(model, job.loss)
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), fused=True)
    rows = torch.from_numpy(token_ids(replace(job, warmup=0, steps=1, batch=ROWS)))[0].to(device)
    seen: dict[int, float | None] = {}

    def steps(batch: int, count: int) -> None:
        ids = rows[torch.arange(batch, device=device) % ROWS]
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def peak(batch: int) -> float | None:
        if batch not in seen:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            try:
                steps(batch, 2)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                seen[batch] = None
            else:
                seen[batch] = torch.cuda.max_memory_reserved(device) / GIB
        return seen[batch]

    steps(1, WARMUP)
    fits: dict[str, int] = {}
    for size in sorted(job.gib):
        fits[f"{size:g}"] = _largest(size - CONTEXT, peak, seen)
    measured = {str(batch): seen[batch] for batch in sorted(seen)}
    return {"status": "ok", "installed": done, "fits": fits, "reserved_gib_by_batch": measured}


def _largest(limit: float, peak: Any, seen: dict[int, float | None]) -> int:
    """The largest batch whose ``peak`` is at most ``limit``; that and the next are measured."""

    def below(batch: int) -> bool:
        found = peak(batch)
        return found is not None and found <= limit

    low, high = 0, None  # fits, does not
    guess = 1
    while high is None or high - low > 1:
        if below(guess):
            low = max(low, guess)
        else:
            high = guess if high is None else min(high, guess)
        known = sorted((b, p) for b, p in seen.items() if p is not None)
        if len(known) > 1:
            (a, at_a), (b, at_b) = known[0], known[-1]
            guess = int(a + (limit - at_a) * (b - a) / max(at_b - at_a, 1e-9))
        else:
            guess = 2 * guess
        guess = max(low + 1, min(guess, 2 * low + 2 if high is None else high - 1))
    return low


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
    from hf_cce.bench.steps import MAX_ENTRIES, in_own_process

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
        "command": "python -m hf_cce.bench.fits " + " ".join(arguments if arguments is not None else sys.argv[1:]),
        "device": None,
        "versions": machine.versions("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy"),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "context_gib": CONTEXT,
        "results": {},
        "missing": {},
    }
    for name in dict.fromkeys(args.losses):
        result = in_own_process(replace(job, loss=name), args.timeout)
        for key in ("device", "device_gib"):
            report[key] = result.pop(key, report.get(key))
        if result["status"] == "missing":
            report["missing"][name] = result["message"]
        else:
            report["results"][name] = result
        print(f"{name}: {result.get('fits') or result.get('message')}", file=sys.stderr, flush=True)
        report["seconds"] = time.perf_counter() - start
        if args.json:
            write_json(args.json, report)
    print(table(report), flush=True)
    return int(any(row["status"] == "failed" for row in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
