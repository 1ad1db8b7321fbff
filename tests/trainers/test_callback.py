"""CCECallback in a real Trainer: same run as without it, patched in time, and a message if it had no effect."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import batch, cce_warnings, stats, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cce import CCECallback, CCEConfig, apply_cce, remove_cce
from hf_cce.api import DISABLE, _warn_once
from hf_cce.patches.causal_lm import patch_of


def rows() -> list[dict[str, torch.Tensor]]:
    data = batch(rows=12)
    data["labels"][5, -12:] = -100
    return [{name: value[row] for name, value in data.items()} for row in range(12)]


def build(tmp_path: Path, *callbacks: Any, model: Any = None, trainer: type[Trainer] = Trainer, **options: Any) -> Any:
    arguments = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    arguments |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.1}
    arguments["optim"] = "sgd"  # Adam turns rounding differences into full-size steps
    made = {
        name: options.pop(name) for name in ("model_init", "compute_loss_func", "compute_metrics") if name in options
    }
    if "model_init" not in made:
        made["model"] = tiny_llama() if model is None else model
    return trainer(
        args=TrainingArguments(output_dir=str(tmp_path), **{**arguments, **options}),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        callbacks=list(callbacks),
        **made,
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def history(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in logged(trainer)]


def run(trainer: Any) -> list[str]:
    with cce_warnings() as messages:
        trainer.train()
    return messages


def on(event: str, do: Callable[..., Any]) -> TrainerCallback:
    """Return a callback that calls ``do(state=…, control=…, …)`` at an event."""

    def method(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        do(state=state, control=control, **more)

    return type("Callback", (TrainerCallback,), {event: method})()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_message_and_logged_counters(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU, other implementations use full logits for so few tokens
    implementation = "portable" if device == "cpu" else "triton"
    seen: list[dict[str, float]] = []  # by a callback after ours
    callback = CCECallback(implementation=implementation, details=True)
    later = on("on_log", lambda logs, **_: seen.append(dict(logs)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # with two GPUs, Trainer would use DataParallel
    trainer = build(tmp_path, callback, later, use_cpu=device == "cpu")
    with caplog.at_level("INFO", logger="hf_cce"):
        run(trainer)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_cce")]
    assert said == ["hf_cce: the losses of this training run are computed without logits"]
    steps = logged(trainer)
    assert [entry["cce/fused"] for entry in steps] == [2.0, 4.0, 6.0]  # two calls per step
    assert all(entry["cce/materialized"] == 0.0 for entry in steps)
    assert [entry.get("cce/fused") for entry in seen if {"loss", "cce/fused"} & set(entry)] == [2.0, 4.0, 6.0]
    logged_keys = {key for entry in trainer.state.log_history for key in entry if key.startswith("cce/")}
    assert logged_keys == {"cce/fused", "cce/materialized", *(["cce/peak_gib"] if device == "cuda" else [])}
    assert all(entry["cce/peak_gib"] > 0 for entry in steps if device == "cuda")


def test_second_run_is_checked_again(tmp_path: Path) -> None:
    trainer = build(tmp_path, CCECallback(on_unused="raise"))
    assert run(trainer) == []
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.float().square().mean()
    with (
        pytest.warns(UserWarning, match="outputs.logits of a training call was used"),
        pytest.raises(RuntimeError, match="computed its loss from full logits"),
    ):
        trainer.train()


MESSAGE = "hf_cce: the losses of this training run are computed without logits\n"
NOT_THE_MAIN_PROCESS = on("on_train_begin", lambda state, **_: vars(state).update(is_world_process_zero=False))


@pytest.mark.parametrize(
    ("level", "options", "others", "times"),
    [
        (logging.NOTSET, {}, [], 1),  # Python's default logging level
        (logging.NOTSET, {"disable_tqdm": True}, [], 0),
        (logging.NOTSET, {}, [NOT_THE_MAIN_PROCESS], 0),
        (logging.INFO, {}, [], 0),  # the log has the message instead
        (logging.ERROR, {}, [], 0),
    ],
    ids=["shown", "no progress", "not the main process", "logged", "silenced"],
)
def test_message_is_printed_once_per_run(
    level: int, options: Any, others: Any, times: int, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(tmp_path, CCECallback(), *others, **{"disable_tqdm": False, **options})
    with caplog.at_level(level, "hf_cce"):
        for _ in range(2):
            capsys.readouterr()
            run(trainer)
            assert capsys.readouterr().out.count(MESSAGE) == times


# A run without the fused loss warns once
def custom_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs["logits"].float().square().mean()


def from_logits(model: Any) -> Any:
    return lambda logits, labels, **_: logits.softmax(-1).square().mean()


def from_weights(model: Any) -> Any:
    return lambda logits, labels, **_: model.lm_head.weight.square().mean()


@pytest.mark.parametrize(
    ("loss", "of_the_model", "of_the_run"),
    [
        (from_logits, "square needs the full logits", "from full logits"),
        (from_weights, "did not use the fused loss: its loss is not a cross entropy", "in another way"),
    ],
)
def test_custom_model_loss_warns(loss: Any, of_the_model: str, of_the_run: str, tmp_path: Path) -> None:
    """Each message appears once, and full logits are mentioned only if they were materialized."""
    model = tiny_llama()
    model.loss_function = loss(model)
    first, second = run(build(tmp_path, CCECallback(), model=model))
    assert of_the_model in first and of_the_run in second
    made = loss is from_logits
    assert stats(model).missed == 6 and (stats(model).materialized > 0) == ("full logits" in first) == made


def test_trainer_that_reads_logits_warns_once(tmp_path: Path) -> None:
    class Measuring(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            self.right = (outputs.logits.square().argmax(-1) == inputs["input_ids"]).float().mean()
            return (loss, outputs) if return_outputs else loss

    messages = run(build(tmp_path, CCECallback(on_unused="raise"), trainer=Measuring))
    assert len(messages) == 1 and "outputs.logits of a training call was used (square)" in messages[0]


def at_step_2(change: Callable[[Any], Any]) -> TrainerCallback:
    return on("on_step_begin", lambda state, model, **_: change(model) if state.global_step == 1 else None)


def use_loss_from_logits(model: Any) -> None:
    model.loss_function = from_logits(model)


class CustomLossTrainer(Trainer):
    first, last, seen = 0, 0, 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.seen += 1
        if not self.first <= self.seen <= self.last:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        return model(**inputs).logits.float().square().mean()


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize("options", [{}, pytest.param(COMPILED, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove_cce, "the patch was removed during training"),
        (use_loss_from_logits, "computed its loss from full logits"),
        (None, "computed its loss from full logits"),
    ],
)
def test_later_step_without_fused_loss(change: Any, reason: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Two micro-batches per step; the second of three steps (and possibly the third) does not use the fused loss."""

    def trainer(folder: str, on_unused: Any) -> Any:
        others = [] if change is None else [at_step_2(change)]
        made = build(tmp_path / folder, CCECallback(on_unused=on_unused), *others, trainer=CustomLossTrainer, **options)
        made.first, made.last = (3, 4) if change is None else (0, 0)
        return made

    if options and change is not remove_cce:
        reason = "no torch.compile graph that ran in this step contains the fused loss"
    else:
        messages = [message for message in run(trainer("warn", "warn")) if "fell back to full logits" not in message]
        already_reported = ["outputs.logits of a training call was used (square)"]
        expected = ["training step 2 did not use the fused loss: ", reason] if change else already_reported
        assert len(messages) == 1 and all(text in messages[0] for text in expected)
    with pytest.raises(RuntimeError, match=f"training step 2 did not use the fused loss: .*{reason}"):
        run(trainer("raise", "raise"))


class EvaluationTrainer(Trainer):
    """Computes its losses in evaluation mode."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model.eval()(**inputs).loss


def test_reason_of_a_model_that_was_warned_about_before(tmp_path: Path) -> None:
    model = apply_cce(tiny_llama()).train()
    with cce_warnings() as messages:
        model.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
        model(**batch())
    assert len(messages) == 1
    trainer = build(tmp_path, CCECallback(on_unused="raise"), trainer=EvaluationTrainer, model=model)
    with pytest.raises(RuntimeError, match="the model was never called in training mode"):
        trainer.train()


def test_model_repatched_during_run(tmp_path: Path) -> None:
    """The new patch's counters start at zero; no step may be reported as missing the fused loss."""
    change = at_step_2(lambda model: apply_cce(remove_cce(model)))
    trainer = build(tmp_path, CCECallback(on_unused="raise"), change)
    assert run(trainer) == []
    assert patch_of(trainer.model).stats.fused == 4


def test_calls_between_steps_do_not_count(tmp_path: Path) -> None:
    calling = on("on_step_end", lambda model, **_: model(**batch(rows=2)))
    trainer = build(tmp_path, CCECallback(on_unused="raise"), calling, trainer=CustomLossTrainer)
    trainer.first, trainer.last = 3, 4
    with pytest.raises(RuntimeError, match="training step 2"):
        run(trainer)


@pytest.mark.parametrize("compiled", ["arguments", "model", "layer"])
def test_torch_compile_is_named_in_warning(compiled: str, tmp_path: Path) -> None:
    model, options = tiny_llama(), COMPILED if compiled == "arguments" else {}
    if compiled != "arguments":
        (model if compiled == "model" else model.model.layers[0]).compile(backend="eager")
    (message,) = run(build(tmp_path, CCECallback(), model=model, compute_loss_func=custom_loss, max_steps=1, **options))
    if compiled == "layer":
        assert "torch.compile" not in message and "outputs.logits of a training call was used" in message
    else:
        assert "no torch.compile graph" in message and "compute_loss_func" in message


def test_model_that_cannot_be_patched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be patched"):
        build(tmp_path, CCECallback(), model=transformers.LlamaForSequenceClassification(tiny_llama().config))


def test_options_of_patched_model_and_callback(tmp_path: Path) -> None:
    options = {"gradient_filter": None, "memory_budget": 1 << 20}
    model = apply_cce(tiny_llama(), **options)
    hooks = len(model._forward_hooks)
    trainer = build(tmp_path, CCECallback(on_unused="raise"), model=model)
    assert patch_of(model).config == CCEConfig(**options)
    assert run(trainer) == []
    assert patch_of(model).config == CCEConfig(**options) and len(model._forward_hooks) == hooks
    for callback in (CCECallback(CCEConfig()), CCECallback(gradient_filter="auto")):
        trainer = build(tmp_path, callback, model=apply_cce(tiny_llama(), **options))
        assert patch_of(trainer.model).config == CCEConfig()
    trainer = build(tmp_path, CCECallback(implementation="portable"))
    assert patch_of(trainer.model).config == CCEConfig(implementation="portable")


# HF_CCE_DISABLE=1 disables every patch: the run equals the unpatched one, and one log line says so
@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setenv(DISABLE, "1")
    _warn_once.cache_clear()
    caplog.set_level(logging.INFO, "hf_cce")
    return caplog


def test_disabled_apply_cce_does_nothing_and_logs_once(disabled: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    assert apply_cce(model) is model and apply_cce(model, gradient_filter=None) is model
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    assert type(model(**batch()).logits) is torch.Tensor
    (line,) = [record for record in disabled.records if "is disabled by" in record.message]
    assert "HF_CCE_DISABLE=1" in line.message and line.levelno == logging.WARNING
    patched = tiny_llama()
    with pytest.MonkeyPatch.context() as context:
        context.setenv(DISABLE, "0")
        apply_cce(patched)
    patched(**batch())
    stats = patched.cce_stats()
    assert model.cce_stats() == dict.fromkeys(model.cce_stats(), 0.0)  # code that reads the counters still works
    assert model.cce_stats().keys() == stats.keys() and stats["calls"] == 1
    assert pickle.loads(pickle.dumps(model)).cce_stats() == model.cce_stats()
    assert remove_cce(model) is model


def test_disabled_classes_and_wrong_options(disabled: pytest.LogCaptureFixture) -> None:
    init = type(tiny_llama()).__init__
    assert apply_cce("llama") == "llama" and type(tiny_llama()).__init__ is init
    with pytest.raises(TypeError, match="unknown option"):
        apply_cce("llama", budget=1)


def test_disabled_run_matches_unpatched(tmp_path: Path, disabled: pytest.LogCaptureFixture) -> None:
    plain, ours = build(tmp_path), build(tmp_path, CCECallback(on_unused="raise"))
    for trainer in (plain, ours):
        trainer.train()
    assert history(ours) == history(plain)
    assert not any(key.startswith("cce/") for row in ours.state.log_history for key in row)
    assert len([record for record in disabled.records if record.name.startswith("hf_cce")]) == 1
    assert ours.model.cce_stats()["calls"] == 0
    ours.evaluate()
