"""A step's kernels, compiled before its first one and several at a time: one after the other they take 20 seconds.

While threads do that, the step is tried without them: PyTorch and cuBLAS load their own kernels as they are first needed, some
forty of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_cce import early
from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.cross_entropy import (
    cross_entropy,
    dense_cross_entropy,
    grouped_cross_entropy,
    stored_cross_entropy,
    token_gradients,
)
from hf_cce.kernels.dense import backward as dense_gradients
from hf_cce.kernels.dense import multiplied as dense_logits
from hf_cce.kernels.filter.run import (
    filtered_cross_entropy,
    filtered_gradients,
    filtered_stats,
    token_filtered_gradients,
)
from hf_cce.kernels.filter.workspace import FilterReport
from hf_cce.kernels.forward import logit_stats, survey_labels
from hf_cce.kernels.grouped import formed_gradients
from hf_cce.kernels.launch import listing
from hf_cce.kernels.stored import Stored

logger = logging.getLogger(__name__)

# Tokens times hidden size times vocabulary up to which a step is tried: its dense products, 8 operations for each, take an H200
# 60 ms. In float32 a GPU takes some eight times as long.
TRIED = 5e12

# Makes, for hidden states, the ``moved`` of a rehearsal.
Moves = Callable[[Tensor], Callable[[FilterReport], Tensor | None]]


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


@dataclass
class Begun:
    """That a problem's kernels are being loaded."""

    count: int
    tried: bool = False  # the step, without them


class Zeros(TorchFunctionMode):
    """What kernels that are not launched would have written is zero, not whatever lay there: a valid index, for one."""

    MADE_BY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self.MADE_BY else made


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
    moves: Moves | None = None,
) -> None:
    """Compile, or load from Triton's cache, what a loss and its gradients will launch; once for all that need the same.

    The step is run on tensors without memory, and its launches are listed. Where that fails they are compiled as they come.
    It may still be under way when this returns: whoever launches the last kernel of a step calls ``LOADING.finish``.
    With ``moves`` the first step of all is a rehearsal: see hf_cce.kernels.filter.run.
    """
    (n, d), v = hidden.shape, weight.shape[0]
    if not n or torch.cuda.is_current_stream_capturing():
        return
    # Kernels are told apart by whether there is a scale, a softcap, a z-loss; what it is may change with each step.
    problem = Problem(
        filtered, dense, needs, hidden.dtype, v, d, hidden.stride(), weight.stride(), bias is not None, labels.dtype,
        None if num_items is None else num_items.dtype, divisor > 0, ignore_index, 1.0 if logit_scale == 1.0 else 0.5,
        float(softcap > 0), float(z_loss > 0), hidden.device, n, budget, wanted,
    )  # fmt: skip
    begun = _begin(problem)
    if begun.count and not begun.tried:
        begun.tried = True
        # Logits of few tokens are there already, a second time they would be beyond the budget.
        if dense is wanted is None and n * d * v * (8 if hidden.dtype == torch.float32 else 1) <= TRIED:
            _try(problem, hidden, weight, bias, labels, num_items, moves)


@lru_cache(maxsize=256)
def _begin(problem: Problem) -> Begun:
    try:
        with listing() as launches:
            _step(problem, *_without_memory(problem))
        count = launches.load(problem.device, early.finish)
    except Exception as error:  # of PyTorch on such tensors
        logger.debug("kernels are compiled one after the other: %s", error)
        return Begun(0)
    logger.debug("%d kernels are compiled ahead", count)
    return Begun(count)


def _without_memory(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """hidden, weight, bias, labels, num_items."""
    n, v, d = problem.tokens, problem.vocab_size, problem.hidden_size

    def empty(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden = torch.empty_strided((n, d), problem.hidden_strides, dtype=problem.dtype, device="meta")
    weight = torch.empty_strided((v, d), problem.weight_strides, dtype=problem.dtype, device="meta")
    bias, labels = empty(v) if problem.has_bias else None, empty(n, dtype=problem.labels_dtype)
    return hidden, weight, bias, labels, None if problem.items_dtype is None else empty(dtype=problem.items_dtype)


def _try(
    problem: Problem,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    items: Tensor | None,
    moves: Moves | None,
) -> None:
    """What a step does, with its backward pass, but launch our kernels: on its own tensors, and in no more memory."""
    try:
        with listing(keep=False), Zeros():
            torch._assert_async(torch.ones((), dtype=torch.bool, device=hidden.device))  # of the labels
            _step(problem, hidden, weight, bias, labels, items, True, moves)
    except Exception as error:  # the step itself will tell, if it has the same
        logger.debug("the step was not tried without its kernels: %s", error)


def _step(
    problem: Problem,
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N]
    items: Tensor | None,
    trying: bool = False,
    moves: Moves | None = None,
) -> None:
    """The launches of one step, in whatever order; which way is taken is decided as in hf_cce.ops.

    ``trying``: of the first one of all, and not also of those to come that differ.
    """
    v, options = weight.shape[0], (problem.ignore_index, problem.logit_scale, problem.softcap)
    _, factor = survey_labels(labels, problem.ignore_index, v, items, float(problem.divided))
    grad, common = torch.empty_like(factor), (hidden, weight, bias, labels, factor, *options, problem.z_loss)

    def in_full(lse: Tensor, stored: Stored | None) -> tuple[Tensor, Tensor, Tensor]:
        return logit_stats_backward(
            *token_gradients(grad, factor, lse, 0.0, problem.z_loss), None, hidden, weight, bias, labels, lse, None, *options,
            *problem.needs, problem.budget, stored,
        )  # fmt: skip

    if problem.wanted is not None:
        _stats_step(problem, hidden, weight, bias, labels)
        return
    if problem.filtered and trying:
        if (result := filtered_cross_entropy(*common, problem.needs[1], problem.budget, None)) is not None:
            of_filter, tau = result[1], torch.ones_like(factor)
            del result
            lse, tokens = of_filter.lse, of_filter.order.token_perm
            otherwise = (
                ()
                if moves is None
                else (lambda: in_full(torch.empty_like(lse).scatter_(0, tokens, lse), None), moves(hidden))
            )
            filtered_gradients(
                of_filter, grad, factor, weight, tau, *options[1:], problem.z_loss, *problem.needs[:2], True, *otherwise
            )
            return
    elif problem.filtered:
        result = filtered_cross_entropy(*common, problem.needs[1], problem.budget, None)
        if result is not None:
            lse = result[1].lse
            filtered_gradients(
                result[1], grad, factor, weight, torch.empty_like(factor), *options[1:], problem.z_loss, *problem.needs[:2],
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
    stored = stored_cross_entropy(*common, problem.needs[1] and not problem.needs[2], problem.budget)
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
    result = filtered_stats(*given, *form, *wanted, problem.needs[1], budget, None)
    if result is not None:
        tau = torch.empty((), dtype=torch.float32, device=hidden.device)
        token_filtered_gradients(result[1], gradient, gradient, weight, tau, *form[1:], *problem.needs[:2], True)
