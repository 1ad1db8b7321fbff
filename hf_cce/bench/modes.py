"""Tables of one problem of ``hf-cce bench``: every loss in every mode, and those of older runs in short."""

from __future__ import annotations

from typing import Any

from hf_cce.bench import names

HEAD = "forward + backward | forward | frozen head | memory | errors (hidden states, weight) | tiles kept |"


def table(result: dict[str, Any]) -> list[str]:
    """Forward and backward, forward alone, and with a frozen head, of every loss in one result; who failed is left out."""
    lines = [f"| loss | {HEAD}", "|---|---|---|---|---|---|---|"]
    for key in names.ordered(result["rows"]):
        if "ms" in (row := result["rows"][key]):
            lines.append(f"| {names.title(key)} | {_figures(row)} |")
    return lines


def ours(results: dict[str, dict[str, Any]]) -> list[str]:
    """Of each of ``results`` {what it is: result} the rows of hf_cce itself, with its filter and without."""
    lines = [f"| run | loss | {HEAD}", "|---|---|---|---|---|---|---|---|"]
    for title, result in results.items():
        for key in ("hf_cce", "hf_cce exact"):
            if key in result["rows"]:
                lines.append(f"| {title} | {names.title(key)} | {_figures(result['rows'][key])} |")
    return lines


def _figures(row: dict[str, Any]) -> str:
    times = [
        f"{row[f'{mode}ms']:.2f} ms ({row[f'{mode}gemm_multiple']:.2f})" if f"{mode}ms" in row else "–"
        for mode in ("", "forward_", "frozen_")
    ]
    kept = f"{row['filter']['kept']:.0%}" if row.get("filter") else "–"
    errors = f"{row['grad_hidden_error']:.1e}, {row['grad_weight_error']:.1e}"
    return " | ".join([*times, f"{row['extra_mib']:,.0f} MiB", errors, kept])
