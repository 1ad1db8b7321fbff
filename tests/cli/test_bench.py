"""The benchmark: what it writes, that its judge is right, that heads are trained once, and how it fails."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics import budget, relative_error
from typer.testing import CliRunner, Result

from hf_cce import CCEConfig
from hf_cce.bench import bench_plots, first, machine, measure
from hf_cce.bench.heads import HEADS, flat_head, train_head
from hf_cce.bench.measure import Bench, Problem, exact_gradients
from hf_cce.bench.peers import BUILDERS, eager, make_peers, make_sweep, sweep_name
from hf_cce.cli.app import app
from hf_cce.cli.bench import _busy

HAS_FILTER = "gradient_filter" in {field.name for field in fields(CCEConfig)}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little real text: one module of the standard library."""
    path = tmp_path_factory.mktemp("words") / "argparse.txt"
    path.write_text(Path(sys.modules["argparse"].__file__ or "").read_text("utf-8"), "utf-8")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def hf_cce(cache: Path, *arguments: str) -> Result:
    environment = {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"}
    return CliRunner().invoke(app, ["bench", *arguments], env=environment)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_torch_s_own_is_asked_for_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options it makes full logits, and would be compared as what it is not."""
    given: list[Any] = []
    own = torch.nn.functional.linear_cross_entropy

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs.get("options"))
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", spy)
    losses, missing = make_peers(["torch F.linear_cross_entropy"])
    assert not missing
    hidden_states, weight, labels = torch.randn(64, 16), torch.randn(300, 16), torch.arange(64)
    (loss,) = losses.values()
    found, wanted = loss(hidden_states, weight, labels), eager(hidden_states, weight, labels)
    assert given[0] is not None
    assert relative_error(found, wanted) <= budget(0.0, torch.float32)


OTHERS = {"trl": "trl", "torch F.linear_cross_entropy": "torch"}  # those that run on a CPU, and what they come with


@pytest.mark.parametrize("peer", OTHERS)
def test_a_peer_on_a_cpu_is_measured_as_what_it_is(peer: str, cache: Path, tmp_path: Path) -> None:
    """Its own code, not ours or full logits by its name: as exact as full logits are, and its version in the file."""
    why = make_peers([peer])[1].get(peer)
    if why:
        pytest.skip(why)
    path = tmp_path / "b.json"
    shape = ["--shape", "128,64,3001", "--repeats", "1", "--device", "cpu"]
    done = hf_cce(cache, *shape, "--peers", f"eager,{peer}", "--json", str(path), "--quiet")
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text("utf-8"))
    assert report["versions"][OTHERS[peer]] and not report["missing"]
    (result,) = report["results"].values()
    for name in ("loss_error", "grad_hidden_error", "grad_weight_error", "frozen_grad_hidden_error"):
        row, full = result["rows"][peer], result["rows"]["eager"]
        assert row[name] <= budget(full[name], torch.float32), name
    assert {"ms", "forward_ms", "frozen_ms"} <= set(row) and "filter" not in row


def test_another_trl_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trl.trainer.utils")

    function = utils._ChunkedLogProbFunction
    # A model that was patched earlier in this process has put something of ours in its place.
    original = getattr(function, "original", function)

    class Spy(original):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(*args: Any) -> Any:
            raise AssertionError("another signature: not to be called")

    losses, missing = make_peers(["trl"])
    assert set(losses) == {"trl"} and not missing
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Spy)
    assert "1.16" in make_peers(["trl"])[1]["trl"]


def test_a_peer_whose_import_breaks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quack 0.6.5 raises a TypeError when it lies in no folder called site-packages."""
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "linear_cross_entropy.py").write_text("raise TypeError('in no such place')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        losses, missing = make_peers(["quack", "eager"])
    finally:  # what is no Quack must not stay for other tests
        for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
            del sys.modules[name]
    assert set(losses) == {"eager"}
    assert missing["quack"] == "quack.linear_cross_entropy cannot be imported: TypeError: in no such place"


def test_whole_bench_and_then_the_head_from_the_cache(words: Path, cache: Path, tmp_path: Path) -> None:
    numbers, table, picture = tmp_path / "new" / "b.json", tmp_path / "b.md", tmp_path / "b.png"
    head = ["--device", "cpu", "--head", "V512:256", "--head-seconds", "2", "--dataset", str(words)]
    done = hf_cce(
        cache, *head, "--shape", "64,64,512 128,64,512", "--shape", "128,64,4096", "--repeats", "2", "--sweep", "1e-3",
        "--peers", "hf_cce,hf_cce exact", "--peers", "eager", "--json", str(numbers), "--markdown", str(table),
        "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(numbers.read_text("utf-8"))
    assert report["device"].startswith(machine.cpu_name()) and report["dtype"] == "float32"
    assert report["versions"]["torch"] == version("torch")
    titles = ["flat N=64 D=64 V=512", "flat N=128 D=64 V=512", "flat N=128 D=64 V=4096", "trained V512 N=256"]
    assert list(report["results"]) == titles
    wanted = {"hf_cce", "eager"} | ({"hf_cce exact", sweep_name(1e-3)} if HAS_FILTER else set())
    assert set(report["missing"]) == (set() if HAS_FILTER else {"hf_cce exact", sweep_name(1e-3)})
    for result in report["results"].values():
        assert set(result["rows"]) == wanted
        assert result["three_gemms_ms"] == result["gemms_ms"]["both"] > 0
        for name, row in result["rows"].items():
            assert "failed" not in row, row
            for mode, prefix in measure.PREFIX.items() if name in ("hf_cce", "eager") else [("both", "")]:
                least, most = row[f"{prefix}ms_spread"]
                assert 0 < least <= row[f"{prefix}ms"] <= most
                assert row[f"{prefix}gemm_multiple"] == row[f"{prefix}ms"] / result["gemms_ms"][mode]
        for error in ("loss_error", "grad_hidden_error", "grad_weight_error", "frozen_grad_hidden_error"):
            theirs = result["rows"]["eager"][error]
            assert result["rows"]["hf_cce"][error] <= budget(theirs, torch.float32), error
    if sys.platform == "linux":
        rows = report["results"]["flat N=128 D=64 V=4096"]["rows"]
        logits = 128 * 4096 * 4 / measure.MIB
        assert logits <= rows["eager"]["extra_mib"] <= 20 * logits
    about = report["heads"]["V512"]
    assert not about["from_cache"] and about["source"] == "argparse.txt" and about["steps"] > 3
    text = table.read_text("utf-8")
    assert text in done.output
    for expected in (*titles, "| hf_cce |", "| eager |", "Head V512: 2 layers trained for 2 s", "× 3", "float64"):
        assert expected in text, expected
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b.json", "b.md", "b.png", "new"]

    (file,) = (cache / "hf_cce").glob("head-V512-*.pt")
    made = file.stat().st_mtime_ns
    again = hf_cce(cache, *head, "--peers", "hf_cce", "--modes", "forward", "--repeats", "1", "--json", str(numbers))
    assert again.exit_code == 0, again.output
    assert "head V512: from the cache" in again.output
    assert file.stat().st_mtime_ns == made and len(list((cache / "hf_cce").glob("head-*"))) == 1
    second = json.loads(numbers.read_text("utf-8"))
    assert second["heads"]["V512"]["held_out_loss"] == about["held_out_loss"]
    row = second["results"]["trained V512 N=256"]["rows"]["hf_cce"]
    assert row["forward_ms"] > 0 and "ms" not in row and "grad_hidden_error" not in row

    short = hf_cce(cache, *head[:3], "V512:32768", *head[4:])
    assert short.exit_code == 1
    assert "not enough held-out tokens; the text (argparse.txt) gave" in short.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "hf_cce,nobody"], "unknown peer 'nobody'; known: hf_cce, hf_cce exact"),
        (["--shape", "8192,1024"], "--shape '8192,1024': expected N,D,V"),
        (["--shape", "8,0,99"], "--shape '8,0,99': N and D must be at least 1"),
        (["--head", "V512"], "--head 'V512': expected NAME:TOKENS"),
        (["--head", "V7:100"], "unknown head 'V7'; known: V512"),
        (["--head", "V512:99999"], "a trained head keeps 32768 held-out tokens at most"),
        (["--modes", "both,sideways"], "unknown mode 'sideways'; known: forward"),
        (["--sweep", "1e-3,much"], "--sweep '1e-3,much': expected numbers"),
        (["--modes", ""], "no mode is left to measure; known: forward"),
        (["--plot", "bench.xyz"], "--plot bench.xyz: the name must end in one of ."),
        (["--json", "SHORT/bench.json"], "short.txt is no folder"),
        (["--sweep", "0.5"], "each gradient filter lies above 0, and 0.1 is the most"),
        (["--sweep", "2"], "each gradient filter lies above 0, and 0.1 is the most"),
        (["--device", "nonsense"], "--device 'nonsense': expected cpu, cuda"),
        (["--device", "cuda"], "sees no NVIDIA GPU here; try --device cpu"),
        (["--head", "V512:8", "--dataset", "SHORT"], "to hold a fifth out, it needs at least 640"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], message: str, cache: Path, tmp_path: Path) -> None:
    if arguments == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is one")
    (tmp_path / "short.txt").write_text("one two three " * 20)
    device = [] if "--device" in arguments else ["--device", "cpu"]
    done = hf_cce(cache, *(a.replace("SHORT", str(tmp_path / "short.txt")) for a in arguments), *device)
    assert done.exit_code == 1
    assert message in done.stderr
    assert isinstance(done.exception, SystemExit)


def small(tokens: int = 96) -> Problem:
    return Problem(*flat_head(tokens, 32, 300, torch.device("cpu"), torch.float32))


def test_the_judge_is_right() -> None:
    problem = small()
    hidden, weight = (x.double().requires_grad_() for x in (problem.hidden_states, problem.weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), problem.labels)
    loss.backward()
    for value, expected in zip(exact_gradients(problem, torch.float64), (loss, hidden.grad, weight.grad), strict=True):
        assert expected is not None
        assert relative_error(value, expected) <= budget(0.0, torch.float64)


def test_a_loss_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise NotImplementedError("not on a Saturday")

    monkeypatch.setattr(measure, "filter_stats", lambda loss: {"kept": 0.5} if loss is eager else {})
    said: list[str] = []
    result = Bench(small(), ["both", "frozen"], torch.float64, said.append).run({"a": broken, "b": eager}, 1)
    assert result["rows"]["a"] == {"failed": "NotImplementedError: not on a Saturday"}
    assert result["rows"]["b"]["ms"] > 0 and result["rows"]["b"]["frozen_ms"] > 0
    assert result["rows"]["b"]["filter"] == {"kept": 0.5}
    assert "forward_ms" not in result["rows"]["b"]
    assert said[-1] == "timing, round 1 of 1"


def test_what_was_learnt_of_one_head_is_forgotten_at_the_next() -> None:
    loss = make_peers(["hf_cce"])[0]["hf_cce"]
    states = []
    for _ in range(2):
        Bench(small(), ["both", "frozen"], torch.float64, lambda _: None).run({"hf_cce": loss}, 1)
        states += loss.states.values()  # type: ignore[attr-defined]
    assert len({id(state) for state in states}) == 4


def test_every_peer_is_made_or_missing_with_a_reason() -> None:
    losses, missing = make_peers()
    assert set(losses) | set(missing) == set(BUILDERS) and not set(losses) & set(missing)
    assert all(missing.values())
    assert {"hf_cce", "hf_cce 64 MiB", "eager"} <= set(losses)
    swept, reasons = make_sweep([1e-3])
    assert set(swept if HAS_FILTER else reasons) == {"hf_cce filter 0.001"}


def test_a_trained_head_is_what_its_model_saw(words: Path, cache: Path) -> None:
    head = train_head(HEADS["V512"], seconds=2, device="cpu", dataset=str(words), cache=cache / "hf_cce")
    n, (v, d) = len(head.labels), head.weight.shape
    assert (v, d) == (512, 64) and head.hidden_states.shape == (n, d) and head.counts.shape == (v,)
    assert head.hidden_states.dtype == head.weight.dtype == torch.bfloat16
    assert int(head.counts.sum()) > 3 * n and head.about["held_out_tokens"] == n
    loss = eager(head.hidden_states, head.weight, head.labels)
    assert relative_error(loss, torch.tensor(head.about["held_out_loss"])) <= budget(0.0, torch.bfloat16)
    if head.about["steps"] >= 50:  # a busy machine does not get that far in two seconds
        assert loss < torch.log(torch.tensor(512.0))


def report(*, modes: str = "both") -> dict[str, Any]:
    """What a GPU's report looks like, with invented figures."""
    results: dict[str, Any] = {}
    for kind, n, v in (("flat", 128, 512), ("flat", 1024, 512), ("flat", 1024, 2048), ("trained", 1024, 512)):
        prefix = measure.PREFIX[modes]
        base = {f"{prefix}ms": n * v / 1e5, f"{prefix}gemm_multiple": 1.5, "extra_mib": n * v / 1e5}
        errors = {"grad_hidden_error": 1e-3, "grad_weight_error": 2e-3}
        rows: dict[str, Any] = {"hf_cce": base | errors, "eager": base | errors, "liger": {"failed": "no"}}
        if kind == "trained":
            rows["hf_cce"]["filter"] = {"kept": 0.3}
            for i, x in enumerate((1e-3, 1e-2)):
                rows[sweep_name(x)] = base | errors | {"filter": {"kept": 0.5 - 0.2 * i}}
        about = {"kind": kind, "N": n, "D": 64, "V": v}
        results[f"{kind} N={n} V={v}"] = {"problem": about, "gemms_ms": {modes: 1.0}, "rows": rows}
        if modes == "both":
            results[f"{kind} N={n} V={v}"]["three_gemms_ms"] = 1.0
    sweep = {sweep_name(x): x for x in (1e-3, 1e-2)}
    return {"device": "a GPU", "dtype": "bfloat16", "versions": {"torch": "2"}, "sweep": sweep, "results": results}


@pytest.mark.parametrize(
    ("used", "average", "said"),
    [(0.1, 9.0, None), (0.5, 0.0, "load 2.0, 4"), (None, 1.9, None), (None, 2.1, "load 2.1, 4")],
)
def test_a_machine_is_busy_by_what_runs_and_not_by_what_has_ended(
    used: float | None, average: float, said: str | None
) -> None:
    message = _busy({"cpu_used_by_others_before": used, "load_average_before": average}, 4)
    assert message is None if said is None else said in (message or "")


def test_what_others_use_before_is_unknown_where_no_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 <= (machine.used_before(0.3) or 0.0) <= 1.0
    monkeypatch.setattr(machine.Others, "_seconds", staticmethod(lambda: (0.0, 0.0, 0.0)))
    assert machine.used_before(0.0) is None and machine.Others().share() == 0.0

    def unreadable() -> tuple[float, float, float]:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(machine.Others, "_seconds", staticmethod(unreadable))
    assert machine.used_before(0.0) is None


def test_panels_show_what_was_measured(tmp_path: Path) -> None:
    whole = report()
    results = whole["results"].values()
    title, times = bench_plots.time_over_tokens(results) or ("", {})
    assert title == "flat head, D = 64, V = 512"
    assert set(times) == {"hf_cce", "eager", bench_plots.GEMMS_ALONE}
    assert [n for n, _ in times["hf_cce"]] == [128, 1024]
    title, memory = bench_plots.memory_over_vocabulary(results) or ("", {})
    assert title == "1,024 tokens" and [v for v, _ in memory["eager"]] == [512, 2048]
    errors = bench_plots.error_over_kept(whole)
    assert errors is not None and list(errors) == ["trained N=1024 V=512"]
    assert errors["trained N=1024 V=512"]["hidden"] == [(0.3, 1e-3), (0.5, 1e-3)]
    bench_plots.draw_bench(whole, tmp_path / "whole.svg")
    drawn = (tmp_path / "whole.svg").read_text("utf-8")
    for words_ in ("tokens N", "vocabulary V", "Error over the share kept"):
        assert words_ in drawn, words_
    assert "multiple of" not in drawn


def test_bars_where_no_panel_has_figures(tmp_path: Path) -> None:
    few = report(modes="forward")
    first = next(iter(few["results"]))
    few["results"] = {first: few["results"][first]}
    bench_plots.draw_bench(few, tmp_path / "few.svg")
    drawn = (tmp_path / "few.svg").read_text("utf-8")
    assert "multiple of the GEMM of a dense loss (forward)" in drawn and "tokens N" not in drawn


def test_the_name_of_the_processor() -> None:
    name = machine.cpu_name()
    assert name.strip()
    if os.path.exists("/proc/cpuinfo") and "model name" in (text := Path("/proc/cpuinfo").read_text()):
        assert f"\t: {name}\n" in text
    assert machine.device_name(torch.device("cpu")).startswith(name)


def test_one_thread_is_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, said in ((1, ", 1 thread)"), (2, ", 2 threads)")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert machine.device_name(torch.device("cpu")).endswith(said)


@pytest.mark.gpu
def test_on_a_gpu(words: Path, cache: Path, tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--shape", "256,128,4096", "--head", "V512:512", "--head-seconds", "2"]
    peers = ["--peers", "hf_cce,eager,torch.compile", "--dataset", str(words), "--repeats", "2"]
    done = hf_cce(cache, *arguments, *peers, "--json", str(tmp_path / "b.json"))
    assert done.exit_code == 0, done.output
    for result in json.loads((tmp_path / "b.json").read_text())["results"].values():
        for row in result["rows"].values():
            assert row["ms"] > 0 and row["frozen_ms"] > 0 and row["wall_ms"] > 0 and row["extra_mib"] >= 0
        ours, theirs = result["rows"]["hf_cce"], result["rows"]["eager"]
        for error in ("grad_hidden_error", "grad_weight_error"):
            assert ours[error] <= budget(theirs[error], torch.bfloat16)


def test_first_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first.json"
    shape = ["--shape", "8", "16", "40"]
    assert (
        first.main([*shape, "--peers", "hf_cce", "apple cce", "--times", "2", "--device", "cpu", "--json", str(path)])
        == 0
    )
    report = json.loads(path.read_text("utf-8"))
    assert report["command"].startswith("python -m hf_cce.bench.first --shape 8 16 40 --peers hf_cce 'apple cce'")
    ours = report["results"]["hf_cce"]
    assert len(ours["later_s"]) == 1 and ours["first_s"] > 0 and ours["runs"][0]["second_s"] > 0
    assert "| hf_cce | " in capsys.readouterr().out
    assert (
        first.main(
            [*shape, "--step", "--peers", "eager", "hf_cce", "--times", "1", "--device", "cpu", "--json", str(path)]
        )
        == 0
    )
    report = json.loads(path.read_text("utf-8"))
    assert report["of"].startswith("training step") and set(report["results"]) == {"eager", "hf_cce"}
    assert all(result["runs"][0]["install_s"] > 0 and result["first_s"] > 0 for result in report["results"].values())
    with pytest.raises(SystemExit):
        first.main([*shape, "--step", "--peers", "apple cce"])
    assert "'apple cce' is none of eager" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            first.main([*shape, "--device", "cuda"])
        assert "no CUDA device" in capsys.readouterr().err
