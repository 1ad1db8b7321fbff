"""What the filter's errors are estimated from: which tokens and columns are drawn, and the kernels that make the rest of it."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_as_good

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("even", [0.0, 0.1])
@pytest.mark.parametrize(
    ("blocks", "block", "size", "count"), [(3000, 1, 3000, 64), (40, 128, 5003, 200), (7, 32, 200, 5)]
)
def test_places_are_drawn_by_what_is_dropped(blocks: int, block: int, size: int, count: int, even: float) -> None:
    """Each block as often as its share says, to less than one; a square stands for as many as make the sum right on average."""
    from hf_cce.kernels.residual import sample

    g = torch.Generator().manual_seed(0)
    dropped = torch.rand(blocks, generator=g) ** 8
    dropped[::3] = 0.0
    places, stands_for = (x.cpu() for x in sample(dropped.to(DEVICE), count, size, block, even))
    assert places.dtype == torch.int64 and len(places) == len(stands_for) == count
    assert (places >= 0).all() and (places < size).all() and (places.diff() >= 0).sum() >= count // 2
    weights = dropped.double() + even * dropped.double().mean()
    chosen = places // block
    drawn, due = torch.bincount(chosen, minlength=blocks), count * weights / weights.sum()
    # Of a sum in float32, a target may fall on the other side of a block's end.
    assert ((drawn - due).abs() < 1.0 + torch.finfo(torch.float32).eps * blocks * count).all()
    width = (size - chosen * block).clamp_max(block)
    exact = width * weights.sum() / (count * weights[chosen])
    twin = width * dropped.sum() * (1 + even) / (count * (dropped + even * dropped.mean())[chosen])
    assert_as_good(stands_for, twin, exact, "what a place stands for", torch.float32)


def test_where_nothing_is_dropped_places_stand_for_nothing() -> None:
    from hf_cce.kernels.residual import sample

    places, stands_for = sample(torch.zeros(50, device=DEVICE), 8, 50, 1)
    assert (places >= 0).all() and (places < 50).all() and not stands_for.any()
    _, stands_for = sample(torch.tensor([1.0, float("nan"), 1.0], device=DEVICE), 2, 3, 1)
    assert stands_for.isnan().all()
    every, one = sample(torch.zeros(5, device=DEVICE), 8, 5, 1)
    assert every.tolist() == list(range(5)) and one.tolist() == [1.0] * 5


def test_tokens_likely_to_be_rounded() -> None:
    """E (1 − √E) √(1 − E), and nothing where an energy is one or, by rounding, more."""
    from hf_cce.kernels.residual import token_energy

    n, tiles, v, block_m = 70, 3, 90, 128 if DEVICE == "cuda" else 16
    g = torch.Generator().manual_seed(0)
    tile_lse = torch.randn(tiles, 80, generator=g).to(DEVICE)
    lse = tile_lse[:, :n].logsumexp(0).clone()
    ratio = torch.rand(tiles, 80, generator=g).to(DEVICE, torch.bfloat16)
    tile_lse[0, 3], ratio[0, 3] = lse[3] + 1.0, 1.0
    labels = torch.randint(v, (n,), generator=g).int().to(DEVICE)
    labels[::9] = v
    one = torch.ones(n, device=DEVICE)
    energy, likely = (
        token_energy(tile_lse, ratio, None, lse, labels, one, v, block_m, likely=likely) for likely in (False, True)
    )
    half = token_energy(tile_lse, ratio, None, lse, labels, one / -2, v, block_m)
    assert torch.equal(half, energy / 4)
    assert energy[3] > 1.0 and (energy > 0).any() and not energy[::9].any()

    def formula(dtype: torch.dtype) -> torch.Tensor:
        e = energy.to(dtype).clamp_max(1.0)
        return e * (1.0 - e.sqrt()) * (1.0 - e).sqrt()

    assert_as_good(likely, formula(torch.float32), formula(torch.float64), "likely", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_what_dropped_tiles_leave_to_some_rows(dtype: torch.dtype) -> None:
    from hf_cce.kernels.tilt import Leaning, leans_of_rows

    v, rows, block_n = 301, 70, 32
    g = torch.Generator().manual_seed(0)
    along = torch.randn(v, 16, generator=g).to(DEVICE, dtype)
    leaves = torch.randn(-(-v // block_n), rows, generator=g).to(DEVICE)
    sampled = torch.tensor([0, 5, 31, 32, 299, 300, 300], device=DEVICE)
    actual = leans_of_rows(Leaning(along, along[:0]), sampled, leaves, v, -1.7, block_n)

    def formula(kind: torch.dtype) -> torch.Tensor:
        block = sampled // block_n
        width = (v - block * block_n).clamp_max(block_n)
        return along[sampled].to(kind) * (leaves.to(kind).sum(1)[block] * (-1.7 / width.to(kind)))[:, None]

    assert actual.dtype == dtype and actual.shape == (7, 16)
    assert_as_good(actual, formula(torch.float32).to(dtype), formula(torch.float64), "leans of rows", dtype)
