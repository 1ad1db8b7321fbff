"""The custom operators of the loss (torch.library), and the autograd function that runs a strategy in eager mode.

``hf_cce::logit_stats`` returns differentiable per-token statistics, ``hf_cce::cross_entropy`` a scalar loss. Traced code calls
them. Eager code does not, because a Python operator of torch.library costs more host time than all kernels of a small batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_cce import dispatch, flops, reference, strategies
from hf_cce.filter_state import FilterState
from hf_cce.quantized import dense
from hf_cce.spec import Divisor, Inputs, LogitStats, LossSpec, TokenGrads, WantedStats, accumulation_dtype
from hf_cce.strategies import InputGrads, Saved, Strategy, Upstream

AUTO = -1.0  # stands for gradient_filter="auto" in a float argument


def compute_context(x: Tensor) -> ExitStack:
    """Disable autocast, which would cast accumulators, and make the device of ``x`` current, which Triton launches on.

    Each is entered only if it changes something, because entering costs microseconds of host time.
    """
    stack = ExitStack()
    if torch.is_autocast_enabled(x.device.type):
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        stack.enter_context(torch.cuda.device(x.device))
    return stack


def _aligned_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Inputs:
    """Return ``Inputs`` whose labels start at a multiple of 16 bytes; for others Triton compiles another version of each kernel.

    The loss of Transformers passes a view, ``labels[:, 1:]``, if the batch is one sequence.
    """
    return Inputs(hidden, weight, bias, labels.clone() if labels.data_ptr() % 16 else labels)


def _forward(strategy: Strategy, x: Inputs) -> tuple[Strategy, tuple[Tensor, ...], Saved]:
    """Return (strategy, outputs, tensors to save). The strategy is replaced by a PyTorch one if a kernel does not compile."""

    def compute(triton: bool) -> tuple[Strategy, tuple[Tensor, ...], Saved]:
        used = strategy if triton == strategy.triton else strategy.without_kernels()
        slabs = used.reads_weight_in_slabs and not triton
        return used, *used.forward(x if slabs else x._replace(weight=dense(x.weight)))

    with compute_context(x.hidden), strategies.when_cold(strategy, x):
        return strategies.with_fallback(compute, strategy.triton, strategy.spec, x.hidden.device)


def _backward(
    strategy: Strategy, inputs: Inputs, saved: Saved, upstream: Upstream, spec: LossSpec, direct: bool
) -> InputGrads:
    """Return the gradients that ``spec`` needs. If not ``direct``, one custom operator computes them, for tracing."""

    def compute(triton: bool) -> InputGrads:
        x = inputs._replace(weight=dense(inputs.weight)) if triton else inputs
        if direct and triton == strategy.triton:
            gradients = strategy.backward(x, saved, upstream, spec.needs)
            if gradients is not None:
                return gradients
        strategy.cache = None  # free it before the gradients are recomputed
        if direct:
            # Kernels that only turn logits into gradients may have run: recomputing needs those that also multiply.
            tiles = (
                triton
                and dispatch.choose_implementation(x.hidden.device, x.hidden.dtype, spec.implementation) == "triton"
            )
            return strategy.recompute(x, spec, saved, upstream, tiles)
        grads = strategy.token_grads(saved, upstream)
        return recompute_by_operator(x, spec, saved.in_token_order(), saved.entropy, grads)

    with compute_context(inputs.hidden):
        return strategies.with_fallback(compute, strategy.triton, strategy.spec, inputs.hidden.device)


# The fields of a LossSpec in the schemas of the operators
_OPTIONS = (
    "SymInt ignore_index, float logit_scale, float softcap, float label_smoothing, float z_loss, bool[3] needs, "
    "SymInt memory_budget, str implementation, float? gradient_filter, bool auto_budget"
)


def _options_of(spec: LossSpec) -> tuple[Any, ...]:
    *others, gradient_filter, auto_budget = spec
    return *others, AUTO if gradient_filter == "auto" else gradient_filter, auto_budget


def _spec_of(options: tuple[Any, ...]) -> LossSpec:
    spec = LossSpec(*options)
    return spec._replace(gradient_filter="auto") if spec.gradient_filter == AUTO else spec


@torch.library.custom_op(
    "hf_cce::logit_stats",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, bool want_mean, bool want_entropy, "
    f"bool want_log_sum_sq, bool want_top1, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def logit_stats(*arguments: Any) -> tuple[Tensor, ...]:
    """Return (lse, label_logit, mean_logit, entropy, log_sum_sq, is_top1), each [N], empty if not requested."""
    x, wanted, spec = _aligned_inputs(*arguments[:4]), WantedStats(*arguments[4:8]), _spec_of(arguments[8:])
    return tuple(_forward(dispatch.dispatch_fused_statistics(x, spec, wanted, keeps_logits=False), x)[1])


@logit_stats.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    acc_dtype, wanted = accumulation_dtype(hidden.dtype), (True, True, *others[3:7])
    dtypes = [*[acc_dtype] * 5, torch.bool if wanted[-1] else acc_dtype]
    sizes = [hidden.shape[0] if each else 0 for each in wanted]
    return tuple(hidden.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True))


@torch.library.custom_op(
    "hf_cce::logit_stats_backward",
    mutates_args=(),
    schema="(Tensor grad_lse, Tensor grad_label, Tensor? grad_mean, Tensor? grad_entropy, Tensor hidden, Tensor weight, "
    f"Tensor? bias, Tensor labels, Tensor lse, Tensor? entropy, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def logit_stats_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of hidden [N, D], weight [V, D] and bias [V] in the inputs' dtypes; empty where not needed."""
    grads, x, (lse, entropy) = TokenGrads(*arguments[:4]), _aligned_inputs(*arguments[4:8]), arguments[8:10]
    spec, device = _spec_of(arguments[10:]), x.hidden.device

    def compute(triton: bool) -> tuple[Tensor, ...]:
        return strategies.implementation(triton).logit_stats_backward(x, spec, lse, entropy, grads)

    triton = dispatch.choose_implementation(device, x.hidden.dtype, spec.implementation) == "triton"
    with compute_context(x.hidden):
        return strategies.with_fallback(compute, triton, spec, device)


def _fake_gradients(hidden: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor, Tensor, Tensor]:
    need_hidden, need_weight, need_bias = needs
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        weight.new_empty(weight.shape[0] if need_bias else 0),
    )


@logit_stats_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(arguments[4], arguments[5], _spec_of(arguments[10:]).needs)


def recompute_by_operator(
    x: Inputs, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs' gradients from those of the statistics in one operator, whose own backward raises."""
    return torch.ops.hf_cce.logit_stats_backward(*grads, *x, lse, entropy, *_options_of(spec))


def _only(needs: tuple[bool, ...], gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


def _save_stats(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    wanted, ctx.spec = WantedStats(*inputs[4:8]), _spec_of(inputs[8:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*strategies.Statistics(ctx.spec, wanted, False).non_differentiable_outputs(output))
    ctx.save_for_backward(*inputs[:4], output[0], output[3] if wanted.entropy else None)


def _stats_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    *inputs, lse, entropy = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    spec = ctx.spec._replace(needs=needs)
    gradients = recompute_by_operator(Inputs(*inputs), spec, lse, entropy, TokenGrads.of_stats(lse, grads))
    return (*_only(needs, gradients), *[None] * 15)


logit_stats.register_autograd(_stats_gradients, setup_context=_save_stats)


def refuse_second_derivative(*_: Any) -> Any:
    raise RuntimeError(
        "the fused loss has no second derivative; remove create_graph=True, or compute the loss with full logits "
        "(remove_cce(model), or torch's own cross_entropy)"
    )


logit_stats_backward.register_autograd(refuse_second_derivative)


# cudagraph_unsafe: the filter decides on the host at each step; a CUDA graph would replay the decisions of one step.
@torch.library.custom_op(
    "hf_cce::cross_entropy",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? num_items, float divisor, SymInt filter_state, "
    f"bool counted, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def cross_entropy_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Return (loss, lse [N], factor, grad of hidden, of weight, of bias); gradients not computed here are empty.

    The loss is the sum over the tokens times ``factor``: 1 / ``divisor`` if that is positive, else 1 / ``num_items`` if given
    (0 if ``num_items`` is 0), else 1 / the number of labels that are not ignored. ``filter_state`` is the handle of a
    FilterState, or 0; ``counted`` increments the counters of its model.
    """
    x, (num_items, divisor, filter_state, counted) = _aligned_inputs(*arguments[:4]), arguments[4:8]
    spec, state = _spec_of(arguments[8:]), FilterState.of(filter_state)
    if counted and state is not None and state.counters is not None:
        state.counters.calls += 1
        state.counters.fused += 1
    strategy, (loss,), saved = _forward(dispatch.dispatch_traced(x, spec, Divisor(num_items, divisor), state), x)
    gradients: InputGrads = (None, None, None)
    if dispatch.grads_in_forward(x.hidden.dtype) and any(spec.needs):
        gradients = _backward(strategy, x, saved, (torch.ones_like(loss),), spec, True)
    precomputed = [x.hidden.new_empty(0) if g is None else g.contiguous() for g in _only(spec.needs, gradients)]
    return loss, saved.in_token_order(), saved.factor, *precomputed


@cross_entropy_op.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    acc_dtype = accumulation_dtype(hidden.dtype)
    needs = _spec_of(others[6:]).needs if dispatch.grads_in_forward(hidden.dtype) else (False, False, False)
    loss, factor = (hidden.new_empty((), dtype=acc_dtype) for _ in range(2))
    return loss, hidden.new_empty(hidden.shape[0], dtype=acc_dtype), factor, *_fake_gradients(hidden, weight, needs)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, lse, factor, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], lse, factor)
    ctx.spec = _spec_of(inputs[8:])
    # Detached: an output refers to its grad_fn, so a grad_fn that holds the output would be a reference cycle.
    ctx.gradients = [g.detach() for g in gradients] if dispatch.grads_in_forward(inputs[0].dtype) else None


def _cross_entropy_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 18
    *inputs, lse, factor = ctx.saved_tensors
    x, needs = Inputs(*inputs), ctx.needs_input_grad[:3]
    spec = ctx.spec._replace(needs=needs)
    gradients: Any
    if ctx.gradients is not None and (needs_custom_op(grad) or not torch.is_grad_enabled()):
        grad = reference.zero_if_all_ignored(grad, x.labels, spec)
        gradients = [(g.to(grad.dtype) * grad).to(g.dtype) for g in ctx.gradients]
    else:
        # With create_graph=True, this operator's backward raises on a second derivative.
        grads = TokenGrads.of_loss(grad, factor, lse, spec)
        gradients = recompute_by_operator(x, spec, lse, None, grads)
    return (*_only(needs, gradients), *[None] * 15)


cross_entropy_op.register_autograd(_cross_entropy_gradients, setup_context=_save_cross_entropy)
flops.register()


def needs_custom_op(x: Tensor) -> bool:
    """Return True if a single custom op must be visible: to the compiler (traced), a tensor subclass or a dispatch mode."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or is_in_torch_dispatch_mode()


class _StrategyCall(torch.autograd.Function):
    """One call of a strategy. A second backward and a traced backward recompute the gradients."""

    @staticmethod
    def forward(
        ctx: Any, strategy: Strategy, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, ...]:
        x = _aligned_inputs(hidden, weight, bias, labels)
        strategy, outputs, saved = _forward(strategy, x)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*strategy.non_differentiable_outputs(outputs))
        ctx.save_for_backward(*x, *saved)
        ctx.strategy = strategy
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        given = [grad for grad in upstream if grad is not None]
        if not given:
            return (None,) * 5
        tensors = ctx.saved_tensors  # read once: activation checkpointing unpacks each saved tensor only once
        inputs, saved = Inputs(*tensors[:4]), Saved(*tensors[4:])
        strategy, needs = ctx.strategy, ctx.needs_input_grad[1:4]
        # With create_graph=True grad mode is enabled here, and the custom operator raises on a second derivative.
        direct = not torch.is_grad_enabled() and not any(map(needs_custom_op, given))
        gradients = _backward(strategy, inputs, saved, upstream, strategy.spec._replace(needs=needs), direct)
        return (None, *_only(needs, gradients), None)


def cross_entropy(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Tensor:
    """Return the scalar loss, through the custom operator if traced, else directly."""
    if needs_custom_op(x.hidden):
        handle = 0 if state is None else state.handle
        counted = torch.compiler.is_compiling()
        return torch.ops.hf_cce.cross_entropy(*x, *divisor, handle, counted, *_options_of(spec))[0]
    strategy = dispatch.dispatch(x, spec, divisor, state)
    if isinstance(strategy, strategies.FullLogits):
        with compute_context(x.hidden):
            return strategy.loss(x)
    return _StrategyCall.apply(strategy, *x)[0]


def statistics(
    x: Inputs, spec: LossSpec, wanted: WantedStats, with_lse: bool = True, state: FilterState | None = None
) -> tuple[Tensor, LogitStats]:
    """Return −log p(label) [N] and ``LogitStats``, through the custom operator if traced.

    Without ``with_lse``, logsumexp and the label's logit may be empty. A ``state`` enables the gradient filter.
    """
    if needs_custom_op(x.hidden):
        outputs = torch.ops.hf_cce.logit_stats(*x, *wanted, *_options_of(spec))
    else:
        strategy = dispatch.dispatch_statistics(x, spec, wanted, with_lse, state)
        if isinstance(strategy, strategies.FullLogits):
            with compute_context(x.hidden):
                return strategy.statistics(x, wanted, with_lse)
        outputs = _StrategyCall.apply(strategy, *x)
    stats = LogitStats(*outputs[:6])
    return outputs[6] if len(outputs) > 6 else stats.lse - stats.label_logit, stats
