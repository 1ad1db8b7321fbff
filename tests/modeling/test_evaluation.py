"""CCECallback during Trainer evaluation: no logits if only the loss is needed, full logits if someone reads them."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import FAMILIES, batch, cce_warnings, logits_made, stats, twins
from numerics import assert_accurate
from test_callback import build
from tiny import OLDER

from hf_cce import CCECallback, FilterState, apply_cce, remove_cce

TOKENS = 40  # at least this many in an evaluation batch
TWO_ROWS = {"per_device_eval_batch_size": 2}


def evaluate(tmp_path: Path, *callbacks: Any, model: Any = None, **options: Any) -> tuple[torch.Tensor, list[str], Any]:
    """Return the loss of an evaluation, the logits it materialized, and the trainer."""
    trainer = build(tmp_path, *callbacks, model=model, **TWO_ROWS, **options)
    with logits_made(tokens=TOKENS) as made:
        loss = trainer.evaluate()["eval_loss"]
    return torch.tensor(loss, dtype=torch.float64), made, trainer


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi", "mixtral"])
def test_evaluation_loss_needs_no_logits(tmp_path: Path, family: str) -> None:
    """evaluate() without metrics needs no logits, even before training or with a softcap, a scale or a bias."""
    expected, made, _ = evaluate(tmp_path, model=FAMILIES[family].build())
    assert made
    found, made, trainer = evaluate(tmp_path, CCECallback(), model=FAMILIES[family].build())
    assert not made
    assert_accurate(found, expected, expected, "loss", torch.float32)
    assert stats(trainer.model).calls == 0  # counts training calls only
    assert "forward" not in vars(trainer.model.get_output_embeddings())


@pytest.mark.parametrize("other", ["smoothing", "no callback", "removed"])
def test_other_evaluations_are_unchanged(tmp_path: Path, other: str) -> None:
    """Trainer's label-smoothed loss and unpatched models do not change, even after a trainer with the callback."""
    evaluate(tmp_path, CCECallback())
    options = {"label_smoothing_factor": 0.1} if other == "smoothing" else {}
    trainer = build(tmp_path, *([] if other == "no callback" else [CCECallback()]), **TWO_ROWS, **options)
    if other == "removed":
        remove_cce(trainer.model)
    with logits_made(tokens=TOKENS) as made:
        assert trainer.evaluate()["eval_loss"] > 0
    assert made


def test_batch_with_all_labels_ignored(tmp_path: Path) -> None:
    """Full logits give NaN, which Trainer excludes from the mean; a 0 would be averaged in."""
    losses = []
    for callbacks in ([], [CCECallback()]):
        trainer = build(tmp_path, *callbacks, **TWO_ROWS)
        trainer.model_accepts_loss_kwargs = False
        for row in trainer.eval_dataset[2:]:
            row["labels"].fill_(-100)
        losses.append(torch.tensor(trainer.evaluate()["eval_loss"], dtype=torch.float64))
    if OLDER and losses[0].isnan():  # Transformers 5.17 excludes nothing
        assert losses[1].isnan()
        return
    assert losses[0] > 0
    assert_accurate(losses[1], losses[0], losses[0], "loss", torch.float32)


def test_head_is_correct_after_interrupted_evaluation(tmp_path: Path) -> None:
    """torch runs no hook after Ctrl-C: the head keeps deferring until the model is patched again, with correct results."""
    trainer = build(tmp_path, CCECallback())
    trainer.model.loss_function = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    hidden_states, head = torch.randn(1, 32), trainer.model.lm_head
    with torch.no_grad():
        assert torch.equal(head(hidden_states) * 1.0, torch.nn.functional.linear(hidden_states, head.weight))
    apply_cce(trainer.model)
    assert "forward" not in vars(head)


def test_nan_stays_out_of_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter reports NaN as the error of a frozen head's weight. JSON has no NaN, and Trainer logs JSON."""
    found = {"kept": 0.25, "error": 1e-3, "weight_error": float("nan")}
    monkeypatch.setattr(FilterState, "stats", lambda self: found)
    trainer = build(tmp_path, CCECallback(details=True), save_strategy="steps", save_steps=1)
    trainer.train()
    written = (tmp_path / "checkpoint-3" / "trainer_state.json").read_text("utf-8")
    logged = json.loads(written, parse_constant=Mock(side_effect=ValueError))["log_history"]
    assert [row["cce/kept"] for row in logged if "loss" in row] == [0.25] * 3 and "cce/weight_error" not in written


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, "training"])
def test_evaluation_logits_are_lazy(family: str, mode: Any) -> None:
    """The logits are lazy; once read, they equal the unpatched model's bit for bit, without a warning or a count.

    Covers evaluation mode, and training mode without gradients.
    """
    plain, patched = (model.train(mode == "training") for model in twins(family))
    with cce_warnings() as messages, (torch.no_grad if mode == "training" else mode)():
        expected = plain(**batch())
        with logits_made() as made:
            found = patched(**batch())
        assert made == []
        assert_accurate(found.loss, expected.loss, expected.loss.double(), "loss")
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(found.logits * 1.0, expected.logits)
    assert found.logits.requires_grad == expected.logits.requires_grad
    assert stats(patched).calls == stats(patched).materialized == 0 and messages == []


@pytest.mark.usefixtures("small_scratch")
def test_argmax_metrics_need_no_logits(tmp_path: Path) -> None:
    """Trainer with ``preprocess_logits_for_metrics`` computes the logits of a few tokens at a time."""
    found = []
    for callbacks in ([], [CCECallback()]):
        right = lambda x: {"right": float((x.predictions[:, :-1] == x.label_ids[:, 1:]).mean())}  # noqa: E731
        trainer = build(tmp_path, *callbacks, **TWO_ROWS, compute_metrics=right)
        trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        with logits_made(tokens=TOKENS) as made:
            metrics = trainer.evaluate()
        found.append((metrics["eval_right"], bool(made)))
        losses = torch.tensor(metrics["eval_loss"], dtype=torch.float64)
    assert found[0] == (found[1][0], True) and not found[1][1] and losses > 0
