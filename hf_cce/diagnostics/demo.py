"""``hf-cce demo``: train the same model twice from one seed, without and with CCE, each in its own process.

Its own process because on a CPU the only honest measure of peak memory is that of a whole process.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import hf_cce
from hf_cce.diagnostics import hub, machine
from hf_cce.diagnostics.text import Corpus, windows

if TYPE_CHECKING:  # torch is loaded by the processes that train, not by the one that shows their progress
    import torch

Report = Callable[[dict[str, Any]], None]
NEW_TOKENS = 24
TIMED_STEPS, TIMED_SECONDS = 10, 1.0  # below, speed is not compared
BUSY = 0.1  # share of the processor; a desktop at rest stays below
PROMPT = "def __init__(self"


@dataclass(frozen=True)
class Settings:
    """One training run. None: what suits the device, see ``resolved``."""

    tokens_file: str
    tokenizer_file: str
    model: str | None = None  # name or folder of pretrained weights; None: a fresh model of SmolLM2's shape
    vocabulary: int = 49_152
    hidden: int = 576
    layers: int | None = None
    steps: int | None = None
    batch: int | None = None
    sequence: int | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    cce: bool = False

    def resolved(self) -> Settings:
        """Return the settings with each None filled in, by the device and the size of its memory."""
        import torch

        device = torch.device(self.device) if self.device else machine.best_device()
        suited: dict[str, Any] = {"layers": 2, "steps": 16, "batch": 4, "sequence": 512, "dtype": "float32"}
        if device.type == "mps":
            suited |= {"layers": 8, "steps": 20}
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).total_memory >> 30
            batch, sequence = (8, 2048) if size >= 60 else (4, 1024) if size >= 14 else (2, 512)
            suited = {"layers": 30, "steps": 100, "batch": batch, "sequence": sequence, "dtype": "bfloat16"}
        chosen = {name: value for name, value in suited.items() if getattr(self, name) is None}
        return replace(self, device=str(device), **chosen)


def twin(settings: Settings, corpus: Corpus, report: Report = lambda event: None) -> dict[str, Any]:
    """Run both and compare.

    Args:
        settings: of both runs; ``cce`` is set here.
        corpus: the text, for the record and to decode what the models write.
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
    tokenizer = corpus.tokenizer()
    for run in (plain, fused):
        run["generated"] = tokenizer.decode(run["generated_ids"])
    return {
        **common,
        "data": {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries},
        "prompt": PROMPT,
        "plain": plain,
        "cce": fused,
        "largest_difference": max(abs(a - b) for a, b in zip(plain["losses"], fused["losses"], strict=True)),
        "seconds": time.perf_counter() - began,
    }


def why_no_speed(report: dict[str, Any]) -> str | None:
    """Return why the speeds of the two runs cannot be compared, None where they can."""
    runs = report["plain"], report["cce"]
    timed = [run["step_seconds"][1:] for run in runs]  # the first step also warms up
    if (steps := len(timed[0])) < TIMED_STEPS:
        return f"{steps} timed step{'s' * (steps != 1)} cannot show it (--steps {TIMED_STEPS + 1} or more can)"
    if (seconds := min(map(sum, timed))) < TIMED_SECONDS:
        return f"{steps} steps in {seconds:.2f} s are too short to show it (more --steps, or a larger --batch, can)"
    others = max(run.get("cpu_used_by_others", 0.0) for run in runs)
    if report["settings"]["device"] == "cpu" and others > BUSY:
        return f"other programs used {others:.0%} of the processor meanwhile"
    (a, _, b), (c, _, d) = (statistics.quantiles(each, n=4) for each in timed)
    if a <= d and c <= b:
        return (
            f"the middle half of the steps took {a * 1e3:,.1f} to {b * 1e3:,.1f} ms without CCE and {c * 1e3:,.1f} to "
            f"{d * 1e3:,.1f} ms with it, which overlap"
        )
    return None


def in_own_process(settings: Settings, report: Report) -> dict[str, Any]:
    """Run ``train`` in a fresh process; pass its events on, raise its exception here, end it with this process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(settings, there), daemon=True)
    try:
        # An interruption while the child starts would leave it behind.
        with _no_interruption():
            process.start()
        there.close()
        while True:
            event = here.recv()
            if event["event"] == "result":
                return event["result"]
            if event["event"] == "error":
                raise RuntimeError(event["message"])
            report(event)
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the run {'with' if settings.cce else 'without'} CCE was killed (exit code {process.exitcode}); "
            "out of memory? Try a smaller --batch, --seq or --layers"
        ) from None
    finally:
        if process.pid is not None:
            process.terminate()
            process.join()


@contextmanager
def _no_interruption() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; a process started inside never receives it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(settings: Settings, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    try:
        pipe.send({"event": "result", "result": train(settings, pipe.send)})
    except Exception as error:
        pipe.send({"event": "error", "message": f"{type(error).__name__}: {error}"})


def train(settings: Settings, report: Report = lambda event: None) -> dict[str, Any]:
    """Run once in this process: build, train, measure, generate a few tokens."""
    import torch

    from hf_cce.diagnostics import memory

    settings = settings.resolved()
    assert settings.steps and settings.batch and settings.sequence and settings.device
    device = torch.device(settings.device)
    model = _built(settings).to(device).train()
    if settings.cce:
        hf_cce.apply_cce(model)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), fused=True)
    batches = windows(settings.tokens_file, (settings.steps, settings.batch), settings.sequence, settings.seed)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if (largest := int(batches.max())) >= vocabulary:
        raise ValueError(f"token {largest} does not fit the model's vocabulary of {vocabulary}")
    common = _common(settings, model)
    report({"event": "start", "cce": settings.cce, "steps": settings.steps, "common": common})

    losses, seconds, others = [], [], machine.OtherPrograms()
    for step, rows in enumerate(batches):
        ids = torch.from_numpy(rows).to(device)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 5)
        machine.synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        machine.synchronize(device)
        seconds.append(time.perf_counter() - start)
        others = machine.OtherPrograms() if step == 0 else others
        report({"event": "step", "cce": settings.cce, "step": step, "loss": losses[-1], "seconds": seconds[-1]})
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss became {losses[-1]} at step {step}; try a smaller --lr")
    used = others.share()
    del loss, ids
    gc.collect()
    peak, rest = memory.peak(device), memory.in_use(device)
    written, shape = _generate(model, settings, device)
    return {
        "common": common,
        "losses": losses,
        "step_seconds": seconds,
        "cpu_used_by_others": used,
        "tokens_per_second": settings.batch * settings.sequence / statistics.median(seconds[1:] or seconds),
        "peak_bytes": peak,
        "rest_bytes": rest,
        "eval_logits_shape": shape,
        "generated_ids": written,
    }


def _built(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(settings.seed)
    if settings.model:
        return AutoModelForCausalLM.from_pretrained(hub.reachable(settings.model), dtype=torch.float32)
    return fresh_model(settings.vocabulary, settings.hidden, settings.layers or 1)


def fresh_model(vocabulary: int, hidden: int, layers: int) -> Any:
    """Build a Llama of SmolLM2-135M's shape: heads of 64, a third of them for keys and values, tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        initializer_range=1 / 24,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def _generate(model: Any, settings: Settings, device: torch.device) -> tuple[list[int], list[int]]:
    """Return the tokens that the trained model writes after the prompt, and the shape of its logits in evaluation mode."""
    import torch
    from tokenizers import Tokenizer

    model.eval()
    prompt = Tokenizer.from_file(settings.tokenizer_file).encode(PROMPT, add_special_tokens=False).ids
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        shape = list(model(input_ids=ids).logits.shape)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return written[0, len(prompt) :].tolist(), shape


def _common(settings: Settings, model: Any) -> dict[str, Any]:
    """Return what both runs share: settings, sizes, device, versions."""
    import torch

    head = model.get_output_embeddings().weight
    kept = {k: v for k, v in asdict(settings).items() if k not in ("cce", "tokens_file", "tokenizer_file")}
    found = machine.origin([], torch.device(str(settings.device)), "transformers")
    found["versions"]["hf_cce"] = hf_cce.__version__
    sizes = {
        "name": settings.model or "SmolLM2-shaped",
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.get_text_config().num_hidden_layers,
        "vocabulary": head.shape[0],
        "hidden": head.shape[1],
    }
    return {**found, "settings": kept, "model": sizes}
