"""``hf-cce doctor``: report what is installed, what would run, and how to fix what is missing."""

from __future__ import annotations

import argparse

from hf_cce.cli.common import Output, table


def run(options: argparse.Namespace, out: Output) -> int:
    """Check this machine: packages, GPUs, what runs on them, and a self-test.

    Exit codes: 0 if everything is fine, 1 if something is wrong (the output shows how to fix it), 2 if the check could not run.
    """
    from hf_cce.diagnostics.doctor import diagnose
    from hf_cce.diagnostics.machine import TITLE

    found = diagnose(out.progress)
    out.progress("")
    checks = found["checks"]
    wrong = [check for check in checks if check["status"] == "wrong"]
    if wrong:
        out.print(f"{len(wrong)} problem{'s' * (len(wrong) > 1)} found; see the commands below to fix them.\n")
    else:
        out.print("No problems found.\n")
    out.print(table([(check["name"], check["status"], check["found"]) for check in checks], left=3))
    if found["implementations"]:
        out.print("", "What training runs here, compared with full logits:")
    for choice in found["implementations"]:
        title = TITLE[choice["implementation"]]
        out.print(f"  {choice['device']}, {choice['dtype']}: {title}: {choice['expect']}", f"    {choice['why']}")
    for title, status in (("To fix:", "wrong"), ("Optional:", "note")):
        fixes = [f"  {check['name']}: {check['fix']}" for check in checks if check["fix"] and check["status"] == status]
        if fixes:
            out.print("", title, *fixes)
    out.save(found)
    return int(bool(wrong))
