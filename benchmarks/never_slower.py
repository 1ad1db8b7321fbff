"""Check the rule "never slower than full logits, never more memory, no larger error" on randomly drawn cases.

Errors are judged by the budget of tests/support/numerics.py, which allows for rounding.

    python -m benchmarks.never_slower --out benchmarks/results/never_slower.json [--cuda 272] [--cpu 68] [--seed 0] [--append]

A case is (tokens, hidden size, vocabulary, dtype, device, implementation, frozen head, loss). The losses are those of ``LOSSES``;
with "none", the losses of the tokens have different weights, and "eval" needs no gradients. Both implementations of a loss run in
turn in one process; times are medians of pairs. Errors are those of the gradients (of the loss itself in "eval"), relative to
float64 full logits; a row shows the gradient for which the fused loss compares worst. ``full_ms: null`` means that full logits
ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, TeacherHead, TeacherTopK, linear_cross_entropy, linear_divergence
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
MORE_MIB = 0.1  # vectors of tokens, which the allocator rounds to 512 bytes each
# The options of ``linear_cross_entropy``, or of ``linear_divergence`` with a teacher of TEACHER_SIZE
LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "eval": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 30.0},
    "bias": {},
    "forward_kl": {"kind": "forward_kl"},
    "jsd": {"kind": "jsd"},
    "top_k": {"kind": "forward_kl"},
}
TEACHER_SIZE, TOP_K = 2048, 32


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    device: str
    implementation: str
    frozen: bool
    loss: str

    @property
    def work(self) -> float:
        return 6.0 * self.tokens * self.hidden_size * self.vocab_size

    @property
    def distils(self) -> bool:
        return "kind" in LOSSES[self.loss]


def draw(device: str, count: int, seed: int) -> list[Case]:
    """Return ``count`` cases that cycle through losses, dtypes, implementations and frozen heads, with random sizes."""
    rng = random.Random(f"{device} {seed}")
    cases: list[Case] = []
    dtypes = list(DTYPES) if device == "cuda" else ["float32", "bfloat16"]
    kinds = [
        (d, i, f, loss)
        for loss in LOSSES
        for d in dtypes
        for i in ("auto", "portable")
        for f in (False, True)
        if not (loss == "eval" and f)
    ]
    while len(cases) < count:
        dtype, implementation, frozen, loss = kinds[len(cases) % len(kinds)]
        tokens = round(2 ** rng.uniform(7, 16 if device == "cuda" else 12))
        tokens = tokens if rng.random() < 0.2 else max(128, 128 * round(tokens / 128))
        sizes = (tokens, rng.choice(HIDDEN_SIZES), rng.choice(VOCAB_SIZES))
        case = Case(*sizes, dtype, device, implementation, frozen, loss)
        most = MOST_WORK_FLOAT32 if dtype == "float32" else MOST_WORK
        if case.work <= (MOST_WORK_CPU if device == "cpu" else most):
            cases.append(case)
    return cases


class Problem(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    upstream: Tensor  # [N], weights of the tokens
    teacher: TeacherHead | TeacherTopK | None

    @property
    def parameters(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Problem:
        """Return some tokens, in another dtype."""
        hidden, weight, bias, labels, upstream, teacher = self
        tokens = slice(start, stop)
        if isinstance(teacher, TeacherHead):
            teacher = TeacherHead(teacher.hidden_states[tokens].to(dtype), teacher.weight.to(dtype))
        elif teacher is not None:
            teacher = teacher._replace(ids=teacher.ids[tokens], log_probs=teacher.log_probs[tokens].to(dtype))
        cast = [None if x is None else x.detach().to(dtype) for x in (hidden[tokens], weight, bias)]
        return Problem(*cast, labels[tokens], upstream[tokens], teacher)  # type: ignore[arg-type, call-arg]


def make_problem(case: Case) -> Problem:
    generator = torch.Generator(device=case.device).manual_seed(case.tokens + case.hidden_size + case.vocab_size)
    dtype, n, d, v = DTYPES[case.dtype], case.tokens, case.hidden_size, case.vocab_size

    def random(*shape: int, by: float = 1.0) -> Tensor:
        return (by * torch.randn(*shape, device=case.device, generator=generator)).to(dtype)

    trained = case.loss != "eval"
    hidden = random(n, d).requires_grad_(trained)
    weight = random(v, d, by=0.02).requires_grad_(trained and not case.frozen)
    bias = random(v).requires_grad_(not case.frozen) if case.loss == "bias" else None
    labels = torch.randint(v, (n,), device=case.device, generator=generator)
    upstream = torch.ones(n, device=case.device) / n
    if case.loss == "none":
        upstream *= torch.linspace(0.5, 1.5, n, device=case.device)
    teacher: Any = None
    if case.loss == "top_k":
        ids = torch.randint(v // TOP_K, (n, TOP_K), device=case.device, generator=generator)
        ids += torch.arange(TOP_K, device=case.device) * (v // TOP_K)  # all different
        teacher = TeacherTopK(ids, random(n, TOP_K).float().log_softmax(1) - 0.1)
    elif case.distils:
        teacher = TeacherHead(random(n, TEACHER_SIZE), random(v, TEACHER_SIZE, by=0.02))
    return Problem(hidden, weight, bias, labels, upstream, teacher)


def full_losses(x: Problem, z: Tensor, loss: str, reduction: str = "none") -> Tensor:
    """Return the loss on the logits ``z`` as people write it."""
    options, teacher = LOSSES[loss], x.teacher
    z = z if z.dtype == torch.float64 else z.float()
    if "kind" not in options:
        if "softcap" in options:
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        smoothing = options.get("label_smoothing", 0.0)
        return F.cross_entropy(z, x.labels, reduction=reduction, label_smoothing=smoothing)
    log_p = z.log_softmax(-1)
    if isinstance(teacher, TeacherTopK):
        chosen, log_q = (with_tail(y) for y in (log_p.gather(1, teacher.ids), teacher.log_probs.to(z.dtype)))
        log_p = chosen
    else:
        assert teacher is not None
        with torch.no_grad():
            log_q = F.linear(teacher.hidden_states, teacher.weight).to(z.dtype).log_softmax(-1)
    losses = kl(log_q, log_p)
    if options["kind"] == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        losses = (kl(log_q, log_m) + kl(log_p, log_m)) / 2
    return losses if reduction == "none" else losses.mean()


def with_tail(log_p: Tensor) -> Tensor:
    return torch.cat((log_p, torch.log1p(-log_p.exp().sum(1, keepdim=True))), 1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = case.dtype.endswith("(TF32)")
    x, options = make_problem(case), LOSSES[case.loss]
    config, state = CCEConfig(implementation=case.implementation), FilterState()  # type: ignore[arg-type]
    reduction = options.get("reduction", "mean")

    def full() -> Tensor:
        return full_losses(x, F.linear(*x[:3]), case.loss, reduction)

    def ours() -> Tensor:
        if x.teacher is not None:
            return linear_divergence(x.hidden, x.weight, x.teacher, config=config, **options)
        return linear_cross_entropy(*x[:2], x.labels, bias=x.bias, config=config, filter_state=state, **options)

    weights, parameters = x.upstream if reduction == "none" else None, x.parameters
    row: dict[str, Any] = asdict(case)
    results: dict[str, list[Tensor]] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for name, loss in {"full": full, "ours": ours}.items():
        steps[name] = lambda loss=loss: step(loss, parameters, weights)  # type: ignore[misc]
        try:
            row[f"{name}_mib"] = peak_mib(steps[name], parameters, case.device)
            found = steps[name]()
            results[name] = [x.grad.clone() for x in parameters if x.grad is not None] or [found]
        except torch.OutOfMemoryError:
            row[f"{name}_mib"] = None
        clear(parameters)
    times = paired_times({name: steps[name] for name in results}, pairs, case.device)
    for name in steps:
        row[f"{name}_ms"] = statistics.median(times[name]) if name in times else None
    clear(parameters)
    if case.device == "cuda":
        torch.cuda.empty_cache()
    exact = reference(x, case)
    errors = {name: [relative(a, b) for a, b in zip(found, exact, strict=True)] for name, found in results.items()}
    worst = range(len(exact))
    if "full" in errors and "ours" in errors:
        worst = [max(range(len(exact)), key=lambda i: errors["ours"][i] / max(errors["full"][i], 1e-30))]  # type: ignore[assignment]
    for name in steps:
        row[f"{name}_error"] = max(errors[name][i] for i in worst) if name in errors else None
    return row


def step(loss: Callable[[], Tensor], parameters: list[Tensor], weights: Tensor | None) -> Tensor:
    clear(parameters)
    found = loss()
    if parameters:
        found.backward(weights)
    return found.detach()


def clear(parameters: list[Tensor]) -> None:
    for x in parameters:
        x.grad = None


def peak_mib(run: Callable[[], Any], parameters: list[Tensor], device: str) -> float | None:
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


def paired_times(steps: dict[str, Callable[[], Any]], pairs: int, device: str) -> dict[str, list[float]]:
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


def reference(x: Problem, case: Case) -> list[Tensor]:
    """Return the gradients of the parameters ("eval": the loss) in float64, computed one block of tokens at a time."""
    n, v = len(x.labels), len(x.weight)
    dh, dw = torch.empty_like(x.hidden, dtype=torch.float64), torch.zeros_like(x.weight, dtype=torch.float64)
    db, total = dw.new_zeros(v), dw.new_zeros(())
    block = max(1, (1 << 27) // v)
    for start in range(0, n, block):
        of_block = x.rows(start, start + block, torch.float64)
        z = F.linear(*of_block[:3]).requires_grad_(case.loss != "eval")
        losses = full_losses(of_block, z, case.loss)
        total += (losses * of_block.upstream).sum().detach()
        if z.requires_grad:
            (g,) = torch.autograd.grad(losses, z, of_block.upstream.double())
            dh[start : start + block] = g @ of_block.weight
            dw.addmm_(g.t(), of_block.hidden)
            db += g.sum(0)
    known = ((x.hidden, dh), (x.weight, dw), (x.bias, db))
    return [grad for given, grad in known if given is not None and given.requires_grad] or [total]


def relative(x: Tensor, exact: Tensor) -> float:
    """Return ‖x − exact‖ / ‖exact‖ in float64, computed one block of rows at a time."""
    x, exact = (y.reshape(-1, 1) if y.dim() < 2 else y for y in (x, exact))
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
    if row["full_mib"] is not None and row["ours_mib"] > row["full_mib"] + MORE_MIB:
        found.append("memory")
    if row["ours_error"] > allowed_error(row["full_error"], DTYPES[row["dtype"]]):
        found.append("error")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuda", type=int, default=272, help="cases on the GPU")
    parser.add_argument("--cpu", type=int, default=68, help="cases on the CPU")
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
