"""``hf-cce gradcheck``: compare loss, log-probabilities and gradients with float64, and their errors with those of full logits.

The rule is that of ``tests/support/numerics.py``: the error of a result may be as large as that of full logits in the same dtype,
plus rounding. The exact result is computed with full logits in float64 from the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy, linear_log_probs
from hf_cce.diagnostics import machine
from hf_cce.diagnostics.machine import Progress
from hf_cce.dispatch import MIN_CAPABILITY_FORCED, why_no_triton

# Only the kernels have a gradient filter.
CONFIGS = {
    "portable": CCEConfig("portable"),
    "triton, filter auto": CCEConfig("triton", gradient_filter="auto"),
    "triton, no filter": CCEConfig("triton", gradient_filter=None),
}
DTYPES = ("float32", "bfloat16", "float16")
IGNORED = -100
CHUNK_BYTES = 128 << 20  # of float64 logits per chunk; about five copies exist at once
# As in float16 training: without a loss scale gradients underflow, with full logits and with the fused loss.
LOSS_SCALE = {torch.float16: 4096.0}


class Problem(NamedTuple):
    """Sizes N, D, V of the inputs. With few tokens, chance would decide which result is closer to float64."""

    tokens: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Case:
    """Options of the loss and properties of the inputs."""

    name: str
    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    ignored: bool = False
    spread: float = 2.0  # standard deviation of the logits
    trained: bool = False  # half of the labels are the most probable entry


PLAIN = Case("plain")
EVERYTHING = Case("everything", 0.7, 5.0, 0.1, 1e-2, True, True)
CASES = (
    PLAIN,
    Case("peaked", spread=8.0, trained=True),
    Case("softcap", logit_scale=0.7, softcap=5.0),
    Case("smoothing", label_smoothing=0.1),
    Case("z-loss", z_loss=1e-2),
    Case("bias", bias=True),
    Case("ignored", ignored=True),
    EVERYTHING,
)


def allowed_error(baseline_error: float, dtype: torch.dtype) -> float:
    """Return the relative error allowed for a result of ``dtype`` if full logits have the error ``baseline_error``."""
    unit = torch.finfo(dtype).eps
    return baseline_error + unit / 16 if dtype in (torch.float16, torch.bfloat16) else 2 * baseline_error + 16 * unit


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return ‖x − exact‖ / ‖exact‖, or ‖x‖ where ``exact`` is zero, in ``exact``'s dtype; infinity for NaN."""
    size = float(exact.norm())
    error = float((x.detach().to(exact) - exact).norm()) / (size or 1.0)
    return math.inf if math.isnan(error) else error


class Inputs(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    labels: Tensor  # [N]
    bias: Tensor | None = None  # [V]

    def to(self, where: Any) -> Inputs:
        """Return a detached copy on a device or in a dtype; a dtype does not apply to the labels."""
        bias = None if self.bias is None else self.bias.detach().to(where)
        labels = self.labels.to(where) if isinstance(where, torch.device) else self.labels
        return Inputs(self.hidden.detach().to(where), self.weight.detach().to(where), labels, bias)

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that get gradients, with ``requires_grad`` set, by the names of their gradients."""
        tensors = {"∂hidden": self.hidden, "∂weight": self.weight} | ({} if self.bias is None else {"∂bias": self.bias})
        return {name: x.requires_grad_() for name, x in tensors.items()}


def make_inputs(problem: Problem, case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draw inputs on the CPU in float32, so that every device and dtype gets the same numbers, rounded to ``dtype``."""
    (n, d, v), g = problem, torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = torch.randn(v, d, generator=g).mul_(case.spread / d**0.5).to(dtype)
    labels = torch.randint(v, (n,), generator=g)
    if case.trained:
        labels[: n // 2] = torch.mm(hidden[: n // 2].float(), weight.float().t()).argmax(1)
    if case.ignored:
        labels[::3] = IGNORED
        labels[n // 2 : n // 2 + n // 4] = IGNORED  # whole blocks of tokens without a label
    bias = torch.randn(v, generator=g).to(dtype) if case.bias else None
    return Inputs(hidden, weight, labels, bias).to(device)


def _from_logits(x: Tensor, labels: Tensor, case: Case, count: int) -> tuple[Tensor, Tensor]:
    """Return (share of the mean loss, log-probabilities [n]) of a chunk of raw logits ``x`` [n, V]."""
    z = x * case.logit_scale if case.logit_scale != 1.0 else x
    z = z if case.softcap is None else case.softcap * torch.tanh(z / case.softcap)
    z = z if z.dtype == torch.float64 else z.float()
    options: dict[str, Any] = dict(reduction="none", ignore_index=IGNORED)
    loss = F.cross_entropy(z, labels, label_smoothing=case.label_smoothing, **options)
    if case.z_loss:
        loss = loss + case.z_loss * z.logsumexp(-1).square() * (labels != IGNORED)
    return loss.sum() / count, -F.cross_entropy(z.detach(), labels, **options)


def with_full_logits(inputs: Inputs, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all quantities, computed with full logits in ``dtype``; gradients are multiplied by its loss scale."""
    scale = LOSS_SCALE.get(dtype, 1.0)
    copy = inputs.to(dtype)
    leaves, (hidden, weight, all_labels, bias) = copy.leaves(), copy
    count = max(1, int((all_labels != IGNORED).sum()))
    # In a wider dtype, the logits of all tokens may not fit.
    size = len(hidden) if dtype == inputs.hidden.dtype else max(1, CHUNK_BYTES // (8 * len(weight)))
    losses, log_probs = [], []
    for h, labels in zip(hidden.split(size), all_labels.split(size), strict=True):
        loss, lp = _from_logits(F.linear(h, weight, bias), labels, case, count)
        (loss * scale).backward()
        losses.append(loss.detach())
        log_probs.append(lp.detach())
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"loss": torch.stack(losses).sum(), "log-probs": torch.cat(log_probs), **gradients}


def with_hf_cce(inputs: Inputs, case: Case, config: CCEConfig) -> dict[str, Tensor]:
    """Return the same quantities, computed by hf_cce."""
    scale, state = LOSS_SCALE.get(inputs.hidden.dtype, 1.0), FilterState()
    options: dict[str, Any] = dict(logit_scale=case.logit_scale, softcap=case.softcap, config=config)
    more: dict[str, Any] = dict(label_smoothing=case.label_smoothing, z_loss=case.z_loss, filter_state=state)
    copy = inputs.to(inputs.hidden.dtype)
    leaves, (hidden, weight, labels, bias) = copy.leaves(), copy
    # A gradient filter drops nothing in its first step, and needs a few to find its threshold.
    for _ in range(4 if config.gradient_filter is not None and hidden.is_cuda else 1):
        for x in leaves.values():
            x.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, **options, **more)
        (loss * scale).backward()
        float(loss.detach())  # synchronize, so that the filter's measurements of this step arrive
    with torch.no_grad():
        log_probs = linear_log_probs(hidden, weight, labels, bias=bias, **options).log_probs
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"loss": loss.detach(), "log-probs": log_probs, **gradients}


def compare(
    problem: Problem, case: Case, dtype_name: str, device: torch.device, names: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one case in one dtype for each of ``names``, which are keys of ``CONFIGS``."""
    dtype = getattr(torch, dtype_name)
    exact_device = torch.device("cpu") if device.type == "mps" else device  # Apple's GPUs have no float64
    inputs = make_inputs(problem, case, dtype, device)
    exact = with_full_logits(inputs.to(exact_device), case, torch.float64)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        scales = {name: LOSS_SCALE.get(dtype, 1.0) if name.startswith("∂") else 1.0 for name in exact}
        return {name: relative_error(found[name].to(right) / scales[name], right) for name, right in exact.items()}

    full_logits = errors(with_full_logits(inputs, case, dtype))
    for name in names:
        for quantity, error in errors(with_hf_cce(inputs, case, CONFIGS[name])).items():
            limit = allowed_error(full_logits[quantity], dtype)
            yield {
                "computed_by": f"{dtype_name}, {name}",
                "case": case.name,
                "quantity": quantity,
                "full_logits": full_logits[quantity],
                "hf_cce": error,
                "allowed": limit,
                "ok": error <= limit,
            }


def default_problem(device: torch.device) -> Problem:
    """Return a small problem for a CPU, and for a GPU one large enough for the gradient filter; odd sizes give partial tiles."""
    return Problem(2500, 2048, 32_003) if device.type == "cuda" else Problem(150, 72, 2003)


def gradcheck(
    problem: Problem,
    device: torch.device,
    dtypes: tuple[str, ...] = DTYPES,
    progress: Progress = lambda what: None,
    cases: tuple[Case, ...] = CASES,
) -> dict[str, Any]:
    """Compare everything that ``device`` can compute; return a JSON-ready report, whose "notes" say what was left out."""
    notes: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        why = why_no_triton(device, getattr(torch, dtype), MIN_CAPABILITY_FORCED)
        if why is None and device.type == "cpu" and dtype == "bfloat16":
            why = "Triton's interpreter truncates to bfloat16, but a GPU rounds"
        names = [name for name, config in CONFIGS.items() if config.implementation == "portable" or why is None]
        if len(names) < len(CONFIGS):
            notes[f"triton: {why}"] = None
        for case in cases:
            progress(f"{dtype}, {case.name}")
            rows += compare(problem, case, dtype, device, names)
    return {
        "ok": all(row["ok"] for row in rows),
        "device": machine.device_name(device),
        "problem": problem._asdict(),
        "notes": list(notes),
        "versions": machine.versions("torch", "triton", "transformers"),
        "rows": rows,
    }


def error_ratio(row: dict[str, Any]) -> float:
    return row["hf_cce"] / row["allowed"]


def verdict(report: dict[str, Any]) -> str:
    rows = report["rows"]
    failures = [row for row in rows if not row["ok"]]
    if not failures:
        return f"All {len(rows)} results are as close to float64 as with full logits, plus rounding."
    worst = max(failures, key=error_ratio)
    return (
        f"{len(failures)} of {len(rows)} results are less accurate than allowed; the worst is {worst['quantity']} "
        f"({worst['computed_by']}; {worst['case']}): relative error {worst['hf_cce']:.1e}, allowed {worst['allowed']:.1e}."
    )
