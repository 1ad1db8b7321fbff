"""Two ranks under DeepSpeed's ZeRO: three steps are those of one process, without logits and without one gather more."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import budget

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# As tests/support/zero.py has them, which cannot be imported without DeepSpeed
CASES = (
    "llama",
    "tied",
    "bias",
    "frozen head",
    "only the head",
    "checkpointed",
    "two micro-batches",
    "bfloat16",
    "watched",
    "stage 1",
    "stage 2",
)


def started(script: str, path: Path, *arguments: str, device: str = "cpu") -> dict[str, Any]:
    """What two processes of ``script`` have written to ``path``; on a CPU they see no GPU."""
    here = Path(__file__).parents[1] / "support"
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    run = subprocess.run(
        [*command, str(here / script), str(path), *arguments], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | hidden,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "unknown inputs or outputs type" not in run.stdout + run.stderr, "DeepSpeed has seen what is no tensor"
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """One start of two processes for all cases; with NCCL on two GPUs, where there are any."""
    arguments = () if request.param == "cpu" else ("cuda",)
    found = started("zero.py", tmp_path_factory.mktemp("zero") / "zero.json", *arguments, device=request.param)
    assert sorted(found) == sorted(CASES)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallelism(stage: int, tmp_path: Path) -> None:
    """Ulysses: each rank has a half of the sequence, and labels that were shifted before it was cut."""
    result = started("ulysses.py", tmp_path / "ulysses.json", str(stage))
    assert result["stats"] == {"calls": 1, "fused": 1, "missed": 0, "materialized": 0}
    assert len(result["errors"]) > 10
    for name, error in result["errors"].items():
        assert error <= budget(result["twin"][name], torch.float32), name


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case: str, results: dict[str, Any]) -> None:
    result = results[case]
    assert "failed" not in result, result["failed"]
    errors, dtype = result["errors"], torch.float32
    assert {"loss at 2", "everything at 2"} < errors.keys() == result["twin"].keys()
    if case == "bfloat16":  # see test_ranks
        kept = ("loss", "lm_head.weight", "everything")
        errors, dtype = {key: x for key, x in errors.items() if key.split(" at ")[0] in kept}, torch.bfloat16
    for name, error in errors.items():
        assert error <= budget(result["twin"][name], dtype), name


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_fused_or_the_reason_is_told(case: str, results: dict[str, Any]) -> None:
    result, calls = results[case], 6 if case == "two micro-batches" else 3
    if case == "watched":
        assert result["stats"] == {"calls": calls, "fused": calls, "missed": 0, "materialized": calls}
        assert len(result["warnings"]) == 1 and "amax asked for the logits" in result["warnings"][0]
    else:  # the one time that logits were made, they were asked for by name
        assert result["stats"] == {"calls": calls, "fused": calls, "missed": 0, "materialized": 1}
        assert result["warnings"] == []


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_does_what_it_does_without_us(case: str, results: dict[str, Any]) -> None:
    twin, told = results[case]["told of twin"], results[case]["told of errors"]
    assert twin["freed"] is not case.startswith("stage") and told.pop("gathers") <= twin.pop("gathers")
    assert told == twin and told["evaluated"] == "Tensor" and told["nodes left"] == 0
    assert results[case]["same logits"]
