"""The strategies to compute a loss, each with ``forward`` and ``backward``. ``hf_cce.dispatch`` picks one of them.

A strategy lives for one call. ``forward`` returns the outputs and the tensors that ``hf_cce.ops`` saves for autograd, and may
leave more in ``cache``. ``backward`` consumes the cache; without one it returns None, and the caller calls ``recompute``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import fallback, reference
from hf_cce.config import CCEWarning
from hf_cce.filter_state import FilterState
from hf_cce.spec import Divisor, Inputs, LogitStats, LossSpec, TokenGrads, Tokens, WantedStats, accumulation_dtype

InputGrads = Sequence[Tensor | None]  # of hidden, weight and bias; None or empty where not needed
Upstream = Sequence[Any]  # gradients of a strategy's outputs, or None
Needs = tuple[bool, bool, bool]  # which gradients this backward pass needs, possibly fewer than spec.needs
SUM = Divisor(number=1.0)
_MEAN_REDUCTION, _SUM_REDUCTION = 1, 2  # at::Reduction
T = TypeVar("T")


class Saved(NamedTuple):
    """Tensors that autograd saves in addition to the inputs; enough to recompute the gradients."""

    lse: Tensor  # [N]
    entropy: Tensor | None = None  # [N]
    factor: Any = None  # scalar, of the summed loss; None for statistics
    tokens: Tensor | None = None  # [N], the token of each entry of ``lse``; None if in token order

    def in_token_order(self) -> Tensor:
        return self.lse if self.tokens is None else torch.empty_like(self.lse).scatter_(0, self.tokens, self.lse)


def kernels_module() -> Any:
    from hf_cce import kernels  # imported lazily: importing hf_cce must not import Triton

    return kernels


def implementation(triton: bool) -> Any:
    """Return the module of the Triton kernels, or the one with the same functions in PyTorch."""
    return kernels_module() if triton else reference


# Triton compilation errors by device, kept for the process so that later calls do not try again.
compile_failures: dict[torch.device, str] = {}


def with_fallback(compute: Callable[[bool], T], triton: bool, spec: LossSpec, device: torch.device) -> T:
    """Return ``compute(triton)``; if Triton cannot compile a kernel, as on a new GPU, warn once and return ``compute(False)``."""
    if triton and device not in compile_failures:
        try:
            return compute(True)
        except Exception as error:
            from triton.errors import TritonError  # imported lazily, like the kernels

            if spec.implementation == "triton" or not (isinstance(error, TritonError) or "PassManager" in str(error)):
                raise
            why = next(iter(str(error).strip().splitlines()[-1:]), "")
            compile_failures[device] = f"Triton could not compile a kernel ({type(error).__name__}: {why})"
        warnings.warn(
            f"hf_cce fell back to PyTorch on {device}: {compile_failures[device]}. The loss is correct, but slower.",
            CCEWarning, stacklevel=2,
        )  # fmt: skip
    return compute(False)


def validate_labels(x: Inputs, spec: LossSpec, divisor: Divisor, triton: bool = False) -> Tensor:
    """Check the labels and return the scalar, on the device, that the summed loss is multiplied by.

    On a CUDA device a wrong label fails a device-side assertion, because an error would have to synchronize.
    """
    labels, index, v = x.labels, spec.ignore_index, x.weight.shape[0]
    ok, factor = implementation(triton).validate_labels(labels, index, v, divisor)
    if ok.is_cuda:
        torch._assert_async(ok, f"hf_cce: labels must lie in [0, {v}) or equal ignore_index={index}")
    elif not ok.is_meta and not bool(ok):
        bad = labels[(labels != index) & ((labels < 0) | (labels >= v))]
        raise ValueError(
            f"labels must lie in [0, {v}) or equal ignore_index, but {bad.numel()} do not (the first is {int(bad[0])}); "
            "check the tokenizer against the size of lm_head, or set ignore_index"
        )
    return factor


def when_cold(strategy: Strategy, x: Inputs) -> AbstractContextManager[None]:
    """Return a context that calls ``warm_up`` as soon as a launched kernel is not in Triton's cache."""
    if not strategy.triton:
        return nullcontext()
    return kernels_module().when_cold(partial(warm_up, strategy, x))


def warm_up(strategy: Strategy, x: Inputs) -> None:
    """Compile a strategy's kernels in parallel, which is several times faster than one by one, by running it on meta tensors."""
    if not x.hidden.is_cuda or torch.cuda.is_current_stream_capturing():
        return
    on_meta = (None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in x)
    like = Inputs(*on_meta)  # type: ignore[arg-type]
    with kernels_module().compiling(x.hidden.device) as possible:
        for each in strategy.warm_up_strategies() if possible else ():
            # Errors are ignored: the step itself raises them again, or compiles what is missing.
            with suppress(Exception):
                run_on_meta(each, like)


def run_on_meta(strategy: Strategy, x: Inputs) -> None:
    needs = strategy.spec.needs
    outputs, saved = strategy.forward(x)
    non_differentiable = strategy.non_differentiable_outputs(outputs)
    upstream = [None if any(y is each for each in non_differentiable) else torch.empty_like(y) for y in outputs]
    if isinstance(strategy, Filtered):
        upstream[2:] = [None] * len(upstream[2:])  # the gradient of an entropy is not filtered
    if any(needs) and strategy.backward(x, saved, upstream, needs) is None:
        strategy.recompute(x, strategy.spec, saved, upstream, True)


class Strategy:
    """Base class of all strategies, by default for a scalar loss with the outputs (loss,)."""

    reads_weight_in_slabs = False  # in PyTorch, so a quantized weight is not dequantized whole

    def __init__(self, spec: LossSpec, divisor: Divisor, triton: bool) -> None:
        self.spec, self.divisor, self.triton = spec, divisor, triton
        self.cache: Any = None  # what forward leaves for the first backward

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        """Return the outputs and the tensors to save. Runs without autograd and autocast, on the inputs' device."""
        raise NotImplementedError

    def without_kernels(self) -> Strategy:
        """Return a strategy that computes the same outputs in plain PyTorch."""
        return Recompute(self.spec, self.divisor, False)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> InputGrads | None:
        """Compute the gradients from the cache of ``forward``, which is consumed; return None if there is no cache."""
        cache, self.cache = self.cache, None
        if cache is None:
            return None
        return self.cached_gradients(cache, x, self.spec._replace(needs=needs), saved, upstream)

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        """Compute the gradients that ``spec`` needs from the cache of ``forward``."""
        raise NotImplementedError

    def warm_up_strategies(self) -> list[Strategy]:
        """Return the strategies that ``warm_up`` compiles: those that this call or later ones run."""
        return [copy.copy(self)]

    def recompute(self, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream, triton: bool) -> InputGrads:
        """Compute the gradients that ``spec`` needs, empty where not needed, without a cache."""
        grads = self.token_grads(saved, upstream)
        return implementation(triton).logit_stats_backward(x, spec, saved.in_token_order(), saved.entropy, grads)

    def token_grads(self, saved: Saved, upstream: Upstream) -> TokenGrads:
        """Convert upstream gradients to gradients of the statistics."""
        return TokenGrads.of_loss(upstream[0], saved.factor, saved.in_token_order(), self.spec)

    def non_differentiable_outputs(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return []

    def factor(self, x: Inputs) -> Tensor:
        """Check the labels and return the factor on the summed loss."""
        return validate_labels(x, self.spec, self.divisor, self.triton)


class FullLogits(Strategy):
    """Full logits with PyTorch's own operators, as in Transformers; autograd records them."""

    def logits(self, x: Inputs) -> Tensor:
        """Return the logits [N, V], in the inputs' dtype or the accumulation dtype."""
        spec, z = self.spec, F.linear(x.hidden, x.weight, x.bias)
        dtype = accumulation_dtype(z.dtype)
        if spec.logit_scale != 1.0:
            z = z.to(dtype) * spec.logit_scale
        if spec.softcap:
            z = spec.softcap * torch.tanh(z.to(dtype) / spec.softcap)
        return z

    def statistics(self, x: Inputs, wanted: WantedStats, with_lse: bool) -> tuple[Tensor, LogitStats]:
        """Return −log p(label) [N] and ``LogitStats``, empty if nothing else is wanted; zero where ignored."""
        z, index, others = self.logits(x), self.spec.ignore_index, with_lse or wanted.mean or wanted.entropy
        dtype = accumulation_dtype(z.dtype)
        z = z.to(dtype) if others else z  # the gradients of several statistics are summed before they are rounded
        log_p = z.log_softmax(1, dtype=dtype)
        losses = F.nll_loss(log_p, x.labels, ignore_index=index, reduction="none")
        lse = label_logit = top1 = nothing = losses.new_empty(0)
        if not with_lse and not any(wanted):
            return losses, LogitStats(*[nothing] * 6)
        valid = x.labels != index
        if with_lse or wanted.mean or wanted.top1:
            label_logit = z.gather(1, x.labels.masked_fill(~valid, 0)[:, None])[:, 0]
        if with_lse:
            lse = z.logsumexp(1)
        if wanted.top1:
            top1 = label_logit >= z.detach().amax(1)
        found = reference.mean_entropy_and_squares(z, log_p, wanted)
        mean, entropy, log_sum_sq = (nothing if s is None else s for s in found)
        stats = (lse, label_logit, mean, entropy, log_sum_sq, top1)
        return losses, LogitStats(*reference.zero_ignored(stats, valid, Tokens()))

    def loss(self, x: Inputs) -> Tensor:
        spec, z = self.spec, self.logits(x)
        dtype, index, smoothing = accumulation_dtype(z.dtype), spec.ignore_index, spec.label_smoothing
        mean = self.divisor.items is None and self.divisor.number == 0
        # The gradients of a z-loss and of log p are summed before they are rounded. On a GPU, log_softmax converts float16.
        z = z if z.is_cuda and z.dtype == torch.float16 and not spec.z_loss else z.to(dtype)
        log_p = z.log_softmax(1, dtype=dtype)
        # The operator behind F.nll_loss also returns the number of labels. On a GPU it asserts that they are in range.
        total, items = torch.ops.aten.nll_loss_forward.default(
            log_p, x.labels, None, _MEAN_REDUCTION if mean else _SUM_REDUCTION, index
        )
        if smoothing:
            # A sum, since the gradient of a mean is a tensor [N, V] of its own
            others = log_p.sum(1).masked_fill(x.labels == index, 0.0).sum()
            total = torch.sub((1 - smoothing) * total, others / items if mean else others, alpha=smoothing / z.shape[1])
        if spec.z_loss:
            squares = z.logsumexp(1).masked_fill(x.labels == index, 0.0).square().sum()
            total = torch.add(total, squares / items if mean else squares, alpha=spec.z_loss)
        if mean:  # without labels it is NaN, but its gradients are zero
            total.detach().masked_fill_(items.logical_not(), 0.0)
            return total
        if self.divisor.items is None:
            return total / self.divisor.number
        items = self.divisor.items.to(dtype)
        return total * torch.where(items == 0, 0.0, items.reciprocal())


class OnePass(Strategy):
    """PyTorch multiplies blocks of logits, which a kernel turns into gradients if ``triton``, in the forward pass."""

    def without_kernels(self) -> Strategy:
        return OnePass(self.spec, self.divisor, False)

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        spec, (n, d), on_cpu = self.spec, x.hidden.shape, x.hidden.device.type == "cpu"
        dtype, options = x.hidden.dtype, list[Any]()
        one = fallback.fits_token_losses(n, x.weight.shape[0], dtype, on_cpu, spec.memory_budget)
        # On a CPU, blocks of float32 logits are faster, because they stay in its cache. Their result, dW, takes more memory
        # than the logits of fewer tokens than D; a loop over losses would keep one dW for each.
        one &= any(spec.needs) and not (on_cpu and dtype in fallback.FULL_PRECISION and n > d)
        loop: Any = fallback.token_losses if one else fallback.token_blocks
        if self.triton:
            loop, options = fallback.token_blocks, [kernels_module().logits_to_gradients]
        # The factor is a callback, so that a GPU gets its first GEMM before the host checks the labels.
        losses, lse, factor, self.cache = loop(x, spec, lambda: self.factor(x).to(accumulation_dtype(dtype)), *options)
        return (losses.sum() * factor,), Saved(lse, factor=factor)

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        grad = reference.zero_if_all_ignored(upstream[0], x.labels, spec)
        return cache.finalize(x, spec, saved.factor * grad)


class OneBlock(OnePass):
    """PyTorch multiplies all tokens at once, and kernels turn logits into losses and gradients: the fewest launches."""

    def warm_up_strategies(self) -> list[Strategy]:
        return []  # two small kernels

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        self.cache, factor = row_losses(self, x)
        return (self.cache.loss.sum() * factor,), Saved(self.cache.lse, factor=factor)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> InputGrads | None:
        self.cache = self.cache or row_losses(self, x)[0]
        return super().backward(x, saved, upstream, needs)

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        return kernels_module().row_gradients(cache, x, spec, upstream[0], saved.factor)


def row_losses(strategy: Strategy, x: Inputs) -> tuple[Any, Tensor]:
    """Return (losses of all tokens and the cache of their gradients, factor on the summed loss).

    A second backward pass computes both again: ``recompute`` would combine exact logits with the lse of rounded ones.
    """
    kernels = kernels_module()
    logits = kernels.all_logits(x)  # launched before the label check, so that the GPU has work meanwhile
    factor = strategy.factor(x)
    return kernels.row_losses(logits, x.labels, strategy.spec, x.bias), factor


def total_loss(stats: Any, spec: LossSpec, factor: Tensor) -> Tensor:
    """Return the sum of the tokens' losses, computed from their statistics, times ``factor``."""
    return reference.add_smoothing_and_z_loss(stats.lse - stats.label_logit, stats, spec).sum() * factor


class Recompute(Strategy):
    """Two passes over slabs of the vocabulary: statistics in ``forward``, gradients in ``recompute``."""

    reads_weight_in_slabs = True

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        factor, spec = self.factor(x), self.spec
        stats = implementation(self.triton).logit_stats(x, spec, WantedStats(mean=spec.label_smoothing > 0))
        factor = factor.to(stats.lse.dtype)
        return (total_loss(stats, spec, factor),), Saved(stats.lse, factor=factor)


class Exact(Recompute):
    """Triton kernels without the gradient filter. If the budget allows, forward computes gradients or caches exponentials."""

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        if self.spec.label_smoothing or not any(self.spec.needs[:2]):
            return super().forward(x)
        factor = self.factor(x)
        stats, self.cache = kernels_module().exact_stats(x, self.spec, factor)
        return (total_loss(stats, self.spec, factor),), Saved(stats.lse, factor=factor)

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        kernels = kernels_module()
        if isinstance(cache, kernels.PrecomputedGradients):
            grad = reference.zero_if_all_ignored(upstream[0], x.labels, spec)
            return kernels.scale_precomputed_gradients(cache, x, spec, grad)
        grads = self.token_grads(saved, upstream)
        return kernels.logit_stats_backward(x, spec, saved.lse, None, grads, cache)


class Filtered(Strategy):
    """Triton kernels that skip tiles of the logits' gradient. ``unfiltered`` runs if the budget is too small for the filter."""

    def __init__(
        self, spec: LossSpec, divisor: Divisor, state: FilterState, tau: Tensor, keeps_state: bool, unfiltered: Strategy
    ) -> None:
        Strategy.__init__(self, spec, divisor, True)
        self.state, self.tau, self.keeps_state, self.unfiltered = state, tau, keeps_state, unfiltered

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        factor = self.factor(x)
        saved = kernels_module().filtered_forward(x, self.spec, self.state.vocabulary(x.weight))
        if saved is None:
            return self.unfiltered.forward(x)
        self.cache = saved
        self.state.keep_vocabulary(x.weight, saved.vocabulary)
        return (total_loss(saved, self.spec, factor),), Saved(saved.lse, factor=factor, tokens=saved.token_perm)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> InputGrads | None:
        if self.cache is None:
            return self.unfiltered.backward(x, saved, upstream, needs)
        return super().backward(x, saved, upstream, needs)

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        kernels, grads, exact = kernels_module(), self.sorted_grads(cache, saved, upstream), None
        measure = self.keeps_state and self.state.should_measure()  # only a caller's FilterState uses the result
        request = kernels.BackwardRequest(
            grads.lse, grads.label, self.tau, *spec.needs[:2], measure, spec.gradient_filter == "auto"
        )
        if self.state.probe_only():
            exact = partial(self.recompute, x, spec, saved, upstream, True)
        grad_hidden, grad_weight, report = kernels.filtered_gradients(
            cache, x.weight, request, exact, self.state.next_tau
        )
        self.state.end_step(report)
        return grad_hidden, grad_weight, None

    def sorted_grads(self, cache: Any, saved: Saved, upstream: Upstream) -> TokenGrads:
        """Convert upstream gradients to gradients of the statistics, in the row order of the filter, as is ``saved.lse``."""
        return self.token_grads(saved._replace(tokens=None), upstream)

    def warm_up_strategies(self) -> list[Strategy]:
        found = self.unfiltered.warm_up_strategies()
        for probing in (True, False):
            each = copy.copy(self)
            each.state, each.tau = self.state.for_warm_up(probing), torch.empty((), device="meta")
            found.append(each)
        return found


class Statistics(Strategy):
    """Per-token statistics; the outputs are ``LogitStats``."""

    reads_weight_in_slabs = True

    def __init__(self, spec: LossSpec, wanted: WantedStats, triton: bool) -> None:
        super().__init__(spec, SUM, triton)
        self.wanted = wanted

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        self.factor(x)  # checks the labels
        stats = implementation(self.triton).logit_stats(x, self.spec, self.wanted)
        return stats, Saved(stats.lse, stats.entropy if self.wanted.entropy else None)

    def without_kernels(self) -> Strategy:
        return Statistics(self.spec, self.wanted, False)

    def token_grads(self, saved: Saved, upstream: Upstream) -> TokenGrads:
        return TokenGrads.of_stats(saved.lse, upstream)

    def non_differentiable_outputs(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        # Includes outputs that were not requested: the gradient of an empty one would be read as a tensor of N elements.
        unwanted = [output for output, is_wanted in zip(outputs[2:4], self.wanted, strict=False) if not is_wanted]
        return [*unwanted, *outputs[4:6]]


class StatisticsKeepingLogits(Statistics):
    """Statistics and −log p(label) of each token in PyTorch; the logits are kept in the inputs' dtype for the backward pass."""

    reads_weight_in_slabs = False

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        stats, losses, self.cache = fallback.logit_stats(x, self.spec, self.wanted, lambda: self.factor(x))
        return (*stats, losses), Saved(stats.lse, stats.entropy if self.wanted.entropy else None)

    def token_grads(self, saved: Saved, upstream: Upstream) -> TokenGrads:
        grad_lse, grad_label, *others, grad_loss = upstream
        if grad_loss is not None:
            grad_lse = grad_loss if grad_lse is None else grad_lse + grad_loss
            grad_label = -grad_loss if grad_label is None else grad_label - grad_loss
        return super().token_grads(saved, (grad_lse, grad_label, *others))

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        grads = self.token_grads(saved, upstream)
        return fallback.logit_stats_backward(cache, x, spec, saved.lse, saved.entropy, grads)


class TokenLosses(StatisticsKeepingLogits):
    """−log p(label) of each token; the logits are overwritten with its gradient, which the backward pass multiplies.

    The outputs are as those of ``StatisticsKeepingLogits``, but only the last one is computed; the others are empty.
    """

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        if self.triton:
            self.cache, _ = row_losses(self, x)
            losses, lse = self.cache.loss, self.cache.lse
        else:
            losses, lse, _, self.cache = fallback.token_losses(x, self.spec, lambda: self.factor(x))
        return (*(lse.new_empty(0) for _ in LogitStats._fields), losses), Saved(lse)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> InputGrads | None:
        if self.triton:
            self.cache = self.cache or row_losses(self, x)[0]
        return super().backward(x, saved, upstream, needs)

    def non_differentiable_outputs(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return list(outputs[:6])

    def cached_gradients(self, cache: Any, x: Inputs, spec: LossSpec, saved: Saved, upstream: Upstream) -> InputGrads:
        if self.triton:
            return kernels_module().row_gradients(cache, x, spec, upstream[6])
        return cache.finalize(x, spec, upstream[6])


class FilteredStatistics(Filtered, Statistics):
    """Per-token statistics whose gradients are filtered as if all tokens had equal weight.

    The error is measured with each token's actual upstream gradient. If the entropy has one, all gradients are exact.
    """

    def __init__(self, state: FilterState, tau: Tensor, unfiltered: Statistics) -> None:
        Filtered.__init__(self, unfiltered.spec, SUM, state, tau, True, unfiltered)
        self.wanted = unfiltered.wanted

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        self.factor(x)  # checks the labels
        result = kernels_module().filtered_stats(x, self.spec, self.wanted, self.state.vocabulary(x.weight))
        if result is None:
            return self.unfiltered.forward(x)
        stats, self.cache = result
        self.state.keep_vocabulary(x.weight, self.cache.vocabulary)
        return stats, Saved(stats.lse, stats.entropy if self.wanted.entropy else None)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> InputGrads | None:
        if upstream[3] is not None:  # the entropy's
            self.cache = None
        return super().backward(x, saved, upstream, needs)

    def sorted_grads(self, cache: Any, saved: Saved, upstream: Upstream) -> TokenGrads:
        tokens, grads = cache.token_perm, TokenGrads.of_stats(saved.lse, upstream)
        return TokenGrads(grads.lse.index_select(0, tokens), grads.label.index_select(0, tokens))
