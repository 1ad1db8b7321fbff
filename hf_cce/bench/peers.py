"""The ways to compute the loss of a linear head that a user can choose from, under one signature.

Each takes (hidden_states [N, D], weight [V, D], labels [N]) and returns the mean loss, a scalar that can be differentiated.
A peer that is not installed, or that needs an option which this version does not have, is left out, with the reason.
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

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
MIB = 1 << 20
# The distributions that the peers come from: their versions go into each report.
PACKAGES = ("liger-kernel", "cut-cross-entropy", "trl", "quack-kernels", "nvidia-cutlass-dsl")
# What TRL's function is called with, by position; another version's might compute something else.
TRL_ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip


class Unavailable(Exception):
    """A peer cannot be made here; the message is the reason."""


def eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What Transformers does: logits in the model's dtype, upcast, cross-entropy."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


class _Ours:
    """hf_cce, with a state for a trained weight and one for a frozen one: they are two trainings."""

    def __init__(self, config: CCEConfig) -> None:
        self.config = config
        self.begin()

    def begin(self) -> None:
        """Forget what was learnt of another head."""
        self.states = {True: FilterState(), False: FilterState()}
        self.last: FilterState | None = None

    def __call__(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        self.last = self.states[weight.requires_grad]
        return linear_cross_entropy(hidden_states, weight, labels, config=self.config, filter_state=self.last)


def _ours(**options: Any) -> Loss:
    try:
        return _Ours(CCEConfig(**options))
    except TypeError as error:
        raise Unavailable(f"this version of hf_cce has no such option: {error}") from None


def _compiled() -> Loss:
    return torch.compile(eager, dynamic=False)


def _module(name: str) -> Any:
    """Somebody else's module; whatever its import raises besides ImportError is a reason to leave the peer out, too."""
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
    """The function that TRL's fused head calls, for the mean of what SFTTrainer minimises; the head's other outputs are off."""
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
    """Its defaults: 4,096 tokens a chunk, and on Hopper in bfloat16 the pipeline that it calls scaled-exp."""
    function = getattr(_module("quack.linear_cross_entropy"), "chunked_linear_cross_entropy", None)
    if function is None:
        raise Unavailable("this Quack has no chunked_linear_cross_entropy")
    return lambda hidden_states, weight, labels: function(hidden_states, weight, labels)


def _torch_linear_cross_entropy() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy; 2.13 has")
    function = F.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions()  # without, it is full logits
    return lambda hidden_states, weight, labels: function(hidden_states, weight, labels, options=options)


BUILDERS: dict[str, Callable[[], Loss]] = {
    "hf_cce": _ours,
    "hf_cce exact": partial(_ours, gradient_filter=None),
    "hf_cce 64 MiB": partial(_ours, memory_budget=64 * MIB),
    "hf_cce exact 1.25 GiB": partial(_ours, gradient_filter=None, memory_budget=1280 * MIB),
    "eager": lambda: eager,
    "torch.compile": _compiled,
    "liger": _liger,
    "apple cce": _apple,
    "apple cce exact": partial(_apple, impl="cce_exact"),
    "trl": _trl,
    "quack": _quack,
    "torch F.linear_cross_entropy": _torch_linear_cross_entropy,
}


def make_peers(names: Iterable[str] | None = None) -> tuple[dict[str, Loss], dict[str, str]]:
    """(the losses that can run here, the reason for each that cannot), both by name; all peers by default.

    Raises:
        ValueError: a name is not known; the message lists those that are.
    """
    names = list(BUILDERS if names is None else dict.fromkeys(names))
    unknown = sorted(set(names) - set(BUILDERS))
    if unknown:
        raise ValueError(f"unknown peer {', '.join(map(repr, unknown))}; known: {', '.join(BUILDERS)}")
    return _made({name: BUILDERS[name] for name in names})


def make_sweep(thresholds: Iterable[float]) -> tuple[dict[str, Loss], dict[str, str]]:
    """The same for hf_cce with each of these gradient filters; ``sweep_name`` gives the names."""
    return _made({sweep_name(x): partial(_ours, gradient_filter=x) for x in thresholds})


def sweep_name(threshold: float) -> str:
    return f"hf_cce filter {threshold:g}"


def begin(loss: Loss) -> None:
    """Tell ``loss`` that what follows is another head."""
    if isinstance(loss, _Ours):
        loss.begin()


def filter_stats(loss: Loss) -> dict[str, Any]:
    """What ``loss`` says about its last training step: what the gradient filter did, if there is one.

    Called after a forward and backward of ``loss`` (one of the values that ``make_peers`` returns), with the device idle. The
    result goes into the row under "filter" and must be ready for JSON. "kept" is the share of the gradient's tiles that were
    computed, 0 to 1: the plot and the table show it.
    """
    state = loss.last if isinstance(loss, _Ours) else None
    return {} if state is None else state.stats()


def _made(builders: dict[str, Callable[[], Loss]]) -> tuple[dict[str, Loss], dict[str, str]]:
    losses, missing = {}, {}
    for name, build in builders.items():
        try:
            losses[name] = build()
        except (ImportError, Unavailable) as error:
            missing[name] = str(error)
    return losses, missing
