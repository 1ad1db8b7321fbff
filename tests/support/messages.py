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
WARNS = {"warnings.warn", "torch._assert_async"}
TABLES = {"REFUSED", "SPECIAL"}
REASONS = {"reason", "why"}  # names that reasons are given to


def text_of(node: ast.AST, names: dict[str, ast.AST]) -> str | None:
    """The string that ``node`` makes, with holes; ``names``: what names of this module or function stand for. None: no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            else:
                assert isinstance(value, ast.FormattedValue)
                known = (
                    text_of(value.value, names)
                    if isinstance(value.value, ast.Name) and value.value.id.isupper()
                    else None
                )
                known = known or (
                    text_of(names[value.value.id], names)
                    if isinstance(value.value, ast.Name) and value.value.id.startswith("_") and value.value.id in names
                    else None
                )
                parts.append(known or HOLE)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, names), text_of(node.right, names)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {key: value for key, value in names.items() if key != node.id})
    return None


def assigned(tree: ast.AST) -> dict[str, ast.AST]:
    """What the names assigned in ``tree`` stand for, where that is said once."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def strings(node: ast.AST | None, names: dict[str, ast.AST]) -> Iterator[str]:
    """Every text that a returned value may be."""
    if isinstance(node, ast.IfExp):
        yield from strings(node.body, names)
        yield from strings(node.orelse, names)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from strings(value, names)
    elif node is not None and (text := text_of(node, names)) and text.strip(HOLE + " :"):
        yield text


def in_module(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names = assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, arguments = ast.unparse(node.exc.func), node.exc.args
            if kind not in SILENT and arguments:
                text = text_of(arguments[0], names)
                if text is not None and text.strip(HOLE + " :"):
                    yield node.lineno, text
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in WARNS:
            text = text_of(node.args[-1] if ast.unparse(node.func) == "torch._assert_async" else node.args[0], names)
            if text is not None:
                yield node.lineno, text
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".note_refused", "reasons.append")):
            if text := text_of(node.args[0], {}):
                yield node.lineno, text
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in REASONS:
            yield from ((node.lineno, text) for text in strings(node.value, {}))
        elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("why"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    yield from ((inner.lineno, text) for text in strings(inner.value, names))
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in TABLES
            and isinstance(node.value, ast.Dict)
        ):
            for value in node.value.values:
                yield from ((value.lineno, text) for text in strings(value, names))


def messages() -> dict[str, str]:
    """Each message of hf_cce, and where it is."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "hf_cce").rglob("*.py")):
        for line, text in in_module(ast.parse(path.read_text("utf-8"))):
            found.setdefault(" ".join(text.split()), f"{path.relative_to(ROOT)}:{line}")
    return found


if __name__ == "__main__":
    for message, place in messages().items():
        print(f"{place}\t{message}")
