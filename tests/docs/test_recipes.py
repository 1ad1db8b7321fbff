"""Every recipe starts, trains for three steps on a CPU, and tells the truth; CCE and full logits train the same."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from numerics import assert_as_good, relative_error

accelerate = pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIGS = sorted((RECIPES / "accelerate").glob("*.yaml"))
SMALL = ["--vocabulary", "512", "--hidden", "64", "--layers", "1", "--sequence", "64", "--steps", "3"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
TASKS = ["pretrain", "finetune", "lora"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def start(command: list[str], **environment: str) -> str:
    """Run ``command`` on the CPU; return its standard output."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **given, **environment}, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@functools.cache
def folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="hf_cce-recipes-"))


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Any:
    yield
    shutil.rmtree(folder(), ignore_errors=True)


@functools.cache
def trained(task: str, loss: str, config: str = "", batch: int = 2, launch: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON of ``recipes/train.py``: through accelerate with one of the configurations, or in this process."""
    target = folder() / f"{task}-{loss}-{config}.json"
    arguments = [*SMALL, "--task", task, "--loss", loss, "--batch", str(batch), "--json", str(target)]
    if not config:  # a reference; a process for each would take most of the time
        assert load("train").main([*arguments, "--cpu"]) == 0
        return json.loads(target.read_text("utf-8"))
    printed = start([*LAUNCH, f"recipes/accelerate/{config}.yaml", *launch, "recipes/train.py", *arguments])
    assert printed.count(f"task: {task}") == 1, "only the main process prints"
    return json.loads(target.read_text("utf-8"))


def losses(report: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([loss for _, loss in report["losses"]])


def check_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The first loss to rounding; the last, after two steps of Adam, which makes steps out of rounding, nearly."""
    a, b = losses(actual), losses(expected)
    assert_as_good(a[:1], b[:1], b[:1], "first loss")
    assert relative_error(a[-1:], b[-1:]) < 1e-4


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_the_same_with_cce_and_without(task: str) -> None:
    if task == "lora":
        pytest.importorskip("trl"), pytest.importorskip("peft")
    cce, eager = trained(task, "cce"), trained(task, "eager")
    check_same(cce, eager)
    assert cce["cce"]["fused"] == cce["cce"]["calls"] == 3 and cce["cce"]["materialised"] == 0
    assert eager["cce"] is None
    for report in (cce, eager):
        assert report["steps"] == len(report["losses"]) == 3 and report["tokens_per_second"] > 0
        assert 5 < report["first_loss"] < 8  # of 512 entries: near log 512 = 6.24


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_two_processes_train_as_one_with_twice_the_batch(task: str) -> None:
    if task == "lora":
        pytest.importorskip("trl"), pytest.importorskip("peft")
    report = trained(task, "cce", "cpu_ddp", 1, ("--main_process_port", "0"))
    assert report["processes"] == 2 and report["distributed"] == "MULTI_CPU"
    assert report["cce"]["fused"] == report["cce"]["calls"] == 3
    check_same(report, trained(task, "eager"))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu", "one_gpu", "ddp"])
def test_configurations_run_on_a_cpu(config: str) -> None:
    processes = 2 if config == "ddp" else 1
    launch = ("--num_processes", "2", "--main_process_port", "0") if config == "ddp" else ()
    report = trained("pretrain", "cce", config, 2 // processes, launch)
    precision = "no" if config == "cpu" else "bf16"
    assert report["processes"] == processes and report["mixed_precision"] == precision and report["cce"]["fused"] == 3
    reference = losses(trained("pretrain", "eager"))[:1]
    assert relative_error(losses(report)[:1], reference) < torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_slurm_starts_several_machines(tmp_path: Path) -> None:
    """A cluster of two nodes that are both this machine: the launchers meet, as they do on two."""
    for name, body in {
        "scontrol": "echo 127.0.0.1",
        "srun": 'shift\nSLURM_NODEID=1 "$@" &\nSLURM_NODEID=0 "$@" || exit\nwait $!',
        "accelerate": f'{shlex.quote(sys.executable)} -m accelerate.commands.accelerate_cli "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "here,here", "SLURM_NNODES": "2"}
    wanted = {"GPUS": "1", "PORT": port, "CONFIG": "recipes/accelerate/cpu_ddp.yaml"}
    target = tmp_path / "slurm.json"
    start(
        ["bash", "recipes/slurm.sh", *SMALL, "--batch", "1", "--json", str(target)],
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **slurm, **wanted,
    )  # fmt: skip
    report = json.loads(target.read_text("utf-8"))
    assert report["processes"] == 2
    check_same(report, trained("pretrain", "eager"))


@pytest.mark.slow
def test_log_probs_compares_both_ways(tmp_path: Path) -> None:
    target = tmp_path / "log_probs.json"
    sizes = ["--tokens", "64", "--vocabulary", "16384", "--hidden", "64", "--repeats", "2"]
    printed = start([sys.executable, "recipes/log_probs.py", *sizes, "--json", str(target)])
    report = json.loads(target.read_text("utf-8"))
    ours, theirs = report["rows"]["linear_log_probs"], report["rows"]["full logits"]
    assert "Largest difference" in printed and "linear_log_probs" in printed
    assert ours["ms"] > 0 and theirs["ms"] > 0
    if ours["step_bytes"] is not None:
        assert ours["step_bytes"] < theirs["step_bytes"] / 2
    assert 0 <= max(report["largest_difference"].values()) < 1e-4
    assert report["relative_difference_of_gradients"] < 1e-5
    assert relative_error(torch.tensor(ours["loss"]), torch.tensor(theirs["loss"])) < 1e-5


def test_a_step_by_log_probs_is_exact() -> None:
    """In float64: log p, entropy and every gradient of the policy, with completions of different lengths."""
    recipe = load("log_probs")
    args = recipe.parse(["--tokens", "12", "--vocabulary", "300", "--hidden", "64", "--dtype", "float64"])
    step = recipe.Step(args, torch.device("cpu"))
    assert 0 < step.mask.sum() < step.mask.numel() and step.advantages.std() > 0
    found = {}
    for way in (recipe.fused, recipe.full_logits):
        loss, log_probs, entropy = step.run(way)
        found[way] = torch.cat([loss[None], log_probs.flatten(), entropy.flatten(), step.gradients()])
        assert log_probs.shape == entropy.shape == (8, 12) and step.gradients().abs().sum() > 0
    ours, theirs = found.values()
    assert_as_good(ours, theirs, theirs, "a step")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))  # raises on unknown keys of the first level, and on no others
    given = yaml.safe_load(path.read_text("utf-8"))
    known = {action.dest for action in launch_command_parser()._actions}
    for section, prefix in (("fsdp_config", "fsdp_"), ("deepspeed_config", "")):
        for key in given.get(section, {}):
            assert key.removeprefix(prefix) in known or f"{prefix}{key.removeprefix(prefix)}" in known, key
    kinds = {"cpu": "NO", "one_gpu": "NO", "ddp": "MULTI_GPU", "cpu_ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type.value == {**kinds, "zero3": "DEEPSPEED"}[path.stem]
    assert config.use_cpu is path.stem.startswith("cpu") and config.num_machines == 1
    assert config.mixed_precision == ("no" if config.use_cpu else "bf16")
    assert config.fsdp_config.get("fsdp_version") == (2 if path.stem == "fsdp2" else None)
    assert config.deepspeed_config.get("zero_stage") == (3 if path.stem == "zero3" else None)


def test_the_configurations_are_all_there() -> None:
    assert {path.stem for path in CONFIGS} == {"cpu", "cpu_ddp", "one_gpu", "ddp", "fsdp2", "zero3"}


def commands() -> list[list[str]]:
    """The command lines of recipes/README.md."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (RECIPES / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_commands_of_the_readme_parse() -> None:
    from accelerate.commands.launch import launch_command_parser

    names = set()
    for command in commands():
        script = next(i for i, word in enumerate(command) if word.startswith("recipes/") and not word.endswith(".yaml"))
        name = Path(command[script]).stem
        load("log_probs" if name == "log_probs" else "train").parse(
            command[script + 1 :]
        )  # exits on what it does not know
        if command[0] == "accelerate":
            config = launch_command_parser().parse_args(command[2:]).config_file
            assert (ROOT / config).exists()
            name = Path(config).stem
        names.add(name)
    assert names == {path.stem for path in CONFIGS} | {"slurm", "log_probs"}


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--loss", "liger", "--cpu"], {}, "pip install liger-kernel"),
        (["--loss", "liger", "--task", "lora"], {}, "TRL's SFTTrainer has a fused head of its own"),
        (["--cpu"], {"ACCELERATE_USE_FSDP": "true"}, "FSDP needs GPUs"),
        (["--hidden", "100"], {}, "--hidden must be a multiple of 64"),
        (["--cpu", "--dataset", "./no/such.txt"], {}, "no such file or folder"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], environment: dict[str, str], words: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load("train").main([*arguments, "--steps", "1"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line


@pytest.mark.slow
def test_what_one_task_saves_the_next_one_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretrained, then fine-tuned, then LoRA on rows for SFTTrainer; accumulation and checkpointing on the way."""
    pytest.importorskip("trl"), pytest.importorskip("peft")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    recipe, rows = load("train"), tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"def add{i}(a):", "completion": f"\n    return a + {i}" * (1 + i)}) + "\n"
            for i in range(6)
        ),
        "utf-8",
    )
    first, second, third = (str(tmp_path / name) for name in ("pretrained", "finetuned", "adapter"))

    def run(*arguments: str) -> dict[str, Any]:
        target = tmp_path / "report.json"
        assert recipe.main([*SMALL, "--cpu", "--batch", "2", "--json", str(target), *arguments]) == 0
        return json.loads(target.read_text("utf-8"))

    text = str(ROOT / "tests")
    run("--task", "pretrain", "--dataset", text, "--gradient-accumulation", "2", "--steps", "30", "--output", first)
    tuned = run(
        "--task", "finetune", "--model", first, "--dataset", text, "--gradient-checkpointing", "--output", second
    )
    assert tuned["first_loss"] < 6.1 < 6.23  # it has learnt something: log 512 = 6.24
    adapted = run("--task", "lora", "--model", second, "--dataset", str(rows), "--output", third)
    assert adapted["tokens_per_second"] is None  # rows have no fixed number of tokens
    assert adapted["cce"]["fused"] == adapted["cce"]["calls"] == 3
    assert (Path(third) / "adapter_model.safetensors").exists() and (Path(second) / "tokenizer.json").exists()
