"""Times and weighs losses on one problem, interleaved in one process, and checks their gradients in the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_cce.bench import machine, memory
from hf_cce.bench.peers import Loss, begin, filter_stats

MIB = 1 << 20
Say = Callable[[str], None]
# By mode: what its keys in a row begin with, and how many of a dense loss's matrix products it cannot avoid.
PREFIX = {"both": "", "forward": "forward_", "frozen": "frozen_"}
GEMMS = {"forward": 1, "frozen": 2, "both": 3}
SETTLED = 6  # steps in which a gradient filter finds its threshold, before its errors are taken


@dataclass(frozen=True)
class Problem:
    """hidden_states [N, D], weight [V, D], labels [N] on one device, hidden_states and weight of one dtype."""

    hidden_states: Tensor
    weight: Tensor
    labels: Tensor


class Stopwatch:
    """Times calls one after the other. On a GPU: the device's own time, of calls that are queued while it is busy sleeping.

    Without the sleep, the time that Python needs to launch the first kernels would count as the device's; a training step
    queues its loss while the device still works on the layers before it. ``wall_ms`` is for the other side of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[Any] = []

    def run(self, function: Callable[[], Any]) -> None:
        if self.device.type != "cuda":
            machine.synchronize(self.device)
            start = time.perf_counter()
            function()
            machine.synchronize(self.device)
            self.spans.append((time.perf_counter() - start) * 1e3)
            return
        start_event, stop_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(24_000_000)  # clock cycles, some 12 ms: hosts that are busy need several to launch a step
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
    """Milliseconds a call when calls follow each other without a pause: whichever is slower, host or device."""
    machine.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    machine.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖, summed in float64."""
    exact = exact.double()
    return float((x.double() - exact).norm() / exact.norm())


def exact_gradients(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ∂/∂hidden [N, D], ∂/∂weight [V, D]), all computed in ``dtype``: the textbook's formula, tokens in chunks.

    Written out here, so that nothing that is measured is also the judge.
    """
    weight = problem.weight.to(dtype)
    n, grad_weight = len(problem.labels), torch.zeros_like(weight)
    grad_hidden = torch.empty_like(problem.hidden_states, dtype=dtype)
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    chunk = max(1, (1 << 26) // len(weight))  # 512 MiB of logits in float64
    for start in range(0, n, chunk):
        hidden = problem.hidden_states[start : start + chunk].to(dtype)
        labels = problem.labels[start : start + chunk, None]
        scores = hidden @ weight.t()
        lse = scores.logsumexp(1, keepdim=True)
        loss += (lse - scores.gather(1, labels)).double().sum()
        scores.sub_(lse).exp_().scatter_add_(1, labels, torch.full_like(lse, -1.0)).div_(n)  # now ∂loss/∂scores
        grad_hidden[start : start + chunk] = scores @ weight
        grad_weight.addmm_(scores.t(), hidden)
    return loss / n, grad_hidden, grad_weight


def gemms(problem: Problem, modes: list[str]) -> dict[str, Callable[[], None]]:
    """For each mode its part of a dense loss's three matrix products, as one call: logits, ∂/∂hidden, ∂/∂weight."""
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


class Bench:
    """One problem under the losses: ``run`` gives the rows of figures."""

    def __init__(self, problem: Problem, modes: list[str], reference: torch.dtype, say: Say) -> None:
        self.problem, self.modes, self.reference, self.say = problem, modes, reference, say
        self.device = problem.hidden_states.device
        self.hidden = problem.hidden_states.detach().requires_grad_()
        self.weight = problem.weight.detach().requires_grad_()
        self.frozen = problem.weight.detach()  # the same memory

    def run(self, losses: dict[str, Loss], repeats: int, sweep: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Rows by name of the loss, and the GEMMs' times.

        Args:
            losses: by name; one that raises gets the row {"failed": why}.
            repeats: timed rounds; in each, every loss runs once in every mode, and so do the GEMMs.
            sweep: names of losses that run with gradients only.
        """
        rows: dict[str, dict[str, Any]] = {}
        alive: dict[str, list[str]] = {}
        self.say("exact gradients")
        exact = exact_gradients(self.problem, self.reference)
        for name, loss in losses.items():
            modes = ["both"] if name in sweep else self.modes
            self.say(f"{name}: checking")
            begin(loss)
            try:
                rows[name] = self._checked(loss, modes, exact)
                alive[name] = modes
            except Exception as error:  # whatever a peer raises, the others' figures are wanted
                rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            self._forget()
        del exact
        gc.collect()
        needed = [mode for mode in GEMMS if mode in self.modes or (mode == "both" and sweep & set(alive))]
        products = gemms(self.problem, needed)
        for product in products.values():
            product()
        reference = {mode: Stopwatch(self.device) for mode in needed}
        watches = {(name, mode): Stopwatch(self.device) for name, modes in alive.items() for mode in modes}
        for turn in range(repeats):  # interleaved, and the GEMMs too: clocks fall as the chip warms up
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
            if mode == "both" and self.device.type == "cuda":  # elsewhere the two are the same
                rows[name]["wall_ms"] = wall_ms(partial(self._step, losses[name], mode), self.device)
        self._forget()
        result: dict[str, Any] = {"gemms_ms": dense, "rows": rows}
        if "both" in dense:
            result["three_gemms_ms"] = dense["both"]
        return result

    def _step(self, loss: Loss, mode: str) -> Tensor:
        """One call in one mode: "both" and "frozen" leave gradients behind, "frozen" that of the hidden states only."""
        if mode == "forward":
            with torch.no_grad():
                return loss(self.hidden, self.weight, self.problem.labels)
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.frozen if mode == "frozen" else self.weight, self.problem.labels)
        value.backward()
        return value.detach()

    def _forget(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def _checked(self, loss: Loss, modes: list[str], exact: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
        """First call, errors, memory: everything but the times, which are taken when all losses are warm."""
        row: dict[str, Any] = {}
        gc.collect()  # what the loss before left in cycles must not be freed, or counted, in the middle of this one
        for mode in modes:
            prefix = PREFIX[mode]
            machine.synchronize(self.device)
            start = time.perf_counter()
            self._step(loss, mode)
            machine.synchronize(self.device)
            row[f"{prefix}first_call_s"] = time.perf_counter() - start
            for _ in range(SETTLED if mode != "forward" and filter_stats(loss) else 0):
                self._step(loss, mode)
            row["loss_error"] = relative_error(self._step(loss, mode), exact[0])
            if mode != "forward":
                assert self.hidden.grad is not None, "the loss gave no gradient of the hidden states"
                row[f"{prefix}grad_hidden_error"] = relative_error(self.hidden.grad, exact[1])
            if mode == "both":
                assert self.weight.grad is not None, "the loss gave no gradient of the weight"
                row["grad_weight_error"] = relative_error(self.weight.grad, exact[2])
            machine.synchronize(self.device)
            if mode != "forward" and (stats := filter_stats(loss)):
                row[f"{prefix}filter"] = stats
            extra = self._extra_memory(loss, mode)
            if extra is not None:
                row[f"{prefix}extra_mib"] = extra
        return row

    def _extra_memory(self, loss: Loss, mode: str) -> float | None:
        """MiB at most above inputs and gradients; None where the device does not count its peak.

        On a CPU the whole process is weighed, to some tenths of a MiB.
        """
        self._forget()
        if not memory.reset_peak(self.device):
            return None
        before = memory.in_use(self.device)
        self._step(loss, mode)
        machine.synchronize(self.device)
        extra = memory.peak(self.device) - before
        extra -= sum(x.grad.numel() * x.grad.element_size() for x in (self.hidden, self.weight) if x.grad is not None)
        return max(0.0, extra / MIB)
