"""Tables of whole training steps in several models and loops, of the batches that fit, of an RL step, and of first calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Link = Callable[[str], str]
LOOPS = {"plain": "plain loop", "trainer": "Trainer", "sft": "SFTTrainer"}
# What the rows of a loop are called: SFTTrainer as released has a fused head of its own, and its use_liger_kernel
# exchanges more than the loss.
TITLES = {
    "hf_cce": "**hf_cce**",
    "eager": "Transformers (full logits)",
    "compiled": "torch.compile of its loss",
    "liger": "Liger's loss",
    "apple": "Apple's CCE",
}
IN_LOOP = {
    ("sft", "eager"): "SFTTrainer as released",
    ("sft", "liger"): "`use_liger_kernel=True` (norms and MLP too)",
    ("sft", "hf_cce"): "**hf_cce** by `CCECallback`",
    ("trainer", "hf_cce"): "**hf_cce** by `CCECallback`",
}


def _versions(report: dict[str, Any], *names: str) -> str:
    return ", ".join(f"{name} {found}" for name in names if (found := report["versions"].get(name)))


def steps(reports: dict[str, dict[str, Any]], link: Link) -> str:
    """Each model and loop with each loss that was measured in it."""
    lines = [
        "| model, tokens a step | loop | loss | time (least–most) | tokens/s | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    trained = []
    for report in reports.values():
        settings = report["settings"]
        shape = f"{settings['model']}, {settings['batch']} × {settings['sequence']:,}"
        if settings["pretrain_steps"]:
            losses = next(row["losses"] for row in report["results"].values() if row["status"] == "ok")
            mean = sum(losses) / len(losses)
            trained.append(
                f"{settings['model']} {settings['pretrain_steps']:,} steps (loss {mean:.1f} on average of these)"
            )
        for name, row in report["results"].items():
            if row["status"] != "ok":
                continue
            loop = settings["loop"]
            title = IN_LOOP.get((loop, name), TITLES.get(name, name))
            low, high = row["ms_spread"]
            lines.append(
                f"| {shape} | {LOOPS[loop]} | {title} | {row['ms']:.0f} ms ({low:.0f}–{high:.0f}) | "
                f"{row['tokens_per_second']:,.0f} | {row['peak_gib']:.2f} GiB |"
            )
    report = next(iter(reports.values()))
    versions = _versions(report, "torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy")
    files = ", ".join(link(name) for name in reports)
    weights = f"trained before on the same text: {', '.join(trained)}" if trained else "random weights"
    return "\n".join([*lines, "", f"{report['device']}, bfloat16, {weights}; {versions}; {files}."])


def fits(reports: dict[str, dict[str, Any]], link: Link) -> str:
    """The largest batches."""
    lines: list[str] = []
    for name, report in reports.items():
        sizes = [f"{size:g}" for size in sorted(report["settings"]["gib"])]
        lines += [
            f"| {report['settings']['model']}, rows of {report['settings']['sequence']:,} tokens | "
            + " | ".join(f"{size} GiB" for size in sizes)
            + " |",
            "|---|" + "---|" * len(sizes),
        ]
        for loss, row in report["results"].items():
            if row["status"] == "ok":
                lines.append(
                    f"| {TITLES.get(loss, loss)} | " + " | ".join(str(row["fits"][size]) for size in sizes) + " |"
                )
        versions = _versions(report, "torch", "triton", "transformers", "liger-kernel")
        lines += ["", f"{report['device']}, bfloat16, random weights, no checkpointing; {versions}; {link(name)}.", ""]
    return "\n".join(lines).rstrip()


def policy(reports: dict[str, dict[str, Any]], link: Link) -> str:
    """Log-probabilities and entropy of a GRPO-like step."""
    lines = ["| completions × tokens, policy | log-probabilities by | step | memory of the step |", "|---|---|---|---|"]
    for report in reports.values():
        s = report["settings"]
        shape = f"{s['groups'] * s['completions']} × {s['tokens']:,}, {s['hidden']} × {s['vocabulary']:,}"
        for name, row in report["rows"].items():
            title = "**hf_cce**, `linear_log_probs`" if name == "linear_log_probs" else name
            lines.append(f"| {shape} | {title} | {row['ms']:.0f} ms | {row['step_bytes'] / 2**30:.2f} GiB |")
    report = next(iter(reports.values()))
    apart = report["largest_difference"]
    lines += [
        "",
        f"Largest difference: log-probabilities {apart['log_probs']:.1e}, entropy {apart['entropy']:.1e} nats; gradients "
        f"{report['relative_difference_of_gradients']:.1e} of their norm.",
        f"{report['device']}, {report['settings']['dtype']}, {_versions(report, 'torch', 'triton')}; "
        f"{', '.join(link(name) for name in reports)}.",
    ]
    return "\n".join(lines)


def first_calls(report: dict[str, Any], name: str, link: Link) -> str:
    """Seconds that the first forward and backward of a process takes."""
    from hf_cce.bench import first

    shape = " × ".join(f"{report['shape'][key]:,}" for key in ("tokens", "hidden_size", "vocab_size"))
    versions = _versions(report, "torch", "triton", "liger-kernel", "cut-cross-entropy")
    return (
        first.table(report["results"])
        + f"\n\n{shape}; {report['device']}, {report['processors']} processors; {versions}; {link(name)}."
    )
