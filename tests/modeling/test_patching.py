"""The patch itself: what it survives, what it leaves behind, whom it refuses, and which way the loss went."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from models import (
    FAMILIES,
    VOCABULARY,
    anatomy,
    assert_fused,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
    stats,
    tiny_llama,
)
from numerics import assert_as_good
from torch import nn

import hf_cce
from hf_cce import CCEConfig, apply_cce, remove_cce, supported_models
from hf_cce.deferred.logits import LazyLogits
from hf_cce.head_checks import output_embeddings, why_not_read
from hf_cce.patches.causal_lm import patch_of
from hf_cce.patches.refused import REFUSED

MIB = 1 << 20


# One line, and back
def test_importing_loads_no_engine() -> None:
    code = "import hf_cce, sys; assert not {'triton', 'trl', 'transformers', 'peft'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_public_names() -> None:
    assert len(hf_cce.__all__) <= 12 and set(hf_cce.__all__) <= set(dir(hf_cce))
    assert all(callable(getattr(hf_cce, name)) for name in hf_cce.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        hf_cce.nothing_here  # noqa: B018


def test_returns_the_model_and_keeps_its_face() -> None:
    model = tiny_llama()
    signature, forward = inspect.signature(model.forward), model.forward
    assert apply_cce(model) is model
    assert inspect.signature(model.forward) == signature and model.forward == forward
    assert type(model).__name__ == "LlamaForCausalLM"
    assert remove_cce(model) is model and not hasattr(model, "cce_stats")
    assert remove_cce(model) is model  # a second time there is nothing to do


def test_a_second_call_changes_the_options_only() -> None:
    model = apply_cce(tiny_llama(), memory_budget=2 * MIB)
    once = anatomy(model)
    apply_cce(model, CCEConfig(memory_budget=4 * MIB), implementation="portable")
    assert anatomy(model) == once
    assert patch_of(model).config == CCEConfig(memory_budget=4 * MIB, implementation="portable")
    loss_and_grads(model, batch())
    assert_fused(model, calls=1)


def test_the_options_reach_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models with different options stay apart."""
    seen = []
    from hf_cce.deferred import answers

    real = answers.linear_cross_entropy
    monkeypatch.setattr(answers, "linear_cross_entropy", lambda *a, **k: seen.append(k["config"]) or real(*a, **k))
    first, second = apply_cce(tiny_llama(), memory_budget=2 * MIB), apply_cce(tiny_llama(), memory_budget=3 * MIB)
    for model in (first, second, first):
        loss_and_grads(model, batch())
    assert [config.memory_budget // MIB for config in seen] == [2, 3, 2]


def test_outputs_of_a_training_call() -> None:
    model = apply_cce(tiny_llama())
    inputs = batch()
    output = model(**inputs)
    assert type(output) is transformers.modeling_outputs.CausalLMOutputWithPast
    assert (
        isinstance(output.logits, LazyLogits)
        and isinstance(output.logits, torch.Tensor)
        and output.logits.shape == (*inputs["input_ids"].shape, VOCABULARY)
    )
    remove_cce(model)
    assert torch.equal(output.logits.argmax(-1), model(**inputs).logits.argmax(-1))
    apply_cce(model)
    loss, logits = model(**inputs, return_dict=False)[:2]
    assert loss.requires_grad and isinstance(logits, LazyLogits)


def test_moe_outputs_keep_their_class() -> None:
    output = apply_cce(FAMILIES["mixtral"].build())(**batch())
    assert type(output) is transformers.modeling_outputs.MoeCausalLMOutputWithPast and output.aux_loss is not None


def test_labels_by_position() -> None:
    model = apply_cce(tiny_llama())
    names = list(inspect.signature(model.forward).parameters)
    inputs = batch()
    position = names.index("labels")
    arguments = [inputs.get(name) for name in names[: position + 1]]
    with logits_made() as seen:
        loss = model(*arguments).loss
    assert seen == [] and torch.equal(loss, model(**inputs).loss)


# What it survives
@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_trains_its_own_weights(copying: Any) -> None:
    original = apply_cce(tiny_llama())
    loss_and_grads(original, batch())
    clone = copying(original)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(1.5)
    plain = remove_cce(copying(clone))
    assert patch_of(plain) is None and not plain._forward_hooks and not plain._forward_pre_hooks
    before = stats(original).calls
    assert_same_training(clone, plain, batch())
    assert stats(original).calls == before
    remove_cce(clone)
    assert patch_of(original) is not None
    loss_and_grads(original, batch())
    assert stats(original).calls == before + 1


def test_unpickled_hooks_stay_when_others_are_added() -> None:
    """In a fresh process torch numbers hooks from zero again; a new hook must not take our place."""
    code = (
        "import pickle, sys; model = pickle.load(sys.stdin.buffer)\n"
        "for _ in range(500):\n"
        "    model.register_forward_hook(lambda *a: None), model.register_forward_pre_hook(lambda *a: None)\n"
        "import torch; model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long))\n"
        "assert model._hf_cce.stats.fused == 1, model._hf_cce.stats"
    )
    data = pickle.dumps(apply_cce(tiny_llama()))
    subprocess.run([sys.executable, "-c", code], input=data, check=True, cwd=Path(__file__).parents[2])


def test_a_shallow_copy_works() -> None:
    model = apply_cce(tiny_llama())
    clone = copy.copy(model)
    assert torch.equal(clone(**batch()).loss, model(**batch()).loss)
    assert "forward" not in vars(model.lm_head)
    assert_fused(clone)


def test_saving_is_unchanged(tmp_path: Path) -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))
    loss_and_grads(patched, batch())
    for model, name in ((plain, "plain"), (patched, "patched")):
        model.save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    assert patched.state_dict().keys() == plain.state_dict().keys()


def test_an_exception_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_cce(tiny_llama())
    untouched = anatomy(model)
    with pytest.raises(ValueError, match=r"labels|shape|size"):
        model(input_ids=batch()["input_ids"], labels=batch()["labels"][:, :5])
    assert anatomy(model) == untouched
    model.loss_function = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt)  # torch runs no hook after that one
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    del model._loss_function
    model.eval()
    assert isinstance(model(**batch()).logits, torch.Tensor)
    assert anatomy(apply_cce(model)) == untouched


def test_a_call_inside_a_call() -> None:
    """A loss that calls the model again, as self-distillation does, gets real logits, and both end clean."""
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))

    def distil(model: Any) -> torch.Tensor:
        usual = type(model).loss_function.fget(model)

        def loss_function(**kwargs: Any) -> torch.Tensor:
            model.eval()
            teacher = model(input_ids=batch()["input_ids"]).logits
            model.train()
            return usual(**kwargs) + 0.1 * teacher.square().mean()

        model.loss_function = loss_function
        return model(**batch()).loss

    assert_as_good(distil(patched), distil(plain), distil(plain), "loss")
    assert "forward" not in vars(patched.lm_head)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("first", ["around", "inside"])
def test_a_patched_model_inside_a_patched_model(first: str) -> None:
    """BLIP-2 calls its language model, another causal LM with the same head, without labels: the loss is BLIP-2's."""
    name = "Blip2ForConditionalGeneration"
    plain, inputs = tiny.build_or_skip(name), tiny.text(name)
    patched = copy.deepcopy(plain)
    for model in (patched, patched.language_model)[:: 1 if first == "around" else -1]:
        apply_cce(model)
    assert_same_training(patched, plain, inputs)
    with logits_made(model=patched) as made:
        patched(**inputs).loss.backward()
    assert not made
    assert_fused(patched, calls=2)
    assert stats(patched.language_model).calls == 0
    untouched = anatomy(patched)
    interrupting = patched.get_output_embeddings().register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):  # torch runs no hook after that one
        patched(**inputs)
    interrupting.remove()
    inner = patched.language_model(input_ids=inputs["input_ids"])  # no labels: as if it were not patched
    assert isinstance(inner.logits, torch.Tensor)
    assert anatomy(apply_cce(patched)) == untouched


def test_transforms_of_torch_func_get_full_logits(recwarn: pytest.WarningsRecorder) -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        def loss(parameters: Any) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, kwargs=batch()).loss

        return torch.func.grad(loss)(dict(model.named_parameters()))

    expected, found = gradients(plain), gradients(patched)
    for name, value in expected.items():
        assert_as_good(found[name], value, value, name)
    assert stats(patched).missed == 1 and any("torch.func" in str(warning.message) for warning in recwarn)
    assert_same_training(patched, plain, batch())  # and without one nothing is lost
    assert stats(patched).fused


def test_a_patched_model_is_freed_when_nobody_holds_it() -> None:
    """Without a cycle that Python's collector would have to find, which no want of GPU memory makes it look for."""
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


def test_counters_of_a_copy_are_its_own() -> None:
    model = apply_cce(tiny_llama())
    told = model.cce_stats
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    other(**batch())
    assert (model.cce_stats()["calls"], other.cce_stats()["calls"]) == (0, 1)
    remove_cce(model)
    with pytest.raises(RuntimeError, match="not patched any more"):
        told()
    assert other.cce_stats()["fused"] == 1


def test_a_head_that_is_called_by_keyword() -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))

    def training(model: Any, **inputs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model.lm_head(input=model.model(**inputs).last_hidden_state)
        return SimpleNamespace(loss=model.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY))

    for model in (plain, patched):
        model.forward = functools.partial(training, model)
    assert_same_training(patched, plain, batch())
    assert_fused(patched)


def test_without_data_a_patched_model_does_what_it_did() -> None:
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


def test_a_resized_vocabulary() -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))
    loss_and_grads(patched, batch())
    torch.manual_seed(0)
    plain.resize_token_embeddings(VOCABULARY + 6)
    torch.manual_seed(0)
    patched.resize_token_embeddings(VOCABULARY + 6)
    assert_same_training(patched, plain, batch())
    assert_fused(patched, calls=2)


def test_all_labels_ignored_is_a_finite_zero() -> None:
    """Where torch gives NaN and so ends a run: our one deviation from the unpatched model."""
    plain, patched = tiny_llama(), apply_cce(tiny_llama())
    inputs = batch()
    inputs["labels"].fill_(-100)
    assert plain(**inputs).loss.isnan()
    results = loss_and_grads(patched, inputs)
    assert len(results) > 2 and not any(value.any() for value in results.values())


def test_gradient_checkpointing() -> None:
    plain = tiny_llama(num_hidden_layers=2)
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        model.gradient_checkpointing_enable()
    assert_same_training(patched, plain, batch(), reference=exact(tiny_llama(num_hidden_layers=2)))
    assert_fused(patched, calls=1)


def test_accumulated_micro_batches_are_one_full_batch() -> None:
    """Rows of different lengths, one by one, divided by the number of labels of all of them."""
    plain, patched = tiny_llama(), apply_cce(tiny_llama())
    full = batch(rows=4)
    full["labels"][1, -9:] = -100
    count = (full["labels"][:, 1:] != -100).sum()
    expected = loss_and_grads(plain, {**full, "num_items_in_batch": count})
    reference = loss_and_grads(exact(plain), {**full, "num_items_in_batch": count}, double=True)
    patched.zero_grad()
    for row in range(4):
        micro = {name: value[row : row + 1] for name, value in full.items()}
        patched(**micro, num_items_in_batch=count).loss.backward()
    for name, parameter in patched.named_parameters():
        assert_as_good(parameter.grad, expected[name], reference[name], name)


# Heads that keep their own forward
class OddLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


class BenignLinear(nn.Linear):
    """As FSDP2's dynamic classes: another class, the same forward."""


def with_head(kind: Any) -> Any:
    model = tiny_llama()
    model.lm_head.__class__ = kind
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi", "mixtral"])
def test_labels_that_somebody_has_shifted(family: str) -> None:
    """Context and sequence parallelism: ``shift_labels`` of one part of a sequence; they win over ``labels``."""
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    whole = {key: value.repeat(1, 2) for key, value in batch(rows=3).items()}
    part, length = slice(7, 31), whole["labels"].shape[1]
    given = {key: value[:, part].contiguous() for key, value in whole.items()}
    given["shift_labels"] = whole["labels"][:, range(8, 32)].contiguous()
    assert part.stop + 1 < length and (given["shift_labels"][:, -1] != -100).any()
    by_labels = patched(**{key: value for key, value in given.items() if key != "shift_labels"}).loss
    assert not torch.equal(patched(**given).loss, by_labels)
    assert_same_training(patched, plain, given)
    other = {
        **given,
        "labels": given["shift_labels"],
        "num_items_in_batch": torch.tensor(37),
    }  # as DeepSpeed's gives them
    assert_same_training(patched, plain, other)
    assert_fused(patched, calls=4)
    without = {key: value for key, value in given.items() if key != "labels"}
    assert patched(**without).loss is None and plain(**without).loss is None
    assert torch.equal(patched(**without).logits, plain(**without).logits)


def test_a_head_of_another_kind_keeps_its_forward_and_says_so_once() -> None:
    plain, patched = with_head(OddLinear), apply_cce(with_head(OddLinear))
    with pytest.warns(UserWarning, match=r"OddLinear.*no plain torch\.nn\.Linear"):
        first = loss_and_grads(patched, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = loss_and_grads(patched, batch())
    for name, value in loss_and_grads(plain, batch()).items():
        assert torch.equal(first[name], value) and torch.equal(second[name], value)
    assert (stats(patched).missed, stats(patched).materialized, stats(patched).fused) == (2, 2, 0)


def test_a_subclass_with_the_same_forward_defers() -> None:
    model = apply_cce(with_head(BenignLinear))
    loss_and_grads(model, batch())
    assert_fused(model, calls=1)


def test_a_weight_that_an_engine_partitions_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_cce(tiny_llama())
    model.lm_head.weight.ds_id = 7
    linear = torch.nn.functional.linear

    def of_tensors_only(*args: Any) -> torch.Tensor:
        """As the one that DeepSpeed puts there: an autograd function."""
        assert all(x is None or isinstance(x, torch.Tensor) for x in args)
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", of_tensors_only)
    with pytest.warns(UserWarning, match="ZeRO-3"):
        loss = model(**batch()).loss
    monkeypatch.undo()
    del model.lm_head.weight.ds_id
    assert_as_good(loss, model(**batch()).loss, exact(remove_cce(model))(**batch()).loss, "loss")


def test_a_linear_that_somebody_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed ZeRO-3 leaves it behind for every other model of the process."""
    peft, linear = pytest.importorskip("peft"), torch.nn.functional.linear

    def of_tensors_only(*args: Any) -> Any:
        assert all(x is None or isinstance(x, torch.Tensor) for x in args)
        return linear(*args)

    def with_lora() -> Any:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_lora_weights=False)
        torch.manual_seed(3)
        return peft.get_peft_model(tiny_llama(), config)

    expected, exactly = loss_and_grads(with_lora(), batch()), loss_and_grads(exact(with_lora()), batch(), double=True)
    monkeypatch.setattr(torch.nn.functional, "linear", of_tensors_only)
    assert_same_training(patched := apply_cce(tiny_llama()), tiny_llama(), batch())
    assert_fused(patched, calls=1)
    wrapped = apply_cce(with_lora())
    with pytest.warns(UserWarning, match=r"torch\.nn\.functional\.linear was replaced"):
        actual = loss_and_grads(wrapped, batch())
    hooked = apply_cce(tiny_llama())
    hooked.lm_head.forward = functools.partial(nn.Linear.forward, hooked.lm_head)
    with pytest.warns(UserWarning, match=r"torch\.nn\.functional\.linear was replaced"):
        loss_and_grads(hooked, batch())
    for name, value in actual.items():
        assert_as_good(value, expected[name], exactly[name], name)


def test_a_wrapper_that_is_put_on_the_head_between_calls() -> None:
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


def test_the_head_of_a_model_inside_is_taken_where_there_is_one() -> None:
    inner = [tiny_llama(), tiny_llama()]
    outer = nn.Module()
    outer.get_output_embeddings = lambda: None
    outer.first = inner[0]
    assert output_embeddings(outer) is inner[0].lm_head
    outer.second = inner[1]
    assert output_embeddings(outer) is None


@pytest.mark.parametrize("shape", [(0,), (12,), (0, 4), (2, 3, 4)])
def test_a_weight_that_is_no_matrix_is_not_read(shape: tuple[int, ...]) -> None:
    """As FSDP1 leaves it where it has flattened its parameters."""
    assert "has shape" in str(why_not_read(torch.empty(shape))) and why_not_read(torch.empty(3, 4)) is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_offloaded_head(when: str) -> None:
    """accelerate brings its weight for the head's forward alone; what the loss needs of it is held until then."""
    hooks = pytest.importorskip("accelerate.hooks")

    def offloaded(model: Any) -> Any:
        weights = {"weight": model.lm_head.weight.detach().clone()}
        hook = hooks.AlignDevicesHook(execution_device="cpu", offload=True, io_same_device=True, weights_map=weights)
        hooks.add_hook_to_module(model.lm_head, hook)
        return model

    reference = loss_and_grads(exact(tiny_llama()), batch(), double=True)
    plain = loss_and_grads(offloaded(tiny_llama()), batch())
    patched = apply_cce(offloaded(tiny_llama())) if when == "after" else offloaded(apply_cce(tiny_llama()))
    actual = loss_and_grads(patched, batch())
    assert_fused(patched, calls=1)
    assert patched.lm_head.weight.is_meta and actual.keys() == plain.keys() and len(actual) > 3
    for name, value in actual.items():
        assert_as_good(value, plain[name], reference[name], name)


def test_a_loss_that_needs_logits_is_right_and_says_so() -> None:
    plain, patched = tiny_llama(), apply_cce(tiny_llama())
    for model in (plain, patched):
        model.loss_function = lambda logits, labels, **_: logits.softmax(-1).square().mean() + 0.0 * labels.sum()
    with pytest.warns(UserWarning, match="square asked for the logits"):
        actual = loss_and_grads(patched, batch())
    for name, value in loss_and_grads(plain, batch()).items():
        assert torch.equal(actual[name], value)


# Classes and names
@pytest.mark.parametrize("target", [transformers.LlamaForCausalLM, "llama"])
def test_classes_and_names(target: Any, tmp_path: Path) -> None:
    existing = tiny_llama()
    existing.save_pretrained(tmp_path)
    cls = transformers.LlamaForCausalLM
    init, attributes = cls.__init__, sorted(vars(cls))
    try:
        assert apply_cce(target, memory_budget=2 * MIB) is target
        apply_cce(target, memory_budget=3 * MIB)
        assert inspect.signature(cls.__init__) == inspect.signature(init)

        class Mine(cls):
            pass

        made = [
            cls(existing.config),
            cls.from_pretrained(tmp_path),
            transformers.AutoModelForCausalLM.from_config(existing.config),
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
            Mine(existing.config),
        ]
        for model in made:
            loss_and_grads(model.train(), batch())
            assert_fused(model, calls=1)
            assert patch_of(model).config.memory_budget == 3 * MIB
        assert patch_of(existing) is None
    finally:
        assert remove_cce(target) is target
    assert cls.__init__ is init and sorted(vars(cls)) == attributes
    assert patch_of(cls(existing.config)) is None
    remove_cce(made[0])
    assert patch_of(made[0]) is None


def test_a_class_that_inherits_its_init_gets_it_back() -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    apply_cce(Mine)
    assert patch_of(Mine(tiny_llama().config)) is not None and patch_of(tiny_llama()) is None
    remove_cce(Mine)
    assert "__init__" not in vars(Mine) and Mine.__init__ is transformers.LlamaForCausalLM.__init__


def test_a_class_that_somebody_else_has_wrapped_since() -> None:
    class Other(transformers.LlamaForCausalLM):
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


def test_wrappers_are_seen_through() -> None:
    model = tiny_llama()
    assert apply_cce(nn.DataParallel(model)).module is model and patch_of(model) is not None
    remove_cce(nn.DataParallel(model))
    assert patch_of(model) is None


# Whom it refuses
@pytest.mark.parametrize("name", REFUSED)
def test_refused_classes(name: str) -> None:
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    attributes = sorted(vars(cls))
    with pytest.raises(ValueError, match=f"{name} cannot be patched: "):
        apply_cce(cls)
    assert sorted(vars(cls)) == attributes


def test_no_table_is_needed_for_models_without_labels_or_head() -> None:
    headless = transformers.LlamaModel(tiny_llama().config)
    for model, reason in ((headless, "takes no labels"), (nn.Linear(2, 2), "no Transformers model")):
        untouched = anatomy(model)
        with pytest.raises(ValueError, match=reason):
            apply_cce(model)
        assert anatomy(model) == untouched
    classifier = transformers.LlamaForSequenceClassification(tiny_llama().config)
    with pytest.raises(ValueError, match="no LM head"):
        apply_cce(classifier)


def test_a_forward_that_hands_its_keywords_on_takes_the_labels_that_the_next_one_takes() -> None:
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Unlabelled(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any) -> Any:
            return super().forward(input_ids)

    class Deeper(Unlabelled):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = apply_cce(Mine(tiny_llama().config))
    with logits_made(tokens=40) as seen:
        model(**batch()).loss.backward()
    assert seen == [] and patch_of(model).stats.fused == 1
    for cls in (Unlabelled, Deeper):
        with pytest.raises(ValueError, match="takes no labels"):
            apply_cce(cls)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lama", "did you mean 'llama'"),
        ("no-such-thing", "supported_models"),
        (3, "got int"),
        (dict, "got the class dict"),
    ],
)
def test_what_is_no_model(target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_cce(target)


def test_unknown_options_and_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="memory_budget"):
        apply_cce(tiny_llama(), budget=3)
    monkeypatch.setattr("hf_cce.api.version", lambda _: "4.57.1")
    with pytest.raises(RuntimeError, match=r">= 5\.0, and 4\.57\.1"):
        apply_cce(tiny_llama())


def test_supported_models_are_names_that_apply_cce_takes() -> None:
    names = supported_models()
    assert {"llama", "qwen2", "gemma2", "bert", "mixtral"} <= set(names) and names == sorted(names)
    assert not {"musicgen", "musicgen_melody", "prophetnet"} & set(names)
