"""SFTTrainer with several kinds of data: losses, metrics and weights through our operator match TRL alone."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stats, tiny_llama
from numerics import assert_accurate, assert_all_accurate
from test_callback import custom_loss
from test_trl import STEPS, common, datasets, run, text, tokenizer, trl

from hf_cce import CCECallback

ROWS = 9
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %}"
    "{% else %}<bos> {{ message['content'] }} {% endif %}{% endfor %}"
)


def texts() -> dict[str, list[Any]]:
    return {"text": [text(i, 6 + i) for i in range(ROWS)]}


def completions() -> dict[str, list[Any]]:
    return {
        "prompt": [text(i, 4 + i % 3) for i in range(ROWS)],
        "completion": [" " + text(100 + i, 3 + i) for i in range(ROWS)],
    }


def talks() -> dict[str, list[Any]]:
    def message(i: int, turn: int) -> dict[str, str]:
        return {"role": ("user", "assistant")[turn % 2], "content": text(10 * i + turn, 3 + (i + turn) % 5)}

    return {"messages": [[message(i, turn) for turn in range(4)] for i in range(ROWS)]}


def label_count(trainer: Any) -> int:
    return sum(sum(label != -100 for label in row.get("labels", row["input_ids"])) for row in trainer.train_dataset)


def token_count(trainer: Any) -> int:
    return sum(len(row["input_ids"]) for row in trainer.train_dataset)


def flattened(trainer: Any) -> bool:
    """Return True if rows are concatenated into one, separated by restarting position ids."""
    inputs = next(iter(trainer.get_train_dataloader()))
    return "attention_mask" not in inputs and len(inputs["input_ids"]) == 1 and (inputs["position_ids"] == 0).sum() > 1


@dataclass(frozen=True)
class Mode:
    rows: Callable[[], dict[str, list[Any]]]
    was_used: Callable[[Any], bool]  # checks that the trainer really used this mode
    options: dict[str, Any] = field(default_factory=dict)


MODES: dict[str, Mode] = {
    "completion only": Mode(completions, lambda t: 0 < label_count(t) < token_count(t)),
    "assistant only": Mode(talks, lambda t: 0 < label_count(t) < token_count(t), {"assistant_only_loss": True}),
    "packed": Mode(texts, lambda t: len(t.train_dataset) < ROWS and flattened(t), {"packing": True}),
    "packed, wrapped": Mode(
        texts, lambda t: len(t.train_dataset) < ROWS and not flattened(t), {"packing": True, "packing_strategy": "wrapped"}
    ),
    "padding free, assistant only": Mode(
        talks,
        lambda t: flattened(t) and label_count(t) < token_count(t),
        {"padding_free": True, "max_length": None, "assistant_only_loss": True},
    ),
    "padded and cut": Mode(
        texts, lambda t: token_count(t) < ROWS * 11, {"max_length": 10, "pad_to_multiple_of": 16},
    ),
}  # fmt: skip


def assert_as_trl(folder: Path, mode: Mode, **options: Any) -> tuple[Any, list[str]]:
    """Compare every logged number, evaluations included, and all weights; return the patched trainer and hf_cce's warnings."""
    others = {name: options.pop(name) for name in ("peft_config", "compute_loss_func") if name in options}
    rows = datasets.Dataset.from_dict(mode.rows())
    reader = tokenizer()
    reader.chat_template = TEMPLATE
    # SGD, because Adam turns rounding differences into full-size steps
    chosen = {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, "max_length": 40, **mode.options}
    found = []
    for callbacks in ([], [CCECallback()]):
        torch.manual_seed(3)  # for adapters
        args = trl.SFTConfig(**common(folder / str(len(found)), **chosen, **options))
        trainer = trl.SFTTrainer(
            model=tiny_llama(), args=args, train_dataset=rows, eval_dataset=rows.select(range(4)),
            processing_class=reader, callbacks=callbacks, **others,
        )  # fmt: skip
        assert mode.was_used(trainer)
        log, messages = run(trainer)
        assert len(log) == STEPS and (callbacks or messages == [])
        weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        before = copy.copy(stats(trainer.model)) if callbacks else None
        found.append((log, weights, trainer.evaluate()))
        assert before is None or stats(trainer.model) == before  # an evaluation is not counted
    (theirs, their_weights, their_evaluation), (ours, our_weights, our_evaluation) = found
    assert {"loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm"} <= theirs[0].keys()
    for key in theirs[0]:
        mine, other = (torch.tensor([entry[key] for entry in log]) for log in (ours, theirs))
        assert other.any(), key
        assert key not in ("num_tokens", "mean_token_accuracy") or torch.equal(mine, other), key
        assert_accurate(mine, other, other, key, torch.float32)
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        mine, other = (torch.tensor(evaluation[key]) for evaluation in (our_evaluation, their_evaluation))
        assert_accurate(mine, other, other, key, torch.float32)
    assert_all_accurate(our_weights, their_weights, their_weights)
    return trainer, messages


def assert_all_fused(trainer: Any, messages: list[str]) -> None:
    counted = stats(trainer.model)
    assert counted.fused == counted.calls > STEPS  # some steps have two micro-batches
    assert messages == [] and counted.missed == counted.bypassed == counted.materialized == 0


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("name", MODES)
def test_data_formats(name: str, loss_type: str, tmp_path: Path) -> None:
    assert_all_fused(*assert_as_trl(tmp_path, MODES[name], loss_type=loss_type))


CAUSAL = {"task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "lora": lambda peft: peft.LoraConfig(r=2, target_modules="all-linear", **CAUSAL),
    "saved head": lambda peft: peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], **CAUSAL),
    "tokens": lambda peft: peft.LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6, 7, 8], **CAUSAL
    ),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "completion only") for name in ADAPTERS), ("lora", "padding free, assistant only"), ("tokens", "packed")],
)
def test_adapters(name: str, kind: str, tmp_path: Path) -> None:
    """The adapter configuration is passed to TRL, which creates the PeftModel."""
    config = ADAPTERS[name](pytest.importorskip("peft"))
    assert_all_fused(*assert_as_trl(tmp_path, MODES[kind], peft_config=config))


@pytest.mark.parametrize(
    ("options", "known"),
    [({"label_smoothing_factor": 0.1}, True), ({"compute_loss_func": custom_loss}, False)],
    ids=["label smoothing", "custom loss"],
)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_trl_losses_on_logits(options: dict[str, Any], known: bool, tmp_path: Path) -> None:
    """TRL computes the loss by a call without labels, and the metrics by another call without gradients."""
    trainer, messages = assert_as_trl(tmp_path, MODES["completion only"], **options)
    counted = stats(trainer.model)
    assert counted.calls == (counted.fused if known else counted.materialized) > 0
    assert len(messages) == (not known) and all("outputs.logits of a training call was used" in x for x in messages)
