"""The demo: what it writes, that both runs agree, that its text and its memory figures are real, and how it fails."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numerics import budget
from rich.console import Console

from hf_cce.bench import bench_plots, curves_plot, machine, plots, text, training
from hf_cce.bench.files import whole_file, whole_folder
from hf_cce.bench.training import Settings
from hf_cce.cli.demo import _show, _too_little_text

ROOT = Path(__file__).parents[2]
TINY = [
    "--vocab",
    "512",
    "--hidden",
    "64",
    "--layers",
    "1",
    "--steps",
    "3",
    "--batch",
    "2",
    "--seq",
    "32",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little real text: one module of the standard library."""
    path = tmp_path_factory.mktemp("words") / "argparse.txt"
    path.write_text(Path(sys.modules["argparse"].__file__ or "").read_text("utf-8"), "utf-8")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(words: Path, cache: Path) -> text.Corpus:
    return text.prepare(512, dataset=str(words), cache=cache)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_cce", "demo", *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


def hf_cce(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(cache),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_whole_demo(words: Path, cache: Path, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "new" / "demo.json", tmp_path / "demo.png"
    done = hf_cce(cache, *TINY, "--dataset", str(words), "--json", str(numbers), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(numbers.read_text("utf-8"))
    assert report["settings"]["steps"] == 3 and report["settings"]["device"] == "cpu"
    assert report["model"]["vocabulary"] == 512 and report["data"]["tokenizer_entries"] == 512
    assert report["versions"]["torch"] == version("torch")
    for run in (report["plain"], report["cce"]):
        assert len(run["losses"]) == len(run["step_seconds"]) == 3
        assert run["peak_bytes"] > 0 and run["rest_bytes"] > 0 and run["tokens_per_second"] > 0
        assert run["eval_logits_shape"][2] == 512
        assert len(run["generated_ids"]) == training.NEW_TOKENS
    # Every step doubles what rounding the steps before it left in the weights, at most.
    for step, (plain, fused) in enumerate(zip(report["plain"]["losses"], report["cce"]["losses"], strict=True)):
        assert abs(plain - fused) <= plain * budget(0.0, torch.float32) * 2**step, step
    assert report["largest_difference"] == max(
        abs(a - b) for a, b in zip(report["plain"]["losses"], report["cce"]["losses"], strict=True)
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["demo.json", "demo.png", "new"]
    for words_ in (
        "without CCE",
        "with CCE",
        "loss, step 3",
        "peak memory",
        "What a step holds is too little to be seen",
        "Speed is not compared: 2 timed steps cannot show it",
        "Logits are still there",
    ):
        assert words_ in done.stdout, words_
    assert "\x1b[" not in done.stdout  # no colours in a pipe
    assert not done.stderr


def test_quiet_writes_numbers_and_says_nothing(words: Path, cache: Path, tmp_path: Path) -> None:
    done = hf_cce(
        cache, *TINY, "--dataset", str(words), "--json", str(tmp_path / "demo.json"), "--quiet", "--steps", "1"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((tmp_path / "demo.json").read_text())["settings"]["steps"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--hidden", "100"], 2, "--hidden must be a multiple of 64"),
        (["--dataset", "no/such/dataset"], 2, "--dataset no/such/dataset: no such file or folder"),
        (["--dataset", "missing.txt"], 2, "--dataset missing.txt: no such file or folder"),
        (["--dataset", "no_such_dataset"], 2, "--dataset no_such_dataset: no such file or folder here, and the hub"),
        (["--seq", "1000000"], 1, "--seq 1000000 needs more of it"),
        (["--device", "nonsense"], 2, "--device nonsense: "),
        (["--device", "cuda:99"], 2, "--device cuda:99: torch"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str, words: Path, cache: Path) -> None:
    given = arguments if "--dataset" in arguments else ["--dataset", str(words), *arguments]
    done = hf_cce(cache, *TINY, *given)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def shown(report: dict[str, Any], steps: int, **changes: Any) -> str:
    """What the demo prints of ``report``, stretched to ``steps`` steps and changed."""
    report = json.loads(json.dumps(report)) | changes
    for run in (report["plain"], report["cce"]):
        run["losses"] = [10.0 - step / 100 for step in range(steps)]
    console = Console(record=True, quiet=False, width=120, file=io.StringIO())
    _show(console, report)
    return console.export_text()


def test_what_is_printed_says_what_it_is() -> None:
    report = json.loads((ROOT / "hf_cce/bench/results/demo_cpu.json").read_text("utf-8"))
    short, long = shown(report, 16), shown(report, 100)
    assert all(f"loss, step {step} " in short for step in range(1, 17)) and "one step in" not in short
    assert "loss, step 8 " in long and "loss, step 100 " in long and "loss, step 2 " not in long
    assert "one step in 7, and the last" in long
    assert "cannot make sense yet" in short and "after 32,768 tokens" in short
    assert "cannot make sense" not in shown(
        report, 16, settings=report["settings"] | {"model": "HuggingFaceTB/SmolLM2-135M"}
    )


def test_it_says_why_the_tokenizer_has_fewer_entries_than_the_vocabulary(words: Path, cache: Path) -> None:
    """The text ends before 128,256 are reached, and says so; not of a vocabulary that the text fills, nor of a model's own."""
    done = hf_cce(cache, *TINY, "--vocab", "128256", "--steps", "1", "--dataset", str(words))
    assert done.returncode == 0, done.stderr
    entries = int(re.search(r"tokenizer with ([\d,]+) entries", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    assert entries < 20_000
    said = f"The text has too little in it for more entries: the other {128256 - entries:,} of the vocabulary of 128,256 never"
    assert said in done.stdout
    assert _too_little_text(512, {"model": None, "vocabulary": 512}) == ""
    assert _too_little_text(512, {"model": "HuggingFaceTB/SmolLM2-135M", "vocabulary": 49_152}) == ""


def with_runs(report: dict[str, Any], plain: dict[str, Any], cce: dict[str, Any], **changes: Any) -> str:
    return shown(report, 16, plain=report["plain"] | plain, cce=report["cce"] | cce, **changes)


def test_speed_is_compared_only_where_the_runs_can_show_it() -> None:
    report = json.loads((ROOT / "hf_cce/bench/results/demo_cpu.json").read_text("utf-8"))
    assert re.search(r"tokens per second +│ +676 │ +756 │ +\+12%", shown(report, 16))
    slow, fast = report["plain"]["step_seconds"], report["cce"]["step_seconds"]
    few = with_runs(report, {"step_seconds": slow[:3]}, {"step_seconds": fast[:3]})
    assert "Speed is not compared: 2 timed steps cannot show it (--steps 11 or more can)." in few
    short = with_runs(report, {"step_seconds": slow}, {"step_seconds": [x / 100 for x in fast]})
    assert "Speed is not compared: 15 steps in 0.41 s are too short to show it" in short
    mixed = with_runs(report, {"step_seconds": slow}, {"step_seconds": [2.6, 3.1] * 8})
    assert "Speed is not compared: half of the steps took 3,0" in mixed and "which overlap." in mixed
    busy = {"cpu_used_by_others": 0.5}
    loaded = with_runs(report, {}, busy)
    assert "Speed is not compared: other programs used 50% of the processor meanwhile." in loaded
    assert not [text for text in (few, short, mixed, loaded) if "tokens per second" in text]
    on_a_gpu = with_runs(report, {}, busy, settings=report["settings"] | {"device": "cuda"})
    assert "tokens per second" in on_a_gpu and "Speed" not in on_a_gpu + shown(report, 16)


def test_memory_that_does_not_show_is_not_printed_as_zero() -> None:
    report = json.loads((ROOT / "hf_cce/bench/results/demo_cpu.json").read_text("utf-8"))
    assert "of which in a step (MB)" in shown(report, 16) and "too little" not in shown(report, 16)
    same = {"peak_bytes": 460_000_000, "rest_bytes": 460_000_000}
    hidden = with_runs(report, same, same | {"rest_bytes": 459_000_000})
    assert "of which in a step" not in hidden
    assert "What a step holds is too little to be seen in the memory of the process" in hidden
    one = with_runs(report, same | {"rest_bytes": 440_000_000}, same)
    assert re.search(r"of which in a step \(MB\) +│ +20 │ +< 5 │ +│", one) and "too little" not in one


def test_what_others_use_of_the_processor_is_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_times = namedtuple("machine_times", "user system idle iowait guest")  # guest is part of user
    own_times = namedtuple("own_times", "user system")
    of_all = iter([machine_times(10.0, 5.0, 100.0, 5.0, 3.0), machine_times(14.0, 6.0, 103.0, 7.0, 5.0)])
    of_us = iter([own_times(1.0, 0.0), own_times(3.0, 0.5)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(of_all))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: next(of_us)))
    assert machine.Others().share() == 0.25  # 5 seconds of 10 were busy, 2.5 of these for us


def processes_of(group: int) -> list[psutil.Process]:
    """The live processes of a process group; who has ended and waits to be collected is not alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_interruption_leaves_nothing_behind(words: Path, cache: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--dataset", str(words), "--steps", "100000", "--seq", "2", "--batch", "1"]
    process = subprocess.Popen(
        command(*arguments, "--json", str(tmp_path / "demo.json")), cwd=ROOT, env=environment(cache), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # where the tests run in the background of a shell, Ctrl-C is ignored, and so it would be here
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    while "Device:" not in (line := process.stdout.readline()):
        assert line, "the demo ended before it began to train"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and child
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "Interrupted; nothing was written."
    assert not list(tmp_path.iterdir())
    patience = time.monotonic() + 30
    while group := processes_of(process.pid):
        assert time.monotonic() < patience, group
        time.sleep(0.1)


def test_an_interruption_while_a_process_starts_ends_that_too(
    corpus: text.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    real = multiprocessing.process.BaseProcess.start

    def start(self: Any) -> None:
        real(self)
        started.append(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    settings = Settings(
        str(corpus.tokens_file), str(corpus.tokenizer_file), vocabulary=512, steps=100_000, device="cpu"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            training.in_own_process(settings, lambda event: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1 and not started[0].is_alive()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_local_model_and_its_tokenizer(words: Path, corpus: text.Corpus, cache: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    settings = Settings(str(corpus.tokens_file), str(corpus.tokenizer_file), vocabulary=600, hidden=64, layers=1)
    training.fresh_model(settings).save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer()).save_pretrained(tmp_path / "model")
    taken = text.prepare(600, dataset=str(words), model=str(tmp_path / "model"), cache=cache)
    assert taken.entries == corpus.entries
    assert np.array_equal(np.load(taken.tokens_file), np.load(corpus.tokens_file))
    options: dict[str, Any] = {"model": str(tmp_path / "model"), "steps": 2, "batch": 1, "sequence": 8, "device": "cpu"}
    settings = Settings(str(taken.tokens_file), str(taken.tokenizer_file), **options)
    plain = training.train(settings)
    assert plain["common"]["model"]["vocabulary"] == 600
    assert plain["common"]["settings"]["model"] == str(tmp_path / "model")


def test_another_tokenizer_in_the_same_folder_is_another_corpus(
    words: Path, corpus: text.Corpus, cache: Path, tmp_path: Path
) -> None:
    """A folder that a later pretraining writes its model to, too: by its name the old tokens would be found."""
    from transformers import PreTrainedTokenizerFast

    other = text.train_tokenizer([words.read_text("utf-8")], 300)
    taken = []
    for tokenizer in (corpus.tokenizer(), other):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        taken.append(text.prepare(600, dataset=str(words), model=str(tmp_path), cache=cache))
        assert taken[-1].entries == tokenizer.get_vocab_size()
        expected = text.encode(tokenizer, [words.read_text("utf-8")])
        assert np.array_equal(np.load(taken[-1].tokens_file), expected)
    assert taken[0].tokens_file != taken[1].tokens_file


def test_a_tokenizer_larger_than_the_model_is_refused(corpus: text.Corpus) -> None:
    settings = Settings(
        str(corpus.tokens_file), str(corpus.tokenizer_file), vocabulary=257, hidden=64, layers=1, device="cpu"
    )
    with pytest.raises(ValueError, match="does not fit the model's vocabulary of 257"):
        training.train(settings)
    with pytest.raises(RuntimeError, match="does not fit the model's vocabulary of 257"):
        training.in_own_process(settings, lambda event: None)


def _dies(*_: Any) -> None:
    os._exit(9)


def test_a_killed_run_is_reported(corpus: text.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_child", _dies)
    settings = Settings(str(corpus.tokens_file), str(corpus.tokenizer_file), cce=True)
    with pytest.raises(RuntimeError, match=r"with CCE was killed \(exit code 9\)"):
        training.in_own_process(settings, lambda event: None)


def test_the_same_seed_gives_the_same_batches(corpus: text.Corpus) -> None:
    def batches(seed: int) -> np.ndarray:
        files = str(corpus.tokens_file), str(corpus.tokenizer_file)
        return training._batches(Settings(*files, steps=3, batch=2, sequence=16, seed=seed))

    assert batches(1).shape == (3, 2, 16)
    assert np.array_equal(batches(1), batches(1))
    assert not np.array_equal(batches(1), batches(2))


def test_the_default_model_has_the_shape_of_smollm2() -> None:
    with torch.device("meta"):
        model = training.fresh_model(Settings("", "", layers=30))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # SmolLM2-135M's own count
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_text_comes_back_from_its_tokens(words: Path, corpus: text.Corpus, cache: Path) -> None:
    ids = np.load(corpus.tokens_file)
    tokenizer = corpus.tokenizer()
    assert ids.dtype == np.int32 and len(ids) == corpus.tokens
    assert ids[-1] == tokenizer.token_to_id(text.END_OF_TEXT)
    assert tokenizer.decode(ids.tolist()) == words.read_text("utf-8")
    said: list[str] = []
    assert text.prepare(512, dataset=str(words), cache=cache, say=said.append) == corpus
    assert said == ["reading text"]  # the rest came from the cache


def test_a_folder_of_texts(words: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two " * 100)
    (tmp_path / "b.md").write_text("three " * 100)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    corpus = text.prepare(300, dataset=str(tmp_path), cache=cache)
    assert corpus.tokenizer().decode(np.load(corpus.tokens_file).tolist()) == "one two " * 100 + "three " * 100


@pytest.mark.slow
def test_the_sources_of_python_fill_the_vocabulary(cache: Path) -> None:
    source, documents = text._python_sources(49_152)
    assert "standard library" in source
    assert sum(map(len, documents)) > 8_000_000
    assert text.train_tokenizer(documents, 49_152).get_vocab_size() > 45_000


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:  # noqa: PT012
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "old"
    with whole_file(path) as temporary:
        temporary.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "new"


def test_folders_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), whole_folder(path) as temporary:  # noqa: PT012
        (temporary / "half").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with whole_folder(path) as first, whole_folder(path) as second:  # two processes at once
        (first / "by").write_text("first")
        (second / "by").write_text("second")
    assert (path / "by").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_peak_memory_is_that_of_the_process_and_not_of_its_parent() -> None:
    code = """
import sys, torch
from hf_cce.bench import memory
cpu = torch.device("cpu")
before = memory.peak(cpu)
held = torch.ones(50_000_000)
del held
print(before, memory.peak(cpu), memory.in_use(cpu))
"""
    ballast = torch.ones(250_000_000)  # 1 GB here, which the child must not report as its own
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ballast.numel() and done.returncode == 0, done.stderr
    before, peak, after = map(int, done.stdout.split())
    assert 180e6 < peak - max(before, after) < 260e6
    assert before < 900e6


def test_what_stands_under_a_picture_s_title_ends_where_the_picture_does(tmp_path: Path) -> None:
    figure = Figure(figsize=(11, 4.6), dpi=150)
    FigureCanvasAgg(figure)
    long = "A processor with a long name (x86_64, Linux, 16 threads) · " * 4
    for said, lines in (("CPU · float32", 1), (long.strip(), 2)):
        written = figure.text(0.02, 0.915, said, fontsize=8.5)
        assert plots.wrap(written) == lines == written.get_text().count("\n") + 1
        assert written.get_text().replace("\n", " ") == said
        assert written.get_window_extent().x1 <= figure.bbox.width

    report = json.loads((ROOT / "hf_cce/bench/results/demo_cpu.json").read_text("utf-8"))
    plots.draw_demo(report | {"device": long.strip()}, tmp_path / "demo.svg")
    drawn = (tmp_path / "demo.svg").read_text("utf-8")
    assert "A processor" in drawn and f"{long}4 × 512 tokens" not in drawn and "same training" in drawn


@pytest.mark.parametrize("kind", ["bench", "curves"])
def test_what_stands_under_the_other_titles_does_so_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its lines end above what is drawn."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    results = ROOT / "hf_cce/bench/results"
    name, drawn = {
        "bench": ("2026-11-23-h200-bench-heads.json", bench_plots.draw_bench),
        "curves": ("2026-11-23-h200-curves.json", curves_plot.draw),
    }[kind]
    report = json.loads((results / name).read_text("utf-8"))
    long = "A processor with a long name (x86_64, Linux, 16 threads) · " * 4
    for device, most in ((report["device"], 2), (long.strip(" ·"), 3)):
        drawn(report | {"device": device}, tmp_path / f"{kind}.png")
        figure = figures.pop()
        figure.draw_without_rendering()
        (about,) = (text for text in figure.texts if text.get_text().startswith(device[:11]))
        lines = about.get_text().count("\n") + 1
        assert lines <= most and (device == report["device"] or lines > 1)
        box = about.get_window_extent()
        assert box.x1 <= figure.bbox.width
        titles = [axes._left_title.get_window_extent().y1 for axes in figure.axes]
        assert box.y0 > max(titles) and box.y1 < figure.bbox.height
