"""Time whole training steps of one model with each loss in turn, in one process: for steps limited by the host.

When Python decides how long a step takes, two processes differ by more than two losses do. So each round runs some steps with
full logits and as many with apply_cce, on the same model and optimizer.

usage: python -m benchmarks.alternate --model smollm2-135m --batch 1 --sequence 1024 --json OUT.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables, trainers
from benchmarks.files import write_json
from benchmarks.job import Job, token_ids
from benchmarks.onestep import build
from benchmarks.steps import header, job_of
from hf_cce import apply_cce, remove_cce
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.shapes import SHAPES

# By loss name: what is applied to the model for the steps of a round and removed afterwards (None: nothing).
CONFIGS = {"eager": None, **trainers.OURS}


class RoundScheduler:
    """Scheduler that installs each loss for its steps of a round, removes it afterwards and records times.

    Call ``before_step`` before each of the ``total`` steps and ``finish`` after the last one.
    """

    def __init__(self, job: Job, losses: list[str], rounds: int, untimed_steps: int, model: Any) -> None:
        self.job, self.model, self.untimed_steps = job, model, untimed_steps
        # Reverse the order every second round: the first loss after a pause runs slower.
        self.turns = [
            (round_index, name)
            for round_index in range(job.warmup + rounds)
            for name in (losses if round_index % 2 == 0 else reversed(losses))
        ]
        self.turn_steps = untimed_steps + job.steps
        self.total = len(self.turns) * self.turn_steps
        self.found: dict[str, Any] = {name: {"step_ms": [], "issued_ms": []} for name in losses}
        self.index, self.start = 0, 0.0

    def before_step(self) -> None:
        at = self.index % self.turn_steps
        if at == 0:
            if self.index:
                self._end()
            config = CONFIGS[self.turns[self.index // self.turn_steps][1]]
            if config is not None:
                apply_cce(self.model, config)
        if at == self.untimed_steps:
            machine.synchronize(torch.device(self.job.device))
            self.start = time.perf_counter()
        self.index += 1

    def finish(self) -> None:
        self._end()
        assert self.index == self.total

    def _end(self) -> None:
        issued = time.perf_counter()
        machine.synchronize(torch.device(self.job.device))
        done = time.perf_counter()
        round_index, name = self.turns[(self.index - 1) // self.turn_steps]
        if CONFIGS[name] is not None:
            self.found[name]["stats"] = self.model.cce_stats()
            remove_cce(self.model)
        if round_index >= self.job.warmup:
            self.found[name]["step_ms"].append((done - self.start) * 1e3 / self.job.steps)
            self.found[name]["issued_ms"].append((issued - self.start) * 1e3 / self.job.steps)


def measure(job: Job, losses: list[str], rounds: int, untimed_steps: int) -> dict[str, Any]:
    """Return milliseconds per step of each round and their medians, by loss: until the device or the host has finished.

    Untimed are the first ``job.warmup`` rounds and, in each round, ``untimed_steps`` before the ``job.steps``. Times are host
    times from one device synchronization to the next, because a host-limited step takes that long.
    """
    model = build(job, torch.bfloat16)
    scheduler = RoundScheduler(job, losses, rounds, untimed_steps, model)
    if job.loop == "plain":
        _plain(job, model, scheduler)
    else:
        trainers.run(replace(job, warmup=0, steps=scheduler.total), model, [_callback(scheduler)])
    found = scheduler.found
    for row in found.values():
        row["ms"], row["ms_spread"] = statistics.median(row["step_ms"]), [min(row["step_ms"]), max(row["step_ms"])]
    first = found[losses[0]]["step_ms"]
    for name in losses[1:]:
        gaps = [x - y for x, y in zip(found[name]["step_ms"], first, strict=True)]
        found[name]["apart_ms"] = {"median": statistics.median(gaps), "least": min(gaps), "most": max(gaps)}
    return found


def _plain(job: Job, model: Any, scheduler: RoundScheduler) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), fused=True)
    batches = torch.from_numpy(token_ids(job)).to(job.device)
    for index in range(scheduler.total):
        scheduler.before_step()
        rows = batches[index % len(batches)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scheduler.finish()


def _callback(scheduler: RoundScheduler) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            scheduler.before_step()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            scheduler.finish()

    return Clock()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens a row")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before, in which kernels are compiled")
    parser.add_argument("--steps", type=int, default=10, help="that are timed of each loss in each round")
    parser.add_argument("--settle", type=int, default=3, help="steps before those: after a change the first ones are slower, "
                        "and a gradient filter needs some ten to find its threshold")  # fmt: skip
    parser.add_argument("--losses", nargs="+", default=["eager", "hf_cce"], choices=CONFIGS, metavar="LOSS",
                        help=f"the first is what the others are compared with; {', '.join(CONFIGS)}")  # fmt: skip
    parser.add_argument("--loop", default="plain", choices=trainers.LOOPS,
                        help="or Transformers' Trainer, or TRL's SFTTrainer; apply_cce between steps")  # fmt: skip
    parser.add_argument("--dataset", help="text file or folder; default: Python's own sources")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if min(args.batch, args.rounds, args.steps) < 1 or args.sequence < 2 or min(args.warmup, args.settle) < 0:
        parser.error("--batch, --rounds and --steps must be at least 1, --sequence 2, --warmup and --settle 0")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    report = header("benchmarks.alternate", arguments, args)
    try:
        job = job_of(args, report, loss="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report["device"] = machine.device_name(torch.device(args.device))
    report["notes"] = {
        "weights": "bfloat16, random, trained on by all losses in turn; AdamW(fused=True)",
        "time": "the host's clock from a device at rest to a device at rest, by the number of steps; issued_ms until the "
        "host had launched them",
    }
    report["results"] = measure(job, list(dict.fromkeys(args.losses)), args.rounds, args.settle)
    if args.json:
        write_json(args.json, report)
    print("\n".join(tables.round_rows(report)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
