"""User-written losses on the logits of a training call: nothing is materialized, and steps equal the unpatched model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_same_training, batch, cce_warnings, logits_made, loss_and_grads, stats, tiny_llama, twins
from numerics import assert_accurate
from test_callback import build, logged, run
from test_trainer_features import assert_same_run
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

from hf_cce import CCECallback, apply_cce, ops
from hf_cce.deferred import head_input

V = 99
pytestmark = pytest.mark.usefixtures("small_scratch")


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def token_losses(outputs: Any, labels: Tensor, dft: bool = False) -> Tensor:
    """Compute ms-swift's loss: rolled labels, one loss per token, weighted by the label's probability for DFT."""
    logits, target = outputs.logits.float(), torch.roll(labels, shifts=-1, dims=-1).view(-1)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.to(logits.device), reduction="none")
    if dft:
        with torch.no_grad():
            weights = torch.exp(-loss)
        loss *= weights
    return loss


def dft(outputs: Any, labels: Tensor) -> Tensor:
    """Compute LLaMA-Factory's DFT loss: the losses of valid labels times their probability."""
    logits, target = outputs["logits"].float(), shifted(labels).reshape(-1)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), target, reduction="none")[target != -100]
    return (loss * torch.exp(-loss.detach())).mean()


def scaled(outputs: Any, labels: Tensor) -> Tensor:
    scale = torch.linspace(0.1, 2.0, labels.numel()).view(labels.shape)
    return (token_losses(outputs, labels) * torch.roll(scale, -1, -1).view(-1)).sum() / (labels != -100).sum()


def confident(outputs: Any, labels: Tensor) -> Tensor:
    """Compute a loss with an entropy bonus and an accuracy, excluding tokens without a label."""
    logits, target = outputs.logits[:, :-1], labels[:, 1:]
    valid, ids = target != -100, target.clamp(min=0)
    log_p = logits.log_softmax(-1)
    chosen, entropy = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    accuracy = (logits.argmax(-1) == ids).float()
    return ((-chosen - 0.1 * entropy) * valid).sum() / valid.sum() + 0.0 * accuracy.sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "token weights": scaled,
    "DFT by ms-swift": lambda outputs, labels: token_losses(outputs, labels, dft=True).sum() / (labels != -100).sum(),
    "DFT by LLaMA-Factory": dft,
    "entropy bonus": confident,
}


def by_caller(loss_of: Any) -> Any:
    return lambda model, inputs: loss_of(model(**{k: v for k, v in inputs.items() if k != "labels"}), inputs["labels"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("name", LOSSES)
def test_custom_losses_without_logits(name: str, family: str) -> None:
    """No warning and no tensor of size tokens x vocabulary, with a softcap, a scale, or neither."""
    plain, patched = twins(family, tie_word_embeddings=False)
    with cce_warnings() as messages, logits_made(model=patched) as seen:
        loss_and_grads(patched, batch(), loss_of=by_caller(LOSSES[name]))
    assert seen == messages == [] and stats(patched).materialized == 0
    assert stats(patched).fused == stats(patched).calls == 1
    assert_same_training(patched, plain, batch(), loss_of=by_caller(LOSSES[name]))


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "reduction": "sum"}, {"num_items_in_batch": 17}], ids=str)
@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("name", ["gkd.gkd_trainer.GKDTrainer", "gold.gold_trainer.GOLDTrainer"])
def test_divergences_of_gkd_and_gold(name: str, beta: float, options: dict[str, Any]) -> None:
    """TRL's function on the student's deferred logits, with a softcap among the recorded operations."""
    module, _, kind = name.rpartition(".")
    trainer = getattr(pytest.importorskip(f"trl.experimental.{module}"), kind)
    teacher = tiny_llama(seed=3)(batch()["input_ids"]).logits.detach()

    def divergence(outputs: Any, labels: Tensor) -> Tensor:
        mine = {"student_logits": outputs.logits[:, :-1, :], "labels": labels[:, 1:], "beta": beta, **options}
        return trainer.generalized_jsd_loss(**mine, teacher_logits=teacher[:, :-1].to(outputs.logits.dtype))

    plain, patched = twins("gemma2", tie_word_embeddings=False)
    with cce_warnings() as messages:
        assert_same_training(patched, plain, batch(), loss_of=by_caller(divergence))
    assert messages == [] and stats(patched).materialized == 0 and stats(patched).fused == 1


def test_label_smoothing_passes_through_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss's two terms share one forward pass and one backward pass, and leave nothing behind."""
    passes: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(ops._StrategyCall, name)
        counted = lambda *args, original=original, name=name: passes.append(name) or original(*args)  # noqa: E731
        monkeypatch.setattr(ops._StrategyCall, name, staticmethod(counted))
    outputs = apply_cce(tiny_llama())(batch()["input_ids"])
    LabelSmoother(0.1)(outputs, batch()["labels"], shift_labels=True).backward()
    call = outputs.logits.recipe.call
    assert passes == ["forward", "backward"] and call.last_pass is None and call.stats.materialized == 0


def test_non_training_calls_return_tensors() -> None:
    model, inputs = apply_cce(tiny_llama()), {"input_ids": batch()["input_ids"]}
    with torch.no_grad():
        assert type(model(**inputs).logits) is Tensor
    assert type(model.eval()(**inputs).logits) is Tensor
    model.train().generate(inputs["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
    assert stats(model).calls == 0


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 17}], ids=["mean", "sum"])
def test_token_statistics(items: dict[str, int]) -> None:
    """Accuracy, entropy and perplexity come from the loss's own pass, over all labels so far, and do not change the loss."""
    plain, patched = tiny_llama(), apply_cce(tiny_llama(), token_stats=True)
    assert "entropy" not in patched.cce_stats()
    with logits_made(model=patched) as seen:
        patched(**batch(), **items)
    assert seen == []
    assert_same_training(patched, plain, {**batch(), **items})
    with torch.no_grad():
        patched(**batch())  # an evaluation is not counted
        logits = plain(input_ids=batch()["input_ids"], attention_mask=batch()["attention_mask"]).logits
    target = shifted(batch()["labels"])
    log_p, target = logits.log_softmax(-1)[target != -100], target[target != -100]
    found = patched.cce_stats()
    expected = {
        "token_accuracy": (log_p.argmax(-1) == target).double().mean(),
        "entropy": -(log_p.exp() * log_p).sum(-1).mean(),
        "perplexity": F.nll_loss(log_p, target).exp(),
    }
    for name, value in expected.items():
        assert_accurate(torch.tensor(found[name]), value, value, name, torch.float32)


@pytest.mark.parametrize("form", ["sequence", "label", "equal labels", "shifted", "unshifted"])
def test_loss_by_group(form: str) -> None:
    """The group of a label counts, not that of the position that predicts it. Calls without groups do not change these means."""
    family = "bart" if form == "unshifted" else "llama"  # Transformers' BartForCausalLM does not shift labels
    plain, patched = twins(family)
    apply_cce(patched, token_stats=True)
    inputs = batch()
    labels = inputs["labels"].fill_(7) if form == "equal labels" else inputs["labels"]
    groups = torch.arange(len(labels)) if form == "sequence" else torch.arange(labels.numel()).view_as(labels) % 3
    if form == "shifted":
        inputs["shift_labels"], groups = shifted(labels).contiguous(), shifted(groups).clamp(min=0)
    patched(**inputs, loss_groups=groups)
    found = patched.cce_stats()
    per_label = groups[:, None].expand_as(labels) if form == "sequence" else groups
    per_position = per_label if form in ("shifted", "unshifted") else shifted(per_label)
    target = labels if form == "unshifted" else shifted(labels)
    with torch.no_grad():
        logits = plain(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(labels)
    expected = {
        f"loss_group_{i}": losses[(per_position == i) & (target != -100)].mean()
        for i in per_position[target != -100].unique().tolist()
    }
    assert expected.keys() == {name for name in found if name.startswith("loss_group")}
    for name, value in expected.items():
        assert_accurate(torch.tensor(found[name]), value, value, name, torch.float32)
    patched(**batch())
    again = patched.cce_stats()
    for name in expected:
        assert again[name] == found[name]


def test_statistics_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that would get the model's own loss on a GPU are part of the means, too."""
    monkeypatch.setattr(head_input, "has_few_tokens", lambda *_: True)
    plain, patched = apply_cce(tiny_llama()), apply_cce(tiny_llama(), token_stats=True)
    for model in (plain, patched):
        model(**batch())
    assert stats(plain).few_tokens == stats(patched).fused == 1
    assert patched.cce_stats()["entropy"] > 0


def test_wrong_loss_groups() -> None:
    model, inputs = apply_cce(tiny_llama()), batch()
    groups = torch.zeros_like(inputs["labels"])
    for token_stats, given, message in (
        (False, groups, "loss_groups needs token_stats=True"),
        (True, groups[:, 1:], r"loss_groups must have the shape \(.*\) or \(.*\) of labels, got"),
        (True, groups.float(), "loss_groups must be integers, got torch.float32"),
        (True, groups + 256, r"loss_groups must lie in \[0, 256\), got 256 to 256"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_cce(model, token_stats=token_stats)(**inputs, loss_groups=given)
    with pytest.raises(ValueError, match="loss_groups needs labels in the same call"):
        model(input_ids=inputs["input_ids"], loss_groups=groups)
    with pytest.raises(TypeError, match="loss_groups must be a tensor"):
        model(**inputs, loss_groups=[0, 1])
    model.eval()(**inputs, loss_groups=groups)  # an evaluation is not counted


def test_token_statistics_in_the_logs(tmp_path: Path) -> None:
    """Each entry covers its own steps, and equals the metrics of an unpatched model with the same weights."""
    plain = build(tmp_path / "a")
    patched = build(tmp_path / "b", CCECallback(token_stats=True, on_unused="raise"), remove_unused_columns=False)
    patched.train_dataset = [row | {"loss_groups": 7 * (i % 2)} for i, row in enumerate(patched.train_dataset)]
    assert run(plain) == run(patched) == []
    assert_same_run(patched, plain, 3)
    entries = logged(patched)
    assert len(entries) == 3
    assert all(0 <= entry["cce/token_accuracy"] <= 1 and entry["cce/entropy"] > 0 for entry in entries)
    total = patched.model.cce_stats()
    assert min(e["cce/entropy"] for e in entries) < total["entropy"] < max(e["cce/entropy"] for e in entries)
    for entry in entries:  # a mean over labels, like Trainer's
        loss = torch.tensor(entry["loss"])
        assert_accurate(torch.tensor(entry["cce/perplexity"]).log(), loss, loss.double(), "perplexity")
        low, high = sorted(entry[f"cce/loss_group_{i}"] for i in (0, 7))
        assert low < entry["loss"] < high
