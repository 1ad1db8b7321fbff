"""Create docs/pictures: four outputs stored in notebooks/kernel.ipynb, and plots of the JSON results.

usage: python docs/make_pictures.py
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # this checkout, not an installed hf_cce

from benchmarks.curves_plot import draw  # noqa: E402
from benchmarks.files import whole_file  # noqa: E402
from benchmarks.plots import CCE, FAINT, INK, PLAIN, quiet  # noqa: E402
from benchmarks.report import RESULTS, read  # noqa: E402

HEADS, CURVES = "heads", "curves"  # result files
NOTEBOOK = FOLDER.parent / "notebooks" / "kernel.ipynb"
NAMES = ("order.png", "kept.png", "mass.png", "error.png")  # in the order in which the notebook shows them
PROBLEM = "trained V49152 N=8192"
# row name: (label, color, label position: "right" or "left" of its point, or "above" on the right)
SHOWN = {
    "hf_cce": ("hf_cce", CCE, "left"),
    "hf_cce exact": ("hf_cce, no filter", CCE, "left"),
    "hf_cce exact 1.25 GiB": ("hf_cce, no filter,\nbudget 1.25 GiB", CCE, "right"),
    "eager": ("Transformers\n(full logits)", PLAIN, "left"),
    "torch.compile": ("torch.compile of\nTransformers' loss", PLAIN, "above"),
    "liger": ("Liger", INK, "right"),
    "apple cce": ("Apple's CCE", INK, "right"),
    "trl": ("TRL's fused head", INK, "left"),
}


def of_the_notebook() -> dict[str, bytes]:
    """Return the images stored in the notebook, by file name."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    found = [base64.b64decode(x.data["image/png"]) for x in outputs if "image/png" in x.get("data", {})]
    return dict(zip(NAMES, found, strict=True))


def digest(name: str) -> str:
    """Return a hash of a result file, stored in the image that shows it."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()[:16]


def time_and_memory() -> bytes:
    """Return a PNG of time against memory of the losses on a trained head."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = read(HEADS)
    rows = report["results"][PROBLEM]["rows"]
    figure = Figure(figsize=(7.6, 3.8), dpi=100, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = {
        "right": ((9, 0), "left", "center"),
        "left": ((-9, 0), "right", "center"),
        "above": ((7, 5), "left", "bottom"),
    }
    highest = 1.08 * max(rows[name]["ms_spread"][1] for name in SHOWN)
    for name, (words, colour, side) in SHOWN.items():
        row = rows[name]
        offset, across, along = places[side]
        axes.plot([row["extra_mib"]] * 2, row["ms_spread"], color=colour, linewidth=1)
        axes.plot(row["extra_mib"], row["ms"], "o", color=colour, markersize=8)
        axes.annotate(
            words, (row["extra_mib"], row["ms"]), offset, textcoords="offset points", ha=across, va=along, color=colour
        )
    axes.set(xscale="log", xlim=(0.4, 9000), ylim=(0, highest), xlabel="memory above gradients (MiB)")
    axes.set_ylabel("forward + backward (ms)")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_title(
        f"Loss of 8,192 tokens, trained head 49,152 × 1,024 · {report['device']}, {report['dtype']}",
        loc="left", fontsize=10.5, color=INK,
    )  # fmt: skip
    quiet(axes, "both")
    axes.minorticks_off()
    axes.axhline(report["results"][PROBLEM]["three_gemms_ms"], color=FAINT, linewidth=1.2, linestyle="--", zorder=0)
    axes.annotate(
        "the three matrix products of a dense loss", (0.45, report["results"][PROBLEM]["three_gemms_ms"]), (0, -3),
        textcoords="offset points", va="top", fontsize=8, color="#5b6470",
    )  # fmt: skip
    stream = io.BytesIO()
    canvas.print_png(stream, metadata={"Source": digest(HEADS), "Software": None})
    return stream.getvalue()


def main() -> None:
    for name, picture in {**of_the_notebook(), "time-memory.png": time_and_memory()}.items():
        with whole_file(FOLDER / "pictures" / name) as temporary:
            temporary.write_bytes(picture)
    draw(read(CURVES), FOLDER / "pictures" / "curves.png", {"Source": digest(CURVES), "Software": None}, dpi=90)


if __name__ == "__main__":
    main()
