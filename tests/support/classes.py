"""Generate the table of all classes in patches/MODELS.md.

    python -m tests.support.classes           # print stale rows
    python -m tests.support.classes --write   # rewrite the table

The table states what ``hf_cce.families`` says of each class and what ``tests/modeling/test_all_classes.py`` tests.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import transformers

from hf_cce.families import class_names, status_of

sys.path.insert(0, str(Path(__file__).parent))  # python -m does not read the pytest configuration
import tiny

PAGE = Path(__file__).parents[2] / "hf_cce" / "patches" / "MODELS.md"
HEAD = """# Models

Every class of Transformers {version} that computes a language model's loss: the causal LMs, and those that add images or sound.
`hf-cce models` lists the model types of the version that you have. Written by `python -m tests.support.classes --write`.
A test fails when it is stale. `test_all_classes.py` holds each row, on a tiny model of the class's own configuration:

- **supported**: loss and the gradient of every parameter as exact as without the patch, with padding, ignored labels and
  `num_items_in_batch`; no tensor of tokens x vocabulary is made; evaluation and greedy generation bit for bit the same;
  `remove_cce` leaves nothing behind.
- **special**: the same, but a tensor of tokens x vocabulary is held.
- **refused**: `apply_cce` raises an error with this reason.
- **not tested**: it cannot be built where the tests run; nothing is known against it.

"""


def rows() -> dict[str, str]:
    """Return the line of each class of the installed Transformers."""
    types = defaultdict(list)
    for model_type, cls in sorted(class_names().items()):
        types[cls].append(f"`{model_type}`")
    lines = {}
    for cls in sorted([*tiny.CAUSAL, *tiny.MULTIMODAL], key=str.lower):
        status, reason = status_of(cls)
        seen = cls in tiny.PICTURES or {"pixel_values", "flattened_patches"} & tiny.FORWARD.get(cls, {}).keys()
        remark = reason or ("tested with an image" if seen else "")
        if cls in tiny.UNBUILT:
            status, remark = "not tested", f"needs {tiny.UNBUILT[cls]}"
        lines[cls] = f"| {cls} | {', '.join(types[cls]) or 'class or instance only'} | {status} | {remark} |"
    return lines


def page() -> str:
    """Return the whole file."""
    lines = rows()
    counts = [f"{sum(f'| {status} |' in line for line in lines.values())} {status}" for status in
              ("supported", "special", "refused", "not tested")]  # fmt: skip
    head = HEAD.format(version=transformers.__version__) + f"{len(lines)} classes: {', '.join(counts)}.\n\n"
    return head + "| class | by name | status | remark |\n|---|---|---|---|\n" + "\n".join(lines.values()) + "\n"


def stale() -> list[str]:
    """Return missing rows of new or changed classes; if none, and Transformers has the same version, other differing lines."""
    text, fresh = PAGE.read_text("utf-8"), page()
    lacking = [line for line in fresh.splitlines() if line not in text.splitlines()]
    rows = [line for line in lacking if line.startswith("| ")]
    if rows or f"Transformers {transformers.__version__} " not in text:
        return rows
    return lacking or (["a row of a class that Transformers does not have"] if text != fresh else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it anew")
    if parser.parse_args().write:
        PAGE.write_text(page(), "utf-8")
    wrong = stale()
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
