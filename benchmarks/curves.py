"""Train the same model on the same data with each loss, over several seeds.

There are two settings: random initialization, and the checkpoint written by the first full-logits run. Every run is evaluated on
held-out text and on a second corpus (documentation and licenses of installed packages). The noise is the range of the
full-logits results over the seeds. An existing results file is continued: only missing runs are made.

usage: python -m benchmarks.curves --json OUT.json --plot OUT.png
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import sys
import sysconfig
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import tables, text
from benchmarks.curves_plot import draw
from benchmarks.files import whole_file, write_json
from benchmarks.installed import Missing, install
from benchmarks.origin import origin
from benchmarks.plots import require_matplotlib
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.shapes import Shape, config_of
from hf_cce.dispatch import explain_dispatch

KNOWN = ("eager", "hf_cce-exact", "hf_cce", "compiled", "reversed")  # the last two are as accurate as "eager"
FILTER_EVERY = 50  # steps between two reads of the filter statistics
HELD_OUT = 0.05  # fraction of the text
PROSE_CHARACTERS = 4_000_000
RANDOM, TRAINED = "from random initialisation", "from a trained checkpoint"
Report = dict[str, Any]
PACKAGES = ("transformers",)
NOTES = (
    "float32 weights and AdamW state, bfloat16 autocast, no dropout; for each seed same start and same batches in the same order "
    "for every loss; nats per token; several runs share the GPU, so that seconds a step are no measure of speed"
)


@dataclass(frozen=True)
class Setup:
    """Settings shared by all runs. Weights and AdamW state are float32, the forward uses bfloat16 autocast, no dropout."""

    device: str = "cuda"
    vocab: int = 49_152
    dim: int = 1024  # a multiple of 64: heads have 64 channels
    layers: int = 4
    batch: int = 6
    sequence: int = 512
    steps: int = 2000
    learning_rate: float = 1e-3  # warms up over ``rising`` steps, decays over the last fifth
    fine_tune_rate: float = 2e-4  # for runs that start from the checkpoint
    rising: int = 100
    every: int = 10  # steps averaged into one point of the curve
    evaluated: int = 16  # batches per evaluation


PRESETS = {
    "gpu": Setup(),
    "tiny": Setup("cpu", 512, 64, 1, 2, 32, steps=12, rising=4, every=2, evaluated=2),
}


class Job(NamedTuple):
    """One training run."""

    setting: str
    loss: str
    seed: int

    @classmethod
    def of(cls, run: dict[str, Any]) -> Job:
        return cls(run["setting"], run["loss"], run["seed"])


class Data(NamedTuple):
    """Token files: training text and second corpus."""

    text: Path
    second: Path


def model_of(setup: Setup) -> Any:
    """Return a fresh model, so that no run inherits a patch."""
    from transformers import LlamaForCausalLM

    heads = max(1, setup.dim // 64)
    shape = Shape("llama", setup.dim, setup.layers, heads, heads, setup.dim * 11 // 4, setup.vocab)
    return LlamaForCausalLM(config_of(shape, setup.sequence))


def train(setup: Setup, job: Job, data: Data, checkpoint: Path, writes_checkpoint: bool) -> dict[str, Any]:
    """Train one run, from the weights in ``checkpoint`` if the job fine-tunes; write the final weights there if asked to.

    Raises:
        Missing: the loss cannot run here.
        RuntimeError: the loss became infinite or NaN.
    """
    from safetensors.torch import load_model, save_model
    from transformers import set_seed

    device, fine_tunes = torch.device(setup.device), job.setting == TRAINED
    gc.collect()  # memory of the previous run in this process
    set_seed(job.seed)
    with device:
        model = model_of(setup).train()
    if fine_tunes:
        load_model(model, str(checkpoint), device=setup.device)
    highest = setup.fine_tune_rate if fine_tunes else setup.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), highest, betas=(0.9, 0.95), fused=True)
    reversed_rows = job.loss == "reversed"
    installed = "eager, the rows of each batch in reverse" if reversed_rows else install(model, job.loss)

    def batches(file: Path, count: int, seed: int, part: tuple[float, float] = (0.0, 1.0)) -> Tensor:
        return torch.from_numpy(text.windows(file, (count, setup.batch), setup.sequence, seed, part)).to(device)

    seed = job.seed + 1000 * fine_tunes  # so that fine-tuning sees other batches than the checkpoint did
    trained_on = batches(data.text, setup.steps, seed, (0.0, 1.0 - HELD_OUT))
    scored_on = {
        "held_out": batches(data.text, setup.evaluated, 0, (1.0 - HELD_OUT, 1.0)),
        "second_corpus": batches(data.second, setup.evaluated, 0),
    }
    points = {setup.steps * quarter // 4 for quarter in (1, 2, 3, 4)} | {max(1, setup.steps // 20)}
    losses: list[Tensor] = []
    evaluations: list[dict[str, float]] = []
    filtered: list[dict[str, float]] = []
    machine.reset_peak_memory(device)
    seconds, began = 0.0, time.perf_counter()
    for step, rows in enumerate(trained_on, 1):
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1.0, step / setup.rising, 5 * (setup.steps + 1 - step) / setup.steps)
        rows = rows.flip(0) if reversed_rows else rows
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().float())  # read only at evaluations, to avoid synchronizing the host
        if step % FILTER_EVERY == 0 and hasattr(model, "cce_stats"):
            found: dict[str, float] = model.cce_stats()
            finite = {key: found[key] for key in ("kept", "dense", "error") if math.isfinite(found.get(key, math.nan))}
            filtered.append({"step": step, **finite})
        if step not in points:
            continue
        machine.synchronize(device)
        seconds += time.perf_counter() - began
        peak = machine.peak_memory(device)
        machine.reset_peak_memory(device)  # to the memory in use now
        memory = {"bytes": machine.peak_memory(device), "peak_bytes": peak}
        scores = {name: evaluate(model, rows) for name, rows in scored_on.items()}
        evaluations.append({"step": step, **scores, **memory})
        latest = float(losses[-1])
        scores_text = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
        log(f"{job.loss}, seed {job.seed}, {job.setting}: step {step:,} of {setup.steps:,}: loss {latest:.4f}, {scores_text}; "
            f"{1000 * seconds / step:.1f} ms a step, peak {memory['peak_bytes'] / 2**30:.2f} GiB")  # fmt: skip
        if not math.isfinite(latest):
            raise RuntimeError(f"{job.loss}: the loss became infinite or NaN; try a smaller --learning-rate")
        machine.reset_peak_memory(device)
        began = time.perf_counter()
    values = torch.stack(losses).tolist()
    late = values[-max(1, len(values) // 4) :]
    run: dict[str, Any] = {
        **job._asdict(),
        "installed": installed,
        "losses": [fmean(values[at : at + setup.every]) for at in range(0, len(values), setup.every)],
        "evaluations": evaluations,
        "final": {"training": fmean(late), **{name: evaluations[-1][name] for name in scored_on}},
        "seconds_per_step": seconds / setup.steps,
        "checkpoint": identity(checkpoint) if fine_tunes else None,
    }
    if any("kept" in each for each in filtered):  # absent if the filter never ran
        run["filter"] = filtered
    if writes_checkpoint:
        with whole_file(checkpoint) as temporary:
            save_model(model, str(temporary), metadata={"identity": uuid.uuid4().hex})
    return run


@torch.no_grad()
def evaluate(model: Any, batches: Tensor) -> float:
    """Return the mean loss over ``batches`` [count, batch, sequence], always computed from full logits."""
    model.eval()
    losses = []
    for rows in batches:
        with torch.autocast(rows.device.type, torch.bfloat16):
            logits = model(input_ids=rows).logits
        losses.append(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten()))
    model.train()
    return float(torch.stack(losses).mean())


def identity(checkpoint: Path) -> str | None:
    """Return the identity string stored with these weights, or None if the file does not exist."""
    from safetensors import safe_open

    if not checkpoint.is_file():
        return None
    with safe_open(str(checkpoint), "pt") as file:
        return str(file.metadata()["identity"])


def missing_jobs(report: Report, jobs: list[Job], checkpoint: Path) -> list[Job]:
    """Return the jobs that ``report`` lacks. The first of ``jobs`` writes the checkpoint.

    If that checkpoint is gone, runs that started from it are dropped: they do not compare with runs from a new checkpoint.
    """

    def lacking() -> list[Job]:
        present = {Job.of(run) for run in report["runs"]}
        return [job for job in jobs if job not in present and job.loss not in report["missing"]]

    if any(job.setting == TRAINED for job in lacking()):
        known = identity(checkpoint)
        runs = [run for run in report["runs"] if run["checkpoint"] in (None, known)]
        report["runs"] = [run for run in runs if known or Job.of(run) != jobs[0]]
    return lacking()


def measure(
    report: Report, setup: Setup, jobs: list[Job], data: Data, args: argparse.Namespace, save: Callable[[], None]
) -> None:
    """Make the missing runs of ``report``, ``args.parallel`` at a time, and call ``save`` after each."""
    checkpoint = (
        text.cache_folder() / f"curves-{hashlib.sha256(repr((setup, data)).encode()).hexdigest()[:16]}.safetensors"
    )
    maker, queue, running = jobs[0], deque(missing_jobs(report, jobs, checkpoint)), dict[Future[Any], Job]()
    log(f"{len(queue)} of {len(jobs)} runs to make")
    until = time.monotonic() + (args.seconds or math.inf)
    pool: Executor = ThreadPoolExecutor(1)
    if args.parallel > 1:
        pool = ProcessPoolExecutor(args.parallel, get_context("spawn"))
    with pool:
        while queue or running:
            while queue and len(running) < args.parallel and time.monotonic() < until:
                if queue[0].setting == TRAINED and maker in running.values():
                    break
                job = queue.popleft()
                if job.loss not in report["missing"]:
                    running[pool.submit(train, setup, job, data, checkpoint, job == maker)] = job
            if not running:
                log(f"--seconds {args.seconds:g} are over: {len(queue)} runs left; the same command makes them")
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    report["runs"].append(future.result())
                except Missing as reason:
                    report["missing"][job.loss] = str(reason)
                    log(f"{job.loss} is missing: {reason}")
                report["runs"].sort(key=lambda run: jobs.index(Job.of(run)) if Job.of(run) in jobs else len(jobs))
                report["summary"] = summarize(report["runs"])
                save()


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Compare the final losses of each loss function with those of full logits for the same seeds.

    Returns:
        {setting: {loss: {quantity: {"mean", "difference", "standard_error", "of_seeds", "noise"}}}}, in nats per token.
        "of_seeds": signed difference for each seed. "difference": their mean, with its standard error (None for one seed).
        "noise": the range of full logits over the seeds; None for the training loss, because each seed trains on other batches.
    """
    final: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for run in runs:
        final.setdefault(run["setting"], {}).setdefault(run["loss"], {})[run["seed"]] = run["final"]
    summary: dict[str, Any] = {}
    for setting, losses in final.items():
        full = losses.get("eager", {})
        for loss, seeds in losses.items():
            both = [seed for seed in seeds if seed in full]
            for quantity in seeds[both[0]] if both else ():
                full_losses = [full[seed][quantity] for seed in full]
                seed_differences = [seeds[seed][quantity] - full[seed][quantity] for seed in both]
                summary.setdefault(setting, {}).setdefault(loss, {})[quantity] = {
                    "mean": fmean(seeds[seed][quantity] for seed in both),
                    "difference": fmean(seed_differences),
                    "standard_error": stdev(seed_differences) / math.sqrt(len(both)) if len(both) > 1 else None,
                    "of_seeds": seed_differences,
                    "noise": None if quantity == "training" else max(full_losses) - min(full_losses),
                }
    return summary


def second_corpus(corpus: text.Corpus, dataset: str | None) -> Path:
    """Return a token file next to those of ``corpus``, made from ``dataset`` or from text files of installed packages."""
    packages = Path(sysconfig.get_path("purelib"))
    files = [Path(dataset)] if dataset else sorted(packages.rglob("*"))
    documents, left = [], PROSE_CHARACTERS
    for path in files:
        if path.is_file() and (path.suffix in {".rst", ".md", ".txt"} or path.name.startswith(("LICENSE", "METADATA"))):
            documents.append(path.read_text("utf-8", "replace")[:left])
            left -= len(documents[-1])
    ids = text.encode(corpus.tokenizer(), dict.fromkeys(documents))  # drops duplicates: many licenses are identical
    path = corpus.tokens_file.with_name(f"second-{hashlib.sha256(ids.tobytes()).hexdigest()[:16]}.npy")
    with whole_file(path) as temporary:
        np.save(temporary, ids)
    return path


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Setup]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "tiny")
    for name, value in asdict(PRESETS["gpu"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"gpu: {value}; tiny: "
                            f"{getattr(PRESETS['tiny'], name)}")  # fmt: skip
    parser.add_argument("--losses", nargs="+", default=KNOWN[:3], choices=KNOWN, metavar="LOSS", help=", ".join(KNOWN))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each loss; default: %(default)s")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each in its process")
    parser.add_argument("--seconds", type=float, help="start no run later than this; call again for those left")
    parser.add_argument("--dataset", help="text file or folder to train on; default: Python's own sources")
    parser.add_argument("--second-dataset", help="text file to score on; default: what installed packages ship")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in asdict(preset) if getattr(args, name) is not None}
    for name, value in {**given, "seeds": args.seeds, "parallel": args.parallel}.items():
        if name != "device" and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if given.get("dim", 64) % 64:
        parser.error(f"--dim must be a multiple of 64, got {given['dim']}")
    return args, replace(preset, **given)


def load_report(args: argparse.Namespace, about: Report) -> Report:
    """Return the report to continue: the one in ``--json``, or an empty one.

    Raises:
        ValueError: the file has runs of another setup.
    """
    if args.json and args.json.is_file():
        report: Report = json.loads(args.json.read_text("utf-8"))
        differing = [key for key in ("device", "versions", "setup", "data") if report[key] != about[key]]
        if differing:
            raise ValueError(f"--json {args.json}: its runs differ in {', '.join(differing)}; name another file")
        return {**report, **about}
    return {**about, "runs": [], "missing": {}, "summary": {}}


def main(arguments: list[str] | None = None) -> int:
    args, setup = parse(arguments)
    tokens = setup.batch * setup.sequence
    decided = explain_dispatch(tokens, setup.dim, setup.vocab, torch.bfloat16, setup.device)
    log(f"hf_cce computes a loss of {tokens:,} tokens by: {decided.strategy}")
    try:
        if args.plot:
            require_matplotlib(args.plot)
        corpus = text.prepare(setup.vocab, dataset=args.dataset, progress=log)
        data = Data(corpus.tokens_file, second_corpus(corpus, args.second_dataset))
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in model_of(setup).parameters())
        about = {
            **origin("benchmarks.curves", arguments, torch.device(setup.device), *PACKAGES),
            "setup": {**asdict(setup), "parameters": parameters, "strategy": decided.strategy},
            "data": {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries,
                     "second_corpus_tokens": len(np.load(data.second, mmap_mode="r"))},
            "notes": NOTES,
        }  # fmt: skip
        report = load_report(args, about)
        jobs = [
            Job(setting, loss, seed)
            for setting in (RANDOM, TRAINED)
            for seed in range(args.seeds)
            for loss in ("eager", *(loss for loss in args.losses if loss != "eager"))
        ]
        measure(report, setup, jobs, data, args, lambda: write_json(args.json, report) if args.json else None)
    except (ValueError, RuntimeError) as error:
        log(f"error: {error}")
        return 1
    if args.plot and report["summary"]:
        draw(report, args.plot)
    print("\n".join(tables.curve_rows(report)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
