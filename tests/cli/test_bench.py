"""``hf-cce bench``: what it measures, that its judge is right, how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import budget, relative_error
from typer.testing import CliRunner, Result

from hf_cce.cli.app import app
from hf_cce.diagnostics import bench

CPU = torch.device("cpu")
PROBLEM = bench.random_problem((96, 32, 300), CPU, torch.float32)


def hf_cce(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"})


def test_time_memory_and_errors_of_each_loss(tmp_path: Path) -> None:
    path, shapes = tmp_path / "b.json", ["--shape", "64,64,512 128,64,4096", "--device", "cpu", "--repeats", "2"]
    done = hf_cce(*shapes, "--losses", "hf_cce,hf_cce exact,eager", "--json", str(path))
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text("utf-8"))
    assert report["dtype"] == "float32" and report["versions"]["torch"] and report["date"]
    assert list(report["results"]) == ["flat N=64 D=64 V=512", "flat N=128 D=64 V=4096"]
    for result in report["results"].values():
        assert list(result["rows"]) == ["hf_cce", "hf_cce exact", "eager"]
        for row in result["rows"].values():
            for mode, prefix in bench.PREFIX.items():
                least, most = row[f"{prefix}ms_spread"]
                assert 0 < least <= row[f"{prefix}ms"] <= most
                assert row[f"{prefix}gemm_multiple"] == row[f"{prefix}ms"] / result["gemms_ms"][mode]
        for error in ("loss_error", "grad_hidden_error", "grad_weight_error", "frozen_grad_hidden_error"):
            theirs = result["rows"]["eager"][error]
            assert result["rows"]["hf_cce"][error] <= budget(theirs, torch.float32), error
    if sys.platform == "linux":
        logits = 128 * 4096 * 4 / bench.MIB
        assert logits <= report["results"]["flat N=128 D=64 V=4096"]["rows"]["eager"]["extra_mib"] <= 20 * logits
    assert "| hf_cce exact |" in done.stdout and "### flat N=64 D=64 V=512" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "hf_cce,nobody"], "unknown loss 'nobody'; known: hf_cce, hf_cce exact"),
        (["--shape", "8192,1024"], "--shape '8192,1024': expected N,D,V"),
        (["--shape", "8,0,99"], "--shape '8,0,99': N and D must be at least 1"),
        (["--device", "nonsense"], "--device nonsense cannot be used here: "),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here: torch"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], message: str) -> None:
    done = hf_cce("--device", "cpu", *arguments)
    assert done.exit_code == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_judge_is_right() -> None:
    hidden, weight = (x.double().requires_grad_() for x in (PROBLEM.hidden_states, PROBLEM.weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), PROBLEM.labels)
    loss.backward()
    for value, expected in zip(
        bench.exact_gradients(PROBLEM, torch.float64), (loss, hidden.grad, weight.grad), strict=True
    ):
        assert expected is not None
        assert relative_error(value, expected) <= budget(0.0, torch.float64)


def test_a_loss_that_raises_does_not_stop_the_others() -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise NotImplementedError("not on a Saturday")

    result = bench.Bench(PROBLEM, ("both", "frozen"), lambda _: None).run({"a": broken, "b": bench.full_logits}, 1)
    assert result["rows"]["a"] == {"failed": "NotImplementedError: not on a Saturday"}
    assert result["rows"]["b"]["ms"] > 0 and result["rows"]["b"]["frozen_ms"] > 0
    assert "forward_ms" not in result["rows"]["b"]


def test_each_head_starts_with_fresh_filter_states() -> None:
    loss, states = bench.FusedLoss(), []
    for _ in range(2):
        bench.Bench(PROBLEM, ("both", "frozen"), lambda _: None).run({"hf_cce": loss}, 1)
        states += loss.states.values()
    assert len({id(state) for state in states}) == 4
