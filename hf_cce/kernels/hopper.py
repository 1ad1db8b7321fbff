"""Warp-specialized tiles of logits on Hopper: one warp loads operands, two groups of four warps multiply them.

Each group computes half of a tile's tokens. While one group computes exponentials and stores, the other uses the tensor cores.
One group can be ahead of the other by as many stages of operands as shared memory holds. Programs are persistent, so the operands
of the next tile are loaded before the current one is finished.

Written in Gluon, which Triton's interpreter cannot run. Each function has a counterpart in hf_cce.kernels.forward,
hf_cce.kernels.backward or hf_cce.kernels.divergence, and tests compare the two on a GPU. See
``hf_cce.kernels.launch_config.uses_hopper`` for when it is used.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_cce.kernels.inputs import GradInputs, LogitInputs, TileStats, scale_and_softcap
from hf_cce.kernels.labels import LabelLogits
from hf_cce.kernels.launch_config import ceil_div, num_sms, padded
from hf_cce.kernels.launcher import Kernel

BLOCK_M = gl.constexpr(128)  # tokens of a tile, which share one flag in ``active``
ROWS = gl.constexpr(64)  # of these, tokens of each group
BLOCK_N = gl.constexpr(256)
# Small, so that shared memory holds many stages, and one group can be further ahead of the other.
BLOCK_K, STAGES = gl.constexpr(32), gl.constexpr(8)
GROUP_M = gl.constexpr(64)  # row blocks that share weight tiles in L2
STORE_N = gl.constexpr(64)  # columns of one TMA store
STORE_BUFFERS = gl.constexpr(2)  # staging buffers of each group
# Registers per thread of the two groups. With 24 for the warp that loads, this is all a multiprocessor has.
REGISTERS = gl.constexpr(240)
LOG2_E = gl.constexpr(1.4426950408889634)  # see hf_cce.kernels.tiles.exp

# The second names are those before Triton 3.8.
_load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # for the warps of one group


@gluon.jit
def _position(tile, num_row_blocks, num_col_blocks):
    """Return (row block, column block) like hf_cce.kernels.tiles.tile_position."""
    per_group = GROUP_M * num_col_blocks
    group = tile // per_group
    first = group * GROUP_M
    size = gl.maximum(gl.minimum(num_row_blocks - first, GROUP_M), 1)  # beyond the last tile, it would be 0
    return first + (tile % per_group) % size, (tile % per_group) // size


@gluon.jit
def _depth(active, tile, num_row_blocks, num_col_blocks, hidden_size):
    """Return the hidden size, or 0 if nothing is to be multiplied: all tokens are ignored, or the tile is beyond the last one."""
    row_block, _ = _position(tile, num_row_blocks, num_col_blocks)
    return gl.load(active + row_block, mask=tile < num_row_blocks * num_col_blocks, other=0) * hidden_size


@gluon.jit
def _producer(
    hidden, weight, h_ring, w_ring, ready, free, active, num_row_blocks, num_col_blocks, first_col, hidden_size
):
    stage, phase = 0, 1  # with phase 1, the first wait for each stage returns at once
    next_depth = _depth(active, gl.program_id(0), num_row_blocks, num_col_blocks, hidden_size)
    for tile in range(gl.program_id(0), num_row_blocks * num_col_blocks, gl.num_programs(0)):
        row_block, col_block = _position(tile, num_row_blocks, num_col_blocks)
        depth = next_depth
        next_depth = _depth(active, tile + gl.num_programs(0), num_row_blocks, num_col_blocks, hidden_size)
        row, col = row_block * BLOCK_M, first_col + col_block * BLOCK_N
        for k in range(0, depth, BLOCK_K):
            mbarrier.wait(free.index(stage), phase)
            # `pred` is always true. Without a use of `depth` inside the loop, Triton 3.6 drops `depth` from the loop over tiles:
            # all tiles get the first one's depth, and the program hangs.
            mbarrier.expect(ready.index(stage), hidden.block_type.nbytes + weight.block_type.nbytes, pred=k < depth)
            _load_block(hidden, [row, k], ready.index(stage), h_ring.index(stage))
            _load_block(weight, [col, k], ready.index(stage), w_ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(acc, h_ring, w_ring, ready, free, stage, phase, depth, WARP_GROUP: gl.constexpr):
    previous_stage = 0
    for k in range(0, depth, BLOCK_K):
        mbarrier.wait(ready.index(stage), phase)
        h = h_ring.index(stage).slice(WARP_GROUP * ROWS, ROWS, 0)
        acc = warpgroup_mma(h, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
        # One product may still be in flight; the operands of the previous one can be overwritten.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index(previous_stage), count=1, pred=k > 0)
        previous_stage = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(previous_stage), count=1, pred=depth > 0)
    return acc, stage, phase


@gluon.jit
def _tile_statistics(
    z, row, col_block, vocab_size, num_tokens, tile_stride, tile_lse, tile_ratio, STAT_N: gl.constexpr
):
    """Write the statistics of _tile_stats_kernel for tiles of STAT_N columns; return exp(z − maximum) and the maxima."""
    STAT_TILES: gl.constexpr = BLOCK_N // STAT_N
    z = z.reshape([ROWS, STAT_TILES, STAT_N])
    BY_TILE: gl.constexpr = gl.SliceLayout(2, z.type.layout)
    top = gl.max(z, 2)
    top = gl.where(top == float("-inf"), 0.0, top)
    e = gl.exp2((z - top.expand_dims(2)) * LOG2_E)
    total = gl.sum(e, 2)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, BY_TILE))
    tiles = col_block * STAT_TILES + gl.arange(0, STAT_TILES, gl.SliceLayout(0, BY_TILE))
    out = tiles.to(gl.int64)[None, :] * tile_stride + rows[:, None]
    inside = (rows < num_tokens)[:, None] & (tiles * STAT_N < vocab_size)[None, :]
    if tile_ratio is not None:
        safe_total = gl.where(total > 0, total, 1.0)
        width = gl.minimum(vocab_size - tiles * STAT_N, STAT_N).to(gl.float32)
        energy = gl.sum(e * e, 2) - total * total / width[None, :]
        gl.store(tile_ratio + out, (gl.maximum(energy, 0.0) / (safe_total * safe_total)).to(gl.bfloat16), mask=inside)
    gl.store(tile_lse + out, top + gl.log(total), mask=inside)
    return e, top


@gluon.jit
def _store(value, out, row, col, staging, WARP_GROUP: gl.constexpr):
    """Store ``value`` [ROWS, COLS] to ``out``, STORE_N columns at a time, through the group's buffers in ``staging``."""
    COLS: gl.constexpr = value.shape[1]
    if COLS > STORE_N:
        left, right = value.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)).split()
        _store(left, out, row, col, staging, WARP_GROUP)
        _store(right, out, row, col + COLS // 2, staging, WARP_GROUP)
    else:
        # Before the buffer is overwritten, its previous store must have read it, and all warps of the group must know that.
        here = WARP_GROUP * STORE_BUFFERS + col // STORE_N % STORE_BUFFERS
        tma.store_wait(STORE_BUFFERS - 1)
        _barrier()
        staging.index(here).store(value)
        fence_async_shared()
        _barrier()
        _store_block(out, [row, col], staging.index(here))


@gluon.jit
def _consumer(
    h_ring, w_ring, ready, free, staging, active, labels, shift, grad_lse, label_logit, tile_lse, tile_ratio, out, out_width,
    tile_stride, num_tokens, vocab_size, first_col, num_row_blocks, num_col_blocks, hidden_size, ignore_index, logit_scale,
    STAT_N: gl.constexpr, MASKED: gl.constexpr, WARP_GROUP: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    stage, phase = 0, 0
    next_depth = _depth(active, gl.program_id(0), num_row_blocks, num_col_blocks, hidden_size)
    for tile in range(gl.program_id(0), num_row_blocks * num_col_blocks, gl.num_programs(0)):
        row_block, col_block = _position(tile, num_row_blocks, num_col_blocks)
        depth = next_depth
        next_depth = _depth(active, tile + gl.num_programs(0), num_row_blocks, num_col_blocks, hidden_size)
        row, col = row_block * BLOCK_M + WARP_GROUP * ROWS, first_col + col_block * BLOCK_N
        rows = row + gl.arange(0, ROWS, ROW)
        in_rows = rows < num_tokens
        # Loaded before the products, which hide the latency.
        if labels is not None:
            label = gl.load(labels + rows, mask=in_rows, other=ignore_index)
        if shift is not None:
            row_shift = gl.load(shift + rows, mask=in_rows, other=0.0)
        if grad_lse is not None:
            g = gl.load(grad_lse + rows, mask=in_rows, other=0.0)
        if label_logit is not None:
            at_label = gl.load(label_logit + rows, mask=in_rows, other=0.0)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, ACC)
        if MASKED:
            # Products beyond the vocabulary are zero, so these logits stay at −inf. A branch that masks them after the product
            # would take LLVM much longer to compile.
            inside = (col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC)) < vocab_size)[None, :]
            acc = gl.where(inside, acc, float("-inf"))
        z, stage, phase = _multiply(acc, h_ring, w_ring, ready, free, stage, phase, depth, WARP_GROUP)
        if logit_scale is not None:
            z *= logit_scale
            if MASKED:  # the scale may be zero or negative
                z = gl.where(inside, z, float("-inf"))
        if grad_lse is not None:
            valid = label != ignore_index
            value = gl.exp2((z - gl.where(valid, row_shift, float("inf"))[:, None]) * LOG2_E)
            value *= gl.where(valid, g, 0.0)[:, None]
            if logit_scale is not None:
                value *= logit_scale
        elif shift is not None:
            value = (z - row_shift[:, None]).to(out.dtype)
            z = value.to(gl.float32)  # so that the probabilities of rounded logits add up to 1
        if tile_lse is not None:
            e, top = _tile_statistics(
                z, row, col_block, vocab_size, num_tokens, tile_stride, tile_lse, tile_ratio, STAT_N
            )
            if label_logit is not None:
                BY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, e.type.layout))
                # An infinite label logit makes the stored value zero for ignored tokens.
                at_label = gl.where(label != ignore_index, at_label, float("inf"))
                height = top - gl.convert_layout(at_label, BY_ROW)[:, None]
                value = (e * gl.exp2(gl.minimum(height, 60.0) * LOG2_E).expand_dims(2)).reshape([ROWS, BLOCK_N])
        if out is not None:  # noqa: SIM102 (the second is no constant)
            if col_block * BLOCK_N < out_width:
                _store(value.to(out.dtype), out, row, col_block * BLOCK_N, staging, WARP_GROUP)
    if out is not None:
        tma.store_wait(0)


# Neither values that change between steps nor unaligned slices of ``active`` may trigger recompilation.
@Kernel
@gluon.jit(do_not_specialize=["num_tokens", "first_col", "ignore_index"], do_not_specialize_on_alignment=["active"])
def _hopper_tiles_kernel(
    hidden,  # [N, D] descriptor of blocks [BLOCK_M, BLOCK_K]
    weight,  # [V, D] descriptor of blocks [BLOCK_N, BLOCK_K]
    active,  # [row blocks] int32: 0 if all tokens of the block are ignored, else 1
    labels,  # [N], if grad_lse or label_logit is given
    shift,  # [N], subtracted from the logits: logsumexps if grad_lse is given, else as in ``launch``; or None
    grad_lse,  # [N], or None
    label_logit,  # [N] if exponentials are written to out, else None
    tile_lse,  # written, or None: see _tile_stats_kernel; with a shift, of the numbers written to out
    tile_ratio,  # likewise, or None
    out,  # [N, out_width] descriptor of blocks [ROWS, STORE_N], written: see ``launch``; or None
    out_width,
    tile_stride,
    num_tokens,
    vocab_size,
    first_col,
    width,  # columns from first_col on
    hidden_size,
    ignore_index,
    logit_scale,
    STAT_N: gl.constexpr,
    MASKED: gl.constexpr,  # a tile of statistics may reach beyond the vocabulary
):
    h_ring = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_M, BLOCK_K], hidden.layout)
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    if out is not None:
        staging = gl.allocate_shared_memory(out.dtype, [2 * STORE_BUFFERS, ROWS, STORE_N], out.layout)
    else:
        staging = h_ring  # not used
    num_row_blocks, num_col_blocks = gl.cdiv(num_tokens, BLOCK_M), gl.cdiv(width, BLOCK_N)
    gl.warp_specialize(
        [
            (_consumer, (
                h_ring, w_ring, ready, free, staging, active, labels, shift, grad_lse, label_logit, tile_lse, tile_ratio, out,
                out_width, tile_stride, num_tokens, vocab_size, first_col, num_row_blocks, num_col_blocks, hidden_size,
                ignore_index, logit_scale, STAT_N, MASKED, 0,
            )),
            (_consumer, (
                h_ring, w_ring, ready, free, staging, active, labels, shift, grad_lse, label_logit, tile_lse, tile_ratio, out,
                out_width, tile_stride, num_tokens, vocab_size, first_col, num_row_blocks, num_col_blocks, hidden_size,
                ignore_index, logit_scale, STAT_N, MASKED, 1,
            )),
            (_producer, (
                hidden, weight, h_ring, w_ring, ready, free, active, num_row_blocks, num_col_blocks, first_col, hidden_size,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


_shared_layout = lru_cache(gl.NVMMASharedLayout)


def _descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Return a TMA descriptor of ``x`` with blocks [rows, cols], whose rows are swizzled in shared memory."""
    layout = _shared_layout(min(128, cols * x.itemsize), 8 * x.itemsize, rank=2)
    return TensorDescriptor.from_tensor(x, [rows, cols], layout)


def launch(
    inputs: LogitInputs,
    label: LabelLogits,
    start: int,  # first column of the vocabulary
    stop: int,
    out: Tensor | None,  # [N, ·], written: the logits' gradient, logits less ``shift``, or exponentials
    grads: GradInputs | None = None,
    tiles: TileStats | None = None,  # written
    stat_n: int = BLOCK_N.value,  # columns of one of ``tiles``: 128 or 256
    shift: Tensor | None = None,  # [N]
) -> None:
    """Compute ``forward.tile_stats``, or with ``grads`` ``backward.write_logit_gradient`` without the label term.

    With ``shift``, compute ``divergence.shifted_logits`` and, if ``tiles`` is given, statistics of the result.
    """
    (n, d, v, _), block_m, block_n, block_k = inputs.shape, BLOCK_M.value, BLOCK_N.value, BLOCK_K.value
    assert label.active is not None and label.active.numel() >= ceil_div(n, block_m)
    label_logit = None if out is None or grads is not None or shift is not None else label.logit
    labels = None if label_logit is None and grads is None else inputs.labels
    shift, grad_lse = (shift, None) if grads is None else (grads.lse, grads.upstream.lse)
    tile_lse, ratio = (None, None) if tiles is None else (tiles.lse, tiles.ratio)
    masked = tiles is not None and (start % block_n > 0 or v % block_n > 0)
    # Unused strides are 16 because Triton compiles another version of the kernel for numbers that 16 does not divide.
    out_width, tile_stride = 16 if out is None else padded(out.shape[1]), 16 if tiles is None else padded(n)
    _hopper_tiles_kernel[(min(num_sms(inputs.hidden), ceil_div(n, block_m) * ceil_div(stop - start, block_n)),)](
        _descriptor(inputs.hidden, block_m, block_k), _descriptor(inputs.weight, block_n, block_k), label.active,
        labels, shift, grad_lse, label_logit, tile_lse, ratio,
        None if out is None else _descriptor(out, ROWS.value, STORE_N.value), out_width, tile_stride, n, v, start, stop - start,
        d, inputs.ignore_index, scale_and_softcap(inputs)[0], STAT_N=stat_n, MASKED=masked, num_warps=4,
    )  # fmt: skip
