"""PEFT's tuners that call the model past its hooks by themselves, in every PEFT: AdaLoRA and LLaMA-Adapter's prompts.

And its mixed model, which cannot be asked for the model inside, and X-LoRA, which calls that model twice.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    FAMILIES,
    anatomy,
    assert_fused,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
    stats,
    tiny_llama,
    with_open_gates,
)
from numerics import assert_as_good

from hf_cce import apply_cce, remove_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")

CONFIGS: dict[str, Callable[..., Any]] = {
    "adalora": lambda **options: peft.AdaLoraConfig(
        **{"task_type": "CAUSAL_LM", "init_r": 4, "target_r": 2, "target_modules": ["q_proj", "v_proj"]}
        | {"total_step": 10, "tinit": 1, "tfinal": 2, "init_lora_weights": False, **options}
    ),
    "adaption": lambda **options: peft.AdaptionPromptConfig(
        **{"task_type": "CAUSAL_LM", "adapter_len": 3, "adapter_layers": 1, **options}
    ),
}
TUNERS = pytest.mark.parametrize("tuner", CONFIGS)


def adapted(tuner: str, model: Any = None, **options: Any) -> Any:
    """A PeftModel whose adapter does something, and the same one each time."""
    model = tiny_llama() if model is None else model
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, CONFIGS[tuner](**options))
    return with_open_gates(wrapped).train()


@TUNERS
@pytest.mark.parametrize("first", ["peft", "cce", "cce on the model inside"])
def test_loss_and_gradients(tuner: str, first: str) -> None:
    inputs, plain = batch(rows=4), adapted(tuner)
    patched = adapted(tuner, apply_cce(tiny_llama()) if first == "cce" else None)
    if first != "cce":
        apply_cce(patched if first == "peft" else patched.get_base_model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_training(patched, plain, inputs)
        assert [str(w.message) for w in caught if "hf_cce" in str(w.message)] == []
    assert_fused(patched, calls=1)
    with logits_made(4 * 23, patched) as seen:
        patched(**inputs).loss.backward()
    assert seen == []
    assert type(patched(**inputs)) is type(plain(**inputs))
    assert_fused(patched, calls=3)


@TUNERS
@pytest.mark.parametrize("form", ["tuple", "words by position", "no task", "the tuner itself", "its forward"])
def test_ways_to_call(tuner: str, form: str) -> None:
    """A tuple gets no penalty from AdaLoRA, patched or not."""
    if (tuner, form) == ("adalora", "its forward"):
        pytest.skip("only one binds it")
    options = {"task_type": None} if form == "no task" else {}
    plain, patched = adapted(tuner, **options), apply_cce(adapted(tuner, **options))
    inputs, losses = batch(rows=4), []
    for model in (plain, patched):
        if form == "tuple":
            losses.append(model(**inputs, return_dict=False)[0])
        elif form == "words by position":
            rest = {name: value for name, value in inputs.items() if name != "input_ids"}
            losses.append(model(inputs["input_ids"], **rest).loss)
        elif form == "the tuner itself":
            losses.append(model.base_model(**inputs).loss)
        elif form == "its forward":
            losses.append(model.base_model.forward(**inputs).loss)
        else:
            losses.append(model(**inputs).loss)
    if form == "its forward":  # past the tuner too, as unpatched: the model's own loss, and nothing in between
        assert torch.equal(*losses) and stats(patched).calls == 0
        return
    assert_as_good(losses[1].detach(), losses[0].detach(), losses[0].detach().double(), form)
    assert_fused(patched, calls=1)


def test_the_penalty_of_adalora_is_in_loss_and_gradients() -> None:
    """It is added to our loss in place; alone it moves A and B only."""
    patched, inputs = apply_cce(adapted("adalora", orth_reg_weight=0.7)), batch(rows=4)
    without = apply_cce(adapted("adalora", orth_reg_weight=1e-9))  # PEFT 0.18 takes no 0
    assert_same_training(patched, adapted("adalora", orth_reg_weight=0.7), inputs)
    assert_fused(patched, calls=1)
    assert float(patched(**inputs).loss.detach() - without(**inputs).loss.detach()) > 0.1
    loss = patched(**inputs).loss
    loss *= 2  # in place again, as an accumulating loop may
    patched.zero_grad()
    loss.backward()
    plain = adapted("adalora", orth_reg_weight=0.7)
    (2 * plain(**inputs).loss).backward()
    for (name, actual), (_, expected) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        if expected.grad is not None:
            assert actual.grad is not None
            assert_as_good(actual.grad, expected.grad, expected.grad.double(), name)


def test_adalora_shares_its_budget_out_as_it_trains() -> None:
    """Ranks are cut by sensitivities, which come from the gradients: those that stay are the same."""
    plain, patched = adapted("adalora", deltaT=1), apply_cce(adapted("adalora", deltaT=1))
    for model in (plain, patched):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for step in range(9):
            model(**batch(rows=4, seed=step)).loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
    patterns = [model.peft_config["default"].rank_pattern for model in (plain, patched)]
    assert patterns[0] == patterns[1] and sum(map(sum, patterns[0].values())) == 4  # two matrices of target rank 2
    assert_fused(patched, calls=9)


@TUNERS
def test_evaluation_and_generation_stay_what_they_were(tuner: str) -> None:
    plain, patched = adapted(tuner).eval(), apply_cce(adapted(tuner)).eval()
    inputs = batch(rows=4, ignored=False)
    with torch.no_grad():
        expected, actual = plain(**inputs), patched(**inputs)
    assert torch.equal(actual.logits, expected.logits)
    assert_as_good(actual.loss, expected.loss, expected.loss.double(), "loss")
    for use_cache in (True, False):
        tokens = [
            model.generate(input_ids=inputs["input_ids"], max_new_tokens=5, do_sample=False, use_cache=use_cache)
            for model in (plain, patched)
        ]
        assert torch.equal(*tokens) and tokens[0].shape[1] > inputs["input_ids"].shape[1]
    without = {"input_ids": inputs["input_ids"]}
    assert torch.equal(patched.train()(**without).logits.materialize(), plain.train()(**without).logits)
    assert stats(patched).calls == stats(patched).materialized == 1


@TUNERS
def test_removed_again(tuner: str) -> None:
    plain, model = adapted(tuner), adapted(tuner)
    before = anatomy(model)
    apply_cce(model)
    model(**batch()).loss.backward()
    assert_fused(model, calls=1)
    remove_cce(model)
    assert patch_of(causal_lm(model)) is None and anatomy(model) == before
    model.zero_grad(), plain.zero_grad()
    outputs, expected = model(**batch()), plain(**batch())
    assert type(outputs.logits) is torch.Tensor and torch.equal(outputs.loss, expected.loss)


@TUNERS
def test_an_unpatched_model_beside_it_is_called_as_it_was(tuner: str) -> None:
    plain, _ = adapted(tuner), apply_cce(adapted(tuner))
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    assert type(plain(**batch()).logits) is torch.Tensor and hooked == []


@TUNERS
def test_a_forward_that_raises_leaves_nothing(tuner: str) -> None:
    patched = apply_cce(adapted(tuner))
    before = anatomy(patched)

    def raising(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = patched.get_base_model().model.norm.register_forward_hook(raising)
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    handle.remove()
    assert anatomy(patched) == before
    patched(**batch()).loss.backward()
    assert_fused(patched, calls=1)


@TUNERS
def test_several_adapters(tuner: str) -> None:
    """AdaLoRA trains one and keeps the others; the prompts are swapped in and out of the model."""

    def build() -> Any:
        model = adapted(tuner)
        torch.manual_seed(4)
        options = {"inference_mode": True} if tuner == "adalora" else {}
        model.add_adapter("other", CONFIGS[tuner](**options))
        if tuner == "adalora":
            model.base_model.set_adapter(["default", "other"])
        return with_open_gates(model).train()

    plain, patched = build(), apply_cce(build())
    assert_same_training(patched, plain, batch(rows=4))
    if tuner == "adaption":
        for model in (plain, patched):
            model.set_adapter("other")
            with_open_gates(model)
            model.requires_grad_(True)
        assert_same_training(patched, plain, batch(rows=4))
    calls = stats(patched).calls
    assert_fused(patched, calls=1 if tuner == "adalora" else 2)
    with patched.disable_adapter(), plain.disable_adapter():
        patched.requires_grad_(True), plain.requires_grad_(True)
        assert_same_training(patched, plain, batch(rows=4))
    assert_fused(patched, calls=calls + 1)


@TUNERS
def test_a_copy_trains_itself(tuner: str) -> None:
    patched = apply_cce(adapted(tuner))
    other = copy.deepcopy(patched)
    with torch.no_grad():
        causal_lm(patched).get_output_embeddings().weight.zero_()
    assert_same_training(other, adapted(tuner), batch(rows=4))
    assert all(parameter.grad is None for parameter in patched.parameters())
    assert stats(patched).calls == 0 and stats(other).calls == 1


@TUNERS
@pytest.mark.parametrize("replaced", ["before", "after"])
def test_a_forward_that_somebody_has_replaced(tuner: str, replaced: str) -> None:
    """As accelerate does where it dispatches, with the forward that was there kept inside."""
    called: list[str] = []

    def wrap(module: Any) -> None:
        kept = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            called.append("wrapper")
            return kept(*args, **kwargs)

        module.forward = forward

    model = adapted(tuner)
    if replaced == "before":
        wrap(model.base_model)
    apply_cce(model)
    if replaced == "after":
        wrap(model.base_model)
    model(**batch()).loss.backward()
    assert called == ["wrapper"]
    assert_fused(model, calls=1)


@TUNERS
@pytest.mark.parametrize("what", ["model", "tuner"])
def test_compiled(tuner: str, what: str) -> None:
    """The whole in a graph, as torch.compile does it; or a tuner by itself, whose ``__call__``, and our hooks, stay outside."""
    torch._dynamo.reset()
    patched, plain, inputs = apply_cce(adapted(tuner)), adapted(tuner), batch(rows=4)
    (patched if what == "model" else patched.base_model).compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_training(patched, plain, inputs)
    told = [str(w.message) for w in caught if "hf_cce" in str(w.message)]
    assert stats(patched).traced or stats(patched).fused == 1
    assert told == [] and stats(patched).missed == stats(patched).materialized == 0
    torch._dynamo.reset()


def test_mended_once() -> None:
    apply_cce(tiny_llama())
    classes = [type(adapted(tuner).base_model) for tuner in CONFIGS]
    calls = [cls.__call__ for cls in classes]
    apply_cce(tiny_llama())
    assert [cls.__call__ for cls in classes] == calls


@pytest.mark.parametrize("how", ["model", "tuner"])
def test_the_model_inside_a_mixed_model_or_a_bare_tuner_is_found(how: str) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)

    def build() -> Any:
        torch.manual_seed(3)
        if how == "tuner":
            return peft.LoraModel(FAMILIES["llama"].build(), config, "default").train()
        model = peft.get_peft_model(FAMILIES["llama"].build(), config, mixed=True)
        model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False))
        model.set_adapter(["default", "other"])
        return model.train()

    patched = apply_cce(build())
    assert_same_training(patched, build(), batch(rows=4))
    assert_fused(patched, calls=1)
    remove_cce(patched)
    assert type(patched(**batch()).logits) is torch.Tensor


def test_x_lora(tmp_path: Path) -> None:
    """Its scaling pass calls the model's forward without gradients within the call that trains; that one is ours."""
    for number in range(2):
        torch.manual_seed(number)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
        adapter = peft.get_peft_model(tiny_llama(), config)
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapter.save_pretrained(tmp_path / str(number))

    def build() -> Any:
        model = tiny_llama(use_cache=False)
        torch.manual_seed(3)
        adapters = {str(number): str(tmp_path / str(number)) for number in range(2)}
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=32, adapters=adapters, xlora_dropout_p=0.0, use_trainable_adapters=True
        )
        return peft.get_peft_model(model, config).train()

    patched, plain = apply_cce(build()), build()
    twin, reference = loss_and_grads(plain, batch()), loss_and_grads(exact(build()), batch(), double=True)
    for name, value in loss_and_grads(patched, batch()).items():
        if "classifier" not in name:  # one layer deep its gradient is zero but for rounding
            assert_as_good(value, twin[name], reference[name], name)
    assert_fused(patched, calls=1)
