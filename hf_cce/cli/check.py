"""``hf-cce check``: check that a model trains with CCE as it does without, and that no logits are materialized."""

from __future__ import annotations

import argparse
from typing import Any

from hf_cce.cli.common import Output, add_device, table

SHOWN_ROWS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name_or_path", metavar="MODEL", nargs="?", help="a folder, a name on the hub, or a type such as llama"
    )
    parser.add_argument("--curve", action="store_true", help="train 64 steps of a small model instead")
    parser.add_argument("--tiny", action="store_true", help="a small random model of its class; always so for a type")
    add_device(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Train one step of your model without and with CCE, and compare.

    Loss, gradients and evaluation of random text are compared in float32, on the CPU unless --device names another one; memory
    holds the weights and two sets of gradients. --tiny leaves the weights out.

    --curve needs no MODEL: it trains a small one for 64 steps on the best device, or --device, and compares the losses with full
    logits in float64, here and as the package has them.

    Exit code 0: the same but for rounding, and no logits were made. 1: it differs, or logits were made. 2: it could not be
    checked.
    """
    from hf_cce.diagnostics import check
    from hf_cce.diagnostics.machine import checked_device

    if (options.model_name_or_path is None) != options.curve:
        raise ValueError("give a MODEL or --curve, one of the two")
    if options.curve:
        return _curve(options, out)
    model, random = check.load(options.model_name_or_path, options.tiny, checked_device(options.device or "cpu"))
    report = check.check(model, out.progress)
    out.progress("")
    out.verdict(check.verdict(report))
    without, with_cce = report["losses"]
    weights = "a tiny model with random weights" if random else "its own weights"
    out.print(
        f"{report['model']}, {weights}, {report['parameters']:,} parameters, {report['device']}, float32",
        f"Loss: {without:.7f} without CCE, {with_cce:.7f} with CCE",
        f"Logits in evaluation: {'identical' if report['evaluation_same'] else 'different'}\n",
    )
    rows = sorted(report["differences"], key=lambda row: -row["error"] / row["allowed"])[:SHOWN_ROWS]
    out.print(_table(rows, "loss, or gradient of"))
    out.print(f"The {len(rows)} closest to the limit, of {len(report['differences'])}; --json has all.")
    out.save(report)
    return int(not (report["same"] and report["saves"]))


def _curve(options: argparse.Namespace, out: Output) -> int:
    from hf_cce.diagnostics import curve
    from hf_cce.diagnostics.machine import checked_device

    report = curve.compare(checked_device(options.device), out.progress)
    out.progress("")
    out.verdict(curve.verdict(report))
    out.print(f"A GPT-2 of 2 layers, {report['device']}\n", _table(report["rows"], "largest difference of a loss"))
    out.save(report)
    return int(not report["same"])


def _table(rows: list[dict[str, Any]], title: str) -> str:
    cells = [(x["name"], f"{x['error']:.1e}", f"{x['allowed']:.1e}", "ok" if x["ok"] else "differs") for x in rows]
    return table([(title, "error", "allowed", ""), *cells])
