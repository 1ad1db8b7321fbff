"""What the gradient filter learns while a head is trained, and what it reports: one object per trained head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Thresholds τ relate to errors by experience: on trained heads the error of the hidden states' gradient is 3 to 6 τ, that of
# the weight's 2 to 2.5 τ, while eager bfloat16's own errors are 5e-3 and 2.3e-3, and rounding takes its part of that.
AUTO_TAU = 8e-4
ERROR_PER_TAU = 6.0


class FilterState:
    """Steers the gradient filter of one head from step to step, without the host ever waiting for the device."""

    def __init__(self) -> None:
        self._tau: Tensor | None = None
        self._last: Any = None

    def threshold(self, gradient_filter: str | float, hidden: Tensor) -> Tensor | None:
        """τ as a scalar on the device of ``hidden``, or None to leave out nothing."""
        if gradient_filter == "auto" and hidden.dtype != torch.bfloat16:
            return None
        if self._tau is None:
            tau = AUTO_TAU if gradient_filter == "auto" else float(gradient_filter) / ERROR_PER_TAU
            self._tau = torch.full((), tau, dtype=torch.float32, device=hidden.device)
        return self._tau

    def report(self, report: Any) -> None:
        """Keep what the last backward pass left; tensors on the device."""
        self._last = report

    def stats(self) -> dict[str, float]:
        """Of the last backward pass that was filtered: ``kept`` and ``dropped_mass`` (shares), ``tau``. Waits for the device."""
        if self._last is None:
            return {}
        kept, tiles, dropped, tokens, tau = self._last
        return {
            "kept": float(kept) / tiles,
            "dropped_mass": float(dropped.sum()) / tokens,
            "tau": float(tau),
        }
