"""What the losses that are measured are called in tables, and in which order they stand there: ours first, then always the same.

The commands, and so the files, have short names: "hf_cce exact 1.25 GiB", "apple cce"; in steps "hf_cce-256mib", "apple".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OURS = ("hf_cce", "hf_cce exact", "hf_cce 64 MiB", "hf_cce exact 1.25 GiB")
OTHERS = {
    "eager": "Transformers (full logits)",
    "torch.compile": "torch.compile of Transformers' loss",
    "liger": "Liger (fused linear cross-entropy)",
    "apple cce": "Apple's CCE",
    "apple cce exact": "Apple's CCE, `cce_exact`",
    "trl": "TRL's fused head",
    "quack": "Quack",
    "torch F.linear_cross_entropy": "torch's `F.linear_cross_entropy`, in chunks",
}
OF_STEPS = {"compiled": "torch.compile", "apple": "apple cce"}  # what hf_cce.bench.steps calls some of them


def _usual(name: str) -> str:
    """The name as ``hf-cce bench`` has it."""
    if name.startswith("hf_cce-"):  # of hf_cce.bench.steps
        name = re.sub(r"(\d)([kmg])ib\b", lambda found: f"{found[1]} {found[2].upper()}iB", name.replace("-", " "))
    return OF_STEPS.get(name, name)


def title(name: str) -> str:
    """For a table; of a loss that is not known its own name."""
    name = _usual(name)
    if not is_ours(name):
        return OTHERS.get(name, name)
    options = name.removeprefix("hf_cce").strip()
    words = ["**hf_cce**"]
    if found := re.match(r"exact\b *", options):
        words.append("no filter")
        options = options[found.end() :]
    if found := re.match(r"filter (\S+) *", options):
        words.append(f"`gradient_filter={found[1]}`")
        options = options[found.end() :]
    if found := re.match(r"([\d.]+ [KMG]iB)$", options):
        words.append(f"`memory_budget` {found[1]}")
        options = ""
    return ", ".join([*words, *([options] if options else [])])


def is_ours(name: str) -> bool:
    return re.match(r"hf_cce(?![\w.])", name) is not None


def ordered(names: Iterable[str]) -> list[str]:
    """``names`` as every table has them: ours, the plain one first, then ``OTHERS``, then those that are not known."""

    def place(name: str) -> tuple[int, int]:
        usual = _usual(name)
        room, known = (0, OURS) if is_ours(usual) else (1, tuple(OTHERS))
        if room and usual not in known:
            room = 2
        return room, known.index(usual) if usual in known else len(known)

    return sorted(names, key=place)  # stable: what has no place of its own stays as the file has it
