"""What people do to ``outputs.logits``, to its gradient and to what a head returns, that a lazy tensor could get wrong."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, logits_made, stats, tiny_llama
from numerics import assert_as_good
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_cce import apply_cce, remove_cce
from hf_cce.deferred.lazy_tensor import LazyGrad

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


class Same(torch.autograd.Function):
    """Hands its input on, as the functions of DDP, FSDP and DeepSpeed do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def mean(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


SCRIPTED = torch.jit.script(mean)


def mean_in(function: Callable[[Tensor], Tensor]) -> Loss:
    """Its own loss and one of what ``function`` makes of the logits."""
    return lambda outputs: outputs.loss + mean(function(outputs.logits))


def offloaded(outputs: Any) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return outputs.loss + outputs.logits.softmax(-1).square().mean()


def gradient_by_logits(outputs: Any) -> Tensor:
    (grad,) = torch.autograd.grad(outputs.loss, outputs.logits, retain_graph=True)
    return outputs.loss + (grad * outputs.logits).sum()


def twice(outputs: Any) -> Tensor:
    outputs.loss.backward(retain_graph=True)
    return outputs.loss


def hook_on_logits(hook: Callable[[Tensor], Any]) -> Loss:
    def loss_of(outputs: Any) -> Tensor:
        outputs.logits.register_hook(hook)
        return outputs.loss

    return loss_of


def on_head(hook: Callable[..., Any], kind: str = "register_forward_hook") -> Prepared:
    def prepare(model: Any) -> Any:
        getattr(model.lm_head, kind)(hook)
        return model

    return prepare


def softcapped(model: Any) -> Any:
    """With everything that may be recorded between the head and ``outputs.logits``."""
    model.lm_head.register_forward_hook(lambda module, args, x: (torch.tanh(x / 5.0) * 5.0).double()[:, :, :].float())
    return model


# What is done to the model, what to its outputs, and whether full logits or their gradient are made
USES: dict[str, tuple[Prepared, Loss, bool]] = {
    "hook on the head by a function": (on_head(lambda m, i, x: Same.apply(x)), own_loss, False),
    "hook on the head that asks for the type": (
        on_head(lambda m, i, x: x / 2 if isinstance(x, Tensor) else None), own_loss, False,
    ),
    "hook on the head by a function that reverses": (on_head(lambda m, i, x: Reverse.apply(x)), own_loss, True),
    "backward hook on the head": (on_head(lambda m, i, o: None, "register_full_backward_hook"), own_loss, False),
    "backward hook that halves": (
        on_head(lambda m, i, o: tuple(None if x is None else x / 2 for x in i), "register_full_backward_hook"),
        own_loss, False,
    ),
    "backward pre-hook that halves": (
        on_head(lambda m, o: (o[0] / 2,), "register_full_backward_pre_hook"), own_loss, True,
    ),
    "hook on the gradient that looks away": (as_it_is, hook_on_logits(lambda grad: None), False),
    "hook on the gradient that doubles": (as_it_is, hook_on_logits(lambda grad: 2 * grad), True),
    "hook on the gradient that writes": (as_it_is, hook_on_logits(lambda grad: (grad.mul_(2), None)[1]), True),
    "hook on the gradient that writes to an alias": (
        as_it_is, hook_on_logits(lambda grad: (grad.detach().mul_(2), None)[1]), True,
    ),
    "hook on the gradient that writes to a copy": (
        as_it_is, hook_on_logits(lambda grad: (grad.clone().mul_(2), grad.sum(), grad.clone().zero_(), None)[3]), True,
    ),
    "hook on the gradient of a softcap": (softcapped, hook_on_logits(lambda grad: 2 * grad), True),
    "softcap": (softcapped, own_loss, False),
    "gradient of two losses": (as_it_is, lambda o: o.loss + 0.1 * o.logits.logsumexp(-1).square().mean(), False),
    "two losses and a hook": (
        as_it_is, lambda o: hook_on_logits(lambda g: g * 3)(o) + o.logits.logsumexp(-1).square().mean(), True,
    ),
    "mean": (as_it_is, lambda o: o.loss + o.logits.mean() + o.logits.mean(-1).square().sum(), False),
    "mean of a softcap": (softcapped, lambda o: o.loss + o.logits.mean() + o.logits.mean(-1).square().sum(), False),
    "gradient by the logits": (as_it_is, gradient_by_logits, True),
    "backward twice": (as_it_is, twice, False),
    "a function": (as_it_is, mean_in(Reverse.apply), True),
    "a function after a softcap": (softcapped, mean_in(Reverse.apply), True),
    "reentrant checkpoint": (as_it_is, mean_in(lambda x: checkpoint(mean, x, use_reentrant=True)), True),
    "checkpoint": (as_it_is, mean_in(lambda x: checkpoint(mean, x[:, 2:].float() * 2, use_reentrant=False)), True),
    "offloaded": (as_it_is, offloaded, True),
    "TorchScript": (as_it_is, lambda o: o.loss + SCRIPTED(o.logits), True),
    "as_tensor": (as_it_is, mean_in(torch.as_tensor), True),
    "asarray": (as_it_is, mean_in(torch.asarray), True),
    "collated": (as_it_is, mean_in(lambda x: torch.utils.data.default_collate([x, x])), True),
    "cloned": (as_it_is, mean_in(lambda x: x.clone()), True),
    "class weights": (
        as_it_is,
        lambda o: F.cross_entropy(o.logits.flatten(0, 1), batch()["labels"].flatten(), torch.arange(99.0)), False,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USES)
def test_what_is_done_to_real_logits_may_be_done_to_lazy_ones(name: str) -> None:
    prepare, loss_of, made = USES[name]
    check_equal(prepare, loss_of)
    ours = apply_cce(untied())
    with logits_made(model=ours) as seen:
        loss_and_gradients(ours, prepare, loss_of)
    assert bool(seen) == (stats(ours).materialized > 0) == made


def test_logits_are_a_tensor() -> None:
    outputs = apply_cce(untied())(**batch())
    logits = outputs.logits
    assert (
        isinstance(logits, Tensor) and torch.is_tensor(logits) and logits.requires_grad and logits.grad_fn is not None
    )
    assert not logits.is_leaf and not logits.detach().requires_grad and logits.float().grad_fn is not None
    assert "not made" in repr(logits) and stats_of(logits).materialized == 0


def stats_of(logits: Any) -> Any:
    return logits.recipe.call.stats


def test_the_lazy_gradient_adds_up_and_can_be_read() -> None:
    grads: list[list[Any]] = [[], []]
    plain = untied()
    for model, seen in zip((plain, apply_cce(copy.deepcopy(plain))), grads, strict=True):
        outputs = model(**batch())
        lse = outputs.logits.logsumexp(-1).mean()
        for loss in (outputs.loss, lse, outputs.loss + 2 * lse):
            seen += torch.autograd.grad(loss, outputs.logits, retain_graph=True)
        seen.append(seen[0] + seen[1])
        seen.append(seen[0] + torch.ones_like(seen[0]))
    assert all(isinstance(x, LazyGrad) for x in grads[1][:4])
    for position, (expected, found) in enumerate(zip(*grads, strict=True)):
        assert found.shape == expected.shape and found.dtype is expected.dtype
        assert_as_good(found * 1.0, expected, expected, f"gradient {position}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepare", [as_it_is, softcapped], ids=["logits", "softcap"])
def test_a_second_derivative_is_refused_or_right(prepare: Prepared) -> None:
    plain = untied()
    ours = apply_cce(copy.deepcopy(plain))
    outputs = prepare(ours)(**batch())
    with pytest.raises(RuntimeError, match=r"no second derivative \(create_graph=True\).*materialize\(\)"):
        torch.autograd.grad(outputs.loss, ours.lm_head.weight, create_graph=True)

    def penalty(outputs: Any, model: Any) -> Tensor:
        logits = outputs.logits.materialize() if hasattr(outputs.logits, "materialize") else outputs.logits
        (grad,) = torch.autograd.grad(logits.tanh().square().sum(), model.lm_head.weight, create_graph=True)
        return grad.square().sum()

    found = []
    for model in (prepare(plain), ours):
        loss = penalty(model(**batch()), model)
        found.append([loss.detach(), *torch.autograd.grad(loss, [model.lm_head.weight, model.model.norm.weight])])
    for expected, value in zip(*found, strict=True):
        assert_as_good(value, expected, expected, "second derivative")


def test_weights_that_were_changed_before_the_backward_pass_are_an_error() -> None:
    ours = apply_cce(untied())
    loss = ours(**batch()).loss
    with torch.no_grad():
        ours.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_is_freed_by_its_backward_pass() -> None:
    ours = apply_cce(untied())
    outputs = ours(**batch())
    loss, kept = outputs.loss, weakref.ref(outputs.logits.recipe.hidden_states.untyped_storage())
    del outputs
    loss.backward()
    assert kept() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_utilities_of_accelerate() -> None:
    utils = pytest.importorskip("accelerate.utils")
    ours = apply_cce(untied())
    logits = ours(**batch()).logits
    assert utils.find_batch_size({"logits": logits}) == len(logits) and utils.gather(logits).shape == logits.shape
    assert utils.recursively_apply(lambda x: x.float(), {"a": logits})["a"].shape == logits.shape
    assert utils.convert_to_fp32({"a": logits.bfloat16()})["a"].dtype is torch.float32
    assert stats(ours).materialized == 0
    padded = utils.pad_across_processes(logits, dim=1)
    assert torch.equal(padded, logits.materialize())
    assert torch.equal(utils.concatenate([logits, logits]), torch.cat([logits.materialize()] * 2))
    assert torch.equal(utils.send_to_device(logits, torch.device("cpu")), logits.materialize())


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_ddp(options: Any, tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        check_equal(lambda model: nn.parallel.DistributedDataParallel(model, **options), own_loss)
        ours = apply_cce(untied())
        wrapped = nn.parallel.DistributedDataParallel(ours, **options)
        with logits_made(model=ours) as made:
            outputs = wrapped(**batch())
            outputs.loss.backward()
        assert made == [] and stats(ours).fused == 1 and torch.is_tensor(outputs.logits)
        assert torch.equal(outputs.logits.argmax(-1), outputs.logits.materialize().argmax(-1))
    finally:
        dist.destroy_process_group()


def test_a_head_with_a_trainable_bias_after_it() -> None:
    """As ESM has it: its gradient is that of the logits, summed over the tokens."""

    def biased(model: Any) -> Any:
        model.bias = nn.Parameter(torch.linspace(-1, 1, 99))
        model.lm_head.register_forward_hook(lambda module, args, x: x + model.bias)
        return model

    check_equal(biased, own_loss)
    check_equal(biased, mean_in(lambda x: x))
    check_equal(biased, hook_on_logits(lambda grad: 2 * grad))
    ours = apply_cce(untied())
    loss_and_gradients(ours, biased, own_loss)
    assert stats(ours).materialized == 0 and bool(ours.bias.grad.any())


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
