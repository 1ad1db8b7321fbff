"""What every sub-command has, and how it ends when something is in the way."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from hf_cce.bench import doctor
from hf_cce.cli.app import app
from hf_cce.cli.common import FAILURES, consoles, ending

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_quiet_and_write_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--quiet", "-q", "--json"} <= options
    (path,) = (parameter for parameter in COMMANDS[name].params if "--json" in parameter.opts)
    assert "standard output" in path.help


@pytest.mark.parametrize(
    ("raised", "options", "code", "message"),
    [
        (KeyboardInterrupt(), {}, 130, "Interrupted; nothing was written.\n"),
        (KeyboardInterrupt(), {"interrupted": "half."}, 130, "Interrupted; half.\n"),
        (ValueError("[no] such"), {}, 1, "Error: [no] such\n"),
        (ValueError("no such"), {"usage": 2}, 2, "Error: no such\n"),
        (RuntimeError("no"), {"usage": 2}, 1, "Error: no\n"),
        (OSError(), {}, 1, "Error: OSError\n"),
        (MemoryError(), {"failures": (*FAILURES, MemoryError)}, 1, "Error: MemoryError\n"),
        (ImportError("x"), {"failures": (ImportError,), "no_import": "; see y"}, 1, "Error: x; see y\n"),
        (typer.Exit(7), {}, 7, ""),
    ],
    ids=str,
)
def test_one_sentence_and_a_code(
    raised: BaseException, options: dict[str, Any], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, ending(consoles(False, None)[1], 1, **options):
        raise raised
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == message


def test_what_is_not_named_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), ending(consoles(False, None)[1], 1):
        raise KeyError("a mistake of ours")
    with pytest.raises(RuntimeError, match="ours"), ending(consoles(False, None)[1], 1, failures=(OSError,)):
        raise RuntimeError("ours")


QUICK = [
    ["gradcheck", "-n", "8", "--hidden-size", "8", "--vocab-size", "40", "--dtype", "float32", "--device", "cpu"],
    ["check", "llama"],
    ["bench", "--device", "cpu", "--shape", "16,8,40", "--peers", "eager", "--repeats", "1"],
    ["models"],
]


@pytest.mark.parametrize("words", QUICK, ids=lambda words: words[0])
def test_json_on_standard_output_stands_there_alone(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--json", "-"], env={"COLUMNS": "60"})
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)


@pytest.mark.parametrize("words", [*QUICK, ["estimate", "tiny"], ["doctor"], ["demo"]], ids=lambda words: words[0])
def test_a_missing_folder_is_made_and_named(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {})  # TRL takes seconds to load
    saved = json.loads((ROOT / "hf_cce/bench/results/demo_cpu.json").read_text("utf-8"))
    monkeypatch.setattr(import_module("hf_cce.cli.demo"), "_run", lambda *_: saved)
    monkeypatch.chdir(tmp_path)

    def said() -> list[str]:
        done = CliRunner().invoke(app, [*words, "--json", "new/deep/a.json"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert json.loads(Path("new/deep/a.json").read_text("utf-8"))
        return [line for line in done.stdout.splitlines() if "a.json" in line]

    what = "List" if words == ["models"] else "Numbers"
    assert said() == [f"{what}: new/deep/a.json (made the folder new)"]
    assert said() == [f"{what}: new/deep/a.json"]


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["models", "--json", str(tmp_path / "file/a.json")])
    assert done.exit_code == 1 and done.stderr.startswith("Error: ") and str(tmp_path / "file") in done.stderr
