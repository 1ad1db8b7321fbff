"""Time, memory and gradient error of losses on one problem, interleaved in one process and compared with exact gradients.

``hf-cce bench`` measures hf_cce and full logits on random data; ``benchmarks/`` adds trained heads and other libraries.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hf_cce
from hf_cce import CCEConfig, FilterState, linear_cross_entropy
from hf_cce.diagnostics import gradcheck, machine
from hf_cce.dispatch import explain_dispatch

MIB = 1 << 20
Say = Callable[[str], None]
Shape = tuple[int, int, int]  # N, D, V
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_states [N, D], weight [V, D], labels [N]) -> mean loss
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# By mode: prefix of its keys in a row, and how many matrix products a loss with full logits needs.
PREFIX = {"both": "", "forward": "forward_", "frozen": "frozen_"}
GEMMS = {"forward": 1, "frozen": 2, "both": 3}
SETTLED = 6  # steps after which a gradient filter has found its threshold
GPU_SHAPES: tuple[Shape, ...] = ((8192, 1024, 49_152), (4096, 4096, 128_256), (8192, 896, 151_936), (512, 896, 151_936))
CPU_SHAPES: tuple[Shape, ...] = ((128, 256, 8192), (512, 256, 8192), (512, 256, 16_384))
COLUMNS = "forward + backward | forward | frozen head | memory | errors (hidden states, weight) | tiles kept |"


@dataclass(frozen=True)
class Problem:
    """hidden_states [N, D], weight [V, D], labels [N] on one device, hidden_states and weight of one dtype."""

    hidden_states: Tensor
    weight: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Plan:
    """How to measure: where, in which dtype, how many timed rounds, in which modes (keys of ``GEMMS``)."""

    device: torch.device
    dtype: torch.dtype
    repeats: int
    modes: tuple[str, ...] = tuple(PREFIX)


def random_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Draw a problem as at the start of pretraining: logits have standard deviation 0.02 √D."""
    n, d, v = shape
    g = torch.Generator(device=device).manual_seed(n + d + v)
    hidden = torch.randn(n, d, device=device, generator=g).to(dtype)
    weight = (0.02 * torch.randn(v, d, device=device, generator=g)).to(dtype)
    return Problem(hidden, weight, torch.randint(v, (n,), device=device, generator=g))


def full_logits(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss as Transformers does: logits in the model's dtype, upcast, cross-entropy."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


class FusedLoss:
    """hf_cce with one filter state for a trained weight and one for a frozen weight."""

    def __init__(self, **options: Any) -> None:
        self.config = CCEConfig(**options)
        self.begin()

    def begin(self) -> None:
        """Start on another head."""
        self.states = {True: FilterState(), False: FilterState()}
        self.last: FilterState | None = None

    def __call__(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        self.last = self.states[weight.requires_grad]
        return linear_cross_entropy(hidden_states, weight, labels, config=self.config, filter_state=self.last)


LOSSES: dict[str, Callable[..., Loss]] = {
    "hf_cce": FusedLoss,
    "hf_cce exact": partial(FusedLoss, gradient_filter=None),
    "eager": lambda **_: full_logits,
    "torch.compile": lambda **_: torch.compile(full_logits, dynamic=False),
}


class Stopwatch:
    """Time calls one after the other: on a GPU the device's own time, elsewhere wall time.

    On a GPU each call is queued while the device sleeps, so that the time Python needs to launch kernels is not counted:
    in training the device still works on the layers before. ``wall_ms`` measures the host as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[Any] = []

    def run(self, function: Callable[[], Any]) -> None:
        if self.device.type != "cuda":
            self.spans.append(wall_ms(function, self.device, 1))
            return
        start_event, stop_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(24_000_000)  # about 12 ms: a busy host needs several to launch a step
        start_event.record()
        function()
        stop_event.record()
        self.spans.append((start_event, stop_event))

    def milliseconds(self) -> list[float]:
        if self.device.type != "cuda":
            return self.spans
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in self.spans]


def wall_ms(function: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Return milliseconds per call when calls follow each other without a pause."""
    machine.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    machine.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def reference_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact gradients: float64, or float32 where float64 is missing or 64 times slower."""
    if device.type == "cuda" and dtype.itemsize == 2:
        fast = torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))
        return torch.float64 if fast else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


def matrix_products(problem: Problem, modes: Iterable[str]) -> dict[str, Callable[[], None]]:
    """Return, for each mode, a call of the matrix products that full logits need: logits, ∂/∂hidden, ∂/∂weight."""
    hidden, weight = problem.hidden_states.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(count: int) -> None:
        torch.mm(hidden, weight.t(), out=logits)
        if count > 1:
            torch.mm(logits, weight, out=grad_hidden)
        if count > 2:
            torch.mm(logits.t(), hidden, out=grad_weight)

    return {mode: partial(run, GEMMS[mode]) for mode in modes}


def filter_stats(loss: Loss) -> dict[str, Any]:
    """Return what the gradient filter did in the last training step of ``loss``, empty where there is none."""
    state = loss.last if isinstance(loss, FusedLoss) else None
    return {} if state is None else state.stats()


class Bench:
    """Measure losses on one problem."""

    def __init__(self, problem: Problem, modes: tuple[str, ...], say: Say) -> None:
        self.problem, self.modes, self.say = problem, modes, say
        self.device = problem.hidden_states.device
        self.hidden = problem.hidden_states.detach().requires_grad_()
        self.weight = problem.weight.detach().requires_grad_()
        self.frozen = problem.weight.detach()  # the same memory
        # As in float16 training; the errors are those of the gradients without it.
        self.scale = gradcheck.LOSS_SCALE.get(self.hidden.dtype, 1.0)

    def run(self, losses: dict[str, Loss], repeats: int) -> dict[str, Any]:
        """Measure all losses in turns.

        Returns:
            "gemms_ms" by mode, "three_gemms_ms", and "rows" by loss. A row has "ms" (median), "ms_spread" (least, most),
            "gemm_multiple", "wall_ms", "extra_mib" (peak above inputs and gradients), "loss_error", "grad_hidden_error",
            "grad_weight_error", "filter", and the same with "forward_" and "frozen_"; or {"failed": why}.
        """
        rows: dict[str, dict[str, Any]] = {}
        self.say("exact gradients")
        inputs = gradcheck.Inputs(self.hidden, self.weight, self.problem.labels)
        exact = gradcheck.with_full_logits(inputs, gradcheck.PLAIN, reference_dtype(self.device, self.hidden.dtype))
        for name, loss in losses.items():
            self.say(f"{name}: checking")
            if isinstance(loss, FusedLoss):
                loss.begin()
            try:
                rows[name] = self._checked(loss, exact)
            except Exception as error:  # another library may raise anything; the others are still measured
                rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            self._forget()
        del exact
        gc.collect()
        dense = self._time(losses, rows, repeats)
        result: dict[str, Any] = {"gemms_ms": dense, "rows": rows}
        if "both" in dense:
            result["three_gemms_ms"] = dense["both"]
        return result

    def _time(self, losses: dict[str, Loss], rows: dict[str, Any], repeats: int) -> dict[str, float]:
        """Add times to ``rows``; return those of the matrix products by mode."""
        alive = [name for name, row in rows.items() if "failed" not in row]
        products = matrix_products(self.problem, self.modes)
        for product in products.values():
            product()
        reference = {mode: Stopwatch(self.device) for mode in self.modes}
        watches = {(name, mode): Stopwatch(self.device) for name in alive for mode in self.modes}
        for turn in range(repeats):  # in turns, as clocks fall while the chip warms up
            self.say(f"timing, round {turn + 1} of {repeats}")
            for mode, product in products.items():
                reference[mode].run(product)
            for (name, mode), watch in watches.items():
                watch.run(partial(self._step, losses[name], mode))
        dense = {mode: statistics.median(watch.milliseconds()) for mode, watch in reference.items()}
        for (name, mode), watch in watches.items():
            times, prefix = watch.milliseconds(), PREFIX[mode]
            rows[name][f"{prefix}ms"] = statistics.median(times)
            rows[name][f"{prefix}ms_spread"] = [min(times), max(times)]
            rows[name][f"{prefix}gemm_multiple"] = statistics.median(times) / dense[mode]
            if mode == "both" and self.device.type == "cuda":  # elsewhere both times are the same
                rows[name]["wall_ms"] = wall_ms(partial(self._step, losses[name], mode), self.device)
        self._forget()
        return dense

    def _step(self, loss: Loss, mode: str) -> Tensor:
        if mode == "forward":
            with torch.no_grad():
                return loss(self.hidden, self.weight, self.problem.labels)
        self._forget()
        value = loss(self.hidden, self.frozen if mode == "frozen" else self.weight, self.problem.labels)
        (value if self.scale == 1.0 else value * self.scale).backward()
        return value.detach()

    def _forget(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def _error(self, gradient: Tensor | None, exact: Tensor) -> float:
        assert gradient is not None, "the loss gave no gradient"
        return gradcheck.relative_error(gradient.to(exact.dtype) / self.scale, exact)

    def _checked(self, loss: Loss, exact: dict[str, Tensor]) -> dict[str, Any]:
        """Return errors and memory; times are taken when all losses are warm."""
        row: dict[str, Any] = {}
        gc.collect()  # garbage of the loss before must not be freed, or counted, during this one
        for mode in self.modes:
            prefix = PREFIX[mode]
            self._step(loss, mode)
            for _ in range(SETTLED if mode != "forward" and filter_stats(loss) else 0):
                self._step(loss, mode)
            row["loss_error"] = gradcheck.relative_error(self._step(loss, mode), exact["loss"])
            if mode != "forward":
                row[f"{prefix}grad_hidden_error"] = self._error(self.hidden.grad, exact["∂hidden"])
            if mode == "both":
                row["grad_weight_error"] = self._error(self.weight.grad, exact["∂weight"])
            if mode != "forward" and (stats := filter_stats(loss)):
                row[f"{prefix}filter"] = stats
            extra = self._extra_memory(loss, mode)
            if extra is not None:
                row[f"{prefix}extra_mib"] = extra
        return row

    def _extra_memory(self, loss: Loss, mode: str) -> float | None:
        """Return the peak in MiB above inputs and gradients; None where the device counts no peak.

        On a CPU this is the memory of the whole process, accurate to some tenths of a MiB.
        """
        self._forget()
        if not machine.reset_peak_memory(self.device):
            return None
        before = machine.memory_in_use(self.device)
        self._step(loss, mode)
        machine.synchronize(self.device)
        extra = machine.peak_memory(self.device) - before
        extra -= sum(x.grad.numel() * x.grad.element_size() for x in (self.hidden, self.weight) if x.grad is not None)
        return max(0.0, extra / MIB)


def measure(title: str, problem: Problem, losses: dict[str, Loss], plan: Plan, say: Say) -> dict[str, Any]:
    """Measure ``losses`` on one problem and free everything afterwards."""
    result = Bench(problem, plan.modes, lambda text: say(f"{title}: {text}")).run(losses, plan.repeats)
    n, d = problem.hidden_states.shape
    torch.compiler.reset()  # each problem compiles anew; otherwise Dynamo's recompile limit is reached
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"problem": {"N": n, "D": d, "V": len(problem.weight)}, **result}


def planned(device: str | None, dtype: str | None, repeats: int | None, modes: tuple[str, ...] = tuple(PREFIX)) -> Plan:
    """Fill in what suits the device: on a GPU its 16-bit dtype and 10 rounds, elsewhere float32 and 5.

    Raises:
        ValueError: the device cannot be used, or a mode is unknown.
    """
    place = machine.checked_device(device)
    gpu = place.type == "cuda"
    if gpu:
        torch.cuda.set_device(place.index or 0)
    if not modes or (wrong := sorted(set(modes) - set(GEMMS))):
        given = ", ".join(map(repr, wrong)) if modes else repr("")
        raise ValueError(f"unknown mode {given}; known: {', '.join(GEMMS)}")
    usual = machine.half_dtype(place) if gpu else torch.float32
    return Plan(place, DTYPES[dtype] if dtype else usual, repeats or (10 if gpu else 5), modes)


def header(command: list[str], plan: Plan, *packages: str) -> dict[str, Any]:
    """Return the first entries of a report."""
    found = machine.origin(command, plan.device, *packages)
    found["versions"]["hf_cce"] = hf_cce.__version__
    reference = reference_dtype(plan.device, plan.dtype)
    dtypes = {"dtype": str(plan.dtype).removeprefix("torch."), "reference": str(reference).removeprefix("torch.")}
    return {**found, **dtypes, "missing": {}, "results": {}}


def bench(
    command: list[str], shapes: tuple[Shape, ...], losses: dict[str, Loss], plan: Plan, say: Say
) -> dict[str, Any]:
    """Measure ``losses`` on random data of each shape (none: some that suit the device)."""
    report = header(command, plan)
    if plan.device.type == "cuda":
        report["gpu"] = machine.gpu_facts(plan.device)
    for shape in shapes or (GPU_SHAPES if plan.device.type == "cuda" else CPU_SHAPES):
        title = "flat N={} D={} V={}".format(*shape)
        result = measure(title, random_problem(shape, plan.device, plan.dtype), losses, plan, say)
        n, d, v = shape
        result["dispatch"] = explain_dispatch(n, d, v, plan.dtype, plan.device)._asdict()
        result["dispatch"]["logits_dtype"] = str(result["dispatch"]["logits_dtype"])
        report["results"][title] = result
    return report


def chosen_losses(names: list[str], plan: Plan, memory_budget: int | None) -> dict[str, Loss]:
    """Return the losses called ``names``; none: all on a GPU, on a CPU not torch.compile, which takes minutes there.

    Raises:
        ValueError: a name is unknown.
    """
    if unknown := sorted(set(names) - set(LOSSES)):
        raise ValueError(f"unknown loss {', '.join(map(repr, unknown))}; known: {', '.join(LOSSES)}")
    usual = list(LOSSES) if plan.device.type == "cuda" else list(LOSSES)[:3]
    return {name: LOSSES[name](memory_budget=memory_budget) for name in names or usual}


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a Markdown table with one line for each loss that did not fail, in the order of ``rows``."""
    lines = [f"| loss | {COLUMNS}", "|---" * 7 + "|"]
    for name, row in rows.items():
        if "failed" in row:
            continue
        cells = [
            f"{row[f'{mode}ms']:.2f} ms ({row[f'{mode}gemm_multiple']:.2f})" if f"{mode}ms" in row else "–"
            for mode in PREFIX.values()
        ]
        cells.append(f"{row['extra_mib']:,.0f} MiB" if "extra_mib" in row else "–")
        errors = [f"{row[f'grad_{what}_error']:.1e}" for what in ("hidden", "weight") if f"grad_{what}_error" in row]
        cells.append(", ".join(errors) or "–")
        cells.append(f"{row['filter']['kept']:.0%}" if row.get("filter") else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report: where it ran, one table for each problem, and which losses failed or are missing."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    parts = [
        f"{report['device']}, {report['dtype']}; {versions}.\n\nIn brackets: multiples of the matrix products that full "
        f"logits need. Memory: peak above inputs and gradients. Errors: relative, against {report['reference']}."
    ]
    for title, result in report["results"].items():
        failed = [f"- {name} failed: {row['failed']}" for name, row in result["rows"].items() if "failed" in row]
        parts.append("\n".join([f"### {title}", "", *table(result["rows"]), *([""] if failed else []), *failed]))
    if report["missing"]:
        parts.append("\n".join(["Not measured:", "", *(f"- {name}: {why}" for name, why in report["missing"].items())]))
    return "\n\n".join(parts) + "\n"


def issue_report(report: dict[str, Any]) -> str:
    """Return Markdown to attach to an issue: the tables, and every number folded below them."""
    numbers = json.dumps(report, indent=1, ensure_ascii=False)
    return (
        f"# hf-cce bench on {report['device']}\n\n{markdown(report)}\n<details><summary>All numbers</summary>\n\n"
        f"```json\n{numbers}\n```\n\n</details>\n"
    )
