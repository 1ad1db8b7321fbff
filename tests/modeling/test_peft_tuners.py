"""PEFT's tuners that call the model past its hooks by themselves, in every PEFT: AdaLoRA and LLaMA-Adapter's prompts.

And its mixed model, which cannot be asked for the model inside, and X-LoRA, which calls that model twice. Their losses and
gradients over some steps are in test_peft.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    anatomy,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    exact,
    loss_and_grads,
    own_loss,
    stats,
    tiny_llama,
    told,
    with_open_gates,
)
from numerics import assert_as_good
from test_peft import TUNERS as ROWS

from hf_cce import apply_cce, remove_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")
TUNERS = pytest.mark.parametrize("tuner", ROWS)


def config(tuner: str, **options: Any) -> Any:
    found = ROWS[tuner].config()
    vars(found).update(options)
    return found


def adapted(tuner: str, **options: Any) -> Any:
    """A PeftModel whose adapter does something, and the same one each time."""
    torch.manual_seed(3)
    return with_open_gates(peft.get_peft_model(tiny_llama(), config(tuner, **options))).train()


def twins(tuner: str, **options: Any) -> tuple[Any, Any]:
    return adapted(tuner, **options), apply_cce(adapted(tuner, **options))


def by_position(model: Any, inputs: Any) -> torch.Tensor:
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return model(inputs["input_ids"], **rest).loss


# How to call it; a tuple gets no penalty from AdaLoRA, patched or not.
FORMS = {
    "tuple": lambda model, inputs: model(**inputs, return_dict=False)[0],
    "words by position": by_position,
    "no task": own_loss,
    "the tuner itself": lambda model, inputs: own_loss(model.base_model, inputs),
}


@TUNERS
@pytest.mark.parametrize("form", FORMS)
def test_ways_to_call(tuner: str, form: str) -> None:
    plain, patched = twins(tuner, **({"task_type": None} if form == "no task" else {}))
    assert_same_training(patched, plain, batch(rows=4), loss_of=FORMS[form])
    assert_fused(patched, calls=1)


def test_the_forward_of_the_prompts_tuner_is_the_models() -> None:
    """Past the tuner, as unpatched: the model's own loss, and nothing in between."""
    plain, patched = twins("adaption")
    assert torch.equal(*(model.base_model.forward(**batch(rows=4)).loss for model in (plain, patched)))
    assert stats(patched).calls == 0


def test_the_penalty_of_adalora_is_in_loss_and_gradients() -> None:
    """It is added to our loss in place, and so may others be, as in an accumulating loop; alone it moves A and B only."""
    inputs, (plain, patched) = batch(rows=4), twins("adalora", orth_reg_weight=0.7)
    _, without = twins("adalora", orth_reg_weight=1e-9)  # PEFT 0.18 takes no 0

    def doubled(model: Any, inputs: Any) -> torch.Tensor:
        loss = own_loss(model, inputs)
        loss *= 2
        return loss

    assert_same_training(patched, plain, inputs, loss_of=doubled)
    assert_fused(patched, calls=1)
    assert float(patched(**inputs).loss.detach() - without(**inputs).loss.detach()) > 0.1


def test_adalora_shares_its_budget_out_as_it_trains() -> None:
    """Ranks are cut by sensitivities, which come from the gradients: those that stay are the same."""
    plain, patched = twins("adalora", deltaT=1)
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
    plain, patched = (model.eval() for model in twins(tuner))
    inputs = batch(rows=4, ignored=False)
    with torch.no_grad():
        expected, actual = plain(**inputs), patched(**inputs)
    assert torch.equal(actual.logits, expected.logits)
    assert_as_good(actual.loss, expected.loss, expected.loss.double(), "loss")
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
        tokens = [model.generate(input_ids=inputs["input_ids"], **options) for model in (plain, patched)]
        assert torch.equal(*tokens) and tokens[0].shape[1] > inputs["input_ids"].shape[1]
    without = {"input_ids": inputs["input_ids"]}
    assert torch.equal(patched.train()(**without).logits.materialize(), plain.train()(**without).logits)
    assert stats(patched).calls == stats(patched).materialized == 1


@TUNERS
def test_unpatched_models_are_called_as_they_were(tuner: str) -> None:
    """One beside a patched model, and one that was patched."""
    plain, model = adapted(tuner), adapted(tuner)
    before = anatomy(model)
    apply_cce(model)
    model(**batch()).loss.backward()
    assert_fused(model, calls=1)
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    expected = plain(**batch())
    assert type(expected.logits) is torch.Tensor and hooked == []
    remove_cce(model)
    assert patch_of(causal_lm(model)) is None and anatomy(model) == before
    outputs = model(**batch())
    assert type(outputs.logits) is torch.Tensor and torch.equal(outputs.loss, expected.loss)


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
        model.add_adapter("other", config(tuner, **({"inference_mode": True} if tuner == "adalora" else {})))
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
    model, called = adapted(tuner), []
    if replaced == "after":
        apply_cce(model)
    kept = model.base_model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append("wrapper")
        return kept(*args, **kwargs)

    model.base_model.forward = forward
    if replaced == "before":
        apply_cce(model)
    model(**batch()).loss.backward()
    assert called == ["wrapper"]
    assert_fused(model, calls=1)


@TUNERS
@pytest.mark.parametrize("what", ["model", "tuner"])
def test_compiled(tuner: str, what: str) -> None:
    """The whole in a graph, as torch.compile does it; or a tuner by itself, whose ``__call__``, and our hooks, stay outside."""
    torch._dynamo.reset()
    plain, patched = twins(tuner)
    (patched if what == "model" else patched.base_model).compile(backend="aot_eager")
    with told() as messages:
        assert_same_training(patched, plain, batch(rows=4))
    assert stats(patched).traced or stats(patched).fused == 1
    assert messages == [] and stats(patched).missed == stats(patched).materialized == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["model", "tuner"])
def test_the_model_inside_a_mixed_model_or_a_bare_tuner_is_found(how: str) -> None:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)

    def build() -> Any:
        torch.manual_seed(3)
        if how == "tuner":
            return peft.LoraModel(tiny_llama(), lora, "default").train()
        model = peft.get_peft_model(tiny_llama(), lora, mixed=True)
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
    adapters = {str(number): str(tmp_path / str(number)) for number in range(2)}
    for number, folder in adapters.items():
        torch.manual_seed(int(number))
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
        adapter = peft.get_peft_model(tiny_llama(), lora)
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapter.save_pretrained(folder)

    def build() -> Any:
        model = tiny_llama(use_cache=False)
        torch.manual_seed(3)
        options = {"hidden_size": 32, "xlora_dropout_p": 0.0, "use_trainable_adapters": True, "adapters": adapters}
        return peft.get_peft_model(model, peft.XLoraConfig(task_type="CAUSAL_LM", **options)).train()

    patched = apply_cce(build())
    actual, twin = loss_and_grads(patched, batch()), loss_and_grads(build(), batch())
    reference = loss_and_grads(exact(build()), batch(), double=True)
    assert actual.keys() == twin.keys()
    for name in [
        name for name in actual if "classifier" in name
    ]:  # one layer deep its gradient is zero but for rounding
        del actual[name]
    assert_results_as_good(actual, twin, reference)
    assert_fused(patched, calls=1)
