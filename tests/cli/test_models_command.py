"""``hf-cce models``: what it lists is what ``apply_cce`` does."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_cce import apply_cce, remove_cce, supported_models
from hf_cce.cli.app import app
from hf_cce.patches.refused import REFUSED, SPECIAL


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["models", *arguments], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_list_for_programs() -> None:
    rows = json.loads(run("--json", "-"))
    assert [row["type"] for row in rows if row["status"] != "refused"] == supported_models()
    assert {row["class"] for row in rows if row["status"] == "special"} <= set(SPECIAL)
    refused = [row for row in rows if row["status"] == "refused"]
    assert refused and all(REFUSED[row["class"]] == row["reason"] for row in refused)
    for row in refused:
        with pytest.raises(ValueError, match="cannot be patched"):
            apply_cce(row["type"])


def test_the_list_for_people() -> None:
    shown = run()
    words = shown.split()
    assert {"llama", "qwen2_5_vl", "chameleon", "musicgen", "prophetnet", "blt"} <= set(words)
    assert f"{sum(row['status'] == 'supported' for row in json.loads(run('--json', '-')))} model types" in shown
    assert (
        words.index("llama")
        < words.index("Special:")
        < words.index("blt")
        < words.index("Refused:")
        < words.index("musicgen")
    )


def test_only_the_names() -> None:
    rows = json.loads(run("--json", "-"))
    assert run("--quiet").split() == [row["type"] for row in rows if row["status"] == "supported"]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava", "chameleon"])
def test_a_type_for_images_and_text_goes_by_name(model_type: str) -> None:
    assert apply_cce(model_type) == model_type
    remove_cce(model_type)
