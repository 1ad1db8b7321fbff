"""Whole training steps (forward, backward, fused AdamW) of a causal LM of real shape, with one loss after the other.

Weights and optimizer's state are bfloat16; weights are random (or trained for --pretrain-steps on the same text first), the
tokens are real text. Each loss runs in a process of its own, so that neither peaks nor compile caches mix.

usage: python -m hf_cce.bench.steps --model qwen2.5-0.5b --batch 4 --sequence 8192 [--memory-limit 31] --json OUT.json
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

from hf_cce.bench import machine, text
from hf_cce.bench.files import write_json
from hf_cce.bench.installed import LOSSES
from hf_cce.bench.job import Job
from hf_cce.bench.onestep import PARTS
from hf_cce.bench.shapes import SHAPES
from hf_cce.bench.trainers import LOOPS

MAX_ENTRIES = 49_152  # the local text gives no larger tokenizer
NOTES = {
    "weights": "bfloat16, random: initialised by the seed, the same for every loss; no model was downloaded",
    "trained": "bfloat16, random at first, then trained on this text for pretrain_steps steps (fp32 weights, bf16 autocast, "
    "eager loss); the same for every loss",
    "optimizer": "torch.optim.AdamW(fused=True), its state in bfloat16; fresh at the first warm-up step",
    "time": "CUDA events around each part of each step, the host not waiting; on a CPU wall time. Medians of the timed steps",
    "memory": "peak_gib: allocated at most in the timed steps; reserved_gib: what PyTorch's allocator held at most; on a CPU "
    "peak_gib is the whole process since it began",
}


def in_own_process(job: Job, timeout: float) -> dict[str, Any]:
    """``hf_cce.bench.onestep.run`` in a fresh process; one that dies or takes over ``timeout`` seconds has "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        given, written, errors = (Path(folder) / name for name in ("job.json", "result.json", "errors.txt"))
        given.write_text(json.dumps(asdict(job)), "utf-8")
        command = [sys.executable, "-m", "hf_cce.bench.onestep", str(given), str(written)]
        try:
            with errors.open("w") as stream:
                code = subprocess.run(
                    command, stdout=stream, stderr=stream, timeout=timeout, env=_environment(), check=False
                ).returncode
        except subprocess.TimeoutExpired:
            return {"status": "failed", "message": f"took more than {timeout:.0f} s (--timeout)"}
        said = errors.read_text("utf-8", "replace")
        if code or not written.exists():
            return {"status": "failed", "message": f"its process ended with exit code {code}", "output": said[-3000:]}
        result = json.loads(written.read_text("utf-8"))
        return {**result, "output": said[-3000:]} if result["status"] == "failed" else result


def pretrained(job: Job, timeout: float) -> dict[str, Any]:
    """Train the weights to begin with into ``job.state_file``, or return what an earlier run of the same job left beside it.

    Its "status" is not "ok" where that file holds another job's weights.
    """
    assert job.state_file
    about = Path(f"{job.state_file}.json")
    # Where the text lies differs from run to run.
    same = {key: value for key, value in asdict(job).items() if not key.endswith("_file")}
    if Path(job.state_file).exists() and about.exists():
        earlier = json.loads(about.read_text("utf-8"))
        if earlier["job"] != json.loads(json.dumps(same)):
            return {"status": "failed", "message": f"{job.state_file} holds other weights: {earlier['job']}"}
        return {**earlier["result"], "kept": True}
    result = in_own_process(job, timeout)
    if result["status"] == "ok":
        write_json(about, {"job": same, "result": result})
    return result


def filed(report: dict[str, Any], job: Job, timeout: float) -> dict[str, Any]:
    """What ``in_own_process`` gives, which is also put where it belongs in ``report``."""
    result = in_own_process(job, timeout)
    for key in ("device", "device_gib"):
        report[key] = result.pop(key, report.get(key))
    if result["status"] == "missing":
        report["missing"][job.loss] = result["message"]
    else:
        report["results"][job.loss] = result
    return result


def _environment() -> dict[str, str]:
    """Where this process found hf_cce, its child shall find it too, from whichever folder it was started."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def compare(results: dict[str, Any]) -> str | None:
    """Write into each result how far its losses are from the reference: eager, or the first that has any if eager has none.

    "relative_difference" is the largest of all steps that both have done, "first_relative_difference" that of the first step,
    before any update. The first is the loss's own; later steps train on what rounding left in the weights.

    Returns:
        the name of the reference.
    """
    names = sorted((name for name, row in results.items() if row.get("losses")), key=lambda name: name != "eager")
    for name in names:
        pairs = list(zip(results[name]["losses"], results[names[0]]["losses"], strict=False))
        differences = [abs(a - b) / abs(b) for a, b in pairs]
        results[name]["relative_difference"] = max(differences)
        results[name]["first_relative_difference"] = differences[0]
    return names[0] if names else None


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    settings, reference = report["settings"], report["reference"]
    checkpointing = ", gradient checkpointing" if settings["gradient_checkpointing"] else ""
    capped = f", at most {settings['memory_limit']:g} GiB" if settings["memory_limit"] else ""
    trained = f", {settings['pretrain_steps']} steps trained" if settings["pretrain_steps"] else ", random weights"
    loop = {"trainer": ", Trainer", "sft": ", SFTTrainer"}.get(settings["loop"], "")
    lines = [
        f"### {settings['model']}, {settings['batch']} × {settings['sequence']} tokens, "
        f"bf16{trained}{checkpointing}{capped}{loop}",
        "",
        "| loss | ms a step (min–max) | forward, backward, optimizer ms | tokens/s | peak GiB | reserved GiB | "
        f"first loss | difference to {reference or 'eager'} at once, later |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["results"].items():
        if row["status"] == "ok":
            parts = ", ".join(f"{row[f'{part}_ms']:.1f}" for part in PARTS if f"{part}_ms" in row)
            low, high = row["ms_spread"]
            lines.append(
                f"| {name} | {row['ms']:.1f} ({low:.1f}–{high:.1f}) | {parts} | {row['tokens_per_second']:,.0f} | "
                f"{row['peak_gib']:.2f} | {row.get('reserved_gib', float('nan')):.2f} | {row['losses'][0]:.5f} | "
                f"{row['first_relative_difference']:.1e}, {row['relative_difference']:.1e} |"
            )
        elif row["status"] == "oom":
            asked = f" (asked for {row['asked']})" if "asked" in row else ""
            # A trainer's steps nobody counts.
            when = f"the {row['phase']} of step {row['step']}" if row["step"] else row["phase"]
            lines.append(f"| {name} | out of memory in {when}{asked} |||||||")
        else:
            lines.append(f"| {name} | failed: {' '.join(row['message'].split())[:120].replace('|', '/')} |||||||")
    lines += [f"\n{name} is missing: {reason}" for name, reason in report["missing"].items()]
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--batch", type=_positive, default=4)
    parser.add_argument("--sequence", type=_positive, default=8192, help="tokens a row")
    parser.add_argument("--steps", type=_positive, default=10, help="that are timed")
    parser.add_argument(
        "--warmup", type=_positive, default=3, help="steps before, in which kernels are compiled and tuned"
    )
    parser.add_argument(
        "--losses", nargs="+", default=list(LOSSES), choices=LOSSES, metavar="LOSS", help=", ".join(LOSSES)
    )
    parser.add_argument("--loop", choices=LOOPS, default="plain", help="or Transformers' Trainer, or TRL's SFTTrainer")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of Transformers")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="for PyTorch's allocator, as on a smaller GPU"
    )
    parser.add_argument("--pretrain-steps", type=int, default=0, help="train so long first: the head is random no more")
    parser.add_argument("--pretrain-batch", type=_positive, default=8)
    parser.add_argument("--pretrain-sequence", type=_positive, default=1024)
    parser.add_argument("--pretrain-learning-rate", type=float, default=6e-4)
    parser.add_argument("--state", type=Path, help="file to keep the trained weights in, or to take them from if an earlier run "
                        "with the same --pretrain options left them there")  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the measured steps")
    parser.add_argument("--ids", default="rank", choices=["rank", "spread"], help="place of the text's tokens in a vocabulary "
                        "larger than the tokenizer's: its first ids, or spaced out evenly")  # fmt: skip
    parser.add_argument("--dataset", help="text file or folder; default: Python's own sources")
    parser.add_argument("--json", type=Path, help="where to write everything measured; written anew after each loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=540, help="seconds that one loss may take")
    return parser.parse_args(arguments)


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    start = time.perf_counter()
    try:
        corpus = text.prepare(min(SHAPES[args.model].vocabulary, MAX_ENTRIES), dataset=args.dataset, say=say)
    except ValueError as error:
        say(f"error: {error}")
        return 1
    same = {field.name for field in fields(Job)} & set(vars(args))
    job = Job(
        loss="eager",
        tokens_file=str(corpus.tokens_file),
        entries=corpus.entries,
        tokenizer_file=str(corpus.tokenizer_file),
        **{name: getattr(args, name) for name in same},
    )
    report: dict[str, Any] = {
        "command": machine.command("hf_cce.bench.steps", arguments),
        "device": None,  # as the processes name it: this one leaves the GPU alone
        "versions": machine.versions(
            "torch", "triton", "transformers", "accelerate", "trl", "liger-kernel", "cut-cross-entropy"
        ),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "shape": asdict(SHAPES[args.model]),
        "data": {
            "source": corpus.source,
            "tokens": corpus.tokens,
            "tokenizer_entries": corpus.entries,
            "ids": args.ids,
        },
        "notes": {
            k: NOTES[k] for k in ("trained" if args.pretrain_steps else "weights", "optimizer", "time", "memory")
        },
        "results": {},
        "missing": {},
        "reference": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.pretrain_steps > 0:
            job = replace(job, state_file=str(args.state or Path(folder) / "state.pt"))
            first = replace(
                job, steps=args.pretrain_steps, warmup=0, batch=args.pretrain_batch, sequence=args.pretrain_sequence,
                learning_rate=args.pretrain_learning_rate, seed=args.seed + 1, write_state=True, memory_limit=None,
                gradient_checkpointing=False, attention="sdpa", loop="plain",
            )  # fmt: skip
            report["pretraining"] = result = pretrained(first, args.timeout)
            if result["status"] != "ok":
                say(f"error: the training before the measurement failed: {result.get('message') or result}")
                return 1
            say(f"trained {args.pretrain_steps} steps in {result['seconds']:.0f} s: loss {result['losses'][-1]:.3f}")
        for name in dict.fromkeys(args.losses):
            result = filed(report, replace(job, loss=name), args.timeout)
            if result["status"] == "failed":
                say(result.get("output", ""))
            say(f"{name}: {result['status']}, {result.get('message') or format(result['ms'], '.1f') + ' ms a step'}")
            report["reference"] = compare(report["results"])
            report["seconds"] = time.perf_counter() - start
            if args.json:
                write_json(args.json, report)
    print(table(report), flush=True)
    return int(any(row["status"] == "failed" for row in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
