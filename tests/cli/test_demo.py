"""The demo: both runs agree, its text and its memory figures are real, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numerics import budget
from transformers import LlamaForCausalLM

from hf_cce.diagnostics import demo, text
from hf_cce.diagnostics.demo import Settings
from hf_cce.diagnostics.shapes import config_of, smollm2_like

ROOT = Path(__file__).parents[2]
SIZES = "--vocab-size 512 --hidden-size 64 --layers 1 --max-steps 3 --batch-size 2 --seq-length 32"
TINY = [*SIZES.split(), "--device", "cpu"]


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


def fresh_model(vocabulary: int, hidden: int, layers: int) -> Any:
    return LlamaForCausalLM(config_of(smollm2_like(vocabulary, hidden, layers)))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_cce", "demo", *TINY, *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


def hf_cce(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(cache), capture_output=True, text=True, check=False
    )


def test_whole_demo(words: Path, cache: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "demo.json"
    done = hf_cce(cache, "--dataset", str(words), "--json", str(numbers))
    assert done.returncode == 0 and not done.stderr, done.stderr
    report = json.loads(numbers.read_text("utf-8"))
    assert report["model"]["vocabulary"] == report["data"]["tokenizer_entries"] == 512
    for run in (report["plain"], report["cce"]):
        assert len(run["losses"]) == len(run["step_seconds"]) == 3
        assert run["peak_bytes"] > 0 and run["rest_bytes"] > 0 and run["tokens_per_second"] > 0
        assert run["eval_logits_shape"][2] == 512
    # Every step at most doubles what rounding left in the weights.
    for step, (plain, fused) in enumerate(zip(report["plain"]["losses"], report["cce"]["losses"], strict=True)):
        assert abs(plain - fused) <= plain * budget(0.0, torch.float32) * 2**step, step
    for shown in (
        "loss, step 3",
        "peak memory",
        "Speed is not compared: 2 timed steps",
        "In evaluation mode the trained model gives",
    ):
        assert shown in done.stdout, shown


def test_an_error_of_the_training_process_is_one_line(words: Path, cache: Path) -> None:
    done = hf_cce(cache, "--dataset", str(words), "--seq-length", "1000000")
    message = "too few for sequences of 1000000"
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_speed_is_compared_only_where_the_runs_can_show_it() -> None:
    report = json.loads((ROOT / "benchmarks/results/demo.json").read_text("utf-8"))
    slow, fast = report["plain"]["step_seconds"], report["cce"]["step_seconds"]
    assert demo.why_no_speed(report) is None

    def why(plain: list[float], cce: list[float]) -> str | None:
        return demo.why_no_speed({"plain": {"step_seconds": plain}, "cce": {"step_seconds": cce}})

    assert "2 timed steps" in (why(slow[:3], fast[:3]) or "")
    assert "overlap" in (why(slow, [2.6, 3.1] * 8) or "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_interruption_leaves_nothing_behind(words: Path, cache: Path, tmp_path: Path) -> None:
    arguments = ["--dataset", str(words), "--max-steps", "100000", "--seq-length", "2", "--batch-size", "1"]
    process = subprocess.Popen(
        command(*arguments, "--json", str(tmp_path / "demo.json")), cwd=ROOT, env=environment(cache), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # where the tests run in the background of a shell, Ctrl-C is ignored, and so it would be here
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    while "Device:" not in (line := process.stdout.readline()):
        assert line, "the demo ended before it began to train"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.strip() == "Interrupted."
    assert not list(tmp_path.iterdir())
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_a_local_model_and_its_tokenizer(words: Path, corpus: text.Corpus, cache: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model = str(tmp_path / "model")
    fresh_model(600, 64, 1).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer()).save_pretrained(model)
    taken = text.prepare(600, dataset=str(words), model=model, cache=cache)
    assert np.array_equal(np.load(taken.tokens_file), np.load(corpus.tokens_file))
    sizes: dict[str, Any] = {"model": model, "steps": 2, "batch": 1, "sequence": 8, "device": "cpu"}
    plain = demo.train(Settings(str(taken.tokens_file), **sizes))
    assert plain["common"]["model"]["vocabulary"] == 600 and plain["common"]["model"]["name"] == model
    # The folder now gets another tokenizer: its old tokens must not be taken.
    PreTrainedTokenizerFast(tokenizer_object=text.train_tokenizer(["some other words"], 300)).save_pretrained(model)
    assert text.prepare(600, dataset=str(words), model=model, cache=cache).tokens_file != taken.tokens_file


def test_a_tokenizer_larger_than_the_model_is_refused(corpus: text.Corpus) -> None:
    settings = Settings(str(corpus.tokens_file), vocabulary=257, hidden=64, layers=1, device="cpu")
    with pytest.raises(RuntimeError, match="does not fit the model's vocabulary of 257"):
        demo.in_own_process(settings, lambda event: None)


def test_float16_is_trained_with_a_loss_scale(corpus: text.Corpus) -> None:
    """As on a T4. The first loss is that of float32 but for rounding; with CCE and without they go together."""
    sizes: dict[str, Any] = {"vocabulary": 512, "hidden": 64, "layers": 1, "steps": 3, "batch": 2, "sequence": 32}
    losses = {}
    for dtype, cce in (("float32", False), ("float16", False), ("float16", True)):
        settings = Settings(str(corpus.tokens_file), **sizes, dtype=dtype, device="cpu", cce=cce)
        losses[dtype, cce] = demo.train(settings)["losses"]
    exact, plain, fused = losses.values()
    assert abs(plain[0] - exact[0]) <= exact[0] * 16 * budget(0.0, torch.float16)
    for step, (a, b) in enumerate(zip(plain, fused, strict=True)):
        assert abs(a - b) <= a * 16 * budget(0.0, torch.float16) * 2**step, step


def test_a_killed_run_is_reported(corpus: text.Corpus) -> None:
    def kill(event: dict[str, Any]) -> None:
        for child in psutil.Process().children():
            child.kill()

    settings = Settings(str(corpus.tokens_file), vocabulary=512, hidden=64, layers=1, device="cpu", cce=True)
    with pytest.raises(RuntimeError, match=r"with CCE was killed \(exit code"):
        demo.in_own_process(settings, kill)


def test_the_default_model_has_the_shape_of_smollm2() -> None:
    with torch.device("meta"):
        model = fresh_model(49_152, 576, 30)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # SmolLM2-135M's own count


def test_text_comes_back_from_its_tokens(words: Path, corpus: text.Corpus, cache: Path, tmp_path: Path) -> None:
    ids = np.load(corpus.tokens_file)
    assert ids[-1] == corpus.tokenizer().token_to_id(text.END_OF_TEXT)
    assert corpus.tokenizer().decode(ids.tolist()) == words.read_text("utf-8")
    said: list[str] = []
    assert text.prepare(512, dataset=str(words), cache=cache, say=said.append) == corpus
    assert said == ["reading text"]  # the rest came from the cache
    (tmp_path / "a.txt").write_text("one two " * 100)
    (tmp_path / "b.md").write_text("three " * 100)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    folder = text.prepare(300, dataset=str(tmp_path), cache=cache)
    assert folder.tokenizer().decode(np.load(folder.tokens_file).tolist()) == "one two " * 100 + "three " * 100
    drawn = [text.windows(corpus.tokens_file, (3, 2), 16, seed) for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])


def test_peak_memory_is_that_of_the_process_and_not_of_its_parent() -> None:
    code = """
import sys, torch
from hf_cce.diagnostics import machine
cpu = torch.device("cpu")
before = machine.peak_memory(cpu)
held = torch.ones(50_000_000)
del held
print(before, machine.peak_memory(cpu), machine.memory_in_use(cpu))
"""
    ballast = torch.ones(250_000_000)  # 1 GB here, which the child must not report as its own
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ballast.numel() and done.returncode == 0, done.stderr
    before, peak, after = map(int, done.stdout.split())
    assert 180e6 < peak - max(before, after) < 260e6
    assert before < 900e6
