"""Two ranks under DeepSpeed ZeRO: three steps match one process, without logits and without extra gathers."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import assert_within_budget, run_on_ranks
from zero import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    arguments = () if request.param == "cpu" else ("cuda",)
    found = run_on_ranks("zero.py", tmp_path_factory.mktemp("zero") / "zero.json", *arguments, device=request.param)
    assert sorted(found) == sorted(CASES)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallelism(stage: int, tmp_path: Path) -> None:
    """Ulysses: each rank has half of the sequence, with labels shifted before the split."""
    result = run_on_ranks("ulysses.py", tmp_path / "ulysses.json", str(stage))
    assert result["stats"] == {"calls": 1, "fused": 1, "missed": 0, "materialized": 0}
    assert len(result["errors"]) > 10
    assert_within_budget(result)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_process(case: str, results: dict[str, Any]) -> None:
    assert_within_budget(results[case], half=case == "bfloat16")
    assert {"loss at 2", "all gradients at 2"} < results[case]["errors"].keys() == results[case]["twin"].keys()


@pytest.mark.parametrize("case", CASES)
def test_loss_is_fused_or_warns(case: str, results: dict[str, Any]) -> None:
    result, calls = results[case], 6 if case == "two micro-batches" else 3
    if case == "watched":
        assert result["stats"] == {"calls": calls, "fused": calls, "missed": 0, "materialized": calls}
        assert len(result["warnings"]) == 1 and "amax needs the full logits" in result["warnings"][0]
    else:  # the only logits made were requested through output.logits
        assert result["stats"] == {"calls": calls, "fused": calls, "missed": 0, "materialized": 1}
        assert result["warnings"] == []


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_behaves_as_unpatched(case: str, results: dict[str, Any]) -> None:
    twin, seen = results[case]["seen of twin"], results[case]["seen of errors"]
    assert twin["freed"] is not case.startswith("stage") and seen.pop("gathers") <= twin.pop("gathers")
    twin.pop("read after the step")
    raises = "have changed since" in seen.pop("read after the step")
    assert raises is case.startswith("stage")
    assert seen == twin and seen["evaluated"] == "Tensor" and seen["nodes left"] == 0
    assert results[case]["same logits"]
