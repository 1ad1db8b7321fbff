"""Every benchmark script runs on a CPU at tiny sizes and writes a file from which its table can be built."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numerics import budget

from benchmarks import (
    alternate,
    curves,
    first,
    installed,
    largest,
    loss,
    measure,
    never_slower,
    onestep,
    peers,
    steps,
    tables,
    text,
)
from hf_cce.diagnostics import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(Path(sys.modules["argparse"].__file__ or "").read_text("utf-8"), "utf-8")
    return str(path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run losses in this process: starting one process per loss takes seconds, and one test covers that."""
    monkeypatch.setattr(steps, "in_own_process", lambda job, timeout: onestep.run(job))


def run(script: Any, path: Path, *arguments: str) -> dict[str, Any]:
    assert script.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert {"date", "command", "device", "versions", "results"} <= {*report, "results"}
    assert f"python -m {script.__name__}" in report["command"] and report["versions"]["torch"]
    return report


def small(text_file: str, *more: str) -> list[str]:
    sizes = ["--model", "tiny", "--batch", "2", "--sequence", "32", "--warmup", "1", "--steps", "2", "--device", "cpu"]
    return [*sizes, "--dataset", text_file, *more]


def test_each_mode_has_times_and_errors(tmp_path: Path) -> None:
    arguments = ["--shape", "64,64,512", "--peers", "hf_cce,eager", "--repeats", "2", "--device", "cpu"]
    (result,) = run(loss, tmp_path / "modes.json", *arguments)["results"].values()
    for row in result["rows"].values():
        for mode, prefix in measure.PREFIX.items():
            least, most = row[f"{prefix}ms_spread"]
            assert 0 < least <= row[f"{prefix}ms"] <= most
            assert row[f"{prefix}gemm_multiple"] == row[f"{prefix}ms"] / result["gemms_ms"][mode]
    for error in ("loss_error", "grad_hidden_error", "grad_weight_error", "frozen_grad_hidden_error"):
        assert result["rows"]["hf_cce"][error] <= budget(result["rows"]["eager"][error], torch.float32), error


@pytest.mark.slow
def test_loss_on_trained_and_cached_head(text_file: str, tmp_path: Path) -> None:
    head = ["--device", "cpu", "--head", "V512:256", "--head-seconds", "6", "--dataset", text_file, "--repeats", "1"]
    arguments = ["--shape", "64,64,512", "--peers", "hf_cce,eager,liger", "--sweep", "1e-3", "--modes", "both"]
    report = run(loss, tmp_path / "a.json", *head, *arguments)
    assert list(report["results"]) == ["flat N=64 D=64 V=512", "trained V512 N=256"]
    result, about = report["results"]["trained V512 N=256"], report["heads"]["V512"]
    rows = {name for name, row in result["rows"].items() if "ms" in row}
    assert rows | set(report["missing"]) >= {"hf_cce", "eager", "hf_cce filter 0.001"}
    assert "| **hf_cce** |" in tables.loss_rows("head", result)[2]
    assert "`gradient_filter=0.001`" in "".join(tables.mode_rows(result))
    assert any('"auto"' in line for line in tables.error_rows(report, {"trained V512 N=256": "a head"}))
    assert not about["from_cache"] and about["held_out_loss"] < np.log(512)
    again = run(loss, tmp_path / "b.json", *head, "--peers", "hf_cce", "--modes", "forward")
    assert again["heads"]["V512"] == {**about, "from_cache": True}


@pytest.mark.parametrize("peer", ["trl", "torch F.linear_cross_entropy"])
def test_peer_losses_agree(peer: str) -> None:
    losses, missing = peers.make_peers([peer, "eager"])
    if missing:
        pytest.skip(missing[peer])
    hidden, weight, labels = torch.randn(64, 16), torch.randn(300, 16), torch.arange(64)
    found, wanted = (losses[name](hidden, weight, labels) for name in (peer, "eager"))
    assert abs(found - wanted) <= budget(0.0, torch.float32) * wanted


@pytest.mark.slow
def test_steps_in_subprocess(text_file: str, tmp_path: Path) -> None:
    report = run(steps, tmp_path / "a.json", *small(text_file, "--losses", "hf_cce"))
    row = report["results"]["hf_cce"]
    assert row["status"] == "ok" and len(row["losses"]) == 3 and row["peak_gib"] > 0 and not report["missing"]
    assert row["ms_spread"][0] <= row["ms"] <= row["ms_spread"][1]


@pytest.mark.usefixtures("in_this_process")
def test_steps_reuse_trained_weights(text_file: str, tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state.pt"), "--pretrain-sequence", "32", "--losses", "eager"]
    first, second = (
        run(steps, tmp_path / f"{name}.json", *small(text_file, *state, "--pretrain-steps", "3")) for name in "ab"
    )
    assert "kept" not in first["pretraining"] and second["pretraining"]["kept"] is True
    assert first["results"]["eager"]["losses"] == second["results"]["eager"]["losses"]
    assert steps.main(small(text_file, *state, "--pretrain-steps", "2")) == 1  # refuses to reuse other weights


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("loop", ["trainer", "sft"])
def test_steps_in_trainers_match_plain_loop(loop: str, text_file: str, tmp_path: Path) -> None:
    for package in ["trl", "datasets"] if loop == "sft" else []:
        pytest.importorskip(package)
    more = ["--losses", "eager", "hf_cce", "--learning-rate", "0.0", "--loop"]
    found = {each: run(steps, tmp_path / f"{each}.json", *small(text_file, *more, each)) for each in ("plain", loop)}
    for name, row in found[loop]["results"].items():
        expected = float(np.mean(found["plain"]["results"][name]["losses"]))
        assert abs(row["losses"][0] - expected) <= budget(0.0, torch.bfloat16) * expected
    assert "CCECallback" in found[loop]["results"]["hf_cce"]["installed"]
    assert found["plain"]["results"]["hf_cce"]["first_relative_difference"] <= budget(0.0, torch.bfloat16)
    assert any("**hf_cce** by `CCECallback`" in line for line in tables.step_rows([found[loop]]))


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "more", [["--recipe=--use_peft --dtype float32"], ["--images", "28"]], ids=["LoRA", "pictures"]
)
def test_steps_with_recipe(more: list[str], text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("trl", "datasets", "peft", "PIL"):
        pytest.importorskip(package)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    report = run(
        steps, tmp_path / "a.json", *small(text_file, "--loop", "recipe", "--losses", "hf_cce", "eager", "liger", *more)
    )
    assert "HF_CCE_DISABLE" in report["missing"]["liger"] and report["reference"] == "eager"
    ours, full = report["results"]["hf_cce"], report["results"]["eager"]
    assert "'HF_CCE_DISABLE': '1'" in full["installed"]
    assert all(count in ours["installed"] for count in ("'fused': 3", "'materialized': 0"))
    assert ours["relative_difference"] <= budget(0.0, torch.float32)
    assert any("recipes/sft.py" in line for line in tables.step_rows([report]))


@pytest.mark.usefixtures("in_this_process")
def test_steps_report_out_of_memory_and_missing_packages(
    text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(model: Any, name: str) -> str:
        def loss_function(**_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 18.55 GiB. GPU 0 has …")

        if name == "liger":
            raise installed.Missing("no such package")
        model.loss_function = loss_function
        return ""

    monkeypatch.setattr(onestep, "install", install)
    report = run(steps, tmp_path / "a.json", *small(text_file, "--losses", "eager", "liger"))
    row = report["results"]["eager"]
    assert (row["status"], row["phase"], row["step"], row["asked"]) == ("oom", "forward", 1, "18.55 GiB")
    assert report["missing"] == {"liger": "no such package"}
    assert "out of memory, asked for 18.55 GiB" in tables.step_rows([report])[2]
    assert onestep.out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not onestep.out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_alternate(loop: str, text_file: str, tmp_path: Path) -> None:
    arguments = small(text_file, "--rounds", "2", "--settle", "1", "--loop", loop, "--losses", "eager", "hf_cce")
    report = run(alternate, tmp_path / "a.json", *arguments)
    ours, full = report["results"]["hf_cce"], report["results"]["eager"]
    differences = [x - y for x, y in zip(ours["step_ms"], full["step_ms"], strict=True)]
    assert len(differences) == 2 and ours["apart_ms"]["most"] == max(differences) and ours["stats"]["fused"] == 3
    assert tables.round_rows(report)[2].startswith("| **hf_cce** |")


@pytest.mark.slow
def test_curves_are_resumed(text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    texts = ["--dataset", text_file, "--second-dataset", text_file, "--plot", str(tmp_path / "curves.png")]
    arguments = ["--preset", "tiny", "--seeds", "1", *texts, "--losses", "hf_cce"]
    assert curves.main([*arguments, "--seconds", "1e-9"]) == 0
    assert "4 runs left" in capsys.readouterr().err
    first = run(curves, tmp_path / "a.json", *arguments)["runs"]
    report = run(curves, tmp_path / "a.json", *arguments, "reversed")
    runs = {curves.Job.of(found): found for found in report["runs"]}
    assert len(first) == 4 and len(runs) == len(report["runs"]) == 6
    assert all(runs[curves.Job.of(found)] == found for found in first) and "2 of 6 runs" in capsys.readouterr().err
    for about, found in runs.items():
        full = runs[about._replace(loss="eager")]
        assert len(found["losses"]) == 6 and found["evaluations"][-1]["held_out"] == found["final"]["held_out"]
        for quantity, value in found["final"].items():
            assert abs(value - full["final"][quantity]) <= value * budget(0.0, torch.bfloat16), (about, quantity)
    # The second setting starts from the final weights of the first one.
    learned, tuned = (runs[curves.Job(setting, "eager", 0)]["losses"] for setting in (curves.RANDOM, curves.TRAINED))
    assert learned[0] > np.log(512) > learned[-1] and tuned[0] < learned[0]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_verdict() -> None:
    final = {("eager", 0): 3.0, ("eager", 1): 3.1, ("hf_cce", 0): 3.05, ("hf_cce", 1): 3.15, ("reversed", 0): 3.2}
    runs = [
        {"setting": "s", "loss": name, "seed": seed, "final": {"held_out": value}, "evaluations": []}
        for (name, seed), value in final.items()
    ]
    summary = curves.summarize(runs)
    ours, other = (summary["s"][name]["held_out"] for name in ("hf_cce", "reversed"))
    assert ours["of_seeds"] == [3.05 - 3.0, 3.15 - 3.1] and len(other["of_seeds"]) == 1
    lines = tables.curve_rows({"summary": summary, "runs": runs})
    assert lines[2].endswith("| held-out text | 3.1000 | +0.0500 ± 0.0000 | +0.0500, +0.0500 | 0.1000 | yes |")
    assert lines[4].endswith("| held-out text | 3.2000 | +0.2000 | +0.2000 | 0.1000 | no |")


def test_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sizes = ["--shape", "16", "64", "128", "--device", "cpu", "--times", "1", "--peers", "hf_cce"]
    report = run(first, tmp_path / "a.json", *sizes)
    found = report["results"]["hf_cce"]
    assert found["first_s"] > 0 and found["later_s"] == [], found
    assert tables.first_rows(report)[2].startswith("| **hf_cce** |")
    steps = first.first_steps("hf_cce", (16, 64, 128), torch.device("cpu"), count=3)
    assert steps["first_s"] >= steps["install_s"] + steps["step_s"] and 0 < steps["slowest_later_s"] < steps["first_s"]


@pytest.mark.parametrize(("start", "slope", "limit"), [(2.0, 1.5, 23.0), (2.0, 1.5, 1.0), (0.1, 0.01, 79.0)])
def test_largest_batch_search(start: float, slope: float, limit: float) -> None:
    """The search takes few tries on slightly uneven peaks, and also tries the next batch."""
    seen: dict[int, float | None] = {}

    def grown(batch: int) -> float:
        return start + slope * (batch - 1) + 0.3 * slope * (batch % 3)

    def peak(batch: int) -> float | None:
        seen[batch] = grown(batch) if grown(batch) < 120 else None  # out of memory
        return seen[batch]

    found = largest._largest(limit, peak, seen)
    fitting = [b for b in range(1, 20_000) if grown(b) <= limit]
    assert len(seen) <= 14 and found + 1 in seen
    assert found == 0 if not fitting else (found in fitting and found + 1 not in fitting)


def test_peers_reset_filter_state() -> None:
    problem = bench.random_problem((96, 32, 300), torch.device("cpu"), torch.float32)
    fused, states = peers.FusedLoss(), []
    for _ in range(2):
        measure.Bench(problem, ("both",), lambda _: None).run({"hf_cce": fused}, 1)
        states += fused.states.values()
    assert len({id(state) for state in states}) == 4


def test_tokenizer_round_trip(text_file: str, tmp_path: Path) -> None:
    corpus = text.prepare(512, dataset=text_file, cache=tmp_path / "cache")
    ids = np.load(corpus.tokens_file)
    assert ids[-1] == corpus.tokenizer().token_to_id(text.END_OF_TEXT)
    assert corpus.tokenizer().decode(ids.tolist()) == Path(text_file).read_text("utf-8")
    messages: list[str] = []
    assert text.prepare(512, dataset=text_file, cache=tmp_path / "cache", progress=messages.append) == corpus
    assert messages == ["reading text"]  # everything else came from the cache
    (tmp_path / "a.txt").write_text("one two " * 100)
    (tmp_path / "b.md").write_text("three " * 100)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    folder = text.prepare(300, dataset=str(tmp_path), cache=tmp_path / "cache")
    assert folder.tokenizer().decode(np.load(folder.tokens_file).tolist()) == "one two " * 100 + "three " * 100
    drawn = [text.windows(corpus.tokens_file, (3, 2), 16, seed) for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="no such file or folder"):
        text.prepare(512, dataset=str(tmp_path / "nothing"))


def test_never_slower() -> None:
    for name in reversed(never_slower.LOSSES):
        case = never_slower.Case(130, 32, 500, "bfloat16", "cpu", "auto", False, name)
        row = never_slower.measure(case, pairs=1)
        assert row["full_ms"] > 0 and row["ours_ms"] > 0 and 0 < row["full_error"] < 0.1 and 0 < row["ours_error"] < 0.1
    slow = {**row, "full_ms": 1.0, "ours_ms": 1.11, "ours_error": 2 * row["full_error"]}
    assert never_slower.misses(slow) == ["time", "error"]
    large = {**slow, "ours_ms": 1.09, "ours_error": 0.0, "full_mib": 1.0, "ours_mib": 2.0}
    assert never_slower.misses(large) == ["memory"]
    drawn = never_slower.draw("cuda", 150, 0)
    assert drawn == never_slower.draw("cuda", 150, 0) and len(set(drawn)) == 150
    assert {case.loss for case in drawn} == set(never_slower.LOSSES)
    assert {case.dtype for case in drawn} == set(never_slower.DTYPES)
