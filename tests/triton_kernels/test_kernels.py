"""The Triton kernels: on a GPU, or in Triton's interpreter with tiles small enough that inputs span several."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from forced_strategies import (
    BFLOAT16,
    DEVICE,
    STRATEGIES,
    applies,
    backward_counter,
    check_strategy,
    config_for,
    count_strategies,
    force_strategy,
    forward_counter,
)
from losses import (
    EVERYTHING,
    OPTIONS,
    PLAIN,
    Options,
    check_against_plain,
    fused_loss,
    loss_and_gradients,
    make_inputs,
    plain_loss,
)
from numerics import assert_accurate, assert_all_accurate

from hf_cce import CCEConfig, dispatch, linear_cross_entropy, linear_log_probs

pytest.importorskip("triton")

from hf_cce.kernels import backward, forward

CUDA = DEVICE == "cuda"
TRITON = CCEConfig(implementation="triton")


# All options of the scalar loss at once, for every strategy except the filter's, which has no bias gradient; see test_filter.py.
SCALAR = Options(0.7, 5.0, True, 0.0, 1e-2, "mean")
NO_BIAS = replace(SCALAR, bias=False)
FROZEN = (Options(frozen=True), replace(NO_BIAS, frozen=True))


@pytest.mark.parametrize(
    ("options", "strategy", "dtype"),
    [
        pytest.param(options, strategy, dtype, marks=BFLOAT16.marks if dtype == torch.bfloat16 else ())
        for options in (*OPTIONS, SCALAR, NO_BIAS, *FROZEN)
        for strategy in STRATEGIES
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if applies(strategy, options, dtype)
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "d", "v"), [(1, 64, 99), (40, 72, 131), (36, 600, 48)])
def test_loss_and_gradients(
    n: int, d: int, v: int, options: Options, strategy: str, dtype: torch.dtype, forced: Counter[str]
) -> None:
    inputs, labels = make_inputs(n, d, v, dtype, DEVICE, bias=options.bias)
    check_strategy(strategy, inputs, labels, options, dtype, f"{n}×{d}×{v}")
    if options.reduction != "none":
        assert forced == {forward_counter(strategy): 1, backward_counter(strategy): 1}


@pytest.mark.parametrize("strategy", ["one_block", "exp_cache", "filtered", "exact"])
@pytest.mark.parametrize("softcap", [30.0, 1e4])
def test_a_softcap_far_above_the_logits(softcap: float, strategy: str, forced: Counter[str]) -> None:
    """The softcap has almost no effect: tanh of small numbers must not suffer from cancellation."""
    options = Options(softcap=softcap)
    inputs, labels = make_inputs(40, 72, 131, torch.float32, DEVICE)
    check_strategy(strategy, inputs, labels, options, torch.float32)


@pytest.mark.parametrize("strategy", ["one_block", "exact"])
def test_a_vocabulary_of_several_blocks_of_columns(strategy: str, forced: Counter[str]) -> None:
    """Each block may contain a larger logit than the blocks before it, so running sums must be rescaled."""
    inputs, labels = make_inputs(3, 16, 9000, torch.float32, DEVICE)
    inputs[1][-1] = 4.0 * inputs[0][0]  # by far the largest of the first token
    check_strategy(strategy, inputs, labels, PLAIN, torch.float32)


def test_full_logits_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path a GPU takes if the budget holds all logits of a few tokens; tested here on any device."""
    monkeypatch.setattr(dispatch, "prefers_full_logits", lambda *_: True)
    for options in (*OPTIONS, SCALAR):
        for ignored in ("some", "all") if options.reduction != "none" else ():
            inputs, labels = make_inputs(40, 72, 131, torch.float32, DEVICE, bias=options.bias, ignored=ignored)
            check_against_plain(fused_loss(), inputs, labels, options, torch.float32, f"{options}, {ignored}")
    (hidden, weight, _), labels = make_inputs(40, 72, 131, torch.float32)
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    for items, by in ((torch.tensor(7), 7), (torch.tensor(0.5), 0.5), (3, 3)):
        found = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=items)
        assert_accurate(found, total / by, total / by, f"items {items}")
    labels[3] = 131
    with pytest.raises(IndexError, match="out of bounds"):  # PyTorch's own check; on a GPU a device assertion
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("options", "strategy"), [(PLAIN, "exact"), (PLAIN, "filtered"), (EVERYTHING, "any"), (SCALAR, "any")], ids=str
)
def test_small_budgets_change_only_the_order_of_summation(
    options: Options, strategy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget leads to slabs of the vocabulary, groups of tokens, or two passes."""
    monkeypatch.setattr(CCEConfig, "__post_init__", lambda self: None)
    # "any": chosen by thresholds and budget
    counts = count_strategies(monkeypatch) if strategy == "any" else force_strategy(monkeypatch, strategy)
    budgets = {"filtered": (80_000, 160_000), "exact": (64, 4096, 40_000)}.get(strategy, (64, 30_000, 80_000))
    inputs, labels = make_inputs(70, 72, 300, dtype, DEVICE, bias=options.bias)
    for budget in budgets:
        config = config_for(strategy, memory_budget=budget)
        check_against_plain(fused_loss(config), inputs, labels, options, dtype, f"budget {budget}, {strategy}")
    if strategy == "filtered" and not CUDA:  # a GPU's tiles are too large for these budgets
        assert counts == {"filtered": len(budgets), "filtered gradients": len(budgets)}
    assert forward.make_plan is backward.make_plan  # both directions use the same tiles


def test_statistics_of_ignored_tokens_are_zero_in_uninitialized_memory() -> None:
    (hidden, weight, _), labels = make_inputs(40, 64, 99, torch.float32, DEVICE, ignored="none")
    labels[::3] = 5  # a vocabulary entry that no tile writes where it is ignored
    wants = dict(entropy=True, log_sum_sq_probs=True, mean_logit=True, logsumexp=True)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        found = linear_log_probs(hidden, weight, labels, ignore_index=5, config=TRITON, **wants)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in found._asdict().items():
        if value is not None:
            assert value.isfinite().all() and not value[labels == 5].any(), name


def test_results_repeat_bit_for_bit() -> None:
    inputs, labels = make_inputs(200, 64, 999, torch.float16, DEVICE)
    first, second = (loss_and_gradients(fused_loss(TRITON), inputs, labels, PLAIN, torch.float16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.skipif(CUDA, reason="on a GPU it is a device-side assertion, tested below")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [99, -1])
def test_out_of_range_labels_raise(bad: int, strategy: str, forced: Counter[str]) -> None:
    (hidden, weight, _), labels = make_inputs(40, 64, 99, torch.float32)
    labels[17] = bad
    hidden.requires_grad_()
    weight.requires_grad_()
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match=f"the first is {bad}"):
            linear_cross_entropy(hidden, weight, labels, reduction=reduction, config=config_for(strategy))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "d", "v"),
    [(1, 64, 99), (7, 576, 49152), (128, 1000, 50257), (1000, 2304, 32000), (1000, 576, 151936), (128, 64, 128256)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_real_sizes_on_the_gpu(
    n: int, d: int, v: int, dtype: torch.dtype, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in (*OPTIONS, SCALAR, *FROZEN):
        if not applies(strategy, options, dtype):
            continue
        inputs, labels = make_inputs(n, d, v, dtype, "cuda", bias=options.bias)
        with monkeypatch.context() as patch:
            force_strategy(patch, strategy)
            check_strategy(strategy, inputs, labels, options, dtype, f"{n}×{d}×{v}")


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["exp_cache", "exact", "filtered"])
def test_more_than_4_billion_logits(strategy: str, forced: Counter[str]) -> None:
    """A few tokens repeated many times: loss and weight gradient equal those of full logits of these tokens."""
    inputs, labels = make_inputs(64, 64, 131_104, torch.bfloat16, "cuda")
    copies = 513
    many = (inputs[0].repeat(copies, 1), inputs[1], None)
    assert len(many[0]) * len(inputs[1]) > 1 << 32
    actual = loss_and_gradients(fused_loss(config_for(strategy)), many, labels.repeat(copies), PLAIN, torch.bfloat16)
    actual["hidden"] = copies * actual["hidden"][-64:].float()
    exact, baseline = (
        loss_and_gradients(plain_loss, inputs, labels, PLAIN, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    assert_all_accurate(actual, baseline, exact, strategy, torch.bfloat16)


@pytest.mark.gpu
def test_out_of_range_label_fails_a_named_assertion() -> None:
    program = (
        "import torch; from hf_cce import CCEConfig, linear_cross_entropy as f\n"
        "h, w, labels = torch.randn(4, 8, device='cuda'), torch.randn(11, 8, device='cuda'), torch.tensor([0, 1, 11, 3])\n"
        "f(h, w, labels.cuda(), config=CCEConfig('triton'))\n"
        "torch.cuda.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode != 0
    assert "labels must lie in [0, 11)" in run.stderr + run.stdout
