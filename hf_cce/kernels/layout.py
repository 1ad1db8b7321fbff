"""How the filtered loss divides its scratch memory, and what its forward pass, its backward pass and its report hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor

from hf_cce.kernels.filter import mass_bytes
from hf_cce.kernels.order import Order, Vocabulary
from hf_cce.kernels.plan import Plan, ceil_div
from hf_cce.kernels.tilt import kept_bytes, making_bytes

MEASURED_TOKENS = 64  # tokens whose error is measured
FEWEST_AT_ONCE = 4  # of them, for which there must be room at the same time
MAX_PASSES = 96


@dataclass(frozen=True)
class Layout:
    """How the scratch is divided: decided from shapes alone, before anything is known of the data."""

    slab: int  # vocabulary entries whose rows of the weight are put in order at a time
    keep_rows: bool  # whether all of them stay so until the backward pass
    slots: int  # tiles of the logits' gradient that a pass holds
    room: int  # kept tiles after which a new pass begins
    passes: int  # as many as can be needed
    measured_at_once: int  # tokens whose error is measured at the same time: see hf_cce.kernels.filter_error
    tilted: bool  # whether there is room for what hf_cce.kernels.tilt needs


def make_layout(
    n: int, d: int, v: int, element: int, softcap: bool, need_weight: bool, plan: Plan, budget: int
) -> Layout | None:
    """The division of ``budget`` bytes, or None where they do not suffice. ``element``: bytes of an element of the inputs."""
    rows, cols = ceil_div(n, plan.block_m), ceil_div(v, plan.block_n)
    orders = 4 * (3 * v + 4 * n)
    means = (element + 4) * cols * d
    statistics = (4 + 2 + 2 * softcap) * cols * n
    lists = 4 * (7 * rows * cols + 8 * cols)
    hidden, total = element * n * d, 4 * n * d
    tile = element * plan.block_m * plan.block_n
    for keep_rows, tilted in product((True, False), (True, False)):
        # with a gradient of the weight its own memory holds the rows in order until it is written
        weight = element * v * d if keep_rows and not need_weight else 0
        tilt = kept_bytes(d, v, element, True, need_weight) * tilted
        standing = orders + means + hidden + weight + tilt
        mass = mass_bytes(n, cols, element, plan.block_m, d * tilted)
        # at the moments that need most: the forward pass, the choice of tiles, the products
        left, narrowest = budget - standing - statistics, min(v, 32 * plan.block_n)
        slab = v if keep_rows else left // (element * d) // plan.block_n * plan.block_n
        choice = standing + statistics + mass + lists
        products = standing + lists + total
        # While mass is multiplied the covariance is there twice; the means are too, but what is spread is not there yet.
        multiplied = products + mass + element * d * d * tilted
        slots = (budget - products) // tile
        fewest = max(2 * rows, 4 * plan.programs)
        making = making_bytes(n, d, v, element, plan.block_n, need_weight) * tilted
        if (
            slab < narrowest
            or left < 0
            or slots < fewest
            or multiplied > budget
            or 8 * tilt > budget
            or choice + making > budget
        ):
            continue
        per_token = (24 if softcap else 16) * v  # logits in float32 and what hf_cce.kernels.filter_error makes of them
        at_once = min(n, MEASURED_TOKENS, (budget - choice) // per_token)
        if at_once < min(n, FEWEST_AT_ONCE):
            continue
        tiles = rows * cols
        held = min(slots, tiles)
        room = held if held == tiles else held - rows
        passes = ceil_div(tiles, room)
        # With many passes it costs less to gather rows than to keep them.
        if passes > (MAX_PASSES // 8 if keep_rows else MAX_PASSES):
            continue
        # Rows of the weight's gradient are put in their order by way of the slots.
        if passes > 1 and held * plan.block_m * plan.block_n < v:
            continue
        return Layout(min(slab, v), keep_rows, held, room, passes, at_once, tilted)
    return None


class Report(NamedTuple):
    """What the filter did in one backward pass; tensors stay on the device until somebody asks."""

    kept: Tensor  # scalar int32: tiles that were computed
    tiles: int  # of so many
    dropped: Tensor  # partial sums of the tokens' probability in dropped tiles
    tokens: int
    tau: Tensor  # scalar: the threshold
    error: Tensor | None = (
        None  # scalar: error of the hidden states' gradient, relative to its norm, where it was measured
    )
    weight_error: Tensor | None = None  # likewise of the weight's gradient
    rounding_error: Tensor | None = None  # the first of these as rounding the logits to the inputs' dtype would make it
    rounding_weight_error: Tensor | None = None  # and the second


@dataclass(frozen=True)
class Backward:
    """What a backward pass is asked for. N-long tensors are in the order of ``Order.tokens``."""

    grad_lse: Tensor  # [N]
    grad_label: Tensor  # [N]
    tau: Tensor  # scalar: the threshold
    need_hidden: bool
    need_weight: bool
    measure: bool  # whether to estimate the error


@dataclass
class Filtered:
    """What the forward pass leaves to the backward pass. N-long tensors are in the order of ``order.tokens``."""

    order: Order
    hidden: Tensor  # [N, D]
    weight: Tensor | None  # [V, D] in the order of columns, if the layout keeps it
    bias: Tensor | None  # [V], likewise
    means: Tensor  # [T, D]: mean rows of the column blocks
    lse: Tensor  # [N]
    label_logit: Tensor  # [N]
    tile_lse: Tensor  # [T, N] and the next two
    tile_ratio: Tensor
    tile_damping: Tensor | None
    layout: Layout
    plan: Plan
    vocabulary: Vocabulary
    logit_scale: float
    softcap: float  # 0 is none
