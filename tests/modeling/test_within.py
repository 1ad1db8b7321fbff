"""Patched models whose forward calls itself or checkpoints its head: training is unchanged."""

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import (
    VOCAB_SIZE,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    cce_warnings,
    float64_copy,
    loss_and_grads,
    stats,
    tiny_llama,
    twins,
)
from numerics import assert_accurate
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cce import apply_cce, remove_cce
from hf_cce.deferred.logits import LazyLogits


class SelfDistillation(LlamaForCausalLM):
    """Computes its own logits without gradients before its loss, and samples from them."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with torch.no_grad():
                self(input_ids=input_ids)
                self.generate(input_ids=input_ids[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class RDropModel(LlamaForCausalLM):
    """R-Drop: two losses for one batch, in nested calls."""

    def forward(self, input_ids: Any = None, labels: Any = None, inner: bool = False, **kwargs: Any) -> Any:
        first = None if inner else self(input_ids=input_ids, labels=labels, inner=True, **kwargs)
        second = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if first is not None:
            second.loss = (first.loss + second.loss) / 2
        return second


class NestedCallRaises(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with pytest.raises(RuntimeError, match="not this time"):
                self(input_ids=input_ids, labels=None, fail=True)
        if kwargs.pop("fail", False):
            raise RuntimeError("not this time")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class LossCallsModel(LlamaForCausalLM):
    """Calls the model again inside its loss, in evaluation mode and with gradients."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        def loss_function(**given: Any) -> Any:
            self.eval()
            teacher = self(input_ids=input_ids).logits
            self.train()
            return usual(**given) + 0.1 * teacher.square().mean()

        usual = LlamaForCausalLM.loss_function.fget(self)
        if labels is not None:
            self.loss_function = loss_function
        outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        vars(self).pop("_loss_function", None)
        return outputs


class CheckpointedHead(LlamaForCausalLM):
    """Checkpoints head and loss for one part of the tokens at a time, as is often done by hand."""

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


class HeadByKeyword(LlamaForCausalLM):
    def forward(self, labels: Any = None, **inputs: Any) -> Any:
        logits = self.lm_head(input=self.model(**inputs).last_hidden_state)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB_SIZE)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class HeadTwice(LlamaForCausalLM):
    """Calls the head twice on the same hidden states, one of them detached, and needs the logsumexp of both."""

    def forward(self, labels: Any = None, **inputs: Any) -> Any:
        hidden_states = self.model(**inputs).last_hidden_state
        first, second = self.lm_head(hidden_states.detach()).logsumexp(-1), self.lm_head(hidden_states).logsumexp(-1)
        return CausalLMOutputWithPast(loss=first.square().mean() + second.mean())


class ReentrantCheckpoint(LlamaForCausalLM):
    def forward(self, labels: Any = None, **inputs: Any) -> Any:
        def loss(hidden_states: Any) -> Any:
            logits = self.lm_head(hidden_states)[:, :-1]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

        return CausalLMOutputWithPast(loss=checkpoint(loss, self.model(**inputs).last_hidden_state, use_reentrant=True))


class MetricBeforeLoss(LlamaForCausalLM):
    """Runs its head without gradients first, and leaves the loss to the caller."""

    def forward(self, **inputs: Any) -> Any:
        hidden_states = self.model(**inputs).last_hidden_state
        with torch.no_grad():
            self.lm_head(hidden_states).argmax(-1)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_states))


def class_twins(kind: Any) -> tuple[Any, Any]:
    other = tiny_llama()
    plain = kind(other.config).train()
    plain.load_state_dict(other.state_dict())
    return plain, apply_cce(copy.deepcopy(plain))


OWN_FORWARDS = (
    SelfDistillation, RDropModel, NestedCallRaises, LossCallsModel, CheckpointedHead, HeadByKeyword, HeadTwice,
)  # fmt: skip


@pytest.mark.parametrize("kind", OWN_FORWARDS)
def test_custom_forward(kind: Any) -> None:
    losses = {RDropModel: 2, CheckpointedHead: 5}.get(kind, 1)
    plain, patched = class_twins(kind)
    before = set(vars(patched.lm_head))
    with cce_warnings() as messages:
        for steps in (1, 2):
            assert_same_training(patched, plain, batch())
            assert stats(patched).missed == stats(patched).materialized == 0 and stats(patched).fused == steps * losses
    assert set(vars(patched.lm_head)) == before and messages == []


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_head(norm: Any) -> None:
    plain = tiny_llama()
    norm(plain.lm_head)
    patched = apply_cce(copy.deepcopy(plain))
    for _ in range(2):
        assert_same_training(patched, plain, batch())
    assert stats(patched).materialized == 0 and stats(patched).fused == 2


def test_head_without_gradients_beside_a_deferred_one() -> None:
    _, patched = class_twins(MetricBeforeLoss)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    with cce_warnings() as messages:
        patched(**inputs).logits.logsumexp(-1).mean().backward()
    assert messages == [] and stats(patched).missed == stats(patched).materialized == 0 and stats(patched).fused == 1


def test_reentrant_checkpoint_gets_full_logits_and_its_reason() -> None:
    plain, patched = class_twins(ReentrantCheckpoint)
    with pytest.warns(UserWarning, match="fell back to full logits: the head's forward runs without gradients"):
        assert_same_training(patched, plain, batch())
    assert stats(patched).missed == stats(patched).materialized == 1


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within a call"])
def test_training_continues_after_ctrl_c(inner: bool) -> None:
    """torch runs no hook after Ctrl-C, so the head stays in its state within a call; later calls are still correct."""
    plain, patched = class_twins(SelfDistillation if inner else LlamaForCausalLM)

    def stops(module: Any, args: Any) -> None:
        if not inner or not torch.is_grad_enabled():
            raise KeyboardInterrupt

    before = set(vars(patched.lm_head))
    stopping = patched.model.norm.register_forward_pre_hook(stops)
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    stopping.remove()
    assert_same_training(patched, plain, batch())
    assert stats(patched).fused == 1
    hidden_states = torch.randn(2, 32)
    assert torch.equal(patched.lm_head(hidden_states), plain.lm_head(hidden_states))
    ids = batch()["input_ids"]
    assert torch.equal(patched.eval()(ids).logits, plain.eval()(ids).logits)
    assert torch.equal(torch.compile(patched, backend="eager")(ids).logits, plain(ids).logits)
    assert set(vars(remove_cce(patched).lm_head)) == before


def test_calls_of_two_threads_are_separate() -> None:
    """Results that share a call would also share what the backward pass needs, and lose a part of their gradients."""
    plain, patched = twins()
    both = threading.Barrier(2)

    def wait(*_: Any) -> None:
        both.wait(60)

    patched.model.norm.register_forward_pre_hook(wait)  # both have called the model
    patched.lm_head.register_forward_hook(wait)  # both have called the head
    halves = batch()["input_ids"].split(1)
    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(lambda ids: patched(input_ids=ids).logits, halves))
    assert all(isinstance(each, LazyLogits) for each in logits)
    assert logits[0].recipe.call is not logits[1].recipe.call
    sum(each.logsumexp(-1).mean() for each in logits).backward()

    def loss_of(model: Any, halves: Any) -> torch.Tensor:
        return sum(model(input_ids=ids).logits.logsumexp(-1).mean() for ids in halves)

    exact = loss_and_grads(float64_copy(plain), halves, double=True, loss_of=loss_of)
    name = "lm_head.weight"
    assert_accurate(
        patched.lm_head.weight.grad, loss_and_grads(plain, halves, loss_of=loss_of)[name], exact[name], name
    )


def clamped(output: Any) -> Any:
    return output.clamp(-1, 1) if isinstance(output, torch.Tensor) else output


def test_global_module_hook() -> None:
    plain, patched = twins()

    def clamps(module: Any, args: Any, output: Any) -> Any:
        return clamped(output) if isinstance(module, torch.nn.Linear) and module.out_features == VOCAB_SIZE else None

    handle = register_module_forward_hook(clamps)
    try:
        with pytest.warns(UserWarning, match="hf_cce fell back to full logits: clamp needs the full logits"):
            assert_same_training(patched, plain, batch())
    finally:
        handle.remove()
    loss_and_grads(patched, batch())
    assert stats(patched).missed == stats(patched).fused == 1


HALVED = {
    "full_backward_hook": lambda module, before, after: tuple(None if x is None else x / 2 for x in before),
    "full_backward_pre_hook": lambda module, after: tuple(x / 2 for x in after),
    "forward_hook": lambda module, args, output: clamped(output),
}


@pytest.mark.parametrize("kind", HALVED)
def test_hooks_on_module_containing_head(kind: str) -> None:
    """BERT's head is inside ``cls.predictions``, whose output is also the logits."""
    plain, patched = twins("bert")
    for model in (plain, patched):
        getattr(model.cls.predictions, f"register_{kind}")(HALVED[kind])
    assert_same_training(patched, plain, batch())
    assert stats(patched).missed == (kind == "forward_hook")
    assert stats(patched).fused == (kind != "forward_hook")


def in_a_checkpoint(model: Any, inputs: Any) -> torch.Tensor:
    def run(embedded: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embedded, labels=inputs["labels"]).loss

    embedded = model.get_input_embeddings()(inputs["input_ids"])
    if embedded.dtype is torch.float64:  # the reference: exact only in its forward pass
        return run(embedded)
    return checkpoint(run, embedded, use_reentrant=False)


def test_model_in_callers_checkpoint() -> None:
    plain, patched = twins()
    assert_same_training(patched, plain, batch(), loss_of=in_a_checkpoint)
    assert_fused(patched)


def test_accelerates_regional_compilation() -> None:
    """It compiles the head by itself, in a module around it, and shares its parameters."""
    plain, patched = twins()
    compile_regions = pytest.importorskip("accelerate", minversion="1.6").utils.compile_regions
    regional = compile_regions(patched, backend="aot_eager")
    assert regional.lm_head is not patched.lm_head
    assert_same_training(
        patched, plain, batch(), loss_of=lambda model, inputs: (regional if model is patched else model)(**inputs).loss
    )
    assert_fused(patched)
    output = regional(**batch())
    assert torch.equal(output.logits, plain(**batch()).logits)


def loss_and_z_loss(logits: Any, labels: Any, **_: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.logsumexp(-1).mean()


class MeanSquare(torch.autograd.Function):
    """As losses with kernels of their own, it needs a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()


# Losses that the model's forward calls, and whether they materialize the logits
OWN_LOSSES = {
    "two terms": (loss_and_z_loss, False),
    "in place": (lambda logits, **labels: loss_and_z_loss(logits.div_(2), **labels), False),
    "autograd function": (lambda logits, **_: MeanSquare.apply(logits), True),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_own_loss_in_a_model_with_compiled_head(name: str) -> None:
    plain, patched = twins()
    loss, materialized = OWN_LOSSES[name]
    plain.loss_function = patched.loss_function = loss
    patched.lm_head = torch.compile(patched.lm_head, backend="eager")
    compiled = patched.lm_head.forward
    with cce_warnings():
        actual = loss_and_grads(patched, batch())
    actual = {key.replace("_orig_mod.", ""): value for key, value in actual.items()}
    exact = loss_and_grads(float64_copy(plain), batch(), double=True)
    assert_results_as_good(actual, loss_and_grads(plain, batch()), exact)
    assert stats(patched).materialized == materialized
    assert patched.lm_head.forward is compiled


def test_two_losses_of_logits_from_a_compiled_module() -> None:
    """BERT's head is in a module with other layers, whose graph returns the logits."""
    plain, patched = twins("bert")
    plain.loss_function = patched.loss_function = loss_and_z_loss
    patched.cls.compile(backend="eager")
    assert_same_training(patched, plain, batch())
    assert stats(patched).materialized == 0


def test_logits_of_a_compiled_forward_with_softcap() -> None:
    plain, patched = twins("gemma2")
    patched.forward = torch.compile(patched.forward, backend="eager")
    assert_same_training(patched, plain, batch(), loss_of=lambda model, inputs: model(**inputs).logits.square().mean())


def test_patching_a_model_again_after_its_compiled_copy_was_unpatched() -> None:
    model = apply_cce(tiny_llama())
    regional = pytest.importorskip("accelerate", minversion="1.6").utils.compile_regions(model, backend="eager")
    remove_cce(regional)
    assert isinstance(apply_cce(model)(**batch()).logits, LazyLogits)
    remove_cce(model)
    assert isinstance(apply_cce(regional)(**batch()).logits, LazyLogits)


@pytest.mark.parametrize("compiled", ["forward", "head"])
def test_compiled_deferred_logits_raise_after_step(compiled: str) -> None:
    model = apply_cce(tiny_llama())
    if compiled == "forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    else:
        model.lm_head.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        output = model(**batch())
        output.loss.backward()
        before = output.logits.detach().std()
        output = model(**batch())
        optimizer.step()
        with pytest.raises(RuntimeError, match="the hidden states or the LM head have changed since"):
            output.logits.std()
    assert torch.isfinite(before)
    counters = stats(model)  # the hooks of the model stay outside the graph
    assert counters.calls == counters.fused == 4 and counters.missed == 0
    assert counters.materialized == counters.read == 2


@pytest.mark.parametrize(
    "cleared", [("_forward_hooks", "_forward_pre_hooks"), ("_forward_hooks",)], ids=["all", "some"]
)
def test_repatching_after_hooks_were_cleared(cleared: tuple[str, ...]) -> None:
    plain, patched = twins()
    for module in patched.modules():
        for name in cleared:
            getattr(module, name).clear()
    patched(**batch())
    apply_cce(patched)
    assert_same_training(patched, plain, batch())
    assert_fused(patched, 1)
    assert len(patched._forward_hooks) == len(patched._forward_pre_hooks) == 1


def test_replaced_head_is_not_saved() -> None:
    model = apply_cce(tiny_llama())
    model(**batch()).loss.backward()
    model.zero_grad(set_to_none=True)
    model.resize_token_embeddings(VOCAB_SIZE + 8)
    saved, anew = io.BytesIO(), io.BytesIO()
    torch.save(model, saved)
    model(**batch()).loss.backward()  # releases the old head
    model.zero_grad(set_to_none=True)
    torch.save(model, anew)
    assert saved.tell() < anew.tell() + model.lm_head.weight.nbytes / 2
    saved.seek(0)
    for trained in (model, torch.load(saved, weights_only=False)):
        assert_same_training(trained, remove_cce(copy.deepcopy(trained)), batch())
        assert_fused(trained)
