"""``hf-cce demo``: train the same small model twice from one seed, without and with CCE.

The two runs alternate step by step in one process, so that other load on the machine slows both. The model is a Llama of
SmolLM2's shape with fresh weights; the text is source code of Python's standard library.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_cce import apply_cce
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.machine import Progress
from hf_cce.diagnostics.notebook import Measured, Setup
from hf_cce.diagnostics.shapes import config_of, smollm2_like

CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of both runs. None: a default that suits the device, see ``resolved``."""

    device: str
    vocabulary: int = 49_152
    hidden: int = 576
    layers: int | None = None
    steps: int | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None  # of autocast; the weights stay float32, as under Trainer's bf16=True

    def resolved(self) -> Settings:
        """Return the settings with each None replaced by a default for the device and its memory size."""
        device = torch.device(self.device)
        suited: dict[str, Any] = {"layers": 2, "steps": 16, "batch": 4, "sequence": 512}
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).total_memory >> 30
            batch, sequence = (8, 2048) if size >= 60 else (4, 1024) if size >= 14 else (2, 512)
            suited = {"layers": 30, "steps": 100, "batch": batch, "sequence": sequence}
        suited["dtype"] = machine.dtype_name(machine.default_dtype(device))
        return replace(self, **{name: value for name, value in suited.items() if getattr(self, name) is None})


def text_tokens(vocabulary: int) -> tuple[Tensor, int]:
    """Return source code as token ids, and the size of a byte-level BPE tokenizer trained on it, at most ``vocabulary``."""
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(p for p in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in p.parts)
    random.Random(0).shuffle(files)
    documents: list[str] = []
    while files and sum(map(len, documents)) < CHARACTERS:
        documents.append(files.pop().read_text("utf-8", errors="ignore"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=vocabulary, show_progress=False)
    ids = [i for encoding in tokenizer.encode_batch(documents) for i in encoding.ids]
    return torch.tensor(ids), tokenizer.get_vocab_size()


class Run:
    """One of the two training runs: a fresh model, its optimizer, and the measurements of its steps."""

    def __init__(self, settings: Settings, cce: bool) -> None:
        from transformers import LlamaForCausalLM

        self.setup = Setup(torch.device(settings.device), getattr(torch, str(settings.dtype)))
        torch.manual_seed(0)
        shape = smollm2_like(settings.vocabulary, settings.hidden, settings.layers or 1)
        model: Any = LlamaForCausalLM(config_of(shape))
        self.model = model.to(self.setup.device).train()
        if cce:
            apply_cce(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, betas=(0.9, 0.95), fused=True)
        self.scaler = self.setup.scaler()
        self.losses: list[float] = []
        self.measured = Measured(self.setup.device)

    def step(self, rows: Tensor) -> None:
        """Train on ``rows`` [batch, sequence]."""
        rows = rows.to(self.setup.device)
        if len(self.losses) == 1:  # discard the first step, a warm-up that created the optimizer state
            self.measured = Measured(self.setup.device)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (len(self.losses) + 1) / 5)
        with self.measured.step():
            with self.setup.autocast():
                loss = self.model(input_ids=rows, labels=rows).loss
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())

    @torch.no_grad()
    def report(self, rows: Tensor) -> dict[str, Any]:
        logits = self.model.eval()(input_ids=rows[:1].to(self.setup.device)).logits
        return {
            "losses": self.losses,
            "step_seconds": self.measured.seconds,
            "median_seconds": statistics.median(self.measured.seconds),
            "step_bytes": self.measured.extra,
            "eval_logits_shape": list(logits.shape),
        }


def train_both(settings: Settings, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Train without and with CCE, taking turns, and return a JSON-ready report.

    In "plain" and "cce", "step_bytes" is the memory that a step adds to weights and optimizer state, None if unknown.
    """
    began, settings = time.perf_counter(), settings.resolved()
    assert settings.steps and settings.batch and settings.sequence
    progress("tokenizing Python source code")
    tokens, entries = text_tokens(settings.vocabulary)
    if (room := len(tokens) - settings.sequence) <= 0:
        raise ValueError(f"the text has only {len(tokens)} tokens, too few for sequences of {settings.sequence}")
    starts = torch.randint(room, (settings.steps, settings.batch, 1), generator=torch.Generator().manual_seed(0))
    batches = tokens[starts + torch.arange(settings.sequence)]
    plain, fused = Run(settings, cce=False), Run(settings, cce=True)
    for step, rows in enumerate(batches, 1):
        plain.step(rows)
        fused.step(rows)
        progress(
            f"step {step} of {settings.steps}: loss {plain.losses[-1]:.4f} without hf_cce, {fused.losses[-1]:.4f} with hf_cce"
        )
    report = machine.report_header(plain.setup.device, "transformers") | {"settings": asdict(settings)}
    report["data"] = {"tokens": len(tokens), "tokenizer_entries": entries}
    report["parameters"] = plain.model.num_parameters()
    report |= {"plain": plain.report(batches[0]), "cce": fused.report(batches[0])}
    report["largest_difference"] = max(abs(a - b) for a, b in zip(plain.losses, fused.losses, strict=True))
    return report | {"seconds": time.perf_counter() - began}
