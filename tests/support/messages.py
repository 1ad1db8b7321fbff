"""Extract every error, warning and reason that hf_cce can show to users.

They are read from the source, so that none is missed: raised errors, warnings, return values of functions named "why…", values
called a reason, and the tables of refused classes. Parts that are filled in at run time read "…".
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOLE = "…"
# Raised to end the process or for other code, not for a reader.
SILENT = {"SystemExit", "NotImplementedError", "Unavailable", "Missing"}
TABLES = {"REFUSED", "SPECIAL"}
REASONS = {"reason", "why"}  # variable names that hold reasons
Names = dict[str, ast.AST]  # values of names that are assigned once


def text_of(node: ast.AST, names: Names) -> str | None:
    """Return the string that ``node`` evaluates to, with holes, or None if it is not a string."""
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
    if isinstance(node, (ast.IfExp, ast.BoolOp)):
        for value in node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse):
            yield from strings(value, names)
    elif node is not None and (text := text_of(node, names)) and text.strip(HOLE + " :"):
        yield text


def shown(tree: ast.Module, names: Names) -> Iterator[tuple[ast.AST | None, Names]]:
    """Yield each node that is shown to users, with the names it may refer to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if node.exc.args and ast.unparse(node.exc.func) not in SILENT:
                yield node.exc.args[0], names
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in ("warn", "warnings.warn", "torch._assert_async"):
                yield node.args[-1 if function == "torch._assert_async" else 0], names
            elif function.endswith("reasons.append"):
                yield node.args[0], {}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in REASONS:
            yield node.value, {}
        elif isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("why"):
            yield from ((inner.value, names) for inner in ast.walk(node) if isinstance(inner, ast.Return))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in TABLES:
            assert isinstance(node.value, ast.Dict)
            yield from ((value, names) for value in node.value.values)


def messages() -> dict[str, str]:
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
