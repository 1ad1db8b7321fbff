"""Writes docs/api.md from the signatures and docstrings of the public names.

usage: python docs/make_api.py
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

PAGE = Path(__file__).resolve().parent / "api.md"
sys.path.insert(0, str(PAGE.parents[1]))  # this checkout, not one that happens to be installed

import hf_cce  # noqa: E402
from hf_cce.config import Implementation  # noqa: E402
from hf_cce.deferred.logits import LazyLogits  # noqa: E402
from hf_cce.diagnostics.files import whole_file  # noqa: E402
from hf_cce.divergence import Kind, Tail  # noqa: E402
from hf_cce.loss import LogProbs, Reduction  # noqa: E402
from hf_cce.patches.causal_lm import cce_stats  # noqa: E402

HEAD = """\
# The public names

Made from the docstrings by `python docs/make_api.py`; a test fails when this page is stale. All names are imported from `hf_cce`.
What is not on this page is not public; a test fails on a change that breaks a caller.
"""
ORDER = (
    "apply_cce", "remove_cce", "supported_models", "CCECallback", "CCEConfig", "linear_cross_entropy", "linear_log_probs",
    "linear_divergence", "TeacherHead", "TeacherTopK", "FilterState", "CCEWarning",
)  # fmt: skip
METHODS = {"CCEConfig": ("of",), "FilterState": ("stats",)}
SECTIONS = ("Args", "Returns", "Raises")


def signature(name: str, function: Any) -> str:
    """``name(…)`` with annotations, a parameter a line where one line would be too long."""
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    words, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        words.append(unquoted(str(p)))
    end = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(words)}){end}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    return f"```text\n{line}\n```"


def unquoted(parameter: str) -> str:
    """``name: 'type' = default`` without the quotes that postponed annotations have, and with aliases spelled out."""
    words = re.sub(r": (?:ForwardRef\()?(['\"])(.+?)\1\)?( = |$)", r": \2\3", parameter)
    for name, alias in (("Implementation", Implementation), ("Reduction", Reduction), ("Kind", Kind), ("Tail", Tail)):
        words = words.replace(f": {name} ", f": Literal[{', '.join(map(repr, get_args(alias)))}] ")
    return words


def marked(text: str) -> str:
    """reStructuredText's ``code`` as Markdown's, on one line."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def described(doc: str) -> str:
    """A docstring of Google's form as Markdown: sections in bold, their entries as a list."""
    lines = doc.splitlines()
    out: list[str] = []
    paragraph: list[str] = []
    section = ""

    def close() -> None:
        if paragraph:
            out.append(("- " if section in ("Args", "Raises") else "") + entry(" ".join(paragraph), section))
            if section not in ("Args", "Raises"):
                out.append("")
            paragraph.clear()

    for line in lines:
        name = line.rstrip().removesuffix(":")
        if name in SECTIONS and line.rstrip().endswith(":"):
            close()
            if out and out[-1]:
                out.append("")
            section = name
            out += [f"**{name}**", ""]
        elif not line.strip():
            close()
        else:
            indent = len(line) - len(line.lstrip())
            if section in ("Args", "Raises") and indent <= 4:
                close()
            paragraph.append(line.strip())
    close()
    return "\n".join(out).strip()


def entry(text: str, section: str) -> str:
    if section in ("Args", "Raises") and (found := re.match(r"((?:[\w*]+(?:, )?)+): (.*)", text, re.DOTALL)):
        names = ", ".join(f"`{name}`" for name in found[1].split(", "))
        return f"{names}: {marked(found[2])}"
    return marked(text)


def of_class(name: str, cls: Any) -> list[str]:
    out = [f"## {name}", "", signature(name, cls), "", described(inspect.getdoc(cls) or ""), ""]
    for method in METHODS.get(name, ()):
        out += [f"### {name}.{method}", "", signature(f"{name}.{method}", getattr(cls, method)), ""]
        out += [described(inspect.getdoc(getattr(cls, method)) or ""), ""]
    return out


def of_result() -> list[str]:
    """The fields of ``LogProbs``: what each means stands beside it in the source."""
    source = inspect.getsource(LogProbs)
    comments = dict(re.findall(r"^\s+(\w+): [^#\n]+# (.+)$", source, re.MULTILINE))
    out = ["### What it returns: LogProbs", "", described(inspect.getdoc(LogProbs) or ""), ""]
    return [*out, *(f"- `{name}`: {comments[name]}" for name in LogProbs._fields), ""]


def page() -> str:
    """All of docs/api.md."""
    assert sorted(ORDER) == sorted(hf_cce.__all__)
    out = [HEAD]
    for name in ORDER:
        value = getattr(hf_cce, name)
        if inspect.isclass(value) and issubclass(value, Warning):
            out += [f"## {name}", "", described(inspect.getdoc(value) or ""), ""]
        elif inspect.isclass(value):
            out += of_class(name, value)
        else:
            out += [f"## {name}", "", signature(name, value), "", described(inspect.getdoc(value) or ""), ""]
        if name == "linear_log_probs":
            out += of_result()
        if name == "apply_cce":
            out += ["### model.cce_stats()", "", described(inspect.getdoc(cce_stats) or ""), ""]
            out += [
                "### outputs.logits.materialize()",
                "",
                described(inspect.getdoc(LazyLogits.materialize) or ""),
                "",
            ]
    return "\n".join(out).strip() + "\n"


def main() -> None:
    with whole_file(PAGE) as temporary:
        temporary.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
