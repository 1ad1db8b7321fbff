"""What every sub-command has: --json, --quiet, whole files, one sentence and an exit code when something is in the way."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from hf_cce.cli.app import app
from hf_cce.cli.common import consoles, ending
from hf_cce.diagnostics import doctor, gradcheck
from hf_cce.diagnostics.files import whole_file, whole_folder, write_json

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
QUICK = {
    "gradcheck": ["-n", "8", "--hidden-size", "8", "--vocab-size", "40", "--dtype", "float32", "--device", "cpu"],
    "check": ["llama"],
    "bench": ["--device", "cpu", "--shape", "16,8,40", "--losses", "eager", "--repeats", "1"],
    "models": [],
    "estimate": ["tiny"],
    "doctor": [],
    "demo": [],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes long: importing TRL, the two trainings of the demo, kernels in Triton's interpreter."""
    monkeypatch.setattr(doctor, "OPTIONAL", {})
    monkeypatch.setattr(gradcheck, "IMPLEMENTATIONS", ("portable",))
    saved = json.loads((ROOT / "benchmarks/results/demo.json").read_text("utf-8"))
    monkeypatch.setattr(import_module("hf_cce.cli.demo"), "_run", lambda *_: saved)


def run(name: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [name, *QUICK[name], *arguments], env={"COLUMNS": "200"})


def test_every_command_is_tested_here() -> None:
    assert set(COMMANDS) == set(QUICK)


@pytest.mark.parametrize("name", COMMANDS)
def test_output_folders_and_quiet(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = run(name, "--json", "-")
    assert alone.exit_code == 0 and json.loads(alone.stdout), alone.output
    shown = run(name, "--json", "new/deep/a.json")
    assert shown.exit_code == 0 and "new/deep/a.json (created the folder new)" in shown.stdout, shown.output
    assert "\x1b" not in shown.output  # no colour where there is no terminal
    written = (tmp_path / "new/deep/a.json").read_text("utf-8")
    assert json.loads(written)
    quiet = run(name, "--quiet", "--json", "new/deep/a.json")
    assert quiet.exit_code == 0 and not quiet.stderr and "a.json" not in quiet.stdout


@pytest.mark.parametrize("name", ["models", "gradcheck"])
def test_interrupted_while_writing_it_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "numbers.json"
    kept.write_text("old")

    def half(self: Path, text: str, *_: Any) -> int:
        self.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    shown = run(name, "--json", str(kept))
    assert shown.exit_code == 130 and shown.stderr.startswith("Interrupted; ")
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"] and kept.read_text() == "old"


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("models", "--json", str(tmp_path / "file/a.json"))
    assert done.exit_code == 1 and done.stderr.startswith("Error: ") and str(tmp_path / "file") in done.stderr


@pytest.mark.parametrize(
    ("raised", "usage", "code", "message"),
    [
        (KeyboardInterrupt(), None, 130, "Interrupted; nothing was written.\n"),
        (ValueError("[no] such"), None, 1, "Error: [no] such\n"),
        (ValueError("no such"), 2, 2, "Error: no such\n"),
        (RuntimeError("no"), 2, 1, "Error: no\n"),
        (ImportError("x"), None, 1, "Error: x; hf-cce doctor says what is missing\n"),
        (typer.Exit(7), None, 7, ""),
    ],
    ids=str,
)
def test_one_sentence_and_a_code(
    raised: BaseException, usage: int | None, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, ending(consoles(False, None)[1], 1, usage):
        raise raised
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == message


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), ending(consoles(False, None)[1], 1):
        raise KeyError("a mistake of ours")


def test_files_and_folders_are_whole_or_not_there(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.json", tmp_path / "folder"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:  # noqa: PT012
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "old"
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as temporary:  # noqa: PT012
        (temporary / "half").write_text("")
        raise KeyboardInterrupt
    assert not folder.exists()
    with whole_folder(folder) as first, whole_folder(folder) as second:  # two processes at once
        (first / "by").write_text("first")
        (second / "by").write_text("second")
    assert (folder / "by").read_text() == "second" and len(list(tmp_path.iterdir())) == 2


def test_json_keeps_lists_of_numbers_on_one_line(tmp_path: Path) -> None:
    value = {"a": [1.5, -2e-09, 3], "b": {"c": ["x, y", "[ ]"], "d": []}, "e": [[1, 2], [3]], "f": None, "g": "ü"}
    write_json(tmp_path / "a.json", value)
    written = (tmp_path / "a.json").read_text("utf-8")
    assert json.loads(written) == value and "[ 1.5, -2e-09, 3 ]" in written
