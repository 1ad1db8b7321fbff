"""A step's kernels, compiled before its first one and several at a time: one after the other they take 20 seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from hf_cce import early
from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.cross_entropy import (
    cross_entropy,
    dense_cross_entropy,
    filtered_cross_entropy,
    filtered_gradients,
    filtered_stats,
    grouped_cross_entropy,
    stored_cross_entropy,
    token_filtered_gradients,
    token_gradients,
)
from hf_cce.kernels.dense import backward as dense_gradients
from hf_cce.kernels.dense import multiplied as dense_logits
from hf_cce.kernels.forward import logit_stats, survey_labels
from hf_cce.kernels.grouped import formed_gradients
from hf_cce.kernels.launch import listing
from hf_cce.kernels.stored import Stored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """A scalar loss, as far as kernels are compiled for it: not for each number of tokens, and the budget grows with that."""

    filtered: bool
    dense: torch.dtype | None  # of real logits, if they are made
    needs: tuple[bool, bool, bool]  # gradients of hidden, weight, bias
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    hidden_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]
    has_bias: bool
    labels_dtype: torch.dtype
    items_dtype: torch.dtype | None  # of num_items, if it is given
    divided: bool  # by a number that is known to the host
    ignore_index: int
    logit_scale: float
    softcap: float
    z_loss: float
    device: torch.device
    tokens: int = field(compare=False)
    budget: int = field(compare=False)
    wanted: tuple[bool, bool] | None = None  # of a loss that is computed elsewhere: entropy, is_top1


def compile_ahead(
    filtered: bool,
    dense: torch.dtype | None,
    needs: tuple[bool, bool, bool],
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N]
    num_items: Tensor | None,
    divisor: float,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    budget: int,
    wanted: tuple[bool, bool] | None = None,
) -> None:
    """Compile, or load from Triton's cache, what a loss and its gradients will launch; once for all that need the same.

    The step is run on tensors without memory, and its launches are listed. Where that fails they are compiled as they come.
    It may still be under way when this returns: whoever launches the last kernel of a step calls ``LOADING.finish``.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    if not n or torch.cuda.is_current_stream_capturing():
        return
    _begin(
        Problem(
            filtered, dense, needs, hidden.dtype, v, d, hidden.stride(), weight.stride(), bias is not None, labels.dtype,
            None if num_items is None else num_items.dtype, divisor > 0, ignore_index, logit_scale, softcap, z_loss,
            hidden.device, n, budget, wanted,
        )
    )  # fmt: skip


@lru_cache(maxsize=256)
def _begin(problem: Problem) -> None:
    try:
        with listing() as launches:
            _step(problem)
        count = launches.load(problem.device, early.finish)
    except Exception as error:  # of PyTorch on such tensors
        logger.debug("kernels are compiled one after the other: %s", error)
        return
    logger.debug("%d kernels are compiled ahead", count)


def _step(problem: Problem) -> None:
    """The launches of one step, in whatever order; which way is taken is decided as in hf_cce.ops."""
    n, v, d = problem.tokens, problem.vocab_size, problem.hidden_size

    def empty(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden = torch.empty_strided((n, d), problem.hidden_strides, dtype=problem.dtype, device="meta")
    weight = torch.empty_strided((v, d), problem.weight_strides, dtype=problem.dtype, device="meta")
    bias, labels = empty(v) if problem.has_bias else None, empty(n, dtype=problem.labels_dtype)
    items = None if problem.items_dtype is None else empty(dtype=problem.items_dtype)
    options = (problem.ignore_index, problem.logit_scale, problem.softcap)
    _, factor = survey_labels(labels, problem.ignore_index, v, items, float(problem.divided))
    grad, common = torch.empty_like(factor), (hidden, weight, bias, labels, factor, *options, problem.z_loss)

    def in_full(lse: Tensor, stored: Stored | None) -> None:
        logit_stats_backward(
            *token_gradients(grad, factor, lse, 0.0, problem.z_loss), None, hidden, weight, bias, labels, lse, None, *options,
            *problem.needs, problem.budget, stored,
        )  # fmt: skip

    if problem.wanted is not None:
        _stats_step(problem, hidden, weight, bias, labels)
        return
    if problem.filtered:
        # The first steps store nothing, those after them what is worth it.
        filtered_cross_entropy(*common, problem.needs[1], problem.budget, None)
        result = filtered_cross_entropy(*common, problem.needs[1], problem.budget, None, (0.0, 2))
        if result is not None:
            lse = result[1].lse
            filtered_gradients(
                result[1], grad, factor, weight, empty(dtype=torch.float32), *options[1:], problem.z_loss, *problem.needs[:2],
                True,
            )  # fmt: skip
            in_full(lse, None)  # the gradients of a step that is a rehearsal
            return
    if problem.dense is not None:
        _, _, saved = dense_cross_entropy(dense_logits(hidden, weight, bias, problem.dense), *common[2:])
        dense_gradients(saved, grad, factor, hidden, weight, bias, labels, *options, problem.z_loss, *problem.needs)
        return
    if not problem.needs[2]:
        grouped = grouped_cross_entropy(*common, *problem.needs[:2], problem.budget)
        if grouped is not None:
            formed_gradients(grouped[2], grad)
            return
    stored = stored_cross_entropy(*common, problem.needs[1], problem.budget)
    if stored is not None:
        in_full(stored[1], stored[2])
    else:
        _, lse, *_ = cross_entropy(*common[:8], 0.0, problem.z_loss, *problem.needs, problem.budget)
        in_full(lse, None)


def _stats_step(problem: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    """Likewise of ``hf_cce.log_probs``; where the filter rests it is the operator's."""
    assert problem.wanted is not None
    form, given = (problem.ignore_index, problem.logit_scale, problem.softcap), (hidden, weight, bias, labels)
    wanted, budget = problem.wanted, problem.budget
    lse, *_ = logit_stats(*given, *form, False, wanted[0], False, wanted[1], budget)
    gradient = torch.empty_like(lse)
    logit_stats_backward(
        gradient, gradient, None, None, *given, lse, gradient if wanted[0] else None, *form, *problem.needs, budget
    )
    filtered_stats(*given, *form, *wanted, problem.needs[1], budget, None)
    result = filtered_stats(*given, *form, *wanted, problem.needs[1], budget, None, (0.0, 2))
    if result is not None:
        tau = torch.empty((), dtype=torch.float32, device="meta")
        token_filtered_gradients(result[1], gradient, gradient, weight, tau, *form[1:], *problem.needs[:2], True)
