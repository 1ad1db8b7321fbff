"""How the filtered loss divides its scratch memory, and the records that its passes hand to each other."""

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
FEWEST_AT_ONCE = 4  # of them, for which there must be room at the same time
MASS_GROUP = 16  # column blocks whose mass one program sums for each token
MAX_PASSES = 96
MAX_PASSES_IN_ORDER = 12  # with more, gathering rows of the weight costs less than keeping them in order


@dataclass(frozen=True)
class Workspace:
    """The division of the scratch memory: decided from shapes alone, before anything is known of the data."""

    slab: int  # columns whose rows of the weight are put in order at a time
    keep_weight: bool  # whether all rows of the weight stay in order until the backward pass
    slots: int  # tiles of the logits' gradient that a pass holds
    room: int  # kept tiles after which a new pass begins
    passes: int  # as many as can be needed
    measured_at_once: int  # tokens whose error is estimated at the same time: see hf_cce.kernels.filter.error
    corrected: bool  # whether there is room for hf_cce.kernels.filter.corrections


def plan_workspace(shape: Shape, plan: Plan, softcap: bool, need_weight: bool, budget: int) -> Workspace | None:
    """Divide ``budget`` bytes, or return None where they do not suffice.

    Rows of the weight in order, and corrections, are used where there is room for them.
    """
    for keep_weight, corrected in product((True, False), (True, False)):
        needs = _Needs(shape, plan, softcap, need_weight, keep_weight, corrected)
        workspace = _divide(needs, budget)
        if workspace is not None:
            return workspace
    return None


@dataclass(frozen=True)
class _Needs:
    """Bytes that one way to divide the memory needs, by what they hold."""

    shape: Shape
    plan: Plan
    softcap: bool
    need_weight: bool
    keep_weight: bool
    corrected: bool

    @property
    def element(self) -> int:
        """Bytes of an element of the inputs."""
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
    def tile(self) -> int:
        return self.element * self.plan.block_m * self.plan.block_n

    @property
    def corrections(self) -> int:
        return correction_bytes(self.shape, self.need_weight) * self.corrected

    @property
    def making_corrections(self) -> int:
        return correction_scratch_bytes(self.shape, self.plan.block_n, self.need_weight) * self.corrected

    @property
    def standing(self) -> int:
        """From the forward pass to the end: permutations, means of column blocks, hidden states and weight in order."""
        n, d, v, _ = self.shape
        permutations = 4 * (3 * v + 5 * n)
        means = (self.element + 4) * self.cols * d
        # With a gradient of the weight, its own memory holds the rows in order until it is written.
        weight = self.element * v * d if self.keep_weight and not self.need_weight else 0
        return permutations + means + self.element * n * d + weight + self.corrections

    @property
    def statistics(self) -> int:
        """Of tiles, until kept tiles are chosen."""
        return (4 + 2 + 2 * self.softcap) * self.cols * self.shape.n

    @property
    def lists(self) -> int:
        """Of kept tiles."""
        return 4 * (7 * self.rows * self.cols + 8 * self.cols)

    @property
    def mass(self) -> int:
        """Of dropped tiles, see ``DroppedMass``."""
        per_token = self.element * (self.cols + self.shape.d * self.corrected) + 4 * ceil_div(self.cols, MASS_GROUP)
        return per_token * padded(self.shape.n) + 8 * self.cols * self.rows

    @property
    def choice(self) -> int:
        """While kept tiles are chosen and errors are estimated."""
        return self.standing + self.statistics + self.mass + self.lists

    @property
    def products(self) -> int:
        """While kept tiles are multiplied, besides the tiles."""
        return self.standing + self.lists + 4 * self.shape.n * self.shape.d


def _divide(needs: _Needs, budget: int) -> Workspace | None:
    (n, d, v, _), plan, rows, tiles = needs.shape, needs.plan, needs.rows, needs.rows * needs.cols
    left = budget - needs.standing - needs.statistics
    slab = v
    if not needs.keep_weight:
        slab = min(v, left // (needs.element * d) // plan.block_n * plan.block_n)
    # The product with the mass of dropped tiles has a second copy of the covariance.
    dropped_product = needs.products + needs.mass + needs.element * d**2 * needs.corrected
    slots = (budget - needs.products) // needs.tile
    if (
        left < 0
        or slab < min(v, 32 * plan.block_n)
        or slots < max(2 * rows, 4 * plan.programs)
        or dropped_product > budget
        or 8 * needs.corrections > budget
        or needs.choice + needs.making_corrections > budget
    ):
        return None
    per_token = (24 if needs.softcap else 16) * v  # logits in float32, and temporaries of the error estimate
    at_once = min(n, MEASURED_TOKENS, (budget - needs.choice) // per_token)
    if at_once < min(n, FEWEST_AT_ONCE):
        return None
    slots = min(slots, tiles)
    room = slots if slots == tiles else slots - rows
    passes = ceil_div(tiles, room)
    if passes > (MAX_PASSES_IN_ORDER if needs.keep_weight else MAX_PASSES):
        return None
    if passes > 1 and slots * plan.block_m * plan.block_n < v:  # too small to reorder rows of dW through
        return None
    return Workspace(slab, needs.keep_weight, slots, room, passes, at_once, needs.corrected)


class FilterReport(NamedTuple):
    """What the filter did in one backward pass; tensors stay on the device until somebody asks."""

    kept: Tensor  # scalar int32: tiles that were computed
    tiles: int  # of so many
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
    """What a backward pass is asked for. N-long tensors are in the order of ``TokenOrder.token_perm``."""

    grad_lse: Tensor  # [N]
    grad_label: Tensor  # [N]
    tau: Tensor  # scalar: the threshold
    need_hidden: bool
    need_weight: bool
    measure: bool  # whether to estimate the error
    by_rounding: bool  # what ``tau`` refers to: see hf_cce.kernels.filter.select


@dataclass
class SavedForward:
    """What the forward pass leaves to the backward pass. N-long tensors are in the order of ``TokenOrder.token_perm``."""

    order: TokenOrder
    hidden: Tensor  # [N, D]
    weight: Tensor | None  # [V, D] in the order of columns, if the workspace keeps it
    bias: Tensor | None  # [V], likewise
    means: Tensor  # [T, D]: mean rows of the column blocks
    lse: Tensor  # [N]
    label_logit: Tensor  # [N]
    rounding: Tensor  # [N]: see hf_cce.kernels.filter.select
    tile_lse: Tensor  # [T, N], like the next two: see hf_cce.kernels.filter.select
    tile_ratio: Tensor
    tile_damping: Tensor | None
    workspace: Workspace
    plan: Plan
    vocabulary: Vocabulary
    logit_scale: float
    softcap: float  # 0 is none

    @cached_property
    def tile_grid(self) -> tuple[int, int]:
        """Row blocks and column blocks."""
        return ceil_div(self.hidden.shape[0], self.plan.block_m), self.means.shape[0]
