"""Compares loss, log-probabilities and gradients with float64, ours and those of full logits side by side, on one device.

The rule is that of ``tests/support/numerics.py``: a result may be as far from the exact one as the same result of plain PyTorch
in the same dtype, plus rounding. The exact one is plain PyTorch with full logits in float64, from the same rounded inputs.

Gradients of the logits cannot be had from a loss that has none. They are the gradient of the weight when the hidden states
are the identity: logits = I · Wᵀ, so row i of the logits is column i of the weight, and ∂W = (∂logits)ᵀ without rounding.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy, linear_log_probs
from hf_cce.bench import machine, memory

IMPLEMENTATIONS: tuple[Literal["portable", "triton"], ...] = ("portable", "triton")
DTYPES = ("float32", "bfloat16", "float16")
IGNORED = -100
# Logits of the chunk of tokens that plain PyTorch works on at a time, in bytes of float64; some five copies live at once.
CHUNK_BYTES = 128 << 20
ENOUGH_TOKENS = 128
# float16 gets the loss scale that float16 training has: without it, gradients underflow in plain PyTorch and in ours.
LOSS_SCALE = {torch.float16: 4096.0}


@dataclass(frozen=True)
class Problem:
    """Sizes N, D, V of the inputs, drawn from ``seed``."""

    tokens: int
    hidden_size: int
    vocab_size: int
    seed: int = 0


# What a TPU study of a fused loss reports for float32 at this shape, as largest absolute differences. They are steps of
# float32 (1.9e-6 is that of numbers from 16 to 32), hence of one float32 result from another: beside them stands how far
# ours are from full logits in float32, and not from float64.
REFERENCE = Problem(2047, 64, 151_643)
PUBLISHED = {"loss": 0.0, "log-probs": 1.9e-6, "∂logits": 7.5e-9}


@dataclass(frozen=True)
class Case:
    """Options of the loss, and what the inputs look like."""

    name: str
    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    ignored: bool = False
    spread: float = 2.0  # standard deviation of the logits
    learnt: bool = False  # half of the labels are the most probable entry, as after training


CASES = (
    Case("plain"),
    Case("peaked", spread=8.0, learnt=True),
    Case("softcap", logit_scale=0.7, softcap=5.0),
    Case("smoothing", label_smoothing=0.1),
    Case("z-loss", z_loss=1e-2),
    Case("bias", bias=True),
    Case("ignored", ignored=True),
    Case("everything", 0.7, 5.0, 0.1, 1e-2, True, True),
)


def allowed(twin_error: float, dtype: torch.dtype) -> float:
    """The relative error a result of ``dtype`` may have where plain PyTorch has ``twin_error``, as in the tests."""
    unit = torch.finfo(dtype).eps
    return twin_error + unit / 16 if dtype in (torch.float16, torch.bfloat16) else 2 * twin_error + 16 * unit


@dataclass
class Difference:
    """Largest absolute and relative (norm) difference from the exact result, collected piece by piece."""

    largest: float = 0.0
    squares: float = 0.0
    exact_squares: float = 0.0

    def add(self, actual: Tensor, exact: Tensor, scale: float = 1.0) -> None:
        """A piece: both of one shape, ``exact`` float64; ``actual`` carries the loss scale."""
        if not exact.numel():
            return
        off = actual.detach().to(exact.device).double().div_(scale).sub_(exact)
        self.largest = max(self.largest, _finite(float(off.abs().max())))
        self.squares += _finite(float(off.square().sum()))
        self.exact_squares += float(exact.square().sum())

    @property
    def relative(self) -> float:
        """‖actual − exact‖ / ‖exact‖, or ‖actual‖ where ``exact`` is all zero."""
        return math.sqrt(self.squares / self.exact_squares if self.exact_squares else self.squares)


Differences = tuple[
    Difference, Difference, Difference
]  # eager's from the exact, ours from the exact, ours from eager's


def _finite(x: float) -> float:
    return math.inf if x != x else x


@dataclass(frozen=True)
class Row:
    """One comparison. Errors are (largest absolute, relative); ``allowed`` is relative."""

    dtype: str
    implementation: str
    gradient_filter: str  # "" where CCEConfig has none
    case: str
    quantity: str
    eager: tuple[float, float]
    hf_cce: tuple[float, float]
    allowed: float
    apart: float  # largest absolute difference of ours from eager's

    @property
    def ok(self) -> bool:
        return self.hf_cce[1] <= self.allowed

    @property
    def share(self) -> float:
        """Of what is allowed; more than 1 fails."""
        return self.hf_cce[1] / self.allowed


@dataclass
class Report:
    """What ``gradcheck`` found."""

    device: str
    problem: Problem
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be compared, and why
    reference: bool = False
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """(dtype, implementation and filter in words, their rows), in order of appearance."""
        kinds = {(row.dtype, row.implementation, row.gradient_filter): None for row in self.rows}
        for dtype, implementation, gradient_filter in kinds:
            title = f"{dtype}, {implementation}" + (f", gradient filter {gradient_filter}" if gradient_filter else "")
            of = (dtype, implementation, gradient_filter)
            yield title, [row for row in self.rows if (row.dtype, row.implementation, row.gradient_filter) == of]

    def published(self) -> Iterator[tuple[Row, float]]:
        """What there are published figures for, where this is their case; without a gradient filter, which they have not."""
        for row in self.rows if self.reference else ():
            if row.gradient_filter != "auto" and row.quantity in PUBLISHED:
                yield row, PUBLISHED[row.quantity]

    def to_json(self) -> dict[str, Any]:
        def plain(x: float) -> float | str:
            return x if math.isfinite(x) else "inf"  # JSON has no infinity

        rows = [
            {
                **asdict(row),
                "eager": {"largest": plain(row.eager[0]), "relative": plain(row.eager[1])},
                "hf_cce": {"largest": plain(row.hf_cce[0]), "relative": plain(row.hf_cce[1])},
                "allowed": plain(row.allowed),
                "apart": plain(row.apart),
                "ok": row.ok,
            }
            for row in self.rows
        ]
        compared = [
            {
                "quantity": row.quantity,
                "implementation": row.implementation,
                "ours": plain(row.apart),
                "published": figure,
            }
            for row, figure in self.published()
        ]
        return {
            "device": self.device,
            "versions": machine.versions("torch", "triton", "transformers"),
            "problem": asdict(self.problem),
            "reference": compared,
            "ok": not self.failures,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "peak_bytes": self.peak_bytes,
            "rows": rows,
        }


def worst(rows: list[Row]) -> list[Row]:
    """Of each quantity the case that is closest to what is allowed, or furthest beyond."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.quantity not in found or row.share > found[row.quantity].share:
            found[row.quantity] = row
    return list(found.values())


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]


def best_device() -> torch.device:
    mps = torch.backends.mps.is_available()
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")


def checked_device(name: str | None) -> torch.device:
    """The device of that name, known to work.

    Raises:
        ValueError: there is none; the message says so.
    """
    try:
        device = torch.device(name) if name else best_device()
        torch.ones(1, device=device).add_(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from None
    return device


def make_inputs(problem: Problem, case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Drawn on the CPU in float32, so that every device and dtype gets the same numbers, rounded to ``dtype``."""
    n, d, v = problem.tokens, problem.hidden_size, problem.vocab_size
    g = torch.Generator().manual_seed(problem.seed)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = torch.randn(v, d, generator=g).mul_(case.spread / d**0.5).to(dtype)
    labels = torch.randint(v, (n,), generator=g)
    if case.learnt:
        labels[: n // 2] = torch.mm(hidden[: n // 2].float(), weight.float().t()).argmax(1)
    if case.ignored:
        labels[::3] = IGNORED
        labels[n // 2 : n // 2 + n // 4] = IGNORED  # whole blocks of tokens without a label
    bias = torch.randn(v, generator=g).to(dtype).to(device) if case.bias else None
    return Inputs(hidden.to(device), weight.to(device), bias, labels.to(device))


def _from_logits(x: Tensor, labels: Tensor, case: Case, count: int) -> tuple[Tensor, Tensor]:
    """(share of the mean loss, log-probabilities [n]) of a chunk of raw logits ``x`` [n, V], as models write it."""
    z = x * case.logit_scale if case.logit_scale != 1.0 else x
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    z = z if z.dtype == torch.float64 else z.float()
    valid = labels != IGNORED
    nll = F.cross_entropy(z, labels, reduction="none", ignore_index=IGNORED)
    loss = nll
    if case.label_smoothing:
        loss = F.cross_entropy(z, labels, reduction="none", ignore_index=IGNORED, label_smoothing=case.label_smoothing)
    if case.z_loss:
        loss = loss + case.z_loss * z.logsumexp(-1).square() * valid
    return loss.sum() / count, -nll


def _chunks(n: int, v: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (8 * v))
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))


def eager(inputs: Inputs, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """All quantities but those of the logits, with full logits in ``dtype``.

    In chunks of tokens where all of them would take too much memory; what the chunks add up to is added in float64, which
    makes the twin, if anything, more exact than one that holds all logits.
    """
    scale = LOSS_SCALE.get(dtype, 1.0)
    hidden, weight = inputs.hidden.to(dtype), inputs.weight.detach().to(dtype).requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().to(dtype).requires_grad_()
    count = max(1, int((inputs.labels != IGNORED).sum()))
    wide = torch.float32 if hidden.device.type == "mps" else torch.float64
    chunks = list(_chunks(hidden.shape[0], weight.shape[0]))
    loss, log_probs, grad_hidden = 0.0, [], []
    totals: list[Tensor] = []
    for rows in chunks:
        h = hidden[rows].detach().requires_grad_()
        part, lp = _from_logits(F.linear(h, weight, bias), inputs.labels[rows], case, count)
        gradients = torch.autograd.grad(part * scale, [h, weight] if bias is None else [h, weight, bias])
        loss += float(part.detach())
        log_probs.append(lp.detach())
        grad_hidden.append(gradients[0])
        several = [g.to(wide) if len(chunks) > 1 else g for g in gradients[1:]]
        totals = [a.add_(b) for a, b in zip(totals, several, strict=True)] if totals else several
    found = {
        "loss": torch.tensor(loss, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        "log-probs": torch.cat(log_probs),
        "∂hidden": torch.cat(grad_hidden),
        "∂weight": totals[0].to(dtype),
    }
    return found if bias is None else {**found, "∂bias": totals[1].to(dtype)}


def fused(inputs: Inputs, case: Case, config: CCEConfig) -> dict[str, Tensor]:
    """The same quantities, from the fused loss."""
    scale = LOSS_SCALE.get(inputs.hidden.dtype, 1.0)
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    state = FilterState()
    # A gradient filter leaves out nothing before it has seen a step, and then takes some to find its threshold.
    for _ in range(4 if config.gradient_filter is not None and hidden.is_cuda else 1):
        hidden.grad = weight.grad = None
        if bias is not None:
            bias.grad = None
        loss = linear_cross_entropy(
            hidden, weight, inputs.labels, bias=bias, logit_scale=case.logit_scale, softcap=case.softcap,
            label_smoothing=case.label_smoothing, z_loss=case.z_loss, config=config, filter_state=state,
        )  # fmt: skip
        (loss * scale).backward()
        float(loss.detach())  # the host has seen what was kept
    with torch.no_grad():
        log_probs = linear_log_probs(
            hidden, weight, inputs.labels, bias=bias, logit_scale=case.logit_scale, softcap=case.softcap, config=config
        ).log_probs
    found: dict[str, Tensor | None] = {
        "loss": loss.detach(),
        "log-probs": log_probs,
        "∂hidden": hidden.grad,
        "∂weight": weight.grad,
        "∂bias": None if bias is None else bias.grad,
    }
    return {name: x for name, x in found.items() if x is not None}


def fused_logit_gradient(logits: Tensor, inputs: Inputs, case: Case, config: CCEConfig) -> Tensor:
    """∂loss/∂logits, [V, N], with the loss scale, for ``logits`` [V, N] before bias, scale and softcap."""
    n = logits.shape[1]
    weight, bias = logits.requires_grad_(), inputs.bias
    loss = linear_cross_entropy(
        torch.eye(n, dtype=logits.dtype, device=logits.device), weight, inputs.labels, bias=bias,
        logit_scale=case.logit_scale, softcap=case.softcap, label_smoothing=case.label_smoothing, z_loss=case.z_loss,
        config=config,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss * LOSS_SCALE.get(logits.dtype, 1.0), [weight])
    return gradient


def logit_gradient_differences(inputs: Inputs, case: Case, config: CCEConfig, found: Differences) -> None:
    """Adds those of ∂loss/∂logits to ``found``. No more than one [N, V] and its gradient are held at a time."""
    dtype, scale = inputs.hidden.dtype, LOSS_SCALE.get(inputs.hidden.dtype, 1.0)
    n, v = inputs.hidden.shape[0], inputs.weight.shape[0]
    count = max(1, int((inputs.labels != IGNORED).sum()))
    logits = torch.empty(v, n, dtype=dtype, device=inputs.hidden.device)
    for rows in _chunks(n, v):
        logits[:, rows] = torch.mm(inputs.weight, inputs.hidden[rows].t())
    ours = fused_logit_gradient(logits, inputs, case, config)
    theirs, of_ours, apart = found

    def gradient(rows: slice, as_dtype: torch.dtype, device: torch.device, factor: float) -> Tensor:
        leaf = logits[:, rows].detach().t().to(device, as_dtype).contiguous().requires_grad_()
        x = leaf if inputs.bias is None else leaf + inputs.bias.to(device, as_dtype)
        loss, _ = _from_logits(x, inputs.labels[rows].to(device), case, count)
        return torch.autograd.grad(loss * factor, [leaf])[0]

    for rows in _chunks(n, v):
        exact = gradient(rows, torch.float64, _exact_device(logits.device), 1.0)
        twin = gradient(rows, dtype, logits.device, scale).to(exact.device)
        theirs.add(twin, exact, scale)
        of_ours.add(ours[:, rows].t(), exact, scale)
        apart.add(ours[:, rows].t(), twin.double() / scale, scale)


def _exact_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device  # Apple's GPUs have no float64


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    bias = None if inputs.bias is None else inputs.bias.to(device)
    return Inputs(inputs.hidden.to(device), inputs.weight.to(device), bias, inputs.labels.to(device))


def compare(
    problem: Problem, case: Case, dtype_name: str, device: torch.device, configs: list[tuple[str, str, CCEConfig]]
) -> Iterator[Row]:
    """Rows of one case in one dtype, for each of ``configs``: (implementation, gradient filter, configuration)."""
    dtype = getattr(torch, dtype_name)
    scale = LOSS_SCALE.get(dtype, 1.0)
    kinds = [(implementation, gradient_filter) for implementation, gradient_filter, _ in configs]
    # (eager's, ours, ours from eager's) by implementation and filter, and quantity; over all draws
    collected: dict[tuple[str, str], dict[str, Differences]] = {kind: {} for kind in kinds}
    for draw in range(draws(problem.tokens)):
        inputs = make_inputs(replace(problem, seed=problem.seed + 1_000_003 * draw), case, dtype, device)
        exact = eager(_to(inputs, _exact_device(device)), case, torch.float64)
        twin = eager(inputs, case, dtype)
        for kind, (_, _, config) in zip(kinds, configs, strict=True):
            of, found = collected[kind], fused(inputs, case, config)
            for name, right in exact.items():
                factor = scale if name.startswith("∂") else 1.0
                theirs, ours, apart = of.setdefault(name, (Difference(), Difference(), Difference()))
                theirs.add(twin[name], right, factor)
                ours.add(found[name], right, factor)
                apart.add(found[name], twin[name].to(right.device).double() / factor, factor)
            del found
            logit_gradient_differences(
                inputs, case, config, of.setdefault("∂logits", (Difference(), Difference(), Difference()))
            )
    for implementation, gradient_filter in kinds:
        for name, (theirs, ours, apart) in collected[implementation, gradient_filter].items():
            yield Row(
                dtype_name, implementation, gradient_filter, case.name, name, (theirs.largest, theirs.relative),
                (ours.largest, ours.relative), allowed(theirs.relative, dtype), apart.largest,
            )  # fmt: skip


def draws(tokens: int) -> int:
    """How often to draw inputs: of a few tokens, which of two equally rounded results is closer is a matter of luck."""
    return min(64, -(-ENOUGH_TOKENS // tokens))


def configurations(device: torch.device, dtype_name: str) -> tuple[list[tuple[str, str, CCEConfig]], list[str]]:
    """What can be run on ``device`` in that dtype, (implementation, gradient filter, configuration), and why the rest cannot."""
    dtype = getattr(torch, dtype_name)
    filters: dict[str, dict[str, Any]] = {"": {}}
    if any(f.name == "gradient_filter" for f in fields(CCEConfig)):
        filters = {"auto": {"gradient_filter": "auto"}, "exact": {"gradient_filter": None}}
    found: list[tuple[str, str, CCEConfig]] = []
    notes = []
    probe = make_inputs(Problem(4, 16, 32), CASES[0], dtype, device)
    try:
        eager(probe, CASES[0], dtype)
    except (RuntimeError, TypeError) as error:
        return [], [f"{dtype_name}: plain PyTorch has none on {device.type}: {str(error).splitlines()[0]}"]
    for implementation in IMPLEMENTATIONS:
        interpreted = implementation == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted and dtype == torch.bfloat16:
            notes.append("triton in bfloat16: Triton's interpreter truncates where a GPU rounds")
            continue
        try:
            fused(probe, CASES[0], CCEConfig(implementation))
        except (RuntimeError, ImportError) as error:
            notes.append(f"{implementation}: {_reason(error)}")
            continue
        # Only the kernels have a filter.
        for name, options in (filters if implementation == "triton" else {"": {}}).items():
            found.append((implementation, name, CCEConfig(implementation, **options)))
    return found, notes


def _reason(error: Exception) -> str:
    """Why an implementation cannot run; what else its error says is advice for who asked for it, and nobody did."""
    return re.sub(r".*cannot run here: (.*); use.*", r"\1", str(error).splitlines()[0])


def default_problem(device: torch.device) -> Problem:
    """Small on a CPU, on a GPU large enough for the gradient filter; odd sizes, so that tiles are cut."""
    return Problem(2500, 2048, 32_003) if device.type == "cuda" else Problem(150, 72, 2003)


def gradcheck(
    problem: Problem,
    device: torch.device,
    dtypes: tuple[str, ...] = DTYPES,
    cases: tuple[Case, ...] = CASES,
    follow: Callable[[str], None] = lambda what: None,
    reference: bool = False,
) -> Report:
    """Every comparison that ``device`` can do; ``follow`` is told what is being computed.

    Raises:
        ValueError: there is nothing that ``device`` can do; the message says why.
    """
    start = time.perf_counter()
    report = Report(_device_name(device), problem, reference=reference)
    for dtype in dtypes:
        configs, notes = configurations(device, dtype)
        report.notes += [note for note in notes if note not in report.notes]
        for case in cases if configs else ():
            follow(f"{dtype}, {case.name}")
            report.rows += compare(problem, case, dtype, device, configs)
    report.seconds, report.peak_bytes = time.perf_counter() - start, memory.peak(device)
    if not report.rows:
        raise ValueError(f"nothing can be compared on {device}: {'; '.join(report.notes)}")
    return report


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
