"""Train the same small model on the same data from the same start, with one loss after the other.

Two settings: from random initialisation, and from a checkpoint that full logits have trained. Two correct bfloat16 runs drift
apart, too; how far is measured with a compiled loss and with the rows of each batch reversed. --seeds repeats everything.

usage: python -m benchmarks.curves --json OUT.json --plot OUT.png
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.curves_plot import draw
from benchmarks.installed import Missing, install
from benchmarks.plots import require_matplotlib
from hf_cce.diagnostics import machine, text
from hf_cce.diagnostics.files import write_json
from hf_cce.diagnostics.shapes import Shape, config_of

YARDSTICKS = ("compiled", "reversed")  # as correct as eager: their distance from it is what rounding does
OURS = ("hf_cce", "hf_cce-exact")
FILTER_EVERY = 10  # steps after which the filter is asked what it kept
RANDOM, TRAINED = "from random initialisation", "from a trained checkpoint"
Say = Callable[[str], None]
PACKAGES = ("transformers", "liger-kernel", "cut-cross-entropy")
NOTES = (
    "float32 weights and AdamW state, bfloat16 autocast, no dropout; same start and same batches in the same order for every "
    f"loss; difference: to full logits, in nats per token; yardsticks: {', '.join(YARDSTICKS)}"
)


@dataclass(frozen=True)
class Setup:
    """Of every run. Weights and AdamW's state are float32, the forward runs under bfloat16 autocast; no dropout."""

    device: str = "cuda"
    vocab: int = 49_152
    dim: int = 512  # a multiple of 64: heads have 64 channels
    layers: int = 8
    batch: int = 16
    sequence: int = 1024
    steps: int = 300  # of each run, in each setting
    checkpoint_steps: int = 300  # with eager, before the second setting begins
    learning_rate: float = 1e-3  # after a rise over ``rising`` steps; constant then
    rising: int = 20
    seed: int = 0
    seeds: int = 1  # how often it is all repeated, with the seeds that follow


PRESETS = {
    "gpu": Setup(),
    "tiny": Setup("cpu", 512, 64, 1, 2, 32, steps=12, checkpoint_steps=8, rising=4),
}


@dataclass(frozen=True)
class State:
    """Where a run starts: copies of weights and optimizer's state, and how many steps made them."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    step: int


def build(setup: Setup, state: State | None) -> tuple[Any, torch.optim.Optimizer]:
    """A fresh model, so that no run inherits a patch, and its optimizer; from the seed, or from ``state``."""
    from transformers import LlamaForCausalLM, set_seed

    set_seed(setup.seed)
    heads = max(1, setup.dim // 64)
    shape = Shape("llama", setup.dim, setup.layers, heads, heads, setup.dim * 8 // 3, setup.vocab)
    with torch.device(setup.device):
        model: Any = LlamaForCausalLM(config_of(shape, setup.sequence))
    model.to(setup.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), setup.learning_rate, betas=(0.9, 0.95), fused=True)
    if state is not None:
        model.load_state_dict(state.weights)
        if state.optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    return model, optimizer


def train(
    setup: Setup, name: str, batches: Tensor, start: State | None, snapshot_at: int | None = None
) -> tuple[dict[str, Any], State | None]:
    """One run over ``batches`` [steps, batch, sequence].

    Returns:
        its losses (nats per token), seconds and what was installed; and the state after ``snapshot_at`` steps, if asked for.

    Raises:
        Missing: the loss ``name`` cannot run here.
        RuntimeError: the loss became infinite or NaN.
    """
    device = torch.device(setup.device)
    model, optimizer = build(setup, start)
    reversed_rows = name == "reversed"
    installed = "eager, the rows of each batch in reverse" if reversed_rows else install(model, name)
    first, snapshot, losses, filtered = start.step if start else 0, None, [], []
    began = time.perf_counter()
    for step, rows in enumerate(batches):
        if step == snapshot_at:
            snapshot = taken(model, optimizer, first + step)
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate * min(1.0, (first + step + 1) / setup.rising)
        rows = rows.flip(0) if reversed_rows else rows
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().float())  # read at the end, so that the host waits for none
        if step % FILTER_EVERY == 0 and hasattr(model, "cce_stats"):
            told: dict[str, float] = model.cce_stats()
            of_filter = {key: told[key] for key in ("kept", "dense", "error") if math.isfinite(told.get(key, math.nan))}
            filtered.append({"step": step, **of_filter})
    values = torch.stack(losses)
    if not torch.isfinite(values).all():
        raise RuntimeError(f"{name}: the loss became infinite or NaN; try a smaller --learning-rate")
    run: dict[str, Any] = {"losses": values.tolist(), "installed": installed, "seconds": time.perf_counter() - began}
    if any("kept" in each for each in filtered):  # or the filter never ran
        run["filter"] = filtered
    if snapshot_at is not None and snapshot is None:
        snapshot = taken(model, optimizer, first + len(batches))
    return run, snapshot


def taken(model: Any, optimizer: torch.optim.Optimizer, step: int) -> State:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return State(weights, copy.deepcopy(optimizer.state_dict()), step)


def compare(runs: dict[str, dict[str, Any]]) -> None:
    """Write into each run how far it is from eager, in nats and in multiples of the yardsticks.

    "late_mean_difference" is signed, over the last quarter: noise averages out there, and training worse does not.
    """
    exact = runs["eager"]["losses"]
    for run in runs.values():
        differences = [a - b for a, b in zip(run["losses"], exact, strict=True)]
        sizes = [abs(d) for d in differences]
        late = differences[-max(1, len(sizes) // 4) :]
        run.update(
            max_difference=max(sizes),
            mean_difference=statistics.fmean(sizes),
            late_mean_difference=statistics.fmean(late),
            late_mean_loss=statistics.fmean(run["losses"][-len(late) :]),
        )
    yardsticks = [runs[name] for name in YARDSTICKS if name in runs]
    for key in ("max_difference", "mean_difference"):
        unit = max((run[key] for run in yardsticks), default=0.0)
        for run in runs.values():
            run[f"{key}_in_yardsticks"] = run[key] / unit if unit > 0 else None


def measure(
    setup: Setup, names: list[str], corpus: text.Corpus, say: Say, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Both settings with every loss of ``names`` (and eager): {"settings": {title: {name: run}}, "missing": {name: why}}.

    ``keep`` gets that after every run, with the runs there are.
    """
    total = max(setup.steps, setup.checkpoint_steps + setup.steps)
    drawn = text.windows(corpus.tokens_file, (total, setup.batch), setup.sequence, setup.seed)
    batches = torch.from_numpy(drawn).to(setup.device)
    settings: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    # One eager run serves twice: its first steps are the first setting's curve, its state in the middle is the checkpoint.
    length = max(setup.steps, setup.checkpoint_steps)
    whole, checkpoint = train(setup, "eager", batches[:length], None, setup.checkpoint_steps)
    say(
        f"eager, {length} steps {RANDOM}: {whole['losses'][0]:.3f} → {whole['losses'][-1]:.3f} in {whole['seconds']:.1f} s"
    )
    whole["losses_to_checkpoint"] = whole["losses"][: setup.checkpoint_steps]
    whole["losses"] = whole["losses"][: setup.steps]
    rest = batches[setup.checkpoint_steps :][: setup.steps]
    for title, start, data in ((RANDOM, None, batches[: setup.steps]), (TRAINED, checkpoint, rest)):
        runs = settings[title] = {"eager": whole} if start is None else {}
        for name in ["eager", *(name for name in names if name != "eager")]:
            if name in runs or name in missing:
                continue
            try:
                runs[name], _ = train(setup, name, data, start)
            except Missing as reason:
                missing[name] = str(reason)
                say(f"{name} is missing: {reason}")
                continue
            losses, seconds = runs[name]["losses"], runs[name]["seconds"]
            say(f"{name}, {len(losses)} steps {title}: {losses[0]:.3f} → {losses[-1]:.3f} in {seconds:.1f} s")
            compare(runs)
            keep({"settings": settings, "missing": missing})
        compare(runs)
    return {"settings": settings, "missing": missing}


def over_seeds(repeats: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of every seed's "settings": how far each loss ends from eager in the mean, and the standard error of that mean.

    Returns:
        {title: {name: {"late_mean_difference", "standard_error", "seeds"}}}; nats per token, signed, of the last quarter.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, runs in repeats[0]["settings"].items():
        for name in runs:
            every = [each["settings"].get(title, {}).get(name) for each in repeats]
            late = [run["late_mean_difference"] for run in every if run and "late_mean_difference" in run]
            if name != "eager" and len(late) > 1:
                error = statistics.stdev(late) / math.sqrt(len(late))
                mean = statistics.fmean(late)
                found.setdefault(title, {})[name] = {
                    "late_mean_difference": mean,
                    "standard_error": error,
                    "seeds": len(late),
                }
    return found


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Setup]:
    known = ("eager", *YARDSTICKS, *OURS)
    usual = ["eager", "compiled", *OURS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "tiny")
    for name, value in asdict(PRESETS["gpu"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"gpu: {value}; tiny: "
                            f"{getattr(PRESETS['tiny'], name)}")  # fmt: skip
    parser.add_argument("--losses", nargs="+", default=usual, choices=known, metavar="LOSS", help=", ".join(known))
    parser.add_argument("--dataset", help="text file or folder; default: Python's own sources")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in asdict(preset) if getattr(args, name) is not None}
    for name in ("vocab", "dim", "layers", "batch", "sequence", "steps", "checkpoint_steps", "rising", "seeds"):
        if given.get(name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    if given.get("dim", 64) % 64:
        parser.error(f"--dim must be a multiple of 64, got {given['dim']}")
    return args, replace(preset, **given)


def main(arguments: list[str] | None = None) -> int:
    args, setup = parse(arguments)
    say: Say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    try:
        if args.plot:
            require_matplotlib(args.plot)
        corpus = text.prepare(setup.vocab, dataset=args.dataset, say=say)
        about = {
            **machine.origin(
                machine.this_command("benchmarks.curves", arguments), torch.device(setup.device), *PACKAGES
            ),
            "setup": asdict(setup),
            "data": {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries},
            "notes": NOTES,
        }
        report = repeated(about, setup, args, corpus, say)
    except (ValueError, RuntimeError) as error:
        say(f"error: {error}")
        return 1
    if args.plot:
        draw(report, args.plot)
    print("\n".join(tables.curve_rows(report)), flush=True)
    return 0


def repeated(
    about: dict[str, Any], setup: Setup, args: argparse.Namespace, corpus: text.Corpus, say: Say
) -> dict[str, Any]:
    """Measure with each seed; return the report, which is written after every run."""
    repeats: list[dict[str, Any]] = []  # of the seeds before

    def whole(measured: dict[str, Any]) -> dict[str, Any]:
        first, *others = every = [*repeats, measured]
        return about | first | ({"other_seeds": others, "over_seeds": over_seeds(every)} if others else {})

    def keep(measured: dict[str, Any]) -> None:
        if args.json:
            write_json(args.json, whole(measured))

    for seed in range(setup.seed, setup.seed + setup.seeds):
        say(f"seed {seed}")
        measured = measure(replace(setup, seed=seed), args.losses, corpus, say, keep)
        report = whole(measured)
        repeats.append(measured)
    if args.json:
        write_json(args.json, report)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
