"""``hf-cce check``: its verdicts, on models that deserve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Result, hf_cce
from models import anatomy, tiny_llama
from torch import nn

from hf_cce.diagnostics import check as bench


def run(*arguments: str) -> Result:
    return hf_cce("check", *arguments)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi", "mixtral"])
def test_a_model_type_is_checked_on_a_tiny_model(model_type: str, tmp_path: Path) -> None:
    done = run(model_type, "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done
    assert "Loss and gradients are the same with and without hf_cce, and no logits are made" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["same"] and found["saves"] and found["stats"]["fused"] == 1
    assert found["differences"][0]["name"] == "loss" and len(found["differences"]) > 10
    assert all(row["ok"] for row in found["differences"])


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    done = run(str(tmp_path), "--details")
    assert done.exit_code == 0, done
    assert f"{model.num_parameters():,} parameters" in done.stdout and "model.layers.0.mlp.up_proj" in done.stdout


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_llama()
    before = anatomy(model)
    assert bench.check(model)["same"]
    assert anatomy(model) == before and all(parameter.grad is None for parameter in model.parameters())


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is off by 1e-5 while it is patched."""

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
    """A head of its own kind, whose multiplication is not put off."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


def test_full_logits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.lm_head.__class__ = _Head
    report = bench.check(model)
    assert report["same"] and not report["saves"] and "no plain torch.nn.Linear" in report["warnings"][0]
    monkeypatch.setattr(bench, "load", lambda *_: model)
    done = run("llama")
    assert done.exit_code == 1 and "saves no memory" in done.stdout and "_Head" in done.stdout, done


def test_a_model_that_needs_more_than_text_is_not_checked() -> None:
    done = run("git")
    assert done.exit_code == 2 and "Error: GitForCausalLM does not run on text alone" in done.stderr, done


def test_weights_that_are_not_there_are_missed(tmp_path: Path) -> None:
    """A folder made from a configuration, and its config.json, which `estimate` takes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), "utf-8")
    for target, reason in ((tmp_path, "no weights in this folder"), (tmp_path / "config.json", "a file, and the")):
        done = run(str(target))
        assert done.exit_code == 2 and reason in done.stderr and "--tiny" in done.stderr, done
        tiny = run(str(target), "--tiny", "--quiet")
        assert tiny.exit_code == 0 and tiny.stdout.count("\n") == 1
