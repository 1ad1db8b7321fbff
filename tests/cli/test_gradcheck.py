"""``hf-cce gradcheck``: that it sees what is wrong, passes what is right, and says what it could not do."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import assert_as_good, budget
from typer.testing import CliRunner

from hf_cce import CCEConfig
from hf_cce.bench import gradcheck as bench
from hf_cce.cli.app import app

CPU = torch.device("cpu")
SMALL = bench.Problem(20, 24, 67)
SIZES = ("-n", "20", "--hidden-size", "24", "--vocab-size", "67", "--device", "cpu")
EVERYTHING = bench.CASES[-1]


@pytest.fixture(autouse=True)
def portable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is slow, and one test of it is enough."""
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ("portable",))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["gradcheck", *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("twin_error", [0.0, 1e-7, 0.3])
def test_the_rule_is_that_of_the_tests(twin_error: float, dtype: torch.dtype) -> None:
    assert bench.allowed(twin_error, dtype) == budget(twin_error, dtype)


def test_every_case_and_quantity_is_compared_and_good() -> None:
    report = bench.gradcheck(SMALL, CPU)
    assert not report.failures
    assert {(row.dtype, row.case) for row in report.rows} == {(d, c.name) for d in bench.DTYPES for c in bench.CASES}
    for case in bench.CASES:
        names = ["loss", "log-probs", "∂hidden", "∂weight", *["∂bias"] * case.bias, "∂logits"]
        found = [row.quantity for row in report.rows if row.case == case.name and row.dtype == "float32"]
        assert found == names
    assert all(0 < row.eager[1] < 1 and math.isfinite(row.hf_cce[0]) for row in report.rows if row.quantity != "loss")


def test_the_kernels_are_compared_too_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        pytest.skip("the kernels are not interpreted here")
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ("portable", "triton"))
    report = bench.gradcheck(SMALL, CPU, cases=(EVERYTHING,))
    assert {(row.dtype, row.implementation) for row in report.rows} == {
        *((dtype, "portable") for dtype in bench.DTYPES), ("float32", "triton"), ("float16", "triton")
    }  # fmt: skip
    assert not report.failures
    assert report.notes == ["triton in bfloat16: Triton's interpreter truncates where a GPU rounds"]


@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
def test_the_gradient_of_the_logits_is_that_of_the_weight_under_the_identity(case: bench.Case) -> None:
    inputs = bench.make_inputs(SMALL, case, torch.float64, CPU)
    logits = torch.mm(inputs.weight, inputs.hidden.t())  # [V, N]
    ours = bench.fused_logit_gradient(logits.clone(), inputs, case, CCEConfig("portable"))
    through = bench.eager(inputs, case, torch.float64)
    # The chain rule: what full logits give for the hidden states and the weight.
    for name, product in (("∂hidden", ours.t() @ inputs.weight), ("∂weight", ours @ inputs.hidden)):
        assert_as_good(product, through[name], through[name], name)


def test_chunks_change_nothing_but_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = bench.make_inputs(SMALL, EVERYTHING, torch.float32, CPU)
    whole = bench.eager(inputs, EVERYTHING, torch.float64)
    twin = bench.eager(inputs, EVERYTHING, torch.float32)

    def of_logits() -> list[float]:
        found = bench.Difference(), bench.Difference(), bench.Difference()
        bench.logit_gradient_differences(inputs, EVERYTHING, CCEConfig(), found)
        return [difference.relative for difference in found[:2]]

    before = of_logits()
    monkeypatch.setattr(bench, "CHUNK_BYTES", 8 * 67 * 3)
    assert len(list(bench._chunks(20, 67))) == 7
    for dtype, results in ((torch.float64, whole), (torch.float32, twin)):
        for name, x in bench.eager(inputs, EVERYTHING, dtype).items():
            assert_as_good(x, results[name], whole[name], name, dtype)
    assert all(now <= bench.allowed(then, torch.float32) for now, then in zip(of_logits(), before, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_one_token_is_no_game_of_luck(seed: int) -> None:
    assert bench.draws(1) == 64 and bench.draws(20) == 7 and bench.draws(2047) == 1
    report = bench.gradcheck(bench.Problem(1, 16, 99, seed), CPU, ("bfloat16", "float16"), bench.CASES[:1])
    assert not report.failures


def tampered(factor: float) -> Callable[..., torch.Tensor]:
    """The loss, right, with gradients that are ``factor`` times what they should be."""
    from hf_cce import linear_cross_entropy

    def loss(hidden: torch.Tensor, weight: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        right = linear_cross_entropy(hidden, weight, *others, **options)
        return right.detach() + factor * (right - right.detach())

    return loss


def test_a_small_error_is_seen_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "linear_cross_entropy", tampered(1.001))
    report = bench.gradcheck(SMALL, CPU, ("float32",), bench.CASES[:1])
    assert {row.quantity for row in report.failures} == {"∂hidden", "∂weight", "∂logits"}
    found = command(*SIZES, "--dtype", "float32", "--json", str(tmp_path / "found.json"))
    assert found.exit_code == 1
    assert "results are less exact than allowed; the worst is ∂" in found.stdout
    assert "worse" in found.stdout and "relative error 1.0e-03" in found.stdout
    assert json.loads((tmp_path / "found.json").read_text("utf-8"))["ok"] is False


def test_nan_is_worse_than_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "linear_cross_entropy", tampered(math.nan))
    report = bench.gradcheck(SMALL, CPU, ("float32",), bench.CASES[:1])
    assert all(math.isinf(row.hf_cce[1]) for row in report.failures)
    assert {row.quantity for row in report.failures} >= {"∂hidden", "∂weight", "∂logits"}
    assert "NaN" not in json.dumps(report.to_json()) and "Infinity" not in json.dumps(report.to_json())


def test_the_command_shows_and_writes_what_it_found(tmp_path: Path) -> None:
    found = command(
        *SIZES, "--dtype", "float32", "--dtype", "bfloat16", "--seed", "3", "--json", str(tmp_path / "a.json")
    )
    assert found.exit_code == 0, found.output
    assert "20 tokens, width 24, vocabulary 67, seed 3" in found.stdout
    assert [line for line in found.stdout.splitlines() if "portable" in line] == [
        "float32, portable",
        "bfloat16, portable",
    ]
    assert "are as close to the exact ones as plain PyTorch comes" in found.stdout
    assert max(map(len, found.stdout.splitlines()[1:20])) <= 80
    numbers = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert numbers["ok"] and numbers["problem"] == {"tokens": 20, "hidden_size": 24, "vocab_size": 67, "seed": 3}
    assert len(numbers["rows"]) == 2 * (6 * 5 + 2 * 6)
    first = numbers["rows"][0]
    assert first["quantity"] == "loss" and first["hf_cce"]["relative"] <= first["allowed"]


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "IMPLEMENTATIONS", ("portable", "triton")
    )  # which has no bfloat16 on a CPU, interpreted or not
    found = command(*SIZES, "--dtype", "bfloat16")
    assert found.exit_code == 0 and "Not compared: triton" in found.stdout
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ("triton",))
    found = command(*SIZES, "--dtype", "bfloat16")
    assert found.exit_code == 2 and "Error: nothing can be compared on cpu: triton" in found.stderr


def test_without_a_gpu_the_reason_is_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton or without: to install it would not help."""
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ("portable", "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = command(*SIZES, "--dtype", "float32")
    assert found.exit_code == 0
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("Not compared")]
    assert line.startswith("Not compared: triton: the kernels are for NVIDIA GPUs and the tensors are on the CPU")
    assert "install" not in line and "implementation=" not in line


def test_the_help_names_the_sizes_that_are_used() -> None:
    shown = " ".join(command("--help").stdout.replace("│", " ").split())
    for name in ("tokens", "hidden_size", "vocab_size"):
        cpu, gpu = (getattr(bench.default_problem(torch.device(device)), name) for device in ("cpu", "cuda"))
        assert f"{cpu:,} on a CPU, {gpu:,} on an NVIDIA GPU" in shown


def test_details_show_every_case() -> None:
    found = command(*SIZES, "--dtype", "float32", "--details")
    assert all(found.stdout.count(f" {case.name} ") >= 5 for case in bench.CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "teapot"], "Error: --device teapot cannot be used here: "),
        (["--device", "cuda:99"], "Error: --device cuda:99 cannot be used here: "),
        (["--dtype", "float64"], "--dtype"),
        (["--tokens", "0"], "--tokens"),
        (["--vocab-size", "1"], "--vocab-size"),
        (["--reference", "-n", "5"], "Error: --reference has a shape and a dtype of its own"),
    ],
)
def test_bad_arguments_are_errors_and_no_verdict(arguments: list[str], message: str) -> None:
    found = command(*arguments)
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.replace("│", " ").split())
    assert "Traceback" not in found.output and not found.stdout


def test_filtered_and_exact_where_there_is_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        pytest.skip("the kernels are not interpreted here")
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", ("portable", "triton"))
    report = bench.gradcheck(SMALL, CPU, ("float32",), bench.CASES[:1])
    assert [title for title, _ in report.groups()] == [
        "float32, portable",
        "float32, triton, gradient filter auto",
        "float32, triton, gradient filter exact",
    ]


def test_the_published_figures_stand_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REFERENCE", replace(SMALL))
    found = command("--reference", "--device", "cpu")
    assert found.exit_code == 0, found.output
    lines = [line for line in found.stdout.splitlines() if "published" in line]
    assert [line.split(",")[0] for line in lines] == ["loss", "log-probs", "∂logits"]
    assert all(line.endswith(("no worse", ": worse")) for line in lines)


def test_quiet_leaves_the_verdict_to_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = command(*SIZES, "--dtype", "float32", "--quiet", "--json", str(tmp_path / "found.json"))
    assert found.exit_code == 0 and not found.output
    assert json.loads((tmp_path / "found.json").read_text("utf-8"))["command"]
    monkeypatch.setattr(bench, "linear_cross_entropy", tampered(1.001))
    assert command(*SIZES, "--dtype", "float32", "--quiet").exit_code == 1
