"""Run training steps of one model with one loss in this process; ``benchmarks.steps`` starts it once per loss.

usage: python -m benchmarks.onestep JOB.json RESULT.json
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.installed import Missing, install
from benchmarks.job import Job, Marks, token_ids
from benchmarks.largest import search
from benchmarks.trainers import run_recipe, train
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.machine import GIB
from hf_cce.diagnostics.shapes import SHAPES, config_of

PARTS = ("forward", "backward", "optimizer")


def build(job: Job, dtype: torch.dtype) -> Any:
    """Return the model in training mode, with weights from the seed or from the state file."""
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    set_seed(job.seed)
    with torch.device(job.device):
        config = config_of(SHAPES[job.model], job.sequence)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=job.attention, dtype=dtype)
    model.to(job.device)
    if job.state_file and not job.write_state:
        # Load on the CPU: a second copy of the weights on the device would count as memory reserved by the allocator.
        model.load_state_dict(torch.load(job.state_file, map_location="cpu", weights_only=True))
    if job.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def pretrain(job: Job) -> dict[str, Any]:
    """Train ``job.steps`` steps with Transformers' own loss, fp32 weights and bf16 autocast; write bf16 weights."""
    assert job.state_file and job.write_state
    model = build(job, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), fused=True)
    rising = max(1, min(100, job.steps // 10))
    losses = []
    start = time.perf_counter()
    for step, rows in enumerate(torch.from_numpy(token_ids(job)).to(job.device)):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * min(1.0, (step + 1) / rising)
        with torch.autocast(torch.device(job.device).type, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    torch.save(model.to(torch.bfloat16).state_dict(), job.state_file)
    return {"status": "ok", "losses": values, "seconds": time.perf_counter() - start}


def out_of_memory(error: BaseException) -> bool:
    """Return True for out-of-memory errors, including those raised by libraries that PyTorch calls."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(re.search(r"out of memory|ALLOC_FAILED", str(error)))
    )


def measure(job: Job) -> dict[str, Any]:
    """Warm up, then time ``job.steps`` steps. Running out of memory is a valid result.

    Returns:
        "status": "ok", or "oom" with "phase", "step" (from 1, warm-up included) and "message"; the losses so far (nats per
        token); "ms" and its parts (medians of the timed steps); memory in GiB: "peak_gib" in the timed steps, "peak_ever_gib"
        and "reserved_gib" (reserved by the allocator) since the process started.
    """
    device = torch.device(job.device)
    limit(job, device)
    losses: list[Any] = []
    result: dict[str, Any] = {"status": "ok"}
    at = {"phase": "build", "step": 0}
    start = time.perf_counter()
    try:
        model = None if job.loop == "recipe" else build(job, torch.bfloat16)
        if model is not None:
            result["parameters"] = sum(p.numel() for p in model.parameters())

        def before_timing() -> None:
            memory_so_far(result, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            result["first_steps_s"] = time.perf_counter() - start  # includes building, compiling and tuning

        if job.loop == "recipe":
            at["phase"] = "training"
            milliseconds, losses[:], result["installed"] = run_recipe(job, before_timing)
            result.update(timed(job, milliseconds, 1))
        elif job.loop == "plain":
            result.update(_plain_loop(job, model, losses, at, before_timing, result))
        else:
            at["phase"] = "training"
            milliseconds, losses[:], result["installed"] = train(job, model, before_timing)
            result.update(timed(job, milliseconds, 1))
    except Exception as error:
        if not out_of_memory(error):
            raise
        result.update(status="oom", message=str(error)[:600], **at)
        if asked := re.search(r"Tried to allocate ([\d.]+ \w+)", str(error)):
            result["asked"] = asked[1]
    memory_so_far(result, device)
    gc.collect()
    result["losses"] = [float(loss) for loss in losses]
    result["seconds"] = time.perf_counter() - start
    return result


def _plain_loop(
    job: Job, model: Any, losses: list[Any], at: dict[str, Any], before_timing: Any, result: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of a loop without a trainer; ``losses`` and ``at`` stay current for the caller if a step raises."""
    device = torch.device(job.device)
    marks = Marks(device)
    result["installed"] = install(model, job.loss)
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), fused=True)
    batches = torch.from_numpy(token_ids(job)).to(device)
    for step, rows in enumerate(batches):
        if step == job.warmup:
            before_timing()
            marks.mark()
        at.update(phase="forward", step=step + 1)
        loss = model(input_ids=rows, labels=rows).loss
        if step >= job.warmup:
            marks.mark()
        at["phase"] = "backward"
        loss.backward()
        if step >= job.warmup:
            marks.mark()
        at["phase"] = "optimizer"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= job.warmup:
            marks.mark()
        losses.append(loss.detach())
    return timed(job, marks.milliseconds(), len(PARTS))


def timed(job: Job, milliseconds: list[float], parts: int) -> dict[str, Any]:
    """Return the figures of the timed steps from ``parts`` spans per step, with medians of each part if there are several."""
    spans = np.array(milliseconds).reshape(job.steps, parts)
    steps = spans.sum(1).tolist()
    median = statistics.median(steps)
    medians = {f"{part}_ms": statistics.median(spans[:, i].tolist()) for i, part in enumerate(PARTS) if parts > 1}
    return {
        "ms": median,
        "ms_spread": [min(steps), max(steps)],
        "step_ms": steps,
        **medians,
        "tokens_per_second": job.batch * job.sequence / median * 1e3,
    }


def memory_so_far(result: dict[str, Any], device: torch.device) -> None:
    """Write the peaks so far, in GiB, into ``result``. On a CPU they are the whole process's, and nothing is reserved."""
    result["peak_gib"] = machine.peak_memory(device) / GIB
    result["peak_ever_gib"] = max(result["peak_gib"], result.get("peak_ever_gib", 0.0))
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        result["reserved_gib"] = max(reserved, result.get("reserved_gib", 0.0))


def limit(job: Job, device: torch.device) -> None:
    """Limit PyTorch's allocator to ``job.memory_limit`` GiB."""
    if job.memory_limit is None:
        return
    if device.type != "cuda":
        raise ValueError(f"--memory-limit needs a CUDA device, got {device}")
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    if not 0 < job.memory_limit <= total:
        raise ValueError(f"--memory-limit must be above 0 and at most {total:.1f} GiB, got {job.memory_limit}")
    torch.cuda.set_per_process_memory_fraction(job.memory_limit / total, device.index or 0)


def run(job: Job) -> dict[str, Any]:
    """Run ``pretrain``, ``measure`` or ``search`` and add the device's name; errors become the status "missing" or "failed"."""
    try:
        if job.gib:
            result = search(job, build(job, torch.bfloat16), out_of_memory)
        else:
            result = pretrain(job) if job.write_state else measure(job)
    except Missing as reason:
        result = {"status": "missing", "message": str(reason)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        result = {"status": "failed", "message": f"{type(error).__name__}: {str(error)[:600]}"}
    device = torch.device(job.device)
    result["device"] = machine.device_name(device)
    if device.type == "cuda":
        result["device_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
    return result


def main(arguments: list[str]) -> int:
    job = Job(**json.loads(Path(arguments[0]).read_text("utf-8")))
    Path(arguments[1]).write_text(json.dumps(run(job)), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
