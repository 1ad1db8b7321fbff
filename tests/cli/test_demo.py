"""The demo: both runs agree, its figures are measured, and it fails with clear errors."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import hf_cce
from numerics import budget

from hf_cce.diagnostics import demo, machine

SIZES = "--vocab-size 512 --hidden-size 64 --layers 1 --max-steps 3 --batch-size 2 --seq-length 32 --device cpu"
command = partial(hf_cce, "demo", *SIZES.split())
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process can be restarted under Linux only")


@pytest.fixture(scope="module", autouse=True)
def short_text() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "CHARACTERS", 50_000)
        yield


@ON_LINUX
def test_whole_demo(tmp_path: Path) -> None:
    numbers = tmp_path / "demo.json"
    done = command("--json", str(numbers))
    assert done.exit_code == 0 and not done.stderr, done.stderr
    report = json.loads(numbers.read_text("utf-8"))
    assert report["data"]["tokenizer_entries"] == 512 and report["data"]["tokens"] > 10_000
    for run in (report["plain"], report["cce"]):
        assert len(run["losses"]) == len(run["step_seconds"]) + 1 == 3
        assert run["step_bytes"] >= 0 and run["median_seconds"] > 0
        assert run["eval_logits_shape"] == [1, 32, 512]
    # Each step at most doubles the rounding error in the weights.
    for step, (plain, fused) in enumerate(zip(report["plain"]["losses"], report["cce"]["losses"], strict=True)):
        assert abs(plain - fused) <= plain * budget(0.0, torch.float32) * 2**step, step
    for shown in ("loss, step 3", "memory added by a step", "In evaluation mode, the trained model returns"):
        assert shown in done.stdout, shown


def test_unmeasurable_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "reset_peak_memory", lambda device: False)
    done = command()
    assert done.exit_code == 0 and "cannot be measured" in done.stdout and "added by a step" not in done.stdout


def test_too_short_text_is_an_error() -> None:
    done = command("--seq-length", "1000000")
    message = "too few for sequences of 1000000"
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_float16_training_with_loss_scale() -> None:
    """Trains as on a T4. The first loss equals float32's up to rounding; losses with and without CCE stay close."""
    ids, _ = demo.text_tokens(512)
    losses = {}
    for dtype, cce in (("float32", False), ("float16", False), ("float16", True)):
        run = demo.Run(demo.Settings("cpu", 512, 64, 1, dtype=dtype), cce)
        for rows in ids[: 3 * 2 * 32].reshape(3, 2, 32):
            run.step(rows)
        losses[dtype, cce] = run.losses
    exact, plain, fused = losses.values()
    assert abs(plain[0] - exact[0]) <= exact[0] * 16 * budget(0.0, torch.float16)
    for step, (a, b) in enumerate(zip(plain, fused, strict=True)):
        assert abs(a - b) <= a * 16 * budget(0.0, torch.float16) * 2**step, step


@ON_LINUX
def test_peak_includes_freed_memory() -> None:
    torch.ones(100_000_000)  # 400 MB allocated before must not count
    added = machine.watch_memory(torch.device("cpu"))
    held = torch.ones(50_000_000)
    del held
    assert 180e6 < (added() or 0) < 260e6
