"""``hf-cce gradcheck``: compare loss, log-probabilities and gradients with float64, beside those of full logits.

The rule is that of ``tests/support/numerics.py``: a result may be as far from the exact one as the same result of full
logits in the same dtype, plus rounding. The exact one is computed with full logits in float64 from the same inputs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy, linear_log_probs
from hf_cce.diagnostics import machine

IMPLEMENTATIONS: tuple[Literal["portable", "triton"], ...] = ("portable", "triton")
DTYPES = ("float32", "bfloat16", "float16")
IGNORED = -100
CHUNK_BYTES = 128 << 20  # of float64 logits at a time; some five copies live at once
ENOUGH_TOKENS = 128
# As in float16 training: without a loss scale gradients underflow, with full logits and with ours.
LOSS_SCALE = {torch.float16: 4096.0}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """Sizes N, D, V of the inputs, and the seed that they are drawn by."""

    tokens: int
    hidden_size: int
    vocab_size: int
    seed: int = 0


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
    """Return the relative error that a result of ``dtype`` may have where full logits have ``twin_error``."""
    unit = torch.finfo(dtype).eps
    return twin_error + unit / 16 if dtype in (torch.float16, torch.bfloat16) else 2 * twin_error + 16 * unit


@dataclass
class Difference:
    """Largest absolute and relative (norm) difference from the exact result, collected piece by piece."""

    largest: float = 0.0
    squares: float = 0.0
    exact_squares: float = 0.0

    def add(self, actual: Tensor, exact: Tensor, scale: float) -> None:
        """Add a piece: both of one shape, ``exact`` in float64; ``actual`` carries the loss scale."""
        off = actual.detach().to(exact.device).double().div_(scale).sub_(exact)
        self.largest = max(self.largest, _or_infinite(float(off.abs().max())))
        self.squares += _or_infinite(float(off.square().sum()))
        self.exact_squares += float(exact.square().sum())

    @property
    def relative(self) -> float:
        """Return ‖actual − exact‖ / ‖exact‖, or ‖actual‖ where ``exact`` is zero."""
        return math.sqrt(self.squares / self.exact_squares if self.exact_squares else self.squares)


def _or_infinite(x: float) -> float:
    return math.inf if x != x else x


@dataclass(frozen=True)
class Row:
    """One comparison. Errors are (largest absolute, relative); ``allowed`` is relative."""

    dtype: str
    implementation: str
    gradient_filter: str  # "" where there is none
    case: str
    quantity: str
    full_logits: tuple[float, float]
    hf_cce: tuple[float, float]
    allowed: float

    @property
    def ok(self) -> bool:
        return self.hf_cce[1] <= self.allowed

    @property
    def share(self) -> float:
        """Return the share of what is allowed; more than 1 fails."""
        return self.hf_cce[1] / self.allowed


@dataclass
class Report:
    """What ``gradcheck`` found."""

    device: str
    problem: Problem
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be compared, and why
    seconds: float = 0.0

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield (dtype, implementation and filter in words, their rows), in order of appearance."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.dtype, row.implementation, row.gradient_filter), []).append(row)
        for (dtype, implementation, gradient_filter), rows in found.items():
            yield f"{dtype}, {implementation}" + (f", filter {gradient_filter}" if gradient_filter else ""), rows

    def to_json(self) -> dict[str, Any]:
        def plain(x: float) -> float | str:
            return x if math.isfinite(x) else "inf"  # JSON has no infinity

        def errors(pair: tuple[float, float]) -> dict[str, float | str]:
            return {"largest": plain(pair[0]), "relative": plain(pair[1])}

        rows = [
            {
                **asdict(row),
                "full_logits": errors(row.full_logits),
                "hf_cce": errors(row.hf_cce),
                "allowed": plain(row.allowed),
                "ok": row.ok,
            }
            for row in self.rows
        ]
        return {
            "device": self.device,
            "versions": machine.versions("torch", "triton", "transformers"),
            "problem": asdict(self.problem),
            "ok": not self.failures,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "rows": rows,
        }


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]

    def to(self, device: torch.device) -> Inputs:
        bias = None if self.bias is None else self.bias.to(device)
        return Inputs(self.hidden.to(device), self.weight.to(device), bias, self.labels.to(device))


def make_inputs(problem: Problem, case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draw on the CPU in float32, so that every device and dtype gets the same numbers, rounded to ``dtype``."""
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
    bias = torch.randn(v, generator=g).to(dtype) if case.bias else None
    return Inputs(hidden, weight, bias, labels).to(device)


def _from_logits(x: Tensor, labels: Tensor, case: Case, count: int) -> tuple[Tensor, Tensor]:
    """Return (share of the mean loss, log-probabilities [n]) of a chunk of raw logits ``x`` [n, V]."""
    z = x * case.logit_scale if case.logit_scale != 1.0 else x
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    z = z if z.dtype == torch.float64 else z.float()
    nll = F.cross_entropy(z, labels, reduction="none", ignore_index=IGNORED)
    loss = F.cross_entropy(
        z, labels, reduction="none", ignore_index=IGNORED, label_smoothing=case.label_smoothing
    )  # of 0.0: the same
    if case.z_loss:
        loss = loss + case.z_loss * z.logsumexp(-1).square() * (labels != IGNORED)
    return loss.sum() / count, -nll


def with_full_logits(inputs: Inputs, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all quantities, computed with full logits in ``dtype``.

    Works in chunks of tokens where all logits would take too much memory, and adds the chunks up in float64, which makes
    the result slightly more exact than that of one chunk.
    """
    scale = LOSS_SCALE.get(dtype, 1.0)
    hidden, weight = inputs.hidden.to(dtype), inputs.weight.detach().to(dtype).requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().to(dtype).requires_grad_()
    count = max(1, int((inputs.labels != IGNORED).sum()))
    wide = torch.float32 if hidden.device.type == "mps" else torch.float64
    size = max(1, CHUNK_BYTES // (8 * len(weight)))
    loss, log_probs, grad_hidden = 0.0, [], []
    totals: list[Tensor] = []
    for h, labels in zip(hidden.split(size), inputs.labels.split(size), strict=True):
        h = h.detach().requires_grad_()
        part, lp = _from_logits(F.linear(h, weight, bias), labels, case, count)
        gradients = torch.autograd.grad(part * scale, [h, weight] if bias is None else [h, weight, bias])
        loss += float(part.detach())
        log_probs.append(lp.detach())
        grad_hidden.append(gradients[0])
        several = [g.to(wide) if len(hidden) > size else g for g in gradients[1:]]
        totals = [a.add_(b) for a, b in zip(totals, several, strict=True)] if totals else several
    found = {
        "loss": torch.tensor(loss, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        "log-probs": torch.cat(log_probs),
        "∂hidden": torch.cat(grad_hidden),
        "∂weight": totals[0].to(dtype),
    }
    return found if bias is None else {**found, "∂bias": totals[1].to(dtype)}


def with_hf_cce(inputs: Inputs, case: Case, config: CCEConfig) -> dict[str, Tensor]:
    """Return the same quantities, computed by hf_cce."""
    scale = LOSS_SCALE.get(inputs.hidden.dtype, 1.0)
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    options: dict[str, Any] = dict(bias=bias, logit_scale=case.logit_scale, softcap=case.softcap, config=config)
    state = FilterState()
    # A gradient filter drops nothing in its first step, and needs a few to find its threshold.
    for _ in range(4 if config.gradient_filter is not None and hidden.is_cuda else 1):
        hidden.grad = weight.grad = None
        if bias is not None:
            bias.grad = None
        loss = linear_cross_entropy(
            hidden, weight, inputs.labels, label_smoothing=case.label_smoothing, z_loss=case.z_loss, filter_state=state,
            **options,
        )  # fmt: skip
        (loss * scale).backward()
        float(loss.detach())  # the host learns what was kept
    with torch.no_grad():
        log_probs = linear_log_probs(hidden, weight, inputs.labels, **options).log_probs
    found = {"loss": loss.detach(), "log-probs": log_probs, "∂hidden": hidden.grad, "∂weight": weight.grad}
    found["∂bias"] = None if bias is None else bias.grad
    return {name: x for name, x in found.items() if x is not None}


Config = tuple[str, str, CCEConfig]  # implementation, gradient filter, configuration


def compare(
    problem: Problem, case: Case, dtype_name: str, device: torch.device, configs: list[Config]
) -> Iterator[Row]:
    """Yield the rows of one case in one dtype for each of ``configs``."""
    dtype = getattr(torch, dtype_name)
    exact_device = torch.device("cpu") if device.type == "mps" else device  # Apple's GPUs have no float64
    scale = LOSS_SCALE.get(dtype, 1.0)
    theirs: dict[str, Difference] = {}
    ours: dict[tuple[str, str], dict[str, Difference]] = {(name, of): {} for name, of, _ in configs}
    for draw in range(draws(problem.tokens)):
        inputs = make_inputs(replace(problem, seed=problem.seed + 1_000_003 * draw), case, dtype, device)
        exact = with_full_logits(inputs.to(exact_device), case, torch.float64)
        twin = with_full_logits(inputs, case, dtype)
        for name, right in exact.items():
            theirs.setdefault(name, Difference()).add(twin[name], right, scale if name.startswith("∂") else 1.0)
        for implementation, gradient_filter, config in configs:
            found, of = with_hf_cce(inputs, case, config), ours[implementation, gradient_filter]
            for name, right in exact.items():
                of.setdefault(name, Difference()).add(found[name], right, scale if name.startswith("∂") else 1.0)
    for (implementation, gradient_filter), of in ours.items():
        for name, difference in of.items():
            full = theirs[name]
            yield Row(
                dtype_name, implementation, gradient_filter, case.name, name, (full.largest, full.relative),
                (difference.largest, difference.relative), allowed(full.relative, dtype),
            )  # fmt: skip


def draws(tokens: int) -> int:
    """Return how often to draw inputs: with few tokens, which of two equally rounded results is closer is luck."""
    return min(64, -(-ENOUGH_TOKENS // tokens))


def configurations(device: torch.device, dtype_name: str) -> tuple[list[Config], list[str]]:
    """Return what can run on ``device`` in that dtype, and why the rest cannot."""
    dtype = getattr(torch, dtype_name)
    found: list[Config] = []
    notes = []
    probe = make_inputs(Problem(4, 16, 32), CASES[0], dtype, device)
    try:
        with_full_logits(probe, CASES[0], dtype)
    except (RuntimeError, TypeError) as error:
        return [], [f"{dtype_name}: PyTorch has none on {device.type}: {str(error).splitlines()[0]}"]
    for implementation in IMPLEMENTATIONS:
        interpreted = implementation == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted and dtype == torch.bfloat16:
            notes.append("triton in bfloat16: Triton's interpreter truncates where a GPU rounds")
            continue
        try:
            with_hf_cce(probe, CASES[0], CCEConfig(implementation))
        except (RuntimeError, ImportError) as error:
            notes.append(f"{implementation}: {str(error).splitlines()[0]}")
            continue
        if implementation == "portable":  # only the kernels have a filter
            found.append((implementation, "", CCEConfig(implementation)))
            continue
        found.append((implementation, "auto", CCEConfig(implementation, gradient_filter="auto")))
        found.append((implementation, "exact", CCEConfig(implementation, gradient_filter=None)))
    return found, notes


def default_problem(device: torch.device) -> Problem:
    """Return a small problem for a CPU, for a GPU one that uses the gradient filter; odd sizes, so that tiles are cut."""
    return Problem(2500, 2048, 32_003) if device.type == "cuda" else Problem(150, 72, 2003)


def gradcheck(problem: Problem, device: torch.device, dtypes: tuple[str, ...] = DTYPES, say: Say = print) -> Report:
    """Compare everything that ``device`` can compute; ``say`` is told what is being computed.

    Raises:
        ValueError: ``device`` can compute nothing of it.
    """
    start = time.perf_counter()
    report = Report(machine.device_name(device), problem)
    for dtype in dtypes:
        configs, notes = configurations(device, dtype)
        report.notes += [note for note in notes if note not in report.notes]
        for case in CASES if configs else ():
            say(f"{dtype}, {case.name}")
            report.rows += compare(problem, case, dtype, device, configs)
    report.seconds = time.perf_counter() - start
    if not report.rows:
        raise ValueError(f"nothing can be compared on {device}: {'; '.join(report.notes)}")
    return report
