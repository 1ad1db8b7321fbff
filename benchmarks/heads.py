"""Trained heads: hidden states, classifier weight and labels of a small Llama trained on local text.

Gradient filters depend on peaked distributions, which random data lacks. A head is trained once and then stored in the user's
cache folder.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.files import whole_file
from benchmarks.text import Corpus, cache_folder, prepare
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.bench import full_logits
from hf_cce.diagnostics.machine import Progress
from hf_cce.diagnostics.shapes import config_of, smollm2_like

MAX_TOKENS = 32_768  # held-out tokens stored with a head
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class HeadSpec:
    """Shape of a model to train: vocabulary V, hidden size D (a multiple of 64), layers."""

    vocabulary: int
    dim: int
    layers: int


HEADS = {
    "V512": HeadSpec(512, 64, 2),  # for quick runs on a CPU
    "V49152": HeadSpec(49_152, 1024, 8),
    "V128256": HeadSpec(128_256, 768, 8),
}


@dataclass(frozen=True)
class Head:
    """Held-out hidden states, weight and labels of a trained model, in bfloat16 on the CPU.

    Args:
        hidden_states: [N, D], input of the head for held-out text.
        weight: [V, D], the head, tied to the embeddings.
        labels: [N], int64, the tokens to predict.
        about: how it was trained, as JSON-serializable values; ``held_out_loss`` in nats per token.
        cached: True if it came from the cache.
    """

    hidden_states: Tensor
    weight: Tensor
    labels: Tensor
    about: dict[str, Any]
    cached: bool = False


def train_head(
    spec: HeadSpec,
    seconds: float,
    device: torch.device,
    *,
    dataset: str | None = None,
    cache: Path | None = None,
    progress: Progress = lambda message: None,
) -> Head:
    """Return a trained head, from the cache or newly trained.

    Args:
        spec: shape of the model.
        seconds: training time, counted after the first steps, which compile.
        device: where to train; part of the cache key, because a faster device learns more in the same time.
        dataset: text file or folder to use instead of Python's own sources.
        cache: folder for heads, tokenizers and tokens.
        progress: called with progress messages.

    Raises:
        ValueError: the text is too short to train on and to hold some out.
        RuntimeError: the training diverged.
    """
    key = {
        **asdict(spec), "seconds": float(seconds), "dataset": dataset, "device": machine.device_name(device),
        "python": platform.python_version(),
    }  # fmt: skip
    digest = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    path = (cache or cache_folder()) / f"head-V{spec.vocabulary}-D{spec.dim}-L{spec.layers}-{digest}.pt"
    if path.is_file():
        progress("taking the trained head from the cache")
        return Head(**torch.load(path, weights_only=True), cached=True)
    characters = max(4_000_000, 640 * spec.vocabulary)
    corpus = prepare(spec.vocabulary, dataset=dataset, characters=characters, cache=cache, progress=progress)
    kept = _trained(spec, corpus, seconds, device, progress)
    kept["about"] = {**key, **machine.versions("torch", "transformers", "tokenizers"), **kept["about"]}
    with whole_file(path) as temporary:
        torch.save(kept, temporary)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Head(**kept)


def _trained(
    spec: HeadSpec, corpus: Corpus, seconds: float, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Train a model and return the arguments of ``Head``."""
    batch, sequence = _batch(spec, device)
    tokens = torch.from_numpy(np.load(corpus.tokens_file))
    held_out = min(MAX_TOKENS + sequence, len(tokens) // 5) // sequence * sequence
    if not held_out:
        raise ValueError(
            f"the text ({corpus.source}) has only {len(tokens):,} tokens; to train a head on it and to hold a fifth out, "
            f"it needs at least {5 * sequence:,}"
        )
    learn, unseen = tokens[: -held_out - 1].to(device), tokens[-held_out - 1 :]
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM

    shape = smollm2_like(spec.vocabulary, spec.dim, spec.layers)
    model: Any = LlamaForCausalLM(config_of(shape))
    model = model.to(device)
    steps, loss = _learn(model, learn, (batch, sequence), seconds, progress)
    hidden_states, labels = _held_out(model, unseen, sequence, device)
    weight = model.lm_head.weight.detach().to("cpu", torch.bfloat16)
    about = {
        "source": corpus.source,
        "tokenizer_entries": corpus.entries,
        "steps": steps,
        "tokens_trained": steps * batch * sequence,
        "train_loss": loss,
        "held_out_tokens": len(labels),
        "held_out_loss": _mean_loss(hidden_states, weight, labels, device),
    }
    return {"hidden_states": hidden_states, "weight": weight, "labels": labels, "about": about}


def _learn(model: Any, tokens: Tensor, shape: tuple[int, int], seconds: float, progress: Progress) -> tuple[int, float]:
    """Train for ``seconds`` and return (steps, loss). Uses full logits, so that heads do not depend on the losses under test."""
    device, (batch, sequence) = tokens.device, shape
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type != "mps"
    )
    body: Callable[..., Any] = model.model
    loss_of: Callable[..., Tensor] = full_logits
    if device.type == "cuda":
        body, loss_of = torch.compile(body, dynamic=False), torch.compile(full_logits, dynamic=False)
    generator = np.random.default_rng(0)
    offsets = torch.arange(sequence + 1)
    step, began, shown, spent = 0, time.perf_counter(), 0.0, 0.0
    progress("training: the first steps")
    while True:
        starts = torch.from_numpy(generator.integers(len(tokens) - sequence, size=batch))
        ids = tokens[(starts[:, None] + offsets).to(device)].long()
        done = min(1.0, spent / seconds)
        # Warm up over 100 steps or a tenth of the time, whichever is shorter; decay to a twentieth at the end.
        rate = LEARNING_RATE * min(1.0, max((step + 1) / 100, 10 * done)) * max(0.05, 1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16):
            hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            loss = loss_of(hidden.flatten(0, 1).bfloat16(), model.lm_head.weight.bfloat16(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 3:  # compilation is done
            machine.synchronize(device)
            began = time.perf_counter()
        if step % 8 == 0:  # otherwise the host runs ahead of the GPU and trains for longer
            machine.synchronize(device)
        spent = time.perf_counter() - began if step >= 3 else 0.0
        if spent - shown >= 1.0:
            shown = spent
            progress(f"training: {spent:.0f} of {seconds:g} s, step {step}, loss {loss.item():.2f}")
        if spent >= seconds:
            break
    if not bool(loss.isfinite()):
        raise RuntimeError(f"the training of the head diverged: loss {loss.item()} after {step} steps")
    return step, loss.item()


def _batch(spec: HeadSpec, device: torch.device) -> tuple[int, int]:
    """Return (sequences per step, tokens per sequence) whose logits fit into memory."""
    if device.type != "cuda":
        return 8, 128
    size = torch.cuda.get_device_properties(device).total_memory
    logits = 1024 * spec.vocabulary * 8  # bytes of one sequence's logits: bfloat16, float32, gradient
    return max(1, min(32, int(size * 0.3 / logits))), 1024


@torch.no_grad()
def _held_out(model: Any, tokens: Tensor, sequence: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, D] before the head and labels [N] of held-out text."""
    model.eval()
    hidden_states, labels = [], []
    for start in range(0, len(tokens) - sequence, sequence):
        ids = tokens[start : start + sequence + 1].to(device, torch.long)[None]
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        hidden_states.append(hidden[0].to("cpu", torch.bfloat16))
        labels.append(ids[0, 1:].cpu())
    return torch.cat(hidden_states)[:MAX_TOKENS], torch.cat(labels)[:MAX_TOKENS]


@torch.no_grad()
def _mean_loss(hidden_states: Tensor, weight: Tensor, labels: Tensor, device: torch.device) -> float:
    weight, total = weight.to(device), 0.0
    for h, t in zip(hidden_states.split(1024), labels.split(1024), strict=True):
        total += full_logits(h.to(device), weight, t.to(device)).item() * len(t)
    return total / len(labels)
