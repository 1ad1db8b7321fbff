"""The README keeps its word: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the README takes for granted: a model, a batch, arguments and data for Trainer. The blocks share it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("trainer"))
    input_ids = torch.randint(99, (2, 16))
    return {
        "model": LlamaForCausalLM(config),
        "input_ids": input_ids,
        "dataset": [{"input_ids": row, "labels": row} for row in input_ids],
        "args": TrainingArguments(
            folder, max_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
        ),
    }


PYTHON = blocks(README, "python") + [
    "".join(line[2:] or "\n" for line in block.splitlines(keepends=True)) for block in blocks(README, "diff")
]


@pytest.mark.parametrize("number", range(len(PYTHON)), ids=lambda n: PYTHON[n].strip().splitlines()[-1][:40])
def test_python_runs(number: int, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A block takes for granted those before it, which another process may have tested: run what has not run in this one."""
    import transformers

    # The hub is out of reach here: a tiny model of the same class stands in for the pretrained one.
    def stand_in(name: str, **options: Any) -> Any:
        return transformers.LlamaForCausalLM(namespace["model"].config)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stand_in)
    monkeypatch.chdir(tmp_path)
    quiet = partial(transformers.TrainingArguments, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    monkeypatch.setattr(transformers, "TrainingArguments", quiet)
    ran = namespace.setdefault("_ran", set())
    for earlier in sorted({*range(number + 1)} - ran):
        exec(compile(PYTHON[earlier], "README.md", "exec"), namespace)
        ran.add(earlier)


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_make_targets_exist(text: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = re.findall(r"^make ((?:[a-z-]+ ?)+)", "\n".join(blocks(text, "bash")), re.MULTILINE)
    commands += re.findall(r"`make ([a-z-]+)", text)
    assert {target for command in commands for target in command.split()} <= targets
    assert commands


def check_commands(text: str) -> int:
    """That every ``hf-cce …`` in a block of shell parses; how many there are."""
    from hf_cce.cli.app import parser

    commands = re.findall(r"^hf-cce (\w+) ?([^#\n]*)", "\n".join(blocks(text, "bash")), re.MULTILINE)
    for name, arguments in commands:
        parser().parse_args([name, *(word for word in shlex.split(arguments) if word != "--help")])  # or SystemExit
    return len(commands)


def test_commands_of_hf_cce_parse() -> None:
    assert check_commands((ROOT / "docs/reference/cli.md").read_text("utf-8"))


def test_paths_in_the_flow_of_a_step_exist() -> None:
    flow = (ROOT / "docs/concepts/deferred-logits.md").read_text("utf-8")
    paths = [path.rstrip(".") for path in re.findall(r"(?<![\w/])(?:hf_cce|patches)/[\w/.]+", flow)]
    assert len(paths) >= 6
    for path in paths:
        assert (ROOT / path).exists(), path


def check_links(name: str) -> None:
    """That every relative link of the page leads to a file, and to a heading of it."""
    text = (ROOT / name).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


LINKING = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "recipes/README.md",
    "notebooks/README.md",
    "hf_cce/patches/MODELS.md",
]


@pytest.mark.parametrize("name", LINKING)
def test_links_lead_somewhere(name: str) -> None:
    check_links(name)


def test_the_counters_are_shown_as_they_are(namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from hf_cce import remove_cce

    (block,) = [code for code in PYTHON if "cce_stats()" in code]
    remove_cce(namespace["model"])
    exec(compile(block, "README.md", "exec"), namespace)
    (shown,) = re.findall(r"\)  # ([01 ]+)$", block, re.MULTILINE)
    assert shown in capsys.readouterr().out.splitlines()
    assert "_hf_cce" not in README  # only what is public


def test_it_is_short() -> None:
    """Whoever opens the page sees what it is, how to install it, what to change and whether it helps, without scrolling."""
    lines = README.splitlines()
    assert len(lines) <= 150
    assert lines.index("## Usage") <= 45


def test_the_table_of_options_is_complete() -> None:
    from dataclasses import fields

    from hf_cce import CCEConfig

    (section,) = re.findall(r"^## Options\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == [field.name for field in fields(CCEConfig)]
