"""The covariance within dropped tiles: what it is, and that it brings back what uniform mass leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from losses import PLAIN, plain_loss
from numerics import assert_as_good, relative_error
from ways import force, peaked

from hf_cce import CCEConfig, FilterState, linear_cross_entropy

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128 if torch.cuda.is_available() else 32


# The interpreter truncates to bfloat16 where a GPU rounds.
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("v", "d", "chunk"), [(500, 40, 1 << 24), (517, 600, 1)])
def test_covariance(v: int, d: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_cce.kernels import tilt

    monkeypatch.setattr(tilt, "CHUNK", chunk)
    g = torch.Generator().manual_seed(0)
    # A mean that is ten times what the rows differ by, as in trained heads.
    weight = (torch.randn(v, d, generator=g) * 0.1 + torch.randn(d, generator=g)).to(DEVICE, dtype)
    tiles = -(-v // BLOCK)
    mass = torch.rand(tiles, generator=g).to(DEVICE)
    mass[1] = 0.0
    places = torch.randperm(v, generator=g).to(DEVICE)
    padded = torch.nn.functional.pad(places, (0, tiles * BLOCK - v)).int()
    actual = tilt.covariance(weight, padded, mass, BLOCK)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        total = torch.zeros(d, d, dtype=dtype, device=DEVICE)
        for number, rows in enumerate(weight[places].to(dtype).split(BLOCK)):
            x = (rows - rows.mean(0)) * (mass[number].to(dtype) * tiles / mass.sum()).sqrt()
            total += x.t() @ x
        return total / (tiles * BLOCK)

    exact = plain(torch.float64)
    twin = plain(torch.float32).to(dtype)
    if dtype == torch.bfloat16:  # centred rows are rounded too
        scales = (mass.double() * tiles / mass.double().sum()).sqrt()
        blocks = weight[places].double().split(BLOCK)
        x = torch.cat([((r - r.mean(0)) * s).to(dtype).double() for r, s in zip(blocks, scales, strict=True)])
        twin = (x.t() @ x / (tiles * BLOCK)).to(dtype)
    assert_as_good(actual, twin, exact, "covariance", dtype)
    nothing = tilt.covariance(weight, padded, torch.zeros_like(mass), BLOCK)
    assert not nothing.any()


def gradients(
    tau: float, tilted: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], dict[str, float]]:
    """(errors in the gradients of hidden and weight, what the state says of it) of one filtered step."""
    from hf_cce.kernels import filtered

    real = filtered.make_layout
    with monkeypatch.context() as patch:
        patch.setattr(filtered, "make_layout", lambda *a: dataclasses.replace(real(*a), tilted=tilted))
        force(patch, "filtered")
        hidden, weight, labels = peaked(128, 32, 1500, torch.float32, DEVICE)
        hidden = hidden / scale
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        state = FilterState()
        state.threshold(0.06, hidden)
        state._tau = torch.tensor(tau, device=DEVICE)
        config = CCEConfig("triton", gradient_filter=0.06)
        linear_cross_entropy(*leaves, labels, logit_scale=scale, config=config, filter_state=state).backward()
    wide: list[Any] = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(plain_loss(*wide, None, labels, dataclasses.replace(PLAIN, logit_scale=scale)), wide)
    return [relative_error(x.grad, y) for x, y in zip(leaves, exact, strict=True)], state.stats()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_it_brings_back_most_of_what_uniform_mass_leaves_out(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    (uniform, weight), told = gradients(0.01, False, scale, monkeypatch)
    (found, same), stats = gradients(0.01, True, scale, monkeypatch)
    assert stats["kept"] == told["kept"] < 0.5 and same == weight
    assert found < uniform / 2
    # and the measurement knows of it
    assert found / 2 < stats["error"] < 2 * found and stats["error"] < told["error"] / 1.5


def test_what_is_not_finite_in_an_ignored_token_stays_there() -> None:
    """As in plain PyTorch, where the gradient of an ignored token's hidden state is zero whatever that is."""
    from hf_cce.kernels.tilt import tilted_rows

    hidden = torch.randn(40, 24, device=DEVICE)
    mass = torch.rand(3, 40, device=DEVICE)
    hidden[7], hidden[8], mass[:, 7:9] = float("nan"), float("inf"), 0.0
    expected = hidden.double() * (mass.double().sum(0) * 0.5)[:, None]
    expected[7:9] = 0.0
    twin = (hidden * (mass.sum(0) * 0.5)[:, None]).nan_to_num(0.0)
    assert_as_good(tilted_rows(hidden, mass, 0.5), twin, expected, "rows")
