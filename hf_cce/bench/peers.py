"""The ways to compute the loss of a linear head that a user can choose from, under one signature.

Each takes (hidden_states [N, D], weight [V, D], labels [N]) and returns the mean loss, a scalar that can be differentiated.
A peer that is not installed is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What Transformers does: logits in the model's dtype, upcast, cross-entropy."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


def _compiled() -> Loss:
    return torch.compile(eager, dynamic=False)


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        result = LigerFusedLinearCrossEntropyFunction.apply(hidden_states, weight, labels)
        return result[0] if isinstance(result, tuple) else result

    return loss


def _apple(**options: object) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as apple

    return lambda hidden_states, weight, labels: apple(hidden_states, weight, labels, **options)


def _torch_linear_cross_entropy() -> Loss:
    function = F.linear_cross_entropy  # torch 2.13 and later
    return lambda hidden_states, weight, labels: function(hidden_states, weight, labels)


def make_peers(names: list[str] | None = None) -> tuple[dict[str, Loss], dict[str, str]]:
    """(the losses that can run here, the reason for each that cannot), both by name."""
    builders: dict[str, Callable[[], Loss]] = {
        "hf_cce": lambda: linear_cross_entropy,
        "hf_cce 64 MiB": lambda: partial(linear_cross_entropy, config=CCEConfig(memory_budget=64 << 20)),
        "hf_cce 1.25 GiB": lambda: partial(linear_cross_entropy, config=CCEConfig(memory_budget=1280 << 20)),
        "eager": lambda: eager,
        "torch.compile": _compiled,
        "liger": _liger,
        "apple cce": _apple,
        "apple cce exact": partial(_apple, impl="cce_exact"),
        "torch F.linear_cross_entropy": _torch_linear_cross_entropy,
    }
    unknown = sorted(set(names or ()) - set(builders))
    if unknown:
        raise ValueError(f"unknown peer {', '.join(unknown)}; known: {', '.join(builders)}")
    losses, missing = {}, {}
    for name in names or builders:
        try:
            losses[name] = builders[name]()
        except (ImportError, AttributeError) as error:
            missing[name] = str(error)
    return losses, missing
