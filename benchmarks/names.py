"""Display names and order of losses in tables: hf_cce first, then a fixed order.

Result files have short names: "hf_cce exact 1.25 GiB", "apple cce"; in steps "hf_cce-256mib", "apple".
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
    "reversed": "full logits, the rows of each batch reversed",
}
STEP_NAMES = {"compiled": "torch.compile", "apple": "apple cce"}  # names of benchmarks.installed that differ


def _usual(name: str) -> str:
    """Return the name that benchmarks.peers uses."""
    if name.startswith("hf_cce-"):  # a name from benchmarks.installed
        name = re.sub(r"(\d)([kmg])ib\b", lambda found: f"{found[1]} {found[2].upper()}iB", name.replace("-", " "))
    return STEP_NAMES.get(name, name)


def title(name: str) -> str:
    """Return the display name of ``name`` in a table; unknown names are returned unchanged."""
    name = _usual(name)
    if not is_ours(name):
        return OTHERS.get(name, name)
    found = re.match(r"hf_cce( exact)?(?: filter (\S+))?(?: ([\d.]+ [KMG]iB))?$", name)
    assert found, name
    parts = ["**hf_cce**"]
    parts += ["no filter"] if found[1] else []
    parts += [f"`gradient_filter={found[2]}`"] if found[2] else []
    parts += [f"`memory_budget` {found[3]}"] if found[3] else []
    return ", ".join(parts)


def is_ours(name: str) -> bool:
    return re.match(r"hf_cce(?![\w.])", name) is not None


def ordered(names: Iterable[str]) -> list[str]:
    """Sort as in every table: hf_cce first, then ``OTHERS``, then unknown names in the given order."""

    def place(name: str) -> tuple[int, int]:
        usual = _usual(name)
        known = OURS if is_ours(usual) else tuple(OTHERS)
        rank = known.index(usual) if usual in known else len(known)
        return (0 if is_ours(usual) else 1 if usual in known else 2), rank

    return sorted(names, key=place)
