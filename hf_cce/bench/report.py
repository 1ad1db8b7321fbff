"""Writes measured tables into the README, from the JSON files in ``hf_cce/bench/results``.

usage: python -m hf_cce.bench.report README.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LOSS = "2026-11-21-h200-bench-flat.json"
PEERS = {
    "hf_cce": "**hf_cce**",
    "hf_cce 64 MiB": "**hf_cce**, `memory_budget` 64 MiB",
    "hf_cce exact 1.25 GiB": "**hf_cce**, `memory_budget` 1.25 GiB, no filter",
    "eager": "Transformers (full logits)",
    "torch.compile": "torch.compile of that",
    "liger": "Liger fused linear cross-entropy",
    "apple cce": "Apple's CCE",
}


def loss_table(problem: str = "flat N=8192 D=896 V=151936") -> str:
    """One problem of the loss benchmark, as large as the head of Qwen2.5-0.5B: time, memory, error of each peer."""
    report = json.loads((RESULTS / LOSS).read_text("utf-8"))
    result, versions = report["results"][problem], report["versions"]
    lines = [
        "| loss of 8,192 tokens, head 151,936 × 896 | forward + backward | memory above gradients | error of the gradients |",
        "|---|---|---|---|",
    ]
    for name, title in PEERS.items():
        row: dict[str, Any] = result["rows"][name]
        errors = f"{row['grad_hidden_error']:.1e}, {row['grad_weight_error']:.1e}"
        lines.append(f"| {title} | {row['ms']:.1f} ms | {row['extra_mib']:,.0f} MiB | {errors} |")
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    )
    lines += [
        "",
        f"{report['device']}, {report['dtype']}, random data, {packages};",
        f"interleaved, medians of {report['settings']['repeats']}, errors (hidden states, weight) against float64. "
        f"`hf-cce bench --shape 8192,896,151936`; more shapes: [`{LOSS}`](hf_cce/bench/results/{LOSS}).",
    ]
    return "\n".join(lines)


def filled(text: str) -> str:
    """``text`` with the tables between its markers renewed."""
    block = f"<!-- loss table: begin (python -m hf_cce.bench.report) -->\n{loss_table()}\n<!-- loss table: end -->"
    return re.sub(r"<!-- loss table: begin.*?<!-- loss table: end -->", lambda _: block, text, flags=re.S)


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    path.write_text(filled(path.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
