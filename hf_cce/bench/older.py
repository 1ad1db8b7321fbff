"""Runs that later ones have superseded: kept because texts and studies speak of them, drawn in short below everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_cce.bench import loops, modes

# Newest first: {file: (what it is called in the table, what has changed since)}
HEADS = {
    "2026-11-22-h200-bench-heads-plain.json": (
        "plain tiles",
        "other heads, trained the same way: tiles of logits by the kernels that other GPUs, and other versions of Triton than "
        '3.6, still get, and "auto" judged by fewer tokens: on the first head it left the weight\'s gradient worse than full '
        "logits do",
    ),
    "2026-11-22-h200-bench-heads-second.json": (
        "plain tiles, other heads",
        "likewise, on heads that were trained half an hour before those",
    ),
    "2026-11-22-h200-bench-heads-lean.json": (
        "lean",
        "other heads, trained the same way hours before: passes that would have no tiles were still launched, and the kernels "
        "that add up blocks were slower",
    ),
    "2026-11-21-h200-bench-heads-tilt.json": (
        "tilt",
        "what is dropped leaned to the hidden states in their own gradient alone, not yet in the weight's",
    ),
    "2026-11-21-h200-bench-heads-uniform.json": (
        "even mass",
        "what is dropped was spread evenly, and gradients of the weight could not wait for the last pass",
    ),
    "2026-11-21-h200-bench-heads-before.json": (
        "45 s",
        "an older filter on heads that were trained for 45 s and not 110 (held-out losses 3.7 and 4.2)",
    ),
}
STEPS = {
    "2026-11-21-h200-steps-trained.json": (
        "trained for 250 steps",
        "of 16 × 1,024 tokens, and not for 1,300 of 8 × 1,024; what is dropped did not lean in the weight's gradient yet",
    ),
    "2026-11-21-h200-steps-trained-before.json": (
        "trained for 250 steps, even mass",
        "likewise, and what is dropped was spread evenly",
    ),
    "2026-11-21-h200-steps-random.json": (
        "random weights",
        '"auto" did not yet wait until the filter is known to pay, so with 1 GiB something was left out (the loss differs from '
        "full logits' by 0.3 %; today's would not), and the default budget was 256 MiB. Superseded by the run from random "
        "weights [above](#whole-training-steps)",
    ),
}
FILES = (*HEADS, *STEPS)
Read = Callable[[str], dict[str, Any]]


def heads(read: Read, link: Callable[[str], str], now: str) -> str:
    """hf_cce's own rows on the trained heads, and what made each run old; ``now``: the file that superseded them."""
    rows = {
        f"{title}, {result['problem']['V']:,} × {result['problem']['D']:,}": result
        for name, (title, _) in HEADS.items()
        for result in read(name)["results"].values()
    }
    said = _said(HEADS, link)
    return "\n".join([f"Superseded by {link(now)}:", "", *said, "", *modes.ours(rows)])


def steps(read: Read, link: Callable[[str], str], now: str) -> str:
    """Steps that were measured anew since."""
    said = _said(STEPS, link)
    rows = loops.step_rows((title, read(name)) for name, (title, _) in STEPS.items())
    return "\n".join([f"Superseded by {link(now)}, but for the last, which says by what:", "", *said, "", *rows])


def _said(files: dict[str, tuple[str, str]], link: Callable[[str], str]) -> list[str]:
    return [f"- {title} ({link(name)}): {why}." for name, (title, why) in files.items()]
