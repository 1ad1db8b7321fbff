"""Arguments of a wrong type: one error that names the argument and the way out, at no cost worth naming."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_as_good
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from hf_cce import CCEConfig, linear_cross_entropy, linear_log_probs

H, W, Y = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(hidden_states=None), TypeError, "hidden_states must be a tensor [..., D], got None"),
    (dict(hidden_states=H.tolist()), TypeError, "got a list; torch.as_tensor(hidden_states) makes one"),
    (dict(weight=None), TypeError, "weight must be a tensor [V, D], got None"),
    (dict(weight=W.numpy()), TypeError, "got a ndarray; torch.as_tensor(weight) makes one"),
    (dict(weight=nn.Linear(8, 11)), TypeError, "weight must be a tensor [V, D], got a Linear; pass its .weight"),
    (dict(weight=nn.ReLU()), TypeError, "weight must be a tensor [V, D], got a ReLU"),
    (dict(bias=nn.Linear(8, 11)), TypeError, "bias must be a tensor [V], got a Linear; pass its .bias"),
    (dict(bias=[0.0] * 11), TypeError, "bias must be a tensor [V], got a list"),
    (dict(labels=None), TypeError, "labels must be a tensor [...], got None"),
    (dict(labels=[0, 1, 2, 3]), TypeError, "got a list; torch.as_tensor(labels) makes one"),
    (dict(labels=Y.to(torch.int8)), ValueError, "int16 or uint8), got torch.int8; labels.long() converts them"),
    (
        dict(weight=W.t()),
        ValueError,
        "weight must be [V, D] with D = 8 as in hidden_states, got shape (8, 11), which looks",
    ),
    (dict(softcap="30"), TypeError, "softcap must be a number or None, got a str"),
    (dict(softcap=True), TypeError, "softcap must be a number or None, got a bool"),
    (dict(softcap=math.inf), ValueError, "softcap must be a finite number or None, got inf"),
    (dict(softcap=math.nan), ValueError, "softcap must be a finite number or None, got nan"),
    (dict(logit_scale=None), TypeError, "logit_scale must be a number, got None"),
    (dict(logit_scale=1j), TypeError, "logit_scale must be a number, got a complex"),
    (dict(logit_scale=math.nan), ValueError, "logit_scale must be a finite number, got nan"),
    (dict(logit_scale=-math.inf), ValueError, "logit_scale must be a finite number, got -inf"),
    (dict(ignore_index=None), TypeError, "ignore_index must be an int, got None; where no label is to be ignored"),
    (dict(ignore_index=-100.0), TypeError, "ignore_index must be an int, got a float"),
    (dict(ignore_index=torch.tensor(3)), TypeError, "ignore_index must be an int, got a Tensor"),
    (dict(filter_state=3), TypeError, "filter_state must be a FilterState or None, got a int"),
]
ONLY_OF_THE_LOSS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(label_smoothing="0.1"), TypeError, "label_smoothing must be a number, got a str"),
    (dict(label_smoothing=math.nan), ValueError, "label_smoothing must be a finite number, got nan"),
    (dict(z_loss=None), TypeError, "z_loss must be a number, got None"),
    (dict(z_loss=math.nan), ValueError, "z_loss must be a finite number, got nan"),
    (dict(z_loss=math.inf), ValueError, "z_loss must be a finite number, got inf"),
]
ONLY_OF_THE_LOSS += [
    (dict(num_items_in_batch="8"), TypeError, "num_items_in_batch must be a number or a tensor, got a str"),
    (dict(num_items_in_batch=[4]), TypeError, "num_items_in_batch must be a number or a tensor, got a list"),
    (dict(num_items_in_batch=True), TypeError, "num_items_in_batch must be a number or a tensor, got a bool"),
    (
        dict(num_items_in_batch=math.inf),
        ValueError,
        "num_items_in_batch must be a finite number, not negative, got inf",
    ),
    (
        dict(num_items_in_batch=math.nan),
        ValueError,
        "num_items_in_batch must be a finite number, not negative, got nan",
    ),
    (dict(num_items_in_batch=-1), ValueError, "num_items_in_batch must be a finite number, not negative, got -1"),
    (dict(shift="no"), TypeError, "shift must be True or False, got a str"),
]
CASES = [(function, *case) for function in (linear_cross_entropy, linear_log_probs) for case in WRONG]
CASES += [(linear_cross_entropy, *case) for case in ONLY_OF_THE_LOSS]


@pytest.mark.parametrize(("function", "wrong", "error", "message"), CASES)
def test_a_wrong_type_is_named(function: Any, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(hidden_states=H, weight=W, labels=Y) | wrong
    with pytest.raises(error, match=re.escape(message)):
        function(**arguments)


@pytest.mark.parametrize("implementation", ["portable", "triton"])
def test_numbers_of_numpy_and_tensors_without_gradient_are_numbers(implementation: str) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    config = CCEConfig(implementation)
    device = "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"
    leaves, labels = [x.to(device, copy=True).requires_grad_() for x in (H, W)], Y.to(device)
    given = dict(logit_scale=0.5, softcap=3.0, z_loss=0.25, label_smoothing=0.125)
    for smoothing in (True, False):
        given = given if smoothing else {name: given[name] for name in ("logit_scale", "softcap", "z_loss")}
        expected = linear_cross_entropy(*leaves, labels, ignore_index=2, config=config, **given)
        wanted = torch.autograd.grad(expected, leaves)
        for number in (np.float32, np.float64, torch.tensor):
            options = {name: number(value) for name, value in given.items()}
            found = linear_cross_entropy(*leaves, labels, ignore_index=np.int64(2), config=config, **options)
            assert_as_good(found, expected, expected, str(number))
            for each, value in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
                assert_as_good(each, value, value, str(number))


def test_options_as_numbers_of_numpy() -> None:
    config = CCEConfig(memory_budget=np.int64(1 << 28), gradient_filter=np.float32(2**-10))
    assert config == CCEConfig(memory_budget=1 << 28, gradient_filter=2**-10) and hash(config)
    assert type(config.memory_budget) is int and type(config.gradient_filter) is float


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
def test_there_are_no_transforms_and_one_is_told_so(transform: str) -> None:
    """PyTorch's own complaint names what the author of an operator should do."""
    for loss in (
        lambda h: linear_cross_entropy(h, W, Y),
        lambda h: linear_log_probs(h, W, Y).log_probs.sum(),
    ):
        with pytest.raises(RuntimeError, match=r"no rule for torch\.func .* full logits there"):
            TRANSFORMS[transform](loss)
        with forward_ad.dual_level():  # of something else
            assert loss(H).isfinite()


def test_the_checks_read_no_tensor() -> None:
    """On a GPU a read would make the host wait; a tensor without data raises at a read."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (H, W, Y)]
        assert linear_cross_entropy(*fakes, softcap=3.0, z_loss=0.1).shape == ()
        with pytest.raises(TypeError, match="got a FakeTensor"):
            linear_cross_entropy(*fakes, ignore_index=fakes[2][0])


def test_a_changing_option_is_traced_without_a_break() -> None:
    """Dynamo makes a symbol of a number that changes; the checks must compare it without ending the graph."""
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.75, 1.25, 1.5):
        options = dict(logit_scale=scale, softcap=10 * scale, z_loss=scale / 10, label_smoothing=scale / 5)
        expected = linear_cross_entropy(H, W, Y, **options)
        assert_as_good(compiled(H, W, Y, **options), expected, expected, str(scale))
