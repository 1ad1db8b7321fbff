"""Start a script of this folder on several ranks and return its results."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command import environment, run
from models import stats
from numerics import budget, relative_error


def assert_within_budget(result: dict[str, Any], half: bool = False) -> None:
    """Compare the errors of a result with its twin's; in bfloat16 (``half``) only of the loss, the head and all gradients.

    In a single small matrix below the head, either bfloat16 run may be closer to float64 by chance.
    """
    assert "failed" not in result, result["failed"]
    kept = ("loss", "lm_head.weight", "all gradients")
    errors = {key: x for key, x in result["errors"].items() if not half or key.partition(" at ")[0] in kept}
    assert len(errors) >= 3
    for name, error in errors.items():
        assert error <= budget(result["twin"][name], torch.bfloat16 if half else torch.float32), name


def rank_environment(device: str = "cpu") -> dict[str, str]:
    """Return the environment of a rank: this folder and the root on the import path; with device "cpu", GPUs are hidden."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return environment("tests/support", ".", OMP_NUM_THREADS="1", **hidden)


def run_on_ranks(script: str, path: Path, *arguments: str, ranks: int = 2, device: str = "cpu") -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run([*command, f"tests/support/{script}", str(path), *arguments], rank_environment(device))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unknown inputs or outputs type" not in done.stdout + done.stderr, "DeepSpeed has seen what is no tensor"
    return json.loads(path.read_text("utf-8"))


def counters(model: Any) -> dict[str, int]:
    return {key: getattr(stats(model), key) for key in ("calls", "fused", "missed", "materialized")}


def relative_errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the error of each tensor by name, and that of "all gradients" together, the loss included."""
    assert found.keys() == exact.keys(), (found.keys(), exact.keys())
    flat = [torch.cat([x[key].double().flatten() for key in exact]) for x in (found, exact)]
    each = {key: relative_error(value, exact[key]) for key, value in found.items()}
    return {**each, "all gradients": relative_error(*flat)}


def results_of(cases: Iterable[str], run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of each case by name, or the error with which it failed."""
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case] = run(case)
        except Exception as error:  # go on with the other cases
            traceback.print_exc()
            results[case] = {"failed": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return results


def finish(path: Path, results: dict[str, Any]) -> None:
    """Write the results on rank 0, and end this rank: a thread of gloo or DeepSpeed that outlives Python would abort it."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results), "utf-8")
    dist.barrier()  # no rank closes its connections while another one uses them
    os._exit(0)
