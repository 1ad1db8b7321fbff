"""Compare gradient-filter errors with those of bfloat16 full logits, batch by batch, on trained heads of many sizes.

``AUTO_SHARE`` is chosen with this script: the worst ratio must be at most one. Each head is trained on the spot, as in
``benchmarks.heads``. One filter state for the trained head and one for the frozen head see all batches in order, as in training.
Heads that are already in the report are skipped.

usage: python -m benchmarks.filter_errors --head 49152:1024:8:60 65537:1536:4:60 --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import write_json
from benchmarks.heads import Head, HeadSpec, train_head
from benchmarks.measure import exact_results
from benchmarks.origin import origin
from benchmarks.peers import FusedLoss, filter_stats
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.bench import Loss, full_logits
from hf_cce.diagnostics.gradcheck import Inputs, relative_error

# Vocabulary, hidden size, layers, seconds of training. Includes odd vocabulary sizes and a barely trained head.
HEADS = (
    "32000:2048:2:45", "49152:1024:6:45", "50257:768:6:45", "49152:576:6:15", "65537:1536:4:45", "128256:768:6:45",
    "65537:3072:2:45", "128256:4096:1:45", "200019:1024:4:45", "262144:896:4:45",
)  # fmt: skip
BATCHES = 16
SEQUENCE = 1024  # tokens per held-out sequence
MOST_LOGITS = 1_100_000_000  # per batch
GRADIENTS = ("hidden", "weight")


def measure(head: Head, device: torch.device) -> list[dict[str, Any]]:
    """Return, for each batch, the relative errors of both gradients (filtered and full logits) and the filter statistics.

    ``frozen_hidden_error`` is the error of the hidden states' gradient when the head is frozen.
    """
    weight = head.weight.to(device)
    sequences = len(head.labels) // SEQUENCE
    size = min(8, sequences, MOST_LOGITS // (len(weight) * SEQUENCE))
    generator, rows = torch.Generator().manual_seed(0), []
    fused, frozen = FusedLoss(), FusedLoss()
    losses: dict[str, Loss] = {"frozen": frozen, "hf_cce": fused, "eager": full_logits}
    for _ in range(BATCHES):
        drawn = torch.randperm(sequences, generator=generator)[:size]
        tokens = (drawn[:, None] * SEQUENCE + torch.arange(SEQUENCE)).flatten()
        problem = Inputs(head.hidden_states[tokens].to(device), weight, head.labels[tokens].to(device))
        exact = exact_results(problem)
        row: dict[str, Any] = {"tokens": len(tokens)}
        for name, loss in losses.items():
            leaves = [problem.hidden.detach().requires_grad_(), weight.detach().requires_grad_(name != "frozen")]
            value = loss(leaves[0], leaves[1], problem.labels)
            value.backward()
            row["loss"] = value.item()
            for key, x in zip(GRADIENTS, leaves, strict=True):
                if x.grad is not None:
                    row[f"{name}_{key}_error"] = relative_error(x.grad, exact[f"∂{key}"])
            del leaves, value
        rows.append(row | filter_stats(fused) | {"frozen_kept": filter_stats(frozen).get("kept")})
        del exact, problem
    return rows


def train_and_measure(given: str) -> tuple[str, dict[str, Any]]:
    """Train one head and measure it; return (``given``, its report entry).

    Run this in a process of its own, so that its memory is freed afterwards.
    """
    vocabulary, hidden_size, layers, seconds = map(int, given.split(":"))
    device = machine.checked_device(None)
    began = time.perf_counter()
    log = partial(print, f"{given}:", file=sys.stderr, flush=True)
    # Training reports every second; print every tenth report.
    head = train_head(
        HeadSpec(vocabulary, hidden_size, layers), seconds, device,
        progress=lambda line: None if line.startswith("training:") and "0 of" not in line else log(line),
    )  # fmt: skip
    rows = measure(head, device)
    found = {
        "vocab_size": vocabulary, "hidden_size": hidden_size, "layers": layers, "seconds": seconds,
        "held_out_loss": head.about["held_out_loss"], "tokenizer_entries": head.about["tokenizer_entries"], "batches": rows,
        "worst": worst(rows),
    }  # fmt: skip
    spent = time.perf_counter() - began
    log(f"{spent:.0f} s, loss {found['held_out_loss']:.2f}, kept {rows[-1].get('kept')}, worst {found['worst']}")
    return given, found


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return, for each gradient, the largest ratio over the batches of the filter's error to full logits' error."""
    found = {key: max(row[f"hf_cce_{key}_error"] / row[f"eager_{key}_error"] for row in rows) for key in GRADIENTS}
    return found | {"frozen": max(row["frozen_hidden_error"] / row["eager_hidden_error"] for row in rows)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head", nargs="+", default=HEADS, metavar="V:D:LAYERS:SECONDS", help=f"default: {' '.join(HEADS)}"
    )
    parser.add_argument("--parallel", type=int, default=2, help="heads at a time, on one device")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    report = origin("benchmarks.filter_errors", arguments, machine.checked_device(None), "transformers") | {"heads": {}}
    if args.json.is_file():
        report["heads"] = json.loads(args.json.read_text("utf-8"))["heads"]
    missing = [given for given in args.head if given not in report["heads"]]
    with multiprocessing.get_context("spawn").Pool(args.parallel, maxtasksperchild=1) as pool:
        for given, found in pool.imap_unordered(train_and_measure, missing):
            report["heads"][given] = found
            write_json(args.json, report)
    for given, found in report["heads"].items():
        print(f"{given:24s} loss {found['held_out_loss']:.2f}  worst {found['worst']}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
