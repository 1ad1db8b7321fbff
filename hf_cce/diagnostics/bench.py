"""``hf-cce bench``: compare time and memory of the loss with full logits, on random data, in one process.

``benchmarks/`` measures trained heads and other libraries with the same functions.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.gradcheck import Inputs
from hf_cce.diagnostics.machine import Progress, dtype_name
from hf_cce.dispatch import explain_dispatch

MIB = 1 << 20
Shape = tuple[int, int, int]  # N, D, V
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_states [N, D], weight [V, D], labels [N]) -> mean loss
Key = TypeVar("Key", bound=Hashable)
WARM_UP = 6  # steps after which a gradient filter has found its threshold
GPU_SHAPES: tuple[Shape, ...] = ((8192, 1024, 49_152), (4096, 4096, 128_256), (8192, 896, 151_936), (512, 896, 151_936))
CPU_SHAPES: tuple[Shape, ...] = ((128, 256, 8192), (512, 256, 8192), (512, 256, 16_384))


def random_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw inputs as at the start of pretraining: logits have standard deviation 0.02 √D."""
    n, d, v = shape
    g = torch.Generator(device=device).manual_seed(n + d + v)
    hidden = torch.randn(n, d, device=device, generator=g).to(dtype)
    weight = (0.02 * torch.randn(v, d, device=device, generator=g)).to(dtype)
    return Inputs(hidden, weight, torch.randint(v, (n,), device=device, generator=g))


def full_logits(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss as Transformers does: logits in the model's dtype, upcast, cross-entropy."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


def build_losses(device: torch.device, memory_budget: int | None) -> dict[str, Loss]:
    """Return the losses to measure: hf_cce, full logits and, on a GPU, compiled full logits (on a CPU that takes minutes)."""

    def hf_cce(gradient_filter: Any) -> Loss:
        config = CCEConfig(memory_budget=memory_budget or "auto", gradient_filter=gradient_filter)
        return partial(linear_cross_entropy, config=config, filter_state=FilterState())

    losses = {"hf_cce": hf_cce("auto"), "hf_cce exact": hf_cce(None), "full logits": full_logits}
    return losses | ({"torch.compile": torch.compile(full_logits, dynamic=False)} if device.type == "cuda" else {})


def time_interleaved(
    functions: Mapping[Key, Callable[[], Any]], device: torch.device, repeats: int, progress: Progress
) -> dict[Key, list[float]]:
    """Return the milliseconds of each call. The functions take turns, because clock rates fall while a chip warms up.

    On a GPU this is device time, without the time to launch kernels, which training hides, too. Elsewhere it is wall time.
    """
    taken: dict[Key, list[Any]] = {key: [] for key in functions}
    for turn in range(repeats):
        progress(f"timing, round {turn + 1} of {repeats}")
        for key, function in functions.items():
            if device.type == "cuda":
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(24_000_000)  # about 12 ms: a busy host takes several ms to launch a step
                start.record()
                function()
                stop.record()
                taken[key].append((start, stop))
                continue
            machine.synchronize(device)
            began = time.perf_counter()
            function()
            machine.synchronize(device)
            taken[key].append((time.perf_counter() - began) * 1e3)
    if device.type != "cuda":
        return taken
    torch.cuda.synchronize(device)
    return {key: [start.elapsed_time(stop) for start, stop in events] for key, events in taken.items()}


def extra_mib(step: Callable[[], Any], leaves: Iterable[Tensor]) -> float | None:
    """Return the peak of ``step`` in MiB above the memory in use and the gradients of ``leaves``, None if unknown."""
    leaves = list(leaves)
    added = machine.watch_memory(leaves[0].device)
    step()
    machine.synchronize(leaves[0].device)
    extra = added()
    if extra is None:
        return None
    return max(0, extra - sum(x.grad.nbytes for x in leaves if x.grad is not None)) / MIB


def measure(problem: Inputs, losses: dict[str, Loss], repeats: int, progress: Progress) -> dict[str, dict[str, Any]]:
    """Measure forward and backward of all losses, taking turns. "ms" is the median, "ms_spread" is (least, most)."""
    hidden, weight = (x.detach().requires_grad_() for x in (problem.hidden, problem.weight))

    def step(loss: Loss) -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, problem.labels).backward()

    rows: dict[str, dict[str, Any]] = {}
    for name, loss in losses.items():
        progress(f"{name}: warm-up and memory")
        gc.collect()  # garbage of the loss before must not be freed, or counted, during this one
        try:
            for _ in range(WARM_UP):
                step(loss)
            hidden.grad = weight.grad = None
            rows[name] = {"extra_mib": extra_mib(partial(step, loss), (hidden, weight))}
        except Exception as error:  # a compiler may raise anything; the other losses are still measured
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    steps = {name: partial(step, losses[name]) for name, row in rows.items() if "failed" not in row}
    for name, times in time_interleaved(steps, hidden.device, repeats, progress).items():
        rows[name] |= {"ms": statistics.median(times), "ms_spread": [min(times), max(times)]}
    return rows


def bench(
    shapes: tuple[Shape, ...], device: torch.device, dtype: torch.dtype, memory_budget: int | None, progress: Progress
) -> dict[str, Any]:
    """Measure all losses on random data of each shape, by default shapes that suit the device; return a JSON-ready report."""
    gpu = device.type == "cuda"
    report = machine.report_header(device) | {"dtype": dtype_name(dtype), "results": {}}
    if gpu:
        torch.cuda.set_device(device.index or 0)
        report["gpu"] = machine.gpu_facts(device)
    for n, d, v in shapes or (GPU_SHAPES if gpu else CPU_SHAPES):
        title = f"{n:,} tokens, hidden size {d:,}, vocabulary {v:,}"
        progress(title)
        rows = measure(
            random_problem((n, d, v), device, dtype), build_losses(device, memory_budget), 10 if gpu else 5, progress
        )
        found = explain_dispatch(n, d, v, dtype, device)
        report["results"][title] = {"strategy": found.strategy, "implementation": found.implementation, "rows": rows}
        torch.compiler.reset()  # each problem compiles anew; otherwise Dynamo's recompile limit is reached
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown: device and versions, and one table per problem."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    lines = [
        f"{report['device']}, {report['dtype']}; {versions}.",
        "",
        "Memory is the peak without inputs and gradients.",
    ]
    for title, result in report["results"].items():
        lines += ["", f"### {title}", "", f"Strategy: {result['strategy']}, {result['implementation']}", ""]
        lines += ["| loss | forward + backward | memory |", "|---|---|---|"]
        for name, row in result["rows"].items():
            if "failed" in row:
                lines.append(f"| {name} | failed: {row['failed']} |")
                continue
            memory = "–" if row["extra_mib"] is None else f"{row['extra_mib']:,.0f} MiB"
            lines.append(f"| {name} | {row['ms']:.2f} ms | {memory} |")
    return "\n".join(lines) + "\n"
