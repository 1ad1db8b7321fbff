"""Arguments other than plain tensors and floats, and the cost of checking them.

Wrong arguments are listed in docs/reference/wrong-calls.md; tests/docs/test_trust.py calls each row.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_accurate, assert_all_accurate
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from hf_cce import CCEConfig, linear_cross_entropy, linear_log_probs

H, W, Y = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4)


@pytest.mark.parametrize("implementation", ["portable", "triton"])
def test_options_may_be_numpy_numbers(implementation: str, device: str) -> None:
    config = CCEConfig(implementation)
    leaves, labels = [x.to(device, copy=True).requires_grad_() for x in (H, W)], Y.to(device)
    given = dict(logit_scale=0.5, softcap=3.0, z_loss=0.25, label_smoothing=0.125)
    for smoothing in (True, False):
        given = given if smoothing else {name: given[name] for name in ("logit_scale", "softcap", "z_loss")}
        expected = linear_cross_entropy(*leaves, labels, ignore_index=2, config=config, **given)
        expected_grads = torch.autograd.grad(expected, leaves)
        for number in (np.float32, np.float64):
            options = {name: number(value) for name, value in given.items()}
            found = linear_cross_entropy(*leaves, labels, ignore_index=np.int64(2), config=config, **options)
            assert_accurate(found, expected, expected, str(number))
            assert_all_accurate(torch.autograd.grad(found, leaves), expected_grads, expected_grads, str(number))


def test_config_accepts_numpy_numbers() -> None:
    config = CCEConfig(memory_budget=np.int64(1 << 28), gradient_filter=np.float32(2**-10))
    assert config == CCEConfig(memory_budget=1 << 28, gradient_filter=2**-10) and hash(config)
    assert type(config.memory_budget) is int and type(config.gradient_filter) is float
    assert CCEConfig.of(config, implementation="portable") == CCEConfig("portable", 1 << 28, 2**-10)


def _dual(loss: Any) -> None:
    with forward_ad.dual_level():
        loss(forward_ad.make_dual(H, H))


TRANSFORMS = {
    "grad": lambda loss: torch.func.grad(loss)(H),
    "vmap": lambda loss: torch.func.vmap(loss)(torch.stack([H, H])),
    "jvp": lambda loss: torch.func.jvp(loss, (H,), (H,)),
    "dual": _dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_transforms_raise_a_clear_error(transform: str) -> None:
    """PyTorch's own error tells the operator's author, not the user, what to do."""
    for loss in (lambda h: linear_cross_entropy(h, W, Y), lambda h: linear_log_probs(h, W, Y).log_probs.sum()):
        with pytest.raises(RuntimeError, match=r"does not support torch\.func .* full logits"):
            TRANSFORMS[transform](loss)
        with forward_ad.dual_level():  # of an unrelated computation
            assert loss(H).isfinite()


def test_argument_checks_read_no_tensor() -> None:
    """Reading a tensor would synchronize with a GPU; a FakeTensor raises if it is read."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (H, W, Y)]
        assert linear_cross_entropy(*fakes, softcap=3.0, z_loss=0.1).shape == ()
        with pytest.raises(TypeError, match="got a FakeTensor"):
            linear_cross_entropy(*fakes, ignore_index=fakes[2][0])


def test_changing_options_compile_without_a_graph_break() -> None:
    """Dynamo turns a changing number into a symbol; the checks must compare it without a graph break."""
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.75, 1.25, 1.5):
        options = dict(logit_scale=scale, softcap=10 * scale, z_loss=scale / 10, label_smoothing=scale / 5)
        expected = linear_cross_entropy(H, W, Y, **options)
        assert_accurate(compiled(H, W, Y, **options), expected, expected, str(scale))
