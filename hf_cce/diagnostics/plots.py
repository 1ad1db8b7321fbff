"""The picture of ``hf-cce demo``, and the few shared habits of all pictures."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from hf_cce.diagnostics.files import whole_file

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


def draw_demo(report: dict[str, Any], path: Path) -> None:
    """Draw loss curves and peak memory of ``hf_cce.diagnostics.demo.twin``'s report, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings, model = report["settings"], report["model"]
    figure = Figure(figsize=(11, 4.8), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    title = (
        f"{model['name']}, {model['layers']} layer{'s' * (model['layers'] > 1)}, vocabulary {model['vocabulary']:,}: "
        "the same training with and without CCE"
    )
    about = (
        f"{report['device']} · {settings['batch']} × {settings['sequence']} tokens a step, {settings['dtype']} · "
        f"torch {report['versions']['torch']}, transformers {report['versions']['transformers']} · "
        f"text: {report['data']['source']}"
    )
    figure.suptitle(f"{title}\n{textwrap.fill(about, LINE)}", fontsize=9, color=INK, x=0.02, ha="left")
    curves, bars = figure.subplots(1, 2, width_ratios=[1.15, 1])
    _losses(curves, report)
    _memory(bars, report)
    with whole_file(path) as temporary:
        figure.savefig(temporary)


def _losses(axes: Any, report: dict[str, Any]) -> None:
    steps = range(1, len(report["plain"]["losses"]) + 1)
    wide: dict[str, Any] = {"linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"}
    axes.plot(steps, report["plain"]["losses"], color=PLAIN, label="without CCE", **wide)
    axes.plot(steps, report["cce"]["losses"], color=CCE, linewidth=1.6, label="with CCE")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"Loss: largest difference {report['largest_difference']:.1e}", loc="left", fontsize=10.5, color=INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right")
    quiet(axes, "both")


def _memory(axes: Any, report: dict[str, Any]) -> None:
    unit, name = (1e9, "GB") if report["plain"]["peak_bytes"] >= 1e9 else (1e6, "MB")
    runs = [("without CCE", report["plain"], PLAIN), ("with CCE", report["cce"], CCE)]
    for row, (_, run, colour) in enumerate(runs):
        rest, peak = min(run["rest_bytes"], run["peak_bytes"]) / unit, run["peak_bytes"] / unit
        axes.barh(row, rest, color=STATE, height=0.52, label="between steps" if row == 0 else None)
        axes.barh(row, peak - rest, left=rest, color=colour, height=0.52)
        axes.text(peak, row, f" {peak:.2f} {name}", va="center", fontsize=10, color=INK, fontweight="bold")
        place = (rest + (peak - rest) / 2, row + 0.31)
        axes.text(*place, f"+{peak - rest:.2f} {name} in a step", va="top", ha="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(runs)), [label for label, _, _ in runs])
    axes.set_ylim(len(runs) - 0.35, -0.6)
    axes.set_xlim(0, max(run["peak_bytes"] for _, run, _ in runs) / unit * 1.22)
    axes.set_xlabel(f"peak memory ({name})")
    saved = 1 - report["cce"]["peak_bytes"] / report["plain"]["peak_bytes"]
    title = f"Peak memory: {saved:.0%} less" if saved > 0 else "Peak memory"
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.legend(frameon=False, loc="upper right", fontsize=8)
    quiet(axes, "x")


def quiet(axes: Any, grid: str) -> None:
    """Use few lines and little ink; ``grid`` is "x", "y" or "both"."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
