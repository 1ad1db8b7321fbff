"""Forward pass over the tiles of hidden_states · weightᵀ: each tile writes a few numbers per row instead of its logits.

``_tile_stats_kernel`` writes the statistics of each tile, ``_combine_kernel`` reduces them to those of the whole row. No program
waits for another or accumulates in global memory, so results are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.inputs import LogitInputs, TileStats, scale_and_softcap
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.kernels.launch_config import Plan, ceil_div, make_plan, operand, padded, uses_hopper
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import exp, softcap_slope, tile_logits, tile_position
from hf_cce.spec import Inputs, LogitStats, LossSpec, WantedStats


@triton.jit
def _store_ratio(e, total, slope, col, tile_ratio, tile_damping, out, in_rows, vocab_size):
    """Write the statistics for hf_cce.kernels.filter.select, computed from a tile's exponentials ``e`` [BLOCK_M, BLOCK_N]."""
    safe_total = tl.where(total > 0, total, 1.0)
    if slope is not None:
        e = tl.where(e > 0, e * slope, 0.0)  # outside V the slope is NaN
        damped = tl.sum(e, 1)
        tl.store(tile_damping + out, (damped / safe_total).to(tl.bfloat16), mask=in_rows)
    else:
        damped = total
    width = tl.minimum(vocab_size - col, e.shape[1]).to(tl.float32)
    energy = tl.sum(e * e, 1) - damped * damped / width
    tl.store(tile_ratio + out, (tl.maximum(energy, 0.0) / (safe_total * safe_total)).to(tl.bfloat16), mask=in_rows)


@triton.jit
def _store_exp(e, slope, height, valid, row, col, in_rows, exp_cache, cache_width):
    """Write e · exp(height) to hf_cce.kernels.exp_cache, up to its LOSS_LIMIT; ``height``: the maximum minus the label logit."""
    value = e * tl.where(valid, exp(tl.minimum(height, 60.0)), 0.0)[:, None]
    if slope is not None:
        value *= slope
    at = exp_cache + row.to(tl.int64) * cache_width + col
    here = tl.arange(0, e.shape[0])[:, None] * cache_width + tl.arange(0, e.shape[1])[None, :]
    in_cache = in_rows[:, None] & (col + tl.arange(0, e.shape[1]) < cache_width)[None, :]
    tl.store(at + here, value.to(exp_cache.dtype.element_ty), mask=in_cache)


# do_not_specialize: values that change between steps must not trigger recompilation. What depends on an argument that is None is
# compiled out.
@Kernel
@triton.jit(do_not_specialize=["num_tokens", "first_col", "ignore_index"])
def _tile_stats_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    labels,  # [N] int64
    tile_lse,  # [T, N] logsumexp of the row within the tile
    tile_sum,  # [T, N] Σ z, or None, like the next three
    tile_expectation,  # [T, N] Σ z exp(z) / Σ exp(z)
    tile_lse2,  # [T, N] logsumexp of 2 z
    tile_max,  # [T, N]
    tile_ratio,  # [T, N] bfloat16, or None: see hf_cce.kernels.filter.select
    tile_damping,  # [T, N], if tile_ratio and softcap are given: likewise
    label_logit,  # [N], written if the label is in the tile; with exp_cache, only read
    exp_cache,  # [N, cache_width], written, or None: see hf_cce.kernels.exp_cache
    cache_width,  # may exceed the vocabulary; columns outside the vocabulary are never read
    tile_stride,  # between the statistics of neighbouring column blocks: N, rounded up
    num_tokens,
    vocab_size,
    first_col,  # vocabulary entry of the first row of weight
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_row_blocks, num_col_blocks = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(vocab_size, BLOCK_N)
    row_block, col_block = tile_position(tl.program_id(0), num_row_blocks, num_col_blocks, GROUP_M)
    row, col = row_block * BLOCK_M, col_block * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    in_rows = rows < num_tokens
    label = tl.load(labels + rows, mask=in_rows, other=ignore_index)
    valid = label != ignore_index
    # Skip the product if all tokens of the tile are ignored.
    depth = tl.where(tl.sum(valid.to(tl.int32)) > 0, hidden_size, 0)
    z = tile_logits(
        hidden, weight, bias, None, row, col, num_tokens, vocab_size, depth, hidden_stride, weight_stride,
        logit_scale, softcap, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out = col_block.to(tl.int64) * tile_stride + rows
    if tile_sum is not None:
        tl.store(tile_sum + out, tl.sum(tl.where((cols < vocab_size)[None, :], z, 0.0), 1), mask=in_rows)
    if exp_cache is None:
        label -= first_col
        hit = valid & (label >= col) & (label < col + BLOCK_N)
        if tl.sum(hit.to(tl.int32)) > 0:
            at_label = tl.sum(tl.where(cols[None, :] == label[:, None], z, 0.0), 1)
            tl.store(label_logit + rows, at_label, mask=hit & in_rows)
    if col + BLOCK_N > vocab_size:
        z = tl.where((cols < vocab_size)[None, :], z, float("-inf"))
    top = tl.max(z, 1)
    if tile_max is not None:
        tl.store(tile_max + out, top, mask=in_rows)
    top = tl.where(top == float("-inf"), 0.0, top)  # a row of only -inf must give -inf, not NaN
    slope = None if softcap is None else softcap_slope(z, softcap)
    z = z - top[:, None]
    e = exp(z)
    total = tl.sum(e, 1)
    if tile_ratio is not None:
        _store_ratio(e, total, slope, col, tile_ratio, tile_damping, out, in_rows, vocab_size)
    tl.store(tile_lse + out, top + tl.log(total), mask=in_rows)
    if exp_cache is not None and col < cache_width:
        height = top - tl.load(label_logit + rows, mask=in_rows, other=0.0)
        _store_exp(e, slope, height, valid, row, col, in_rows, exp_cache, cache_width)
    if tile_expectation is not None:
        weighted = tl.sum(tl.where(e > 0, z * e, 0.0), 1)
        tl.store(tile_expectation + out, top + weighted / tl.where(total > 0, total, 1.0), mask=in_rows)
    if tile_lse2 is not None:
        tl.store(tile_lse2 + out, 2.0 * top + tl.log(tl.sum(e * e, 1)), mask=in_rows)


@triton.jit
def _add_tiles(part, top, total):
    """Add logsumexps ``part`` [BLOCK_T, BLOCK_R] to total · exp(top); return (top, total, factor of old total, summands)."""
    new_top = tl.maximum(top, tl.max(part, 0))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = exp(top - safe)
    e = exp(part - safe[None, :])
    return new_top, total * decay + tl.sum(e, 0), decay, e


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _combine_kernel(
    tile_lse,  # [T, N]; for this and the other tile statistics see _tile_stats_kernel
    tile_sum,
    tile_expectation,
    tile_lse2,
    tile_max,
    tile_ratio,
    label_logit,  # [N]
    labels,  # [N]
    lse,  # [N], written, like the next five, which are None if not requested
    mean_logit,
    entropy,
    log_sum_sq,
    is_top1,
    rounding,  # see hf_cce.kernels.filter.select
    tile_stride,
    num_tokens,
    vocab_size,
    num_tiles,
    ignore_index,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = rows < num_tokens
    valid = in_rows & (tl.load(labels + rows, mask=in_rows, other=ignore_index) != ignore_index)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    top2 = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total2 = tl.zeros((BLOCK_R,), tl.float32)
    weighted = tl.zeros((BLOCK_R,), tl.float32)
    z_sum = tl.zeros((BLOCK_R,), tl.float32)
    z_max = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    energy = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, num_tiles, BLOCK_T):
        tiles = first + tl.arange(0, BLOCK_T)
        at = tiles.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        mask = (tiles < num_tiles)[:, None] & valid[None, :]
        part = tl.load(tile_lse + at, mask=mask, other=float("-inf"))
        top, total, decay, e = _add_tiles(part, top, total)
        if entropy is not None:
            expectation = tl.load(tile_expectation + at, mask=mask, other=0.0)
            weighted = weighted * decay + tl.sum(e * expectation, 0)
        if rounding is not None:
            ratio = tl.load(tile_ratio + at, mask=mask, other=0.0).to(tl.float32)
            energy = energy * decay * decay + tl.sum(e * e * ratio, 0)
        if log_sum_sq is not None:
            part2 = tl.load(tile_lse2 + at, mask=mask, other=float("-inf"))
            top2, total2, _, _ = _add_tiles(part2, top2, total2)
        if mean_logit is not None:
            z_sum += tl.sum(tl.load(tile_sum + at, mask=mask, other=0.0), 0)
        if is_top1 is not None:
            z_max = tl.maximum(z_max, tl.max(tl.load(tile_max + at, mask=mask, other=float("-inf")), 0))
    row_lse = top + tl.log(total)
    tl.store(lse + rows, tl.where(valid, row_lse, 0.0), mask=in_rows)
    label = tl.load(labels + rows, mask=in_rows, other=0)
    no_tile = (valid == 0) | (label < 0) | (label >= vocab_size)  # no tile wrote the logit of this label
    tl.store(label_logit + rows, tl.zeros((BLOCK_R,), tl.float32), mask=in_rows & no_tile)
    if mean_logit is not None:
        tl.store(mean_logit + rows, tl.where(valid, z_sum / vocab_size, 0.0), mask=in_rows)
    if entropy is not None:
        tl.store(entropy + rows, tl.where(valid, row_lse - weighted / total, 0.0), mask=in_rows)
    if log_sum_sq is not None:
        tl.store(log_sum_sq + rows, tl.where(valid, top2 + tl.log(total2) - 2.0 * row_lse, 0.0), mask=in_rows)
    if rounding is not None:
        row_energy = tl.minimum(energy / (total * total), 1.0)
        row_rounding = row_energy * (1.0 - tl.sqrt(row_energy)) * tl.sqrt(1.0 - row_energy)
        tl.store(rounding + rows, tl.where(valid, row_rounding, 0.0), mask=in_rows)
    if is_top1 is not None:
        target = tl.load(label_logit + rows, mask=in_rows, other=0.0)
        tl.store(is_top1 + rows, valid & (target >= z_max), mask=in_rows)


def tile_stats(
    inputs: LogitInputs,
    tiles: TileStats,  # written
    label: LabelLogits,
    plan: Plan,
    first_col: int = 0,  # vocabulary entry of the first row of the weight
    exp_cache: Tensor | None = None,  # [N, ·], written: see hf_cce.kernels.exp_cache
) -> None:
    """Compute ``tiles`` and, for labels in [first_col, first_col + V), ``label.logit``.

    With ``exp_cache``, ``label.logit`` is an input. It also is if ``label.active`` is set, which selects the Hopper kernel.
    """
    if label.active is not None:
        from hf_cce.kernels import hopper

        hopper.launch(inputs, label, 0, inputs.shape.v, exp_cache, tiles=tiles, stat_n=plan.block_n)
        return
    hidden, weight, bias, labels, ignore_index, *_ = inputs
    n, d, v, _ = inputs.shape
    _tile_stats_kernel[(ceil_div(n, plan.block_m) * ceil_div(v, plan.block_n),)](
        operand(hidden, plan.block_m, plan), operand(weight, plan.block_n, plan), bias, labels,
        *tiles, label.logit, exp_cache, 0 if exp_cache is None else exp_cache.stride(0),
        padded(n), n, v, first_col, d, hidden.stride(0), weight.stride(0), ignore_index, *scale_and_softcap(inputs),
        **plan.constants(),
    )  # fmt: skip


def combine(
    tiles: TileStats,
    inputs: LogitInputs,
    label_logit: Tensor,  # [N]; zero is written if the label is ignored or out of range
    lse: Tensor,  # [N], written
    outputs: Sequence[Tensor | None] = (None,) * 5,  # mean_logit, entropy, log_sum_sq, is_top1, rounding; written
) -> None:
    """Reduce the statistics of tiles to statistics of tokens."""
    n, stride = inputs.shape.n, padded(inputs.shape.n)
    _combine_kernel[(ceil_div(n, 32),)](
        *tiles[:6], label_logit, inputs.labels, lse, *outputs, stride, n, inputs.shape.v, tiles.lse.numel() // stride,
        inputs.ignore_index, BLOCK_R=32, BLOCK_T=256, num_warps=8,
    )  # fmt: skip


def logit_stats(x: Inputs, spec: LossSpec, wanted: WantedStats) -> LogitStats:
    """Compute the same as ``hf_cce.reference.logit_stats``. Scratch: 4 bytes per token, tile and statistic, within the budget."""
    inputs = LogitInputs.from_spec(x, spec)
    n, _, v, _ = inputs.shape
    lse = torch.empty(n, dtype=torch.float32, device=x.hidden.device)
    results = [lse.new_empty(n if want else 0) for want in wanted]
    if wanted.top1:
        results[3] = torch.empty_like(lse, dtype=torch.bool)
    plan = make_plan(inputs.hidden, inputs.weight)
    hopper = n > 0 and uses_hopper(plan, x.bias, spec.softcap, any(wanted))
    label = label_logits(inputs, plan, plan.block_m) if hopper else LabelLogits(torch.empty_like(lse))
    num_tiles = ceil_div(v, plan.block_n)
    bytes_per_token = 4 * num_tiles * (1 + sum(wanted))
    size = max(plan.block_m, spec.memory_budget // bytes_per_token // plan.block_m * plan.block_m)  # tokens per launch
    for start in range(0, n, size):
        rows = slice(start, min(n, start + size))
        group = inputs.tokens(rows)
        stats = (lse.new_empty(num_tiles * padded(group.shape.n)) if want else None for want in (True, *wanted))
        tiles = TileStats(*stats)  # type: ignore[arg-type]
        tile_stats(group, tiles, label.tokens(rows, plan.block_m), plan)
        outputs = [result[rows] if want else None for result, want in zip(results, wanted, strict=True)]
        combine(tiles, group, label.logit[rows], lse[rows], [*outputs, None])
    return LogitStats(lse, label.logit, *results)
