"""CCECallback stands first among a Trainer's callbacks, so that what it adds to the logs is there when they are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import tiny_llama
from test_callback import build, run
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from hf_cce import CCECallback, apply_cce
from hf_cce.patches.causal_lm import patch_of

EVENTS = ["on_init_end", "on_train_begin"]


class Reporting(TrainerCallback):
    """Sends logs on as they are when it is told, as those for W&B and TensorBoard do."""

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.sent.append(dict(logs))


@pytest.fixture(autouse=True)
def reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tests", Reporting)


def sent(trainer: Any) -> list[float]:
    """What was reported of the losses without logits, log by log."""
    reporting = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Reporting))
    return [logs["cce_fused"] for logs in reporting.sent if "loss" in logs]


@pytest.mark.parametrize("how", ["given", "class", "late", "model_init", "late, model_init"])
def test_what_is_reported_has_our_keys(how: str, tmp_path: Path) -> None:
    callback = CCECallback if how == "class" else CCECallback()
    given = [] if "late" in how else [callback]
    options = {"model_init": lambda: tiny_llama()} if "model_init" in how else {}
    trainer = build(tmp_path, *given, report_to=["tests"], **options)
    if not given:
        trainer.add_callback(callback)
    assert run(trainer) == []
    assert sent(trainer) == [2.0, 4.0, 6.0]
    run(trainer)
    assert len(sent(trainer)) == 6  # and nobody is there twice
    assert sum(isinstance(c, CCECallback) for c in trainer.callback_handler.callbacks) == 1


def test_trainers_that_share_a_callback(tmp_path: Path) -> None:
    callback = CCECallback(on_unused="raise")
    trainers = [build(tmp_path, callback, report_to=["tests"], max_steps=steps) for steps in (2, 1)]
    for trainer in reversed(trainers):
        assert run(trainer) == []
        assert trainer.callback_handler.callbacks[0] is callback
    assert [sent(trainer) for trainer in trainers] == [[2.0, 4.0], [2.0]]


# Our place changes while the handler goes through its list
class Noting(TrainerCallback):
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append(self.name)

    on_train_begin = on_init_end


class Ours(CCECallback):
    """Asks from a method of a subclass, and notes its turn."""

    heard: list[str]

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append("ours")
        super().on_init_end(args, state, control, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append("ours")
        super().on_train_begin(args, state, control, **kwargs)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("place", range(5))
def test_nobody_is_skipped_or_asked_twice(place: int, event: str, tmp_path: Path) -> None:
    heard: list[str] = []
    others = [Noting(name, heard) for name in "abcd"]
    ours = Ours()
    ours.heard = heard
    callbacks: list[Any] = [*others[:place], ours, *others[place:]]
    names = [getattr(c, "name", "ours") for c in callbacks]
    handler = CallbackHandler([DefaultFlowCallback(), *callbacks], tiny_llama(), None, None, None)
    args, state, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(), TrainerControl()
    getattr(handler, event)(args, state, control)
    assert heard == names
    assert handler.callbacks[0] is ours and handler.callbacks[2:] == others
    heard.clear()
    getattr(handler, event)(args, state, control)
    assert heard == ["ours", *"abcd"]
    assert handler.callbacks[0] is ours and handler.callbacks[2:] == others


def test_without_a_handler_all_stays_as_it_was(tmp_path: Path) -> None:
    """Called by somebody else, or by a callback that passes its events on."""

    class Around(TrainerCallback):
        def __init__(self) -> None:
            self.inner = CCECallback()

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.inner.on_init_end(args, state, control, **kwargs)

    model = tiny_llama()
    CCECallback().on_init_end(None, None, None, model=model)
    assert patch_of(model) is not None
    around = Around()
    trainer = build(tmp_path, around)
    assert patch_of(trainer.model) is not None
    plain = [type(c) for c in build(tmp_path, Around(), model=apply_cce(tiny_llama())).callback_handler.callbacks]
    assert [type(c) for c in trainer.callback_handler.callbacks] == plain and plain[0] is DefaultFlowCallback
