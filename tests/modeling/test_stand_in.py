"""What people do to ``outputs.logits``, and to what a head returns, that a stand-in for a tensor could get wrong in silence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import batch, tiny_llama
from numerics import assert_as_good
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_cce import apply_cce, remove_cce

Loss = Callable[[Any], Tensor]
Prepared = Callable[[Any], Any]


def untied() -> Any:
    return tiny_llama(tie_word_embeddings=False)


def loss_and_gradients(model: Any, prepare: Prepared, loss_of: Loss) -> dict[str, Tensor]:
    prepared = prepare(model)
    loss = loss_of(prepared(**batch()))
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check_equal(prepare: Prepared, loss_of: Loss) -> None:
    plain = untied()
    ours = apply_cce(copy.deepcopy(plain))
    expected, found = (loss_and_gradients(model, prepare, loss_of) for model in (plain, ours))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_as_good(found[name], value, value, name)


def own_loss(outputs: Any) -> Tensor:
    return outputs.loss


def as_it_is(model: Any) -> Any:
    return model


def hooked(hook: Callable[[Tensor], Any], compiled: bool = False) -> Prepared:
    def prepare(model: Any) -> Any:
        model.lm_head.register_forward_hook(lambda module, inputs, output: hook(output))
        return torch.compile(model, backend="eager") if compiled else model

    return prepare


def without_gradient(write: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def hook(output: Tensor) -> None:
        with torch.no_grad():
            write(output)

    return hook


def forbid(output: Tensor) -> None:
    output[..., 3:9] = float("-inf")


WRITES = {
    "scales": lambda output: output.mul_(0.5),
    "clamps": lambda output: output.clamp_(-0.1, 0.1),
    "forbids": forbid,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_hook_that_writes_without_gradient(write: Callable[[Tensor], Any]) -> None:
    """The write has no gradient of its own; what it is written to has."""
    assert all((batch()["labels"] < 3).logical_or(batch()["labels"] > 8).any(1))
    loss_of = own_loss if write is not forbid else lambda outputs: outputs.logits[..., 10:20].square().mean()
    check_equal(hooked(without_gradient(write)), loss_of)


def test_a_hook_that_writes_past_the_version() -> None:
    check_equal(hooked(lambda output: (output.data.mul_(0.5), None)[1]), own_loss)


def test_a_hook_that_asks_for_the_type() -> None:
    """It would leave alone what is no tensor; so it gets one, and the training is told."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output / 2 if isinstance(output, Tensor) else None

    def prepare(model: Any) -> Any:
        model.lm_head.register_forward_hook(hook)
        return model

    with pytest.warns(UserWarning, match=r"asks for the type of the logits \(isinstance\)"):
        check_equal(prepare, own_loss)


def test_a_compiled_hook_that_writes_through_real_logits() -> None:
    torch._dynamo.reset()
    check_equal(hooked(lambda output: (output.transpose(1, 2).mul_(0.5), None)[1], compiled=True), own_loss)


def test_a_compiled_hook_that_writes_through_a_view_is_refused() -> None:
    torch._dynamo.reset()
    prepare = hooked(lambda output: (output[0].mul_(0.5), None)[1], compiled=True)
    with pytest.raises(RuntimeError, match="a view of logits that were written to since"):
        loss_and_gradients(apply_cce(untied()), prepare, own_loss)


def target_without_gradient(outputs: Any) -> Tensor:
    with torch.no_grad():
        target = outputs.logits / 2
    return outputs.loss + F.softmax(target, -1).square().sum() + outputs.logits.square().mean()


def part_without_gradient(outputs: Any) -> Tensor:
    with torch.no_grad():
        part = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return outputs.loss + (part * outputs.logits[:, 1:].reshape(part.shape)).mean()


def looked_at_in_inference(outputs: Any) -> Tensor:
    with torch.inference_mode():
        assert outputs.logits.argmax(-1).shape == outputs.logits.shape[:-1]
    return outputs.loss + outputs.logits.square().mean()


@pytest.mark.filterwarnings("ignore:hf_cce. outputs.logits")
@pytest.mark.parametrize("loss_of", [target_without_gradient, part_without_gradient, looked_at_in_inference])
def test_logits_under_no_grad(loss_of: Loss) -> None:
    check_equal(as_it_is, loss_of)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


def by_function(logits: Tensor) -> Tensor:
    return Reverse.apply(logits).square().mean()


def by_checkpoint(logits: Tensor) -> Tensor:
    return checkpoint(lambda x: x.square().mean(), logits, use_reentrant=True)


@pytest.mark.parametrize(("use", "name"), [(by_function, "Reverse"), (by_checkpoint, "CheckpointFunction")])
def test_what_autograd_does_not_see_is_refused(use: Callable[[Tensor], Tensor], name: str) -> None:
    """It would train without that term's gradient. The way out that the message names gives all of it."""
    outputs = apply_cce(untied())(**batch())
    with pytest.raises(RuntimeError, match=rf"{name}\.apply: autograd does not see .*materialize\(\)"):
        use(outputs.logits)
    real = lambda x: x.materialize() if hasattr(x, "materialize") else x  # noqa: E731
    check_equal(as_it_is, lambda outputs: outputs.loss + use(real(outputs.logits)))


@pytest.mark.parametrize(
    "function",
    [torch.as_tensor, torch.asarray, torch.tensor, torch.from_dlpack],
    ids=lambda function: function.__name__,
)
def test_a_copy_that_would_lose_the_gradient_is_refused(function: Callable[[Any], Tensor]) -> None:
    outputs = apply_cce(untied())(**batch())
    for logits in (outputs.logits, outputs.logits.float(), outputs.logits[:, 1:]):
        with pytest.raises(
            RuntimeError, match=r"no gradient from these logits.*materialize\(\), or outputs.logits.detach\(\)"
        ):
            function(logits)
    assert outputs.logits.call.stats.materialised == 0
    expected = outputs.logits.materialize()
    assert torch.equal(function(outputs.logits.detach()), expected)
    with torch.no_grad():
        copied = function(outputs.logits)
    assert torch.equal(copied, expected) and not copied.requires_grad
    copied.zero_()  # is a copy
    assert torch.equal(outputs.logits.detach(), expected) and bool(expected.any())
    check_equal(as_it_is, lambda outputs: outputs.loss + torch.as_tensor(_real(outputs.logits)).square().mean())


def _real(logits: Any) -> Tensor:
    return logits.materialize() if hasattr(logits, "materialize") else logits


def test_the_whole_model_in_a_reentrant_checkpoint() -> None:
    """Its backward pass calls the model anew, and looks for tensors in what that returns."""

    def prepare(model: Any) -> Any:
        def forward(input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
            def run(embeddings: Tensor) -> Any:
                return model(inputs_embeds=embeddings, labels=labels, return_dict=False, use_cache=False)[:2]

            loss, logits = checkpoint(run, model.get_input_embeddings()(input_ids), use_reentrant=True)
            return SimpleNamespace(loss=loss + logits.square().mean())

        return forward

    check_equal(prepare, own_loss)


def test_an_adapter_that_writes_to_some_tokens() -> None:
    """PEFT's aLoRA adds to the tokens from its invocation on, in place, and then asks for the dtype."""
    peft = pytest.importorskip("peft")
    ids = batch()["input_ids"]
    if "alora_invocation_tokens" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"peft {peft.__version__} has no aLoRA")

    def prepare(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"],
            alora_invocation_tokens=[int(ids[0, ids.shape[1] // 2])],
        )  # fmt: skip
        return peft.get_peft_model(model, config)

    check_equal(prepare, own_loss)


def test_a_loss_that_the_user_sets_later_stays() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def mine(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return logits.square().mean()

    model: nn.Module = apply_cce(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2)))
    model.loss_function = mine  # type: ignore[assignment]
    remove_cce(model)
    assert model.loss_function is mine


def test_torchscript_says_what_it_was_given_and_takes_what_was_materialised() -> None:
    """As docs/troubleshooting.md has it."""

    def mean(logits: Tensor) -> Tensor:
        return logits.float().square().mean()

    scripted = torch.jit.script(mean)
    with pytest.raises(RuntimeError, match="but instead found type 'DeferredLogits'"):
        scripted(apply_cce(untied())(**batch()).logits)
    plain = untied()
    ours = apply_cce(copy.deepcopy(plain))
    expected = loss_and_gradients(plain, lambda model: model, lambda outputs: scripted(outputs.logits))
    found = loss_and_gradients(ours, lambda model: model, lambda outputs: scripted(outputs.logits.materialize()))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_as_good(value, expected[name], expected[name], name)


@pytest.mark.parametrize("name", ["pad_across_processes", "find_batch_size"])
def test_accelerate_says_what_it_was_given_and_takes_what_was_materialised(name: str) -> None:
    """As docs/troubleshooting.md has it; ``gather`` asks likewise in several processes."""
    function = getattr(pytest.importorskip("accelerate.utils"), name)
    model = apply_cce(tiny_llama())
    logits = model(**batch()).logits
    with pytest.raises(TypeError, match=re.escape("<class 'hf_cce.deferred.DeferredLogits'>")):
        function(logits)
    for tensor in (logits.materialize(), logits.argmax(-1)):
        function(tensor)
