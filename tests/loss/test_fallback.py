"""Each loop of the PyTorch fallback, with matmuls as on a CPU and with the float32-output matmuls of a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import (
    EVERYTHING,
    PLAIN,
    SMALL_BUDGET,
    Options,
    check_against_plain,
    fused_loss,
    loss_and_gradients,
    make_inputs,
    plain_loss,
)
from numerics import assert_accurate, assert_all_accurate
from torch import Tensor

from hf_cce import CCEConfig, dispatch, fallback, linear_cross_entropy, linear_log_probs, reference
from hf_cce.dispatch import explain_dispatch
from hf_cce.spec import accumulation_dtype

GENERAL = Options(0.7, 5.0, False, 0.1, 1e-2, "mean")


def multiply(a: Tensor, b: Tensor, may_round: bool = False) -> Tensor:
    """Multiply 16-bit tensors into float32, as a GPU does."""
    kind = torch.promote_types(a.dtype, torch.float32)
    return a.to(kind) @ b.to(kind)


@pytest.fixture(params=["token_losses", "token_blocks"], ids=["one_block", "token_blocks"])
def loop(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["float32 products", "rounded products"])
def fp32_out(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def calls(loop: str, fp32_out: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send every scalar loss through ``loop``, if ``fp32_out`` as on a GPU; return a list of the calls."""
    calls: list[str] = []
    real = getattr(fallback, loop)
    monkeypatch.setattr(dispatch, "one_pass_pays", lambda *_: True)
    for name in ("token_losses", "token_blocks"):
        monkeypatch.setattr(fallback, name, lambda *args: calls.append(loop) or real(*args))
    if fp32_out:
        monkeypatch.setattr(fallback, "multiply", multiply)
        monkeypatch.setattr(fallback, "supports_fp32_out", lambda x: True)
        monkeypatch.setattr(reference, "_would_sync", lambda x: True)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [PLAIN, Options(reduction="sum"), GENERAL, EVERYTHING], ids=str)
def test_loss_and_gradients(loop: str, options: Options, dtype: torch.dtype, calls: list[str]) -> None:
    for ignored in ("none", "some", "all"):
        for n, d, v in ((300, 48, 1501), (70, 600, 34), (1, 64, 99)):
            inputs, labels = make_inputs(n, d, v, dtype, bias=options.bias, ignored=ignored)
            check_against_plain(
                fused_loss(SMALL_BUDGET), inputs, labels, options, dtype, f"{loop} {ignored} {n}×{d}×{v}"
            )
    assert calls == [loop] * 9


def test_a_weight_with_an_odd_number_of_entries(loop: str, calls: list[str]) -> None:
    """Float32 sums of its gradient are in the memory of the 16-bit gradient, which is not a whole number of them."""
    for v in (1, 33):
        inputs, labels = make_inputs(70, 7, v, torch.bfloat16)
        check_against_plain(fused_loss(SMALL_BUDGET), inputs, labels, PLAIN, torch.bfloat16, f"{loop} {v}")
    assert calls == [loop] * 2


@pytest.mark.usefixtures("calls")
def test_z_loss_with_a_bias_of_minus_infinity_at_id_0() -> None:
    """The label of ignored rows counts as 0."""
    (hidden, weight, bias), labels = make_inputs(40, 16, 31, torch.float32, bias=True)
    labels, found = labels.clamp(min=1).where(labels >= 0, labels), []
    bias[0] = -torch.inf
    for dtype, removed in ((torch.float64, True), (torch.float32, True), (torch.float32, False)):
        x = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight, bias)]
        rows = labels != -100 if removed else slice(None)
        loss = linear_cross_entropy(x[0][rows], x[1], labels[rows], bias=x[2], z_loss=1e-2)
        found.append([loss, *torch.autograd.grad(loss, x)])
    assert_all_accurate(*reversed(found))


def test_recomputed_logits_are_rounded_as_before() -> None:
    """With others, exp(logits − logsumexp) would not sum to 1 in a second backward pass, which large logits show."""
    inputs, labels = make_inputs(200, 64, 512, torch.bfloat16, bias=True)
    inputs[1].mul_(4)
    inputs[2].mul_(8)

    def with_a_backward_pass_before(*arguments: Any) -> Tensor:
        loss = fused_loss(CCEConfig())(*arguments)
        torch.autograd.grad(loss, arguments[:3], retain_graph=True)
        return loss

    check_against_plain(with_a_backward_pass_before, inputs, labels, Options(bias=True), torch.bfloat16, "second pass")


@pytest.mark.parametrize("frozen", [True, False])
def test_float16_with_a_grad_scaler(frozen: bool, loop: str, calls: list[str]) -> None:
    """GradScaler's initial scale of 65,536 only scales the gradients; a scale that is too large overflows as usual."""
    (hidden, weight, _), labels = make_inputs(300, 48, 1501, torch.float16)

    def gradients(loss, dtype: torch.dtype, scale: float) -> list[Tensor]:  # type: ignore[no-untyped-def]
        leaves = [x.detach().to(dtype, copy=True) for x in (hidden, weight)]
        leaves[0].requires_grad_()
        leaves[1].requires_grad_(not frozen)
        (loss(leaves[0], leaves[1], None, labels, PLAIN) * scale).backward()
        return [x.grad for x in leaves if x.grad is not None]

    ours = fused_loss(SMALL_BUDGET)
    for scale in (1.0, 65536.0):
        found, baselines = (gradients(loss, torch.float16, scale) for loss in (ours, plain_loss))
        assert_all_accurate(found, baselines, gradients(plain_loss, torch.float64, scale), f"scale {scale}")
    for a, baseline in zip(
        gradients(ours, torch.float16, 2.0**30), gradients(plain_loss, torch.float16, 2.0**30), strict=True
    ):
        assert not a.isfinite().all() and not baseline.isfinite().all()
    assert calls == [loop] * 3


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("fp32_out", [True])
def test_division_by_the_number_of_labels_adds_no_rounding() -> None:
    """With small logits, rounding the logits' gradient and the results are the only errors of full logits in bfloat16."""
    inputs, labels = make_inputs(90, 64, 256, torch.bfloat16, logit_std=0.2)
    check_against_plain(fused_loss(), inputs, labels, PLAIN, torch.bfloat16, "mean")


@pytest.mark.parametrize(("sizes", "divisor", "label"), [((90, 64, 256), 17, None), ((48, 16, 33), 5, 3)], ids=str)
def test_division_of_the_sum_adds_no_rounding(sizes: Any, divisor: int, label: int | None) -> None:
    """Transformers divides the sum itself if it gets ``num_items_in_batch``, so the loss does not know the divisor."""
    inputs, labels = make_inputs(*sizes, torch.bfloat16, bias=True, ignored="none")
    if label is not None:  # then its entry of the bias has by far the largest gradient
        labels.fill_(label)

    options = Options(bias=True, reduction="sum")
    check_against_plain(fused_loss(), inputs, labels, options, torch.bfloat16, "sum", lambda loss: loss / divisor)


@pytest.mark.usefixtures("calls")
def test_float16_with_a_low_temperature(loop: str, fp32_out: bool) -> None:
    """The gradient of a logit before the scale is up to ``logit_scale``, which leaves less room in float16."""
    (hidden, weight, _), labels = make_inputs(60, 16, 99, torch.float16)
    options = replace(PLAIN, logit_scale=100.0)
    found = loss_and_gradients(fused_loss(SMALL_BUDGET), (hidden, weight, None), labels, options, torch.float16)
    assert all(value.isfinite().all() for value in found.values())
    if fp32_out or loop == "token_losses":  # otherwise dh is rounded twice
        check_against_plain(fused_loss(SMALL_BUDGET), (hidden, weight, None), labels, options, torch.float16, loop)


def test_a_grad_scaler_skips_the_step_that_overflows() -> None:
    (hidden, weight, _), labels = make_inputs(60, 32, 99, torch.float32)
    head = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([head], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    steps = 0
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = linear_cross_entropy(hidden, head, labels)
        scaler.scale(loss).backward()
        before, scale = head.detach().clone(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(head, before) == (scaler.get_scale() < scale) and head.isfinite().all()
        steps += scaler.get_scale() == scale
    assert 0 < steps < 40 and loss < linear_cross_entropy(hidden, weight, labels)


@pytest.mark.usefixtures("calls")
def test_nan_in_ignored_tokens_affects_no_gradient() -> None:
    (hidden, weight, _), labels = make_inputs(300, 16, 99, torch.bfloat16)
    hidden[labels == -100] = float("nan")
    found = loss_and_gradients(fused_loss(SMALL_BUDGET), (hidden, weight, None), labels, PLAIN, torch.bfloat16)
    assert all(value.isfinite().all() for value in found.values()) and not found["hidden"][labels == -100].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["kept logits", "kept logits, masked", "full logits"])
def test_losses_of_tokens(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "prefers_full_logits", lambda p, spec: how == "full logits")
    if "masked" in how:  # on a GPU, selecting the tokens that have a label would synchronize
        monkeypatch.setattr(reference, "_would_sync", lambda x: True)
    monkeypatch.setattr(fallback, "_chunk_bytes", lambda z, spec, least: 1 << 18)  # several chunks
    for options in (PLAIN, Options(label_smoothing=0.1), Options(z_loss=1e-2), EVERYTHING):
        for ignored in ("none", "some", "all"):
            inputs, labels = make_inputs(300, 48, 1501, dtype, bias=options.bias, ignored=ignored)
            each = replace(options, reduction="none")
            check_against_plain(fused_loss(CCEConfig()), inputs, labels, each, dtype, f"{options} {ignored}")


@pytest.mark.parametrize("budget", ["auto", "1MiB"])
def test_entropy_gradients_with_ignored_tokens(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits kept or recomputed. Tokens without a label are masked, as on a GPU, or computed to have 16 rows."""
    n = 600 if budget == "1MiB" else 20
    if budget == "1MiB":
        monkeypatch.setattr(reference, "_would_sync", lambda x: True)
    (hidden, weight, _), labels = make_inputs(n, 16, 999, torch.float32)
    labels[8:] = -100

    def gradients(dtype: torch.dtype, h: Tensor, y: Tensor) -> list[Tensor]:
        leaves = [h.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        found = linear_log_probs(*leaves, y, entropy=True, config=CCEConfig(memory_budget=budget))
        return list(torch.autograd.grad((found.entropy - found.log_probs).sum(), leaves))

    found, exact = gradients(torch.float32, hidden, labels), gradients(torch.float64, hidden[:8], labels[:8])
    assert not found[0][8:].any()
    found[0] = found[0][:8]
    assert_all_accurate(found, gradients(torch.float32, hidden[:8], labels[:8]), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"logit_scale": 1.4}, {"softcap": 40.0}], ids=str)
def test_gradients_of_nearly_certain_tokens(options: dict[str, float], dtype: torch.dtype) -> None:
    """p(label) − 1 is a difference of almost equal numbers, and so is the logit of the label minus the logsumexp."""
    generator = torch.Generator().manual_seed(0)
    labels, weight = torch.arange(64), torch.randn(199, 64, generator=generator) / 8
    hidden = 20 * weight[:64] / weight[:64].square().sum(1, keepdim=True) / options.get("logit_scale", 1.0)
    hidden, weight = (torch.cat((x, torch.full((len(x), 1), 5.0)), 1).to(dtype) for x in (hidden, weight))  # + 25

    def gradients(by: tuple[float, float], dtype: torch.dtype, order: Tensor | None = None) -> list[Tensor]:
        """Return our gradients or, with an ``order`` of the sums in the logits, plain ones."""
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        if order is None:
            log_probs, entropy, *_ = linear_log_probs(*leaves, labels, entropy=True, **options)  # type: ignore[arg-type]
            assert entropy is not None
        else:
            z = F.linear(*(x[:, order] for x in leaves)).to(accumulation_dtype(dtype)) * options.get("logit_scale", 1.0)
            log_p = (40 * (z / 40).tanh() if "softcap" in options else z).log_softmax(-1)
            log_probs, entropy = log_p[labels, labels], -(log_p.exp() * log_p).sum(-1)
        return list(torch.autograd.grad((by[0] * log_probs + by[1] * entropy).mean(), leaves))

    for by in (1.0, 0.0), (0.0, 1.0), (1.0, 0.01):
        exact = gradients(by, torch.float64, torch.arange(65))
        plain = [gradients(by, dtype, torch.randperm(65, generator=generator)) for _ in range(8)]
        for ours, *baselines, true in zip(gradients(by, dtype), *plain, exact, strict=True):
            assert_accurate(ours, baselines, true, f"{options} {by}")


def test_gradients_of_wrong_tokens_with_large_logits() -> None:
    """The most likely entry has p = 1 and is not the label; logit minus logsumexp would be rounded to a multiple of 1e-4."""
    weight = torch.randn(99, 16, generator=torch.Generator().manual_seed(0))
    hidden, labels = weight[:40] * 75, torch.arange(1, 41)

    def loss(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor, options: Options) -> Tensor:
        return -linear_log_probs(hidden, weight, labels, entropy=True).log_probs.mean()

    assert F.linear(hidden, weight).amax() > 1000
    check_against_plain(loss, (hidden, weight, None), labels, PLAIN, torch.float32, "large logits")


def test_dispatch_by_dtype_and_size() -> None:
    found = explain_dispatch(8192, 896, 151_936, torch.float32)
    assert (found.strategy, found.implementation) == ("one_pass", "portable")
    assert explain_dispatch(8192, 896, 151_936, torch.float32, config=CCEConfig("triton")).strategy == "exact"
    for budget, strategy in (("auto", "one_pass"), ("520MiB", "one_pass"), ("512MiB", "recompute")):  # dW: 260 MiB
        config = CCEConfig("portable", memory_budget=budget)
        assert explain_dispatch(8192, 896, 151_936, torch.bfloat16, config=config).strategy == strategy
    assert explain_dispatch(4096, 576, 49_152, torch.bfloat16, "cpu").strategy == "recompute"
    assert explain_dispatch(4096, 576, 49_152, torch.bfloat16, "cpu", frozen=True).strategy == "one_pass"
    assert explain_dispatch(128, 576, 49_152, torch.bfloat16, "cpu").strategy == "one_pass"


def test_t4_uses_the_fallback_unless_triton_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    for capability, auto, asked in (((7, 5), "portable", "triton"), ((8, 0), "triton", "triton")):
        monkeypatch.setattr(dispatch, "_capability", lambda _, found=capability: found)
        assert dispatch.choose_implementation(device, torch.float16) == auto
        assert dispatch.choose_implementation(device, torch.float16, "triton") == asked
    monkeypatch.setattr(dispatch, "_capability", lambda _: (7, 0))
    with pytest.raises(RuntimeError, match=r"compute capability 7.0, but the kernels need 7.5"):
        dispatch.choose_implementation(device, torch.float16, "triton")


def test_a_loop_over_losses_of_few_tokens_keeps_no_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, blocks of float32 logits would keep the gradient of the whole weight for each loss until its backward pass."""
    monkeypatch.setattr(fallback, "token_blocks", lambda *_: pytest.fail("keeps the weight's gradient"))
    (hidden, weight, _), labels = make_inputs(60, 32, 99, torch.float32)

    def summed(each: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        leaf = weight.detach().requires_grad_()
        parts = zip(hidden.split(4), labels.split(4), strict=True)
        return torch.autograd.grad(sum(each(h, leaf, y) for h, y in parts), leaf)[0]

    found = summed(lambda h, w, y: linear_cross_entropy(h, w, y, reduction="sum"))
    expected = summed(lambda h, w, y: F.cross_entropy(h @ w.t(), y, reduction="sum"))
    assert_accurate(found, expected, expected, "weight")


@pytest.mark.parametrize("labeled", [3, 40], ids=["few labels", "more labels"])
@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("fp32_out", [False])
def test_rows_without_labels_are_not_computed(loop: str, labeled: int, spy: Any) -> None:
    """On a CPU, logits of ignored rows are only computed to have 16 rows."""
    computed = spy(fallback, "logits_to_gradients")
    inputs, labels = make_inputs(300, 16, 99, torch.float32)
    labels[:] = torch.where(torch.arange(300) < labeled, labels.clamp(min=0), -100)
    check_against_plain(fused_loss(CCEConfig()), inputs, labels, PLAIN, torch.float32, loop)
    assert [len(call.args[0]) for call in computed] == [max(16, labeled)]
