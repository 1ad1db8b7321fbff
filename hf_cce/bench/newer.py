"""Files of results that no table of hf_cce.bench.report names: each drawn as the command that wrote it draws it.

So a new file is on the page from the next ``make docs`` on, and a table of its own is written where it deserves one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def drawn(report: dict[str, Any]) -> str | None:
    """Markdown, by what the report holds; None where it is of no kind that is known."""
    # here, as they load torch, and the tables that the pages name need none
    from hf_cce.bench import curves, first, fits, steps, tables

    results: dict[str, Any] = report.get("results") or {}
    rows = [row for row in results.values() if isinstance(row, dict)]
    if "setup" in report and "settings" in report:
        return curves.table(report)
    if rows and all("rows" in row and "gemms_ms" in row for row in rows):
        return "\n\n".join(tables.table(title, result) for title, result in results.items())
    if rows and "context_gib" in report:
        return fits.table(report)
    if rows and "settings" in report and all("status" in row for row in rows):
        return steps.table({**report, "settings": {"loop": "plain", **report["settings"]}})
    if "shape" in report and rows and all({"first_s", "failed", "missing"} & set(row) for row in rows):
        return first.table(results)
    return None


def section(reports: dict[str, dict[str, Any]], link: Callable[[str], str]) -> str:
    """One part for each of ``reports`` {file: its content}."""
    parts = []
    for name, report in sorted(reports.items()):
        versions = ", ".join(f"{key} {value}" for key, value in report.get("versions", {}).items() if value)
        where = "; ".join(x for x in (report.get("device", ""), versions) if x)
        about = f"{link(name)}{f': {where}' if where else ''}."
        if "command" in report:
            about += f" `{report['command']}`"
        table = drawn(report)
        # the headings of those tables, as bold lines: on the page they stand below this section
        shown = re.sub(r"^#+ (.*)$", r"**\1**", table, flags=re.MULTILINE).strip() if table else None
        parts += [about, *([shown] if shown else [])]
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
