"""``hf_cce::logit_stats`` without the operator, and with the gradient filter: for a trainer that keeps a ``FilterState``.

The loss is computed from the statistics elsewhere, and what comes back is a gradient for each token. Which tiles are
dropped is decided as if all tokens counted alike; whether the error stays below what was asked is then measured with the gradient
that each token really has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cce import ops
from hf_cce.choice import choose_implementation, kernels_module, on_device_of, survey, without_autocast
from hf_cce.filter_state import FilterState


@dataclass
class _Kept:
    """Of one call, between its forward and its backward pass."""

    outputs: tuple[Tensor, Tensor, Tensor, Tensor]  # lse, label_logit, entropy, is_top1
    filtered: Any  # hf_cce.kernels.filter.workspace.SavedForward
    state: FilterState
    tau: Tensor
    form: tuple[int, float, float]  # ignore_index, logit_scale, softcap
    how: tuple[int, str]  # scratch in bytes, implementation


def filtered_stats(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N] int64
    form: tuple[int, float, float],
    want_entropy: bool,
    want_top1: bool,
    gradient_filter: Any,
    state: FilterState,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(lse, label_logit, entropy, is_top1), empty where not wanted; None where the filter is not for these inputs, or rests."""
    if ops.traced(hidden):  # first, as a graph would be guarded by what is asked below
        return None
    need_hidden, need_weight = hidden.requires_grad, weight.requires_grad
    n, work, softcap = labels.numel(), hidden.numel() * weight.shape[0], form[2]
    if (
        gradient_filter is None
        or not torch.is_grad_enabled()
        or not (need_hidden or need_weight)
        or (bias is not None and bias.requires_grad)
        or (want_entropy and softcap)
        or n < ops.FILTER_TOKENS
        or work < ops.FILTER_FROM
        or choose_implementation(hidden.device, hidden.dtype, implementation) != "triton"
    ):
        return None
    state = state.on(hidden.device)
    tau = state.threshold(gradient_filter, hidden)
    if tau is None:
        return None
    kernels = kernels_module()
    with torch.no_grad(), without_autocast(hidden), on_device_of(hidden):
        survey(labels, form[0], weight.shape[0], None, 1.0, kernels)
        result = kernels.filtered_stats(
            hidden, weight, bias, labels, *form, want_entropy, want_top1, need_weight, memory_budget,
            state.vocabulary(weight),
        )  # fmt: skip
    if result is None:
        return None
    outputs, filtered = result
    state.keep_vocabulary(weight, filtered.vocabulary)
    kept = _Kept(outputs, filtered, state, tau, form, (memory_budget, implementation))
    return _FilteredStats.apply(kept, hidden, weight, bias, labels)


class _FilteredStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kept: _Kept, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse, label_logit, entropy, is_top1 = kept.outputs
        ctx.mark_non_differentiable(is_top1)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy if entropy.numel() else None)
        ctx.kept = kept
        kept.outputs = ()  # type: ignore[assignment]  # an output that a node holds would be a cycle
        return lse, label_logit, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        kept: _Kept = ctx.kept
        need_hidden, need_weight = ctx.needs_input_grad[1:3]
        grad_lse = torch.zeros_like(lse) if grads[0] is None else grads[0].contiguous()
        grad_label = torch.zeros_like(lse) if grads[1] is None else grads[1].contiguous()
        grad_entropy = grads[2] if entropy is not None else None
        # Used once, since its memory is overwritten; a second backward recomputes.
        filtered, kept.filtered = kept.filtered, None

        def in_full() -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.hf_cce.logit_stats_backward(
                grad_lse, grad_label, None, None if grad_entropy is None else grad_entropy.contiguous(), hidden, weight, bias,
                labels, lse, entropy, *kept.form, need_hidden, need_weight, False, *kept.how,
            )  # fmt: skip

        # With create_graph=True gradients are enabled here, and it is the operator that refuses the second derivative.
        if filtered is None or grad_entropy is not None or torch.is_grad_enabled() or ops.traced(grad_lse):
            del filtered  # its memory, before that of the gradients in full
            dh, dw, _ = in_full()
        else:
            tokens, state = filtered.order.token_perm, kept.state
            with without_autocast(hidden), on_device_of(hidden):
                dh, dw, report = kernels_module().token_filtered_gradients(
                    filtered, grad_lse.index_select(0, tokens), grad_label.index_select(0, tokens), weight, kept.tau,
                    *kept.form[1:], need_hidden, need_weight, state.measure(), in_full if state.probe_only() else None,
                    state.next_tau,
                )  # fmt: skip
            state.report(report)
        return None, dh if need_hidden else None, dw if need_weight else None, None, None
