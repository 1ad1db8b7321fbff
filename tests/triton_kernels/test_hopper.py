"""The warp-specialized kernels give the same numbers as the kernels they replace, on the same GPU."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from forced_strategies import STRATEGIES, applies, check_strategy, forward_counter
from losses import PLAIN, Options, make_inputs
from numerics import assert_accurate
from torch import Tensor

pytest.importorskip("triton")

from hf_cce import linear_log_probs
from hf_cce.divergence_spec import Head
from hf_cce.kernels import divergence
from hf_cce.kernels import launch_config as plan
from hf_cce.kernels.backward import write_logit_gradient
from hf_cce.kernels.exp_cache import Slab
from hf_cce.kernels.forward import tile_stats
from hf_cce.kernels.inputs import GradInputs, LogitInputs, TileStats
from hf_cce.kernels.labels import LabelLogits, label_logits
from hf_cce.spec import TokenGrads

pytestmark = pytest.mark.gpu
IGNORE = -100
SCALED = Options(logit_scale=0.7, z_loss=1e-2)
# Only the last has whole blocks: of 128 tokens, of 256 columns, and of steps along the hidden dimension.
SIZES = [(1, 64, 99), (129, 96, 257), (700, 1000, 1003), (2048, 64, 4099), (1100, 4096, 3001), (300, 768, 50257)]
SIZES += [(8192, 64, 600), (8400, 64, 1003)]  # 64 row blocks, which share weight tiles, and a few more
SIZES += [(256, 768, 1024)]


def _case(n: int, d: int, v: int, dtype: torch.dtype, scale: float = 0.5) -> tuple[LogitInputs, plan.Plan, LabelLogits]:
    (hidden, weight, _), labels = make_inputs(n, d, v, dtype, "cuda", logit_std=4.0)
    labels = torch.where(labels < 0, IGNORE, labels)
    labels[128:384] = IGNORE  # whole blocks
    shapes = plan.make_plan(hidden, weight)
    inputs = LogitInputs(hidden, weight, None, labels, IGNORE, scale, 0.0)
    label = label_logits(inputs, shapes, 128)
    assert label.active is not None and label.active.tolist() == [int((x != IGNORE).any()) for x in labels.split(128)]
    return inputs, shapes, label


def hopper_runs() -> bool:
    return torch.cuda.get_device_capability()[0] == 9 and plan.is_hopper_validated()


@pytest.fixture
def hopper() -> None:
    if not hopper_runs():
        pytest.skip("needs a Hopper GPU and a version of Triton that they have run with")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("n", "d", "v"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "scale"), [("stats", 0.5), ("ratio", 1.0), ("ratio", -0.5), ("stored", 1.0)])
def test_statistics_equal_those_of_the_general_kernel(
    n: int, d: int, v: int, dtype: torch.dtype, kind: str, scale: float
) -> None:
    inputs, shapes, label = _case(n, d, v, dtype, scale)
    hidden, labels = inputs.hidden, inputs.labels
    assert shapes.hopper
    tiles = -(-v // shapes.block_n)
    found: list[list[Tensor]] = []
    for active in (None, label.active):
        tile_lse = torch.zeros(tiles, plan.padded(n), device="cuda")
        ratio = torch.zeros(tiles, plan.padded(n), device="cuda", dtype=torch.bfloat16) if kind == "ratio" else None
        buffer = plan.empty_slab(hidden, n + 1, min(v, 512)).zero_() if kind == "stored" else None
        stored = None if buffer is None else buffer[:n]
        at_label = label.logit.clone() if kind == "stored" else torch.full_like(label.logit, 7.0)
        tile_stats(inputs, TileStats(tile_lse, ratio=ratio), LabelLogits(at_label, active), shapes, exp_cache=stored)
        assert buffer is None or not buffer[n].any()
        if active is None:  # products on tensor cores round the same way
            assert torch.equal(at_label[labels != IGNORE], label.logit[labels != IGNORE])
        found.append([x for x in (tile_lse[:, :n], ratio, stored) if x is not None])
    for other, own in zip(*found, strict=True):
        assert torch.equal(own, other)
    assert not bool((labels != IGNORE).any()) or found[1][-1].count_nonzero() > 0


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("n", "d", "v"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_equal_those_of_the_general_kernel(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    inputs, _, label = _case(n, d, v, dtype)
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    shapes = plan.make_plan(hidden, weight, backward=True)
    lse = torch.where(labels == IGNORE, 0.0, (0.5 * hidden.float() @ weight.float().t()).logsumexp(1))
    grad_lse = torch.where(labels == IGNORE, 0.0, torch.rand(n, device="cuda"))
    grads = GradInputs(lse, TokenGrads(grad_lse, -grad_lse))
    for start, stop in ((0, min(v, 640)), (v - min(v, 77), v)):
        found = []
        for given in (None, label):
            buffer = plan.empty_slab(hidden, n + 1, 640).zero_()
            out = buffer[:n]
            write_logit_gradient(Slab(start, stop, out), inputs, grads, shapes, label=given)
            assert not buffer[n].any()
            found.append(out[:, : stop - start])
        inside = (labels >= start) & (labels < stop)
        rows, columns = inside.nonzero()[:, 0], labels[inside] - start
        # The label's own entry uses a logit that was computed separately.
        p = (0.5 * (hidden[rows].double() * weight[labels[rows]].double()).sum(1) - lse[rows]).exp()
        exact = (p - 1.0) * grad_lse[rows] * 0.5
        assert_accurate(found[1][rows, columns], found[0][rows, columns], exact, "the labels' entries")
        for out in found:
            out[rows, columns] = 0
        assert torch.equal(*found)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("n", "d", "v"), SIZES)
@pytest.mark.parametrize("scale", [1.0, -0.7])
def test_shifted_logits_equal_those_of_the_general_kernel(
    n: int, d: int, v: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden, weight, _), _ = make_inputs(n, d, v, torch.bfloat16, "cuda", logit_std=4.0)
    head, found = Head(hidden, weight, None, scale, 0.0), []
    shifts = divergence.shifts_of(head)
    for runs in (True, False):
        monkeypatch.setattr(plan, "is_hopper_validated", lambda runs=runs: runs)
        buffer = plan.empty_slab(hidden, n + 1, v).zero_()
        found.append(divergence.shifted_logits(head, slice(0, n), buffer[:n], shifts))
        assert not buffer[n].any()
    own, other = found
    assert (own.shift is None, own.head.logit_scale) == (True, 1.0)
    assert other.lse is None and torch.equal(other.shift, shifts.values) and other.head is head
    if scale == 1.0:
        assert torch.equal(own.values, other.values)
    exact = scale * (hidden.double() @ weight.double().t() - shifts.values.double()[:, None])
    assert_accurate(own.values, scale * other.values, exact, "logits")
    # That of the rounded logits, so that their probabilities add up to 1
    z = own.values.double()
    assert_accurate(own.lse[:, :n].logsumexp(0), z.float().logsumexp(1), z.logsumexp(1), "logsumexps")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("d", [768, 4096])
def test_no_log_probability_exceeds_zero(d: int) -> None:
    """If a token is certain, its logit and the logsumexp must be rounded the same way."""
    torch.manual_seed(0)
    weight = torch.randn(3001, d, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 3001, (700,), device="cuda")
    hidden = weight[labels] * (40 / d) + 0.01 * torch.randn(700, d, device="cuda", dtype=torch.bfloat16)
    log_probs = linear_log_probs(hidden, weight, labels).log_probs
    assert -0.01 < float(log_probs.min()) <= float(log_probs.max()) <= 0


@pytest.mark.parametrize("special", [True, False], ids=["hopper", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_with_and_without_the_hopper_kernels(
    strategy: str, dtype: torch.dtype, special: bool, monkeypatch: pytest.MonkeyPatch, forced: Counter[str]
) -> None:
    """The Hopper kernels are disabled for Triton versions they have not been tested with."""
    launched: list[int] = []
    if not special:
        monkeypatch.setattr(plan, "is_hopper_validated", lambda: False)
    elif hopper_runs():
        from hf_cce.kernels import hopper

        launch = hopper.launch
        monkeypatch.setattr(hopper, "launch", lambda *args, **of: launched.append(1) or launch(*args, **of))
    for n, d, v in ((1000, 576, 32001), (128, 1000, 50257), (2304, 3072, 4099)):
        inputs, labels = make_inputs(n, d, v, dtype, "cuda")
        labels[128:384] = IGNORE  # whole blocks
        labels[-1] = 7
        for options in (PLAIN, Options(frozen=True), replace(SCALED, frozen=True), SCALED):
            if applies(strategy, options, dtype):
                name = f"{n}×{d}×{v}, {'' if special else 'not '}hopper,"
                check_strategy(strategy, inputs, labels, options, dtype, name)
    expected = forward_counter(strategy) != "one_block" and (strategy == "exact" or applies(strategy, PLAIN, dtype))
    assert bool(launched) == (special and hopper_runs() and expected)
