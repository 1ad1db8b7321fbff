"""Pictures of ``hf_cce.bench.grid.run``'s report: time over tokens, memory over the vocabulary, error over the share kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_cce.bench.files import whole_file
from hf_cce.bench.plots import INK, quiet, wrap

# One colour a family, one dash a variant, the same in every picture.
STYLES: dict[str, tuple[str, str, str]] = {
    "hf_cce": ("#1f6f8b", "-", "o"),
    "hf_cce exact": ("#1f6f8b", "--", "s"),
    "hf_cce 64 MiB": ("#63b0c9", "-", "v"),
    "hf_cce exact 1.25 GiB": ("#63b0c9", "--", "^"),
    "eager": ("#b4552d", "-", "o"),
    "torch.compile": ("#d99a2b", "-", "D"),
    "liger": ("#5c8a3a", "-", "P"),
    "apple cce": ("#7a4f9a", "-", "X"),
    "apple cce exact": ("#7a4f9a", "--", "d"),
    "trl": ("#a3476f", "-", "h"),
    "quack": ("#2f4858", "-", "p"),
    "torch F.linear_cross_entropy": ("#8a93a0", "-", "*"),
}
GEMMS_ALONE = "the three GEMMs alone"
OTHER = ("#444444", ":", "o")
PROBLEMS = ("#1f6f8b", "#b4552d", "#5c8a3a", "#7a4f9a", "#d99a2b", "#8a93a0")
Points = list[tuple[float, float]]
Series = dict[str, Points]
LEAST_MIB = 1.0  # what is less is drawn there: the axis is logarithmic


def draw_bench(report: dict[str, Any], path: Path) -> None:
    """Draw the panels that the report has figures for; where it has for none of the three, bars of the GEMM multiples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = [result for result in report["results"].values() if "problem" in result]
    panels: list[tuple[Any, Any]] = []
    if times := time_over_tokens(results):
        panels.append((_times, times))
    if memory := memory_over_vocabulary(results):
        panels.append((_memory, memory))
    if errors := error_over_kept(report):
        panels.append((_errors, errors))
    height = 5.6
    if not panels:
        panels.append((_bars, report["results"]))
        height = 1.8 + 0.22 * sum(len(result["rows"]) + 1 for result in report["results"].values())
    figure = Figure(figsize=(max(7.5, 5.6 * len(panels)), height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.05)  # type: ignore[union-attr, call-arg]
    versions = report["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("hf_cce", "torch", "triton") if versions.get(name))
    about = figure.text(
        0.015, 1 - 0.39 / height, f"{report['device']} · {report['dtype']} · {named}", fontsize=8.5, color="#5b6470",
        va="top",
    )  # fmt: skip
    figure.suptitle(
        "Cross-entropy of a linear head" + "\n" * wrap(about),
        fontsize=13, fontweight="bold", color=INK, x=0.015, ha="left",
    )  # fmt: skip
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (draw, data) in zip(every, panels, strict=True):
        draw(axes, data)
    # The losses are the same in the panels of time and memory: one legend under the picture; errors have their own.
    entries: dict[str, Any] = {}
    for axes, (draw, _) in zip(every, panels, strict=True):
        if draw in (_times, _memory):
            entries.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if entries:
        columns = min(len(entries), 4 if len(panels) < 3 else 6) if len(panels) > 1 else 3
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5
        )
    with whole_file(path) as temporary:
        figure.savefig(temporary)


def time_over_tokens(results: Iterable[dict[str, Any]]) -> tuple[str, Series] | None:
    """(title, {loss: [(N, ms)]}) of the head that was measured at most values of N, two at least."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        about = result["problem"]
        if "three_gemms_ms" in result:
            groups[about["kind"], about.get("head", ""), about["D"], about["V"]].append(result)
    key = max(groups, key=lambda k: (len({r["problem"]["N"] for r in groups[k]}), k[3]), default=None)
    if key is None or len({r["problem"]["N"] for r in groups[key]}) < 2:
        return None
    series = _series(groups[key], "N", "ms")
    gemms = sorted((result["problem"]["N"], result["three_gemms_ms"]) for result in groups[key])
    kind, head, d, v = key
    return f"{head or kind} head, D = {d:,}, V = {v:,}", {**series, GEMMS_ALONE: gemms}


def memory_over_vocabulary(results: Iterable[dict[str, Any]]) -> tuple[str, Series] | None:
    """(title, {loss: [(V, MiB)]}) at the N that was measured with most vocabularies, two at least.

    A vocabulary that was measured with more than one head has the larger figure.
    """
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        if any("extra_mib" in row for row in result["rows"].values()):
            groups[result["problem"]["N"]].append(result)
    n = max(groups, key=lambda k: (len({r["problem"]["V"] for r in groups[k]}), k), default=None)
    if n is None or len({r["problem"]["V"] for r in groups[n]}) < 2:
        return None
    series: Series = {}
    for name, points in _series(groups[n], "V", "extra_mib").items():
        largest: dict[float, float] = {}
        for v, mib in points:
            largest[v] = max(mib, largest.get(v, LEAST_MIB))
        series[name] = sorted(largest.items())
    return f"{n:,} tokens", series


def error_over_kept(report: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """By title of the problem: points (share kept, error) of the gradients of "hidden" and "weight" over a sweep.

    Beside them "own", the same of the hidden states' gradient where hf_cce chose the filter itself, and "eager", the
    error of that gradient with all logits in the model's dtype.
    """
    found: dict[str, dict[str, Any]] = {}
    for title, result in report["results"].items():
        rows = {n: r for n, r in result["rows"].items() if "kept" in r.get("filter", {}) and "grad_weight_error" in r}
        swept = [row for name, row in rows.items() if name in report.get("sweep", {})]
        own = rows.get("hf_cce")
        if swept:
            found[title] = {
                "hidden": sorted((row["filter"]["kept"], row["grad_hidden_error"]) for row in swept),
                "weight": sorted((row["filter"]["kept"], row["grad_weight_error"]) for row in swept),
                "own": (own["filter"]["kept"], own["grad_hidden_error"]) if own else None,
                "eager": result["rows"].get("eager", {}).get("grad_hidden_error"),
            }
    return found or None


def _series(results: list[dict[str, Any]], x: str, y: str) -> Series:
    series: Series = defaultdict(list)
    for result in results:
        for name, row in result["rows"].items():
            if y in row and name in STYLES:  # not those of a sweep: they have their own panel
                series[name].append((result["problem"][x], row[y]))
    return {name: sorted(points) for name, points in series.items()}


def _lines(axes: Any, series: Series) -> None:
    for name in (name for name in (*STYLES, GEMMS_ALONE) if name in series):
        xs, ys = zip(*series[name], strict=True)
        if name == GEMMS_ALONE:
            axes.plot(xs, ys, color=INK, linestyle=":", linewidth=1.6, label=name)
            continue
        colour, dash, marker = STYLES[name]
        ours = name == "hf_cce"
        axes.plot(xs, ys, color=colour, linestyle=dash, marker=marker, markersize=6 if ours else 4.5, label=name,
                  linewidth=2.4 if ours else 1.4, zorder=3 if ours else 2)  # fmt: skip


def _logarithmic(axis: Any, series: Iterable[Points], side: int, form: str = "") -> None:
    """Plain numbers on a logarithmic axis, at 1, 2 and 5 of each power of ten where there is room for that."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [point[side] for points in series for point in points if point[side] > 0]
    wide = max(values, default=1) / min(values, default=1) > 2e3
    axis.set_major_locator(LogLocator(10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:{form}}" if form else f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _tick_what_was_measured(axis: Any, series: Iterable[Points]) -> None:
    """Ticks of a logarithmic axis at the measured values, without those that would stand in each other's way."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    values = sorted({x for points in series for x, _ in points})
    kept = values[:1]
    for x in values[1:]:
        if math.log(x / kept[-1]) >= 0.14 * math.log(values[-1] / values[0]):
            kept.append(x)
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.set_ticks(kept)
    axis.set_minor_locator(NullLocator())


def _times(axes: Any, data: tuple[str, Series]) -> None:
    title, series = data
    axes.set_xscale("log")
    axes.set_yscale("log")
    _lines(axes, series)
    _tick_what_was_measured(axes.xaxis, series.values())
    _logarithmic(axes.yaxis, series.values(), 1)
    axes.set_xlabel("tokens N")
    axes.set_ylabel("forward + backward (ms)")
    axes.set_title(f"Time: {title}", loc="left", fontsize=10.5, color=INK)
    quiet(axes, "both")


def _memory(axes: Any, data: tuple[str, Series]) -> None:
    title, series = data
    axes.set_xscale("log")
    axes.set_yscale("log")
    _lines(axes, series)
    _tick_what_was_measured(axes.xaxis, series.values())
    _logarithmic(axes.yaxis, series.values(), 1)
    axes.set_ylim(bottom=LEAST_MIB * 0.8)
    axes.set_xlabel("vocabulary V")
    axes.set_ylabel("peak above inputs and gradients (MiB)")
    axes.set_title(f"Memory: {title}", loc="left", fontsize=10.5, color=INK)
    quiet(axes, "both")


def _errors(axes: Any, data: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    axes.set_yscale("log")
    entries = []
    for number, (title, errors) in enumerate(data.items()):
        colour = PROBLEMS[number % len(PROBLEMS)]
        entries.append(Line2D([], [], color=colour, linewidth=3, label=title.removeprefix("trained ")))
        axes.plot(*zip(*errors["hidden"], strict=True), color=colour, marker="o", markersize=5, linewidth=1.8)
        axes.plot(*zip(*errors["weight"], strict=True), color=colour, marker="s", markersize=4, linewidth=1.2, ls="--")
        if errors["own"]:
            axes.plot(*errors["own"], color=colour, marker="*", markersize=13, markeredgecolor="white", ls="", zorder=4)
        if errors["eager"] is not None:
            axes.axhline(errors["eager"], color=colour, linewidth=1.1, linestyle=":")
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("hidden states", {"marker": "o", "linestyle": "-"}),
        ("weight", {"marker": "s", "linestyle": "--", "markersize": 4}),
        ("hidden states, hf_cce's own choice", {"marker": "*", "linestyle": "", "markersize": 10}),
        ("hidden states, eager", {"linestyle": ":"}),
    ]
    entries += [Line2D([], [], color=INK, label=label, **{"markersize": 5, **look}) for label, look in kinds]
    _logarithmic(axes.yaxis, [errors[what] for errors in data.values() for what in ("hidden", "weight")], 1, ".2g")
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("share of the gradient's tiles kept")
    axes.set_ylabel("relative error of the gradients")
    axes.set_title("Error over the share kept", loc="left", fontsize=10.5, color=INK)
    axes.legend(handles=entries, fontsize=8, loc="upper right", facecolor="white", edgecolor="none", framealpha=0.85)
    quiet(axes, "both")


def _bars(axes: Any, results: dict[str, dict[str, Any]]) -> None:
    """One bar a loss and problem, from below 1 × three GEMMs (or of fewer, in the mode that was measured)."""
    from hf_cce.bench.measure import GEMMS, PREFIX
    from hf_cce.bench.tables import TITLES

    rows = [row for result in results.values() for row in result["rows"].values()]
    mode = next((m for m in PREFIX if any(f"{PREFIX[m]}gemm_multiple" in row for row in rows)), "both")
    key, y, ticks = f"{PREFIX[mode]}gemm_multiple", 0, []
    for title, result in results.items():
        axes.text(0, y - 0.15, title, fontsize=8.5, color=INK, fontweight="bold", va="bottom")
        y += 1
        for name, row in result["rows"].items():
            if key not in row:
                continue
            axes.barh(y - 0.5, row[key], height=0.72, color=STYLES.get(name, OTHER)[0])
            axes.annotate(
                f"{row[key]:.2f}", (row[key], y - 0.5), (4, 0), textcoords="offset points", va="center", fontsize=8,
                color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
            ticks.append((y - 0.5, name))
            y += 1
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylim(y, -0.8)
    axes.axvline(1, color=INK, linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlim(0, max((row[key] for row in rows if key in row), default=1) * 1.15)
    count = GEMMS[mode]
    axes.set_xlabel(
        f"time as a multiple of {'the GEMM' if count == 1 else f'the {count} GEMMs'} of a dense loss ({TITLES[mode]})"
    )
    quiet(axes, "x")
