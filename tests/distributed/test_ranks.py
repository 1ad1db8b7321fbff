"""Two gloo ranks: gradients equal those of one process, and a fallback to full logits is reported."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import budget
from processes import assert_within_budget, rank_environment, run_on_ranks
from ranks import ENGINES
from vocab_parallel import CASES

COMPARED = [*CASES, "log_probs"]
MISTAKES = {
    "plain hidden states": "ValueError: weight: the hidden states are not replicated",
    "split hidden states": "ValueError: weight: the hidden states are not replicated",
    "plain weight": "ValueError: weight: the head's weight is not split over its first dimension (a Tensor)",
    "bias": "ValueError: weight: the head's bias is not split over its first dimension (a Tensor)",
    "is_top1": "ValueError: is_top1 is not available",
    "second derivative": "RuntimeError: the fused loss has no second derivative",
}
REASON = {
    "fsdp1_head_alone": "is a separate FSDP1 unit",
    "tensor_parallel_logits_split": "redistribute needs the full logits",
    "tensor_parallel_plan": "Transformers' tensor parallelism",
    "tensor_parallel_plan_tied": "Transformers' tensor parallelism",
    "tensor_parallel_lora": "tensor parallelism is applied to a layer inside the head",
    "tensor_parallel_plan_compiled": "torch.compile does not support deferred logits for a head under tensor parallelism",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks("ranks.py", tmp_path_factory.mktemp("ranks") / "ranks.json")


@pytest.mark.slow
def test_head_resharded_over_two_of_four_ranks(tmp_path: Path) -> None:
    engine = "fsdp2_head_over_some"
    found = run_on_ranks("ranks.py", tmp_path / "ranks.json", "cpu", "float32", engine, ranks=4)[engine]
    assert_within_budget(found)
    assert found["same parameters"] and found["warnings"] == []
    assert found["stats"] == {"calls": 2, "fused": 2, "missed": 0, "materialized": 0}


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_match_one_process(engine: str, results: dict[str, Any]) -> None:
    assert_within_budget(results[engine], half=engine.endswith("mixed"))


@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith(("fsdp1", "tensor_parallel"))])
def test_steps_repeat_bitwise(engine: str, results: dict[str, Any]) -> None:
    """Loss and gradients on every rank, with gradients summed over the ranks by gloo."""
    assert results[engine]["repeats"]


@pytest.mark.parametrize("engine", ENGINES)
def test_loss_is_fused_or_warns(engine: str, results: dict[str, Any]) -> None:
    counted, warned = results[engine]["stats"], results[engine]["warnings"]
    tensor = engine.startswith("tensor_parallel")  # these read output.logits after the loss
    steps = 1 if tensor else 2
    if engine == "tensor_parallel_plan_compiled":
        assert set(counted.values()) == {0}  # a graph counts nothing; the message comes while tracing
    elif engine in REASON:
        assert counted["missed"] == counted["materialized"] == steps
    else:
        assert counted == {"calls": steps, "fused": steps, "missed": 0, "materialized": int(tensor)}
    assert len(warned) == (engine in REASON) and all(REASON[engine] in text for text in warned)


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_logits_and_custom_loss(engine: str, results: dict[str, Any]) -> None:
    result = results[engine]
    if engine == "fsdp2_adapted_head":  # a fused product of two
        assert result["logits"] <= budget(torch.finfo(torch.float32).eps, torch.float32)
    else:
        assert result["same logits"]
    if not engine.startswith("tensor_parallel"):
        assert result["same parameters"]
    if not engine.startswith("tensor_parallel"):
        half = torch.bfloat16 if "mixed" in engine else torch.float32
        assert result["without labels"] <= budget(torch.finfo(half).eps, half)


# In the others, full logits exist, or the weight is a copy that combines head and adapter.
DEFERRING = [x for x in ENGINES if x not in REASON and not x.startswith(("tensor", "fsdp2_adapted"))]


@pytest.mark.parametrize("engine", DEFERRING)
def test_reading_logits_after_a_step_raises(engine: str, results: dict[str, Any]) -> None:
    assert "have changed since" in results[engine]["read after step"]


# Vocabulary-parallel tests: a vocabulary sharded over the two ranks; see tests/support/vocab_parallel.py
@pytest.mark.parametrize("case", COMPARED)
def test_sharded_vocabulary_matches_full(case: str, results: dict[str, Any]) -> None:
    if case == "kernels" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    found = results["vocab_parallel"]["compared"][case]
    assert len(found["errors"]) >= 3
    for name, error in found["errors"].items():
        assert error <= budget(found["baseline"][name], getattr(torch, found["dtype"])), name


def test_sharded_vocabulary_is_not_gathered(results: dict[str, Any]) -> None:
    """Three all-reduces: the maximum of lse and the sums in the forward, the hidden states' gradient in the backward."""
    assert results["vocab_parallel"]["traffic"] == {"allreduce_": 3}


def test_sharded_vocabulary_error_messages(results: dict[str, Any]) -> None:
    messages = dict(results["vocab_parallel"]["raised"])
    assert messages["label beyond"] == messages["label beyond, whole"] and "[0, 99)" in messages["label beyond"]
    assert "but 20 do not" in messages["label below"] and messages["label below"] == messages["label below, log_probs"]
    for case, message in MISTAKES.items():
        assert message in messages[case], case
    assert len(messages) == 4 + len(MISTAKES)


DIES = """
import datetime, os, sys
import torch
import torch.distributed as dist
from losses import make_inputs
from vocab_parallel import shard_head
from torch.distributed.device_mesh import init_device_mesh
from hf_cce import linear_cross_entropy

file, rank = sys.argv[1], int(sys.argv[2])
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2, timeout=limit)
mesh = init_device_mesh("cpu", (2,))
(hidden, weight, _), labels = make_inputs(64, 32, 3001, torch.float32, "cpu")
for step in range(2):
    if step and rank:
        os._exit(3)
    x = shard_head(mesh, hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    linear_cross_entropy(*x, labels).backward()
    print("step", step, flush=True)
"""


def test_dead_rank_raises_on_other_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rank_environment()
        )
        for rank in range(2)
    ]  # fmt: skip
    (output, error), _ = (process.communicate(timeout=300) for process in ranks)
    assert [process.returncode for process in ranks] == [1, 3], error[-3000:]
    steps = [line for line in output.splitlines() if line.startswith("step")]  # gloo may print, too
    assert steps == ["step 0"], error[-3000:]
    assert "hf_cce" in error and "Error" in error.strip().splitlines()[-1], error[-3000:]
