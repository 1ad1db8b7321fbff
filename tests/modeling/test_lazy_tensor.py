"""Operations on ``outputs.logits``, its gradient and the head's output that a lazy tensor could get wrong."""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import batch, cce_warnings, logits_made, loss_and_grads, stats, tiny_llama, twins
from numerics import assert_accurate, assert_all_accurate
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

from hf_cce import apply_cce
from hf_cce.deferred import recipe
from hf_cce.deferred.lazy_tensor import LazyGrad

Loss = Callable[[Any], Tensor]
Prepared = Callable[[Any], Any]


def step(model: Any, prepare: Prepared, loss_of: Loss) -> dict[str, Tensor]:
    prepared = prepare(model)
    return loss_and_grads(model, batch(), loss_of=lambda _, inputs: loss_of(prepared(**inputs)))


def check_equal(prepare: Prepared, loss_of: Loss) -> None:
    expected, found = (step(model, prepare, loss_of) for model in twins())
    assert_all_accurate(found, expected, expected)


def output_loss(outputs: Any) -> Tensor:
    return outputs.loss


def unchanged(model: Any) -> Any:
    return model


def on_head(hook: Callable[..., Any], kind: str = "register_forward_hook") -> Prepared:
    def prepare(model: Any) -> Any:
        getattr(model.lm_head, kind)(hook)
        return model

    return prepare


def in_place_of_forward(forward_of: Callable[[Any, Any], Any]) -> Prepared:
    def prepare(model: Any) -> Any:
        model.lm_head.forward = functools.partial(forward_of, model.lm_head.forward)
        return model

    return prepare


def clamped(x: Any) -> Any:
    return x.clamp(-1, 1) if isinstance(x, Tensor) else x


def halved(x: Any) -> Any:
    return x / 2 if isinstance(x, Tensor) else x


def hook_that_writes(write: Callable[[Tensor], Any]) -> Prepared:
    """Return a hook that writes without a gradient; the tensor it writes to has one."""

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        with torch.no_grad():
            write(output)

    return on_head(hook)


def mask_entries(output: Tensor) -> None:
    output[..., 3:9] = float("-inf")


def target_without_gradient(outputs: Any) -> Tensor:
    with torch.no_grad():
        target = outputs.logits / 2
    return outputs.loss + F.softmax(target, -1).square().sum() + outputs.logits.square().mean()


def part_without_gradient(outputs: Any) -> Tensor:
    with torch.no_grad():
        part = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return outputs.loss + (part * outputs.logits[:, 1:].reshape(part.shape)).mean()


def read_in_inference_mode(outputs: Any) -> Tensor:
    with torch.inference_mode():
        assert outputs.logits.argmax(-1).shape == outputs.logits.shape[:-1]
    return outputs.loss + outputs.logits.square().mean()


def autograd_function(forward: Callable[[Any, Tensor], Tensor], backward: Callable[[Any, Tensor], Tensor]) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), methods).apply


reverse = autograd_function(lambda ctx, x: x.view_as(x), lambda ctx, grad: -grad)
identity = autograd_function(lambda ctx, x: x.clone(), lambda ctx, grad: grad)  # like those of DDP, FSDP and DeepSpeed
halve_and_pass_on = autograd_function(lambda ctx, x: x / 2, lambda ctx, grad: grad)  # a straight-through estimator
halve_in_place = autograd_function(lambda ctx, x: (ctx.mark_dirty(x), x.mul_(0.5))[1], lambda ctx, grad: grad / 2)


def mean(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


SCRIPTED = torch.jit.script(mean)


def mean_in(function: Callable[[Tensor], Tensor]) -> Loss:
    """Return a loss that adds a mean of ``function(logits)`` to the model's own loss."""
    return lambda outputs: outputs.loss + mean(function(outputs.logits))


def function_of_written_logits(outputs: Any) -> Tensor:
    """Autograd calls a function with the lazy tensor itself, not with the values that were written."""
    outputs.logits.div_(2.0).mul_(torch.linspace(0, 1, 99))
    return outputs.loss + mean(reverse(outputs.logits))


def gradient_by_logits_written_without_gradient(outputs: Any) -> Tensor:
    with torch.no_grad():
        outputs.logits.mul_(0.5)
    loss = mean(reverse(outputs.logits)) + mean(outputs.logits.sigmoid())
    (grad,) = torch.autograd.grad(loss, outputs.logits, retain_graph=True)
    return outputs.loss + loss + (grad * outputs.logits).sum()


def offloaded(outputs: Any) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return outputs.loss + outputs.logits.softmax(-1).square().mean()


def gradient_by_logits(outputs: Any) -> Tensor:
    (grad,) = torch.autograd.grad(outputs.loss, outputs.logits, retain_graph=True)
    return outputs.loss + (grad * outputs.logits).sum()


def compiled(loss_of_logits: Callable[[Tensor], Tensor]) -> Loss:
    """Compile only a function of the logits; the model runs in eager mode."""

    def loss_of(outputs: Any) -> Tensor:
        torch._dynamo.reset()
        return outputs.loss + torch.compile(loss_of_logits, backend="eager")(outputs.logits)

    return loss_of


def divergence(logits: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), torch.full_like(logits, 1 / 99), reduction="batchmean")


def masked_after_softmax(outputs: Any) -> Tensor:
    log_p = outputs.logits.log_softmax(-1)
    outputs.logits[..., :4] = torch.finfo(torch.float32).min
    return outputs.loss + log_p.exp().square().sum() + outputs.logits.logsumexp(-1).sum()


def class_first_after_mask(outputs: Any) -> Tensor:
    outputs.logits[..., [1, 60]] = torch.finfo(torch.float32).min
    logits = outputs.logits.transpose(1, 2)
    return outputs.loss + F.nll_loss(logits.log_softmax(1), batch()["labels"]) + logits[:, 4:50].square().mean()


def written_copy(outputs: Any) -> Tensor:
    part = outputs.logits[batch()["labels"] != -100]
    part /= 2.0
    return outputs.loss + part.logsumexp(-1).sum() + outputs.logits.logsumexp(-1).sum()


def hooked_and_scaled_in_place(outputs: Any) -> Tensor:
    part = outputs.logits[:, 1:].clone()
    part.register_hook(lambda grad: 2 * grad)  # of the logits before the division
    part.retain_grad()  # those after it
    part.div_(0.7)
    part.register_hook(lambda grad: 3 * grad)
    (part.softmax(-1).square().sum() + reverse(part).sum()).backward(retain_graph=True)
    return outputs.loss + part.logsumexp(-1).sum() + (part.grad.detach() * part).sum()


def read_then_written(outputs: Any) -> Tensor:
    value = divergence(outputs.logits)
    outputs.logits[..., :4] = torch.finfo(torch.float32).min
    return outputs.loss + value


def in_anomaly_mode(outputs: Any) -> Tensor:
    with torch.autograd.detect_anomaly():
        outputs.loss.backward(retain_graph=True)
    return outputs.loss


def parts_of_a_detached_leaf(outputs: Any) -> Tensor:
    leaf, labels = outputs.logits.detach().requires_grad_(), batch()["labels"]
    for row, target in zip(leaf, labels, strict=True):
        F.cross_entropy(row, target).backward()
    outputs.logits.backward(leaf.grad, retain_graph=True)
    return outputs.loss


def weighted_without_gradient(outputs: Any) -> Tensor:
    log_p = outputs.logits.log_softmax(-1).gather(-1, batch()["labels"].clamp(min=0).unsqueeze(-1))
    return outputs.loss + (outputs.logits.detach().logsumexp(-1) * log_p[..., 0]).mean()


def negative_entropy(log_p: Tensor) -> Tensor:
    return (log_p.exp() * log_p).sum(-1).mean()


def entropy_after_hook(change: Callable[[Tensor], Tensor]) -> Loss:
    """Return a loss with the entropy of what ``change`` computes from log-probabilities whose gradient a hook doubles."""

    def loss_of(outputs: Any) -> Tensor:
        log_p = outputs.logits.log_softmax(-1)
        log_p.register_hook(lambda grad: 2 * grad)
        return outputs.loss + negative_entropy(change(log_p))

    return loss_of


def entropy_before_hook(outputs: Any) -> Tensor:
    log_p = outputs.logits.log_softmax(-1)
    part = log_p[:, 1:].contiguous()
    log_p.register_hook(lambda grad: 2 * grad)
    return outputs.loss + negative_entropy(part)


def entropy_with_retained_gradient(outputs: Any) -> Tensor:
    log_p = outputs.logits.log_softmax(-1)
    log_p.retain_grad()
    negative_entropy(log_p[:, 1:]).backward(retain_graph=True)
    return outputs.loss + (log_p.grad * outputs.logits).sum()


def entropy_of_a_detached_leaf(outputs: Any) -> Tensor:
    leaf = outputs.logits.log_softmax(-1).detach().requires_grad_()
    negative_entropy(leaf).backward()
    return outputs.loss + (leaf.grad * outputs.logits).sum()


def gradient_at(change: Callable[[Tensor], Tensor]) -> Loss:
    """Return a loss of which one term has the gradient that another loss has at ``change(logits)``, as in GradCache."""

    def loss_of(outputs: Any) -> Tensor:
        leaf = change(outputs.logits).detach().requires_grad_()
        (grad,) = torch.autograd.grad(leaf.logsumexp(-1).square().sum(), leaf)
        outputs.logits.backward(grad, retain_graph=True)
        return outputs.loss

    return loss_of


def accumulated_gradient(outputs: Any) -> Tensor:
    """Add a gradient that a straight-through function passes on to a dense one, in place."""
    leaf = outputs.logits.detach().requires_grad_()
    leaf.sigmoid().sum().backward()
    halve_and_pass_on(leaf).logsumexp(-1).square().sum().backward()
    outputs.logits.backward(leaf.grad, retain_graph=True)
    return outputs.loss


def less_logsumexp(change_logits: Prepared, change_lse: Prepared) -> Loss:
    def loss_of(outputs: Any) -> Tensor:
        lse = outputs.logits.logsumexp(-1, keepdim=True)
        return outputs.loss + (change_logits(outputs.logits) - change_lse(lse))[..., 7].square().sum()

    return loss_of


def reused_bias(outputs: Any) -> Tensor:
    bias = torch.linspace(-1, 1, 99)
    moved = outputs.logits + bias
    bias.zero_()
    return outputs.loss + moved.logsumexp(-1).sum() + moved.detach().logsumexp(-1).sum() * outputs.loss


def hook_on_logits(hook: Callable[[Tensor], Any]) -> Loss:
    def loss_of(outputs: Any) -> Tensor:
        outputs.logits.register_hook(hook)
        return outputs.loss

    return loss_of


def softcapped(model: Any) -> Any:
    """Apply every operation that may be recorded between the head and ``outputs.logits``."""
    model.lm_head.register_forward_hook(lambda module, args, x: (torch.tanh(x / 5.0) * 5.0).double()[:, :, :].float())
    return model


def biased(model: Any) -> Any:
    model.bias = nn.Parameter(torch.linspace(-1, 1, 99), requires_grad=False)
    model.lm_head.register_forward_hook(lambda module, args, x: x + model.bias)
    return model


def halving_hook_on_compiled_head(model: Any) -> Any:
    model.lm_head.compile(backend="eager")
    return on_head(lambda m, i, o: (i[0] / 2,), "register_full_backward_hook")(model)


def in_a_reentrant_checkpoint(model: Any) -> Any:
    """Call the model in a reentrant checkpoint, whose backward calls it again and looks for tensors in its outputs."""

    def forward(input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
        def run(embeddings: Tensor) -> Any:
            return model(inputs_embeds=embeddings, labels=labels, return_dict=False, use_cache=False)[:2]

        loss, logits = checkpoint(run, model.get_input_embeddings()(input_ids), use_reentrant=True)
        return SimpleNamespace(loss=loss + logits.square().mean())

    return forward


# How the model is prepared, the loss of its outputs, and whether full logits or their gradient are materialized
LOGITS_USES: dict[str, tuple[Prepared, Loss, bool]] = {
    "hook on the head by a function": (on_head(lambda m, i, x: identity(x)), output_loss, False),
    "hook on the head that asks for the type": (
        on_head(lambda m, i, x: x / 2 if isinstance(x, Tensor) else None), output_loss, False,
    ),
    "hook on the head that clamps": (on_head(lambda m, i, x: clamped(x)), output_loss, True),
    "forward that clamps": (in_place_of_forward(lambda forward, x: clamped(forward(x))), output_loss, True),
    "forward that halves its input": (in_place_of_forward(lambda forward, x: forward(halved(x))), output_loss, True),
    "forward in a reentrant checkpoint": (
        in_place_of_forward(lambda forward, x: checkpoint(forward, x, use_reentrant=True)), output_loss, True,
    ),
    "hook on the head by a function that halves and passes its gradient on": (
        on_head(lambda m, i, x: halve_and_pass_on(x)), output_loss, True,
    ),
    "gradient of a loss at a copy": (unchanged, gradient_at(torch.clone), False),
    "gradient of a loss at other logits": (unchanged, gradient_at(lambda z: 2 * z), True),
    "accumulated gradient of a leaf": (unchanged, accumulated_gradient, True),
    "less a logsumexp whose gradient is reversed": (unchanged, less_logsumexp(unchanged, reverse), True),
    "leaf less the logsumexp of the logits": (
        unchanged, less_logsumexp(lambda z: z.detach().requires_grad_(), unchanged), True,
    ),
    "hook on the head by a function that reverses": (on_head(lambda m, i, x: reverse(x)), output_loss, True),
    "backward hook on the head": (on_head(lambda m, i, o: None, "register_full_backward_hook"), output_loss, False),
    "backward hook that halves": (
        on_head(lambda m, i, o: tuple(None if x is None else x / 2 for x in i), "register_full_backward_hook"),
        output_loss, False,
    ),
    "backward hook that halves, on a compiled head": (halving_hook_on_compiled_head, output_loss, False),
    "backward pre-hook that halves": (
        on_head(lambda m, o: (o[0] / 2,), "register_full_backward_pre_hook"), output_loss, True,
    ),
    "hook on the gradient that does nothing": (unchanged, hook_on_logits(lambda grad: None), False),
    "hook on the gradient that doubles": (unchanged, hook_on_logits(lambda grad: 2 * grad), True),
    "hook on the gradient that writes to an alias": (
        unchanged, hook_on_logits(lambda grad: (grad.detach().mul_(2), None)[1]), True,
    ),
    "hook on the gradient that writes to a copy": (
        unchanged, hook_on_logits(lambda grad: (grad.clone().mul_(2), grad.sum(), grad.clone().zero_(), None)[3]), True,
    ),
    "hook on the gradient of a softcap": (softcapped, hook_on_logits(lambda grad: 2 * grad), True),
    "gradient of two losses": (unchanged, lambda o: o.loss + 0.1 * o.logits.logsumexp(-1).square().mean(), False),
    "two losses and a hook": (
        unchanged, lambda o: hook_on_logits(lambda g: g * 3)(o) + o.logits.logsumexp(-1).square().mean(), True,
    ),
    "mean": (unchanged, lambda o: o.loss + o.logits.mean() + o.logits.mean(-1).square().sum(), False),
    "mean of a softcap": (softcapped, lambda o: o.loss + o.logits.mean() + o.logits.mean(-1).square().sum(), False),
    "gradient by the logits": (unchanged, gradient_by_logits, True),
    "a function": (unchanged, mean_in(reverse), True),
    "a function after a write": (unchanged, function_of_written_logits, True),
    "gradient by logits written without gradient": (unchanged, gradient_by_logits_written_without_gradient, True),
    "a function in place": (unchanged, mean_in(lambda x: halve_in_place(x.clone())), True),
    "a function after a softcap": (softcapped, mean_in(reverse), True),
    "reentrant checkpoint": (unchanged, mean_in(lambda x: checkpoint(mean, x, use_reentrant=True)), True),
    "checkpoint": (unchanged, mean_in(lambda x: checkpoint(mean, x[:, 2:].float() * 2, use_reentrant=False)), True),
    "offloaded": (unchanged, offloaded, True),
    "TorchScript": (unchanged, lambda o: o.loss + SCRIPTED(o.logits), True),
    "as_tensor": (unchanged, mean_in(torch.as_tensor), True),
    "collated": (unchanged, mean_in(lambda x: torch.utils.data.default_collate([x, x])), True),
    "cloned": (unchanged, mean_in(lambda x: x.clone()), True),
    "hook that scales": (hook_that_writes(lambda output: output.mul_(0.5)), output_loss, True),
    "hook that masks entries": (hook_that_writes(mask_entries), lambda o: o.logits[..., 10:20].square().mean(), True),
    "hook that writes past the version": (hook_that_writes(lambda output: output.data.mul_(0.5)), output_loss, True),
    "target without gradient": (unchanged, target_without_gradient, True),
    "part without gradient": (unchanged, part_without_gradient, True),
    "read in inference mode": (unchanged, read_in_inference_mode, True),
    "compiled loss without logits": (unchanged, compiled(lambda x: x.logsumexp(-1).sum() + x.mean()), False),
    "compiled loss by the shape": (
        unchanged, compiled(lambda x: x[:, :-1].reshape(-1, x.shape[-1]).logsumexp(-1).sum() * (x.dtype == torch.float32)), False,
    ),
    "compiled loss of both": (unchanged, compiled(lambda x: x.logsumexp(-1).sum() + divergence(x)), True),
    "entropy of a part after a hook": (unchanged, entropy_after_hook(lambda log_p: log_p[:, 1:]), True),
    "entropy of a copy after a hook": (unchanged, entropy_after_hook(lambda log_p: log_p.clone()), True),
    "entropy of a part before a hook": (unchanged, entropy_before_hook, True),
    "entropy with a retained gradient": (unchanged, entropy_with_retained_gradient, True),
    "entropy of a detached leaf": (unchanged, entropy_of_a_detached_leaf, True),
    "masked after softmax": (unchanged, masked_after_softmax, True),
    "class-first after a mask": (unchanged, class_first_after_mask, True),
    "a copy that is written to": (unchanged, written_copy, False),
    "hooked, then scaled in place": (unchanged, hooked_and_scaled_in_place, True),
    "read, then written": (unchanged, read_then_written, True),
    "backward twice, in anomaly mode": (unchanged, in_anomaly_mode, False),
    "parts of a detached leaf": (unchanged, parts_of_a_detached_leaf, False),
    "weighted without gradient": (unchanged, weighted_without_gradient, False),
    "reused bias": (unchanged, reused_bias, False),
    "log-probabilities of ids by index": (
        unchanged, lambda o: o.loss + o.logits.log_softmax(-1)[0][torch.arange(9)[:, None], torch.arange(20)].sum(), True,
    ),
    "an ellipsis at the end": (unchanged, lambda o: o.loss + o.logits[:, 1:, :10, ...].logsumexp(-1).square().mean(), False),
    "keyword of permute": (unchanged, lambda o: o.loss + torch.permute(o.logits, dims=(0, 2, 1)).square().mean(), True),
    "names of NumPy": (
        unchanged, lambda o: o.loss + torch.logsumexp(o.logits, axis=-1, keepdims=True).sum() + o.logits.amax(axis=1).sum(), True,
    ),
    "bias": (biased, output_loss, False),
    "bias, and a loss on the logits": (biased, mean_in(lambda x: x), True),
    "bias, and a hook on the gradient": (biased, hook_on_logits(lambda grad: 2 * grad), True),
}  # fmt: skip


def sum_of_losses(logits: Any) -> Tensor:
    return torch.vmap(lambda ids: F.cross_entropy(logits[0], ids))(batch()["input_ids"]).sum()


def tangent(logits: Any) -> Tensor:
    x = torch.tensor(2.0)
    return torch.func.jvp(lambda x: (x * logits).logsumexp(-1).sum(), (x,), (x,))[1]


def dual_tangent(logits: Any) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        factor = torch.autograd.forward_ad.make_dual(torch.tensor(0.7), torch.tensor(1.0))
        return torch.autograd.forward_ad.unpack_dual((logits * factor).square().sum()).tangent


@pytest.mark.parametrize("loss", [sum_of_losses, tangent, dual_tangent])
def test_transform_after_the_call(loss: Callable[[Any], Tensor]) -> None:
    """An error, not a lost tangent; with materialized logits as without hf_cce."""
    model = twins()[1]
    with pytest.raises(RuntimeError, match="under a transform of"):
        loss(model(**batch()).logits)
    check_equal(unchanged, lambda outputs: loss(getattr(outputs.logits, "materialize", lambda: outputs.logits)()))


@pytest.mark.parametrize("view", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_hook_that_writes_to_logits(view: bool) -> None:
    """A write to transposed logits materializes them. A write to a part of lazy logits would go unnoticed, so it is refused."""

    def prepare(model: Any) -> Any:
        write = lambda output: ((output[0] if view else output.transpose(1, 2)).mul_(0.5), None)[1]  # noqa: E731
        model.lm_head.register_forward_hook(lambda module, inputs, output: write(output))
        return torch.compile(model, backend="eager")

    if not view:
        check_equal(prepare, output_loss)
        return
    with pytest.raises(RuntimeError, match="logits that were modified in place"):
        step(apply_cce(tiny_llama()), prepare, output_loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOGITS_USES)
def test_lazy_logits_match_real_logits(name: str) -> None:
    prepare, loss_of, made = LOGITS_USES[name]
    check_equal(prepare, loss_of)
    ours = apply_cce(tiny_llama())
    with logits_made(model=ours) as seen:
        step(ours, prepare, loss_of)
    assert bool(seen) == (stats(ours).materialized > 0) == made


def rank_of(values: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def ranks(logits: Any) -> Any:
        at = values(logits).gather(-1, batch()["labels"].clamp(min=0)[..., None])
        return (values(logits) > at).sum(-1), (values(logits) >= at).sum(-1)

    return ranks


def kept_by_top_k(logits: Any) -> Any:
    values, ids = logits.topk(5)
    return (logits >= values[..., -1:]).sum(-1), (values.diff() <= 0).all(-1), ids


COMPARISONS: dict[str, Callable[[Any], Any]] = {
    "rank of a logit": rank_of(lambda z: z),
    "rank of a log-probability": lambda z: rank_of(lambda log_p: log_p)(z.float().log_softmax(-1)),
    "the maximum": lambda z: (z == z.max(-1, keepdim=True).values).sum(-1),
    "five largest": kept_by_top_k,
    "of a part": lambda z: (lambda part: (part == part.max(-1, keepdim=True)[0]).sum(-1))(z[:, :-1]),
    "the maximum of computed logits": lambda z: ((z.abs() >= 0).all(-1), (z == z.amax(-1, keepdim=True)).sum(-1)),
    "values that change": lambda z: (
        z.gather(-1, INDEX).sub_(100), z.max(-1)[0].add_(100), z.topk(3).values.div_(0.1), z > 0,
    )[3],
    "ids that change": lambda z: (lambda ids: (z.gather(-1, ids), ids.zero_(), z > 0)[2])(INDEX.clone()),
    "the most likely against the maximum": lambda z: z.gather(-1, z.argmax(-1, keepdim=True)) == z.max(-1, keepdim=True)[0],
    "entries against the five largest": lambda z: (
        lambda top: (z.gather(-1, top.indices[..., 1:2]) == top.values[..., 1:2], z.gather(-1, top.indices) == top.values)
    )(z.topk(5)),
    "the maximum after no entries": lambda z: (z.gather(-1, INDEX[..., :0]), z == z.max(-1, keepdim=True)[0])[1].sum(-1),
    "by rows of computed logits": lambda z: (
        lambda flat: (flat > 0, flat[torch.arange(len(flat)), flat.argmax(-1)] == flat.max(-1)[0])
    )(z.flatten(0, 1)),
}  # fmt: skip
INDEX = torch.full((*batch()["labels"].shape, 1), 7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("prepare", [unchanged, softcapped], ids=["logits", "softcap"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_single_logits_equal_full_logits(name: str, prepare: Prepared, training: bool) -> None:
    found = []
    for model in twins():
        with torch.set_grad_enabled(training):
            counts = COMPARISONS[name](prepare(model.train(training))(**batch()).logits)
            found.append(counts if isinstance(counts, tuple) else (counts,))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_single_logits_equal_full_logits_in_bfloat16(training: bool) -> None:
    """Which logits are equal depends on rounding, but no logit differs from itself, and the largest are sorted."""
    model = softcapped(apply_cce(tiny_llama().bfloat16())).train(training)
    with torch.set_grad_enabled(training):
        above, at_least = COMPARISONS["rank of a logit"](model(**batch()).logits)
        kept, is_sorted, _ = kept_by_top_k(model(**batch()).logits)
    assert (above < at_least).all() and (kept >= 5).all() and is_sorted.all()


def test_top_k_with_masked_entries() -> None:
    """A bias of minus infinity gives logits without a gradient, not NaN."""
    model = apply_cce(tiny_llama())
    bias = torch.zeros(99).index_fill_(0, torch.arange(2, 99), -torch.inf)
    values = (model(**batch()).logits + bias).topk(3).values
    assert values[..., :2].isfinite().all() and (values[..., 2] == -torch.inf).all()


def test_trainable_bias_after_head_needs_full_logits() -> None:
    """As in ESM's masked LM; no supported class has one."""

    def prepare(model: Any) -> Any:
        biased(model).bias.requires_grad_()
        return model

    with cce_warnings() as messages:
        check_equal(prepare, output_loss)
    assert len(messages) == 1 and "fell back to full logits: add needs the full logits" in messages[0]


def test_model_in_reentrant_checkpoint() -> None:
    check_equal(in_a_reentrant_checkpoint, output_loss)


def test_lazy_gradient_sums_and_reads() -> None:
    grads: list[list[Any]] = [[], []]
    for model, seen in zip(twins(), grads, strict=True):
        outputs = model(**batch())
        lse = outputs.logits.logsumexp(-1).mean()
        for loss in (outputs.loss, lse, outputs.loss + 2 * lse):
            seen += torch.autograd.grad(loss, outputs.logits, retain_graph=True)
        seen.append(seen[0] + seen[1])
        seen.append(seen[0] + torch.ones_like(seen[0]))
    assert all(isinstance(x, LazyGrad) for x in grads[1][:4])
    assert torch.equal(grads[1][0].clone().materialize(), grads[1][0] * 1.0)
    for position, (expected, found) in enumerate(zip(*grads, strict=True)):
        assert found.shape == expected.shape and found.dtype is expected.dtype
        assert_accurate(found * 1.0, expected, expected, f"gradient {position}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepare", [unchanged, softcapped], ids=["logits", "softcap"])
def test_second_derivative_raises_or_is_correct(prepare: Prepared) -> None:
    plain, ours = twins()
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
    assert_all_accurate(found[1], found[0], found[0], "second derivative")


def test_weight_changed_before_backward_or_reading_a_kept_gradient_raises() -> None:
    ours = apply_cce(tiny_llama())
    outputs = ours(**batch())
    outputs.logits.retain_grad()
    outputs.loss.backward(retain_graph=True)
    with torch.no_grad():
        ours.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.loss.backward()
    with pytest.raises(RuntimeError, match="have changed since"):
        outputs.logits.grad.norm()


def test_logits_computed_before_a_step_can_be_read_after_it() -> None:
    plain, ours = twins()
    sums = []
    for model in (plain, ours):
        outputs = model(**batch())
        outputs.loss.backward()
        outputs.logits.cos()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        sums.append(outputs.logits.sum())
    assert_accurate(sums[1], sums[0], sums[0], "sum")


def test_weights_are_compared_only_after_a_step(spy: Any) -> None:
    """The comparison synchronizes with the GPU."""
    calls = spy(recipe, "sample_of")
    ours, other = apply_cce(tiny_llama()), torch.nn.Linear(2, 2)
    outputs = ours(**batch())
    (outputs.loss + outputs.logits.logsumexp(-1).mean()).backward()
    assert len(calls) == 1
    torch.optim.SGD(other.parameters()).step()
    with torch.no_grad():
        ours.lm_head.weight.data[0, 0] = torch.nan  # compares as unequal to itself, but was there before the next call
    kept = ours(**batch()).logits
    torch.optim.SGD(other.parameters()).step()
    kept.argmax(-1)  # raises if the weight seems to have changed
    assert len(calls) == 3
    assert torch.equal(kept[..., 1:], kept.materialize()[..., 1:])  # a part of the weight


def test_kept_logits_do_not_keep_the_model() -> None:
    ours = apply_cce(tiny_llama())
    reference, kept = weakref.ref(ours), ours(**batch()).logits.detach()
    del ours
    gc.collect()
    assert reference() is None and torch.isfinite(kept.logsumexp(-1)).all()


def test_step_that_leaves_no_trace_in_version_counters_raises() -> None:
    class Optimizer(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad)

    ours, other = apply_cce(tiny_llama()), apply_cce(tiny_llama())
    outputs, kept = ours(**batch()), other(**batch())
    outputs.loss.backward()
    optimizer = Optimizer(ours.parameters())
    optimizer.step()
    with pytest.raises(RuntimeError, match="have changed since"):
        outputs.logits.sum()
    assert torch.isfinite(kept.logits.sum())  # of a model that this optimizer does not train


def test_evaluation_logits_read_after_the_weights_were_exchanged_raise() -> None:
    """Libraries put an average of the weights into the model for an evaluation, and take it out again, through ``.data``."""
    ours = apply_cce(tiny_llama()).eval()
    own = ours.lm_head.weight.detach().clone()
    ours.lm_head.weight.data.mul_(0.5)
    with torch.no_grad():
        read, kept = (ours(**batch()).logits for _ in range(2))
    values = read + 0.0
    ours.lm_head.weight.data.copy_(own)
    assert torch.equal(read + 0.0, values)
    with pytest.raises(RuntimeError, match="have changed since"):
        kept.argmax(-1)


def test_changes_past_autograd_raise() -> None:
    logits = apply_cce(tiny_llama())(**batch()).logits
    with pytest.raises(RuntimeError, match=r"detach_\(\) or \.data"):
        logits.detach_()
    with pytest.raises(RuntimeError, match=r"detach_\(\) or \.data"):
        logits.data = torch.zeros(logits.shape)


LOSSES: dict[str, Loss] = {
    "loss": output_loss,
    "logsumexp": lambda o: o.logits.logsumexp(-1).mean(),
    "log-probabilities": lambda o: o.logits.log_softmax(-1).gather(-1, INDEX).mean(),
    "entropy": lambda o: (o.logits.softmax(-1) * o.logits.log_softmax(-1)).sum(-1).mean(),
    "topk": lambda o: o.logits.topk(3).values.mean(),
    "gather": lambda o: (o.logits.gather(-1, INDEX) - o.logits.logsumexp(-1, True)).mean(),
    "top": lambda o: (o.logits.topk(3).values - o.logits.logsumexp(-1, True)).mean(),
    "logsumexp first": lambda o: -(o.logits.logsumexp(-1, True) - o.logits.gather(-1, INDEX)).mean(),
    "rows": lambda o: sum(row.log_softmax(-1).gather(-1, i).mean() for row, i in zip(o.logits, INDEX, strict=True)),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("token_stats", [False, True])
def test_backward_frees_graph(loss_of: Loss, token_stats: bool) -> None:
    ours = apply_cce(tiny_llama(), token_stats=token_stats)
    outputs = ours(**batch())
    loss, kept = loss_of(outputs), weakref.ref(outputs.logits.recipe.hidden_states.untyped_storage())
    del outputs
    loss.backward()
    assert kept() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradient_kept_by_logits_without_a_graph_is_no_reference_cycle() -> None:
    """A checkpoint with use_reentrant=True detaches its inputs in the same way."""
    logits = apply_cce(tiny_llama())(input_ids=batch()["input_ids"]).logits.detach().requires_grad_()
    logits[:, 1:].log_softmax(-1).gather(-1, INDEX[:, 1:]).mean().backward()
    assert isinstance(logits.grad, LazyGrad)
    kept = weakref.ref(logits)
    gc.disable()
    try:
        del logits
        assert kept() is None
    finally:
        gc.enable()


def write_to(leaf: Tensor) -> None:
    with torch.no_grad():
        leaf.mul_(0.5)
    leaf.square().mean().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", [lambda z: z - z.logsumexp(-1, keepdim=True), lambda z: z.sigmoid().sum(), write_to])
def test_a_leaf_of_logits_is_no_reference_cycle(use: Callable[[Tensor], Any]) -> None:
    leaf = apply_cce(tiny_llama())(**batch()).logits.detach().requires_grad_()
    use(leaf)
    kept = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert kept() is None


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_is_added_to_a_dense_one() -> None:
    """Autograd adds in place, as after zero_grad(set_to_none=False)."""
    plain, patched = (model(input_ids=batch()["input_ids"]).logits.detach().requires_grad_() for model in twins())
    exact = plain.detach().double().requires_grad_()
    for logits in (plain, patched, exact):
        logits.grad = torch.ones(logits.shape, dtype=logits.dtype)
        logits.log_softmax(-1).gather(-1, INDEX).mean().backward()
    assert_accurate(patched.grad, plain.grad, exact.grad, "gradient")


@pytest.mark.filterwarnings("ignore")
def test_utilities_of_accelerate() -> None:
    utils = pytest.importorskip("accelerate.utils")
    ours = apply_cce(tiny_llama())
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
@pytest.mark.usefixtures("one_rank")
def test_ddp(options: Any) -> None:
    check_equal(lambda model: nn.parallel.DistributedDataParallel(model, **options), output_loss)
    ours = apply_cce(tiny_llama())
    wrapped = nn.parallel.DistributedDataParallel(ours, **options)
    with logits_made(model=ours) as made:
        outputs = wrapped(**batch())
        outputs.loss.backward()
    assert made == [] and stats(ours).fused == 1 and torch.is_tensor(outputs.logits)
    assert torch.equal(outputs.logits.argmax(-1), outputs.logits.materialize().argmax(-1))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["python", "c++"])
def test_collective_that_writes_into_logits(how: str) -> None:
    """With one process, gathering zeros into the logits sets them to zero. A collective that only reads them changes nothing."""
    outputs, zeros = apply_cce(tiny_llama())(**batch()), torch.zeros(2, 24, 99)
    logits, part = outputs.logits.detach(), outputs.logits[:, 1:]
    torch.distributed.all_gather_into_tensor(zeros.clone(), logits)
    assert torch.equal(part.argmax(-1), logits.argmax(-1)[:, 1:])
    if how == "python":
        torch.distributed.all_gather_into_tensor(logits, zeros)
    else:
        torch.distributed.group.WORLD._allgather_base(logits, zeros).wait()
    expected = zeros.logsumexp(-1)
    for each in (logits, outputs.logits):
        assert_accurate(each.logsumexp(-1), expected, expected, "logsumexp")
    with pytest.raises(RuntimeError, match="may share memory"):
        part.logsumexp(-1)


# Hooks on the gradient of the logits, and who retains it
GRADIENT_HOOKS: dict[str, Callable[[Any, Callable[[Tensor], Any]], Any]] = {
    "module": lambda model, see: model.lm_head.register_full_backward_hook(lambda m, i, o: see(o[0])),
    "module, before": lambda model, see: model.lm_head.register_full_backward_pre_hook(lambda m, o: see(o[0])),
    "tensor": lambda model, see: model.lm_head.register_forward_hook(lambda m, i, x: (x.register_hook(see), None)[1]),
    "every module": lambda model, see: register_module_full_backward_hook(
        lambda m, i, o: see(o[0]) if m is model.lm_head else None
    ),
}


@pytest.mark.parametrize("register", GRADIENT_HOOKS.values(), ids=GRADIENT_HOOKS)
def test_head_hook_sees_logits_gradient(register: Callable[..., Any]) -> None:
    """A hook sees the gradient at every step. It is computed only if it is read, and a warning names the first reader."""
    plain, ours = twins()
    seen: dict[Any, list[Tensor]] = {plain: [], ours: []}
    with cce_warnings() as messages:
        for model in (plain, ours, ours):
            handle = register(model, seen[model].append)
            try:
                model(**batch()).loss.backward()
            finally:
                handle.remove()
    assert (len(seen[plain]), len(seen[ours])) == (1, 2)
    assert messages == [] and stats(ours).fused == 2 and stats(ours).materialized == 0
    for number, gradient in enumerate(seen[ours]):
        with cce_warnings() as messages:
            assert_accurate(gradient, seen[plain][0], seen[plain][0], "gradient of the logits")
        assert number or "of their gradient)" in messages[0]


@pytest.mark.parametrize("on_outputs", [False, True], ids=["in the head", "of outputs.logits"])
def test_retain_grad_keeps_the_gradient(on_outputs: bool) -> None:
    kept: list[Tensor] = []
    for model in twins():
        if not on_outputs:
            on_head(lambda module, inputs, output: (output.retain_grad(), kept.append(output), None)[2])(model)
        outputs = model(**batch())
        if on_outputs:
            outputs.logits.retain_grad()
            kept.append(outputs.logits)
        outputs.loss.backward()
    expected, found = (logits.grad for logits in kept)
    assert found.shape == expected.shape and expected.any()
    assert_accurate(found * 1.0, expected, expected, "kept")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change", [lambda g: g / 2, lambda g: g.clamp(-1e-3, 1e-3), lambda g: torch.cat([g[:1], 2 * g[1:]])]
)
def test_hook_computes_with_the_gradient_during_a_gradient_of_the_logits(change: Callable[[Tensor], Tensor]) -> None:
    """``torch.autograd.grad`` of the logits turns off Python's overrides, also in hooks."""
    grads = []
    for model in twins():
        outputs = model(**batch())
        outputs.logits.register_hook(change)
        grads.append(torch.autograd.grad(outputs.loss, [outputs.logits, model.lm_head.weight]))
    assert_all_accurate([grad * 1.0 for grad in grads[1]], grads[0], grads[0], "gradient")


@pytest.mark.filterwarnings("ignore")
def test_gradient_of_logits_that_were_modified_in_place() -> None:
    grads = []
    for model in twins():
        logits = model(**batch()).logits
        logits.mul_(0.5)
        grads.append(torch.autograd.grad(logits.logsumexp(-1).square().sum(), inputs=[logits])[0])
    assert_accurate(grads[1], grads[0], grads[0], "gradient")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizer_of_detached_logits(set_to_none: bool) -> None:
    losses: list[list[float]] = [[], []]
    for model, found in zip(twins(), losses, strict=True):
        logits = model(**batch()).logits.detach().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=1.0)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = logits.logsumexp(-1).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert_accurate(*(torch.tensor(losses[i]) for i in (1, 0, 0)), "losses")


def test_hook_on_probabilities_whose_product_is_known_raises() -> None:
    logits = apply_cce(tiny_llama())(**batch()).logits
    p = logits.softmax(-1)
    assert (p * logits.log_softmax(-1)).sum(-1).requires_grad
    for ask in (p.retain_grad, lambda: p.register_hook(print), lambda: torch.autograd.grad(logits.sum(), [p])):
        with pytest.raises(RuntimeError, match="register hooks before the product"):
            ask()


@pytest.mark.parametrize("with_gradient", [True, False])
def test_write_after_a_function_has_saved_the_logits_raises(with_gradient: bool) -> None:
    logits = apply_cce(tiny_llama())(**batch()).logits
    loss = checkpoint(mean, logits, use_reentrant=True)
    with torch.set_grad_enabled(with_gradient):
        logits.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Reading the logits of a training call gives a warning about the cost
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda logits: logits.topk(70), "topk"),
        (lambda logits: torch.softmax(logits, -2), "softmax"),
        (lambda logits: logits[..., 3], "__getitem__"),
        (lambda logits: logits.float().detach().cpu().numpy(), "cpu"),
    ],
)
def test_reading_logits_warns_once(read: Callable[[Any], Any], name: str) -> None:
    model = apply_cce(tiny_llama())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            outputs = model(**batch())
            outputs.loss.backward()
            read(outputs.logits)
    (ours,) = [w for w in caught if "hf_cce" in str(w.message)]
    assert f"outputs.logits of a training call was used ({name})" in str(ours.message)
    assert ours.filename == __file__  # the line that reads, not one in torch or hf_cce
    assert (stats(model).fused, stats(model).materialized, stats(model).read) == (3, 3, 3)


def test_explicit_materialize_does_not_warn() -> None:
    model = apply_cce(tiny_llama())
    with cce_warnings() as messages:
        outputs = model(**batch())
        print(outputs.logits, outputs.logits.shape, outputs.logits.float().dtype)
        outputs.logits.materialize().argmax(-1)
    assert messages == [] and (stats(model).materialized, stats(model).read) == (1, 0)
