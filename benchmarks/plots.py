"""What all pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAIN, CCE, INK, FAINT, STATE = "#b4552d", "#1f6f8b", "#22272e", "#c9ced6", "#8a93a0"
LINE = 150  # characters of small print that fit a figure of 11 inches


def require_matplotlib(path: Path) -> None:
    """Fail before hours of training, not after them.

    Raises:
        ValueError: matplotlib is missing, or cannot draw a file of that name.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'hf-cce[bench]'") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"--plot {path}: the name must end in one of .{', .'.join(known)}")


def quiet(axes: Any, grid: str) -> None:
    """Use few lines and little ink; ``grid`` is "x", "y" or "both"."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
