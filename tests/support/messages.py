"""Every text that hf_cce shows when something is not as it should be: errors, warnings, and the reasons inside them.

Read from the source, so that none is forgotten: what is raised, what is warned of, what a function whose name begins with "why"
gives back, what is called a reason, and the tables of refused classes. A part that is filled in when it is shown reads "…".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOLE = "…"
# Raised to end the process or to speak to other code, not to a reader.
SILENT = {"SystemExit", "NotImplementedError", "Unavailable", "Missing"}
TABLES = {"REFUSED", "SPECIAL"}
REASONS = {"reason", "why"}  # names that reasons are given to
Names = dict[str, ast.AST]  # what names that are assigned once stand for


def text_of(node: ast.AST, names: Names) -> str | None:
    """The string that ``node`` makes, with holes; None: no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, names) or HOLE for value in node.values)
    if isinstance(node, ast.FormattedValue):
        known = isinstance(node.value, ast.Name) and (node.value.id.isupper() or node.value.id.startswith("_"))
        return text_of(node.value, names) if known else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, names), text_of(node.right, names)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {key: value for key, value in names.items() if key != node.id})
    return None


def strings(node: ast.AST | None, names: Names) -> Iterator[str]:
    """Every text that a value may be."""
    if isinstance(node, (ast.IfExp, ast.BoolOp)):
        for value in node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse):
            yield from strings(value, names)
    elif node is not None and (text := text_of(node, names)) and text.strip(HOLE + " :"):
        yield text


def shown(tree: ast.Module, names: Names) -> Iterator[tuple[ast.AST | None, Names]]:
    """What is shown, and the names that it may be made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if node.exc.args and ast.unparse(node.exc.func) not in SILENT:
                yield node.exc.args[0], names
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in ("warn", "warnings.warn", "torch._assert_async"):
                yield node.args[-1 if function == "torch._assert_async" else 0], names
            elif function.endswith((".note_refused", "reasons.append")):
                yield node.args[0], {}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in REASONS:
            yield node.value, {}
        elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("why"):
            yield from ((inner.value, names) for inner in ast.walk(node) if isinstance(inner, ast.Return))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in TABLES:
            assert isinstance(node.value, ast.Dict)
            yield from ((value, names) for value in node.value.values)


def messages() -> dict[str, str]:
    """Each message of hf_cce, and where it is."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "hf_cce").rglob("*.py")):
        tree, assigned = ast.parse(path.read_text("utf-8")), dict[str, list[ast.AST]]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        for node, names in shown(tree, {name: values[0] for name, values in assigned.items() if len(values) == 1}):
            for text in strings(node, names):
                found.setdefault(" ".join(text.split()), f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore
    return found
