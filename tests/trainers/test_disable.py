"""HF_CCE_DISABLE=1 disables every patch: the run equals the unpatched one, and one log line says so."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
import torch
from models import FAMILIES, batch
from test_callback import build, history

from hf_cce import CCECallback, apply_cce, remove_cce
from hf_cce.api import DISABLE, _log_disabled


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setenv(DISABLE, "1")
    _log_disabled.cache_clear()
    caplog.set_level(logging.INFO, "hf_cce")
    return caplog


def test_disabled_apply_cce_does_nothing_and_logs_once(disabled: pytest.LogCaptureFixture) -> None:
    model = FAMILIES["llama"].build()
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    assert apply_cce(model) is model and apply_cce(model, gradient_filter=None) is model
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    assert type(model(**batch()).logits) is torch.Tensor
    (line,) = [record for record in disabled.records if "is disabled by" in record.message]
    assert "HF_CCE_DISABLE=1" in line.message and line.levelno == logging.WARNING
    patched = FAMILIES["llama"].build()
    with pytest.MonkeyPatch.context() as context:
        context.setenv(DISABLE, "0")
        apply_cce(patched)
    patched(**batch())
    stats = patched.cce_stats()
    assert model.cce_stats() == dict.fromkeys(model.cce_stats(), 0.0)  # code that reads the counters still works
    assert set(model.cce_stats()) <= set(stats) and stats["calls"] == 1
    assert pickle.loads(pickle.dumps(model)).cce_stats() == model.cce_stats()
    assert remove_cce(model) is model


def test_disabled_classes_and_wrong_options(disabled: pytest.LogCaptureFixture) -> None:
    init = type(FAMILIES["llama"].build()).__init__
    assert apply_cce("llama") == "llama" and type(FAMILIES["llama"].build()).__init__ is init
    with pytest.raises(TypeError, match="unknown option"):
        apply_cce("llama", budget=1)


def test_disabled_run_matches_unpatched(tmp_path: Path, disabled: pytest.LogCaptureFixture) -> None:
    plain, ours = build(tmp_path), build(tmp_path, CCECallback(on_unused="raise"))
    for trainer in (plain, ours):
        trainer.train()
    assert history(ours) == history(plain)
    assert not any(key.startswith("cce/") for row in ours.state.log_history for key in row)
    assert len([record for record in disabled.records if record.name.startswith("hf_cce")]) == 1
    ours.evaluate()
