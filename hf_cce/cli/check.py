"""``hf-cce check``: check that a model trains with CCE as it does without, and that no logits are materialized."""

from __future__ import annotations

import argparse
from typing import Any

from hf_cce.cli.common import Output, add_device, table

SHOWN_ROWS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name_or_path",
        metavar="MODEL",
        help="a folder, a name on the Hub, or a model type such as llama",
    )
    parser.add_argument("--tiny", action="store_true", help="use a small random model (always done for a model type)")
    add_device(parser, default="cpu")


def run(options: argparse.Namespace, out: Output) -> int:
    """Train one step of your model without and with hf_cce, and compare.

    The command compares loss, gradients and evaluation logits on random text in float32, on the CPU or on --device. It needs
    memory for the weights and two sets of gradients. --tiny uses a small random model instead.

    Exit codes: 0 if the results agree up to rounding and no full logits were materialized, 1 if they differ or full logits
    were materialized, 2 if the model could not be checked.
    """
    from hf_cce.diagnostics import check
    from hf_cce.diagnostics.machine import checked_device

    model, random = check.load(options.model_name_or_path, options.tiny, checked_device(options.device or "cpu"))
    report = check.check(model, out.progress)
    out.progress("")
    without, with_cce = report["losses"]
    weights = "a tiny model with random weights" if random else "its own weights"
    out.print(
        check.verdict(report),
        f"{report['model']}, {weights}, {report['parameters']:,} parameters, {report['device']}, float32",
        f"Loss: {without:.7f} without hf_cce, {with_cce:.7f} with hf_cce",
        f"Logits in evaluation: {'identical' if report['evaluation_same'] else 'different'}\n",
    )
    rows = sorted(report["differences"], key=lambda row: -row["error"] / row["allowed"])[:SHOWN_ROWS]
    out.print(_table(rows))
    out.print(f"The {len(rows)} results closest to their limit, of {len(report['differences'])}; --json writes all.")
    out.save(report)
    return int(not (report["same"] and report["saves"]))


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [(x["name"], f"{x['error']:.1e}", f"{x['allowed']:.1e}", "ok" if x["ok"] else "differs") for x in rows]
    return table([("loss, or gradient of", "error", "allowed", ""), *cells])
