"""One scalar loss from the statistics of the tokens, and the gradients of those from the gradient of the scalar."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels import dense
from hf_cce.kernels.forward import combine, logit_stats, tile_stats
from hf_cce.kernels.grouped import Formed, Groups, Part, group_sizes
from hf_cce.kernels.launch import Kernel
from hf_cce.kernels.plan import Plan, ceil_div, empty_slab, make_plan, padded, row_major, specialised
from hf_cce.kernels.stored import Stored, label_logits, lent_columns, lent_values, stored_width


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _total_loss_kernel(
    lse,  # [N], zero where the label is ignored, like all that follow
    label_logit,  # [N]
    mean_logit,  # [N], if SMOOTH
    factor,  # scalar
    loss,  # scalar
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_tokens
        row_lse = tl.load(lse + at, mask=mask, other=0.0)
        z = tl.load(label_logit + at, mask=mask, other=0.0)
        row = row_lse - z
        if SMOOTH:
            row += label_smoothing * (z - tl.load(mean_logit + at, mask=mask, other=0.0))
        if Z_LOSS:
            row += z_loss * row_lse * row_lse
        total += row
    tl.store(loss, tl.sum(total) * tl.load(factor))


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _token_gradients_kernel(
    grad,  # scalar
    factor,  # scalar
    lse,  # [N]
    grad_lse,  # [N]
    grad_label,  # [N]
    grad_mean,  # [N], if SMOOTH
    num_tokens,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_tokens
    g = tl.load(grad).to(tl.float32) * tl.load(factor) + tl.zeros((BLOCK,), tl.float32)
    of_lse = g
    if Z_LOSS:
        of_lse = g * (1.0 + 2.0 * z_loss * tl.load(lse + at, mask=mask, other=0.0))
    tl.store(grad_lse + at, of_lse, mask=mask)
    tl.store(grad_label + at, g * (label_smoothing - 1.0), mask=mask)
    if SMOOTH:
        tl.store(grad_mean + at, -g * label_smoothing, mask=mask)


def token_gradients(
    grad: Tensor, factor: Tensor, lse: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``hf_cce.portable.token_gradients``, in one launch."""
    n, smooth = lse.numel(), label_smoothing > 0
    vectors = empty_slab(lse, 3 if smooth else 2, n)
    grad_lse, grad_label, grad_mean = vectors[0], vectors[1], vectors[2] if smooth else None
    if n:
        _token_gradients_kernel[(ceil_div(n, 1024),)](
            grad, factor, lse, grad_lse, grad_label, grad_mean, n, label_smoothing, z_loss,
            SMOOTH=smooth, Z_LOSS=z_loss > 0, BLOCK=1024,
        )  # fmt: skip
    return grad_lse, grad_label, grad_mean


def total_loss(
    lse: Tensor, label_logit: Tensor, mean_logit: Tensor | None, factor: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    loss = torch.empty((), dtype=torch.float32, device=lse.device)
    _total_loss_kernel[(1,)](
        lse, label_logit, mean_logit, factor, loss, lse.numel(), label_smoothing, z_loss,
        SMOOTH=label_smoothing > 0, Z_LOSS=z_loss > 0, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return loss


def cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``hf_cce.portable.cross_entropy``; gradients are formed in the backward pass only, from recomputed tiles."""
    lse, label_logit, mean_logit, *_ = logit_stats(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, label_smoothing > 0, False, False, False,
        memory_budget,
    )  # fmt: skip
    loss = total_loss(lse, label_logit, mean_logit, factor, label_smoothing, z_loss)
    return loss, lse, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)


def _stored_stats(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,
    labels: Tensor,  # [N]
    stored: Stored,  # but for its values
    parts: list[Part],  # whose values are written
    lse: Tensor,  # [N], written
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    plan: Plan,
) -> None:
    v, num_tiles, stride = weight.shape[0], ceil_div(weight.shape[0], plan.block_n), padded(labels.numel())
    tile_lse = torch.empty(num_tiles * stride, device=hidden.device, dtype=torch.float32)
    for begin, end, values in parts:
        tile_stats(
            hidden, weight[begin:end], None if bias is None else bias[begin:end], labels,
            [tile_lse[begin // plan.block_n * stride :], None, None, None, None], stored.label_logit, begin, ignore_index,
            logit_scale, softcap, plan, stored=values, live=stored.live,
        )  # fmt: skip
    tiles: list[Tensor | None] = [tile_lse, None, None, None, None]
    combine(tiles, stored.label_logit, labels, lse, [None] * 4, v, num_tiles, ignore_index)


def _stored_columns(
    n: int, d: int, v: int, dtype: torch.dtype, tiles: int, block_n: int, special: bool, lend: bool, budget: int
) -> tuple[int, int]:
    """Columns to store where the weight's gradient will be, and those after them in a slab of the budget."""
    width = stored_width(n, d, v, dtype, tiles, block_n, budget)
    if not lend or width in (0, v):
        return 0, width
    whole_tiles = block_n * (2 if special else 1)  # of every kernel's
    lent = lent_columns(n, d, v, dtype.itemsize, dtype.itemsize, whole_tiles)
    after = stored_width(n, d, v - lent, dtype, tiles, block_n, budget, lent > 0)
    return (lent, after) if after else (0, width)


def stored_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    lend: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Stored] | None:
    """(loss, lse [N], the first slab for ``logit_stats_backward``), or None where the budget has no room for one.

    With ``lend`` the weight's gradient is allocated here, and lends its memory until it is written.
    """
    hidden, weight = row_major(hidden), row_major(weight)
    bias, labels = None if bias is None else bias.contiguous(), labels.contiguous()
    (n, d), v = hidden.shape, weight.shape[0]
    plan = make_plan(hidden, weight)
    num_tiles = ceil_div(v, plan.block_n)
    special = specialised(plan, bias, softcap)
    block_n = max(make_plan(hidden, weight, backward=True).block_n, plan.block_n)
    lent, width = _stored_columns(n, d, v, hidden.dtype, num_tiles, block_n, special, lend, memory_budget)
    if width == 0:
        return None
    block_m = plan.block_m if special else 0
    label_logit, live = label_logits(hidden, weight, bias, labels, ignore_index, logit_scale, softcap, plan, block_m)
    stored = Stored(empty_slab(hidden, n, width), label_logit, live)
    parts = [Part(lent, v, stored.values)]  # of which the first columns are stored
    if lent:
        grad_weight = weight.new_empty((v, d))
        values = lent_values(grad_weight, n, lent)
        stored = stored._replace(lent=values, grad_weight=grad_weight)
        parts.insert(0, Part(0, lent, values))
    lse = torch.empty_like(label_logit)
    _stored_stats(hidden, weight, bias, labels, stored, parts, lse, ignore_index, logit_scale, softcap, plan)
    return total_loss(lse, label_logit, None, factor, 0.0, z_loss), lse, stored


def grouped_cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Formed] | None:
    """(loss, lse [N], the gradients but for a factor), or None where another way is the better one, or has to be taken.

    All tokens' values are kept for the backward pass, if there is room: see ``stored_cross_entropy``.
    """
    hidden, weight = row_major(hidden), row_major(weight)
    bias, labels = None if bias is None else bias.contiguous(), labels.contiguous()
    (n, d), v = hidden.shape, weight.shape[0]
    plan, later = make_plan(hidden, weight), make_plan(hidden, weight, backward=True)
    num_tiles, block_m = ceil_div(v, plan.block_n), max(plan.block_m, later.block_m)
    special = specialised(plan, bias, softcap)
    stored_instead = _stored_columns(
        n, d, v, hidden.dtype, num_tiles, max(plan.block_n, later.block_n), special, need_weight, memory_budget
    )
    block_n = max(plan.block_n, later.block_n) * (2 if special else 1)  # a multiple of every kernel's
    sizes = group_sizes(
        n, d, v, hidden.dtype, num_tiles, need_weight, block_m, block_n, sum(stored_instead), memory_budget
    )
    if sizes is None:
        return None
    label_logit, live = label_logits(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, plan, plan.block_m if special else 0
    )
    lse, one = torch.empty_like(label_logit), torch.ones((), device=hidden.device, dtype=torch.float32)
    groups = Groups(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, sizes, block_n, need_hidden, need_weight, later
    )  # fmt: skip
    for group in groups.groups():
        rows = slice(group.start, group.stop)
        flags = None if live is None else live[group.start // plan.block_m :]
        stored = Stored(group.parts[0].values, label_logit[rows], flags)
        _stored_stats(
            hidden[rows], weight, bias, labels[rows], stored, group.parts, lse[rows], ignore_index, logit_scale, softcap,
            plan,
        )  # fmt: skip
        grad_lse, grad_label, _ = token_gradients(one, factor, lse[rows], 0.0, z_loss)
        groups.add(group, stored, lse[rows], grad_lse, grad_label)
    loss = total_loss(lse, label_logit, None, factor, 0.0, z_loss)
    return loss, lse, Formed(groups.grad_hidden, groups.grad_weight)


def dense_cross_entropy(
    logits: Tensor,  # [N, V], of ``dense.multiplied``; used up by ``dense_gradients``
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, dense.Dense]:
    """(loss, lse [N], what ``dense_gradients`` needs): for few tokens, with real logits."""
    bias, labels = None if bias is None else bias.contiguous(), labels.contiguous()
    saved, label_logit = dense.forward(logits, bias, labels, ignore_index, logit_scale, softcap)
    return total_loss(saved.lse, label_logit, None, factor, 0.0, z_loss), saved.lse, saved
