"""``hf-cce check``: its verdicts on good and on broken models."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import hf_cce
from models import module_state, tiny_llama
from torch import nn

from hf_cce.diagnostics import check as bench

run = partial(hf_cce, "check")


@pytest.mark.parametrize(
    "model",
    [
        "a folder",
        "a config.json",
        pytest.param("gemma2", marks=pytest.mark.slow),
        "phi",
        "mixtral",
        pytest.param("mamba", marks=pytest.mark.slow),
    ],
)
def test_check_of_model_type_or_folder(model: str, tmp_path: Path) -> None:
    saved = tiny_llama()
    saved.save_pretrained(tmp_path)
    own = {"a folder": str(tmp_path), "a config.json": str(tmp_path / "config.json")}
    done = run(own.get(model, model), "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done
    assert "Loss and gradients are the same with and without hf_cce, and no full logits are materialized" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["same"] and found["saves"] and found["stats"]["fused"] == 1
    assert found["differences"][0]["name"] == "loss" and len(found["differences"]) > 10
    assert all(row["ok"] for row in found["differences"])
    assert (f"its own weights, {saved.num_parameters():,} parameters" in done.stdout) == (model in own)
    assert model not in own or "model.layers.0.mlp.up_proj" in {row["name"] for row in found["differences"]}


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit('was run')", "utf-8")
    done = run(str(tmp_path))
    assert done.exit_code == 2 and "comes with its own code, which hf-cce does not run" in done.stderr


def test_check_leaves_model_unchanged() -> None:
    model = tiny_llama()
    before = module_state(model)
    assert bench.check(model)["same"]
    assert module_state(model) == before and all(parameter.grad is None for parameter in model.parameters())


def test_gradient_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(model: Any, *options: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 1e-5)
        return model if not options else real(model, *options)

    real = bench.apply_cce
    monkeypatch.setattr(bench, "apply_cce", off)
    done = run("llama")
    assert done.exit_code == 1 and "Do not train this model with hf_cce: " in done.stdout, done
    assert "differs" in done.stdout and "Logits in evaluation: different" in done.stdout


class _Head(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


def test_full_logits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.lm_head.__class__ = _Head
    report = bench.check(model)
    assert report["same"] and not report["saves"] and "not a plain torch.nn.Linear" in report["warnings"][0]
    monkeypatch.setattr(bench, "load", lambda *_: (model, True))
    done = run("llama")
    assert done.exit_code == 1 and "saves no memory" in done.stdout and "_Head" in done.stdout, done


def test_model_that_needs_images_is_refused() -> None:
    done = run("git")
    assert done.exit_code == 2 and "Error: GitForCausalLM does not run on text alone" in done.stderr, done


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    """A folder with only a configuration, or its config.json (which `estimate` accepts), has no weights to check."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), "utf-8")
    for target in (tmp_path, tmp_path / "config.json"):
        done = run(str(target))
        assert done.exit_code == 2 and "no weights found" in done.stderr and "--tiny" in done.stderr, done
        assert run(str(target), "--tiny").exit_code == 0
