"""Check the rule "never slower than full logits, never more memory, no larger error" on randomly drawn cases.

Errors are judged by the budget of tests/support/numerics.py, which allows for rounding.

    python -m benchmarks.never_slower --out benchmarks/results/never_slower.json [--cuda 160] [--cpu 24] [--seed 0] [--append]

A case is (tokens, hidden size, vocabulary, dtype, device, implementation, frozen head, reduction). With the reduction "none",
the losses of the tokens have different weights. Both losses run in turn in one process; times are medians of pairs. Errors are
those of the gradients, relative to float64 full logits; a row shows the gradient for which the fused loss compares worst.
``full_ms: null`` means that full logits ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy
from hf_cce.diagnostics.gradcheck import allowed_error

HIDDEN_SIZES = (576, 768, 896, 1024, 1536, 2048, 2560, 3072, 4096)
VOCAB_SIZES = (32_000, 32_001, 49_152, 50_257, 65_536, 128_256, 151_936, 200_019, 256_000, 262_144)
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float32 (TF32)": torch.float32,
}
# Limits on the floating-point operations of one case, so that all cases finish within minutes
MOST_WORK, MOST_WORK_FLOAT32, MOST_WORK_CPU = 3e13, 4e12, 1e11
SLOWER, SLOWER_MS, SLOWER_HALF_FALLBACK = 1.05, 0.1, 1.15


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    device: str
    implementation: str
    frozen: bool
    reduction: str

    @property
    def work(self) -> float:
        return 6.0 * self.tokens * self.hidden_size * self.vocab_size


def draw(device: str, count: int, seed: int) -> list[Case]:
    """Return ``count`` cases that cycle through dtypes, implementations, frozen heads and reductions, with random sizes."""
    rng = random.Random(f"{device} {seed}")
    cases: list[Case] = []
    dtypes = list(DTYPES) if device == "cuda" else ["float32", "bfloat16"]
    kinds = [
        (d, i, f, r) for r in ("mean", "none") for d in dtypes for i in ("auto", "portable") for f in (False, True)
    ]
    while len(cases) < count:
        dtype, implementation, frozen, reduction = kinds[len(cases) % len(kinds)]
        tokens = round(2 ** rng.uniform(7, 16 if device == "cuda" else 12))
        tokens = tokens if rng.random() < 0.2 else max(128, 128 * round(tokens / 128))
        sizes = (tokens, rng.choice(HIDDEN_SIZES), rng.choice(VOCAB_SIZES))
        case = Case(*sizes, dtype, device, implementation, frozen, reduction)
        most = MOST_WORK_FLOAT32 if dtype == "float32" else MOST_WORK
        if case.work <= (MOST_WORK_CPU if device == "cpu" else most):
            cases.append(case)
    return cases


def measure(case: Case, pairs: int) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = case.dtype.endswith("(TF32)")
    generator = torch.Generator(device=case.device).manual_seed(case.tokens + case.hidden_size + case.vocab_size)
    dtype, n, d, v = DTYPES[case.dtype], case.tokens, case.hidden_size, case.vocab_size
    hidden = torch.randn(n, d, device=case.device, generator=generator).to(dtype).requires_grad_()
    weight = (
        (0.02 * torch.randn(v, d, device=case.device, generator=generator)).to(dtype).requires_grad_(not case.frozen)
    )
    labels = torch.randint(v, (n,), device=case.device, generator=generator)
    weights = torch.ones(n, device=case.device) / n
    if case.reduction == "none":
        weights *= torch.linspace(0.5, 1.5, n, device=case.device)
    config, state = CCEConfig(implementation=case.implementation), FilterState()  # type: ignore[arg-type]
    kind: Any = case.reduction
    losses = {
        "full": lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction=kind),
        "ours": lambda: linear_cross_entropy(hidden, weight, labels, reduction=kind, config=config, filter_state=state),
    }
    weighed = weights if kind == "none" else None
    parameters = [hidden] if case.frozen else [hidden, weight]
    row: dict[str, Any] = asdict(case)
    gradients: dict[str, list[Tensor]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, loss in losses.items():
        steps[name] = lambda loss=loss: step(loss, parameters, weighed)  # type: ignore[misc]
        try:
            row[f"{name}_mib"] = peak_mib(steps[name], parameters, case.device)
            gradients[name] = [x.grad.clone() for x in parameters if x.grad is not None]
        except torch.OutOfMemoryError:
            row[f"{name}_mib"] = None
        clear(parameters)
    times = paired_times({name: steps[name] for name in gradients}, pairs, case.device)
    for name in losses:
        row[f"{name}_ms"] = statistics.median(times[name]) if name in times else None
    clear(parameters)
    if case.device == "cuda":
        torch.cuda.empty_cache()
    exact = reference(hidden.detach(), weight.detach(), labels, weights, case.frozen)
    errors = {name: [relative(x, y) for x, y in zip(found, exact, strict=True)] for name, found in gradients.items()}
    worst = range(len(exact))
    if "full" in errors and "ours" in errors:
        worst = [max(range(len(exact)), key=lambda i: errors["ours"][i] / max(errors["full"][i], 1e-30))]  # type: ignore[assignment]
    for name in losses:
        row[f"{name}_error"] = max(errors[name][i] for i in worst) if name in errors else None
    return row


def step(loss: Callable[[], Tensor], parameters: list[Tensor], weights: Tensor | None) -> None:
    clear(parameters)
    loss().backward(weights)


def clear(parameters: list[Tensor]) -> None:
    for x in parameters:
        x.grad = None


def peak_mib(run: Callable[[], None], parameters: list[Tensor], device: str) -> float | None:
    """Return the peak memory of the second step above the memory in use before it, gradients included; None on the CPU."""
    run()
    if device != "cuda":
        return None
    clear(parameters)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def paired_times(steps: dict[str, Callable[[], None]], pairs: int, device: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(pairs + 2):
        for name, run in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= 2:
                found[name].append((time.perf_counter() - began) * 1e3)
    return found


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, frozen: bool) -> list[Tensor]:
    """Return the gradients [N, D] and [V, D] of Σ weights · loss in float64, computed one block of tokens at a time."""
    weight64, n = weight.double(), len(labels)
    dh, dw = torch.empty(hidden.shape, dtype=torch.float64, device=hidden.device), torch.zeros_like(weight64)
    block = max(1, (1 << 29) // len(weight))
    for start in range(0, n, block):
        h, y = hidden[start : start + block].double(), labels[start : start + block]
        g = (h @ weight64.t()).softmax(1)
        g[torch.arange(len(y), device=g.device), y] -= 1
        g *= weights[start : start + block, None]
        dh[start : start + block] = g @ weight64
        if not frozen:
            dw.addmm_(g.t(), h)
        del g
    return [dh] if frozen else [dh, dw]


def relative(x: Tensor, exact: Tensor) -> float:
    """Return ‖x − exact‖ / ‖exact‖ in float64, computed one block of rows at a time."""
    parts = [(a.double() - b).square().sum() for a, b in zip(x.split(8192), exact.split(8192), strict=True)]
    return float((torch.stack(parts).sum() / exact.square().sum()).sqrt())


def misses(row: dict[str, Any]) -> list[str]:
    """Return the parts of the rule ("time", "memory", …) that a row breaks."""
    if row["full_ms"] is None:
        return []
    half_fallback = row["implementation"] == "portable" and row["dtype"].startswith(("bf", "float16"))
    most = SLOWER_HALF_FALLBACK if half_fallback and row["device"] == "cuda" else SLOWER
    found = []
    if row["ours_ms"] > max(most * row["full_ms"], row["full_ms"] + SLOWER_MS):
        found.append("time")
    if row["full_mib"] is not None and row["ours_mib"] > row["full_mib"]:
        found.append("memory")
    if row["ours_error"] > allowed_error(row["full_error"], DTYPES[row["dtype"]]):
        found.append("error")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuda", type=int, default=160, help="cases on the GPU")
    parser.add_argument("--cpu", type=int, default=24, help="cases on the CPU")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after that time")
    parser.add_argument(
        "--append", action="store_true", help="keep the rows of --out: a GPU and a CPU of two machines, say"
    )
    given = parser.parse_args()
    began = time.perf_counter()
    rows = json.loads(given.out.read_text("utf-8")) if given.append else []
    for case in draw("cuda", given.cuda, given.seed) + draw("cpu", given.cpu, given.seed):
        if time.perf_counter() - began > given.seconds:
            print("out of time", flush=True)
            break
        row = measure(case, given.pairs)
        rows.append(row)
        shown = {k: round(x, 7) if isinstance(x, float) else x for k, x in row.items()}
        print(*shown.values(), "MISSES " + ", ".join(misses(row)) if misses(row) else "", flush=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} rows, {sum(bool(misses(row)) for row in rows)} of them break the rule", flush=True)


if __name__ == "__main__":
    main()
