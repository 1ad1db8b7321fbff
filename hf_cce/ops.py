"""The operators behind the loss, registered with torch.library: schema, implementation by device, fake tensors, autograd.

``hf_cce::logit_stats`` gives per-token statistics of logits that are never written, and any gradient of them;
``hf_cce::cross_entropy`` gives one scalar loss. Both take two-dimensional, checked inputs: see ``hf_cce.loss``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_cce import flops, portable
from hf_cce.choice import choose_implementation, kernels_module, module_for, on_device_of, survey, without_autocast
from hf_cce.filter_state import FilterState


@torch.library.custom_op("hf_cce::logit_stats", mutates_args=())
def logit_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    want_mean: bool,
    want_entropy: bool,
    want_log_sum_sq: bool,
    want_top1: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lse, label_logit, mean_logit, entropy, log_sum_sq, is_top1), each [N], empty where not wanted. ``softcap`` 0 is none."""
    module, v = module_for(hidden, implementation), weight.shape[0]
    # Autocast is settled by the caller; inside, a cast of what is already an accumulator would lose it.
    with without_autocast(hidden), on_device_of(hidden):
        survey(labels, ignore_index, v, None, 1.0, module)
        return tuple(
            module.logit_stats(
                hidden, weight, bias, labels, ignore_index, logit_scale, softcap,
                want_mean, want_entropy, want_log_sum_sq, want_top1, memory_budget,
            )
        )  # fmt: skip


@logit_stats.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    want_mean, want_entropy, want_log_sum_sq, want_top1 = others[6:10]
    n, wide = hidden.shape[0], portable.accumulation_dtype(hidden.dtype)

    def vector(wanted: bool = True, dtype: torch.dtype = wide) -> Tensor:
        return hidden.new_empty(n if wanted else 0, dtype=dtype)

    return (
        vector(),
        vector(),
        vector(want_mean),
        vector(want_entropy),
        vector(want_log_sum_sq),
        vector(want_top1, torch.bool if want_top1 else wide),
    )


def _logit_stats_backward(
    grad_lse: Tensor,
    grad_label: Tensor,
    grad_mean: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of hidden [N, D], of weight [V, D], of bias [V]), each in its input's dtype, empty where not needed."""
    module = module_for(hidden, implementation)
    with without_autocast(hidden), on_device_of(hidden):
        return tuple(
            module.logit_stats_backward(
                grad_lse, grad_label, grad_mean, grad_entropy, hidden, weight, bias, labels, lse, entropy,
                ignore_index, logit_scale, softcap, need_hidden, need_weight, need_bias, memory_budget,
            )
        )  # fmt: skip


def _fake_gradients(
    hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        weight.new_empty(weight.shape[0] if need_bias else 0),
    )


logit_stats_backward = torch.library.custom_op("hf_cce::logit_stats_backward", _logit_stats_backward, mutates_args=())


@logit_stats_backward.register_fake
def _(
    g1: Tensor, g2: Tensor, g3: Tensor, g4: Tensor, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return _fake_gradients(hidden, weight, *others[7:10])


def _save_stats(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, ignore_index, logit_scale, softcap, want_mean, want_entropy = inputs[:9]
    ctx.set_materialize_grads(False)
    # Nor is what was not wanted: the gradient of an empty tensor would be read as one of N numbers.
    unwanted = [x for x, wanted in zip(output[2:4], (want_mean, want_entropy), strict=True) if not wanted]
    ctx.mark_non_differentiable(*unwanted, output[4], output[5])
    ctx.save_for_backward(hidden, weight, bias, labels, output[0], output[3] if want_entropy else None)
    ctx.options = (ignore_index, logit_scale, softcap)
    ctx.memory_budget, ctx.implementation = inputs[-2], inputs[-1]


def _stats_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_lse = torch.zeros_like(lse) if grads[0] is None else grads[0].contiguous()
    grad_label = torch.zeros_like(lse) if grads[1] is None else grads[1].contiguous()
    grad_mean, grad_entropy = (None if g is None else g.contiguous() for g in grads[2:4])
    dh, dw, db = torch.ops.hf_cce.logit_stats_backward(
        grad_lse, grad_label, grad_mean, grad_entropy, hidden, weight, bias, labels, lse, entropy,
        *ctx.options, need_hidden, need_weight, need_bias, ctx.memory_budget, ctx.implementation,
    )  # fmt: skip
    return (dh if need_hidden else None, dw if need_weight else None, db if need_bias else None, *[None] * 10)


logit_stats.register_autograd(_stats_gradients, setup_context=_save_stats)


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> Any:
    raise RuntimeError(
        "the fused loss has no second derivative; compute it with full logits (remove_cce(model), or torch's own "
        "cross_entropy), or drop create_graph=True"
    )


logit_stats_backward.register_autograd(_refuse_second_derivative)


# One scalar loss. It has a gradient path of its own because its upstream gradient is one number: the portable implementation
# then forms the gradients in the forward pass, and the kernels need no gradient vectors from PyTorch.


def _cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | None,
    divisor: float,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse [N], factor, and, empty where not needed or formed later, the gradients of hidden, weight and bias).

    The loss is the sum over tokens times ``factor``: one over ``divisor`` if that is positive, else over ``num_items`` if given,
    else over the number of labels that are not ignored; zero where that would divide by zero.
    """
    module, v = module_for(hidden, implementation), weight.shape[0]
    with without_autocast(hidden), on_device_of(hidden):
        factor = survey(labels, ignore_index, v, num_items, divisor, module)
        factor = factor.to(portable.accumulation_dtype(hidden.dtype))
        loss, lse, *gradients = module.cross_entropy(
            hidden, weight, bias, labels, factor, ignore_index, logit_scale, softcap,
            label_smoothing, z_loss, need_hidden, need_weight, need_bias, memory_budget,
        )  # fmt: skip
        return loss, lse, factor, *gradients


cross_entropy_op = torch.library.custom_op("hf_cce::cross_entropy", _cross_entropy, mutates_args=())


@cross_entropy_op.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wide = portable.accumulation_dtype(hidden.dtype)
    needs = others[9:12] if _forms_gradients(hidden, others[-1]) else (False, False, False)
    scalars = (hidden.new_empty((), dtype=wide) for _ in range(2))
    return (
        next(scalars),
        hidden.new_empty(hidden.shape[0], dtype=wide),
        next(scalars),
        *_fake_gradients(hidden, weight, *needs),
    )


def _forms_gradients(hidden: Tensor, implementation: str) -> bool:
    return choose_implementation(
        hidden.device, hidden.dtype, implementation
    ) == "portable" and portable.forms_gradients(hidden.dtype)


def _save_cross_entropy(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], formed: bool | None = None
) -> None:
    """``formed``: whether the gradients are among ``output``, where the caller knows."""
    hidden, weight, bias, labels = inputs[:4]
    _, lse, factor, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, labels, lse, factor)
    ctx.options, ctx.smoothing, ctx.z_loss = inputs[6:9], inputs[9], inputs[10]
    ctx.memory_budget, ctx.implementation = inputs[14], inputs[15]
    # Detached, since an output that knows its node and a node that holds the output would be a cycle.
    formed = _forms_gradients(hidden, ctx.implementation) if formed is None else formed
    ctx.gradients = [x.detach() for x in gradients] if formed else None


def _cross_entropy_gradients(
    ctx: Any,
    grad: Tensor | None,
    *_: Tensor | None,
    needs: tuple[bool, ...] | None = None,
    tokens: Tensor | None = None,
) -> tuple[Any, ...]:
    nothing_more = (None,) * 13
    if grad is None:
        return (None, None, None, *nothing_more)
    hidden, weight, bias, labels, lse, factor = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3] if needs is None else needs
    if tokens is not None:  # the order that lse is in
        lse = torch.empty_like(lse).scatter_(0, tokens, lse)
    plain = not traced(grad)
    if ctx.gradients is not None:
        # The sum over no tokens is a constant, also where it is divided by their number and infinity comes from upstream.
        grad = torch.where((labels == ctx.options[0]).all(), 0.0, grad)
    if ctx.gradients is not None and not plain:
        gradients = [x * grad.to(x.dtype) for x in ctx.gradients]
    elif ctx.gradients is not None and not torch.is_grad_enabled():
        # Handed out once, scaled in place: a copy would hold the weight's gradient twice. A second backward recomputes.
        gradients, ctx.gradients = ctx.gradients, None
        if hidden.device.type != "cpu" or float(grad) != 1.0:
            gradients = [x.mul_(grad.to(x.dtype)) for x in gradients]
    else:
        # With create_graph=True gradients are enabled here, and it is the operator that refuses the second derivative.
        direct = plain and not torch.is_grad_enabled()
        backward: Any = _logit_stats_backward if direct else torch.ops.hf_cce.logit_stats_backward
        module = module_for(hidden, ctx.implementation) if direct else portable
        with on_device_of(hidden):
            vectors = module.token_gradients(grad, factor, lse, ctx.smoothing, ctx.z_loss)
        gradients = backward(
            *vectors, None, hidden, weight, bias, labels, lse, None, *ctx.options, *needs,
            ctx.memory_budget, ctx.implementation,
        )  # fmt: skip
    return (*(x if need else None for x, need in zip(gradients, needs, strict=True)), *nothing_more)


cross_entropy_op.register_autograd(_cross_entropy_gradients, setup_context=_save_cross_entropy)
flops.enter()


# PyTorch's own and private (2.13 and 2.15 have it): a release without it loses is_grads_batched=True, and nothing else.
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)


def traced(x: Tensor) -> bool:
    """Whether somebody looks on who wants to see one operator: the compiler, a tensor subclass, a dispatch mode, vmap."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or is_in_torch_dispatch_mode():
        return True
    return bool(_is_batched(x))  # is_grads_batched=True: neither its number nor its memory can be read


# Which way a loss takes, by measurement on an H200 (hf_cce/bench/results). Tokens times hidden size times vocabulary from which
# the filter is worth its overhead of some 0.3 ms:
FILTER_FROM = 1.5e11
FILTER_TOKENS = 2048  # fewer make too few blocks to fill a GPU with
# Bytes of float32 logits up to which the way of fewest launches wins:
DENSE_BYTES = 256 << 20
# and of logits in the 16 bits of the inputs, where those would be more. As in PyTorch's own loss, they are rounded.
NARROW_BYTES = 256 << 20
# Logits up to which PyTorch's own operators are the fastest, as the host is the slower side. They take 12 bytes each, of which
# the weight's gradient, made last, takes some over:
EAGER_LOGITS = 42_000_000
# and, as rows of an odd number of logits are multiplied several times as slowly, tokens times hidden size times vocabulary:
EAGER_WORK_ODD = 1.6e10


class _CrossEntropy(torch.autograd.Function):
    """The operator without the operator: the same functions, called directly.

    torch.library's Python operators with autograd cost some 250 µs of host time forward and backward, several times what
    the kernels of a small batch need. Tracing takes the operator; see ``cross_entropy``.
    """

    @staticmethod
    def forward(ctx: Any, gradient_filter: Any, state: FilterState | None, *inputs: Any) -> Tensor:
        ctx.filtered = ctx.stored = ctx.dense = ctx.formed = ctx.tokens = None
        hidden, weight, bias, labels, num_items, divisor, ignore_index, scale, softcap, smoothing, z_loss = inputs[:11]
        need_hidden, need_weight, need_bias, budget, implementation = inputs[11:]
        if (
            smoothing
            or not (need_hidden or need_weight)
            or choose_implementation(hidden.device, hidden.dtype, implementation) != "triton"
        ):
            output = _cross_entropy(*inputs)
            _save_cross_entropy(ctx, inputs, output)
            return output[0]
        kernels, v = kernels_module(), weight.shape[0]
        with without_autocast(hidden), on_device_of(hidden):
            result, tau, n, work = None, None, labels.numel(), hidden.numel() * v
            # "auto" promises an error, and keeps the promise by measurement: not without a state.
            wanted = gradient_filter is not None and (state is not None or gradient_filter != "auto")
            if wanted and not need_bias and work >= FILTER_FROM and n >= FILTER_TOKENS:
                ctx.state, ctx.steered = FilterState() if state is None else state.on(hidden.device), state is not None
                tau = ctx.tau = ctx.state.threshold(gradient_filter, hidden)
            dense = dense_dtype(n, hidden.shape[1], v, hidden.dtype, budget, tau is not None)
            # First, so that the GPU has work while the host goes on: it needs no labels.
            logits = kernels.dense_logits(hidden, weight, bias, dense) if dense and tau is None else None
            needs = (need_hidden, need_weight, need_bias)
            factor = survey(labels, ignore_index, v, num_items, divisor, kernels)
            common = (hidden, weight, bias, labels, factor, ignore_index, scale, softcap, z_loss)
            if tau is not None:
                result = kernels.filtered_cross_entropy(*common, need_weight, budget, ctx.state.vocabulary(weight))
            if result is not None:
                loss, ctx.filtered = result
                lse = ctx.filtered.lse
                ctx.tokens = ctx.filtered.order.token_perm  # whose the statistics are
                ctx.state.keep_vocabulary(weight, ctx.filtered.vocabulary)
            elif dense:
                if logits is None:  # the filter had no room
                    logits = kernels.dense_logits(hidden, weight, bias, dense)
                loss, lse, ctx.dense = kernels.dense_cross_entropy(logits, *common[2:])
            elif not need_bias and (result := kernels.grouped_cross_entropy(*common, need_hidden, need_weight, budget)):
                loss, lse, ctx.formed = result
            elif (result := kernels.stored_cross_entropy(*common, need_weight and not need_bias, budget)) is not None:
                loss, lse, ctx.stored = result
            else:
                loss, lse, *_ = kernels.cross_entropy(*common[:8], 0.0, z_loss, *needs, budget)
        _save_cross_entropy(ctx, inputs, (loss, lse, factor), formed=False)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs, grad = ctx.needs_input_grad[2:5], grads[0]
        # Used once, since their memory is overwritten; a second backward recomputes.
        filtered, stored, dense, formed = ctx.filtered, ctx.stored, ctx.dense, ctx.formed
        ctx.filtered = ctx.stored = ctx.dense = ctx.formed = None
        in_full = partial(_cross_entropy_gradients, ctx, *grads, needs=needs, tokens=ctx.tokens)
        if (filtered is stored is dense is formed is None) or grad is None or torch.is_grad_enabled() or traced(grad):
            return None, None, *in_full()
        hidden, weight, bias, labels, lse, factor = ctx.saved_tensors
        kernels = kernels_module()
        gradients: Sequence[Tensor | None]
        with without_autocast(grad), on_device_of(hidden):
            if filtered is not None:
                measure = ctx.steered and ctx.state.measure()  # nobody would read what an unsteered call measures
                dh, dw, report = kernels.filtered_gradients(
                    filtered, grad, factor, weight, ctx.tau, *ctx.options[1:], ctx.z_loss, *needs[:2], measure,
                    in_full if ctx.state.probe_only() else None, ctx.state.next_tau,
                )  # fmt: skip
                ctx.state.report(report)
                gradients = [dh, dw, None]
            elif formed is not None:
                gradients = kernels.formed_gradients(formed, grad)
            elif dense is not None:
                gradients = kernels.dense_gradients(
                    dense, grad, factor, hidden, weight, bias, labels, *ctx.options, ctx.z_loss, *needs
                )
            else:
                vectors = kernels.token_gradients(grad, factor, lse, 0.0, ctx.z_loss)
                gradients = kernels.logit_stats_backward(
                    *vectors, None, hidden, weight, bias, labels, lse, None, *ctx.options, *needs, ctx.memory_budget, stored
                )  # fmt: skip
        return None, None, *(x if need else None for x, need in zip(gradients, needs, strict=True)), *[None] * 13


def dense_dtype(n: int, d: int, v: int, dtype: torch.dtype, budget: int, filtered: bool) -> torch.dtype | None:
    """That of a loss's real logits, if these fit: float32, or, of 16-bit inputs that no filter is for, their own; else None."""
    narrow = dtype.itemsize < 4 and not filtered
    for kind, most in ((torch.float32, DENSE_BYTES), *([(dtype, NARROW_BYTES)] if narrow else [])):
        # Rows are aligned, and the gradient of the hidden states is of two products, in float32, where V is not.
        if 0 < n * (kind.itemsize * (v + 15) + 4 * d * (v % 8 > 0)) <= min(budget, most):
            return kind
    return None


def few_tokens(n: int, hidden: Tensor, weight: Tensor, budget: int, implementation: str) -> bool:
    """Whether a step waits for the host alone: then nothing is faster than what PyTorch does in C++, if it fits the budget."""
    logits = n * weight.shape[0]
    odd = weight.shape[0] % 2 and n * weight.numel() > EAGER_WORK_ODD
    if odd or not (0 < logits <= EAGER_LOGITS and hidden.is_cuda and implementation == "auto"):
        return False
    taken_over = 2 * weight.numel() if weight.requires_grad and torch.is_grad_enabled() else 0
    return 12 * logits - taken_over <= budget and hidden.dtype != torch.float64


def _full_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | None,
    divisor: float,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The same scalar from real logits, as Transformers computes it, by PyTorch's own operators."""
    v = weight.shape[0]
    with without_autocast(hidden), on_device_of(hidden):
        # First, so that the GPU has work while the host goes on; the labels are looked at before anything depends on them.
        logits = F.linear(hidden, weight, bias).float()
        if logit_scale != 1.0:
            logits = logits * logit_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        factor = survey(labels, ignore_index, v, num_items, divisor, module_for(hidden, "auto"))
        total = F.cross_entropy(
            logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
        if z_loss:
            total = total + z_loss * logits.logsumexp(1).square().masked_fill(labels == ignore_index, 0.0).sum()
        return total * factor.to(total.dtype)


def cross_entropy(
    hidden: Tensor, *others: Any, gradient_filter: Any = None, state: FilterState | None = None
) -> Tensor:
    """The scalar of ``hf_cce::cross_entropy``: through the dispatcher where somebody is tracing, else directly."""
    if traced(hidden):
        return torch.ops.hf_cce.cross_entropy(hidden, *others)[0]
    weight, labels, budget, implementation = others[0], others[2], others[-2], others[-1]
    if few_tokens(labels.numel(), hidden, weight, budget, implementation):
        return _full_logits(hidden, *others[:10])
    return _CrossEntropy.apply(gradient_filter, state, hidden, *others)
