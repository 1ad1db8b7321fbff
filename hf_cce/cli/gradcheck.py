"""``hf-cce gradcheck``: check that the fused loss is as exact on this device as full logits."""

from __future__ import annotations

import argparse
from typing import Any

from hf_cce.cli.common import DTYPES, Output, add_device, table


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="test only this dtype; may be repeated (default: all)"
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Compare the errors of loss and gradients with those of full logits, against float64.

    For each result, the case closest to its limit is shown; --json writes all.

    Exit codes: 0 if all results are as close to float64 as full logits in the same dtype, plus rounding, 1 if one is not, 2 if
    the comparison could not run.
    """
    from hf_cce.diagnostics import gradcheck
    from hf_cce.diagnostics.machine import checked_device

    device = checked_device(options.device)
    problem = gradcheck.default_problem(device)
    report = gradcheck.gradcheck(problem, device, tuple(options.dtype or gradcheck.DTYPES), out.progress)
    out.progress("")
    out.print(
        gradcheck.verdict(report),
        f"{report['device']}; {problem.tokens:,} tokens, hidden size {problem.hidden_size:,}, vocabulary "
        f"{problem.vocab_size:,}; errors relative to float64\n",
    )
    closest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        key = row["computed_by"], row["quantity"]
        closest[key] = max(closest.get(key, row), row, key=gradcheck.error_ratio)
    cells = [("computed in", "", "closest case", "full logits", "hf_cce", "allowed", "")]
    for row in closest.values():
        errors = (f"{row[name]:.1e}" for name in ("full_logits", "hf_cce", "allowed"))
        cells.append((row["computed_by"], row["quantity"], row["case"], *errors, "ok" if row["ok"] else "worse"))
    out.print(table(cells, left=3))
    out.print(*(f"Not compared: {note}" for note in report["notes"]))
    out.save(report)
    return int(not report["ok"])
