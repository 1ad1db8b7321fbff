"""A patched model whose forward does more: it calls itself, or puts its head into a checkpoint. It trains as it did."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from models import (
    FAMILIES,
    VOCABULARY,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    exact,
    head_of,
    loss_and_grads,
    stats,
    tiny_llama,
)
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cce import apply_cce, remove_cce


class Distils(LlamaForCausalLM):
    """Logits of itself without gradients come before its loss."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with torch.no_grad():
                self(input_ids=input_ids)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Samples(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with torch.no_grad():
                self.generate(input_ids=input_ids[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Drops(LlamaForCausalLM):
    """R-Drop: two losses of one batch, one inside the other."""

    def forward(self, input_ids: Any = None, labels: Any = None, inner: bool = False, **kwargs: Any) -> Any:
        first = None if inner else self(input_ids=input_ids, labels=labels, inner=True, **kwargs)
        second = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if first is not None:
            second.loss = (first.loss + second.loss) / 2
        return second


class Fails(LlamaForCausalLM):
    """And goes on: another call of itself raises within."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with pytest.raises(RuntimeError, match="not this time"):
                self(input_ids=input_ids, labels=None, fail=True)
        if kwargs.pop("fail", False):
            raise RuntimeError("not this time")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def of(kind: Any) -> Any:
    plain = tiny_llama()
    model = kind(plain.config).train()
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize(("kind", "losses"), [(Distils, 1), (Samples, 1), (Drops, 2), (Fails, 1)])
def test_a_model_that_calls_itself(kind: Any, losses: int, recwarn: Any) -> None:
    plain = of(kind)
    patched = apply_cce(copy.deepcopy(plain))
    before = set(vars(patched.lm_head))
    for steps in (1, 2):
        assert_same_training(patched, plain, batch())
        assert_fused(patched, steps * losses)
    assert set(vars(patched.lm_head)) == before and not [w for w in recwarn if "hf_cce" in str(w.message)]


def test_a_hook_that_calls_the_model() -> None:
    plain = of(LlamaForCausalLM)
    reference = loss_and_grads(exact(plain), batch(), double=True)
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):

        def looks(module: Any, args: Any, model: Any = model) -> None:
            if not getattr(model, "looking", False):
                model.looking = True
                with torch.no_grad():
                    model(input_ids=batch()["input_ids"])
                model.looking = False

        model.model.register_forward_pre_hook(looks)
    twin, found = loss_and_grads(plain, batch()), loss_and_grads(patched, batch())
    assert_results_as_good(found, twin, reference)
    assert_fused(patched, 1)


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within a call"])
def test_a_model_trains_on_after_ctrl_c(inner: bool) -> None:
    """torch runs no hook then, and the head stays as it is in a call; the next calls are right all the same."""
    plain = of(Distils if inner else LlamaForCausalLM)
    patched = apply_cce(copy.deepcopy(plain))
    stop = [True]

    def stops(module: Any, args: Any) -> None:
        if stop[0] and (not inner or not torch.is_grad_enabled()):
            raise KeyboardInterrupt

    patched.model.norm.register_forward_pre_hook(stops)
    plain.model.norm.register_forward_pre_hook(lambda module, args: None)
    before = set(vars(patched.lm_head))
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    stop[0] = False
    assert_same_training(patched, plain, batch())
    assert stats(patched).fused == 1
    hidden_states = torch.randn(2, 32)
    assert torch.equal(patched.lm_head(hidden_states), plain.lm_head(hidden_states))
    ids = batch()["input_ids"]
    assert torch.equal(patched.eval()(ids).logits, plain.eval()(ids).logits)
    assert set(vars(remove_cce(patched).lm_head)) == before


def test_a_loss_type_that_is_set_later() -> None:
    """GPT-2 has none of its own; the one by which we name its loss must not win over it."""
    plain = FAMILIES["gpt2"].build()
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        model.loss_type = "ForMaskedLM"
    assert_same_training(patched, plain, batch())


def clamped(output: Any) -> Any:
    return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else output


def hook(module: Any, args: Any, output: Any) -> Any:
    return clamped(output)


def by_tree_map(module: Any, args: Any, output: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.clamp(-1, 1), output)


def in_place_of_forward(model: Any) -> Any:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: clamped(forward(hidden_states))


def in_place_of_forward_for_its_input(model: Any) -> Any:
    forward = model.lm_head.forward

    def halved(hidden_states: Any) -> Any:
        return forward(hidden_states / 2 if isinstance(hidden_states, torch.Tensor) else hidden_states)

    model.lm_head.forward = halved


def in_a_checkpoint(model: Any) -> Any:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: checkpoint(forward, hidden_states, use_reentrant=True)


PUT: dict[str, Any] = {
    "hook": lambda model: head_of(model).register_forward_hook(hook),
    "tree map": lambda model: head_of(model).register_forward_hook(by_tree_map),
    "forward": in_place_of_forward,
    "input": in_place_of_forward_for_its_input,
    "checkpoint": in_a_checkpoint,
}


@pytest.mark.parametrize("put", PUT)
def test_who_asks_what_the_logits_are_gets_tensors(put: str) -> None:
    plain = tiny_llama()
    usual = float(loss_and_grads(plain, batch())["loss"])
    patched = copy.deepcopy(plain)
    reference = exact(plain)
    for model in (plain, patched, reference):
        PUT[put](model)
    twin, reference = loss_and_grads(plain, batch()), loss_and_grads(reference, batch(), double=True)
    assert put == "checkpoint" or abs(float(twin["loss"]) - usual) > usual / 10
    apply_cce(patched)
    reason = {"checkpoint": "without gradients", "input": "a function in the place of the head's forward"}.get(
        put, "clamp"
    )
    with pytest.warns(UserWarning, match=f"hf_cce fell back to full logits: .*{reason}"):
        found = loss_and_grads(patched, batch())
    assert_results_as_good(found, twin, reference)
    assert stats(patched).missed == 1


def test_a_hook_on_all_modules() -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))

    def clamps(module: Any, args: Any, output: Any) -> Any:
        return clamped(output) if isinstance(module, torch.nn.Linear) and module.out_features == VOCABULARY else None

    handle = register_module_forward_hook(clamps)
    try:
        with pytest.warns(UserWarning, match="hf_cce fell back to full logits: clamp asked for the logits"):
            assert_same_training(patched, plain, batch())
    finally:
        handle.remove()
    loss_and_grads(patched, batch())
    assert stats(patched).missed == stats(patched).fused == 1


@pytest.mark.parametrize("kind", ["forward", "backward", "backward_pre"])
def test_hooks_on_what_holds_the_head(kind: str, recwarn: Any) -> None:
    """BERT's head is in ``cls.predictions``, whose output is the logits, too."""
    plain = FAMILIES["bert"].build()
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        module = model.cls.predictions
        if kind == "forward":
            module.register_forward_hook(hook)
        elif kind == "backward":
            module.register_full_backward_hook(
                lambda module, before, after: tuple(None if x is None else x / 2 for x in before)
            )
        else:
            module.register_full_backward_pre_hook(lambda module, after: tuple(x / 2 for x in after))
    assert_same_training(patched, plain, batch())
    assert stats(patched).missed == (kind == "forward")
    assert stats(patched).fused == (kind != "forward")


class SavesLogits(LlamaForCausalLM):
    """As many do by hand: head and loss in a checkpoint, a part of the tokens at a time."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden_states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        labels = labels[:, 1:].flatten()

        def loss(hidden_states: Any, labels: Any) -> Any:
            logits = self.lm_head(hidden_states)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

        parts = zip(hidden_states[:, :-1].flatten(0, 1).split(10), labels.split(10), strict=True)
        total = sum(checkpoint(loss, *part, use_reentrant=False) for part in parts)
        return CausalLMOutputWithPast(loss=total / (labels != -100).sum())


def test_a_head_in_a_checkpoint_of_the_models_forward() -> None:
    plain = of(SavesLogits)
    patched = apply_cce(copy.deepcopy(plain))
    assert_same_training(patched, plain, batch())
    assert_fused(patched)


def test_a_model_in_a_checkpoint_of_the_caller() -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))
    found = []
    for model in (plain, patched):
        model.zero_grad()
        embedded = model.get_input_embeddings()(batch()["input_ids"])
        run = lambda x, model=model: model(inputs_embeds=x, labels=batch()["labels"]).loss  # noqa: E731
        loss = checkpoint(run, embedded, use_reentrant=False)
        loss.backward()
        found.append({"loss": loss.detach()} | {name: x.grad.clone() for name, x in model.named_parameters()})
    assert_fused(patched)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("of", ["forward", "head"])
def test_logits_that_a_graph_has_deferred_are_not_read_after_a_step(of: str) -> None:
    model = apply_cce(tiny_llama())
    if of == "forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    else:
        model.lm_head.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        output = model(**batch())
        output.loss.backward()
        before = output.logits.detach().sum()
        output = model(**batch())
        optimizer.step()
        with pytest.raises(RuntimeError, match="hidden states or LM head have changed since"):
            output.logits.sum()
    assert torch.isfinite(before)


@pytest.mark.parametrize(
    "cleared", [("_forward_hooks", "_forward_pre_hooks"), ("_forward_hooks",)], ids=["all", "some"]
)
def test_a_model_whose_hooks_were_cleared_is_patched_anew(cleared: tuple[str, ...]) -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))
    for module in patched.modules():
        for name in cleared:
            getattr(module, name).clear()
    patched(**batch())
    apply_cce(patched)
    assert_same_training(patched, plain, batch())
    assert_fused(patched, 1)
    assert len(patched._forward_hooks) == len(patched._forward_pre_hooks) == 1


class HandsOn(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_labels_without_a_name_through_a_forward_that_hands_all_on() -> None:
    plain = of(HandsOn)
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        model(batch()["input_ids"], None, None, None, None, batch()["labels"]).loss.backward()
    assert_fused(patched, 1)
    assert_same_training(patched, plain, batch())


def test_a_head_that_was_replaced_is_not_saved() -> None:
    model = apply_cce(tiny_llama())
    model(**batch()).loss.backward()
    model.zero_grad(set_to_none=True)
    model.resize_token_embeddings(VOCABULARY + 8)
    saved, anew = io.BytesIO(), io.BytesIO()
    torch.save(model, saved)
    model(**batch()).loss.backward()  # which lets go of the old head
    model.zero_grad(set_to_none=True)
    torch.save(model, anew)
    assert saved.tell() < anew.tell() + model.lm_head.weight.nbytes / 2
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert_same_training(loaded, remove_cce(copy.deepcopy(loaded)), batch())
    assert_fused(loaded)
