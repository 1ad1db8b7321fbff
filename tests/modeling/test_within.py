"""A patched model whose forward does more: it calls itself, or puts its head into a checkpoint. It trains as it did."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
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
from peft.tuners.lora.model import LoraModel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cce import apply_cce, remove_cce
from hf_cce.head import PARTITIONED, RESHARDS, asks_for_a_tensor
from hf_cce.patches.causal_lm import _why_not, patch_of


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
def test_what_ctrl_c_leaves_is_gone_with_the_next_call(inner: bool) -> None:
    """torch runs no hook then: neither the head nor what was interrupted may stay as they were."""
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
    assert set(vars(patched.lm_head)) == before and stats(patched).fused == 1


def test_a_loss_type_that_is_set_later() -> None:
    """GPT-2 has none of its own; the one by which we name its loss must not win over it."""
    plain = FAMILIES["gpt2"].build()
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        model.loss_type = "ForMaskedLM"
    assert_same_training(patched, plain, batch())


class Clamps:
    """A hook as an object; and a method of it."""

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else None

    def method(self, module: Any, args: Any, output: Any) -> Any:
        return self(module, args, output) if torch.is_tensor(output) else None


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class ByMethods:
    """Hooks that ask by way of methods of their own."""

    helped: Any = None

    @property
    def broken(self) -> Any:
        raise AssertionError("a property was asked for its value")

    def clamped(self, output: Any) -> Any:
        return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else output

    @staticmethod
    def clamped_by_none(output: Any) -> Any:
        return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else output

    @classmethod
    def clamped_by_class(cls, output: Any) -> Any:
        return cls.clamped_by_none(output)

    def method(self, module: Any, args: Any, output: Any) -> Any:
        if module is None:
            return self.broken
        return self.clamped(output)

    def static(self, module: Any, args: Any, output: Any) -> Any:
        return self.clamped_by_none(output)

    def of_class(self, module: Any, args: Any, output: Any) -> Any:
        return self.clamped_by_class(output)

    def within(self, module: Any, args: Any, output: Any) -> Any:
        return next(self.clamped(each) for each in (output,))

    def turn(self, module: Any, args: Any, output: Any) -> Any:
        """Which calls itself, and then asks."""
        return self.turn(None, args, output) if module is not None else self.clamped(output)

    @property
    def closure(self) -> Any:
        return lambda module, args, output: self.clamped(output)

    @property
    def kept(self) -> Any:
        self.helped = _clamped
        return self.by_kept

    def by_kept(self, module: Any, args: Any, output: Any) -> Any:
        return self.helped(output)

    @decorated
    def under(self, module: Any, args: Any, output: Any) -> Any:
        return self.clamped(output)


class ByParents(ByMethods):
    def method(self, module: Any, args: Any, output: Any) -> Any:
        return super().method(module, args, output)

    def clamped(self, output: Any) -> Any:
        return super().clamped(output)


class ByCall(ByMethods):
    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return self.clamped(output)


def _clamped(output: Any) -> Any:
    return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else output


def by_a_helper(module: Any, args: Any, output: Any) -> Any:
    return _clamped(output)


def by_a_function_within(module: Any, args: Any, output: Any) -> Any:
    def clamped(x: Any) -> Any:
        return x.clamp(-1, 1) if isinstance(x, torch.Tensor) else x

    return clamped(output)


def by_tree_map(module: Any, args: Any, output: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.clamp(-1, 1), output)


def by_partial(least: float, module: Any, args: Any, output: Any) -> Any:
    return output.clamp(least, 1) if isinstance(output, torch.Tensor) else None


def on_the_head(hook: Any) -> Any:
    return lambda model: head_of(model).register_forward_hook(hook)


def in_place_of_forward(model: Any) -> Any:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: _clamped(forward(hidden_states))


def in_place_of_forward_for_its_input(model: Any) -> Any:
    forward = model.lm_head.forward

    def halved(hidden_states: Any) -> Any:
        return forward(hidden_states / 2 if isinstance(hidden_states, torch.Tensor) else hidden_states)

    model.lm_head.forward = halved


def in_a_checkpoint(model: Any) -> Any:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: checkpoint(forward, hidden_states, use_reentrant=True)


@pytest.mark.parametrize(
    "put",
    [
        on_the_head(Clamps()),
        on_the_head(Clamps().method),
        on_the_head(ByMethods().method),
        on_the_head(ByMethods().static),
        on_the_head(ByMethods().of_class),
        on_the_head(ByMethods().within),
        on_the_head(ByMethods().turn),
        on_the_head(ByMethods().closure),
        on_the_head(ByMethods().kept),
        on_the_head(ByMethods().under),
        on_the_head(ByParents().method),
        on_the_head(ByCall()),
        on_the_head(by_a_helper),
        on_the_head(by_a_function_within),
        on_the_head(by_tree_map),
        on_the_head(functools.partial(by_partial, -1)),
        in_place_of_forward,
        in_place_of_forward_for_its_input,
        in_a_checkpoint,
    ],
    ids=[
        "object",
        "method",
        "own method",
        "static",
        "of class",
        "in a generator",
        "itself",
        "closure",
        "kept",
        "decorated",
        "super",
        "call",
        "helper",
        "within",
        "tree map",
        "partial",
        "forward",
        "input",
        "checkpoint",
    ],
)
def test_who_asks_what_the_logits_are_gets_tensors(put: Any) -> None:
    plain = tiny_llama()
    usual = float(loss_and_grads(plain, batch())["loss"])
    patched = copy.deepcopy(plain)
    reference = exact(plain)
    for model in (plain, patched, reference):
        put(model)
    twin, reference = loss_and_grads(plain, batch()), loss_and_grads(reference, batch(), double=True)
    assert put is in_a_checkpoint or abs(float(twin["loss"]) - usual) > usual / 10
    apply_cce(patched)
    with pytest.warns(UserWarning, match="asks for the type of the logits"):
        found = loss_and_grads(patched, batch())
    assert_results_as_good(found, twin, reference)
    assert stats(patched).missed == 1


class Watches:
    """A hook that only looks, of a class with methods that ask, as LightningModule is one."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @property
    def asking(self) -> bool:
        raise AssertionError("a property was asked for its value")

    def float(self, x: Any = None) -> Any:
        return x if isinstance(x, torch.Tensor) else self

    def shape(self, x: Any) -> Any:
        return self.float(x)

    def keep(self, shape: Any) -> None:
        self.seen.append(shape) if len(self.seen) < 3 else self.keep(self.seen.pop())

    def hook(self, module: Any, args: Any, output: Any) -> None:
        if module is None:
            self.asking  # noqa: B018
        self.keep(output.float().shape)

    def of_tensors(self, module: Any, args: Any, output: Any) -> None:
        self.keep(args[0].float().shape)


def test_a_hook_whose_class_has_methods_that_ask(recwarn: Any) -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))
    watches = Watches()
    for hook in (watches.hook, watches.of_tensors, lambda *args: watches.hook(*args)):
        patched.lm_head.register_forward_hook(hook)
    assert_same_training(patched, plain, batch())
    assert_fused(patched, 1)
    assert len(watches.seen) == 3 and not [w for w in recwarn if "hf_cce" in str(w.message)]


def test_hooks_of_engines_do_not_ask() -> None:
    """Theirs are known; what a user derives from them is looked at."""
    model = add_hook_to_module(tiny_llama().lm_head, AlignDevicesHook(io_same_device=True))
    assert not asks_for_a_tensor(model.forward)
    for hook in (AlignDevicesHook().post_forward, FSDPState._post_forward, LoraModel._enable_peft_forward_hooks):
        assert not asks_for_a_tensor(hook)
    lightning: dict[str, Any] = {"__name__": "lightning.pytorch.core.module"}
    exec("class Module:\n    def log(self, x): return isinstance(x, float)", lightning)
    owner = type("Mine", (lightning["Module"],), {"hook": lambda self, module, args, output: self.log(output)})
    assert not asks_for_a_tensor(owner().hook)


@pytest.mark.parametrize("reason", [RESHARDS, PARTITIONED])
def test_what_there_is_a_way_around_hides_no_hook(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_cce(tiny_llama())
    monkeypatch.setattr("hf_cce.patches.causal_lm.why_not_defer", lambda head: reason)
    handle = register_module_forward_hook(by_a_helper)
    try:
        state = patch_of(model)
        assert state is not None
        assert "a forward hook on all modules" in str(_why_not(model, state, model.lm_head))
    finally:
        handle.remove()
    assert _why_not(model, state, model.lm_head) == reason


def test_a_hook_on_all_modules() -> None:
    plain = tiny_llama()
    patched = apply_cce(copy.deepcopy(plain))

    def clamps(module: Any, args: Any, output: Any) -> Any:
        return (
            output.clamp(-1, 1) if isinstance(module, torch.nn.Linear) and module.out_features == VOCABULARY else None
        )

    handle = register_module_forward_hook(clamps)
    try:
        with pytest.warns(UserWarning, match="a forward hook on all modules asks for the type"):
            assert_same_training(patched, plain, batch())
    finally:
        handle.remove()
    loss_and_grads(patched, batch())
    assert stats(patched).missed == stats(patched).fused == 1


@pytest.mark.parametrize("kind", ["forward", "backward", "backward_pre"])
def test_hooks_on_what_holds_the_head(kind: str) -> None:
    """BERT's head is in ``cls.predictions``, whose output is the logits, too."""
    plain = FAMILIES["bert"].build()
    patched = apply_cce(copy.deepcopy(plain))

    def clamps(module: Any, args: Any, output: Any) -> Any:
        return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else None

    for model in (plain, patched):
        module = model.cls.predictions
        if kind == "forward":
            module.register_forward_hook(clamps)
        elif kind == "backward":
            module.register_full_backward_hook(
                lambda module, before, after: tuple(None if x is None else x / 2 for x in before)
            )
        else:
            module.register_full_backward_pre_hook(
                lambda module, after: tuple(None if x is None else x / 2 for x in after)
            )
    with pytest.warns(UserWarning, match=r"hook on cls\.predictions"):
        assert_same_training(patched, plain, batch())
    assert stats(patched).missed == 1


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
    with pytest.warns(UserWarning, match="puts its head into a checkpoint"):
        assert_same_training(patched, plain, batch())
    assert stats(patched).missed == 1


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
            output.logits.detach()
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
