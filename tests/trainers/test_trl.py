"""TRL's trainers through our operator: the same losses, metrics and weights as without it, step by step."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import logits_made, stats, tiny_llama
from numerics import assert_as_good, budget, relative_error
from ways import KEEPS_ALL, force

from hf_cce import CCECallback, CCEConfig, apply_cce
from hf_cce.deferred.logits import lazy_logits
from hf_cce.patches import preference
from hf_cce.patches import trl as trl_patch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
if not hasattr(trl.trainer.utils, "add_fused_lm_head") and not os.environ.get(
    "HF_CCE_NEWEST"
):  # `make test-newest` fails then
    pytest.skip("this TRL has no fused LM head", allow_module_level=True)

STEPS = 3
WORDS = [f"w{i}" for i in range(90)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{word: i + 3 for i, word in enumerate(WORDS)}}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def text(seed: int, length: int) -> str:
    g = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=g))


def common(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False, "learning_rate": 1e-2, "seed": 0, **options,
    }  # fmt: skip


def sft(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    rows = datasets.Dataset.from_dict({"text": [text(i, 8 + i) for i in range(8)]})
    args = trl.SFTConfig(**common(folder, gradient_accumulation_steps=2, max_length=24, **options))
    return trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


def preferences() -> Any:
    return datasets.Dataset.from_dict(
        {
            "prompt": [text(i, 4) for i in range(8)],
            "chosen": [" " + text(100 + i, 6) for i in range(8)],
            "rejected": [" " + text(200 + i, 5) for i in range(8)],
        }
    )


def dpo(folder: Path, model: Any, callbacks: list[Any]) -> Any:
    args = trl.DPOConfig(**common(folder))
    return trl.DPOTrainer(
        model=model, args=args, train_dataset=preferences(), processing_class=tokenizer(), callbacks=callbacks
    )


def kto(folder: Path, model: Any, callbacks: list[Any]) -> Any:
    rows = datasets.Dataset.from_dict(
        {
            "prompt": [text(i, 4) for i in range(8)],
            "completion": [" " + text(100 + i, 6) for i in range(8)],
            "label": [i % 2 == 0 for i in range(8)],
        }
    )
    args = trl.KTOConfig(**common(folder))
    return trl.KTOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


def even_words(completions: list[str], **_: Any) -> list[float]:
    return [sum(word[-1:] in "02468" for word in completion.split()) / 8 for completion in completions]


def online(name: str) -> Callable[..., Any]:
    def build(folder: Path, model: Any, callbacks: list[Any]) -> Any:
        options = {"num_generations": 2, "max_completion_length": 6, "temperature": 0.7, "beta": 0.05}
        args = getattr(trl, f"{name}Config")(**common(folder, **options))
        return getattr(trl, f"{name}Trainer")(
            model=model, args=args, train_dataset=preferences().select_columns("prompt"), processing_class=tokenizer(),
            reward_funcs=even_words, callbacks=callbacks,
        )  # fmt: skip

    return build


def experimental(name: str, **chosen: Any) -> Callable[..., Any]:
    """ORPO, CPO and TPO: their trainers compute the loss from the logits of calls without labels."""

    def build(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
        module = pytest.importorskip(f"trl.experimental.{name.lower()}")
        rows = preferences()
        if name == "TPO":
            rows = rows.add_column("reference", [" " + text(300 + i, 7) for i in range(8)])
        args = getattr(module, f"{name}Config")(**common(folder, **{**chosen, **options}))
        return getattr(module, f"{name}Trainer")(
            model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
        )

    return build


def with_rewards(name: str, **chosen: Any) -> Callable[..., Any]:
    """OnlineDPO and A2PO, which sample completions and compare with a frozen copy of the model."""

    def build(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
        module = pytest.importorskip(f"trl.experimental.{chosen['module']}")
        more = {key: value for key, value in chosen.items() if key != "module"}
        args = getattr(module, f"{name}Config")(**common(folder, temperature=0.7, **{**more, **options}))
        reward = even_words if name == "OnlineDPO" else lambda completions, **_: [float("w4" in x) for x in completions]
        return getattr(module, f"{name}Trainer")(
            model=model, args=args, train_dataset=preferences().select_columns("prompt"), processing_class=tokenizer(),
            reward_funcs=reward, callbacks=callbacks,
        )  # fmt: skip

    return build


PREFERENCE: dict[str, Callable[..., Any]] = {
    "orpo": experimental("ORPO", max_length=16),
    "orpo accumulated": experimental("ORPO", gradient_accumulation_steps=2, beta=0.4),
    "cpo": experimental("CPO"),
    "cpo simpo": experimental("CPO", loss_type="simpo", cpo_alpha=0.0),
    "tpo": experimental("TPO"),
    "tpo alone": experimental("TPO", tpo_alpha=0.0, loss_type="tpo-l"),
}
TRAINERS: dict[str, Callable[..., Any]] = {
    **PREFERENCE,
    "online dpo": with_rewards("OnlineDPO", module="online_dpo", max_new_tokens=6),
    "a2po": with_rewards("A2PO", module="a2po", max_completion_length=6, num_value_samples=2),
    "sft": sft,
    "sft dft": lambda *args: sft(*args, loss_type="dft"),
    "dpo": dpo,
    "kto": kto,
    "grpo": online("GRPO"),
    "rloo": online("RLOO"),
}


def run(trainer: Any) -> tuple[list[dict[str, float]], list[str]]:
    """The log of every step, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(w.message) for w in caught if "hf_cce" in str(w.message)]
    timing = ("time", "per_second", "runtime", "flos", "cce/", "epoch")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timing)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ], told


@pytest.mark.parametrize("name", TRAINERS)
def test_every_step_is_that_of_the_unpatched_trainer(name: str, tmp_path: Path) -> None:
    logs, weights = {}, {}
    tiny_llama().save_pretrained(tmp_path / "model")  # some trainers load a copy of it, as the reference
    for ours in (False, True):
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        callbacks = [CCECallback(on_unused="raise")] if ours else []
        trainer = TRAINERS[name](tmp_path / str(ours), model, callbacks)
        logs[ours], told = run(trainer)
        weights[ours] = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
        assert told == []
        if ours:
            counted = stats(trainer.model)
            assert counted.fused == counted.calls > 0
            assert counted.missed == counted.bypassed == counted.materialized == 0
    assert len(logs[True]) == len(logs[False]) == STEPS
    for mine, theirs in zip(logs[True], logs[False], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=2e-4, abs=2e-5), key
    assert relative_error(weights[True], weights[False].double()) < 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's, on the CPU")
@pytest.mark.parametrize(("name", "loss_type"), [("sft", "nll"), ("sft", "dft"), ("grpo", "")])
def test_fine_tuning_and_nothing_else_goes_through_the_filter(
    name: str, loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, "filtered")
    tiny_llama().save_pretrained(tmp_path / "model")
    logs = {}
    for ours in (False, True):
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        config = CCEConfig("triton", gradient_filter=KEEPS_ALL)
        callbacks = [CCECallback(config, on_unused="raise")] if ours else []
        options = {"loss_type": loss_type} if loss_type else {}
        trainer = TRAINERS[name](tmp_path / str(ours), model, callbacks, **options)
        logs[ours], told = run(trainer)
        assert told == []
    assert bool(trainer.model.cce_stats().get("kept")) == (name == "sft")
    if name == "grpo":  # samples other words, as its log-probabilities are rounded otherwise
        return
    for mine, theirs in zip(logs[True], logs[False], strict=True):
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=2e-4, abs=2e-5), key


@pytest.mark.parametrize(("scale", "softcap", "temperature"), [(1.0, None, 1.0), (0.7, 5.0, 0.6)])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities_and_gradients(scale: float, softcap: float | None, temperature: float, bias: bool) -> None:
    """TRL's own function and ours, against its own in float64."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(17, 24, generator=g),
        torch.randn(91, 24, generator=g),
        torch.randn(91, generator=g),
    )
    targets = torch.randint(91, (17,), generator=g)
    function = trl.trainer.utils._ChunkedLogProbFunction
    original = getattr(function, "original", function)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    call = trl_patch.TrainingCall()

    def answer(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, offset)]
        arguments = (*leaves[:2], leaves[2] if bias else None, targets, temperature, 32, softcap, scale, outputs)
        found = trl_patch._answer(call, original, *arguments) if ours else original.apply(*arguments)
        wanted = leaves if bias else leaves[:2]
        gradients = torch.autograd.grad(found[0].sum() + 0.3 * found[1].square().sum(), wanted)
        assert not any(x.requires_grad for x in found[2:])
        return [*found, *gradients]

    exact, twin, ours = answer(torch.float64, False), answer(torch.float32, False), answer(torch.float32, True)
    for number, (a, t, e) in enumerate(zip(ours, twin, exact, strict=True)):
        if a.dtype == torch.bool:
            assert torch.equal(a, e)
        else:
            # TRL accumulates in float32 whatever it is given, so that its float64 run is no better.
            assert relative_error(a, e.double()) <= budget(relative_error(t, e.double()), torch.float32) + 1e-6, number
    assert call.fused == 1


@pytest.mark.parametrize("trained", [None, "weight", "bias"])
@pytest.mark.parametrize("whole", [True, False], ids=["gathered", "not gathered"])
def test_a_head_that_zero_3_gathers_for_the_call(trained: str | None, whole: bool) -> None:
    """As DeepSpeed does it: parameters know their shape, have values for TRL's call, and lose them before the backward pass."""
    g = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(17, 24, generator=g, requires_grad=True), torch.randint(91, (17,), generator=g)
    values = {"weight": torch.randn(91, 24, generator=g), "bias": torch.randn(91, generator=g)}
    expected = (hidden @ values["weight"].t() + values["bias"]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (exact,) = torch.autograd.grad(expected.square().sum(), hidden)
    head: dict[str, Any] = {}
    for number, (name, value) in enumerate(values.items()):
        head[name] = torch.nn.Parameter(value.clone() if whole else value.new_empty(0), requires_grad=name == trained)
        head[name].ds_id, head[name].ds_shape = number, value.shape
    asked = []

    class Original:
        @staticmethod
        def apply(*args: Any) -> Any:
            asked.append(args)
            return ("TRL's",)

    call = trl_patch.TrainingCall()
    found = trl_patch._answer(call, Original, hidden, *head.values(), targets, 1.0, 32)
    if trained or not whole:
        assert found == ("TRL's",) and asked[0][1] is head["weight"] and asked[0][2] is head["bias"]
        assert call.fused == 0 and "ZeRO-3" in call.reasons[0]
        return
    for parameter in head.values():
        parameter.data = torch.empty(0)
    (gradient,) = torch.autograd.grad(found[0].square().sum(), hidden)
    assert call.fused == 1 and not asked
    assert_as_good(found[0], expected, expected.double(), "log-probabilities")
    assert_as_good(gradient, exact, exact.double(), "gradient")


def test_other_models_and_other_trls_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = sft(tmp_path / "a", apply_cce(tiny_llama()), [])
    run(patched)
    assert isinstance(trl.trainer.utils._ChunkedLogProbFunction, trl_patch._Dispatch)
    seen: list[int] = []
    real = trl_patch._answer
    monkeypatch.setattr(trl_patch, "_answer", lambda *args: seen.append(1) or real(*args))
    plain = sft(tmp_path / "b", tiny_llama(), [])
    _, told = run(plain)
    assert told == [] and seen == []
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", _Other)
    other = sft(tmp_path / "c", apply_cce(tiny_llama()), [])
    _, told = run(other)
    assert len(told) == 1 and "TRL replaces the model's forward" in told[0]
    assert stats(other.model).bypassed > 0 == stats(other.model).fused
    assert trl.trainer.utils._ChunkedLogProbFunction is _Other


class _Other:
    """The function of a TRL to come: another argument."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, something: Any) -> None: ...

    @staticmethod
    def apply(*args: Any) -> Any:
        function: Any = trl.kernels.ChunkedLogProbFunction
        return function.apply(*args)


def test_evaluation_is_answered_too_and_counts_as_no_training(tmp_path: Path) -> None:
    model = apply_cce(tiny_llama())
    trainer = sft(tmp_path, model, [])
    rows = trainer.train_dataset
    run(trainer)
    before = copy.copy(stats(model))
    found = trainer.evaluate(rows)
    assert stats(model) == before
    trainer.model = trainer.model_wrapped = tiny_llama()
    trl.trainer.utils.add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy", "is_top1"))
    trainer.model.load_state_dict(model.state_dict())
    expected = trainer.evaluate(rows)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert found["eval_mean_token_accuracy"] == expected["eval_mean_token_accuracy"]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["orpo", "tpo"])
def test_preference_trainers_by_the_callback_or_without(
    name: str, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation has plain logits; and where TRL's functions are written in PyTorch operations, these are known as well."""
    if not kernel:
        monkeypatch.setattr(trl.trainer.utils, "_supports_trl_loss_kernel", lambda *args: False)
    model = apply_cce(tiny_llama())
    trainer = PREFERENCE[name](tmp_path, model, [])
    with logits_made(tokens=34) as seen:
        _, told = run(trainer)
    assert told == [] and seen == []
    counted = copy.copy(stats(model))
    assert counted.fused == counted.calls > 0 and counted.materialized == 0
    assert math.isfinite(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert stats(model) == counted


def test_the_functions_of_another_trl_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(logits: Any, something: Any) -> bool:
        return False

    kernel = trl.trainer.utils._fused_logprob_entropy
    monkeypatch.setattr(trl.trainer.utils, "_supports_trl_loss_kernel", other)
    preference.enter()
    assert trl.trainer.utils._supports_trl_loss_kernel is other and trl.trainer.utils._fused_logprob_entropy is kernel


@pytest.mark.parametrize("how", ["plain", "mask", "temperature", "negative"])
def test_the_functions_of_trl_on_deferred_logits(how: str) -> None:
    """One pass for log-probabilities and entropy; what has no closed form gets real logits."""
    preference.enter()
    generator = torch.Generator().manual_seed(0)
    used = [torch.randn(2, 9, 16, generator=generator), torch.randn(99, 16, generator=generator)]
    index = torch.randint(99, (2, 9), generator=generator)
    options = {"row_mask": index % 3} if how == "mask" else {"temperature": 0.7} if how == "temperature" else {}

    def outcome(dtype: torch.dtype, deferred: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in used]
        logits = lazy_logits(*leaves, call=call) if deferred else torch.nn.functional.linear(*leaves)
        if how == "negative":
            logits = logits * -1.0
        utils = trl.trainer.utils
        found = [*utils.selective_log_softmax_and_entropy(logits, index, **options), utils.entropy_from_logits(logits)]
        found.append(utils.selective_log_softmax(logits, index, **options))
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    call = trl_patch.TrainingCall(labels=False)
    exact, twin, ours = outcome(torch.float64, False), outcome(torch.float32, False), outcome(torch.float32, True)
    for number, (a, t, e) in enumerate(zip(ours, twin, exact, strict=True)):
        assert_as_good(a, t, e, str(number))
    assert bool(call.stats.materialized) == (how == "negative")


@pytest.mark.parametrize("name", ["sft", "orpo"])
def test_torch_compile_is_named_as_the_cause(name: str, tmp_path: Path) -> None:
    trainer = {"sft": sft, **PREFERENCE}[name](
        tmp_path, tiny_llama(), [CCECallback()], torch_compile=True, torch_compile_backend="eager", max_steps=1
    )
    _, told = run(trainer)
    reason = "under torch.compile TRL's fused LM head" if name == "sft" else "calls without labels"
    assert len(told) == 1 and "training step 1 ended without our fused loss" in told[0]
    assert reason in told[0] and "train without torch_compile" in told[0]


@pytest.mark.parametrize("name", ["orpo", "cpo", "tpo"])
def test_preference_trainers_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Under autocast: what is logged before the first update is no further from float32 than without us."""
    found = {}
    for how, precise in (("exact", True), ("twin", False), ("ours", False)):
        transformers.set_seed(0)
        callbacks = [CCECallback(on_unused="raise")] if how == "ours" else []
        trainer = PREFERENCE[name](tmp_path / how, tiny_llama(), callbacks, bf16=not precise)
        (first, *_), told = run(trainer)
        kept = [key for key in first if "log" in key or "loss" in key or "rewards/" in key]
        found[how] = torch.tensor([first[key] for key in kept if "accuracies" not in key])
        assert told == []
    assert len(found["ours"]) > 5
    assert_as_good(found["ours"], found["twin"], found["exact"], name, torch.bfloat16)
