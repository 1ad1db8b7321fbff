"""Search in this process for the largest batch that fits a size; ``benchmarks.fits`` starts it once per loss."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.installed import install
from benchmarks.job import Job, token_ids
from hf_cce.diagnostics.machine import GIB

CONTEXT = 1.0  # GiB that the allocator does not see: an H200's context and libraries took 0.6
ROWS = 32  # of text, repeated for larger batches
WARMUP = 6  # one-row steps before measuring, in which kernels compile and the filter measures its benefit


def search(job: Job, model: Any, out_of_memory: Callable[[BaseException], bool]) -> dict[str, Any]:
    """Return peaks in GiB by batch, and for each of ``job.gib`` the largest batch that fits (0: not even one row does)."""
    device = torch.device(job.device)
    done = install(model, job.loss)
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), fused=True)
    rows = torch.from_numpy(token_ids(replace(job, warmup=0, steps=1, batch=ROWS)))[0].to(device)
    seen: dict[int, float | None] = {}

    def steps(batch: int, count: int) -> None:
        ids = rows[torch.arange(batch, device=device) % ROWS]
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def peak(batch: int) -> float | None:
        if batch not in seen:
            torch.compiler.reset()  # after eight shapes Dynamo would fall back to eager, and the peaks would be eager's
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            try:
                steps(batch, 2)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                seen[batch] = None
            else:
                seen[batch] = torch.cuda.max_memory_reserved(device) / GIB
        return seen[batch]

    steps(1, WARMUP)
    fits: dict[str, int] = {}
    for size in sorted(job.gib):
        fits[f"{size:g}"] = _largest(size - CONTEXT, peak, seen)
    measured = {str(batch): seen[batch] for batch in sorted(seen)}
    return {"status": "ok", "installed": done, "fits": fits, "reserved_gib_by_batch": measured}


def _largest(limit: float, peak: Any, seen: dict[int, float | None]) -> int:
    """Return the largest batch whose ``peak`` is at most ``limit``; both it and the next batch are measured."""

    def below(batch: int) -> bool:
        found = peak(batch)
        return found is not None and found <= limit

    low, high = 0, None  # fits, does not fit
    guess = 1
    while high is None or high - low > 1:
        if below(guess):
            low = max(low, guess)
        else:
            high = guess if high is None else min(high, guess)
        known = sorted((b, p) for b, p in seen.items() if p is not None)
        if len(known) > 1:
            (a, at_a), (b, at_b) = known[0], known[-1]
            guess = int(a + (limit - at_a) * (b - a) / max(at_b - at_a, 1e-9))
        else:
            guess = 2 * guess
        guess = max(low + 1, min(guess, 2 * low + 2 if high is None else high - 1))
    return low
