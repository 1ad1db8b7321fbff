"""Division of the filtered loss's scratch memory, and the records passed between its forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from torch import Tensor

from hf_cce.kernels.filter.corrections import correction_bytes, correction_scratch_bytes
from hf_cce.kernels.filter.order import TokenOrder, Vocabulary
from hf_cce.kernels.inputs import Shape
from hf_cce.kernels.launch_config import Plan, ceil_div, padded

MEASURED_TOKENS = 64  # tokens whose error is estimated
MIN_MEASURED_AT_ONCE = 4  # fewest of these tokens that must fit in memory at a time
MASS_GROUP = 16  # column blocks whose mass one program sums for each token
MAX_PASSES = 96
MAX_PASSES_IN_ORDER = 12  # with more passes, gathering rows of the weight costs less than saving a sorted copy


@dataclass(frozen=True)
class Workspace:
    """Division of the scratch memory. It depends on shapes only, not on the data."""

    slab: int  # columns whose weight rows are sorted at a time
    keep_weight: bool  # the sorted weight is saved for the backward pass
    num_slots: int  # tiles of the logits' gradient that the buffer of a pass holds
    tiles_per_pass: int  # kept tiles after which a new pass begins
    passes: int  # largest number of passes that can be needed
    measured_at_once: int  # tokens whose error is estimated at a time: see hf_cce.kernels.filter.error
    corrected: bool  # hf_cce.kernels.filter.corrections are used


def plan_workspace(shape: Shape, plan: Plan, softcap: bool, need_weight: bool, budget: int) -> Workspace | None:
    """Divide ``budget`` bytes; return None if they do not suffice.

    The sorted weight is saved, and corrections are used, if there is room for them.
    """
    for keep_weight, corrected in product((True, False), (True, False)):
        needs = _Needs(shape, plan, softcap, need_weight, keep_weight, corrected)
        workspace = _divide(needs, budget)
        if workspace is not None:
            return workspace
    return None


@dataclass(frozen=True)
class _Needs:
    """Bytes needed by one choice of ``keep_weight`` and ``corrected``, by purpose."""

    shape: Shape
    plan: Plan
    softcap: bool
    need_weight: bool
    keep_weight: bool
    corrected: bool

    @property
    def element_bytes(self) -> int:
        """Bytes per element of the inputs."""
        return self.shape.dtype.itemsize

    @property
    def rows(self) -> int:
        """Number of row blocks."""
        return ceil_div(self.shape.n, self.plan.block_m)

    @property
    def cols(self) -> int:
        """Number of column blocks."""
        return ceil_div(self.shape.v, self.plan.block_n)

    @property
    def tile_bytes(self) -> int:
        return self.element_bytes * self.plan.block_m * self.plan.block_n

    @property
    def correction_bytes(self) -> int:
        return correction_bytes(self.shape, self.need_weight) * self.corrected

    @property
    def correction_scratch_bytes(self) -> int:
        return correction_scratch_bytes(self.shape, self.plan.block_n, self.need_weight) * self.corrected

    @property
    def persistent_bytes(self) -> int:
        """From the forward pass to the end: permutations, means of column blocks, sorted hidden states and weight."""
        n, d, v, _ = self.shape
        permutations = 4 * (3 * v + 5 * n)
        means = (self.element_bytes + 4) * self.cols * d
        # If dW is needed, its buffer holds the sorted weight until dW is written.
        weight = self.element_bytes * v * d if self.keep_weight and not self.need_weight else 0
        return permutations + means + self.element_bytes * n * d + weight + self.correction_bytes

    @property
    def tile_stats_bytes(self) -> int:
        """Statistics of tiles, until kept tiles are chosen."""
        return (4 + 2 + 2 * self.softcap) * self.cols * padded(self.shape.n)

    @property
    def tile_list_bytes(self) -> int:
        """Lists of kept tiles."""
        return 4 * (7 * self.rows * self.cols + 8 * self.cols)

    @property
    def mass_bytes(self) -> int:
        """Mass of dropped tiles, see ``DroppedMass``."""
        per_token = self.element_bytes * (self.cols + self.shape.d * self.corrected) + 4 * ceil_div(
            self.cols, MASS_GROUP
        )
        return per_token * padded(self.shape.n) + 8 * self.cols * self.rows

    @property
    def selection_peak_bytes(self) -> int:
        """Total while kept tiles are chosen and errors are estimated."""
        return self.persistent_bytes + self.tile_stats_bytes + self.mass_bytes + self.tile_list_bytes

    @property
    def multiply_bytes(self) -> int:
        """Total while kept tiles are multiplied, without the tiles themselves."""
        return self.persistent_bytes + self.tile_list_bytes + 4 * self.shape.n * self.shape.d


def _divide(needs: _Needs, budget: int) -> Workspace | None:
    (n, d, v, _), plan, rows, tiles = needs.shape, needs.plan, needs.rows, needs.rows * needs.cols
    left = budget - needs.persistent_bytes - needs.tile_stats_bytes
    slab = v
    if not needs.keep_weight:
        slab = min(v, left // (needs.element_bytes * d) // plan.block_n * plan.block_n)
    # The product with the mass of dropped tiles has a second copy of the covariance.
    dropped_product = needs.multiply_bytes + needs.mass_bytes + needs.element_bytes * d**2 * needs.corrected
    num_slots = (budget - needs.multiply_bytes) // needs.tile_bytes
    if (
        left < 0
        or slab < min(v, 32 * plan.block_n)
        or num_slots < max(2 * rows, 4 * plan.programs)
        or dropped_product > budget
        or 8 * needs.correction_bytes > budget
        or needs.selection_peak_bytes + needs.correction_scratch_bytes > budget
    ):
        return None
    # The error estimate's logits and temporaries: in float32, and once in the dtype of the inputs
    per_token = ((24 if needs.softcap else 16) + needs.element_bytes) * v
    measured_at_once = min(n, MEASURED_TOKENS, (budget - needs.selection_peak_bytes) // per_token)
    if measured_at_once < min(n, MIN_MEASURED_AT_ONCE):
        return None
    num_slots = min(num_slots, tiles)
    tiles_per_pass = num_slots if num_slots == tiles else num_slots - rows
    passes = ceil_div(tiles, tiles_per_pass)
    if passes > (MAX_PASSES_IN_ORDER if needs.keep_weight else MAX_PASSES):
        return None
    if passes > 1 and num_slots * plan.block_m * plan.block_n < v:  # too small to reorder the rows of dW
        return None
    return Workspace(slab, needs.keep_weight, num_slots, tiles_per_pass, passes, measured_at_once, needs.corrected)


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
    """Arguments of a backward pass. Tensors of length N are in the order of ``TokenOrder.token_perm``."""

    grad_lse: Tensor  # [N]
    grad_label: Tensor  # [N]
    tau: Tensor  # scalar: the threshold
    need_hidden: bool
    need_weight: bool
    measure: bool  # estimate the error
    by_rounding: bool  # ``tau`` is relative to the rounding error: see hf_cce.kernels.filter.select


@dataclass
class SavedForward:
    """Tensors saved for the backward pass. Those of length N are in the order of ``TokenOrder.token_perm``."""

    order: TokenOrder
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
    plan: Plan
    vocabulary: Vocabulary
    logit_scale: float
    softcap: float  # 0: no softcap

    @cached_property
    def tile_grid(self) -> tuple[int, int]:
        """Numbers of row blocks and of column blocks."""
        return ceil_div(self.hidden.shape[0], self.plan.block_m), self.means.shape[0]
