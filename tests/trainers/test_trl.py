"""TRL's trainers with our operator: same losses, metrics and weights as without it at every step."""

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from accelerate import hooks
from forced_strategies import KEEPS_ALL, force_strategy
from models import cce_warnings, logits_made, stats, tiny_llama
from numerics import assert_accurate, assert_all_accurate, budget, relative_error

from hf_cce import CCECallback, CCEConfig, apply_cce
from hf_cce.deferred.logits import lazy_logits
from hf_cce.patches import marking, preference
from hf_cce.patches import trl as trl_patch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
newest = os.environ.get("HF_CCE_NEWEST")  # set by `make test-newest`, which must fail instead of skipping
if not hasattr(trl.trainer.utils, "add_fused_lm_head") and not newest:
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


def texts() -> Any:
    return datasets.Dataset.from_dict({"text": [text(i, 8 + i) for i in range(8)]})


def preferences() -> Any:
    return datasets.Dataset.from_dict(
        {
            "prompt": [text(i, 4) for i in range(8)],
            "chosen": [" " + text(100 + i, 6) for i in range(8)],
            "rejected": [" " + text(200 + i, 5) for i in range(8)],
        }
    )


def prompts() -> Any:
    return preferences().select_columns("prompt")


def judged() -> Any:
    rows = preferences().select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")
    return rows.add_column("label", [i % 2 == 0 for i in range(8)])


def with_reference() -> Any:
    return preferences().add_column("reference", [" " + text(300 + i, 7) for i in range(8)])


def code_sum(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ in each group: Adam would turn rounding errors into a full step if the gradient were zero."""
    return [sum(map(ord, completion)) % 17 / 17 for completion in completions]


def with_context() -> Any:
    return prompts().add_column("privileged_context", [text(400 + i, 3) for i in range(8)])


def odd_sum(completions: list[str], **_: Any) -> list[float]:
    """Return rewards of 0 and 1; SDPO learns from completions with 1."""
    return [float(sum(map(ord, completion)) % 2) for completion in completions]


def trainer_of(name: str, rows: Callable[[], Any], module: str = "trl", reward: Any = None, **usual: Any) -> Any:
    def build(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
        found = pytest.importorskip(module)
        args = getattr(found, f"{name}Config")(**common(folder, **{**usual, **options}))
        more = {} if reward is None else {"reward_funcs": reward}
        return getattr(found, f"{name}Trainer")(
            model=model, args=args, train_dataset=rows(), processing_class=tokenizer(), callbacks=callbacks, **more
        )

    return build


def experimental(name: str, rows: Callable[[], Any] = preferences, **usual: Any) -> Any:
    return trainer_of(name, rows, f"trl.experimental.{usual.pop('module', name.lower())}", **usual)


sft = trainer_of("SFT", texts, gradient_accumulation_steps=2, max_length=24)
SAMPLING = {"num_generations": 2, "max_completion_length": 6, "temperature": 0.7, "beta": 0.05, "reward": code_sum}
# Their losses use the logits of calls without labels.
PREFERENCE: dict[str, Callable[..., Any]] = {
    "orpo": experimental("ORPO", max_length=16),
    "orpo accumulated": experimental("ORPO", gradient_accumulation_steps=2, beta=0.4),
    "cpo": experimental("CPO"),
    "cpo simpo": experimental("CPO", loss_type="simpo", cpo_alpha=0.0),
    "tpo": experimental("TPO", with_reference),
    "tpo alone": experimental("TPO", with_reference, tpo_alpha=0.0, loss_type="tpo-l"),
}
TRAINERS: dict[str, Callable[..., Any]] = {
    **PREFERENCE,
    # These two sample completions and compare with a frozen copy of the model.
    "online dpo": experimental(
        "OnlineDPO", prompts, module="online_dpo", reward=code_sum, temperature=0.7, max_new_tokens=6
    ),
    "a2po": experimental(
        "A2PO", prompts, reward=code_sum, temperature=0.7, max_completion_length=6, num_value_samples=2
    ),
    "sdpo": experimental("SDPO", with_context, reward=odd_sum, num_generations=2, max_completion_length=6),
    "sdpo, top five": experimental(
        "SDPO",
        with_context,
        reward=odd_sum,
        num_generations=2,
        max_completion_length=6,
        distillation_mode="topk_logits",
        distillation_topk=5,
    ),
    "dpo": trainer_of("DPO", preferences),
    "kto": trainer_of("KTO", judged),
    "grpo": trainer_of("GRPO", prompts, **SAMPLING),
    "rloo": trainer_of("RLOO", prompts, **SAMPLING),
}


def run(trainer: Any) -> tuple[list[dict[str, float]], list[str]]:
    with cce_warnings() as messages:
        trainer.train()
    timing = ("time", "per_second", "runtime", "flos", "cce/", "epoch")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timing)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ], messages


def both(folder: Path, build: Callable[..., Any], config: Any = None, **options: Any) -> tuple[Any, Any]:
    """Train without and with our callback; return (trainer, log) of each."""
    found = []
    tiny_llama().save_pretrained(folder / "model")  # some trainers load a copy as the reference model
    for ours in (False, True):
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = build(folder / str(ours), model, [CCECallback(config, on_unused="raise")] if ours else [], **options)
        log, messages = run(trainer)
        assert messages == [] and len(log) == STEPS
        found.append((trainer, log))
    return found[0], found[1]


def assert_same_steps(folder: Path, build: Callable[..., Any], **options: Any) -> Any:
    """Compare all logs and final weights; check that no training call materialized logits. Return the patched trainer."""
    (plain, theirs), (patched, ours) = both(folder, build, **options)
    for mine, other in zip(ours, theirs, strict=True):
        expected: dict[str, Any] = {key: pytest.approx(value, rel=2e-4, abs=2e-5) for key, value in other.items()}
        assert mine == expected
    weights = [torch.cat([x.detach().flatten() for x in t.model.parameters()]) for t in (patched, plain)]
    assert relative_error(weights[0], weights[1].double()) < 1e-3
    counted = stats(patched.model)
    assert counted.fused == counted.calls > 0
    assert counted.missed == counted.bypassed == counted.materialized == 0
    return patched


@pytest.mark.parametrize("name", TRAINERS)
def test_steps_match_unpatched_trainer(name: str, tmp_path: Path) -> None:
    assert_same_steps(tmp_path, TRAINERS[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's, on the CPU")
@pytest.mark.parametrize(("name", "options"), [("sft", {}), ("sft", {"loss_type": "dft"}), ("grpo", {})])
def test_only_fine_tuning_uses_the_filter(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_strategy(monkeypatch, "filtered")
    config = CCEConfig("triton", gradient_filter=KEEPS_ALL)
    if name == "sft":
        assert assert_same_steps(tmp_path, sft, config=config, **options).model.cce_stats().get("kept")
    else:  # samples other tokens, because log-probabilities round differently
        _, (trainer, _) = both(tmp_path, TRAINERS[name], config)
        assert not trainer.model.cce_stats().get("kept")


@pytest.mark.parametrize(("scale", "softcap", "temperature"), [(1.0, None, 1.0), (0.7, 5.0, 0.6)])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities_and_gradients(scale: float, softcap: float | None, temperature: float, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, offset = (torch.randn(*shape, generator=g) for shape in ((17, 24), (91, 24), (91,)))
    targets = torch.randint(91, (17,), generator=g)
    function = trl.trainer.utils._ChunkedLogProbFunction
    assert trl_patch.intercept(function, trl_patch.ARGUMENTS, trl_patch._current, trl_patch._handle_call)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    call = trl_patch.TrainingCall()

    def answer(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, offset)]
        arguments = (*leaves[:2], leaves[2] if bias else None, targets, temperature, 32, softcap, scale, outputs)
        token = trl_patch._current.set(call if ours else None)
        found = function.apply(*arguments)
        trl_patch._current.reset(token)
        wanted = leaves if bias else leaves[:2]
        gradients = torch.autograd.grad(found[0].sum() + 0.3 * found[1].square().sum(), wanted)
        assert not any(x.requires_grad for x in found[2:])
        return [*found, *gradients]

    exact, twin, ours = answer(torch.float64, False), answer(torch.float32, False), answer(torch.float32, True)
    for number, (a, t, e) in enumerate(zip(ours, twin, exact, strict=True)):
        if a.dtype == torch.bool:
            assert torch.equal(a, e)
        else:
            # TRL always accumulates in float32, so its float64 run is not more accurate.
            assert relative_error(a, e.double()) <= budget(relative_error(t, e.double()), torch.float32) + 1e-6, number
    assert call.fused == 1


@pytest.mark.parametrize("trained", [None, "weight", "bias"])
@pytest.mark.parametrize("whole", [True, False], ids=["gathered", "not gathered"])
def test_zero_3_head_gathered_for_the_call(trained: str | None, whole: bool) -> None:
    """ZeRO-3 parameters know their shape, have values during TRL's call, and lose them before the backward."""
    g = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(17, 24, generator=g, requires_grad=True), torch.randint(91, (17,), generator=g)
    values = {"weight": torch.randn(91, 24, generator=g), "bias": torch.randn(91, generator=g)}
    expected = (hidden @ values["weight"].t() + values["bias"]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (exact,) = torch.autograd.grad(expected.square().sum(), hidden)
    head: dict[str, Any] = {}
    for number, (name, value) in enumerate(values.items()):
        head[name] = torch.nn.Parameter(value.clone() if whole else value.new_empty(0), requires_grad=name == trained)
        head[name].ds_id, head[name].ds_shape = number, value.shape
    calls = []

    class Original:
        forward = trl.trainer.utils._ChunkedLogProbFunction.forward
        apply = staticmethod(lambda *args: calls.append(args) or ("TRL's",))

    call = trl_patch.TrainingCall()
    token = trl_patch._current.set(call)
    assert trl_patch.intercept(Original, trl_patch.ARGUMENTS, trl_patch._current, trl_patch._handle_call)
    found = Original.apply(hidden, *head.values(), targets, 1.0, 32)
    trl_patch._current.reset(token)
    if trained or not whole:
        assert found == ("TRL's",) and calls[0][1] is head["weight"] and calls[0][2] is head["bias"]
        assert call.fused == 0 and "ZeRO-3" in call.reasons[0]
        return
    for parameter in head.values():
        parameter.data = torch.empty(0)
    (gradient,) = torch.autograd.grad(found[0].square().sum(), hidden)
    assert call.fused == 1 and not calls
    assert_accurate(found[0], expected, expected.double(), "log-probabilities")
    assert_accurate(gradient, exact, exact.double(), "gradient")


def test_other_models_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sft(tmp_path / "a", apply_cce(tiny_llama()), []))
    assert hasattr(trl.trainer.utils._ChunkedLogProbFunction.apply, marking.STATE)
    seen: list[int] = []
    monkeypatch.setattr(trl_patch, "linear_log_probs", lambda *args, **kwargs: seen.append(1))
    assert run(sft(tmp_path / "b", tiny_llama(), []))[1] == seen == []


def of_another_trl(function: Any) -> Any:
    """Return a TRL-like autograd function whose forward takes different arguments but computes the same."""
    forward = staticmethod(lambda ctx, hidden, weight, something: None)
    return type("Other", (), {"forward": forward, "apply": staticmethod(function.apply)})


def test_interrupted_training_does_not_affect_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sft(tmp_path / "ours", tiny_llama(), [CCECallback()])
    ours.model.model.norm.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))  # torch runs no hook after it
    with pytest.raises(KeyboardInterrupt):
        ours.train()
    monkeypatch.setattr(trl_patch, "linear_log_probs", Mock(side_effect=AssertionError))
    run(sft(tmp_path / "other", tiny_llama(), []))


def test_policy_equals_its_reference_before_the_first_update(tmp_path: Path) -> None:
    for name, logged in {"dpo": "rewards/margins", "grpo": "kl"}.items():
        model = tiny_llama()
        model.save_pretrained(tmp_path / "model")  # the reference model is loaded from here
        model = type(model).from_pretrained(tmp_path / "model")
        log, _ = run(TRAINERS[name](tmp_path / name, model, [CCECallback(memory_budget="1MiB")]))
        assert log[0][logged] == 0 != log[1][logged]


@pytest.mark.parametrize("on_unused", [None, "warn", "raise"])
def test_unknown_trl_function_is_unchanged_and_named_once(
    on_unused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = of_another_trl(trl.trainer.utils._ChunkedLogProbFunction)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", other)
    callbacks = [] if on_unused is None else [CCECallback(on_unused=on_unused)]
    trainer = sft(tmp_path, apply_cce(tiny_llama()), callbacks)
    reason = "TRL replaces the model's forward with its own fused LM head"
    if on_unused == "raise":
        with pytest.raises(RuntimeError, match=reason):
            run(trainer)
        return
    for expected in (1, 0 if on_unused is None else 1):  # the callback reports once per run
        _, messages = run(trainer)
        assert len(messages) == expected and all(reason in message for message in messages)
    assert stats(trainer.model).bypassed > 0 == stats(trainer.model).fused
    assert trl.trainer.utils._ChunkedLogProbFunction is other


def test_offloaded_head_error_says_what_to_offload(tmp_path: Path) -> None:
    model = apply_cce(tiny_llama(tie_word_embeddings=False))
    trainer = sft(tmp_path, model, [])
    weights = {"weight": model.lm_head.weight.detach().clone()}
    model.lm_head.requires_grad_(False)
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu", offload=True, weights_map=weights))
    model.train()
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens may be offloaded"):
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["orpo", "tpo"])
def test_preference_trainers_without_callback(
    name: str, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation has plain logits. TRL's functions written in PyTorch operations are recognized too."""
    if not kernel:
        monkeypatch.setattr(trl.trainer.utils, "_supports_trl_loss_kernel", lambda *args: False)
    model = apply_cce(tiny_llama())
    trainer = PREFERENCE[name](tmp_path, model, [])
    with logits_made(tokens=34) as seen:
        _, messages = run(trainer)
    assert messages == seen == []
    counted = copy.copy(stats(model))
    assert counted.fused == counted.calls > 0 and counted.materialized == 0
    assert math.isfinite(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert stats(model) == counted


def test_unknown_trl_loss_functions_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(logits: Any, something: Any) -> bool:
        return False

    kernel = trl.trainer.utils._fused_logprob_entropy
    monkeypatch.setattr(trl.trainer.utils, "_supports_trl_loss_kernel", other)
    preference.install()
    assert trl.trainer.utils._supports_trl_loss_kernel is other and trl.trainer.utils._fused_logprob_entropy is kernel


@pytest.mark.parametrize("how", ["plain", "mask", "temperature", "negative"])
def test_trl_functions_on_deferred_logits(how: str) -> None:
    """Log-probabilities and entropy take one pass; operations without a closed form get full logits."""
    preference.install()
    generator = torch.Generator().manual_seed(0)
    used = [torch.randn(2, 9, 16, generator=generator), torch.randn(99, 16, generator=generator)]
    index = torch.randint(99, (2, 9), generator=generator)
    options = {"row_mask": index % 3} if how == "mask" else {"temperature": 0.7} if how == "temperature" else {}

    def answer(dtype: torch.dtype, deferred: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in used]
        logits = lazy_logits(*leaves, call=call) if deferred else torch.nn.functional.linear(*leaves)
        if how == "negative":
            logits = logits * -1.0
        utils = trl.trainer.utils
        found = [*utils.selective_log_softmax_and_entropy(logits, index, **options), utils.entropy_from_logits(logits)]
        found.append(utils.selective_log_softmax(logits, index, **options))
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    call = trl_patch.TrainingCall(labels=False)
    exact, twin, ours = answer(torch.float64, False), answer(torch.float32, False), answer(torch.float32, True)
    assert_all_accurate(ours, twin, exact)
    assert bool(call.stats.materialized) == (how == "negative")


@pytest.mark.parametrize("name", [pytest.param("sft", marks=pytest.mark.slow), "orpo"])
def test_torch_compile_is_named_as_cause(name: str, tmp_path: Path) -> None:
    trainer = {"sft": sft, **PREFERENCE}[name](
        tmp_path, tiny_llama(), [CCECallback()], torch_compile=True, torch_compile_backend="eager", max_steps=1
    )
    _, messages = run(trainer)
    reason = "TRL's own fused LM head" if name == "sft" else "calls the model without labels"
    assert len(messages) == 1 and "training step 1 did not use the fused loss" in messages[0]
    assert reason in messages[0] and "train without torch_compile" in messages[0]


@pytest.mark.parametrize("name", ["orpo", "cpo", "tpo"])
def test_preference_trainers_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Under autocast, values logged before the first update are no further from float32 than without hf_cce."""
    found = {}
    for how, precise in (("exact", True), ("twin", False), ("ours", False)):
        transformers.set_seed(0)
        callbacks = [CCECallback(on_unused="raise")] if how == "ours" else []
        trainer = PREFERENCE[name](tmp_path / how, tiny_llama(), callbacks, bf16=not precise)
        (first, *_), messages = run(trainer)
        kept = [key for key in first if "log" in key or "loss" in key or "rewards/" in key]
        found[how] = torch.tensor([first[key] for key in kept if "accuracies" not in key])
        assert messages == []
    assert len(found["ours"]) > 5
    assert_accurate(found["ours"], found["twin"], found["exact"], name, torch.bfloat16)
