"""README and docs/: their Python runs, links resolve, and tables and lists are complete and current."""

import json
import re
import shlex
import warnings
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, load_module
from messages import messages
from numerics import budget, relative_error

import hf_cce
from benchmarks import report
from hf_cce import dispatch
from hf_cce.cli.app import parser

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md", "notebooks/README.md", "hf_cce/patches/MODELS.md")
MESSAGES = (ROOT / "docs/reference/messages.md").read_text("utf-8")
# Messages that documented use never triggers, and sentences of a report that are not errors.
INTERNAL = {
    "module … has no attribute …": "Python's own words for a misspelt name",
    "… has no attribute …": "likewise, of the object that stands in for logits",
    "no NVIDIA driver found": "a note of doctor",
    "the NVIDIA driver lists no GPU": "likewise",
    "torch gives no reason": "likewise",
}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_of(page: Path) -> list[str]:
    """Return the page's Python blocks in order; for a diff, the code after it."""
    found = []
    for language, block in re.findall(
        r"^```(python|diff)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        lines = block.splitlines(keepends=True)
        found.append(block if language == "python" else "".join(x[2:] or "\n" for x in lines if not x.startswith("-")))
    return found


WITH_CODE = [page for page in PAGES if code_of(page)]


@pytest.fixture
def stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None, one_rank: None
) -> dict[str, Any]:
    """Provide the names a page assumes, offline: tiny models and a tokenizer with 93 entries replace those on the hub."""
    import transformers
    from test_trl import tokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, use_cache=False,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip

    def model(*_: Any, **__: Any) -> Any:
        return transformers.LlamaForCausalLM(config)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: compiled(*args, **{"backend": "aot_eager"} | options)
    )  # avoids the C++ compiler
    input_ids = torch.randint(99, (2, 16))
    return {
        **{name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "Trainer")},
        "TrainingArguments": partial(transformers.TrainingArguments, max_steps=1, report_to=[], save_strategy="no"),
        "model": model(),
        "tokenizer": tokenizer(),
        "input_ids": input_ids,
        "args": transformers.TrainingArguments("out", max_steps=1, report_to=[], save_strategy="no"),
        "dataset": [{"input_ids": row, "labels": row} for row in input_ids],
        "hidden_states": torch.randn(2, 16, 64, requires_grad=True),
        "weight": torch.randn(99, 64, requires_grad=True),
        "labels": torch.randint(99, (2, 16)),
    }


def add_trl(stand_ins: dict[str, Any]) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    stand_ins["SFTTrainer"] = trl.SFTTrainer
    stand_ins["sft_args"] = trl.SFTConfig("out", max_steps=1, report_to=[], save_strategy="no", bf16=False)
    stand_ins["rows"] = datasets.Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5"]})


@pytest.mark.parametrize("page", WITH_CODE, ids=page_id)
def test_python_blocks_run(page: Path, stand_ins: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the trainers would move the stand-ins to the GPU, and the blocks beside them stay on the CPU")
    text = page.read_text("utf-8")
    if "SFTTrainer" in text:
        pytest.importorskip("peft")
        add_trl(stand_ins)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hf_cce:")  # documented code must not fall back to full logits
        for code in code_of(page):
            exec(compile(code, str(page), "exec"), stand_ins)
            if ".backward(" in code and page.parent.name == "guides":
                # A frozen model would silently train nothing.
                assert any(parameter.requires_grad for parameter in stand_ins["model"].parameters())


def removed_of(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^```diff\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [[line[2:] for line in block.splitlines() if line.startswith("- ")] for block in blocks]


BEFORE = [lines for lines in removed_of(ROOT / "docs/migration.md") if lines and not lines[0].startswith("#")]
NEEDS_GPU = ("liger_kernel", "cut_cross_entropy", "quack")


@pytest.mark.parametrize("lines", BEFORE, ids=lambda lines: lines[0][:40])
def test_migration_before_code_runs(lines: list[str], stand_ins: dict[str, Any]) -> None:
    """Run the "before" lines if their package is installed; for packages that need a GPU, run only the imports."""
    if torch.cuda.is_available():
        pytest.skip("the trainers would move the stand-ins to the GPU")
    code = "\n".join(lines)
    if "SFTTrainer" in code:
        add_trl(stand_ins)
    if "F.linear_cross_entropy" in code and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch 2.13 has it")
    stand_ins["F"] = torch.nn.functional
    gpu = [name for name in NEEDS_GPU if name in code]
    for name in gpu:
        pytest.importorskip(name)
    if gpu:
        imports = [line for line in lines if re.match(r"from|import", line)]
        if gpu == ["cut_cross_entropy"] and "cut_cross_entropy.transformers" in code:
            pytest.importorskip("cut_cross_entropy.transformers", reason="not in the package that PyPI has")
        assert imports or "TrainingArguments(" in code
        code = "\n".join(imports) or code
    exec(compile(code, "docs/migration.md", "exec"), stand_ins)
    if "loss = F." in code:
        ours = "loss = linear_cross_entropy(hidden_states, weight, labels)"
        theirs = stand_ins["loss"]
        exec(f"from hf_cce import linear_cross_entropy\n{ours}", stand_ins)
        assert relative_error(stand_ins["loss"], theirs) <= budget(0.0, torch.float32)


def shell_of(text: str) -> str:
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page: Path) -> None:
    for name, arguments in re.findall(r"^hf-cce (\w+) ?([^#>\n]*)", shell_of(page.read_text("utf-8")), re.MULTILINE):
        parser().parse_args([name, *(word for word in shlex.split(arguments) if word != "--help")])  # or SystemExit


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = re.findall(r"^make ((?:[a-z-]+ ?)+)", shell_of(text), re.MULTILINE)
    commands += re.findall(r"`make ([a-z-]+)", text)
    assert commands and {target for command in commands for target in command.split()} <= targets


def test_paths_in_deferred_logits_page_exist() -> None:
    flow = (ROOT / "docs/concepts/deferred-logits.md").read_text("utf-8")
    paths = [path.rstrip(".") for path in re.findall(r"(?<![\w/])(?:hf_cce|patches)/[\w/.]+", flow)]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / name for name in OTHERS)], ids=page_id)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_readme_counters_are_current(stand_ins: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [code for code in code_of(README) if "cce_stats()" in code]
    exec(compile(block, "README.md", "exec"), stand_ins)
    (shown,) = re.findall(r"\)  # ([01 ]+) \(on a GPU", block, re.MULTILINE)
    assert shown in capsys.readouterr().out.splitlines()


def test_limits_of_small_batches_and_of_the_filter_are_current() -> None:
    page = (ROOT / "docs/start/support.md").read_text("utf-8")
    limits = (dispatch.FULL_LOGITS_MAX, dispatch.FULL_LOGITS_MAX_FALLBACK, dispatch.FULL_LOGITS_MAX_OPTIONS)
    for limit in (
        *(f"{number // 10**6} million" for number in limits), f"at {dispatch.BYTES_PER_LOGIT} bytes each",
        f"at least {dispatch.FILTER_TOKENS:,} tokens", f"≥ {dispatch.FILTER_FROM / 1e11:g} × 10¹¹",
    ):  # fmt: skip
        assert limit in page, limit
    assert f"at most {dispatch.FULL_LOGITS_MAX // 10**6} million logits" in README.read_text("utf-8")


def test_options_table_is_complete() -> None:
    (section,) = re.findall(r"^## Options\n(.*?)^## ", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == [field.name for field in fields(hf_cce.CCEConfig)]


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = [page_id(page).removeprefix("docs/") for page in PAGES if page.name != "README.md"]
    assert [page for page in pages if f"]({page})" not in index] == []
    assert "](docs/README.md)" in README.read_text("utf-8")


@pytest.mark.parametrize("name", [page_id(page) for page in PAGES if "table: begin" in page.read_text("utf-8")])
def test_tables_match_results(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert name in report.PAGES and ("| **hf_cce** |" in text or '`"auto"`' in text)
    assert report.filled(text, name) == text, "run: make docs"
    begun = len(re.findall(r"^<!-- .* table: begin", text, re.MULTILINE))
    assert text.count("table: begin") == text.count("table: end") == begun


def test_every_result_and_table_is_documented() -> None:
    pages = "".join(path.read_text("utf-8") for path in PAGES)
    for path in report.RESULTS.iterdir():
        assert path.suffix == ".json" and path.name in pages, f"{path.name}: run make docs, or delete it"
        found = json.loads(path.read_text("utf-8"))
        assert isinstance(found, list) or {"date", "device"} <= set(found), path.name
    for name in report.TABLES:
        assert f"<!-- {name} table: begin" in pages, name


def test_every_public_name_is_documented() -> None:
    """`make site` inserts the docstrings and fails on unknown names."""
    text = (ROOT / "docs/reference/api.md").read_text("utf-8")
    sections = re.findall(r"^## (\w+)\n\n::: hf_cce\.(\w+)$", text, re.MULTILINE)
    assert sorted(sections) == [(name, name) for name in sorted(hf_cce.__all__)]
    assert all(f"[`{name}`](#{name.lower()})" in text for name in hf_cce.__all__)


def test_pictures_are_current() -> None:
    pytest.importorskip("nbformat")
    Image = pytest.importorskip("PIL.Image")
    maker = load_module(ROOT / "docs/make_pictures.py")
    taken = maker.of_the_notebook()
    assert len(taken) == 4
    for name, picture in taken.items():
        assert (ROOT / "docs/pictures" / name).read_bytes() == picture, "run: make docs"
    for picture, result in (("time-memory.png", maker.HEADS), ("curves.png", maker.CURVES)):
        drawn_from = Image.open(ROOT / "docs/pictures" / picture).text["Source"]
        assert drawn_from == maker.digest(result), "run: make docs"
    shown = set(re.findall(r"\]\(\.\./pictures/([\w.-]+)\)", "".join(page.read_text("utf-8") for page in PAGES)))
    assert shown == {path.name for path in (ROOT / "docs/pictures").iterdir()}


def explained() -> list[str]:
    """Return the messages in code spans at the start of each entry of the page."""
    found = []
    for entry in re.findall(r"^ *- (`.+?)(?=^ *- |^$|\Z)", MESSAGES, re.MULTILINE | re.DOTALL):
        for span in re.findall(r"(?:\A|, )`([^`]+)`(?=[:,])", entry):
            found.append(" ".join(span.split()))
    return found


def test_every_message_is_documented() -> None:
    known = set(explained())
    missing = {text: place for text, place in messages().items() if text not in known | set(INTERNAL)}
    assert not missing, f"write in docs/reference/messages.md what to do, or in INTERNAL why nobody meets it: {missing}"


def test_no_stale_message_entries() -> None:
    known = explained()
    assert len(known) > 100 and len(known) == len(set(known))
    assert set(known) <= set(messages()), sorted(set(known) - set(messages()))
    assert set(INTERNAL) <= set(messages()) and not set(INTERNAL) & set(known)
