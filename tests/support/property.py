"""Random cases of the loss against float64, judged by numerics.py. On a GPU:

    python -m tests.support.property --cases 10000 --json benchmarks/results/property.json

A seed gives the same case on all devices of one kind. Kernels are compiled for the shapes and options of 96 variants; tokens,
values, labels and ignored tokens vary from case to case. tests/loss/test_property.py runs some cases on the CPU.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from losses import (
    Inputs,
    Options,
    full_logits,
    fused_loss,
    loss_and_gradients,
    loss_of_logits,
    plain_loss,
    scaled_and_capped,
)
from numerics import budget, exponent_rounding, relative_error
from torch import Tensor

from hf_cce import CCEConfig

VARIANTS = 96
MOST_LOGITS = 1 << 26  # per case: several float64 copies of them exist at once
VALUES = ("normal", "flat", "equal", "one-hot", "large", "huge", "foreseen", "not foreseen", "NaN", "infinity")
IGNORED = ("none", "some", "most", "first block", "half")


@dataclass(frozen=True)
class Variant:
    """Parameters for which kernels are, or may be, compiled."""

    dtype: str
    d: int
    v: int
    options: Options
    budget: int | str
    strided: bool  # hidden states and labels are not contiguous


@dataclass(frozen=True)
class Case:
    variant: Variant
    n: int
    values: str
    ignored: str
    one_label: bool  # the same for all tokens
    seed: int


def variants(large: bool) -> list[Variant]:
    """Return the same variants on every call; ``large`` uses the vocabulary sizes of real models."""
    draw = random.Random(0)
    sizes = (1, 2, 99, 1000, 32000, 50257, 262144) if large else (1, 2, 34, 99, 131)
    found = []
    while len(found) < VARIANTS:
        variant = Variant(
            draw.choice(("float32", "float16", "bfloat16") if large else ("float32", "float16")),
            draw.choice((64, 72, 576)) if large else draw.choice((24, 64, 72)),
            draw.choice(sizes),
            Options(
                draw.choice((1.0, 0.7)), draw.choice((None, 5.0)), draw.random() < 0.3, draw.choice((0.0, 0.0, 0.1)),
                draw.choice((0.0, 1e-2)), draw.choice(("mean", "mean", "sum", "none")), draw.random() < 0.2,
            ),
            draw.choice(("auto", 1 << 20, 16 << 20)),
            draw.random() < 0.3,
        )  # fmt: skip
        # With one or two entries, label smoothing and the bias's gradient are differences of nearly equal numbers.
        if variant.v > 2 or not (variant.options.label_smoothing or variant.options.bias):
            found.append(variant)
    return found


def make_case(seed: int, large: bool) -> Case:
    draw = random.Random(seed)
    variant, values = draw.choice(variants(large)), draw.choice(VALUES)
    n = draw.randint(16, min(2048, MOST_LOGITS // variant.v) if large else 50)
    # With logits of ±10⁴ a softcap has zero gradient, and a z-loss overflows float16.
    if values == "huge" and (variant.options.softcap or variant.options.z_loss):
        values = "large"
    return Case(variant, n, values, draw.choice(IGNORED), draw.random() < 0.1, seed)


def tensors(case: Case, device: str) -> tuple[Inputs, Tensor]:
    """Return ((hidden_states [N, D], weight [V, D], bias [V] or None), labels [N]) of a case."""
    g = torch.Generator(device).manual_seed(case.seed)
    n, d, v, dtype = case.n, case.variant.d, case.variant.v, getattr(torch, case.variant.dtype)
    weight = torch.randn(v, d, generator=g, device=device) * (2 / d**0.5)
    labels = torch.randint(v, (n,), generator=g, device=device)
    hidden = torch.randn(n, d, generator=g, device=device)
    if case.one_label:
        labels[:] = int(labels[0])
    if case.values in ("flat", "equal"):
        hidden *= 0.05 if case.values == "flat" else 0.0
    elif case.values == "one-hot":
        hidden = torch.nn.functional.one_hot(torch.randint(d, (n,), generator=g, device=device), d).float() * 8
    elif case.values in ("large", "huge"):  # logits of some tens, or beyond ±10⁴
        hidden *= 30 if case.values == "large" else 6000
    elif case.values in ("foreseen", "not foreseen"):  # p of the label near 1, or near 0
        hidden += (1 if case.values == "foreseen" else -1) * 0.75 * weight[labels]
    if case.ignored != "none":
        share = {"some": 0.7, "most": 0.3, "first block": 1.0, "half": 0.5}[case.ignored]
        keep = torch.rand(n, generator=g, device=device) < share
        keep[: n // 2] &= case.ignored != "first block"
        keep[-1] = True  # at least one token must remain
        labels = torch.where(keep, labels, -100)
    if case.values in ("NaN", "infinity"):
        hidden[-1, 0] = float("nan") if case.values == "NaN" else float("inf")
    bias = torch.randn(v, generator=g, device=device).to(dtype) if case.variant.options.bias else None
    hidden = hidden.to(dtype)
    if case.variant.strided:
        hidden, labels = torch.stack([hidden, hidden], 1)[:, 0], torch.stack([labels, labels], 1)[:, 0]
    return (hidden, weight.to(dtype), bias), labels


def plain_loss_rounded_once(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options
) -> Tensor:
    """Compute ``plain_loss`` with logits widened to float32 right after the product, so that they are rounded only once."""
    z = (hidden @ weight.t()).float()
    return loss_of_logits(scaled_and_capped(z if bias is None else z + bias.float(), options), labels, options)


def label_logit_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
    """Return the label's logit term of the loss. Its gradient is that of the loss with all probabilities set to zero."""
    valid = labels != -100
    z = full_logits(hidden, weight, bias, options).gather(1, labels.where(valid, 0)[:, None])[:, 0] * valid
    if options.reduction == "none":
        return z
    return z.sum() / (valid.sum() if options.reduction == "mean" else 1)


class ErrorAndLimit(NamedTuple):
    """The relative error of a loss or gradient, and its limit."""

    error: float
    allowed: float
    rounding: float  # additional error from recomputing the probabilities


def errors(case: Case, device: str, implementation: str) -> dict[str, ErrorAndLimit]:
    """Return the errors of the loss and each gradient; for inputs with NaN or infinity, {} after a check of what is finite.

    The worst of three full-logits runs counts: unmodified, with the hidden dimension reversed, and with logits rounded once.
    """
    options, dtype = case.variant.options, getattr(torch, case.variant.dtype)
    loss = fused_loss(CCEConfig(implementation, case.variant.budget, None))  # type: ignore[arg-type]
    inputs, labels = tensors(case, device)
    if case.values in ("NaN", "infinity"):
        found, expected = (bool(f(*inputs, labels, options).isfinite().all()) for f in (loss, plain_loss))
        assert found == expected, f"{case}: finite {found}, with full logits {expected}"
        return {}
    actual = loss_and_gradients(loss, inputs, labels, options, dtype)
    exact = loss_and_gradients(plain_loss, inputs, labels, options, torch.float64)
    baseline = loss_and_gradients(plain_loss, inputs, labels, options, dtype)
    hidden, weight, bias = inputs
    reversed_sum = loss_and_gradients(plain_loss, (hidden.flip(-1), weight.flip(-1), bias), labels, options, dtype)
    rounded_once = loss_and_gradients(plain_loss_rounded_once, inputs, labels, options, dtype)
    label_grads = loss_and_gradients(label_logit_loss, inputs, labels, options, torch.float64)
    rounding = exponent_rounding(float(full_logits(*inputs, options).abs().max()))
    result = {}
    for name, value in actual.items():
        opposite = reversed_sum[name].flip(-1) if name in ("hidden", "weight") else reversed_sum[name]
        baselines = [relative_error(x, exact[name]) for x in (baseline[name], opposite, rounded_once[name])]
        # Size of the probabilities' part of the gradient; the label's part cancels it if p is near one
        size = float(label_grads[name].norm()) / (float(exact[name].norm()) or 1.0)
        allowed = budget(max(baselines), dtype)
        result[name] = ErrorAndLimit(
            relative_error(value, exact[name]), allowed, 0.0 if name == "loss" else rounding * size
        )
    return result


def check(case: Case, device: str, implementation: str) -> None:
    for name, (error, allowed, _) in errors(case, device, implementation).items():
        assert error <= allowed, f"{case}: {name}: relative error {error:.2e} exceeds {allowed:.2e}"


def check_among_thousands(case: Case, device: str, implementation: str) -> None:
    """Run ``check`` allowing for the rounding of recomputed probabilities and for outliers among thousands of cases.

    If few tokens dominate, full logits may be nearly exact by chance. So a case that exceeds its limit is drawn four more
    times, and the root mean squares of all five are compared: a systematic error remains.
    """
    found = [errors(case, device, implementation)]
    if all(error <= allowed + rounding for error, allowed, rounding in found[0].values()):
        return
    draws = (replace(case, n=max(16, case.n * (5 - k) // 5), seed=case.seed + k * 10**9) for k in range(1, 5))
    found += [errors(draw, device, implementation) for draw in draws]
    for name in found[0]:
        pairs = [(each[name].error, each[name].allowed + each[name].rounding) for each in found]
        error, allowed = (sum(pair[i] ** 2 for pair in pairs) ** 0.5 for i in (0, 1))
        assert error <= allowed, f"{case}: {name}: of five draws {pairs}"


def run(seeds: range, implementation: str) -> list[dict[str, Any]]:
    device, failures = "cuda" if torch.cuda.is_available() else "cpu", []
    for seed in seeds:
        case = make_case(seed, device == "cuda")
        try:
            check_among_thousands(case, device, implementation)
        except Exception as error:  # report failures of any kind
            failures.append({"case": asdict(case), "error": f"{type(error).__name__}: {error}"[:900]})
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10000, help="the first has the seed 0")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop then; the same command goes on")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--parallel", type=int, default=1, help="processes on one device")
    parser.add_argument("--json", type=Path, required=True, help="cases that it holds already are not run again")
    options = parser.parse_args()
    report = {
        "date": date.today().isoformat(), "command": f"python -m tests.support.property --cases {options.cases}",
        "implementation": options.implementation,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version(name) for name in ("torch", "triton")}, "cases": 0, "failures": [],
    }  # fmt: skip
    if options.json.is_file():
        known = json.loads(options.json.read_text("utf-8"))
        report |= {"cases": known["cases"], "failures": known["failures"]}
    began, at_once = time.monotonic(), 50
    starts = range(report["cases"], options.cases, at_once)
    chunks = [range(start, min(start + at_once, options.cases)) for start in starts]
    with get_context("spawn").Pool(options.parallel) as pool:
        for failures in pool.imap(partial(run, implementation=options.implementation), chunks):
            report["failures"] += failures
            report["cases"] = min(report["cases"] + at_once, options.cases)
            options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
            seconds = time.monotonic() - began
            print(f"{report['cases']} cases, {len(report['failures'])} failures, {seconds:.0f} s", flush=True)
            if seconds > options.seconds:
                break
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
