"""``hf-cce demo``: train the same model twice from one seed, without and with CCE, each in its own process.

On a CPU only the peak memory of a whole process can be measured.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import hf_cce
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.shapes import config_of, smollm2_like
from hf_cce.diagnostics.text import Corpus, windows

Report = Callable[[dict[str, Any]], None]
TIMED_STEPS = 10  # below, speed is not compared


@dataclass(frozen=True)
class Settings:
    """One training run. None: what suits the device, see ``resolved``."""

    tokens_file: str
    model: str | None = None  # name or folder of pretrained weights; None: a fresh model of SmolLM2's shape
    vocabulary: int = 49_152
    hidden: int = 576
    layers: int | None = None
    steps: int | None = None
    batch: int | None = None
    sequence: int | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    dtype: str | None = None  # of autocast; the weights stay float32, as under Trainer's bf16=True
    device: str | None = None
    cce: bool = False

    def resolved(self) -> Settings:
        """Return the settings with each None filled in, by the device and the size of its memory."""
        import torch

        device = torch.device(self.device) if self.device else machine.best_device()
        suited: dict[str, Any] = {"layers": 2, "steps": 16, "batch": 4, "sequence": 512}
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).total_memory >> 30
            batch, sequence = (8, 2048) if size >= 60 else (4, 1024) if size >= 14 else (2, 512)
            suited = {"layers": 30, "steps": 100, "batch": batch, "sequence": sequence}
        suited["dtype"] = str(machine.default_dtype(device)).removeprefix("torch.")
        chosen = {name: value for name, value in suited.items() if getattr(self, name) is None}
        return replace(self, device=str(device), **chosen)


def twin(settings: Settings, corpus: Corpus, report: Report = lambda event: None) -> dict[str, Any]:
    """Run both and compare.

    Args:
        settings: of both runs; ``cce`` is set here.
        corpus: the text, for the record.
        report: called with an event for each run ("start") and step ("step").

    Returns:
        All measurements, ready for JSON. ``peak_bytes`` and ``rest_bytes`` (between two steps: weights and optimizer
        state) are of the GPU's allocator, or of the whole process on a CPU.
    """
    began = time.perf_counter()
    plain = in_own_process(replace(settings, cce=False), report)
    fused = in_own_process(replace(settings, cce=True), report)
    common = plain.pop("common")
    fused.pop("common")
    return {
        **common,
        "data": {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries},
        "plain": plain,
        "cce": fused,
        "largest_difference": max(abs(a - b) for a, b in zip(plain["losses"], fused["losses"], strict=True)),
        "seconds": time.perf_counter() - began,
    }


def why_no_speed(report: dict[str, Any]) -> str | None:
    """Return why the speeds of the two runs cannot be compared, None where they can."""
    timed = [report[run]["step_seconds"][1:] for run in ("plain", "cce")]  # the first step also warms up
    if (steps := len(timed[0])) < TIMED_STEPS:
        return f"{steps} timed steps are too few (--max-steps {TIMED_STEPS + 1} or more)"
    (a, _, b), (c, _, d) = (statistics.quantiles(each, n=4) for each in timed)
    if a <= d and c <= b:
        return "the times of the steps of both runs overlap"
    return None


def in_own_process(settings: Settings, report: Report) -> dict[str, Any]:
    """Run ``train`` in a fresh Python, which sends its events as lines of JSON; end it with this process.

    Raises:
        RuntimeError: the training failed, or its process was killed.
    """
    command = [sys.executable, "-m", "hf_cce.diagnostics.demo", json.dumps(asdict(settings))]
    # In a session of its own the child does not get Ctrl-C: this process ends it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True)
    assert process.stdout is not None
    try:
        for event in map(json.loads, process.stdout):
            if event["event"] == "result":
                return event["result"]
            if event["event"] == "error":
                raise RuntimeError(event["message"])
            report(event)
        raise RuntimeError(
            f"the run {'with' if settings.cce else 'without'} CCE was killed (exit code {process.wait()}); "
            "out of memory? Try a smaller --batch-size, --seq-length or --layers"
        )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _child() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with the events

    def send(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    try:
        send({"event": "result", "result": train(Settings(**json.loads(sys.argv[1])), send)})
    except Exception as error:
        send({"event": "error", "message": f"{type(error).__name__}: {error}"})


def train(settings: Settings, report: Report = lambda event: None) -> dict[str, Any]:
    """Run once in this process: build, train, measure."""
    import torch

    settings = settings.resolved()
    assert settings.steps and settings.batch and settings.sequence and settings.device
    device = torch.device(settings.device)
    model = _built(settings).to(device).train()
    if settings.cce:
        hf_cce.apply_cce(model)
    batches = windows(settings.tokens_file, (settings.steps, settings.batch), settings.sequence, settings.seed)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if (largest := int(batches.max())) >= vocabulary:
        raise ValueError(f"token {largest} does not fit the model's vocabulary of {vocabulary}")
    common = _common(settings, model)
    report({"event": "start", "cce": settings.cce, "common": common})
    losses, seconds = _steps(model, batches, settings, report)
    gc.collect()
    peak, rest = machine.peak_memory(device), machine.memory_in_use(device)
    model.eval()
    with torch.no_grad():
        shape = list(model(input_ids=torch.from_numpy(batches[0, :1]).to(device)).logits.shape)
    return {
        "common": common,
        "losses": losses,
        "step_seconds": seconds,
        "tokens_per_second": settings.batch * settings.sequence / statistics.median(seconds[1:] or seconds),
        "peak_bytes": peak,
        "rest_bytes": rest,
        "eval_logits_shape": shape,
    }


def _steps(model: Any, batches: Any, settings: Settings, report: Report) -> tuple[list[float], list[float]]:
    """Train on ``batches`` [steps, batch, sequence]; return the loss and the seconds of each step."""
    import torch

    device, dtype = torch.device(str(settings.device)), getattr(torch, str(settings.dtype))
    half = dtype.itemsize == 2
    autocast = torch.autocast(device.type, dtype if half else None, enabled=half)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    losses, seconds = [], []
    for step, rows in enumerate(batches):
        ids = torch.from_numpy(rows).to(device)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 5)
        machine.synchronize(device)
        start = time.perf_counter()
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        machine.synchronize(device)
        seconds.append(time.perf_counter() - start)
        report({"event": "step", "cce": settings.cce, "step": step, "loss": losses[-1], "seconds": seconds[-1]})
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss became {losses[-1]} at step {step}; try a smaller --learning-rate")
    return losses, seconds


def _built(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(settings.seed)
    if settings.model:
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    config = config_of(smollm2_like(settings.vocabulary, settings.hidden, settings.layers or 1))
    return AutoModelForCausalLM.from_config(config)


def _common(settings: Settings, model: Any) -> dict[str, Any]:
    """Return what both runs share: settings, sizes, device, versions."""
    import torch

    head = model.get_output_embeddings().weight
    kept = {k: v for k, v in asdict(settings).items() if k not in ("cce", "tokens_file")}
    found = machine.origin([], torch.device(str(settings.device)), "transformers")
    sizes = {
        "name": settings.model or "SmolLM2-shaped",
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.get_text_config().num_hidden_layers,
        "vocabulary": head.shape[0],
        "hidden": head.shape[1],
    }
    return {**found, "settings": kept, "model": sizes}


if __name__ == "__main__":
    _child()
