"""Options of the fused loss: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args


class CCEWarning(UserWarning):
    """A training call or a step goes another way than asked for: its results are right, and memory or time is not saved."""


Implementation = Literal["auto", "triton", "portable"]
MIB = 1 << 20
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(given: Any) -> int | str:
    """A memory budget as "auto" or a number of bytes."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", given) if isinstance(given, str) else None
    if isinstance(given, str) and given == "auto":
        return given
    if size and size[2] in _UNITS:
        number = int(float(size[1]) * _UNITS[size[2]])
    elif type(given) is not bool and isinstance(given, Integral):  # numpy's numbers too
        number = int(given)
    else:
        raise ValueError(f"memory_budget must be 'auto', a number of bytes, or a size such as '512MiB', got {given!r}")
    if number < MIB:
        raise ValueError(f"memory_budget must be at least 1 MiB, got {given!r}")
    return number


@dataclass(frozen=True)
class CCEConfig:
    """How the fused loss runs. Immutable and hashable, so that one object can serve many models and calls.

    Args:
        implementation: ``"auto"`` picks the Triton kernels for float16 and bfloat16 on an NVIDIA GPU of compute capability
            8.0 or newer, and PyTorch everywhere else. ``"triton"`` runs the kernels or raises (on
            compute capability 7.5, a T4's, it is an experiment); ``"portable"`` runs PyTorch.
            On a CUDA device, all but ``"triton"`` leave up to 42 million logits that fit the budget (fewer where the
            vocabulary is odd) to PyTorch's own loss on full logits, which is then the fastest; a patched model keeps its own.
        memory_budget: scratch memory that one call may hold besides its inputs and gradients: bytes, or a string such as
            ``"512MiB"`` or ``"1.5GiB"``; at least 1 MiB. A few numbers for each token come on top (below 1 MiB for 8,192 tokens).
            ``"auto"`` is 256 MiB for each 8,192 tokens, or part of them. Where nothing is left out of the gradients it takes more
            if that pays: in all, as much as the gradient of a trained head takes, if that is more; the fallback on a GPU takes
            twice as much in float32, or a tenth of what full logits take, and the size of that gradient besides. In
            float32 and in the fallback few tokens have full logits of up to 480 MiB.
            Smaller budgets mean more, smaller slabs of the vocabulary, hence less speed; some have no room for the gradient
            filter. Where nothing is left out, the gradient of the weight may be allocated in the forward pass already, and
            under torch.compile all gradients are, but in float16; where several losses are added up before one backward pass,
            each has its own. Two floors: portable PyTorch works on at least 16 tokens with the whole vocabulary, or 16 entries
            of it with all tokens, and in float16 and bfloat16 it accumulates the gradient of the hidden states in float32.
        gradient_filter: the Triton kernels of the scalar loss may leave out tiles of the logits' gradient that hardly matter and
            keep their probability mass in their place. A number is the error this may make in the gradient of the hidden states,
            and in that of the weight, relative to its norm, at most 0.1; it is held by measurement where a ``FilterState`` is
            kept, as on patched models. ``"auto"`` keeps both, in bfloat16, below what rounding the logits to bfloat16 makes, and
            leaves out nothing in other dtypes. None leaves out nothing. Under torch.compile nothing is
            left out in float16, nor from the gradients of ``linear_log_probs``.
        token_stats: count token accuracy, entropy and perplexity in the pass of the loss, on patched models: see
            ``model.cce_stats()``. A loss with label smoothing, a compiled graph and a vocabulary that is spread over processes
            count nothing.

    Raises:
        ValueError: an option has a value that is not allowed; the message names it.
    """

    implementation: Implementation = "auto"
    memory_budget: int | str = "auto"
    gradient_filter: Literal["auto"] | float | None = "auto"
    token_stats: bool = False

    def __post_init__(self) -> None:
        if self.implementation not in get_args(Implementation):
            raise ValueError(f"implementation must be one of {get_args(Implementation)}, got {self.implementation!r}")
        object.__setattr__(self, "memory_budget", _bytes(self.memory_budget))
        if not isinstance(self.token_stats, bool):
            raise ValueError(f"token_stats must be True or False, got {self.token_stats!r}")
        wanted: Any = self.gradient_filter
        if isinstance(wanted, Real) and type(wanted) not in (bool, int, float):  # numpy's
            object.__setattr__(self, "gradient_filter", wanted := float(wanted))
        number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
        if wanted is not None and wanted != "auto" and not (number and 0.0 < wanted <= 0.1):
            raise ValueError(f"gradient_filter must be 'auto', None or a number in (0, 0.1], got {wanted!r}")

    def scratch(self, n: int) -> int:
        """Bytes that a call with ``n`` tokens may hold: ``memory_budget``, or what "auto" begins with."""
        given = self.memory_budget
        return 256 * MIB * (1 + (max(n, 1) - 1) // 8192) if isinstance(given, str) else given

    @classmethod
    def of(cls, config: CCEConfig | None, **options: Any) -> CCEConfig:
        """``config`` with ``options`` replaced, or a new one from ``options``.

        Raises:
            TypeError: ``config`` is no ``CCEConfig``, or an option does not exist; the message lists those that do.
        """
        if not options and type(config) is cls:  # the path of every training step; torch.compile traces it
            return config
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; CCEConfig has: {', '.join(known)}")
        if config is None:
            return cls(**options)
        if not isinstance(config, cls):
            raise TypeError(f"config must be a CCEConfig or None, got {type(config).__name__}")
        return replace(config, **options)
