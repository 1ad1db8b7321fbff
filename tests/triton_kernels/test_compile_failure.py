"""If Triton cannot compile a kernel, PyTorch computes the loss: correctly, with one warning, and without retrying."""

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forced_strategies import DEVICE, KEEPS_ALL, dtype_for, force_strategy
from losses import EVERYTHING, PLAIN, Options, check_against_plain, fused_loss, loss_and_gradients, make_inputs
from numerics import assert_accurate

from hf_cce import CCEConfig, CCEWarning, FilterState, dispatch, linear_log_probs, ops, strategies
from hf_cce.spec import LossSpec, WantedStats

pytest.importorskip("triton")

from hf_cce.kernels import backward, exact, forward

AUTO = CCEConfig("auto", gradient_filter=None)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the kernels of these modules tiles that Triton rejects: 24 columns are not a power of two."""

    def choose(device: torch.device, dtype: torch.dtype, implementation: str = "auto") -> str:
        """Choose as for 16-bit dtypes on a GPU; elsewhere "auto" uses no kernels."""
        return "portable" if strategies.compile_failures.get(device) else "triton"

    def breaks(*names: str) -> None:
        force_strategy(monkeypatch, "exact")
        monkeypatch.setattr(dispatch, "FULL_LOGITS_MAX", 0)  # no full logits on a GPU
        monkeypatch.setattr(dispatch, "choose_implementation", choose)
        for module in (backward, forward, exact):
            if module.__name__.rpartition(".")[2] in names:
                real = module.make_plan
                monkeypatch.setattr(module, "make_plan", lambda *a, r=real, **k: replace(r(*a, **k), block_n=24))

    yield breaks
    strategies.compile_failures.clear()


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING, Options(reduction="none")], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_pytorch_takes_over_with_one_warning(where: str, options: Options, broken: Any) -> None:
    broken(where, "exact" if where == "forward" else where)
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE, bias=options.bias)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for what in (f"{where} fails", f"after {where} failed"):
            check_against_plain(fused_loss(AUTO), inputs, labels, options, torch.float32, what)
    messages = [str(warning.message) for warning in found if "fell back to PyTorch" in str(warning.message)]
    assert len(messages) == 1 and "could not compile a kernel" in messages[0]
    why = dispatch.why_no_triton(inputs[0].device, torch.float32)
    assert why is not None and "could not compile" in why


def test_statistics_and_operators_fall_back_too(broken: Any) -> None:
    broken("forward")
    (hidden, weight, _), labels = make_inputs(37, 40, 131, torch.float32, DEVICE)

    def compute(config: CCEConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return linear_log_probs(hidden.to(dtype), weight.to(dtype), labels, config=config).log_probs

    with pytest.warns(CCEWarning, match="fell back"):
        found = compute(AUTO)
    strategies.compile_failures.clear()
    options = ops._options_of(LossSpec(-100, 1.0, 0.0, memory_budget=1 << 24))
    with pytest.warns(CCEWarning, match="fell back"):
        traced = torch.ops.hf_cce.logit_stats(hidden, weight, None, labels, *WantedStats(), *options)
    baseline, exact = compute(CCEConfig("portable")), compute(CCEConfig("portable"), torch.float64)
    assert_accurate(found, baseline, exact, "log probabilities")
    assert_accurate(traced[1] - traced[0], baseline, exact, "by the operator")


def test_explicit_triton_raises_the_compile_error(broken: Any) -> None:
    from triton.errors import TritonError

    broken("forward", "exact")
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE)
    with pytest.raises(TritonError):
        fused_loss(CCEConfig("triton", gradient_filter=None))(*inputs, labels, PLAIN)
    assert inputs[0].device not in strategies.compile_failures


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, KeyboardInterrupt, OSError], ids=lambda error: error.__name__
)
@pytest.mark.parametrize(
    ("strategy", "where", "function"),
    [
        ("exact", "exact", "make_plan"),
        ("exact", "backward", "make_plan"),
        ("filtered", "filter.run", "combine"),
        ("filtered", "filter.run", "select"),
    ],
)
def test_the_step_after_any_other_failure_is_correct(
    strategy: str, where: str, function: str, error: type[BaseException], broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, Ctrl-C, or a full disk for Triton's cache: the error is raised, and the kernels stay in use."""
    module = importlib.import_module(f"hf_cce.kernels.{where}")
    broken()  # "auto" uses the kernels
    real, counts = getattr(module, function), force_strategy(monkeypatch, strategy)
    dtype = dtype_for(strategy)
    inputs, labels = make_inputs(37, 40, 131, dtype, DEVICE)
    config = CCEConfig("auto", gradient_filter=KEEPS_ALL if strategy == "filtered" else None)
    loss = fused_loss(config, FilterState())

    monkeypatch.setattr(module, function, Mock(side_effect=error(28, "No space left on device")))
    with pytest.raises(error, match="No space left"):
        loss_and_gradients(loss, inputs, labels, PLAIN, dtype)
    monkeypatch.setattr(module, function, real)
    assert inputs[0].device not in strategies.compile_failures
    counts.clear()
    check_against_plain(loss, inputs, labels, PLAIN, dtype, f"after {error.__name__}")
    assert counts[strategy] == 1
