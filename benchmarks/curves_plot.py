"""Figure of ``benchmarks.curves``: losses above, differences from full logits below, one column per setting."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.files import whole_file
from benchmarks.plots import CCE, FAINT, INK, LINE, PLAIN, STATE, quiet

EXACT = "#7a4f9a"
STYLE: dict[str, dict[str, Any]] = {  # in drawing order: wide, pale lines first, so that they lie below
    "eager": dict(color=PLAIN, linewidth=5, alpha=0.35, label="full logits"),
    "compiled": dict(color=STATE, linewidth=2.2, alpha=0.75, label="full logits, compiled"),
    "reversed": dict(color=FAINT, linewidth=2.2, label="full logits, rows reversed"),
    "hf_cce": dict(color=CCE, linewidth=1.2, label="hf_cce"),
    "hf_cce-exact": dict(color=EXACT, linewidth=1.0, label="hf_cce, no filter", linestyle=(0, (4, 1.5))),
}
SHORT = {"hf_cce": "hf_cce", "hf_cce-exact": "no filter", "compiled": "compiled", "reversed": "reversed"}
Runs = dict[str, dict[int, dict[str, Any]]]  # {loss: {seed: run}}


def draw(report: dict[str, Any], path: Path, metadata: dict[str, str | None] | None = None, dpi: int = 150) -> None:
    """Draw ``report`` (the JSON of ``benchmarks.curves``) into ``path``; ``metadata`` goes into the image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    setup = report["setup"]
    figure = Figure(figsize=(11, 6.6), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
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
    figure.subplots_adjust(left=0.075, right=0.985, top=top, bottom=0.13, wspace=0.2, hspace=0.25)
    axes = figure.subplots(2, len(report["summary"]), sharex="col", height_ratios=[1, 1], squeeze=False)
    for column, (setting, summary) in enumerate(report["summary"].items()):
        runs: Runs = {}
        for run in report["runs"]:
            if run["setting"] == setting:
                runs.setdefault(run["loss"], {})[run["seed"]] = run
        _column(axes[:, column], setting, runs, summary, setup["every"])
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[1, 0].set_ylabel("difference to full logits (nats)")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, frameon=False, loc="lower center", ncols=len(lines), fontsize=9)
    with whole_file(path) as temporary:
        figure.savefig(temporary, metadata=metadata)


def _column(axes: Any, setting: str, runs: Runs, summary: dict[str, Any], every: int) -> None:
    """Draw the first seed's losses and the mean difference over the seeds."""
    losses, differences = axes
    full, parts, quantity, noise = runs["eager"], [], "", ""
    for name, style in STYLE.items():
        if name not in summary:
            continue
        one = runs[name][min(runs[name])]
        steps = range(every, every * len(one["losses"]) + 1, every)
        losses.plot(steps, one["losses"], solid_capstyle="round", **style)
        if name == "eager":
            continue
        apart = [
            [a - b for a, b in zip(run["losses"], full[seed]["losses"], strict=True)]
            for seed, run in runs[name].items()
            if seed in full
        ]
        differences.plot(steps, [fmean(values) for values in zip(*apart, strict=True)], **style)
        quantity = "held_out" if "held_out" in summary[name] else "training"
        found = summary[name][quantity]
        noise = "" if found["noise"] is None else f"; full logits' range over them {found['noise']:.4f}"
        error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.4f}"
        parts.append(f"{SHORT[name]} {found['difference']:+.4f}".replace("-", "−") + error)
    differences.axhline(0, color=INK, linewidth=0.6)
    differences.set_xlabel("training step")
    differences.xaxis.get_major_locator().set_params(integer=True)
    differences.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    losses.set_title(setting, loc="left", fontsize=10.5, color=INK)
    if parts:
        what = f"{quantity.replace('_', '-')} loss at the end, {len(full)} seed{'s' * (len(full) > 1)}{noise}:\n"
        differences.set_title(what + ", ".join(parts), loc="right", fontsize=8.5, color="#5b6470")
    quiet(losses, "both")
    quiet(differences, "both")
