"""Markdown tables of ``hf_cce.bench.grid.run``'s report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_cce.bench.measure import GEMMS, PREFIX

Row = dict[str, Any]
NOTES = """\
ms: median, with least and most. ×: as a multiple of the matrix products that a dense loss cannot avoid, run between the others:
1 for the forward, 2 with a frozen weight, 3 for all. MiB: peak above inputs and gradients, of forward and backward.
Errors: relative, against {reference}."""
TITLES = {"both": "forward + backward", "forward": "forward", "frozen": "frozen weight"}


def markdown(report: dict[str, Any]) -> str:
    """The whole report: where it ran, a table for each problem, what is missing and why."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    parts = [f"{report['device']}, {report['dtype']}; {versions}.\n\n{NOTES.format(reference=report['reference'])}"]
    for name, about in report["heads"].items():
        parts.append(
            f"Head {name}: {about['layers']} layers trained for {about['seconds']:g} s ({about['steps']:,} steps, "
            f"{about['tokens_trained'] / 1e6:,.1f} M tokens) on {about['source']}; held-out loss {about['held_out_loss']:.2f}."
        )
    parts += [table(title, result) for title, result in report["results"].items()]
    if report["missing"]:
        parts.append("\n".join(["Not measured:", ""] + [f"- {name}: {why}" for name, why in report["missing"].items()]))
    return "\n\n".join(parts) + "\n"


def table(title: str, result: dict[str, Any]) -> str:
    """One problem; columns that no row has a figure for are left out."""
    products = ", ".join(f"{GEMMS[mode]}: {ms:,.2f} ms" for mode, ms in result["gemms_ms"].items())
    alive = {name: row for name, row in result["rows"].items() if "failed" not in row}
    columns = [(head, cell) for head, cell in _columns() if any(cell(row) for row in alive.values())]
    lines = [f"### {title} (GEMMs: {products})", ""]
    if alive:
        lines += ["| | " + " | ".join(head for head, _ in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
        lines += [
            f"| {name} | " + " | ".join(cell(row) or "–" for _, cell in columns) + " |" for name, row in alive.items()
        ]
    failed = [f"- {name} failed: {row['failed']}" for name, row in result["rows"].items() if "failed" in row]
    return "\n".join(lines + ([""] if alive and failed else []) + failed)


def _columns() -> list[tuple[str, Callable[[Row], str]]]:
    columns: list[tuple[str, Callable[[Row], str]]] = []
    for mode, prefix in PREFIX.items():
        columns.append((f"{TITLES[mode]}, ms", _time(prefix)))
        columns.append((f"× {GEMMS[mode]}", _figure(f"{prefix}gemm_multiple", "{:.2f}")))
    columns += [
        ("wall ms", _figure("wall_ms", "{:,.2f}")),
        ("MiB", _figure("extra_mib", "{:,.0f}")),
        ("error loss", _figure("loss_error", "{:.1e}")),
        ("error dh", _figure("grad_hidden_error", "{:.1e}")),
        ("error dW", _figure("grad_weight_error", "{:.1e}")),
        ("error dh, frozen", _figure("frozen_grad_hidden_error", "{:.1e}")),
        ("kept", lambda row: f"{row['filter']['kept']:.2f}" if "kept" in row.get("filter", {}) else ""),
        ("first call, s", _figure("first_call_s", "{:.1f}")),
    ]
    return columns


def _figure(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: form.format(row[key]) if key in row else ""


def _time(prefix: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if f"{prefix}ms" not in row:
            return ""
        least, most = row[f"{prefix}ms_spread"]
        return f"{row[f'{prefix}ms']:,.2f} ({least:,.2f}–{most:,.2f})"

    return cell
