"""Files of results that no table of hf_cce.bench.report names, drawn as those tables are; and the studies that are text.

So a new file is on the page from the next ``make docs`` on, and a table of its own is written where it deserves one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_cce.bench import loops, modes


def drawn(report: dict[str, Any]) -> str | None:
    """Markdown, by what the report holds; None where it is of no kind that is known."""
    results: dict[str, Any] = report.get("results") or {}
    rows = [row for row in results.values() if isinstance(row, dict)]
    if "setup" in report and "settings" in report:
        return "\n".join(loops.curve_rows(report))
    if rows and all("rows" in row and "gemms_ms" in row for row in rows):
        parts = (f"{title}:\n\n" + "\n".join(modes.table(result)) for title, result in results.items())
        return "\n\n".join(parts)
    if rows and "context_gib" in report:
        return "\n".join(loops.fit_rows(report))
    if rows and "settings" in report and all("status" in row for row in rows):
        return "\n".join(loops.step_rows([(loops.weights_of(report), report)]))
    if rows and all("issued_ms" in row for row in rows):
        return "\n".join(loops.turn_rows(report))
    if "shape" in report and rows and all({"first_s", "failed", "missing"} & set(row) for row in rows):
        return "\n".join(loops.first_rows(results, report.get("of", "")))
    return _recipe(report) if {"task", "loss", "tokens_per_second", "peak_bytes", "cce"} <= set(report) else None


def _recipe(report: dict[str, Any]) -> str:
    """A run of recipes/train.py."""
    counts = report["cce"] or {}
    without = f", {counts['fused']:.0f} of {counts['calls']:.0f} losses without logits" if "fused" in counts else ""
    return (
        f"`--task {report['task']} --loss {report['loss']}`: {report['steps']} steps of {report['tokens_a_step']:,} tokens, "
        f"{report['tokens_per_second']:,.0f} tokens/s, peak {report['peak_bytes'] / 2**20:,.0f} MiB{without}."
    )


def section(reports: dict[str, dict[str, Any]], link: Callable[[str], str]) -> str:
    """One part for each of ``reports`` {file: its content}: where it ran, and what it holds."""
    parts = []
    for name, report in sorted(reports.items()):
        versions = loops.versions(report, "torch", "triton", "transformers") if "versions" in report else ""
        where = "; ".join(x for x in (report.get("device", ""), versions) if x)
        table = drawn(report)
        about = f"{link(name)}{f' ({where})' if where else ''}"
        # a sentence stands on the same line, tables below
        if table and not table.startswith("|") and "\n" not in table:
            parts.append(f"{about}: {table}")
        else:
            parts += [f"{about}:" if table else f"{about}.", *([table] if table else [])]
    return "\n\n".join(parts) or "None at present."


def notes(paths: list[Path], link: Callable[[str], str]) -> str:
    """A list of text files, with the first sentence of the comment that they begin with, where they do."""
    lines = []
    for path in sorted(paths):
        comment = []
        for line in path.read_text("utf-8").splitlines():
            if not line.startswith("# "):
                break
            comment.append(line[2:])
        sentence = re.split(r"\. (?=[A-Z\"])|\.$", " ".join(comment))[0]
        lines.append(f"- {link(path.name)}{f': {sentence}' if sentence else ''}")
    return "\n".join(lines)
