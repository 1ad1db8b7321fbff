"""The covariance of dropped tiles: its value, and that it restores what spreading the mass uniformly misses."""

import dataclasses

import pytest
import torch
from forced_strategies import BFLOAT16, DEVICE, dtype_for, force_strategy, in_the_interpreter, trained_like_inputs
from losses import Options, fused_step, plain_step
from numerics import assert_accurate, relative_error

from hf_cce import FilterState

pytest.importorskip("triton")

from hf_cce.kernels.filter import corrections
from hf_cce.kernels.filter import run as filter_run
from hf_cce.kernels.filter.corrections import mass_weighted, write_mass_weighted_columns

BLOCK = 128 if DEVICE == "cuda" else 32


DTYPES = [torch.float32, BFLOAT16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("v", "d", "chunk"), [(500, 40, 1 << 24), (517, 600, 1)])
def test_covariance(v: int, d: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "CENTERED_BYTES", chunk)
    g = torch.Generator().manual_seed(0)
    # The mean is ten times the deviation between rows, as in trained heads.
    weight = (torch.randn(v, d, generator=g) * 0.1 + torch.randn(d, generator=g)).to(DEVICE, dtype)
    tiles = -(-v // BLOCK)
    mass = torch.rand(tiles, generator=g).to(DEVICE)
    mass[1] = 0.0
    places = torch.randperm(v, generator=g).to(DEVICE)
    in_tiles = torch.nn.functional.pad(places, (0, tiles * BLOCK - v)).int()
    actual = corrections.dropped_covariance(weight, in_tiles, mass, BLOCK)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        total = torch.zeros(d, d, dtype=dtype, device=DEVICE)
        for number, rows in enumerate(weight[places].to(dtype).split(BLOCK)):
            x = (rows - rows.mean(0)) * (mass[number].to(dtype) * tiles / mass.sum()).sqrt()
            total += x.t() @ x
        return total / (tiles * BLOCK)

    baseline = plain(torch.float32).to(dtype)
    if dtype == torch.bfloat16:  # centered rows are rounded too
        scales = (mass.double() * tiles / mass.double().sum()).sqrt()
        blocks = weight[places].double().split(BLOCK)
        x = torch.cat([((r - r.mean(0)) * s).to(dtype).double() for r, s in zip(blocks, scales, strict=True)])
        baseline = (x.t() @ x / (tiles * BLOCK)).to(dtype)
    assert_accurate(actual, baseline, plain(torch.float64), "covariance", dtype)
    # If nothing is dropped (all labels ignored), all tiles count equally, because later steps reuse the result.
    nothing, evenly = (
        corrections.dropped_covariance(weight, in_tiles, torch.full_like(mass, x), BLOCK) for x in (0.0, 1.0)
    )
    assert evenly.any() and torch.equal(nothing, evenly)


@pytest.mark.parametrize("least", [0.0, -1.0, -0.5], ids=["positive", "negative", "mixed"])
@pytest.mark.parametrize(("n", "v", "d", "rank"), [(70, 500, 40, 16), (130, 517, 600, 9), (50, 100, 3, 3)])
def test_weight_correction_is_exact_for_low_rank_hidden_states(n: int, v: int, d: int, rank: int, least: float) -> None:
    """With few directions in the hidden states, the correction is their whole second moment times the centered weight rows."""
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(n, rank, generator=g) * 2.0 ** -torch.arange(rank) @ torch.randn(rank, d, generator=g)).to(
        DEVICE
    )
    weight = torch.randn(v, d, generator=g).to(DEVICE)
    tiles = -(-v // BLOCK)
    mass = ((torch.rand(n, generator=g) + least) * 1e-5).to(DEVICE)
    places = torch.randperm(v, generator=g).to(DEVICE)
    in_tiles = torch.nn.functional.pad(places, (0, tiles * BLOCK - v)).int()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        m, h = mass.to(dtype).abs(), hidden.to(dtype)
        moment = (h * m[:, None]).t() @ h / m.sum()
        return torch.cat([rows - rows.mean(0) for rows in weight[places].to(dtype).split(BLOCK)]) @ moment

    means = torch.stack([rows.mean(0) for rows in weight[places].split(BLOCK)])
    found = corrections.make_weight_correction(hidden, weight, in_tiles, means, mass, BLOCK)
    assert found.row_coeffs.shape == (v, 16) and found.basis.shape == (16, d)
    # Two chained products through 16 directions: one more rounding than the reference.
    assert_accurate(found.row_coeffs @ found.basis, plain(torch.float32), plain(torch.float64), "weight correction")
    nothing = corrections.make_weight_correction(hidden, weight, in_tiles, means, torch.zeros_like(mass), BLOCK)
    assert not (nothing.row_coeffs @ nothing.basis).any()


def test_weight_correction_is_close_to_the_best_of_its_rank() -> None:
    g = torch.Generator().manual_seed(1)
    hidden = (torch.randn(400, 64, generator=g) / torch.arange(1, 65)).to(DEVICE)
    weight = torch.randn(300, 64, generator=g).to(DEVICE)
    order = torch.nn.functional.pad(torch.arange(300), (0, -300 % BLOCK)).int().to(DEVICE)
    mass = torch.rand(400, generator=g).to(DEVICE)
    means = torch.stack([rows.mean(0) for rows in weight.split(BLOCK)])
    found = corrections.make_weight_correction(hidden, weight, order, means, mass, BLOCK)
    m = mass.double()
    moment = (hidden.double() * m[:, None]).t() @ hidden.double() / m.sum()
    rows = torch.cat([r - r.mean(0) for r in weight.double().split(BLOCK)])
    exact = rows @ moment
    first = torch.linalg.eigh(moment).eigenvectors[:, -16:]
    best = relative_error(rows @ first @ first.t() @ moment, exact)
    assert best < relative_error(found.row_coeffs.double() @ found.basis.double(), exact) < 1.25 * best


@pytest.mark.usefixtures("filtered")
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_non_finite_values_do_not_affect_the_next_step(where: str) -> None:
    """State learned in one step is reused in later steps and must not carry over infinities."""
    hidden, weight, labels = trained_like_inputs(64, 32, 400, dtype_for("filtered"), DEVICE)
    state = FilterState()
    for step in range(3):
        h, w = hidden.clone(), weight.clone()
        if step == 1:
            (h if where == "hidden" else w)[5:7] = float("inf")
        _, *found = fused_step((h, w, None), labels, 0.06, state=state)
        assert all(x.isfinite().all() for x in found) == (step != 1)
        if step == 0:
            state._vocabulary = None  # make step 1 learn the vocabulary order again


def gradients(
    tau: float, corrected: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], dict[str, float]]:
    real = filter_run.plan_workspace
    with monkeypatch.context() as patch:
        patch.setattr(filter_run, "plan_workspace", lambda *a: dataclasses.replace(real(*a), corrected=corrected))
        force_strategy(patch, "filtered")
        hidden, weight, labels = trained_like_inputs(128, 32, 1500, torch.float32, DEVICE)
        hidden = hidden / scale
        state, inputs, options = FilterState(), (hidden, weight, None), Options(logit_scale=scale)
        state.threshold(0.06, hidden)
        state._tau = torch.tensor(tau, device=DEVICE)
        _, *found = fused_step(inputs, labels, 0.06, options, state)
    _, *exact = plain_step(inputs, labels, options)
    return [relative_error(x, y) for x, y in zip(found, exact, strict=True)], state.stats()


@pytest.mark.slow
@in_the_interpreter
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_corrections_reduce_the_error(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    (uniform, uniform_weight), uniform_stats = gradients(0.01, False, scale, monkeypatch)
    (corrected, corrected_weight), stats = gradients(0.01, True, scale, monkeypatch)
    assert stats["kept"] == uniform_stats["kept"] < 0.5
    assert corrected < uniform / 2 and corrected_weight < 0.95 * uniform_weight
    # the measured error must account for the correction
    assert corrected / 2 < stats["error"] < 2 * corrected and stats["error"] < uniform_stats["error"] / 1.5
    assert corrected_weight / 1.5 < stats["weight_error"] < 1.5 * corrected_weight
    assert stats["weight_error"] < uniform_stats["weight_error"]


def test_non_finite_ignored_tokens_do_not_affect_other_gradients() -> None:
    """As in plain PyTorch: the gradient of an ignored token's hidden state is zero, whatever its value."""
    hidden = torch.randn(40, 24, device=DEVICE)
    mass = torch.rand(40, device=DEVICE)
    hidden[7], hidden[8], mass[7:9] = float("nan"), float("inf"), 0.0
    expected = hidden.double() * (mass.double() * 0.5)[:, None]
    expected[7:9] = 0.0
    baseline = (hidden * (mass * 0.5)[:, None]).nan_to_num(0.0)
    found = mass_weighted(hidden, mass * 0.5)
    assert_accurate(found, baseline, expected, "rows")
    columns = torch.full((24, 48), float("nan"), device=DEVICE)
    write_mass_weighted_columns(hidden, mass, 0.5, columns[:, :40])
    assert torch.equal(columns[:, :40], found.t()) and not columns[:, 40:].any()
