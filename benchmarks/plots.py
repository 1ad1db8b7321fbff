"""Helpers shared by all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAIN, CCE, INK, FAINT, STATE = "#b4552d", "#1f6f8b", "#22272e", "#c9ced6", "#8a93a0"
LINE = 150  # characters of small print per line of an 11-inch figure


def require_matplotlib(path: Path) -> None:
    """Check for matplotlib before a run that takes hours.

    Raises:
        ValueError: matplotlib is missing, or does not support the file type of ``path``.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'hf-cce[bench]'") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"--plot {path}: the name must end in one of .{', .'.join(known)}")


def quiet(axes: Any, grid: str) -> None:
    """Apply a minimal style to ``axes``; ``grid`` is "x", "y" or "both"."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
