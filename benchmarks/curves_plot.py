"""The picture of ``benchmarks.curves``: losses above, differences to full logits below, one column a setting."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plots import CCE, FAINT, INK, LINE, PLAIN, STATE, quiet
from hf_cce.diagnostics.files import whole_file

EXACT = "#7a4f9a"
STYLE: dict[str, dict[str, Any]] = {  # drawn in this order: the wide and pale ones lie below
    "eager": dict(color=PLAIN, linewidth=5, alpha=0.35, label="full logits"),
    "compiled": dict(color=STATE, linewidth=2.2, alpha=0.75, label="full logits, compiled"),
    "reversed": dict(color=FAINT, linewidth=2.2, label="full logits, rows reversed"),
    "hf_cce": dict(color=CCE, linewidth=1.2, label="hf_cce"),
    "hf_cce-exact": dict(color=EXACT, linewidth=1.0, label="hf_cce, no filter", linestyle=(0, (4, 1.5))),
}
SHORT = {"hf_cce": "hf_cce", "hf_cce-exact": "no filter", "compiled": "compiled", "reversed": "reversed"}


def draw(report: dict[str, Any], path: Path, metadata: dict[str, str | None] | None = None, dpi: int = 150) -> None:
    """Draw ``report`` (what ``benchmarks.curves`` writes as JSON) into ``path``; ``metadata``: texts in the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    setup = report["setup"]
    figure = Figure(figsize=(11, 6.6), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    seeds = 1 + len(report.get("other_seeds", ()))
    figure.text(
        0.02, 0.955, "The same training with one loss after the other", fontsize=13, fontweight="bold", color=INK
    )
    about = (
        f"{report['device']} · Llama, width {setup['dim']}, {setup['layers']} layer{'s' * (setup['layers'] > 1)}, vocabulary "
        f"{setup['vocab']:,} · {setup['batch']} × {setup['sequence']} tokens a step · bfloat16 autocast · torch "
        f"{report['versions']['torch']} · text: {report['data']['source']}"
    )
    lines = textwrap.fill(about, LINE)
    figure.text(0.02, 0.936, lines, fontsize=8.5, color="#5b6470", verticalalignment="top")
    top = 0.83 - 0.025 * max(0, lines.count("\n") - 1)
    figure.subplots_adjust(
        left=0.075, right=0.985, top=top, bottom=0.13, wspace=0.2, hspace=0.16 if seeds == 1 else 0.25
    )
    axes = figure.subplots(2, len(report["settings"]), sharex="col", height_ratios=[1, 1], squeeze=False)
    for column, (title, runs) in enumerate(report["settings"].items()):
        first = setup["checkpoint_steps"] if column else 0
        others = [each["settings"][title] for each in report.get("other_seeds", ()) if title in each["settings"]]
        _column(axes[:, column], title, runs, first, others, report.get("over_seeds", {}).get(title, {}))
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[1, 0].set_ylabel("difference to full logits (nats)")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, frameon=False, loc="lower center", ncols=len(lines), fontsize=9)
    with whole_file(path) as temporary:
        figure.savefig(temporary, metadata=metadata)


def _apart(runs: dict[str, Any], name: str) -> list[float]:
    return [a - b for a, b in zip(runs[name]["losses"], runs["eager"]["losses"], strict=True)]


def _column(
    axes: Any, title: str, runs: dict[str, Any], first: int, others: list[dict[str, Any]], means: dict[str, Any]
) -> None:
    losses, differences = axes
    for name, style in STYLE.items():
        if name not in runs:
            continue
        steps = range(first + 1, first + len(runs[name]["losses"]) + 1)
        losses.plot(steps, runs[name]["losses"], solid_capstyle="round", **style)
        if name != "eager":
            every = [_apart(each, name) for each in (runs, *others) if name in each]
            differences.plot(steps, [fmean(values) for values in zip(*every, strict=True)], **style)
    differences.axhline(0, color=INK, linewidth=0.6)
    differences.set_xlabel("training step")
    differences.xaxis.get_major_locator().set_params(integer=True)
    differences.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    losses.set_title(title, loc="left", fontsize=10.5, color=INK)
    parts, what = [], "mean |difference| in yardsticks: "
    for name, label in SHORT.items():
        if name in means:
            what = f"mean of {1 + len(others)} seeds; ± standard error, last quarter, 10⁻³ nats:\n"
            mean, error = (means[name][key] * 1000 for key in ("late_mean_difference", "standard_error"))
            parts.append(f"{label} {mean:+.0f} ± {error:.0f}".replace("-", "−"))
        elif not means and name.startswith("hf_cce"):
            ratio = runs.get(name, {}).get("mean_difference_in_yardsticks")
            parts += [f"{label} {ratio:.2f}"] if ratio is not None else []
    if parts:
        differences.set_title(what + ", ".join(parts), loc="right", fontsize=8.5, color="#5b6470")
    quiet(losses, "both")
    quiet(differences, "both")
