"""docs/ keeps its word: its Python runs, its links lead somewhere, its tables and lists are whole and not stale."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from messages import HOLE, in_module, messages
from numerics import budget, relative_error

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
# Met by nobody who uses hf_cce as it is documented, or a sentence of a report and no complaint.
INTERNAL = {
    "module … has no attribute …": "Python's own words for a misspelt name",
    "… has no attribute …": "likewise, of the object that stands in for logits",
    "unknown loss …; known: …": "of a function of hf_cce.bench; the command checks before",
    "no NVIDIA driver here": "a note of doctor",
    "the NVIDIA driver names no GPU": "likewise",
    "torch gives no reason": "likewise",
    "the kernels are for NVIDIA GPUs; on a CPU it is always portable PyTorch": "likewise",
    "an NVIDIA GPU of compute capability … with triton …": "likewise",
    "its vocabulary (…) is small against its layers (… of width …)": "of estimate's verdict",
    "… tokens are so few that weights, gradients and optimizer fill the memory": "likewise",
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(page: Path) -> list[str]:
    """The page's Python in order; of a diff, what stands there after it."""
    found = []
    for language, block in re.findall(
        r"^```(python|diff)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        lines = block.splitlines(keepends=True)
        found.append(block if language == "python" else "".join(x[2:] or "\n" for x in lines if not x.startswith("-")))
    return found


WITH_CODE = [page for page in PAGES if code_of(page)]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a page takes for granted. The hub is out of reach: tiny models and a tokenizer of 93 words stand in for its own."""
    import torch
    import transformers
    from accelerate.state import AcceleratorState
    from test_trl import tokenizer
    from torch import distributed

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
    )  # no C++ compiler needed
    AcceleratorState._reset_state(reset_partial_state=True)  # it lives as long as the process, and so in other tests
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    input_ids = torch.randint(99, (2, 16))
    yield {
        **{name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "Trainer")},
        "TrainingArguments": partial(transformers.TrainingArguments, max_steps=1, report_to=[], save_strategy="no"),
        "model": model(),
        "tokenizer": tokenizer(),
        "input_ids": input_ids,
        "dataset": [{"input_ids": row, "labels": row} for row in input_ids],
        "hidden_states": torch.randn(2, 16, 64, requires_grad=True),
        "weight": torch.randn(99, 64, requires_grad=True),
        "labels": torch.randint(99, (2, 16)),
    }
    distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_python_runs(page: Path, stand_ins: dict[str, Any]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the trainers would move the stand-ins to the GPU, and the blocks beside them stay on the CPU")
    text = page.read_text("utf-8")
    if "SFTTrainer" in text:
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        pytest.importorskip("peft")
        stand_ins["SFTTrainer"] = trl.SFTTrainer
        stand_ins["sft_args"] = trl.SFTConfig("out", max_steps=1, report_to=[], save_strategy="no", bf16=False)
        stand_ins["rows"] = datasets.Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5"]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hf_cce:")  # what is recommended does not fall back to full logits
        for code in code_of(page):
            exec(compile(code, str(page), "exec"), stand_ins)
            if ".backward(" in code and page.stem == "guides":  # a frozen model would train nothing, and say nothing
                assert any(parameter.requires_grad for parameter in stand_ins["model"].parameters())


def removed_of(page: Path) -> list[list[str]]:
    """Of each diff of the page the lines that go."""
    blocks = re.findall(r"^```diff\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [[line[2:] for line in block.splitlines() if line.startswith("- ")] for block in blocks]


BEFORE = [lines for lines in removed_of(ROOT / "docs/migration.md") if lines and not lines[0].startswith("#")]
NEEDS_GPU = ("liger_kernel", "cut_cross_entropy", "quack")


@pytest.mark.parametrize("lines", BEFORE, ids=lambda lines: lines[0][:40])
def test_what_goes_is_what_the_others_have(lines: list[str], stand_ins: dict[str, Any]) -> None:
    """The lines "before" run, where their package is installed; of those that need a GPU the imports alone."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("the trainers would move the stand-ins to the GPU")
    code = "\n".join(lines)
    if "SFTTrainer" in code:
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        stand_ins["SFTTrainer"] = trl.SFTTrainer
        stand_ins["sft_args"] = trl.SFTConfig("out", max_steps=1, report_to=[], save_strategy="no", bf16=False)
        stand_ins["rows"] = datasets.Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5"]})
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


def test_there_is_python_to_run() -> None:
    assert {page.stem for page in WITH_CODE} >= {"guides", "migration", "accuracy"}
    assert len(BEFORE) >= 6
    assert len(code_of(ROOT / "docs/guides.md")) >= 10 and len(code_of(ROOT / "docs/migration.md")) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    from test_readme import check_commands

    check_commands(page.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    from test_readme import check_links

    check_links(str(page.relative_to(ROOT)))


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")
    assert "](docs/README.md)" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["docs/performance.md", "docs/comparison.md", "docs/accuracy.md"])
def test_tables_are_those_of_their_json(name: str) -> None:
    from hf_cce.bench.report import PAGES as FILLED
    from hf_cce.bench.report import filled

    text = (ROOT / name).read_text("utf-8")
    assert name in FILLED and ("| **hf_cce** |" in text or '`"auto"`' in text)
    assert filled(text, name) == text, "run: make docs"
    assert (
        text.count("table: begin")
        == text.count("table: end")
        == len(re.findall(r"^<!-- .* table: begin", text, re.MULTILINE))
    )


def test_every_measurement_is_on_the_page() -> None:
    from hf_cce.bench.report import TABLES

    page = (ROOT / "docs/performance.md").read_text("utf-8")
    for path in (ROOT / "hf_cce/bench/results").glob("*.json"):
        assert path.name in page, f"{path.name}: run: make docs"
    pages = "".join(path.read_text("utf-8") for path in [*PAGES, ROOT / "README.md"])
    for name in TABLES:
        assert f"<!-- {name} table: begin" in pages, name


def test_every_study_says_what_it_is() -> None:
    """The page takes its first sentence from the comment that the file begins with."""
    studies = sorted((ROOT / "hf_cce/bench/results").glob("*.txt"))
    assert studies and all(path.read_text("utf-8").startswith("# ") for path in studies)


def test_whoever_is_measured_stands_in_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later file with more peers is taken instead; who is not in it stays in the list below, with that file's reason."""
    import json
    import shutil

    from hf_cce.bench import report

    assert report.most_compared(report.COMPARED["trained head"][0]) == report.TRAINED
    assert report.most_compared(report.COMPARED["random data"][0]) == report.FLAT
    shutil.copytree(report.RESULTS, tmp_path / "results")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    later = report.read(report.TRAINED)
    rows = later["results"][report.COMPARED["trained head"][0]]["rows"]
    rows["trl"], rows["quack"] = rows["liger"] | {"ms": 77.7}, {"failed": "RuntimeError: no"}
    later["missing"] = {"torch F.linear_cross_entropy": "too old"}
    later["versions"] |= {"trl": "1.16.0", "quack-kernels": None}
    (tmp_path / "results/2999-01-01.json").write_text(json.dumps(later))
    table = report.compared_trained_table("docs/comparison.md")
    assert (
        "| TRL's fused head | 77.7 ms" in table and "trl 1.16.0; [`2999-01-01.json`]" in table and "Quack" not in table
    )
    assert "TRL" not in report.compared_flat_table("docs/comparison.md")
    lines = report.not_compared_table("docs/comparison.md").splitlines()
    assert [line for line in lines if "TRL" in line] == [
        f"- TRL's fused head (random data): {report.UNMEASURED['trl']}."
    ]
    assert "- Quack (trained head): it failed: RuntimeError: no." in lines
    assert "- torch's `F.linear_cross_entropy`, in chunks (trained head): too old." in lines
    assert any(line.startswith("- Axolotl's fork") for line in lines) and not any("Liger" in line for line in lines)


def test_the_comparison_rests_on_what_it_shows() -> None:
    """Its figures are those of its tables, which are explained before them; whoever stands in one table stands in the other."""
    page = (ROOT / "docs/comparison.md").read_text("utf-8")
    assert page.index("In brackets behind each time") < page.index("\n|")
    shown = [{row[0]: row for row in table} for table in tables("docs/comparison.md")[:2]]
    errors = {}
    for peer in ("Transformers (full logits)", "Apple's CCE", "Liger (fused linear cross-entropy)"):
        errors[peer] = [[float(x) for x in table[peer][-1].split(", ")] for table in shown]
    full, apple, liger = errors.values()
    times = [f"{a[0] / b[0]:.0f}" for a, b in zip(apple, full, strict=True)]
    assert f"{times[0]} to {times[1]} times as far" in page
    assert round(max(a[1] / b[1] for a, b in zip(liger, full, strict=True))) == 3
    assert "up to three times the error" in page
    one_by_one, what_they_do = (
        page.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("One by one", "What they do")
    )
    for peer in (
        "Liger",
        "Apple's CCE",
        "Axolotl's fork",
        "TRL's fused head",
        "Quack",
        "torch's F.linear_cross_entropy",
    ):
        assert re.search(rf"^\| \*\*{peer}", one_by_one, re.MULTILINE), peer
        assert re.search(rf"^\| {peer}", what_they_do, re.MULTILINE), peer


def test_every_peer_has_a_title() -> None:
    from hf_cce.bench import installed, names
    from hf_cce.bench.peers import BUILDERS
    from hf_cce.bench.report import PEERS

    assert set(PEERS) == set(BUILDERS)
    assert len(set(PEERS.values())) == len(PEERS)
    assert all(names.title(loss) != loss for loss in (*BUILDERS, *installed.LOSSES, "hf_cce filter 0.003"))
    assert names.title("hf_cce-256mib") == "**hf_cce**, `memory_budget` 256 MiB"
    assert names.title("hf_cce_of_somebody_else") == "hf_cce_of_somebody_else"


def test_losses_stand_in_one_order_however_a_file_has_them() -> None:
    from hf_cce.bench import names

    known = [*names.OURS, "hf_cce filter 0.003", *names.OTHERS]
    assert names.ordered([*reversed(known), "later"]) == [*known, "later"]
    steps = ["hf_cce", "hf_cce-exact", "hf_cce-256mib", "eager", "compiled", "liger", "apple"]
    assert names.ordered(reversed(steps)) == steps


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table, row by row."""
    found = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        for table in found
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "docs/comparison.md"])
def test_every_table_has_that_order_and_those_names(page: str) -> None:
    from hf_cce.bench import names
    from hf_cce.bench.report import PEERS

    order, seen = [*PEERS.values()], 0
    for table in tables(page):
        places: dict[tuple[str, ...], list[int]] = {}
        for row in table:
            found = next((i for i, cell in enumerate(row) if cell in order), None)
            if found is not None:
                places.setdefault(tuple(row[:found]), []).append(order.index(row[found]))
            assert not {"apple cce", "hf_cce exact", "eager", "compiled", "Liger's loss"} & set(row), row
        assert all(group == sorted(group) for group in places.values()), table
        seen += bool(places)
        for row in table:
            assert "torch.compile of" not in row[0] or row[0].startswith((names.OTHERS["torch.compile"], "**")), row
    assert seen >= 4


def test_what_was_superseded_stands_at_the_end_and_says_why() -> None:
    from hf_cce.bench import older

    now, _, old = (ROOT / "docs/performance.md").read_text("utf-8").partition("## Older runs\n")
    assert old and "\n## " not in old
    for name in older.FILES:
        (line,) = [line for line in old.splitlines() if name in line]
        assert name not in now and re.search(rf"{re.escape(name)}\)\)?: \S.{{30,}}\.$", line)


def test_a_step_says_of_which_weights_it_is() -> None:
    from hf_cce.bench import report

    assert "| the same from random weights, in 31 GiB" in report.limited_table("README.md")


def test_a_new_measurement_is_drawn_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_cce.bench import report

    later = set(report.NAMED)
    assert later <= {path.name for path in report.RESULTS.iterdir()}
    monkeypatch.setattr(report, "NAMED", set())
    section = report.newer_table("docs/performance.md")
    assert all(section.count(f"](../hf_cce/bench/results/{name})") == 1 for name in later)
    assert "| **hf_cce**, no filter | 4.6472 |" in section
    steps = report.read(report.STEPS)
    trained = f"trained for {steps['settings']['pretrain_steps']:,} steps"
    row = f"| qwen2.5-0.5b, 4 × 8,192, {trained} | plain loop | **hf_cce** | {steps['results']['hf_cce']['ms']:.0f} ms"
    assert row in section
    assert (
        "checkpointing, at most 31 GiB, random weights | plain loop | Transformers (full logits) | out of memory"
        in section
    )
    assert "30 of 30 losses without logits" in report.newer_table("docs/performance.md")
    long = report.read(report.LONG)["results"]["trained V49152 N=32768"]["rows"]["hf_cce"]
    assert f"| **hf_cce** | {long['ms']:.2f} ms (" in section and "\n#" not in section


def test_times_of_first_calls_are_drawn_too() -> None:
    from hf_cce.bench import newer

    rows = {"hf_cce": {"first_s": 3.0, "later_s": [1.0, 1.5]}, "liger": {"missing": "not installed"}}
    table = newer.drawn({"shape": {"tokens": 8}, "results": rows})
    assert table and "| **hf_cce** | 3.00 | 1.00, 1.50 |" in table and "| not installed |" in table
    assert newer.drawn({"results": {"a": 1}}) is newer.drawn({}) is None


def test_a_loss_that_was_asked_for_and_is_not_in_the_file_is_named() -> None:
    from hf_cce.bench import loops, report

    cut = "2026-11-22-h200-first.json"
    found = report.read(cut)
    said = "torch.compile of Transformers' loss and Liger (fused linear cross-entropy) were asked for too"
    assert said in loops.first_calls(found, cut, str)
    rows = found["results"]
    whole = {**found, "results": {**rows, **dict.fromkeys(("torch.compile", "liger"), rows["hf_cce"])}}
    assert "asked for" not in loops.first_calls(whole, cut, str)
    assert "asked for" not in loops.first_calls(report.read(report.FIRST), report.FIRST, str)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_of_a_trained_model_both_losses_are_told_apart(page: str) -> None:
    from hf_cce.bench import report

    losses = report.read(report.STEPS)["results"]["hf_cce"]["losses"]
    said = (
        f"loss {losses[0]:.1f} in the first of the {len(losses)} steps here, {sum(losses) / len(losses):.1f} on average"
    )
    assert said in (ROOT / page).read_text("utf-8") and "first measured" not in (ROOT / page).read_text("utf-8")


def test_the_public_names_are_described_as_they_are() -> None:
    assert (ROOT / "docs/api.md").read_text("utf-8") == load(ROOT / "docs/make_api.py").page(), "run: make docs"


def test_pictures_are_those_of_the_notebook_and_of_the_results() -> None:
    pytest.importorskip("nbformat")
    maker = load(ROOT / "docs/make_pictures.py")
    taken = maker.of_the_notebook()
    assert len(taken) == 4
    for name, picture in taken.items():
        assert (ROOT / "docs/pictures" / name).read_bytes() == picture, "run: make docs"
    for picture, results in (("time-memory.png", (maker.TRAINED, maker.QUACK)), ("curves.png", (maker.CURVES,))):
        assert maker.source_of(ROOT / "docs/pictures" / picture) == "".join(map(maker.digest, results)), (
            "run: make docs"
        )
    shown = set(re.findall(r"\]\(pictures/([\w.-]+)\)", "".join(page.read_text("utf-8") for page in PAGES)))
    assert shown == {path.name for path in (ROOT / "docs/pictures").iterdir()}


def explained() -> list[str]:
    """The messages in code spans with which an entry of the page begins."""
    found = []
    for entry in re.findall(r"^ *- (`.+?)(?=^ *- |^$|\Z)", TROUBLE, re.MULTILINE | re.DOTALL):
        for span in re.findall(r"(?:\A|, )`([^`]+)`(?=[:,])", entry):
            found.append(" ".join(span.split()))
    return found


def test_every_message_has_its_entry() -> None:
    known = set(explained())
    missing = {text: place for text, place in messages().items() if text not in known | set(INTERNAL)}
    assert not missing, f"write in docs/troubleshooting.md what to do, or in INTERNAL why nobody meets it: {missing}"


def test_no_entry_and_no_exception_is_left_over() -> None:
    known = explained()
    assert len(known) > 100 and len(known) == len(set(known))
    assert set(known) <= set(messages()), sorted(set(known) - set(messages()))
    assert set(INTERNAL) <= set(messages()) and not set(INTERNAL) & set(known)


def test_messages_are_found_whatever_their_form() -> None:
    import ast

    source = """
WHY = "it is so"
def f(x, call):
    if x:
        raise ValueError(f"{x} is wrong: {WHY}")
    message = f"said of {x}"
    warnings.warn(message, stacklevel=2)
    reason = None if x else "for this reason"
    call.note_refused("refused")
    raise RuntimeError("one " + "two")
def why_not(x):
    return None if x else "because"
"""
    found = {text for _, text in in_module(ast.parse(source))}
    assert found == {
        f"{HOLE} is wrong: it is so",
        f"said of {HOLE}",
        "for this reason",
        "refused",
        "one two",
        "because",
    }
