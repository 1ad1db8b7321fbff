"""Writes measured tables into the README, from the JSON files in ``hf_cce/bench/results``.

usage: python -m hf_cce.bench.report README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hf_cce.bench.files import whole_file

RESULTS = Path(__file__).parent / "results"
TRAINED = "2026-11-21-h200-bench-heads.json"
FLAT = "2026-11-21-h200-bench-flat.json"
STEPS = "2026-11-21-h200-steps-trained.json"
PEERS = {
    "hf_cce": "**hf_cce**",
    "hf_cce exact": "**hf_cce**, no filter",
    "hf_cce exact 1.25 GiB": "**hf_cce**, no filter, `memory_budget` 1.25 GiB",
    "eager": "Transformers (full logits)",
    "torch.compile": "torch.compile of that",
    "liger": "Liger fused linear cross-entropy",
    "apple cce": "Apple's CCE",
}
LOSSES = {
    "hf_cce": "**hf_cce**",
    "hf_cce-256mib": "**hf_cce**, `memory_budget` 256 MiB",
    "compiled": "torch.compile of Transformers' loss",
    "liger": "Liger",
}


def read(name: str) -> dict[str, Any]:
    """One file of results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def _link(name: str) -> str:
    return f"[`{name}`](hf_cce/bench/results/{name})"


def _packages(report: dict[str, Any]) -> str:
    names = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    return ", ".join(f"{name} {report['versions'][name]}" for name in names)


def _losses(result: dict[str, Any], title: str) -> list[str]:
    lines = [
        f"| {title} | forward + backward | memory above gradients | error of the gradients |",
        "|---|---|---|---|",
    ]
    for name, peer in PEERS.items():
        if name not in result["rows"]:
            continue
        row: dict[str, Any] = result["rows"][name]
        errors = f"{row['grad_hidden_error']:.1e}, {row['grad_weight_error']:.1e}"
        times = f"{row['ms']:.1f} ms ({row['gemm_multiple']:.2f})"
        lines.append(f"| {peer} | {times} | {row['extra_mib']:,.0f} MiB | {errors} |")
    return lines


def loss_table() -> str:
    """The loss alone on a trained head: time, memory, error of each peer."""
    report = read(TRAINED)
    about = report["heads"]["V49152"]
    lines = _losses(report["results"]["trained V49152 N=8192"], "loss of 8,192 tokens, trained head 49,152 × 1,024")
    lines += [
        "",
        f"{report['device']}, {report['dtype']}; in brackets: as a multiple of a dense loss's three matrix products. Held-out "
        f"text, loss {about['held_out_loss']:.1f}; errors (hidden",
        f"states, weight) against float64. `hf-cce bench --head V49152:8192`; {_packages(report)}: {_link(TRAINED)}.",
    ]
    return "\n".join(lines)


def flat_table() -> str:
    """The same on random numbers, for a head as large as that of Qwen2.5-0.5B."""
    report = read(FLAT)
    lines = _losses(report["results"]["flat N=8192 D=896 V=151936"], "random data, head 151,936 × 896")
    return "\n".join([*lines, "", f"`hf-cce bench --shape 8192,896,151936`; numbers: {_link(FLAT)}."])


def steps_table() -> str:
    """Whole training steps of a 0.5B model."""
    report = read(STEPS)
    settings = report["settings"]
    tokens = f"{settings['batch']} × {settings['sequence']:,} tokens"
    lines = [
        f"| step of a 0.5B model, {tokens}, vocabulary 151,936 | time | tokens/s | peak memory |",
        "|---|---|---|---|",
    ]
    for name, title in LOSSES.items():
        row = report["results"][name]
        lines.append(f"| {title} | {row['ms']:.0f} ms | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} GiB |")
    first = report["results"]["hf_cce"]["losses"][0]
    lines += [
        "",
        f"{report['device']}, bfloat16, Qwen2.5-0.5B's shape, trained on local text for {settings['pretrain_steps']} steps (loss",
        f"{first:.1f}), {_packages(report)}.",
        f"Numbers and command: {_link(STEPS)}.",
    ]
    return "\n".join(lines)


TABLES = {"loss": loss_table, "flat": flat_table, "steps": steps_table}


def filled(text: str) -> str:
    """``text`` with the tables between its markers renewed."""
    for name, table in TABLES.items():
        block = f"<!-- {name} table: begin (python -m hf_cce.bench.report) -->\n{table()}\n<!-- {name} table: end -->"
        head, _, rest = text.partition(f"<!-- {name} table: begin")
        _, end, tail = rest.partition(f"<!-- {name} table: end -->")
        text = head + block + tail if end else text
    return text


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    text = filled(path.read_text("utf-8"))
    with whole_file(path) as temporary:
        temporary.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
