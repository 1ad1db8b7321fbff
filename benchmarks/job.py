"""The description of one run of benchmarks.steps, the tokens it trains on, and a device-side clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.text import windows
from hf_cce.diagnostics.shapes import SHAPES


@dataclass(frozen=True)
class Job:
    """One run. All compared losses share every field but ``loss``."""

    loss: str
    model: str
    batch: int
    sequence: int
    steps: int
    warmup: int
    tokens_file: str
    entries: int  # of the tokenizer: an upper bound of the token ids
    tokenizer_file: str = ""  # needed by TRL
    loop: str = "plain"  # or "trainer", "sft", "recipe": see benchmarks.trainers
    recipe: str = ""  # flags for recipes/sft.py, with the loop "recipe"
    images: int = 0  # side in pixels of the image in each row, with the loop "recipe"
    ids: str = "rank"  # or "spread", see ``token_ids``
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    memory_limit: float | None = None  # GiB that PyTorch's allocator may use; the CUDA context is extra
    learning_rate: float = 1e-4
    seed: int = 0
    device: str = "cpu"
    state_file: str | None = None  # initial weights; with ``write_state``, where to write the final ones
    write_state: bool = False
    gib: tuple[float, ...] = ()  # GPU sizes to find the largest batch for, instead of timing: see benchmarks.fits


def token_ids(job: Job) -> np.ndarray:
    """Return [warmup + steps, batch, sequence] token ids of real text in the model's vocabulary.

    The local tokenizer has fewer entries than a large model's. "rank" uses its ids unchanged, sorted by frequency as in any BPE;
    the rest of the vocabulary never occurs, like the entries of other languages. "spread" spaces the ids out evenly, so that no
    stretch of the vocabulary is unused. This is the worst case for a loss that skips unused stretches.
    """
    ids = windows(job.tokens_file, (job.warmup + job.steps, job.batch), job.sequence, job.seed)
    vocabulary = SHAPES[job.model].vocabulary
    if job.entries > vocabulary:
        raise ValueError(f"a tokenizer of {job.entries} entries does not fit the model's vocabulary of {vocabulary}")
    return ids * vocabulary // job.entries if job.ids == "spread" else ids


class Marks:
    """Time stamps taken with CUDA events, without synchronizing the host; on a CPU, with the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        """Return the milliseconds between consecutive marks."""
        if self.device.type != "cuda":
            return [(b - a) * 1e3 for a, b in pairwise(self.marks)]
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in pairwise(self.marks)]
