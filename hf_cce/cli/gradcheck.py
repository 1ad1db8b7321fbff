"""``hf-cce gradcheck``: is the fused loss as exact on this device as full logits are?"""

from __future__ import annotations

import argparse
from typing import Any

from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, table


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="only this one; may be repeated")
    defaults = {"--tokens": "150, 2,500 on a GPU", "--hidden-size": "72, 2,048 on a GPU"}
    add_sizes(parser, defaults | {"--vocab-size": "2,003, 32,003 on a GPU"})
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    parser.add_argument("--details", action="store_true", help="show every comparison, not only the worst")


def run(options: argparse.Namespace, out: Output) -> int:
    """Compare loss and gradients with float64, beside full logits.

    Exit code 0: everything is as close as full logits are in the same dtype, plus rounding. 1: something is not. 2: the
    comparison could not run.
    """
    from hf_cce.diagnostics import gradcheck
    from hf_cce.diagnostics.machine import checked_device

    device = checked_device(options.device)
    given = {name: getattr(options, name) for name in ("tokens", "hidden_size", "vocab_size")}
    sizes = {name: value for name, value in given.items() if value is not None}
    problem = gradcheck.default_problem(device)._replace(seed=options.seed, **sizes)
    report = gradcheck.gradcheck(problem, device, tuple(options.dtype or gradcheck.DTYPES), out.progress)
    out.progress("")
    out.print(gradcheck.verdict(report))
    out.print(
        f"{report['device']}; {problem.tokens:,} tokens, hidden size {problem.hidden_size:,}, vocabulary "
        f"{problem.vocab_size:,}, seed {problem.seed}; errors relative to float64\n"
    )
    rows = report["rows"]
    if not options.details:  # for each result the case closest to its limit
        closest: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            key = gradcheck.computed_by(row), row["quantity"]
            closest[key] = max(closest.get(key, row), row, key=gradcheck.share)
        rows = list(closest.values())
    cells = [("computed in", "", "case", "full logits", "hf_cce", "allowed", "")]
    for row in rows:
        errors = (f"{row[name]:.1e}" for name in ("full_logits", "hf_cce", "allowed"))
        verdict = "ok" if row["ok"] else "worse"
        cells.append((gradcheck.computed_by(row), row["quantity"], row["case"], *errors, verdict))
    out.print(table(cells, left=3))
    out.print(*(f"Not compared: {note}" for note in report["notes"]))
    if not options.details:
        out.print("Shown is the case closest to its limit; --details shows all.")
    out.save(report)
    return int(not report["ok"])
