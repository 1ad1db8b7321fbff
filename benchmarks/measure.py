"""Measure time, memory and gradient error of losses in three modes, interleaved in one process; used by ``benchmarks.loss``.

A mode is forward and backward, forward alone, or forward and backward with a frozen head. Times are also given as multiples of
the matrix products that full logits need.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.origin import origin
from benchmarks.peers import FusedLoss, filter_stats
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.bench import WARM_UP, Loss, extra_mib, time_interleaved
from hf_cce.diagnostics.gradcheck import LOSS_SCALE, PLAIN, Inputs, relative_error, with_full_logits
from hf_cce.diagnostics.machine import Progress, dtype_name

# For each mode: the prefix of its keys in a row, and the number of matrix products that full logits need.
PREFIX = {"both": "", "forward": "forward_", "frozen": "frozen_"}
GEMMS = {"forward": 1, "frozen": 2, "both": 3}
COLUMNS = "forward + backward | forward | frozen head | memory | errors (hidden states, weight) | tiles kept |"


@dataclass(frozen=True)
class Plan:
    """How to measure: device, dtype, number of timed rounds, and modes (keys of ``GEMMS``)."""

    device: torch.device
    dtype: torch.dtype
    repeats: int
    modes: tuple[str, ...] = tuple(PREFIX)


def reference_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exact gradients: float64, or float32 where float64 is missing or 64 times slower."""
    if device.type == "cuda" and dtype.itemsize == 2:
        fast = torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))
        return torch.float64 if fast else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


def exact_results(problem: Inputs) -> dict[str, Tensor]:
    """Return the loss and its gradients in ``reference_dtype``, with the same keys as ``gradcheck``."""
    return with_full_logits(problem, PLAIN, reference_dtype(problem.hidden.device, problem.hidden.dtype))


def matrix_products(problem: Inputs, modes: Iterable[str]) -> dict[str, Callable[[], None]]:
    """Return, for each mode, a function that runs the matrix products full logits need: logits, ∂/∂hidden, ∂/∂weight."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(count: int) -> None:
        torch.mm(hidden, weight.t(), out=logits)
        if count > 1:
            torch.mm(logits, weight, out=grad_hidden)
        if count > 2:
            torch.mm(logits.t(), hidden, out=grad_weight)

    return {mode: partial(run, GEMMS[mode]) for mode in modes}


def wall_ms(function: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Return milliseconds per call for back-to-back calls, which includes host time."""
    machine.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    machine.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


class Bench:
    """Measurement of several losses on one problem."""

    def __init__(self, problem: Inputs, modes: tuple[str, ...], progress: Progress) -> None:
        self.problem, self.modes, self.progress = problem, modes, progress
        self.device = problem.hidden.device
        self.hidden = problem.hidden.detach().requires_grad_()
        self.weight = problem.weight.detach().requires_grad_()
        self.frozen = problem.weight.detach()  # shares the memory
        # Loss scaling, as in float16 training; errors are computed after unscaling.
        self.scale = LOSS_SCALE.get(self.hidden.dtype, 1.0)

    def run(self, losses: dict[str, Loss], repeats: int) -> dict[str, Any]:
        """Measure all losses in turn.

        Returns:
            "gemms_ms" by mode, "three_gemms_ms", and "rows" by loss. A row has "ms" (median), "ms_spread" (minimum, maximum),
            "gemm_multiple", "wall_ms", "extra_mib" (peak above inputs and gradients), "loss_error", "grad_hidden_error",
            "grad_weight_error", "filter", and the same with "forward_" and "frozen_"; or {"failed": reason}.
        """
        rows: dict[str, dict[str, Any]] = {}
        self.progress("exact gradients")
        exact = exact_results(self.problem)
        for name, loss in losses.items():
            self.progress(f"{name}: checking")
            if isinstance(loss, FusedLoss):
                loss.reset()
            try:
                rows[name] = self._checked(loss, exact)
            except Exception as error:  # another library may raise anything; go on with the other losses
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
        """Add times to ``rows``; return the times of the matrix products by mode."""
        alive = [name for name, row in rows.items() if "failed" not in row]
        products = matrix_products(self.problem, self.modes)
        for product in products.values():
            product()
        functions: dict[tuple[str, str], Callable[[], Any]] = {("", mode): run for mode, run in products.items()}
        functions |= {(name, mode): partial(self._step, losses[name], mode) for name in alive for mode in self.modes}
        taken = time_interleaved(functions, self.device, repeats, self.progress)
        dense = {mode: statistics.median(taken.pop(("", mode))) for mode in products}
        for (name, mode), times in taken.items():
            prefix = PREFIX[mode]
            rows[name][f"{prefix}ms"] = statistics.median(times)
            rows[name][f"{prefix}ms_spread"] = [min(times), max(times)]
            rows[name][f"{prefix}gemm_multiple"] = statistics.median(times) / dense[mode]
            if mode == "both" and self.device.type == "cuda":  # on other devices both times are equal
                rows[name]["wall_ms"] = wall_ms(functions[name, mode], self.device)
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
        return relative_error(gradient.to(exact.dtype) / self.scale, exact)

    def _checked(self, loss: Loss, exact: dict[str, Tensor]) -> dict[str, Any]:
        """Return errors and memory of one loss. Times are taken later, once all losses are warm."""
        row: dict[str, Any] = {}
        gc.collect()  # garbage of the previous loss must not be freed or counted during this one
        for mode in self.modes:
            prefix = PREFIX[mode]
            self._step(loss, mode)
            for _ in range(WARM_UP if mode != "forward" and filter_stats(loss) else 0):
                self._step(loss, mode)
            row["loss_error"] = relative_error(self._step(loss, mode), exact["loss"])
            if mode != "forward":
                row[f"{prefix}grad_hidden_error"] = self._error(self.hidden.grad, exact["∂hidden"])
            if mode == "both":
                row["grad_weight_error"] = self._error(self.weight.grad, exact["∂weight"])
            if mode != "forward" and (stats := filter_stats(loss)):
                row[f"{prefix}filter"] = stats
            self._forget()
            extra = extra_mib(partial(self._step, loss, mode), (self.hidden, self.weight))
            if extra is not None:
                row[f"{prefix}extra_mib"] = extra
        return row


def measure(title: str, problem: Inputs, losses: dict[str, Loss], plan: Plan, progress: Progress) -> dict[str, Any]:
    """Measure ``losses`` on one problem and free everything afterwards."""
    result = Bench(problem, plan.modes, lambda text: progress(f"{title}: {text}")).run(losses, plan.repeats)
    n, d = problem.hidden.shape
    torch.compiler.reset()  # compile anew for each problem, or Dynamo reaches its recompile limit
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"problem": {"N": n, "D": d, "V": len(problem.weight)}, **result}


def planned(device: str | None, dtype: str | None, repeats: int | None, modes: tuple[str, ...]) -> Plan:
    """Fill in defaults for the device: its 16-bit dtype and 10 rounds on a GPU, float32 and 5 rounds elsewhere.

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
    torch_dtype = getattr(torch, dtype) if dtype else machine.default_dtype(place)
    return Plan(place, torch_dtype, repeats or (10 if gpu else 5), modes)


def header(module: str, arguments: list[str] | None, plan: Plan, *packages: str) -> dict[str, Any]:
    """Return the first entries of a report."""
    found = origin(module, arguments, plan.device, *packages)
    reference = reference_dtype(plan.device, plan.dtype)
    dtypes = {"dtype": dtype_name(plan.dtype), "reference": dtype_name(reference)}
    return {**found, **dtypes, "missing": {}, "results": {}}


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
    """Return the whole report as Markdown: environment, one table per problem, and the failed or missing losses."""
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
