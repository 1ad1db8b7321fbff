"""The heads that losses are measured on: flat ones from random numbers, and trained ones.

A trained head comes from a small Llama that learns local text on the spot: its held-out hidden states, its classifier and
the tokens to predict have the peaked distribution that gradient filters live on, which random numbers have not.
"""

from __future__ import annotations

import gc
import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.bench import machine
from hf_cce.bench.files import whole_file
from hf_cce.bench.text import Corpus, Say, cache_folder, prepare
from hf_cce.bench.training import Settings, fresh_model

MAX_TOKENS = 32_768  # held-out tokens that a head keeps
FORMAT = 1  # raise it when a head trained by older code must not be taken from the cache
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class HeadSpec:
    """The shape of a model to train: vocabulary V, width D (a multiple of 64), layers."""

    vocabulary: int
    dim: int
    layers: int

    @property
    def characters(self) -> int:
        """How much text its tokenizer and its training need."""
        return max(4_000_000, 640 * self.vocabulary)


HEADS = {
    "V512": HeadSpec(512, 64, 2),  # for a quick look on a CPU
    "V49152": HeadSpec(49_152, 1024, 8),
    "V128256": HeadSpec(128_256, 768, 8),
}


@dataclass(frozen=True)
class Head:
    """What a trained model leaves, on the CPU, bfloat16.

    Args:
        hidden_states: [N, D], what goes into the head, of held-out text in the order of the text.
        weight: [V, D], the head, tied to the embeddings.
        labels: [N], int64, the tokens to predict.
        counts: [V], int64, how often each token is a label in the text it was trained on.
        about: how it was trained, ready for JSON; ``held_out_loss`` in nats per token.
        cached: whether it came from the cache.
    """

    hidden_states: Tensor
    weight: Tensor
    labels: Tensor
    counts: Tensor
    about: dict[str, Any]
    cached: bool = False


def flat_head(
    tokens: int, dim: int, vocabulary: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states [N, D], weight [V, D], labels [N] as at the start of pretraining: logits of standard deviation 0.02 √D."""
    g = torch.Generator(device=device).manual_seed(tokens + dim + vocabulary)
    hidden = torch.randn(tokens, dim, device=device, generator=g).to(dtype)
    weight = (0.02 * torch.randn(vocabulary, dim, device=device, generator=g)).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device, generator=g)


def train_head(
    spec: HeadSpec,
    *,
    seconds: float = 60.0,
    device: torch.device | str = "cuda",
    dataset: str | None = None,
    seed: int = 0,
    cache: Path | None = None,
    say: Say = lambda message: None,
) -> Head:
    """A trained head, from the cache or made now.

    Args:
        spec: the shape of the model.
        seconds: how long it is trained, counted from the first steps' end (they compile); tokenizer and text come on top.
        device: where it is trained, and part of the cache's key: the same seconds teach more on a faster device.
        dataset: text instead of Python's own sources: see ``hf_cce.bench.text.prepare``.
        seed: of weights and batches.
        cache: folder to keep heads, tokenizers and tokens in; default: the user's cache folder.
        say: told, in a few words, what is being done.

    Raises:
        ValueError: the text is too short to train on and to hold some out.
        RuntimeError: the training diverged.
    """
    device, seconds = torch.device(device), float(seconds)
    key = {
        **asdict(spec), "seconds": seconds, "seed": seed, "dataset": dataset, "format": FORMAT,
        "device": machine.device_name(device), "python": platform.python_version(),
    }  # fmt: skip
    digest = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    name = f"head-V{spec.vocabulary}-D{spec.dim}-L{spec.layers}-{seconds:g}s-{digest}.pt"
    path = (cache or cache_folder()) / name
    if path.is_file():
        say("taking the trained head from the cache")
        return Head(**torch.load(path, weights_only=True), cached=True)
    corpus = prepare(spec.vocabulary, dataset=dataset, characters=spec.characters, cache=cache, say=say)
    kept = _train(spec, corpus, seconds, device, seed, say)
    kept["about"] = {**key, **machine.versions("torch", "transformers", "tokenizers"), **kept["about"]}
    with whole_file(path) as temporary:
        torch.save(kept, temporary)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Head(**kept)


def _train(spec: HeadSpec, corpus: Corpus, seconds: float, device: torch.device, seed: int, say: Say) -> dict[str, Any]:
    batch, sequence = _batch(spec, device)
    tokens = torch.from_numpy(np.load(corpus.tokens_file))
    held_out = min(MAX_TOKENS + sequence, len(tokens) // 5) // sequence * sequence
    if not held_out:
        raise ValueError(
            f"the text ({corpus.source}) has only {len(tokens):,} tokens; to train a head on it and to hold a fifth out, "
            f"it needs at least {5 * sequence:,}"
        )
    learn, unseen = tokens[: -held_out - 1].to(device), tokens[-held_out - 1 :]
    torch.manual_seed(seed)
    files = str(corpus.tokens_file), str(corpus.tokenizer_file)
    model = fresh_model(Settings(*files, vocabulary=spec.vocabulary, hidden=spec.dim, layers=spec.layers)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type != "mps"
    )
    # Not by hf_cce's own loss: what is measured must not depend on what measures it.
    body: Callable[..., Any] = model.model
    loss_of: Callable[..., Tensor] = _loss
    if device.type == "cuda":
        body, loss_of = torch.compile(body, dynamic=False), torch.compile(_loss, dynamic=False)
    generator = np.random.default_rng(seed)
    offsets = torch.arange(sequence + 1)
    step, began, shown, spent, loss = 0, time.perf_counter(), 0.0, 0.0, torch.tensor(float("nan"))
    say("training: the first steps")
    while True:
        starts = torch.from_numpy(generator.integers(len(learn) - sequence, size=batch))
        ids = learn[(starts[:, None] + offsets).to(device)].long()
        done = min(1.0, spent / seconds)
        # Warmed up after 100 steps or a tenth of the time, whichever comes first; down to a twentieth at the end.
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
        if step == 3:  # compiled by now
            machine.synchronize(device)
            began = time.perf_counter()
        if step % 8 == 0:  # else the host would run ahead of a GPU, and train for longer than it was asked to
            machine.synchronize(device)
        spent = time.perf_counter() - began if step >= 3 else 0.0
        if spent - shown >= 1.0:
            shown = spent
            say(f"training: {spent:.0f} of {seconds:g} s, step {step}, loss {loss.item():.2f}")
        if spent >= seconds:
            break
    if not bool(loss.isfinite()):
        raise RuntimeError(f"the training of the head diverged: loss {loss.item()} after {step} steps")
    hidden_states, labels = _held_out(model, unseen, sequence, device)
    weight = model.lm_head.weight.detach().to("cpu", torch.bfloat16)
    about = {
        "source": corpus.source,
        "tokenizer_entries": corpus.entries,
        "steps": step,
        "tokens_trained": step * batch * sequence,
        "train_loss": loss.item(),
        "held_out_tokens": len(labels),
        "held_out_loss": _mean_loss(hidden_states, weight, labels, device),
    }
    counts = torch.bincount(learn[1:].cpu().long(), minlength=spec.vocabulary)
    return {"hidden_states": hidden_states, "weight": weight, "labels": labels, "counts": counts, "about": about}


def _batch(spec: HeadSpec, device: torch.device) -> tuple[int, int]:
    """(sequences a step, tokens a sequence): as many as the logits of a step leave room for."""
    if device.type != "cuda":
        return 8, 128
    size = torch.cuda.get_device_properties(device).total_memory
    logits = 1024 * spec.vocabulary * 8  # bytes of a sequence's logits: bfloat16, float32, gradient
    return max(1, min(32, int(size * 0.3 / logits))), 1024


def _loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden_states @ weight.t()).float(), labels)


@torch.no_grad()
def _held_out(model: Any, tokens: Tensor, sequence: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states [N, D] before the head, and labels [N], of text that the model has not seen."""
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
    """Nats per token of the head as it is kept, in bfloat16."""
    weight, total = weight.to(device), 0.0
    for h, t in zip(hidden_states.split(1024), labels.split(1024), strict=True):
        total += F.cross_entropy((h.to(device) @ weight.t()).float(), t.to(device), reduction="sum").item()
    return total / len(labels)
