"""What one run of benchmarks.steps is given, the tokens it trains on, and a clock on the device's own time line."""

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
    """One run. Everything but ``loss`` is the same for all losses that are compared."""

    loss: str
    model: str
    batch: int
    sequence: int
    steps: int
    warmup: int
    tokens_file: str
    entries: int  # of the tokenizer: every token id is below
    tokenizer_file: str = ""  # asked for by TRL
    loop: str = "plain"  # or "trainer", "sft", "recipe": see benchmarks.trainers
    recipe: str = ""  # flags of recipes/sft.py, with the loop "recipe"
    images: int = 0  # pixels of the side of a picture in each row, with the loop "recipe"
    ids: str = "rank"  # or "spread", see ``token_ids``
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    memory_limit: float | None = None  # GiB, of PyTorch's allocator; the CUDA context comes on top
    learning_rate: float = 1e-4
    seed: int = 0
    device: str = "cpu"
    state_file: str | None = None  # weights to start from; with ``write_state`` those to leave behind
    write_state: bool = False
    gib: tuple[float, ...] = ()  # sizes of GPUs to find the largest batch for, instead of timing: see benchmarks.fits


def token_ids(job: Job) -> np.ndarray:
    """[warmup + steps, batch, sequence] token ids of real text in the model's vocabulary.

    The local tokenizer has fewer entries than a large model's. "rank": its ids as they are, by frequency, as in any BPE; the
    rest of the vocabulary never occurs, as other languages would not. "spread": spaced out evenly, which leaves no
    stretch of the vocabulary unused, the worst case for a loss that skips such stretches.
    """
    ids = windows(job.tokens_file, (job.warmup + job.steps, job.batch), job.sequence, job.seed)
    vocabulary = SHAPES[job.model].vocabulary
    if job.entries > vocabulary:
        raise ValueError(f"a tokenizer of {job.entries} entries does not fit the model's vocabulary of {vocabulary}")
    return ids * vocabulary // job.entries if job.ids == "spread" else ids


class Marks:
    """Moments on the device's own time line, without making the host wait for it; on a CPU the host's clock."""

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
        """Between each mark and the next."""
        if self.device.type != "cuda":
            return [(b - a) * 1e3 for a, b in pairwise(self.marks)]
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in pairwise(self.marks)]
