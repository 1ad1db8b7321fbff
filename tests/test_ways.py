"""What every way of the loss on the kernels has to stand: strided inputs, PyTorch's newer switch for TF32, no label at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from losses import PLAIN, Options, check_against_plain, fused_loss, make_inputs
from torch import Tensor
from ways import WAYS, applies, config_of, force, takes

from hf_cce import FilterState, linear_cross_entropy
from hf_cce import state as state_module

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("way", WAYS)
def test_strided_labels_and_bias(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(bias=way not in ("filtered", "scaled"))
    assert applies(way, options, torch.float32)
    taken = force(monkeypatch, way)
    inputs, labels = make_inputs(37, 40, 131, torch.float32, DEVICE, bias=options.bias)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
        labels = torch.stack([labels, labels.flip(0)], 1)[:, 0]
        if bias is not None:
            bias = torch.stack([bias, bias.flip(0)], 1)[:, 0]
            assert not bias.is_contiguous()
        assert not labels.is_contiguous()
        return fused_loss(config_of(way))(hidden, weight, bias, labels, options)

    check_against_plain(loss, inputs, labels, options, torch.float32, f"strided, {way}")
    assert taken[takes(way)] == 1


@pytest.mark.parametrize("way", ["stored", "narrow", "scaled"])
def test_what_has_no_range_to_be_stored_is_computed_anew(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(z − z_label) of a token whose label is 100 nats away; the blocks of its neighbours are kept."""
    taken = force(monkeypatch, way)
    (hidden, weight, _), labels = make_inputs(70, 40, 131, torch.float32, DEVICE)
    weight[7] = weight[8] = 0.0
    weight[7, 0] = hidden[20, 0] = 10.0
    labels[20] = 8
    assert torch.nn.functional.cross_entropy(hidden[20] @ weight.t(), labels[20]) > 80
    check_against_plain(fused_loss(config_of(way)), (hidden, weight, None), labels, PLAIN, torch.float32, f"far, {way}")
    assert taken["scaled gradients"] == (way == "scaled")


@pytest.mark.parametrize("switch", ["torch.backends", "torch.backends.cuda.matmul"])
def test_the_newer_switch_for_tf32(switch: str) -> None:
    """Transformers sets it for TrainingArguments(tf32=True); the older question then raises."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip(f"torch {torch.__version__} has no fp32_precision")
    program = (
        f"import torch; {switch}.fp32_precision = 'tf32'\n"
        "from hf_cce import CCEConfig, linear_cross_entropy as f\n"
        "h = torch.randn(20, 16).half().requires_grad_(); w = torch.randn(40, 16).half()\n"
        "f(h, w, torch.arange(20), reduction='none', config=CCEConfig('triton')).sum().backward()\n"
        "f(h.float(), w.float(), torch.arange(20), reduction='none', config=CCEConfig('triton')).sum().backward()\n"
        "assert h.grad.isfinite().all()"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_without_a_label_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    (hidden, weight, _), labels = make_inputs(37, 40, 131, torch.float32, DEVICE, ignored="all")
    leaves, state = [x.requires_grad_() for x in (hidden, weight)], FilterState()
    loss = linear_cross_entropy(*leaves, labels, config=config_of("filtered"), filter_state=state)
    loss.backward()
    assert loss == 0 and state.stats()["kept"] == 0
    assert all(not x.grad.any() for x in leaves)


@pytest.mark.skipif(DEVICE == "cuda", reason="pretends to capture")
def test_what_a_captured_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "filtered")
    (hidden, weight, _), labels = make_inputs(37, 40, 131, torch.float32, DEVICE)
    leaves, state = [x.requires_grad_() for x in (hidden, weight)], FilterState()

    def step() -> None:
        linear_cross_entropy(*leaves, labels, config=config_of("filtered"), filter_state=state).backward()

    for _ in range(3):
        step()
    order, tau = state._vocabulary, state._tau
    monkeypatch.setattr(state_module, "_capturing", lambda: True)
    assert state.vocabulary(weight) is None and not state.measure()
    step()
    assert state._vocabulary is order and any(x is tau for x in state._pinned)


def test_plain_is_what_the_ways_are_compared_with() -> None:
    assert applies("exact", PLAIN, torch.float32) and not applies("filtered", Options(bias=True), torch.float32)
