"""Losses that people write on the logits of a training call: no logits are made, and each step is the unpatched model's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import FAMILIES, assert_results_as_good, batch, exact, logits_made, loss_and_grads, stats, tiny_llama
from numerics import assert_as_good
from test_callback import build, run
from test_trainer_features import assert_same_run
from torch import Tensor

from hf_cce import CCECallback, apply_cce, linear_cross_entropy
from hf_cce.deferred import answers

V = 99


@pytest.fixture(autouse=True)
def _few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the most likely words; by default all tokens of a test would fit at once."""
    monkeypatch.setattr(answers, "_scratch", lambda recipe: 8 * V * 7)


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def token_losses(outputs: Any, labels: Tensor, dft: bool = False) -> Tensor:
    """As ms-swift has them: labels rolled, one loss per token, for DFT weighted by the probability of the label."""
    logits, target = outputs.logits.float(), torch.roll(labels, shifts=-1, dims=-1).view(-1)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.to(logits.device), reduction="none")
    if dft:
        with torch.no_grad():
            weights = torch.exp(-loss)
        loss *= weights
    return loss


def dft(outputs: Any, labels: Tensor) -> Tensor:
    """As LLaMA-Factory writes it: the losses of the labels that count, times their probability."""
    logits, target = outputs["logits"].float(), shifted(labels).reshape(-1)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), target, reduction="none")[target != -100]
    return (loss * torch.exp(-loss.detach())).mean()


def channels(outputs: Any, labels: Tensor) -> Tensor:
    """A loss per row, of which a mean is taken for each channel."""
    loss, valid = token_losses(outputs, labels), torch.roll(labels, -1, -1).view(-1) != -100
    rows = [slice(i * labels.shape[1], (i + 1) * labels.shape[1]) for i in range(len(labels))]
    return torch.stack([loss[row][valid[row]].mean() * (i + 1) for i, row in enumerate(rows)]).sum()


def scaled(outputs: Any, labels: Tensor) -> Tensor:
    scale = torch.linspace(0.1, 2.0, labels.numel()).view(labels.shape)
    return (token_losses(outputs, labels) * torch.roll(scale, -1, -1).view(-1)).sum() / (labels != -100).sum()


def confident(outputs: Any, labels: Tensor) -> Tensor:
    """A loss with an entropy bonus and an accuracy, in which the tokens without a label do not count."""
    logits, target = outputs.logits[:, :-1], labels[:, 1:]
    valid, ids = target != -100, target.clamp(min=0)
    log_p = logits.log_softmax(-1)
    chosen, entropy = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    accuracy = (logits.argmax(-1) == ids).float()
    return ((-chosen - 0.1 * entropy) * valid).sum() / valid.sum() + 0.0 * accuracy.sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a plain loop": lambda outputs, labels: F.cross_entropy(outputs.logits.flatten(0, 1), shifted(labels).flatten()),
    "classes first": lambda outputs, labels: F.cross_entropy(outputs.logits.transpose(1, 2), shifted(labels)),
    "log_softmax": lambda outputs, labels: F.nll_loss(outputs.logits.log_softmax(-1).flatten(0, 1), shifted(labels).flatten()),
    "class weights": lambda outputs, labels: F.cross_entropy(
        outputs.logits.flatten(0, 1), shifted(labels).flatten(), torch.linspace(0.5, 2.0, V, dtype=outputs.logits.dtype)
    ),
    "token weights": scaled,
    "channels": channels,
    "DFT by ms-swift": lambda outputs, labels: token_losses(outputs, labels, dft=True).sum() / (labels != -100).sum(),
    "DFT by LLaMA-Factory": dft,
    "entropy bonus": confident,
}  # fmt: skip


def results(model: Any, loss_of: Any, double: bool = False) -> dict[str, Tensor]:
    inputs = batch()
    labels = inputs.pop("labels")
    if double:
        usual, Tensor.float = Tensor.float, Tensor.double  # the losses above ask for float32
    try:
        loss = loss_of(model(**inputs), labels)
    finally:
        if double:
            Tensor.float = usual
    loss.backward()
    return {
        "loss": loss.detach(),
        "head": model.get_output_embeddings().weight.grad,
        "body": model.model.norm.weight.grad,
    }


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_ones_own(name: str, family: str) -> None:
    """With a softcap, a scale, or neither; nothing is said, nothing of tokens x vocabulary is made."""
    plain = FAMILIES[family].build(tie_word_embeddings=False)
    reference, patched = exact(plain), apply_cce(copy.deepcopy(plain))
    with warnings.catch_warnings(), logits_made(model=patched) as seen:
        warnings.filterwarnings("error", message="hf_cce")
        actual = results(patched, LOSSES[name])
    assert seen == [] and stats(patched).materialized == 0 and stats(patched).fused == stats(patched).calls == 1
    assert_results_as_good(actual, results(plain, LOSSES[name]), results(reference, LOSSES[name], double=True))


@pytest.mark.parametrize("name", ["token weights", "DFT by LLaMA-Factory", "entropy bonus"])
def test_trainers_compute_loss_func(name: str, tmp_path: Path) -> None:
    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return LOSSES[name](outputs, labels)

    plain, patched = (
        build(tmp_path / how, *callbacks, compute_loss_func=loss_func)
        for how, callbacks in (("plain", []), ("ours", [CCECallback(on_unused="raise")]))
    )
    assert run(plain) == []
    with logits_made(tokens=40) as seen:
        assert run(patched) == []
    assert seen == []
    assert_same_run(patched, plain, 3)
    assert stats(patched.model).fused == stats(patched.model).calls == 6


def test_divergences_of_whole_distributions_get_real_logits_and_one_warning() -> None:
    """Of a teacher's (GKD, GOLD): both kinds, bit by bit what the unpatched model gives."""
    teacher = tiny_llama(seed=3)(batch()["input_ids"]).logits.detach()

    def divergence(outputs: Any, labels: Tensor) -> Tensor:
        student, other = outputs.logits[:, :-1].log_softmax(-1), teacher[:, :-1].log_softmax(-1)
        return F.kl_div(student, other, reduction="sum", log_target=True) + F.kl_div(other, student.exp())

    plain, patched = tiny_llama(), apply_cce(tiny_llama())
    expected = results(plain, divergence)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [results(patched, divergence)["loss"] for _ in range(2)]
    assert len([w for w in caught if "outputs.logits of a training call was used" in str(w.message)]) == 1
    assert torch.equal(found[0], expected["loss"]) and stats(patched).materialized == 2


def test_calls_that_are_no_training_have_plain_logits() -> None:
    model, inputs = apply_cce(tiny_llama()), {"input_ids": batch()["input_ids"]}
    with torch.no_grad():
        assert type(model(**inputs).logits) is Tensor
    assert type(model.eval()(**inputs).logits) is Tensor
    model.train().generate(inputs["input_ids"][:1, :4], max_new_tokens=2, do_sample=False)
    assert stats(model).calls == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_statistics_of_a_loss(reduction: str) -> None:
    """Accuracy, entropy and perplexity in the pass of the loss, which stays what it was; over all labels so far."""
    plain, patched = tiny_llama(), apply_cce(tiny_llama(), token_stats=True)
    items = {} if reduction == "mean" else {"num_items_in_batch": 17}
    reference = loss_and_grads(exact(plain), {**batch(), **items}, double=True)
    assert "entropy" not in patched.cce_stats()
    with logits_made(model=patched) as seen:
        actual = loss_and_grads(patched, {**batch(), **items})
    assert seen == []
    assert_results_as_good(actual, loss_and_grads(plain, {**batch(), **items}), reference)
    with torch.no_grad():
        patched(**batch())  # an evaluation counts for nothing
        logits, labels = (
            plain(input_ids=batch()["input_ids"], attention_mask=batch()["attention_mask"]).logits,
            batch()["labels"],
        )
    valid = shifted(labels) != -100
    log_p, target = logits.log_softmax(-1)[valid], shifted(labels)[valid]
    found = patched.cce_stats()
    expected = {
        "token_accuracy": (log_p.argmax(-1) == target).double().mean(),
        "entropy": -(log_p.exp() * log_p).sum(-1).mean(),
        "perplexity": F.nll_loss(log_p, target).exp(),
    }
    for name, value in expected.items():
        assert_as_good(torch.tensor(found[name]), value, value, name, torch.float32)


def test_token_statistics_in_the_logs(tmp_path: Path) -> None:
    """Each entry has those of its own steps, as the metrics of the unpatched model with the same weights would be."""
    plain, patched = build(tmp_path / "a"), build(tmp_path / "b", CCECallback(token_stats=True, on_unused="raise"))
    assert run(plain) == run(patched) == []
    assert_same_run(patched, plain, 3)
    entries = [entry for entry in patched.state.log_history if "loss" in entry]
    assert len(entries) == 3 and all(
        0 <= entry["cce/token_accuracy"] <= 1 and entry["cce/entropy"] > 0 for entry in entries
    )
    total = patched.model.cce_stats()
    assert min(e["cce/entropy"] for e in entries) < total["entropy"] < max(e["cce/entropy"] for e in entries)
    for entry in entries:  # a mean over labels, as Trainer's is
        loss = torch.tensor(entry["loss"])
        assert_as_good(torch.tensor(entry["cce/perplexity"]).log(), loss, loss.double(), "perplexity")


def test_heads_for_tokens_further_ahead() -> None:
    """Several heads, as in docs/guides/any-loss.md: their losses beside the model's own, and none of them makes logits."""
    torch.manual_seed(0)
    plain = tiny_llama()
    patched, reference = apply_cce(copy.deepcopy(plain)), exact(plain)
    heads = [torch.nn.Linear(32, V, bias=False) for _ in range(3)]

    def outcome(model: Any, ours: bool) -> dict[str, Tensor]:
        inputs, dtype = batch(), model.dtype
        outputs, labels = model(**inputs, output_hidden_states=True), inputs["labels"]
        hidden_states, loss = outputs.hidden_states[-1], outputs.loss.to(dtype)
        weights = [head.weight.detach().to(dtype).requires_grad_() for head in heads]
        for k, weight in enumerate(weights, start=1):
            if ours:
                loss = loss + 0.8**k * linear_cross_entropy(hidden_states[:, :-k], weight, labels[:, k:], shift=True)
            else:
                logits = F.linear(hidden_states, weight)[:, : -k - 1]
                loss = loss + 0.8**k * F.cross_entropy(logits.flatten(0, 1), labels[:, k + 1 :].flatten())
        loss.backward()
        found = {f"head {k}": weight.grad for k, weight in enumerate(weights)}
        return {"loss": loss.detach(), **found, "body": model.model.norm.weight.grad}

    with logits_made(tokens=34, model=patched) as seen:
        actual = outcome(patched, True)
    assert seen == []
    assert_results_as_good(actual, outcome(plain, False), outcome(reference, False))
