"""Options of the fused loss: a frozen dataclass that validates itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args


class CCEWarning(UserWarning):
    """The loss is correct, but memory or time is not saved as asked. The message names the reason."""


Implementation = Literal["auto", "triton", "portable"]
MIB = 1 << 20
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(given: Any) -> int | str:
    """Return a memory budget as "auto" or a number of bytes."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", given) if isinstance(given, str) else None
    if isinstance(given, str) and given == "auto":
        return given
    if size and size[2] in _UNITS:
        number = int(float(size[1]) * _UNITS[size[2]])
    elif type(given) is not bool and isinstance(given, Integral):  # includes NumPy integers
        number = int(given)
    else:
        raise ValueError(f"memory_budget must be 'auto', a number of bytes, or a size such as '512MiB', got {given!r}")
    if number < MIB:
        raise ValueError(f"memory_budget must be at least 1 MiB, got {given!r}; a number without a unit is in bytes")
    return number


@dataclass(frozen=True)
class CCEConfig:
    """Options of the fused loss. Immutable and hashable: one object can serve many models and calls.

    Args:
        implementation: ``"auto"`` picks the Triton kernels for float16 and bfloat16 on an NVIDIA GPU of compute capability
            8.0 or newer, and PyTorch everywhere else; in float32 on such a GPU, PyTorch multiplies and kernels do the rest.
            ``"triton"`` runs the kernels or raises. ``"portable"`` runs PyTorch.
            Except with ``"triton"``, few tokens on a GPU get the model's own loss on full logits, which is faster there.
        memory_budget: workspace of one call, without its inputs and gradients: bytes, or a string such as ``"512MiB"``; at least
            1 MiB. ``"auto"`` is 256 MiB per 8,192 tokens, rounded up, and more where this saves time: for exact gradients,
            per-token losses and divergences, and in the PyTorch fallback. Pass a size to limit it. A smaller budget is slower,
            and may disable the gradient filter. The PyTorch fallback needs room for 16 tokens with the whole vocabulary, or 16
            vocabulary entries with all tokens. Some scalar losses compute their gradients in the forward pass, and hold
            them until the backward pass: under torch.compile (except in float16), in PyTorch, for divergences, and for exact
            gradients if the budget holds large groups of tokens.
        gradient_filter: lets the Triton kernels skip tiles of the logits' gradient that contribute little. A number, at most
            0.1, is the allowed relative error of the gradients of hidden states and weight. ``"auto"`` keeps the error below
            that of bfloat16 logits. None disables the filter. In other dtypes than bfloat16, nothing is skipped. The error is
            measured only with a ``FilterState``, which patched models have. Under torch.compile nothing is skipped in
            ``linear_log_probs``.
        token_stats: compute token accuracy, entropy and perplexity of patched models, in the same pass as the loss.

    Raises:
        ValueError: an option has an invalid value; the message names it.
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
        if isinstance(wanted, Real) and type(wanted) not in (bool, int, float):  # NumPy scalars
            object.__setattr__(self, "gradient_filter", wanted := float(wanted))
        number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
        if wanted is not None and wanted != "auto" and not (number and 0.0 < wanted <= 0.1):
            raise ValueError(f"gradient_filter must be 'auto', None or a number in (0, 0.1], got {wanted!r}")

    def workspace_bytes(self, n: int) -> int:
        """Return the workspace in bytes for ``n`` tokens; for "auto" a default that ``hf_cce.dispatch`` may raise."""
        given = self.memory_budget
        return 256 * MIB * (1 + (max(n, 1) - 1) // 8192) if isinstance(given, str) else given

    @classmethod
    def of(cls, config: CCEConfig | None, **options: Any) -> CCEConfig:
        """Return ``config`` with ``options`` replaced, or a new one made from ``options``.

        Raises:
            TypeError: ``config`` is not a ``CCEConfig``, or an option does not exist; the message lists the valid ones.
        """
        if not options and type(config) is cls:  # fast path of every training step; traced by torch.compile
            return config
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; the options are: {', '.join(known)}")
        if config is None:
            return cls(**options)
        if not isinstance(config, cls):
            raise TypeError(f"config must be a CCEConfig or None, got {type(config).__name__}")
        return replace(config, **options)
