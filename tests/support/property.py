"""Random cases of the loss against float64, judged by numerics.py: on a GPU

    python -m tests.support.property --cases 10000 --seed 1 --out property.json

A seed gives the same cases again. The shapes and options that a kernel is compiled for come from 96 variants; tokens, values,
labels and what is ignored vary from case to case. tests/loss/test_property.py runs some of them on the CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from losses import Inputs, Options, fused_loss, loss_and_gradients, plain_loss
from numerics import assert_as_good
from torch import Tensor

from hf_cce import CCEConfig

VARIANTS = 96
VALUES = ("normal", "flat", "equal", "one-hot", "large", "huge", "foreseen", "not foreseen", "NaN", "infinity")
IGNORED = ("none", "some", "most", "first block", "half")


@dataclass(frozen=True)
class Variant:
    """What kernels are compiled for, or may be."""

    dtype: str
    d: int
    v: int
    options: Options
    budget: int | str
    strided: bool  # hidden states and labels lie apart


@dataclass(frozen=True)
class Case:
    variant: Variant
    n: int
    values: str
    ignored: str
    one_label: bool  # for all tokens
    seed: int


def variants(large: bool) -> list[Variant]:
    """Return the same variants each time; ``large``: with the vocabularies of real models."""
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
        # Of one or two entries, label smoothing and the bias's gradient leave a difference of numbers that are nearly equal.
        if variant.v > 2 or not (variant.options.label_smoothing or variant.options.bias):
            found.append(variant)
    return found


def make_case(seed: int, large: bool) -> Case:
    draw = random.Random(seed)
    variant, n, values = draw.choice(variants(large)), draw.randint(16, 2048 if large else 50), draw.choice(VALUES)
    # Logits of ±10⁴: a softcap has no gradient left there, and a z-loss leaves the range of float16.
    if values == "huge" and (variant.options.softcap or variant.options.z_loss):
        values = "large"
    return Case(variant, n, values, draw.choice(IGNORED), draw.random() < 0.1, seed)


def tensors(case: Case, device: str) -> tuple[Inputs, Tensor]:
    """Return ((hidden_states [N, D], weight [V, D], bias [V] or None), labels [N]) of a case."""
    g = torch.Generator().manual_seed(case.seed)
    n, d, v, dtype = case.n, case.variant.d, case.variant.v, getattr(torch, case.variant.dtype)
    weight = torch.randn(v, d, generator=g) * (2 / d**0.5)
    labels = torch.randint(v, (n,), generator=g)
    hidden = torch.randn(n, d, generator=g)
    if case.one_label:
        labels[:] = int(labels[0])
    if case.values in ("flat", "equal"):
        hidden *= 0.05 if case.values == "flat" else 0.0
    elif case.values == "one-hot":
        hidden = torch.nn.functional.one_hot(torch.randint(d, (n,), generator=g), d).float() * 8
    elif case.values in ("large", "huge"):  # logits of some tens; some beyond ±10⁴
        hidden *= 30 if case.values == "large" else 6000
    elif case.values in ("foreseen", "not foreseen"):  # p of the label near 1, near 0
        hidden += (1 if case.values == "foreseen" else -1) * 0.75 * weight[labels]
    if case.ignored != "none":
        keep = torch.rand(n, generator=g) < {"some": 0.7, "most": 0.3, "first block": 1.0, "half": 0.5}[case.ignored]
        keep[: n // 2] &= case.ignored != "first block"
        keep[-1] = True  # else nothing is left to compare
        labels = torch.where(keep, labels, -100)
    if case.values in ("NaN", "infinity"):
        hidden[-1, 0] = float("nan") if case.values == "NaN" else float("inf")
    bias = torch.randn(v, generator=g).to(device, dtype) if case.variant.options.bias else None
    hidden, labels = hidden.to(device, dtype), labels.to(device)
    if case.variant.strided:
        hidden, labels = torch.stack([hidden, hidden], 1)[:, 0], torch.stack([labels, labels], 1)[:, 0]
    return (hidden, weight.to(device, dtype), bias), labels


def widened_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
    """``plain_loss`` that leaves 16 bits right after the product: full logits that are rounded once."""
    identity = torch.eye(len(weight), device=weight.device)
    bias = None if bias is None else bias.float()
    return plain_loss((hidden @ weight.t()).float(), identity, bias, labels, options)


def check(case: Case, device: str, implementation: str) -> None:
    """Compare loss and gradients with full logits: as they are, with the hidden dimension reversed, and rounded once.

    The three round differently. Where a few tokens decide, chance makes any one of them nearly exact.

    Raises:
        AssertionError: the loss is finite where that of full logits is not, or an error exceeds the budget of numerics.py.
    """
    options, dtype = case.variant.options, getattr(torch, case.variant.dtype)
    loss = fused_loss(CCEConfig(implementation, case.variant.budget, None))  # type: ignore[arg-type]
    inputs, labels = tensors(case, device)
    if case.values in ("NaN", "infinity"):
        found, expected = (bool(f(*inputs, labels, options).isfinite().all()) for f in (loss, plain_loss))
        assert found == expected, f"{case}: finite {found}, with full logits {expected}"
        return
    actual = loss_and_gradients(loss, inputs, labels, options, dtype)
    exact = loss_and_gradients(plain_loss, inputs, labels, options, torch.float64)
    twin = loss_and_gradients(plain_loss, inputs, labels, options, dtype)
    hidden, weight, bias = inputs
    other = loss_and_gradients(plain_loss, (hidden.flip(-1), weight.flip(-1), bias), labels, options, dtype)
    once = loss_and_gradients(widened_loss, inputs, labels, options, dtype)
    for name, value in actual.items():
        opposite = other[name].flip(-1) if name in ("hidden", "weight") else other[name]
        assert_as_good(value, [twin[name], opposite, once[name]], exact[name], f"{case}: {name}", dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0, help="the first case; the others follow")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop then, with the next seed in the report")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--out", type=Path, default=Path("property.json"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failures, began, seed = [], time.monotonic(), options.seed
    while seed < options.seed + options.cases and time.monotonic() - began < options.seconds:
        case = make_case(seed, device == "cuda")
        try:
            check(case, device, options.implementation)
        except Exception as error:  # a report of all failures, of any kind
            failures.append({"case": asdict(case), "error": f"{type(error).__name__}: {error}"[:500]})
        seed += 1
    report = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "first_seed": options.seed, "next_seed": seed, "cases": seed - options.seed, "failures": failures,
    }  # fmt: skip
    options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"{seed - options.seed} cases, {len(failures)} failures, next seed {seed}: {options.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
