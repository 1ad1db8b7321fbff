"""``hf-cce check``: does this model train with CCE as it does without, and does it make no logits?"""

from __future__ import annotations

import argparse

from hf_cce.cli.common import Output, add_device, table

SHOWN = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name_or_path", metavar="MODEL", help="a folder, a name on the hub, or a type such as llama"
    )
    parser.add_argument("--tiny", action="store_true", help="a small random model of its class; always so for a type")
    add_device(parser)
    parser.set_defaults(device="cpu")
    parser.add_argument("--details", action="store_true", help="show every gradient, not only the worst")


def run(options: argparse.Namespace, out: Output) -> int:
    """Train one step of your model without and with CCE, and compare.

    Loss, gradients and evaluation of random text are compared in float32, on the CPU unless --device names another one; memory
    holds the weights and two sets of gradients. --tiny leaves the weights out.

    Exit code 0: the same but for rounding, and no logits were made. 1: it differs, or logits were made. 2: it could not be
    checked.
    """
    from hf_cce.diagnostics import check
    from hf_cce.diagnostics.machine import checked_device

    model = check.load(options.model_name_or_path, options.tiny, checked_device(options.device))
    report = check.check(model, out.progress)
    out.progress("")
    out.verdict(check.verdict(report))
    without, with_cce = report["losses"]
    random = options.tiny or check.is_random(options.model_name_or_path)
    weights = "a tiny model with random weights" if random else "its own weights"
    out.print(
        f"{report['model']}, {weights}, {report['parameters']:,} parameters, {report['device']}, float32",
        f"Loss: {without:.7f} without CCE, {with_cce:.7f} with CCE",
        f"Logits in evaluation: {'identical' if report['evaluation_same'] else 'different'}\n",
    )
    rows = report["differences"]
    if not options.details:
        rows = sorted(rows, key=lambda row: -row["error"] / row["allowed"])[:SHOWN]
    cells = [(x["name"], f"{x['error']:.1e}", f"{x['allowed']:.1e}", "ok" if x["ok"] else "differs") for x in rows]
    out.print(table([("loss, or gradient of", "error", "allowed", ""), *cells]))
    if len(rows) < len(report["differences"]):
        out.print(f"The {SHOWN} closest to the limit, of {len(report['differences'])}; --details shows all.")
    out.save(report)
    return int(not (report["same"] and report["saves"]))
