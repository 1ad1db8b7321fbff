"""What a user is told: whatever keeps a model from training without logits is named once, and never passes in silence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import batch, stats, tiny_llama
from numerics import assert_as_good
from torch import Tensor, nn

from hf_cce import CCEConfig, apply_cce, remove_cce, supported_models
from hf_cce.api import class_names
from hf_cce.deferred import head_input
from hf_cce.deferred.logits import lazy_logits
from hf_cce.dispatch import explain_dispatch


@contextmanager
def told() -> Iterator[list[str]]:
    """Our warnings, each as often as it was given."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if "hf_cce" in str(w.message)]


# Hooks on the gradient of the logits
def by_module(model: Any, seen: list[Tensor]) -> None:
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))


def by_module_before(model: Any, seen: list[Tensor]) -> None:
    model.lm_head.register_full_backward_pre_hook(lambda module, outputs: seen.append(outputs[0]))


def by_tensor(model: Any, seen: list[Tensor]) -> None:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        output.register_hook(seen.append)

    model.lm_head.register_forward_hook(hook)


HOOKS = [by_module, by_module_before, by_tensor]


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_on_the_head_sees_the_gradient_of_the_logits(register: Callable[[Any, list[Tensor]], None]) -> None:
    models = tiny_llama(), apply_cce(tiny_llama())
    gradients: list[list[Tensor]] = [[], []]
    for model, seen in zip(models, gradients, strict=True):
        register(model, seen)
    models[0](**batch()).loss.backward()
    with told() as messages:
        for _ in range(2):
            models[1](**batch()).loss.backward()
    assert len(gradients[0]) == 1 and len(gradients[1]) == 2
    assert messages == [] and stats(models[1]).fused == 2 and stats(models[1]).materialized == 0
    for seen in gradients[1]:
        with told() as read:
            assert_as_good(seen, gradients[0][0], gradients[0][0], "gradient of the logits")
        assert seen is not gradients[1][0] or "of their gradient)" in read[0]


def test_a_hook_on_every_module_is_one_on_the_head() -> None:
    model, seen = apply_cce(tiny_llama()), []

    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        if module is model.lm_head:
            seen.append(outputs[0].shape)

    handle = nn.modules.module.register_module_full_backward_hook(hook)
    try:
        outputs = model(**batch())
        outputs.loss.backward()
    finally:
        handle.remove()
    assert seen == [outputs.logits.shape] and stats(model).fused == 1 and stats(model).materialized == 0


@pytest.mark.parametrize("after", [False, True], ids=["in the head", "of outputs.logits"])
def test_retain_grad_keeps_the_gradient(after: bool) -> None:
    kept: list[list[Any]] = [[], []]
    for model, seen in zip((tiny_llama(), apply_cce(tiny_llama())), kept, strict=True):
        retain = lambda output, seen=seen: (output.retain_grad(), seen.append(output))[0]  # noqa: E731
        if not after:
            model.lm_head.register_forward_hook(lambda module, inputs, output, retain=retain: retain(output))
        outputs = model(**batch())
        if after:
            retain(outputs.logits)
        outputs.loss.backward()
    assert kept[1][0].grad.shape == kept[0][0].grad.shape
    assert_as_good(kept[1][0].grad * 1.0, kept[0][0].grad, kept[0][0].grad, "kept") and kept[1][0].grad.any()


def test_logits_can_be_watched_for_a_loss_of_ones_own() -> None:
    weight, hidden_states = torch.randn(7, 4, requires_grad=True), torch.randn(3, 4)
    for logits in (lazy_logits(hidden_states, weight), lazy_logits(hidden_states, weight).materialize()):
        logits.retain_grad()
        logits.square().sum().backward()
        assert torch.equal(logits.grad * 1.0, 2 * (hidden_states @ weight.detach().t()))


# Who reads the logits of a training call
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda logits: logits.topk(70), "topk"),
        (lambda logits: torch.softmax(logits, -2), "softmax"),
        (lambda logits: logits[..., 3], "__getitem__"),
        (lambda logits: logits.float().detach().cpu().numpy(), "cpu"),
    ],
)
def test_reading_logits_at_every_step_is_named_once(read: Callable[[Any], Any], name: str) -> None:
    model = apply_cce(tiny_llama())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            outputs = model(**batch())
            outputs.loss.backward()
            read(outputs.logits)
    ours = [w for w in caught if "hf_cce" in str(w.message)]
    assert len(ours) == 1 and f"outputs.logits of a training call was used ({name})" in str(ours[0].message)
    assert ours[0].filename == __file__  # it shows the line that reads, not one of torch or ours
    assert (stats(model).fused, stats(model).materialized, stats(model).read) == (3, 3, 3)


def test_asking_for_logits_by_name_is_no_reason_to_warn() -> None:
    model = apply_cce(tiny_llama())
    with told() as messages:
        outputs = model(**batch())
        print(outputs.logits, outputs.logits.shape, outputs.logits.float().dtype)
        outputs.logits.materialize().argmax(-1)
    assert messages == [] and (stats(model).materialized, stats(model).read) == (1, 0)


# So few tokens that full logits are the better way
def test_a_call_of_few_tokens_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_input, "few_tokens", lambda *_: True)
    plain, model = tiny_llama().train(), apply_cce(tiny_llama()).train()
    with told() as messages:
        expected, outputs = plain(**batch()), model(**batch())
        outputs.loss.backward()
        expected.loss.backward()
    assert messages == [] and type(outputs.logits) is torch.Tensor
    assert torch.equal(outputs.loss, expected.loss) and torch.equal(outputs.logits, expected.logits)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert (stats(model).calls, stats(model).few_tokens, stats(model).fused, stats(model).missed) == (1, 1, 0, 0)
    assert stats(model).as_meant == 1


def test_what_counts_as_few_tokens() -> None:
    """42 million logits on a GPU, if the budget holds 12 bytes of each but for what the weight's gradient takes over."""

    def few(n: int, d: int = 896, v: int = 151_936, device: str = "cuda", frozen: bool = False, **options: Any) -> bool:
        config = CCEConfig(**{"memory_budget": 256 << 20, **options})
        return explain_dispatch(n, d, v, torch.bfloat16, device, config, frozen).strategy == "full_logits"

    assert few(1) and few(276) and not few(277) and not few(0)
    assert not few(276, memory_budget=64 << 20) and few(100, memory_budget=64 << 20)
    assert not few(276, implementation="triton") and not few(276, device="cpu")
    assert not few(276, frozen=True) and few(147, frozen=True) and not few(148, frozen=True)
    assert few(414, 768, 50_257) and not few(415, 768, 50_257)  # multiplied slowly, as it is odd
    assert few(573, 768, 50_258) and not few(574, 768, 50_258)  # what the budget holds


# Adapters on the head
def test_an_adapter_on_the_head_is_named_with_the_way_out() -> None:
    peft = pytest.importorskip("peft")
    config = peft.C3AConfig(task_type="CAUSAL_LM", block_size=1, target_modules=["q_proj", "lm_head"])
    model = apply_cce(peft.get_peft_model(tiny_llama(), config))
    with told() as messages:
        for _ in range(2):
            outputs = model(**batch())
            outputs.loss.backward()
    (message,) = messages
    assert "fell back to full logits" in message and type(outputs.logits) is torch.Tensor
    assert (stats(model).missed, stats(model).materialized) == (2, 2)
    assert "adapter (c3a) on its LM head" in message and "asked for the logits" not in message
    assert "target_modules" in message and 'modules_to_save=["lm_head"]' in message and "The loss is correct" in message


def test_an_adapter_that_adds_nothing_at_present_is_not_blamed() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head"])
    model = apply_cce(peft.get_peft_model(tiny_llama(), config))
    with told() as messages, model.disable_adapter():
        model.get_input_embeddings().weight.requires_grad_()
        model(**batch()).loss.backward()
    assert messages == [] and stats(model).fused == 1


# What is said agrees with what is counted
def test_a_loss_that_takes_no_logits_is_not_said_to_have_made_them() -> None:
    class OfHiddenStates(type(tiny_llama())):  # type: ignore[misc]
        def forward(self, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(**kwargs, output_hidden_states=True)
            outputs.loss = None if labels is None else outputs.hidden_states[-1].square().mean()
            return outputs

    model = tiny_llama()
    model.__class__ = OfHiddenStates
    apply_cce(model)
    with told() as messages:
        for _ in range(2):
            model(**batch()).loss.backward()
    (message,) = messages
    assert "ended without the fused loss: its loss is no cross entropy" in message and "full logits" not in message
    assert (stats(model).calls, stats(model).missed, stats(model).materialized) == (2, 2, 0)


# Names that are no model types
@pytest.mark.parametrize("function", [apply_cce, remove_cce])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM is the class of 'llama'"),
        ("meta-llama/Llama-3.2-1B", "a name on the hub or a folder does not help"),
        ("t5", "supported_models() lists them"),
        ("Llama", "did you mean 'llama'"),
        ("MusicgenForCausalLM", "supported_models() lists them"),
    ],
)
def test_a_name_that_is_no_model_type(function: Callable[[Any], Any], name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no model type of a causal LM") as caught:
        function(name)
    message = str(caught.value)
    assert 'Pass the model instance, or its class, or a model type such as "llama"; ' in message and hint in message


@pytest.mark.parametrize("name", ["musicgen_decoder", "Musicgen", "prophetnets", "gemma4_asistant"])
def test_what_is_refused_is_not_suggested(name: str) -> None:
    with pytest.raises(ValueError, match="is no model type") as caught:
        apply_cce(name)
    refused = set(class_names()) - set(supported_models())
    assert refused and not {f"'{each}'" for each in refused} & set(re.findall(r"'\w+'", str(caught.value))[1:])
