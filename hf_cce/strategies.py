"""Every way to compute a loss, behind two functions: ``forward`` and ``backward``. ``hf_cce.dispatch`` picks one of them.

A strategy lives for one call. Its ``forward`` returns the outputs and what ``hf_cce.ops`` saves for autograd; its ``backward``
uses up what else ``forward`` left, and returns None where nothing is left: the gradients are then recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import fallback, reference
from hf_cce.filter_state import FilterState
from hf_cce.spec import Divisor, Inputs, LossSpec, Stats, TokenGrads, Wanted, accumulation_dtype

Gradients = Sequence[Tensor | None]  # of hidden, weight and bias; None or empty where not needed
Upstream = Sequence[Tensor | None]  # gradients of a strategy's outputs
Needs = tuple[bool, bool, bool]  # which gradients are needed, now that some may not be asked for
SUM = Divisor(number=1.0)
_SUM_REDUCTION = 2  # as ATen counts them


class Saved(NamedTuple):
    """What autograd keeps beside the inputs; enough to recompute the gradients."""

    lse: Tensor  # [N]
    entropy: Tensor | None = None  # [N]
    factor: Tensor | None = None  # scalar
    tokens: Tensor | None = None  # [N], whose statistics ``lse`` holds, where they are not in the order of the tokens

    def in_token_order(self) -> Tensor:
        return self.lse if self.tokens is None else torch.empty_like(self.lse).scatter_(0, self.tokens, self.lse)


def kernels_module() -> Any:
    from hf_cce import kernels  # late: importing hf_cce must not import Triton

    return kernels


def validate_labels(labels: Tensor, spec: LossSpec, v: int, divisor: Divisor, triton: bool) -> Tensor:
    """What a sum of losses is multiplied by, a scalar on the device.

    Raises:
        ValueError: a label is out of range. On a CUDA device a device-side assertion fails instead, without synchronising.
    """
    index = spec.ignore_index
    if triton:
        ok, factor = kernels_module().survey_labels(labels, index, v, *divisor)
    else:
        ok, factor = reference.validate_labels(labels, index, v, divisor)
    if ok.is_cuda:
        torch._assert_async(ok, f"hf_cce: labels must lie in [0, {v}) or equal ignore_index={index}")
    elif not bool(ok):
        bad = labels[(labels != index) & ((labels < 0) | (labels >= v))]
        raise ValueError(
            f"labels must lie in [0, {v}) or equal ignore_index, but {bad.numel()} do not (the first is {int(bad[0])}); "
            "check the tokenizer against the size of lm_head, or set ignore_index"
        )
    return factor


def logit_stats(x: Inputs, spec: LossSpec, wanted: Wanted, triton: bool) -> Stats:
    """The statistics that are ``wanted``."""
    if triton:
        return Stats(*kernels_module().logit_stats(*x, *spec.form, *wanted, spec.memory_budget))
    return reference.logit_stats(x, spec, wanted)


def recompute(
    x: Inputs, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs from those of the statistics, empty where not needed."""
    if triton:
        return kernels_module().logit_stats_backward(
            *grads, *x, lse, entropy, *spec.form, *spec.needs, spec.memory_budget
        )
    return reference.logit_stats_backward(x, spec, lse, entropy, grads)


class Strategy:
    """A scalar loss; outputs: (loss,)."""

    def __init__(self, spec: LossSpec, divisor: Divisor, triton: bool) -> None:
        self.spec, self.divisor, self.triton = spec, divisor, triton
        self.left: Any = None  # by forward, for the first backward alone

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        """Outputs, and what to save. Runs without autograd and autocast, on the inputs' device."""
        raise NotImplementedError

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        """Gradients from what is left of the forward pass, which is used up; None where nothing is."""
        return None

    def release(self) -> None:
        """Drop what is left of the forward pass, before the gradients are recomputed."""
        self.left = None

    def token_grads(self, saved: Saved, upstream: Upstream, triton: bool) -> TokenGrads:
        """Upstream gradients as those of the statistics: what ``recompute`` takes."""
        grad, factor = upstream[0], saved.factor
        assert grad is not None and factor is not None
        module = kernels_module() if triton else reference
        spec = self.spec
        return TokenGrads(
            *module.token_gradients(grad, factor, saved.in_token_order(), spec.label_smoothing, spec.z_loss)
        )

    def undifferentiable(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return []

    def factor(self, x: Inputs) -> Tensor:
        return validate_labels(x.labels, self.spec, x.weight.shape[0], self.divisor, self.triton)


class FullLogits(Strategy):
    """PyTorch's own operators on full logits, as Transformers computes the loss; autograd records them."""

    def __init__(self, spec: LossSpec, divisor: Divisor) -> None:
        super().__init__(spec, divisor, False)

    def loss(self, x: Inputs) -> Tensor:
        spec = self.spec
        z = F.linear(x.hidden, x.weight, x.bias)
        z = z if z.dtype == torch.float64 else z.float()
        if spec.logit_scale != 1.0:
            z = z * spec.logit_scale
        if spec.softcap:
            z = spec.softcap * torch.tanh(z / spec.softcap)
        log_p = z.log_softmax(1)
        # The operator behind F.nll_loss also returns the number of labels. On a GPU it asserts that they are in range.
        total, items = torch.ops.aten.nll_loss_forward(log_p, x.labels, None, _SUM_REDUCTION, spec.ignore_index)
        if spec.label_smoothing or spec.z_loss:
            valid = x.labels != spec.ignore_index
            total = total * (1 - spec.label_smoothing) - spec.label_smoothing * log_p.mean(1).where(valid, 0.0).sum()
            total = total + spec.z_loss * z.logsumexp(1).square().where(valid, 0.0).sum()
        if self.divisor.number > 0:
            return total / self.divisor.number
        if self.divisor.items is None:  # of no label the sum is zero, whatever it is divided by
            return total / items.clamp(min=1)
        items = self.divisor.items
        return torch.where(items == 0, 0.0, total / torch.where(items == 0, 1.0, items))


class OnePass(Strategy):
    """PyTorch; gradients form in the forward pass, up to a factor."""

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        spec, (n, _), on_cpu = self.spec, x.hidden.shape, x.hidden.device.type == "cpu"
        dtype = x.hidden.dtype
        one = any(spec.needs) and fallback.fits_one_block(n, x.weight.shape[0], dtype, on_cpu, spec.memory_budget)
        if on_cpu and dtype in fallback.FULL_PRECISION:
            loop: Any = fallback.column_blocks
        else:
            loop = fallback.one_block if one else fallback.token_blocks
        # A GPU is given its first product before the host looks at the labels.
        loss, lse, factor, self.left = loop(x, spec, lambda: self.factor(x).to(accumulation_dtype(dtype)))
        return (loss,), Saved(lse, factor=factor)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        left, self.left = self.left, None
        if left is None or upstream[0] is None or saved.factor is None:
            return None
        # The sum over no tokens is a constant, also where it is divided by their number and infinity comes from upstream.
        grad = torch.where((x.labels == self.spec.ignore_index).all(), 0.0, upstream[0])
        return left.scaled(x, replace(self.spec, needs=needs), saved.lse, saved.factor, grad)


class Recompute(Strategy):
    """Two passes over slabs of the vocabulary, the second in ``recompute``."""

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        factor, spec = self.factor(x), self.spec
        if self.triton:
            smoothing, z_loss = spec.label_smoothing, spec.z_loss
            loss, lse, *_ = kernels_module().cross_entropy(
                *x, factor, *spec.form, smoothing, z_loss, *spec.needs, spec.memory_budget
            )
        else:
            stats = reference.logit_stats(x, spec, Wanted(mean=spec.label_smoothing > 0))
            factor = factor.to(stats.lse.dtype)
            loss, lse = reference.token_losses(stats, spec).sum() * factor, stats.lse
        return (loss,), Saved(lse, factor=factor)


class Exact(Recompute):
    """Kernels without a filter: they keep as much of the forward pass as the budget has room for."""

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        spec, kernels = self.spec, kernels_module()
        need_hidden, need_weight, need_bias = spec.needs
        if spec.label_smoothing or not (need_hidden or need_weight):
            return super().forward(x)
        factor = self.factor(x)
        common = (*x, factor, *spec.form, spec.z_loss)
        result = None if need_bias else kernels.grouped_cross_entropy(*common, *spec.needs[:2], spec.memory_budget)
        self.formed = result is not None
        if result is None:
            result = kernels.stored_cross_entropy(*common, need_weight and not need_bias, spec.memory_budget)
        if result is None:
            loss, lse, *_ = kernels.cross_entropy(*common[:8], 0.0, spec.z_loss, *spec.needs, spec.memory_budget)
        else:
            loss, lse, self.left = result
        return (loss,), Saved(lse, factor=factor)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        left, self.left = self.left, None
        if left is None:
            return None
        if self.formed:
            return kernels_module().formed_gradients(left, upstream[0])
        grads = self.token_grads(saved, upstream, True)
        spec = self.spec
        return kernels_module().logit_stats_backward(
            *grads, *x, saved.lse, None, *spec.form, *needs, spec.memory_budget, left
        )


class Materialized(Strategy):
    """Kernels on full logits [N, V], held once: for few tokens the fewest launches win."""

    def __init__(self, spec: LossSpec, divisor: Divisor, logits_dtype: torch.dtype) -> None:
        super().__init__(spec, divisor, True)
        self.logits_dtype = logits_dtype

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        kernels, spec = kernels_module(), self.spec
        # First, so that the GPU has work while the host goes on: it needs no labels.
        logits = kernels.dense_logits(x.hidden, x.weight, x.bias, self.logits_dtype)
        factor = self.factor(x)
        loss, lse, self.left = kernels.dense_cross_entropy(logits, x.bias, x.labels, factor, *spec.form, spec.z_loss)
        return (loss,), Saved(lse, factor=factor)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        left, self.left = self.left, None
        if left is None:
            return None
        spec = self.spec
        return kernels_module().dense_gradients(left, upstream[0], saved.factor, *x, *spec.form, spec.z_loss, *needs)


class Filtered(Strategy):
    """Kernels that leave out tiles of the logits' gradient; ``otherwise`` where the budget has no room for that."""

    def __init__(
        self, spec: LossSpec, divisor: Divisor, state: FilterState, tau: Tensor, steered: bool, otherwise: Strategy
    ) -> None:
        super().__init__(spec, divisor, True)
        self.state, self.tau, self.steered, self.otherwise = state, tau, steered, otherwise

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        spec = self.spec
        factor = self.factor(x)
        result = kernels_module().filtered_cross_entropy(
            *x, factor, *spec.form, spec.z_loss, spec.needs[1], spec.memory_budget, self.state.vocabulary(x.weight)
        )
        if result is None:
            return self.otherwise.forward(x)
        loss, self.left = result
        self.state.keep_vocabulary(x.weight, self.left.vocabulary)
        return (loss,), Saved(self.left.lse, factor=factor, tokens=self.left.order.token_perm)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        filtered, self.left = self.left, None
        if filtered is None:
            return self.otherwise.backward(x, saved, upstream, needs)
        spec, state = self.spec, self.state
        measure = self.steered and state.measure()  # nobody would read what an unsteered call measures
        dh, dw, report = kernels_module().filtered_gradients(
            filtered, upstream[0], saved.factor, x.weight, self.tau, *spec.form[1:], spec.z_loss, *needs[:2], measure,
            self.in_full(x, saved, upstream, needs), state.next_tau,
        )  # fmt: skip
        state.report(report)
        return dh, dw, None

    def release(self) -> None:
        super().release()
        self.otherwise.release()

    def in_full(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Callable[[], Gradients] | None:
        """The exact gradients, for a step that only finds out what the filter would do."""
        if not self.state.probe_only():
            return None
        spec = replace(self.spec, needs=needs)
        return lambda: recompute(
            x, spec, saved.in_token_order(), saved.entropy, self.token_grads(saved, upstream, True), True
        )


class Statistics(Strategy):
    """Statistics of the tokens; outputs: ``Stats``."""

    def __init__(self, spec: LossSpec, wanted: Wanted, triton: bool) -> None:
        super().__init__(spec, SUM, triton)
        self.wanted = wanted

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        self.factor(x)
        stats = logit_stats(x, self.spec, self.wanted, self.triton)
        return stats, Saved(stats.lse, stats.entropy if self.wanted.entropy else None)

    def token_grads(self, saved: Saved, upstream: Upstream, triton: bool) -> TokenGrads:
        return stats_grads(saved.lse, upstream)

    def undifferentiable(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        # Nor is what was not wanted: the gradient of an empty tensor would be read as one of N numbers.
        return [output for output, is_wanted in zip(outputs[2:4], self.wanted, strict=False) if not is_wanted] + [
            *outputs[4:]
        ]


def stats_grads(lse: Tensor, upstream: Upstream) -> TokenGrads:
    """Upstream gradients of ``Stats`` in one piece each; zero for the first two where there is none."""
    of_lse, of_label, mean, entropy = (None if g is None else g.contiguous() for g in upstream[:4])
    zero = torch.zeros_like(lse) if of_lse is None or of_label is None else lse
    return TokenGrads(zero if of_lse is None else of_lse, zero if of_label is None else of_label, mean, entropy)


class FilteredStatistics(Filtered):
    """Statistics of the tokens, whose gradients are filtered as if all tokens counted alike.

    Whether the error stays below what was asked is measured with the gradient that each token really has. A gradient of the
    entropy is computed in full.
    """

    otherwise: Statistics

    def forward(self, x: Inputs) -> tuple[tuple[Tensor, ...], Saved]:
        spec, wanted = self.spec, self.otherwise.wanted
        self.factor(x)
        result = kernels_module().filtered_stats(
            *x,
            *spec.form,
            wanted.entropy,
            wanted.top1,
            spec.needs[1],
            spec.memory_budget,
            self.state.vocabulary(x.weight),
        )
        if result is None:
            return self.otherwise.forward(x)
        (lse, label_logit, entropy, is_top1), self.left = result
        self.state.keep_vocabulary(x.weight, self.left.vocabulary)
        stats = Stats(lse, label_logit, lse.new_empty(0), entropy, lse.new_empty(0), is_top1)
        return stats, Saved(lse, entropy if wanted.entropy else None)

    def backward(self, x: Inputs, saved: Saved, upstream: Upstream, needs: Needs) -> Gradients | None:
        filtered, self.left = self.left, None
        if filtered is None or upstream[3] is not None:
            return None
        spec, state, tokens = self.spec, self.state, filtered.order.token_perm
        grads = stats_grads(saved.lse, upstream)
        dh, dw, report = kernels_module().token_filtered_gradients(
            filtered, grads.lse.index_select(0, tokens), grads.label.index_select(0, tokens), x.weight, self.tau,
            *spec.form[1:], *needs[:2], state.measure(), self.in_full(x, saved, upstream, needs), state.next_tau,
        )  # fmt: skip
        state.report(report)
        return dh, dw, None

    def token_grads(self, saved: Saved, upstream: Upstream, triton: bool) -> TokenGrads:
        return self.otherwise.token_grads(saved, upstream, triton)

    def undifferentiable(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return self.otherwise.undifferentiable(outputs)
