"""Division of the filtered loss's scratch memory, and the records passed between its forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor

from hf_cce.kernels.filter.corrections import correction_bytes, correction_scratch_bytes
from hf_cce.kernels.filter.order import Vocabulary
from hf_cce.kernels.inputs import Shape
from hf_cce.kernels.launch_config import FilterPlan, ceil_div, padded

MEASURED_TOKENS = 64  # tokens whose error is estimated
MIN_MEASURED_AT_ONCE = 4  # fewest of these tokens that must fit in memory at a time
MASS_GROUP = 16  # column blocks whose mass one program sums for each token
MAX_PASSES = 96
MAX_PASSES_IN_ORDER = 12  # with more passes, gathering rows of the weight costs less than saving a sorted copy


@dataclass(frozen=True)
class Workspace:
    """Division of the scratch memory. It depends on shapes only, not on the data."""

    tile_grid: tuple[int, int]  # numbers of row blocks and of column blocks
    slab: int  # columns whose weight rows are sorted at a time
    keep_weight: bool  # the sorted weight is saved for the backward pass
    num_slots: int  # tiles of the logits' gradient that the buffer of a pass holds
    tiles_per_pass: int  # kept tiles after which a new pass begins
    passes: int  # largest number of passes that can be needed
    measured_at_once: int  # tokens whose error is estimated at a time: see hf_cce.kernels.filter.error
    corrected: bool  # hf_cce.kernels.filter.corrections are used


def plan_workspace(shape: Shape, plan: FilterPlan, softcap: bool, need_weight: bool, budget: int) -> Workspace | None:
    """Divide ``budget`` bytes, if possible with a sorted weight and corrections; return None if they do not suffice."""
    for keep_weight, corrected in product((True, False), (True, False)):
        workspace = _divide(shape, plan, softcap, need_weight, keep_weight, corrected, budget)
        if workspace is not None:
            return workspace
    return None


def _divide(
    shape: Shape, plan: FilterPlan, softcap: bool, need_weight: bool, keep_weight: bool, corrected: bool, budget: int
) -> Workspace | None:
    """Divide ``budget`` with one choice of ``keep_weight`` and ``corrected``. All needs below are in bytes."""
    (n, d, v, _), element = shape, shape.dtype.itemsize
    rows, cols = ceil_div(n, plan.block_m), ceil_div(v, plan.block_n)
    tiles = rows * cols
    corrections = correction_bytes(shape, need_weight) * corrected
    # From the forward pass to the end: permutations, means of column blocks, sorted hidden states and weight.
    persistent = 4 * (3 * v + 5 * n) + (element + 4) * cols * d + element * n * d + corrections
    if keep_weight and not need_weight:  # if dW is needed, its buffer holds the sorted weight until dW is written
        persistent += element * v * d
    tile_stats = (4 + 2 + 2 * softcap) * cols * padded(n)  # until kept tiles are chosen
    tile_lists = 4 * (7 * tiles + 8 * cols)  # of kept tiles
    # Mass of dropped tiles, see ``DroppedMass``
    mass = (element * (cols + d * corrected) + 4 * ceil_div(cols, MASS_GROUP)) * padded(n) + 8 * tiles
    selection_peak = persistent + tile_stats + mass + tile_lists  # while kept tiles are chosen and errors estimated
    multiply_fixed = persistent + tile_lists + 4 * n * d  # while kept tiles are multiplied, without their slots
    left, slab = budget - persistent - tile_stats, v
    if not keep_weight:
        slab = min(v, left // (element * d) // plan.block_n * plan.block_n)
    num_slots = (budget - multiply_fixed) // (element * plan.block_m * plan.block_n)
    if (
        left < 0
        or slab < min(v, 32 * plan.block_n)
        or num_slots < max(2 * rows, 4 * plan.programs)
        # The product with the mass of dropped tiles has a second copy of the covariance.
        or multiply_fixed + mass + element * d**2 * corrected > budget
        or 8 * corrections > budget
        or selection_peak + correction_scratch_bytes(shape, plan.block_n, need_weight) * corrected > budget
    ):
        return None
    # The error estimate's logits and temporaries: in float32, and once in the dtype of the inputs
    per_token = ((24 if softcap else 16) + element) * v
    measured_at_once = min(n, MEASURED_TOKENS, (budget - selection_peak) // per_token)
    if measured_at_once < min(n, MIN_MEASURED_AT_ONCE):
        return None
    num_slots = min(num_slots, tiles)
    tiles_per_pass = num_slots if num_slots == tiles else num_slots - rows
    passes = ceil_div(tiles, tiles_per_pass)
    too_small_to_reorder = num_slots * plan.block_m * plan.block_n < v  # rows of dW, after several passes
    if passes > (MAX_PASSES_IN_ORDER if keep_weight else MAX_PASSES) or (passes > 1 and too_small_to_reorder):
        return None
    return Workspace((rows, cols), slab, keep_weight, num_slots, tiles_per_pass, passes, measured_at_once, corrected)


class FilterReport(NamedTuple):
    """Statistics of one filtered backward pass. Tensors stay on the device, because reading them would synchronize."""

    kept: Tensor  # scalar int32: number of kept tiles
    tiles: int  # number of all tiles
    dropped: Tensor  # partial sums of the tokens' probability in dropped tiles
    tokens: int
    tau: Tensor  # scalar: the threshold
    # Errors relative to the norm of the gradient, scalars; None where they were not estimated.
    error: Tensor | None = None  # of dh, from dropped tiles
    weight_error: Tensor | None = None  # of dW, from dropped tiles
    rounding_error: Tensor | None = None  # of dh, if logits were rounded to the dtype of the inputs
    rounding_weight_error: Tensor | None = None  # of dW, likewise


@dataclass(frozen=True)
class BackwardRequest:
    """Arguments of a backward pass. Tensors of length N are in the order of ``SavedForward.token_perm``."""

    grad_lse: Tensor  # [N]
    grad_label: Tensor  # [N]
    tau: Tensor  # scalar: the threshold
    need_hidden: bool
    need_weight: bool
    measure: bool  # estimate the error
    by_rounding: bool  # ``tau`` is relative to the rounding error: see hf_cce.kernels.filter.select


@dataclass
class SavedForward:
    """Tensors saved for the backward pass. Those of length N are in the order of ``token_perm``."""

    token_perm: Tensor  # [N] int64: the token of each row
    labels: Tensor  # [N] int32: the column of each row's label; V if ignored
    hidden: Tensor  # [N, D]
    weight: Tensor | None  # [V, D] in the order of columns; None unless ``workspace.keep_weight``
    bias: Tensor | None  # [V] in the order of columns
    means: Tensor  # [T, D]: mean rows of the column blocks
    lse: Tensor  # [N]
    label_logit: Tensor  # [N]
    rounding: Tensor  # [N]: see hf_cce.kernels.filter.select
    tile_lse: Tensor  # [T, N]: see hf_cce.kernels.filter.select
    tile_ratio: Tensor  # [T, N], likewise
    tile_damping: Tensor | None  # [T, N], likewise
    workspace: Workspace
    plan: FilterPlan
    vocabulary: Vocabulary
    logit_scale: float
    softcap: float  # 0: no softcap
