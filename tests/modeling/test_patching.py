"""The patch: what it survives, what it leaves behind, which models it refuses, and when it does not replace a head's forward."""

import copy
import functools
import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
import transformers
from models import (
    assert_fused,
    assert_same_training,
    batch,
    cce_warnings,
    float64_copy,
    logits_made,
    loss_and_grads,
    module_state,
    stats,
    tiny_llama,
    twins,
    with_lora,
)
from numerics import assert_accurate, assert_all_accurate
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from hf_cce import CCEConfig, apply_cce, dispatch, remove_cce, supported_models
from hf_cce.api import class_names
from hf_cce.config import MIB
from hf_cce.deferred import handlers, head_input, logit_statistics
from hf_cce.deferred.logits import LazyLogits
from hf_cce.dispatch import explain_dispatch
from hf_cce.head_checks import output_embeddings, why_not_read
from hf_cce.patches.causal_lm import patch_of


@pytest.mark.parametrize("form", ["log_softmax", "logsumexp", "distribution"])
def test_log_probabilities_and_entropies_take_one_pass_from_the_second_step_on(form: str, spy: Any) -> None:
    passes, model = spy(logit_statistics, "linear_log_probs"), tiny_llama()
    exact, plain, patched = copy.deepcopy(model).double(), copy.deepcopy(model), apply_cce(model)
    ids = torch.randint(model.config.vocab_size, (2, 9))

    def loss_and_gradients(model: Any, with_entropy: bool) -> list[torch.Tensor]:
        z = model(input_ids=ids).logits[:, :-1]
        distribution = torch.distributions.Categorical(logits=z) if form == "distribution" else None
        if form == "log_softmax":
            log_p = z.log_softmax(-1)
            loss = log_p.gather(-1, ids[:, 1:, None]).mean()
        elif distribution is not None:
            loss = distribution.log_prob(ids[:, 1:]).mean()
        else:
            loss = z.gather(-1, ids[:, 1:, None]).mean() - torch.stack([row.logsumexp(-1) for row in z]).mean()
        if with_entropy and form == "log_softmax":
            loss = loss + 0.1 * (log_p.exp() * log_p).sum(-1).mean()
        elif with_entropy and distribution is not None:
            loss = loss - 0.1 * distribution.entropy().mean()
        elif with_entropy:
            loss = loss - 0.1 * (z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)).mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    found = []
    for with_entropy in (True, True, False, False, True):
        passes.clear()
        results = [loss_and_gradients(each, with_entropy) for each in (patched, plain, exact)]
        assert_all_accurate(*results, f"entropy {with_entropy}")
        found.append([bool(call.options.get("entropy")) for call in passes])
    assert found == [[False, True], [True], [True], [False], [False, True]]


def test_statistics_of_some_tokens_do_not_stand_for_those_of_all() -> None:
    model = apply_cce(tiny_llama())
    ids = torch.randint(model.config.vocab_size, (2, 9))
    logits = model(input_ids=ids).logits
    some = handlers.log_probs_and_entropy(logits, ids, ids > 20)[1]
    log_p = logits.log_softmax(-1)
    entropies, lse = -(log_p.exp() * log_p).sum(-1), logits.logsumexp(-1)
    z = logits.materialize().detach().double()
    exact = torch.distributions.Categorical(logits=z).entropy()
    for actual, best in ((entropies, exact), (lse, z.logsumexp(-1)), (some, exact * (ids > 20))):
        assert_accurate(actual, best.float(), best, "masked first")


def test_returns_model_with_same_class_and_signature() -> None:
    model = tiny_llama()
    signature, forward = inspect.signature(model.forward), model.forward
    assert apply_cce(model) is model
    assert inspect.signature(model.forward) == signature and model.forward == forward
    assert type(model) is LlamaForCausalLM
    assert remove_cce(model) is model and not hasattr(model, "cce_stats")
    assert remove_cce(model) is model  # removing twice is a no-op


def test_second_call_changes_only_options() -> None:
    model = apply_cce(tiny_llama(), memory_budget=2 * MIB)
    once = module_state(model)
    apply_cce(model, CCEConfig(memory_budget=4 * MIB), implementation="portable")
    assert module_state(model) == once
    assert patch_of(model).config == CCEConfig(memory_budget=4 * MIB, implementation="portable")
    loss_and_grads(model, batch())
    assert_fused(model, calls=1)


def test_options_reach_the_loss(spy: Any) -> None:
    losses = spy(handlers, "linear_cross_entropy")
    first, second = apply_cce(tiny_llama(), memory_budget=2 * MIB), apply_cce(tiny_llama(), memory_budget=3 * MIB)
    for model in (first, second, first):
        loss_and_grads(model, batch())
    assert [call.options["config"].memory_budget // MIB for call in losses] == [2, 3, 2]


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", CausalLMOutputWithPast), ("mixtral", MoeCausalLMOutputWithPast)]
)
def test_outputs_of_a_training_call(family: str, kind: Any) -> None:
    plain, patched = twins(family)
    output, expected = patched(**batch()), plain(**batch())
    assert type(output) is kind and output.keys() == expected.keys() and output.logits.shape == expected.logits.shape
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    loss, *others = patched(**batch(), return_dict=False)
    assert loss.requires_grad and any(isinstance(value, LazyLogits) for value in others)


class HandsOn(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, HandsOn])
def test_labels_by_position(kind: Any) -> None:
    """In eager mode a call whose labels are passed by position is one without labels: its loss is fused all the same."""
    plain = kind(tiny_llama().config).train()
    patched = apply_cce(copy.deepcopy(plain))
    given = [batch().get(name) for name in inspect.signature(LlamaForCausalLM.forward).parameters if name != "self"]
    assert given[5] is not None
    with logits_made() as seen:
        patched(*given[:6])
    assert seen == []
    assert_same_training(patched, plain, batch(), loss_of=lambda model, _: model(*given[:6]).loss)
    assert_fused(patched, calls=2)


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copy_has_own_weights_and_counters(copying: Any) -> None:
    original = apply_cce(tiny_llama())
    loss_and_grads(original, batch())
    clone = copying(original)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(1.5)
    plain, get_stats = remove_cce(copying(clone)), clone.cce_stats
    assert patch_of(plain) is None and not plain._forward_hooks and not plain._forward_pre_hooks
    assert_same_training(clone, plain, batch())
    assert (original.cce_stats()["calls"], get_stats()["calls"]) == (1, 2)
    remove_cce(clone)
    with pytest.raises(RuntimeError, match="no longer patched"):
        get_stats()
    loss_and_grads(original, batch())
    assert original.cce_stats()["fused"] == 2


def test_shallow_copy() -> None:
    model = apply_cce(tiny_llama())
    clone = copy.copy(model)
    assert torch.equal(clone(**batch()).loss, model(**batch()).loss)
    assert "forward" not in vars(model.lm_head)
    assert_fused(clone)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_exception_leaves_module_state_unchanged(training: bool) -> None:
    model = apply_cce(tiny_llama()).train(training)
    untouched = module_state(model)
    with pytest.raises(ValueError, match=r"labels|shape|size"):
        model(input_ids=batch()["input_ids"], labels=batch()["labels"][:, :5])
    assert module_state(model) == untouched
    model.loss_function = Mock(side_effect=KeyboardInterrupt)  # torch runs no hook after an interrupt
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    del model._loss_function
    model.eval()
    assert isinstance(model(**batch()).logits, torch.Tensor)
    assert module_state(apply_cce(model)) == untouched


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copy_after_ctrl_c(copied: Any) -> None:
    plain, patched = twins()
    usual = patched.loss_function

    def stops(logits: Any, **_: Any) -> None:
        logits.logsumexp(-1)
        raise KeyboardInterrupt

    patched.loss_function = stops
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    patched.loss_function = usual
    assert_same_training(copied(patched), plain, batch())


@pytest.mark.parametrize("first", ["around", "inside"])
def test_patched_model_inside_patched_model(first: str) -> None:
    """BLIP-2 calls its language model, another causal LM with the same head, without labels; the loss is BLIP-2's."""
    name = "Blip2ForConditionalGeneration"
    plain, inputs = tiny.build_or_skip(name).double(), tiny.text(name)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    patched = copy.deepcopy(plain)
    for model in (patched, patched.language_model)[:: 1 if first == "around" else -1]:
        apply_cce(model)
    assert_same_training(patched, plain, inputs)
    with logits_made(model=patched) as made:
        patched(**inputs).loss.backward()
    assert not made
    assert_fused(patched, calls=2)
    assert stats(patched.language_model).calls == 0
    untouched = module_state(patched)
    interrupting = patched.get_output_embeddings().register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # torch runs no hook after an interrupt
        patched(**inputs)
    interrupting.remove()
    inner = patched.language_model(input_ids=inputs["input_ids"])  # no labels: behaves as if unpatched
    assert isinstance(inner.logits, torch.Tensor)
    assert module_state(apply_cce(patched)) == untouched


def test_torch_func_transforms_get_full_logits() -> None:
    plain, patched = twins()

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        def loss(parameters: Any) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, kwargs=batch()).loss

        return torch.func.grad(loss)(dict(model.named_parameters()))

    with cce_warnings() as messages:
        expected, found = gradients(plain), gradients(patched)
    assert_all_accurate(found, expected, expected)
    assert stats(patched).missed == 1 and "torch.func" in messages[0]
    assert_same_training(patched, plain, batch())  # and without a transform the loss is fused
    assert stats(patched).fused


@pytest.mark.parametrize("training", [True, False])
def test_jit_trace_gets_full_logits(training: bool) -> None:
    plain, patched = (each.train(training) for each in twins())
    ids = batch()["input_ids"]

    class Loss(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def gradient(model: Any) -> torch.Tensor:
        traced = torch.jit.trace(Loss(model), (ids,), check_trace=False)
        return torch.autograd.grad(traced(ids.flip(1)), model.lm_head.weight)[0]  # not those that were traced

    with cce_warnings() as messages:
        assert torch.equal(gradient(patched), gradient(plain))
    assert len(messages) == training and all("torch.jit.trace is active" in each for each in messages)


def test_patched_model_has_no_reference_cycle() -> None:
    """Python's collector does not run when GPU memory is short."""
    model = apply_cce(tiny_llama())
    model(**batch()).loss.backward()
    kept = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_meta_device_gets_full_logits_and_one_warning() -> None:
    model = tiny_llama().to("meta")
    inputs = {name: value.to("meta") for name, value in batch().items() if name != "attention_mask"}
    try:
        model(**inputs)
    except RuntimeError as error:
        pytest.skip(f"transformers {transformers.__version__} cannot do it: {error}")
    apply_cce(model)
    with pytest.warns(UserWarning, match="on the meta device"):
        output = model(**inputs)
    output.loss.backward()
    assert isinstance(output.logits, torch.Tensor) and output.loss.is_meta


def test_all_labels_ignored_gives_zero_loss() -> None:
    """torch would return NaN, which ruins the run. This is the only deviation from the unpatched model."""
    plain, patched = twins()
    inputs = batch()
    inputs["labels"].fill_(-100)
    assert plain(**inputs).loss.isnan()
    results = loss_and_grads(patched, inputs)
    assert len(results) > 2 and not any(value.any() for value in results.values())


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi", "mixtral"])
def test_shift_labels(family: str) -> None:
    """Context and sequence parallelism pass ``shift_labels`` for a part of a sequence; they override ``labels``."""
    plain, patched = twins(family)
    whole = {key: value.repeat(1, 2) for key, value in batch(rows=3).items()}
    part, length = slice(7, 31), whole["labels"].shape[1]
    given = {key: value[:, part].contiguous() for key, value in whole.items()}
    given["shift_labels"] = whole["labels"][:, range(8, 32)].contiguous()
    assert part.stop + 1 < length and (given["shift_labels"][:, -1] != -100).any()
    by_labels = patched(**{key: value for key, value in given.items() if key != "shift_labels"}).loss
    assert not torch.equal(patched(**given).loss, by_labels)
    assert_same_training(patched, plain, given)
    as_deepspeed_gives_them = {"labels": given["shift_labels"], "num_items_in_batch": torch.tensor(37)}
    assert_same_training(patched, plain, {**given, **as_deepspeed_gives_them})
    assert_fused(patched, calls=4)
    without = {key: value for key, value in given.items() if key != "labels"}
    assert patched(**without).loss is None and plain(**without).loss is None
    assert torch.equal(patched(**without).logits, plain(**without).logits)


# Heads that keep their own forward
class OddLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


class BenignLinear(nn.Linear):
    """Another class with the same forward, as FSDP2 creates dynamically."""


@pytest.mark.parametrize("kind", [OddLinear, BenignLinear])
def test_custom_head_gets_full_logits_and_one_warning(kind: Any) -> None:
    plain = tiny_llama()
    plain.lm_head.__class__ = kind
    patched = apply_cce(copy.deepcopy(plain))
    with cce_warnings() as messages:
        for _ in range(2):
            assert_same_training(patched, plain, batch())
    if kind is BenignLinear:
        assert_fused(patched, calls=2)
        assert messages == []
    else:
        assert (stats(patched).missed, stats(patched).materialized, stats(patched).fused) == (2, 2, 0)
        assert len(messages) == 1 and re.search(r"OddLinear.*not a plain torch\.nn\.Linear", messages[0])


def _of_tensors_only(*args: Any, linear: Any = torch.nn.functional.linear) -> Any:
    """Multiply like torch, but accept only tensors, like the autograd function that DeepSpeed installs."""
    assert all(x is None or isinstance(x, torch.Tensor) for x in args)
    return linear(*args)


def test_partitioned_weight_gets_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_cce(tiny_llama())
    model.lm_head.weight.ds_id = 7
    monkeypatch.setattr(torch.nn.functional, "linear", _of_tensors_only)
    with pytest.warns(UserWarning, match="ZeRO-3"):
        loss = model(**batch()).loss
    monkeypatch.undo()
    del model.lm_head.weight.ds_id
    assert_accurate(loss, model(**batch()).loss, float64_copy(remove_cce(model))(**batch()).loss, "loss")


def test_replaced_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed ZeRO-3 replaces torch.nn.functional.linear for every model in the process."""
    pytest.importorskip("peft")
    adapted = [with_lora(tiny_llama(), target_modules=["lm_head"]) for _ in range(2)]
    plain, patched = twins()
    compiled = apply_cce(tiny_llama())
    torch.compile(compiled, backend="eager")(**batch(), use_cache=False)  # its head keeps a forward of ours
    monkeypatch.setattr(torch.nn.functional, "linear", _of_tensors_only)
    for each, calls in ((patched, 1), (compiled, 2)):
        assert_same_training(each, plain, batch())
        assert_fused(each, calls=calls)
    with pytest.warns(UserWarning, match=r"torch\.nn\.functional\.linear was replaced"):
        assert_same_training(apply_cce(adapted[0]), adapted[1], batch())
    hooked = apply_cce(tiny_llama())
    hooked.lm_head.forward = functools.partial(nn.Linear.forward, hooked.lm_head)
    with pytest.warns(UserWarning, match=r"torch\.nn\.functional\.linear was replaced"):
        loss_and_grads(hooked, batch())


def test_head_wrapped_between_calls() -> None:
    plain, patched = tiny_llama(), apply_cce(tiny_llama())
    assert_same_training(patched, plain, batch())
    forward, seen = patched.lm_head.forward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return forward(*args, **kwargs)

    patched.lm_head.forward = wrapper
    assert_same_training(patched, plain, batch())
    assert_fused(patched, calls=2)
    assert len(seen) == 1 and patched.lm_head.forward is wrapper


def test_wrapper_that_was_deleted() -> None:
    """FSDP2 gathers the head in the wrapper that ``apply_cce`` got, or in the model once this wrapper is gone."""
    model = tiny_llama()
    wrapper = apply_cce(torch.compile(model))
    assert model(batch()["input_ids"]).logits.recipe.call.model() is wrapper
    del wrapper
    gc.collect()
    assert model(batch()["input_ids"]).logits.recipe.call.model() is model


def test_head_of_inner_model() -> None:
    inner = [tiny_llama(), tiny_llama()]
    outer = nn.Module()
    outer.get_output_embeddings = lambda: None
    outer.first = inner[0]
    assert output_embeddings(outer) is inner[0].lm_head
    outer.second = inner[1]
    assert output_embeddings(outer) is None


@pytest.mark.parametrize("shape", [(0,), (12,), (0, 4), (2, 3, 4)])
def test_non_matrix_weight_is_not_fused(shape: tuple[int, ...]) -> None:
    """FSDP1 leaves such a weight after flattening its parameters."""
    assert "has shape" in str(why_not_read(torch.empty(shape))) and why_not_read(torch.empty(3, 4)) is None


@pytest.mark.parametrize("target", [LlamaForCausalLM, "llama"])
def test_classes_and_names(target: Any, tmp_path: Path) -> None:
    existing = tiny_llama()
    existing.save_pretrained(tmp_path)
    cls = LlamaForCausalLM
    signature, attributes = inspect.signature(cls.__init__), sorted(vars(cls))
    try:
        assert apply_cce(target, memory_budget=2 * MIB) is target
        apply_cce(target, memory_budget=3 * MIB)
        assert inspect.signature(cls.__init__) == signature

        class Mine(cls):
            pass

        auto = transformers.AutoModelForCausalLM
        made = [cls(existing.config), cls.from_pretrained(tmp_path), Mine(existing.config)]
        made += [auto.from_config(existing.config), auto.from_pretrained(tmp_path)]
        for model in made:
            loss_and_grads(model.train(), batch())
            assert_fused(model, calls=1)
            assert patch_of(model).config.memory_budget == 3 * MIB
        assert patch_of(existing) is None
    finally:
        assert remove_cce(target) is target
    assert inspect.signature(cls.__init__) == signature and sorted(vars(cls)) == attributes
    assert patch_of(cls(existing.config)) is None
    remove_cce(made[0])
    assert patch_of(made[0]) is None


@pytest.mark.parametrize("child_first", [True, False])
@pytest.mark.parametrize("own_init", [True, False])
def test_class_and_subclass(own_init: bool, child_first: bool) -> None:
    """An instance gets the options of the nearest patched class, in whatever order the classes are patched."""

    class Parent(LlamaForCausalLM):
        pass

    class Child(Parent):
        if own_init:

            def __init__(self, config: Any) -> None:
                super().__init__(config)

    def budgets() -> list[int | None]:
        patches = [patch_of(cls(tiny_llama().config)) for cls in (Parent, Child)]
        return [None if each is None else each.config.memory_budget // MIB for each in patches]

    order = [(Parent, 2), (Child, 3)]
    for cls, budget in reversed(order) if child_first else order:
        apply_cce(cls, memory_budget=budget * MIB)
    assert budgets() == [2, 3] and patch_of(tiny_llama()) is None
    remove_cce(Parent)
    assert budgets() == [None, 3]
    apply_cce(Parent, memory_budget=4 * MIB)
    remove_cce(Child)
    assert budgets() == [4, 4]
    remove_cce(Parent)
    assert budgets() == [None, None]


def test_class_wrapped_after_patching() -> None:
    class Other(LlamaForCausalLM):
        pass

    apply_cce(Other)
    ours, made = Other.__init__, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        ours(self, *args, **kwargs)

    Other.__init__ = theirs
    remove_cce(Other)
    model = Other(tiny_llama().config)
    assert made and patch_of(model) is None and Other.__init__ is theirs
    apply_cce(Other)
    assert patch_of(Other(tiny_llama().config)) is not None


def test_wrappers_are_unwrapped() -> None:
    model = tiny_llama()
    assert apply_cce(nn.DataParallel(model)).module is model and patch_of(model) is not None
    remove_cce(nn.DataParallel(model))
    assert patch_of(model) is None


class Unlabelled(LlamaForCausalLM):
    def forward(self, input_ids: Any) -> Any:
        return super().forward(input_ids)


class Deeper(Unlabelled):
    """Passes its keywords on to a forward that takes no labels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (transformers.LlamaModel, "takes no labels"),
        (Unlabelled, "takes no labels"),
        (Deeper, "takes no labels"),
        (transformers.LlamaForSequenceClassification, "no LM head"),
    ],
)
def test_models_without_labels_or_head_are_refused(build: Callable[[Any], Any], reason: str) -> None:
    model = build(tiny_llama().config)
    untouched = module_state(model)
    with pytest.raises(ValueError, match=reason):
        apply_cce(model)
    assert module_state(model) == untouched


def test_class_without_head_warns_once() -> None:
    cls = apply_cce(type("LlamaForSequenceClassification", (transformers.LlamaForSequenceClassification,), {}))
    model = cls(tiny_llama(pad_token_id=0).config).train()
    for messages in (["it has no LM head"], []):
        with cce_warnings() as caught:
            model(input_ids=batch()["input_ids"][:1], labels=torch.tensor([1])).loss.backward()
        assert len(caught) == len(messages) and all(why in text for why, text in zip(messages, caught, strict=True))
    assert stats(model).missed == stats(model).calls == 2


@pytest.mark.parametrize("name", ["musicgen_decoder", "Musicgen", "prophetnets", "gemma4_asistant"])
def test_refused_models_are_not_suggested(name: str) -> None:
    with pytest.raises(ValueError, match="is not a causal LM model type") as caught:
        apply_cce(name)
    refused = set(class_names()) - set(supported_models())
    assert refused and not {f"'{each}'" for each in refused} & set(re.findall(r"'\w+'", str(caught.value))[1:])


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_cce.api.version", lambda _: "4.57.1")
    with pytest.raises(RuntimeError, match=r">= 5\.0, but 4\.57\.1"):
        apply_cce(tiny_llama())


# With few tokens, full logits are faster
def test_few_tokens_call_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_input, "has_few_tokens", lambda *_: True)
    plain, patched = twins()
    with cce_warnings() as messages:
        expected, found = (loss_and_grads(model, batch()) for model in (plain, patched))
        outputs = patched(**batch())
    assert messages == [] and type(outputs.logits) is torch.Tensor
    assert torch.equal(outputs.logits, plain(**batch()).logits)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    counted = stats(patched)
    assert (counted.calls, counted.few_tokens, counted.fused, counted.missed) == (2, 2, 0, 0)
    assert counted.without_fallback == 2


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_head_and_loss_ask_alike_whether_tokens_are_few(autocast: bool, frozen: bool, spy: Any) -> None:
    questions = spy(dispatch, "prefers_full_logits")
    model = apply_cce(tiny_llama())
    model.lm_head.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**batch())
    asked = [(call.args[0].dtype, call.args[1].needs) for call in questions]
    assert asked == [(torch.bfloat16 if autocast else torch.float32, (True, not frozen, False))] * 2


def test_few_tokens_threshold() -> None:
    """42 million logits on a GPU, if the budget holds 12 bytes for each, minus the part that the weight's gradient provides."""

    def few(n: int, d: int = 896, v: int = 151_936, device: str = "cuda", frozen: bool = False, **options: Any) -> bool:
        config = CCEConfig(**{"memory_budget": 256 << 20, **options})
        return explain_dispatch(n, d, v, torch.bfloat16, device, config, frozen).strategy == "full_logits"

    assert few(1) and few(276) and not few(277) and not few(0)
    assert not few(276, memory_budget=64 << 20) and few(100, memory_budget=64 << 20)
    assert not few(276, implementation="triton") and not few(276, device="cpu")
    assert not few(276, frozen=True) and few(147, frozen=True) and not few(148, frozen=True)
    assert few(414, 768, 50_257) and not few(415, 768, 50_257)  # an odd vocabulary multiplies slowly
    assert few(573, 768, 50_258) and not few(574, 768, 50_258)  # limited by the budget
