"""Resuming, saving, evaluating, exporting and other losses with a patched model give the same results as without the patch."""

import functools
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import assert_fused, batch, logits_made, loss_and_grads, stats, tiny_llama, with_lora
from numerics import assert_accurate
from safetensors.torch import load_file
from test_callback import build, custom_loss, history, on, rows, run
from torch import Tensor, nn
from transformers import Trainer

from hf_cce import CCECallback, apply_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of

WAYS = ("apply_cce", "callback", "late", "model_init")
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1}


def made(how: str, folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    """Return a Trainer whose model is patched in the way ``how``; unpatched if ``how`` is "plain"."""
    model = tiny_llama() if model is None else model
    if how == "model_init":
        options["model_init"] = lambda: tiny_llama()
    ours = [CCECallback(on_unused="raise")] if how in ("callback", "model_init") else []
    if how == "apply_cce":
        apply_cce(model)
    trainer = build(folder, *ours, *callbacks, model=model, **options)
    if how == "late":
        trainer.add_callback(CCECallback(on_unused="raise"))
    return trainer


def trained(
    how: str, folder: Path, *callbacks: Any, calls: int | None = None, resume: Any = None, **options: Any
) -> Any:
    """Return a trainer after training in which every loss was fused, without warnings; unpatched if ``how`` is "plain"."""
    trainer = made(how, folder, *callbacks, **options)
    trainer.train = functools.partial(trainer.train, resume_from_checkpoint=resume)
    assert run(trainer) == []
    if how == "plain":
        assert patch_of(causal_lm(trainer.model)) is None
    else:
        assert_fused(trainer.model, calls=calls)
        assert causal_lm(trainer.model).cce_stats()["fused"] == stats(trainer.model).calls
    return trainer


def evaluations(trainer: Any) -> Tensor:
    return torch.tensor([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Check equality up to float32 rounding; lists of numbers as vectors, dictionaries value by value."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value, f"{what}: {name}")
        return
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert found.dtype == expected.dtype
    assert_accurate(found, expected, expected, what, torch.float32)


def assert_same_run(patched: Any, plain: Any, steps: int) -> None:
    """Compare the losses of the last ``steps`` and the final weights, which must have changed."""
    assert len(history(patched)) >= steps
    assert_same(history(patched)[-steps:], history(plain)[-steps:], "losses")
    start = tiny_llama().state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in plain.model.state_dict().items() if name in start)
    assert_same(dict(patched.model.named_parameters()), dict(plain.model.named_parameters()), "weights")


class Penalised(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = 2 * loss + 0.1 * model.lm_head.weight.square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"trainer": Penalised}], ids=["plain", "checkpointing", "penalty"]
)
def test_run_matches_unpatched(options: dict[str, Any], tmp_path: Path) -> None:
    """Includes accumulation, rows of different lengths and num_items_in_batch; no step materializes logits."""
    plain = trained("plain", tmp_path, **options)
    with logits_made(tokens=40) as seen:
        patched = trained("callback", tmp_path, calls=6, **options)
    assert seen == [] and patched.model_accepts_loss_kwargs and len(history(patched)) == 3
    assert getattr(patched, "_loss_shifts_labels", None) == getattr(plain, "_loss_shifts_labels", None)
    assert_same_run(patched, plain, 3)


def stop_after_step_3(state: Any, control: Any, **_: Any) -> None:
    """Save a checkpoint and stop, like a preempted machine."""
    control.should_save = control.should_training_stop = state.global_step == 3


def as_an_older_version(checkpoint: Path) -> None:
    """Rename our log entries, the only traces in a checkpoint, to those used before the first release."""
    path = checkpoint / "trainer_state.json"
    text = path.read_text("utf-8")
    older = text.replace("cce/materialized", "cce_materialised").replace("cce/", "cce_")
    assert older.count("cce_") == text.count("cce/") > 0
    path.write_text(older, "utf-8")


@pytest.mark.parametrize(
    ("before", "after"),
    [*((way, way) for way in WAYS), ("plain", "callback"), ("callback", "plain"), ("older", "callback")],
)
def test_resumed_run_matches_uninterrupted(before: str, after: str, tmp_path: Path) -> None:
    """Two calls per step in each part; the resumed run may be patched even if the first part was not."""
    # model_init inside train() changes the seed for the order of the rows
    init = {"model_init": lambda: tiny_llama()} if before == "model_init" else {}
    plain = trained("plain", tmp_path / "plain", max_steps=5, **init)
    stop = on("on_step_end", stop_after_step_3)
    first = trained("callback" if before == "older" else before, tmp_path, stop, max_steps=5, calls=6)
    assert_same(history(first), history(plain)[:3], "losses before")
    if before == "older":
        as_an_older_version(tmp_path / "checkpoint-3")
    resumed = trained(after, tmp_path, max_steps=5, calls=4, resume=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == len(history(resumed)) == 5 and history(resumed)[:3] == history(first)
    assert_same_run(resumed, plain, 2)


@pytest.mark.parametrize("kind", ["llama", "tied", "lora"])
def test_checkpoints_match_unpatched(kind: str, tmp_path: Path) -> None:
    """Same files and text; only the model's numbers may be rounded differently."""

    def model() -> Any:
        bare = tiny_llama(tie_word_embeddings=kind == "tied")
        if kind != "lora":
            return bare
        pytest.importorskip("peft")
        return with_lora(bare, target_modules=["q_proj", "lm_head"], init_lora_weights=True)

    for how in ("plain", "callback"):
        trainer = trained(how, tmp_path / how, model=model(), save_strategy="steps", save_steps=3)
        trainer.save_model(str(tmp_path / how / "saved"))
    for folder in ("saved", "checkpoint-3"):
        theirs, mine = (
            {path.name: path for path in (tmp_path / how / folder).iterdir()} for how in ("plain", "callback")
        )
        assert mine.keys() == theirs.keys()
        tensors = [name for name in theirs if name.endswith(".safetensors")]
        assert len(tensors) == 1
        assert_same(load_file(mine[tensors[0]]), load_file(theirs[tensors[0]]), folder)
        texts = [name for name in theirs if name.endswith(("config.json", ".md"))]
        assert any(name.endswith("config.json") for name in texts)
        for name in texts:
            assert mine[name].read_text("utf-8") == theirs[name].read_text("utf-8"), name
    folders = [tmp_path / how / "checkpoint-3" for how in ("plain", "callback")]
    states = [json.loads((folder / "trainer_state.json").read_text("utf-8")) for folder in folders]
    added = [states[1]["log_history"][i].keys() - entry.keys() for i, entry in enumerate(states[0]["log_history"])]
    assert set().union(*added) == {"cce/fused", "cce/materialized"}
    assert states[0].keys() == states[1].keys() and states[0]["stateful_callbacks"] == states[1]["stateful_callbacks"]
    if kind != "lora":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "callback" / "saved")
        assert patch_of(loaded) is None
        assert_same(loaded.state_dict(), trainer.model.state_dict(), "loaded again")


@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluation_during_training(loss_only: bool, tmp_path: Path) -> None:
    """Evaluations return logits for ``compute_metrics`` if requested, are not counted, and training continues without logits."""
    seen: dict[str, list[Any]] = {"plain": [], "callback": []}
    trainers = {}
    for how, predictions in seen.items():

        def compute_metrics(prediction: Any, predictions: list[Any] = predictions) -> dict[str, float]:
            predictions.append(prediction)
            return {"top": float(prediction.predictions.argmax(-1).sum())}

        options: dict[str, Any] = {"prediction_loss_only": True} if loss_only else {"compute_metrics": compute_metrics}
        trainers[how] = trained(how, tmp_path / how, **EACH_STEP, **options)
    plain, patched = trainers["plain"], trainers["callback"]
    assert_same_run(patched, plain, 3)
    assert_fused(patched.model, calls=6)
    assert len(evaluations(plain)) == 3
    assert_same(evaluations(patched), evaluations(plain), "evaluation")
    assert len(seen["callback"]) == len(seen["plain"]) == (0 if loss_only else 3)
    for mine, theirs in zip(seen["callback"], seen["plain"], strict=True):
        assert theirs.predictions.shape == (4, 24, 99)
        assert_same(mine.predictions, theirs.predictions, "logits")
        assert (mine.label_ids == theirs.label_ids).all()
    predictions = patched.predict(rows()[:4])
    assert (predictions.predictions is None) == loss_only
    assert_same(predictions.metrics["test_loss"], plain.predict(rows()[:4]).metrics["test_loss"], "prediction")
    assert_fused(patched.model, calls=6)


@pytest.mark.parametrize("seed", [42, 1])
def test_weights_after_steps_in_bfloat16(seed: int, tmp_path: Path) -> None:
    """Weight updates are no further from float32 than unpatched ones. On a CPU ``fp16`` has no effect."""
    options = {"max_steps": 4, "seed": seed}
    exact = trained("plain", tmp_path, **options)
    twin, ours = (trained(how, tmp_path, bf16=True, **options) for how in ("plain", "callback"))
    assert_fused(ours.model, calls=8)
    start = torch.cat([value.flatten() for value in tiny_llama().parameters()])
    steps = [torch.cat([x.detach().flatten() for x in t.model.parameters()]) - start for t in (ours, twin, exact)]
    assert_accurate(*steps, "weights", torch.bfloat16)
    losses = [torch.tensor(history(trainer)) for trainer in (ours, twin, exact)]
    assert not torch.equal(losses[1], losses[2])
    assert_accurate(*losses, "losses", torch.bfloat16)


def from_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def of_the_largest(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs["logits"][:, :-1].max(-1).values.sum() / num_items_in_batch


@pytest.mark.usefixtures("small_scratch")
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        *({"compute_loss_func": loss} for loss in (from_logits, of_the_largest, custom_loss)),
    ],
    ids=["label smoothing", "cross entropy", "largest logits", "another loss"],
)
@pytest.mark.parametrize("how", ["apply_cce", "callback"])
def test_trainer_losses_on_logits(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Trainer calls the model without labels: logits are deferred, and an unknown loss gets full logits with one warning."""
    plain = build(tmp_path, **options)
    patched = build(tmp_path, *([CCECallback()] if how == "callback" else []), **options)
    if how == "apply_cce":
        apply_cce(patched.model)
    assert run(plain) == []
    unknown = options.get("compute_loss_func") is custom_loss
    with logits_made(tokens=40) as seen:
        assert len(run(patched)) == unknown
    assert bool(seen) == unknown
    assert_same_run(patched, plain, 3)
    counted = stats(patched.model)
    assert (counted.calls, counted.fused, counted.materialized) == ((6, 0, 6) if unknown else (6, 6, 0))


@pytest.mark.parametrize(("ignored", "steps"), [([5], 3), ([2, 5, 9], 3), (range(0, 12, 2), 6)])
def test_micro_batches_with_all_labels_ignored(ignored: Iterable[int], steps: int, tmp_path: Path) -> None:
    """Micro-batches have one row each, so that their content does not depend on the order of the rows.

    With six steps, each is one micro-batch. If its labels are all ignored, Trainer divides 0 by 0, logs 0.0, and continues.
    """
    trainers = []
    for how in ("plain", "callback"):
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4 if steps == 3 else 1}
        trainer = made(how, tmp_path, max_steps=steps, **options)
        for number in ignored:
            trainer.train_dataset[number]["labels"][:] = -100
        assert run(trainer) == []
        assert (0 < history(trainer).count(0.0) < 6) == (steps == 6)
        trainers.append(trainer)
    plain, patched = trainers
    assert_same_run(patched, plain, steps)
    assert_fused(patched.model, calls=12 if steps == 3 else 6)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def train_and_merge(patch: Any) -> Any:
    pytest.importorskip("peft")
    model = patch(with_lora(tiny_llama(), target_modules="all-linear"))
    loss_and_grads(model, batch())
    torch.optim.SGD(model.parameters(), 0.3).step()
    return model.merge_and_unload()


@pytest.mark.slow
def test_merge_save_and_export(tmp_path: Path) -> None:
    merged = {"ours": train_and_merge(apply_cce), "plain": train_and_merge(lambda model: model)}
    for name, model in merged.items():
        assert (patch_of(model) is not None) is (name == "ours")
        model.save_pretrained(tmp_path / name)
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in merged}
    assert files["ours"] == files["plain"]
    configs = [(tmp_path / name / "config.json").read_text("utf-8") for name in merged]
    assert configs[0] == configs[1]
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in merged)
    assert_same(ours, plain, "merged")

    served = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval() for _ in range(2)]
    apply_cce(served[0])
    ids = batch(rows=2)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(*(model.generate(ids, **options) for model in served))
    exported = [torch.export.export(Logits(model), (ids,)).module()(ids) for model in served]
    assert torch.equal(*exported)
    if importlib.util.find_spec("onnxscript") is not None:
        programs = [torch.onnx.export(Logits(model), (ids,), dynamo=True).model.graph for model in served]
        assert [node.op_type for node in programs[0]] == [node.op_type for node in programs[1]]
        assert programs[0].initializers.keys() == programs[1].initializers.keys()
