"""Other implementations of the linear-head loss under one signature, for ``benchmarks.loss`` and ``benchmarks.first``.

A peer is skipped, with the reason, if it is not installed or its version lacks an option it needs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy
from hf_cce.diagnostics.bench import MIB, Loss, full_logits

# Packages that provide the peers; their versions go into each report.
PACKAGES = ("transformers", "liger-kernel", "cut-cross-entropy", "trl", "quack-kernels", "nvidia-cutlass-dsl")
# Positional arguments of TRL's function. A version with other arguments might compute something else.
TRL_ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip


class FusedLoss:
    """hf_cce with one filter state for a trained weight and one for a frozen weight."""

    def __init__(self, **options: Any) -> None:
        self.config = CCEConfig(**options)
        self.reset()

    def reset(self) -> None:
        """Reset the filter states before another head."""
        self.states = {True: FilterState(), False: FilterState()}
        self.last: FilterState | None = None

    def __call__(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        self.last = self.states[weight.requires_grad]
        return linear_cross_entropy(hidden_states, weight, labels, config=self.config, filter_state=self.last)


def filter_stats(loss: Loss) -> dict[str, Any]:
    """Return the gradient-filter statistics of the last training step of ``loss``, or {} if it has no filter."""
    state = loss.last if isinstance(loss, FusedLoss) else None
    return {} if state is None else state.stats()


class Unavailable(Exception):
    """Raised when a peer cannot be built here; the message is the reason."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:
        raise Unavailable(f"{name} cannot be imported: {type(error).__name__}: {str(error)[:300]}") from error


def _liger() -> Loss:
    function = _module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        result = function.apply(hidden_states, weight, labels)
        return result[0] if isinstance(result, tuple) else result

    return loss


def _apple(**options: object) -> Loss:
    apple = _module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden_states, weight, labels: apple(hidden_states, weight, labels, **options)


def _trl() -> Loss:
    """Return the mean loss from TRL's fused head as SFTTrainer uses it, with its other outputs disabled."""
    utils = _module("trl.trainer.utils")
    function: Any = getattr(utils, "_ChunkedLogProbFunction", None)
    chunk: int | None = getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", None)
    forward = getattr(function, "forward", None)
    if forward is None or chunk is None or tuple(inspect.signature(forward).parameters) != TRL_ARGUMENTS:
        raise Unavailable("this TRL has no fused head of the form that 1.16 has")

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_probs, *_ = function.apply(hidden_states, weight, None, labels, 1.0, chunk, None, 1.0, ("log_probs",))
        return -log_probs.mean()

    return loss


def _quack() -> Loss:
    function = getattr(_module("quack.linear_cross_entropy"), "chunked_linear_cross_entropy", None)
    if function is None:
        raise Unavailable("this Quack has no chunked_linear_cross_entropy")
    return lambda hidden_states, weight, labels: function(hidden_states, weight, labels)


def _torch_linear_cross_entropy() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy; 2.13 has")
    function = F.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions()  # without options it materializes full logits
    return lambda hidden_states, weight, labels: function(hidden_states, weight, labels, options=options)


BUILDERS: dict[str, Callable[[], Loss]] = {
    "hf_cce": FusedLoss,
    "hf_cce exact": partial(FusedLoss, gradient_filter=None),
    "eager": lambda: full_logits,
    "torch.compile": lambda: torch.compile(full_logits, dynamic=False),
    "hf_cce 64 MiB": partial(FusedLoss, memory_budget=64 * MIB),
    "hf_cce exact 1.25 GiB": partial(FusedLoss, gradient_filter=None, memory_budget=1280 * MIB),
    "liger": _liger,
    "apple cce": _apple,
    "apple cce exact": partial(_apple, impl="cce_exact"),
    "trl": _trl,
    "quack": _quack,
    "torch F.linear_cross_entropy": _torch_linear_cross_entropy,
}


def make_peers(names: Iterable[str] = (), filters: Iterable[float] = ()) -> tuple[dict[str, Loss], dict[str, str]]:
    """Return (losses that can run here, reasons for those that cannot), both by name.

    Args:
        names: keys of ``BUILDERS``; default: all.
        filters: values of ``gradient_filter`` to run hf_cce with in addition.

    Raises:
        ValueError: a name is unknown.
    """
    names = list(dict.fromkeys(names)) or list(BUILDERS)
    if unknown := sorted(set(names) - set(BUILDERS)):
        raise ValueError(f"unknown peer {', '.join(map(repr, unknown))}; known: {', '.join(BUILDERS)}")
    builders = {name: BUILDERS[name] for name in names}
    builders |= {f"hf_cce filter {x:g}": partial(FusedLoss, gradient_filter=x) for x in filters}
    losses, missing = {}, {}
    for name, build in builders.items():
        try:
            losses[name] = build()
        except (ImportError, Unavailable) as error:
            missing[name] = str(error)
    return losses, missing
