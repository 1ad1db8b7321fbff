"""Ctrl-C leaves no half of a file: every file gets its name when it is whole, and each command that writes ends with 130."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_cce.cli.app import app

ROOT = Path(__file__).parents[2]
# Written into a folder that is removed with its process: hf_cce.bench.steps gives its children such a one.
OF_CHILDREN = {"hf_cce/bench/onestep.py", "hf_cce/bench/steps.py"}
WRITERS = {"write_text", "write_bytes", "savefig", "save", "save_pretrained", "dump", "tofile", "write"}
WHOLE = {"whole_file", "whole_folder"}
NOT_FILES = {"sys.stdout.write", "tqdm.write"}


def writes(tree: ast.AST, inside: bool = False) -> list[tuple[int, str, bool]]:
    """(line, call, whether it stands in a block of ``whole_file`` or ``whole_folder``) of every call that writes."""
    found = []
    for node in ast.iter_child_nodes(tree):
        here = inside
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            here |= any(isinstance(call.func, ast.Name) and call.func.id in WHOLE for call in calls)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
            found.append((node.lineno, ast.unparse(node.func), here))
        found += writes(node, here)
    return found


def test_every_file_gets_its_name_when_it_is_whole() -> None:
    paths = [path for folder in ("hf_cce", "notebooks", "docs") for path in (ROOT / folder).rglob("*.py")]
    seen = 0
    for path in paths:
        name = str(path.relative_to(ROOT))
        for line, call, whole in writes(ast.parse(path.read_text("utf-8"))):
            special = (
                name in OF_CHILDREN
                or call in NOT_FILES
                or "clear_refs" in path.read_text("utf-8").splitlines()[line - 1]
            )
            # a tokenizer saves into the folder that whole_folder renames, and put_json prints on standard output
            assert whole or special, f"{name}:{line}: {call} outside `with whole_file(…)`: Ctrl-C leaves half a file"
            seen += whole
    assert seen >= 10


class Report:
    """Stands for what any command measures, and is not shown, as writing is interrupted before."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def to_json(self) -> dict[str, Any]:
        return {"a": 1}


def _bench(settings: Any, follow: Any) -> None:
    report = {"missing": {}, "heads": {}}
    follow({"event": "start", "problems": 1, "report": report})
    follow({"event": "done", "title": "a head", "report": report})


COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "demo": (["demo"], {"hf_cce.cli.demo._run": lambda *_: {"a": 1}, "hf_cce.cli.demo._show": lambda *_: None}),
    "bench": (["bench", "--device", "cpu"], {"hf_cce.bench.grid.run": _bench}),
    "gradcheck": (["gradcheck", "--device", "cpu"], {"hf_cce.bench.gradcheck.gradcheck": Report}),
    "check": (["check", "llama"], {"hf_cce.bench.check.check": Report, "hf_cce.bench.check.load": Report}),
    "doctor": (["doctor"], {"hf_cce.bench.doctor.diagnose": Report}),
    "models": (["models"], {}),
    "estimate": (["estimate", "llama"], {"hf_cce.bench.estimate.estimate": Report}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_interrupted_while_it_writes_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, stubs = COMMANDS[name]
    for target, stub in stubs.items():
        monkeypatch.setattr(target, stub)
    kept = tmp_path / "numbers.json"
    kept.write_text("old")
    halves = []

    def half(self: Path, text: str, *_: Any) -> int:
        halves.append(self)
        self.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    shown = CliRunner().invoke(app, [*arguments, "--json", str(kept)])
    assert halves and halves[0] != kept, shown.output
    assert shown.exit_code == 130
    assert shown.stderr.startswith("Interrupted; ") and "\x1b" not in shown.output
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"] and kept.read_text() == "old"


def test_every_command_with_a_file_is_among_these() -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    writing = {
        name
        for name, command in group.commands.items()
        if any("--json" in option.opts and not option.is_flag for option in command.params)
    }
    assert writing == set(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["models"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_there_is_no_colour_where_there_is_no_terminal(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and shown.stdout and "\x1b" not in shown.output
