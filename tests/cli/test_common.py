"""Behavior shared by all sub-commands: --json, one-sentence errors and exit codes."""

import argparse
import json
from pathlib import Path

import pytest
from command import ROOT, hf_cce

from hf_cce import CCEConfig, apply_cce, supported_models
from hf_cce.cli import app
from hf_cce.cli.common import size
from hf_cce.diagnostics import demo, gradcheck
from hf_cce.patches.refused import REFUSED

SIZES = ["--tokens", "16", "--hidden-size", "8", "--vocab-size", "40"]
QUICK = {
    "gradcheck": ["--dtype", "float32", "--device", "cpu"], "check": ["llama"], "bench": ["--device", "cpu", *SIZES],
    "models": [], "estimate": ["tiny"], "doctor": [], "demo": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow parts: the demo's two trainings and the kernels in Triton's interpreter."""
    monkeypatch.setattr(gradcheck, "CONFIGS", {"portable": CCEConfig("portable")})
    saved = json.loads((ROOT / "benchmarks/results/demo.json").read_text("utf-8"))
    monkeypatch.setattr(demo, "train_both", lambda *_: saved)


@pytest.mark.parametrize("name", QUICK)
def test_json_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = hf_cce(name, *QUICK[name], "--json", "-")
    assert alone.exit_code == 0 and json.loads(alone.stdout), alone
    shown = hf_cce(name, *QUICK[name], "--json", "new/deep/a.json")
    assert shown.exit_code == 0 and "new/deep/a.json" in shown.stdout and not shown.stderr, shown
    assert "\x1b" not in shown.stdout  # no color without a terminal
    assert json.loads((tmp_path / "new/deep/a.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (ValueError("no such"), 2, "Error: no such\n"),
        (RuntimeError("no"), 2, "Error: no\n"),
        (ImportError("x"), 2, "Error: x; run hf-cce doctor to see what is missing\n"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", app.COMMANDS)
def test_errors_are_one_line_with_exit_code(
    name: str, raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> int:
        """Raise."""
        raise raised

    monkeypatch.setitem(app.COMMANDS, name, (run, app.COMMANDS[name][1]))
    assert hf_cce(name, *QUICK[name]) == (code, "", message)


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> int:
        """Make a mistake."""
        raise KeyError("a mistake of ours")

    monkeypatch.setitem(app.COMMANDS, "models", (run, lambda parser: None))
    with pytest.raises(KeyError):
        hf_cce("models")


def test_output_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = hf_cce("models", "--json", str(tmp_path / "file/a.json"))
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and str(tmp_path / "file") in done.stderr


def test_folder_instead_of_an_output_file(tmp_path: Path) -> None:
    done = hf_cce("models", "--json", str(tmp_path))
    assert done.exit_code == 2 and f"argument --json: expected a file, got the folder '{tmp_path}'" in done.stderr


def test_size_units() -> None:
    assert size("256MiB") == size("268435456") == size(" 0.25 gib ") == 256 << 20 and size("1GB") == 10**9
    for wrong in ("256 apples", "MiB", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 256MiB"):
            size(wrong)


@pytest.mark.parametrize("name", ["gradcheck", "bench", "check llama", "demo"])
def test_missing_device_is_an_error(name: str) -> None:
    done = hf_cce(*name.split(), "--device", "cuda:99")
    assert done.exit_code == 2 and done.stderr.startswith("Error: --device cuda:99 cannot be used here: ")


def test_models_lists_what_apply_cce_accepts() -> None:
    rows = json.loads(hf_cce("models", "--json", "-").stdout)
    assert [row["type"] for row in rows if row["status"] != "refused"] == supported_models()
    refused = [row for row in rows if row["status"] == "refused"]
    assert refused and all(REFUSED[row["class"]] == row["reason"] for row in refused)
    shown = hf_cce("models").stdout
    for row in refused:
        assert f"{row['type']}: {row['reason']}" in shown
        with pytest.raises(ValueError, match="cannot be patched"):
            apply_cce(row["type"])
