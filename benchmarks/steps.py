"""Measure whole training steps (forward, backward, fused AdamW) of a causal LM of realistic size with each loss.

Weights and optimizer state are bfloat16. Weights are random, or first trained for --pretrain-steps on the same text; the tokens
are real text. Each loss runs in a process of its own, so that memory peaks and compile caches do not mix.

usage: python -m benchmarks.steps --model qwen2.5-0.5b --batch 4 --sequence 8192 [--memory-limit 31] --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables, text
from benchmarks.files import write_json
from benchmarks.installed import LOSSES
from benchmarks.job import Job
from benchmarks.origin import origin
from benchmarks.trainers import LOOPS
from hf_cce.diagnostics.shapes import SHAPES

MAX_ENTRIES = 49_152  # the local text is too short for a larger tokenizer
PACKAGES = ("transformers", "accelerate", "trl", "liger-kernel", "cut-cross-entropy")
NOTES = {
    "weights": "bfloat16, random: initialised by the seed, the same for every loss; no model was downloaded",
    "trained": "bfloat16, random at first, then trained on this text for pretrain_steps steps (fp32 weights, bf16 autocast, "
    "full logits); the same for every loss",
    "recipe": "random, saved in bfloat16, loaded by recipes/sft.py as its flags say; it tokenizes the text again, so that "
    "rows may be a few tokens shorter",
    "optimizer": "torch.optim.AdamW(fused=True), its state in bfloat16; fresh at the first warm-up step",
    "time": "CUDA events around each part of each step, the host not waiting; on a CPU wall time. Medians of the timed steps",
    "memory": "peak_gib: most allocated in the timed steps; reserved_gib: most that PyTorch's allocator held; on a CPU "
    "peak_gib is the whole process since it began",
}


def in_own_process(job: Job, timeout: float) -> dict[str, Any]:
    """Run ``benchmarks.onestep.run`` in a fresh process; return status "failed" if it dies or takes over ``timeout`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        given, written, errors = (Path(folder) / name for name in ("job.json", "result.json", "errors.txt"))
        given.write_text(json.dumps(asdict(job)), "utf-8")
        command = [sys.executable, "-m", "benchmarks.onestep", str(given), str(written)]
        root = str(Path(__file__).resolve().parents[1])  # the child may start in another folder
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        try:
            with errors.open("w") as stream:
                code = subprocess.run(
                    command, stdout=stream, stderr=stream, timeout=timeout, env={**os.environ, "PYTHONPATH": path}, check=False
                ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": "failed", "message": f"took more than {timeout:.0f} s (--timeout)"}
        output = errors.read_text("utf-8", "replace")
        if code or not written.exists():
            return {"status": "failed", "message": f"its process ended with exit code {code}", "output": output[-3000:]}
        result = json.loads(written.read_text("utf-8"))
        return {**result, "output": output[-3000:]} if result["status"] == "failed" else result


def pretrained(job: Job, timeout: float) -> dict[str, Any]:
    """Train the initial weights into ``job.state_file``, or reuse those that an earlier run of the same job wrote there."""
    assert job.state_file
    about = Path(f"{job.state_file}.json")
    # The text's location differs between runs.
    fixed_fields = {key: value for key, value in asdict(job).items() if not key.endswith("_file")}
    if Path(job.state_file).exists() and about.exists():
        earlier = json.loads(about.read_text("utf-8"))
        if earlier["job"] != json.loads(json.dumps(fixed_fields)):
            return {"status": "failed", "message": f"{job.state_file} holds other weights: {earlier['job']}"}
        return {**earlier["result"], "kept": True}
    result = in_own_process(job, timeout)
    if result["status"] == "ok":
        write_json(about, {"job": fixed_fields, "result": result})
    return result


def run_and_store(report: dict[str, Any], job: Job, timeout: float) -> dict[str, Any]:
    """Run ``job`` and store its result in ``report``."""
    result = in_own_process(job, timeout)
    for key in ("device", "device_gib"):
        report[key] = result.pop(key, report.get(key))
    if result["status"] == "missing":
        report["missing"][job.loss] = result["message"]
    else:
        report["results"][job.loss] = result
    print(f"{job.loss}: {result['status']} {result.get('message', '')}", file=sys.stderr, flush=True)
    return result


def add_differences(results: dict[str, Any]) -> str | None:
    """Compare each result's losses with the reference (full logits, or the first result); return the reference's name.

    "first_relative_difference" is that of the first step, before any update; "relative_difference" is the largest.
    """
    names = sorted((name for name, row in results.items() if row.get("losses")), key=lambda name: name != "eager")
    for name in names:
        pairs = list(zip(results[name]["losses"], results[names[0]]["losses"], strict=False))
        differences = [abs(a - b) / abs(b) for a, b in pairs]
        results[name]["relative_difference"] = max(differences)
        results[name]["first_relative_difference"] = differences[0]
    return names[0] if names else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--sequence", type=positive, default=8192, help="tokens a row")
    parser.add_argument("--steps", type=positive, default=10, help="that are timed")
    parser.add_argument("--warmup", type=positive, default=3, help="steps before, in which kernels are compiled")
    parser.add_argument(
        "--losses", nargs="+", default=list(LOSSES), choices=LOSSES, metavar="LOSS", help=", ".join(LOSSES)
    )
    parser.add_argument(
        "--loop",
        choices=[*LOOPS, "recipe"],
        default="plain",
        help="or Transformers' Trainer, TRL's SFTTrainer, recipes/sft.py",
    )
    parser.add_argument("--recipe", default="", metavar="FLAGS", help="of recipes/sft.py, with --loop recipe")
    parser.add_argument(
        "--images", type=int, default=0, metavar="PIXELS", help="side of a picture in each row, with --loop recipe"
    )
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of Transformers")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--memory-limit", type=float, metavar="GIB", help="of PyTorch's allocator, as on a smaller GPU")
    parser.add_argument("--pretrain-steps", type=int, default=0, help="train so long first: the head is random no more")
    parser.add_argument("--pretrain-batch", type=positive, default=8)
    parser.add_argument("--pretrain-sequence", type=positive, default=1024)
    parser.add_argument("--pretrain-learning-rate", type=float, default=6e-4)
    parser.add_argument("--state", type=Path, help="file to keep the trained weights in, and to take them from later")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the measured steps")
    parser.add_argument("--ids", default="rank", choices=["rank", "spread"], help="place of the text's tokens in a vocabulary "
                        "larger than the tokenizer's: its first ids, or spaced out evenly")  # fmt: skip
    parser.add_argument("--dataset", help="text file or folder; default: Python's own sources")
    parser.add_argument("--json", type=Path, help="written anew after each loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=540, help="seconds that one loss may take")
    return parser.parse_args(arguments)


def positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def job_of(args: argparse.Namespace, report: dict[str, Any], **options: Any) -> Job:
    """Prepare the text and return the job of the first loss; describe the text in ``report``."""
    entries = min(SHAPES[args.model].vocabulary, MAX_ENTRIES)
    corpus = text.prepare(entries, dataset=getattr(args, "dataset", None))
    report["data"] = {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries}
    shared_fields = {field.name for field in fields(Job)} & set(vars(args))
    files = {"tokens_file": str(corpus.tokens_file), "tokenizer_file": str(corpus.tokenizer_file)}
    return Job(
        **{
            "loss": "eager",
            **{name: getattr(args, name) for name in shared_fields},
            "entries": corpus.entries,
            **files,
            **options,
        }
    )


def header(module: str, arguments: list[str] | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return the header entries of a report. The child processes fill in the device: this process does not touch the GPU."""
    found = origin(module, arguments, torch.device("cpu"), *PACKAGES)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {**found, "device": None, "settings": settings, "results": {}, "missing": {}}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    start = time.perf_counter()
    report = header("benchmarks.steps", arguments, args)
    weights = "recipe" if args.loop == "recipe" else "trained" if args.pretrain_steps else "weights"
    report["notes"] = {name: NOTES[name] for name in (weights, "optimizer", "time", "memory")}
    report["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    with tempfile.TemporaryDirectory() as folder:
        try:
            job = job_of(args, report)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if args.pretrain_steps > 0:
            job = replace(job, state_file=str(args.state or Path(folder) / "state.pt"))
            first = replace(
                job, steps=args.pretrain_steps, warmup=0, batch=args.pretrain_batch, sequence=args.pretrain_sequence,
                learning_rate=args.pretrain_learning_rate, seed=args.seed + 1, write_state=True, memory_limit=None,
                gradient_checkpointing=False, attention="sdpa", loop="plain",
            )  # fmt: skip
            report["pretraining"] = result = pretrained(first, args.timeout)
            if result["status"] != "ok":
                print(f"error: the training before failed: {result.get('message') or result}", file=sys.stderr)
                return 1
        for name in dict.fromkeys(args.losses):
            result = run_and_store(report, replace(job, loss=name), args.timeout)
            if result["status"] == "failed":
                print(result.get("output", ""), file=sys.stderr)
            report["reference"] = add_differences(report["results"])
            report["seconds"] = time.perf_counter() - start
            if args.json:
                write_json(args.json, report)
    print("\n".join(tables.step_rows([report])), flush=True)
    return int(any(row["status"] == "failed" for row in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
