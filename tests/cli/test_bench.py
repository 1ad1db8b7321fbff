"""``hf-cce bench``: its measurements, and that a failing loss does not stop the others."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from command import hf_cce

from hf_cce.diagnostics import bench

CPU = torch.device("cpu")
PROBLEM = bench.random_problem((96, 32, 300), CPU, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_time_and_memory_of_each_loss(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    shape = ["--tokens", "128", "--hidden-size", "64", "--vocab-size", "4096", "--device", "cpu"]
    done = hf_cce("bench", *shape, "--dtype", dtype, "--json", str(path))
    assert done.exit_code == 0, done
    report = json.loads(path.read_text("utf-8"))
    assert report["dtype"] == dtype and report["versions"]["torch"] and report["date"]
    (result,) = report["results"].values()
    assert list(result["rows"]) == ["hf_cce", "hf_cce exact", "full logits"] and result["implementation"] == "portable"
    for row in result["rows"].values():
        least, most = row["ms_spread"]
        assert 0 < least <= row["ms"] <= most
    if sys.platform == "linux" and dtype == "float32":
        logits = 128 * 4096 * 4 / bench.MIB
        assert logits <= result["rows"]["full logits"]["extra_mib"] <= 20 * logits
    assert bench.markdown(report) in done.stdout and "| hf_cce exact |" in done.stdout


def test_other_losses_run_after_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=NotImplementedError("not on a Saturday"))
    rows = bench.measure(PROBLEM, {"a": broken, "b": bench.full_logits}, 1, lambda _: None)
    assert rows["a"] == {"failed": "NotImplementedError: not on a Saturday"} and rows["b"]["ms"] > 0
    monkeypatch.setattr(bench, "full_logits", broken)
    sizes = ["--tokens", "8", "--hidden-size", "8", "--vocab-size", "40"]
    assert hf_cce("bench", "--device", "cpu", *sizes).exit_code == 1
