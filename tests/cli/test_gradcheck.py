"""``hf-cce gradcheck``: finds wrong gradients, passes correct ones, and reports what it could not check."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from command import hf_cce
from numerics import assert_all_accurate, budget

from hf_cce import linear_cross_entropy
from hf_cce.diagnostics import gradcheck as diagnostics

CPU = torch.device("cpu")
SMALL = diagnostics.Problem(128, 24, 67)
EVERYTHING = diagnostics.CASES[-1]
ALL = diagnostics.CONFIGS
PORTABLE = {name: config for name, config in ALL.items() if config.implementation == "portable"}
command = partial(hf_cce, "gradcheck", "--device", "cpu")


@pytest.fixture(autouse=True)
def portable_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip Triton's interpreter: it is slow, and one test of it is enough."""
    monkeypatch.setattr(diagnostics, "default_problem", lambda device: SMALL)
    monkeypatch.setattr(diagnostics, "CONFIGS", PORTABLE)


def tampered(factor: float) -> Callable[..., torch.Tensor]:
    def loss(*args: Any, **options: Any) -> torch.Tensor:
        right = linear_cross_entropy(*args, **options)
        return right.detach() + factor * (right - right.detach())

    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("twin_error", [0.0, 1e-7, 0.3])
def test_allowed_error_matches_test_budget(twin_error: float, dtype: torch.dtype) -> None:
    assert diagnostics.allowed_error(twin_error, dtype) == budget(twin_error, dtype)


def test_every_case_and_quantity_is_compared(tmp_path: Path) -> None:
    found = command("--json", str(tmp_path / "a.json"))
    assert found.exit_code == 0, found
    assert "128 tokens, hidden size 24, vocabulary 67" in found.stdout
    assert "are as close to float64 as with full logits" in found.stdout
    report = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert report["ok"] and all(0 < row["full_logits"] < 1 for row in report["rows"] if row["quantity"] != "loss")
    compared = {(row["computed_by"], row["case"], row["quantity"]) for row in report["rows"]}
    names = ("loss", "log-probs", "∂hidden", "∂weight")
    assert compared == {
        (f"{dtype}, portable", case.name, name)
        for dtype in diagnostics.DTYPES
        for case in diagnostics.CASES
        for name in (*names, *["∂bias"] * case.bias)
    }


@pytest.mark.slow
def test_interpreted_kernels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        pytest.skip("the kernels are not interpreted here")
    monkeypatch.setattr(diagnostics, "CONFIGS", ALL)
    monkeypatch.setattr(diagnostics, "CASES", (EVERYTHING,))
    report = diagnostics.gradcheck(SMALL, CPU, ("float32", "bfloat16"), lambda *_: None)
    computed = list(dict.fromkeys(row["computed_by"] for row in report["rows"]))
    triton = ["float32, triton, filter auto", "float32, triton, no filter"]
    assert computed == ["float32, portable", *triton, "bfloat16, portable"] and report["ok"]
    assert report["notes"] == ["triton: Triton's interpreter truncates to bfloat16, but a GPU rounds"]


def test_chunked_reference_matches_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = diagnostics.make_inputs(SMALL, EVERYTHING, torch.float32, CPU)
    whole = diagnostics.with_full_logits(inputs, EVERYTHING, torch.float64)
    monkeypatch.setattr(diagnostics, "CHUNK_BYTES", 8 * 67 * 3)
    assert_all_accurate(diagnostics.with_full_logits(inputs, EVERYTHING, torch.float64), whole, whole)


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_wrong_gradients_are_reported(factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diagnostics, "linear_cross_entropy", tampered(factor))
    monkeypatch.setattr(diagnostics, "CASES", diagnostics.CASES[:1])
    found = command("--dtype", "float32", "--json", str(tmp_path / "found.json"))
    assert found.exit_code == 1
    assert "results are less accurate than allowed" in found.stdout and "worse" in found.stdout
    report = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert report["ok"] is False
    assert {row["quantity"] for row in report["rows"] if not row["ok"]} >= {"∂hidden", "∂weight"}


def test_uncomparable_implementations_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "CONFIGS", ALL)
    monkeypatch.setattr(diagnostics, "CASES", diagnostics.CASES[:1])
    found = command("--dtype", "bfloat16")  # not supported by the kernels on a CPU
    assert found.exit_code == 0 and "Not compared: triton" in found.stdout
