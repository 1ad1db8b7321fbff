"""Every command of recipes/README.md trains or parses, offline on a CPU; losses are the same with and without hf_cce."""

import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from command import ROOT, environment, load_module, run
from numerics import assert_accurate, relative_error

accelerate, trl = pytest.importorskip("accelerate"), pytest.importorskip("trl")
pytest.importorskip("datasets"), pytest.importorskip("peft")

RECIPES = ROOT / "recipes"
CONFIGS = sorted((RECIPES / "accelerate").glob("*.yaml"))
PROCESSES = "cpu_ddp"  # needs processes of its own


def load(name: str) -> Any:
    return load_module(RECIPES / f"{name}.py")


def commands(title: str) -> list[list[str]]:
    text = (RECIPES / "README.md").read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def split(command: list[str]) -> tuple[str | None, str, list[str]]:
    """Split a command into the names of its accelerate configuration and script, and the script's arguments."""
    script = next(i for i, word in enumerate(command) if re.fullmatch(r"recipes/\w+\.py", word))
    configs = [Path(word).stem for word in command[:script] if word.endswith(".yaml")]
    return configs[0] if configs else None, Path(command[script]).stem, command[script + 1 :]


@pytest.fixture
def recipe_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> Path:
    """Return an empty folder to train in, with tiny.py's files in runs/tiny."""
    if torch.cuda.is_available():
        pytest.skip("the recipes would take the GPU, and their figures here are those of a CPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `accelerate launch` sets it with cpu.yaml
    load("tiny").make(tmp_path / "runs/tiny")
    return tmp_path


def logged(trainer: Any, key: str) -> list[float]:
    return [float(row[key]) for row in trainer.state.log_history if key in row]


def train(script: str, *arguments: str, resumed: int = 0) -> Any:
    """Run a recipe and return its trainer. Check that no step since the resumed one materialized logits."""
    trainer = load(script).main(list(arguments))
    if not os.environ.get("HF_CCE_DISABLE"):
        steps = trainer.state.global_step - resumed
        assert logged(trainer, "cce/fused")[-1] >= steps > 0 and logged(trainer, "cce/materialized")[-1] == 0
    return trainer


def test_try_it_commands_train_in_order(recipe_dir: Path) -> None:
    done: dict[str, Any] = {}
    for config, script, arguments in map(split, commands("Try it")):
        if script in ("tiny", "log_probs") or config == PROCESSES:  # in the fixture, or tested separately
            continue
        assert config == "cpu"
        folder = arguments[arguments.index("--output_dir") + 1]
        done[folder] = train(script, *arguments)
    names = ("pretrained", "full", "lora", "grpo", "distilled")
    pretrained, full, lora, grpo, distilled = (done[f"runs/{name}"] for name in names)

    losses = logged(pretrained, "loss")
    assert 5.3 < losses[0] < 5.7 and losses[-1] < losses[0] - 0.1  # 260 entries: starts near log 260 = 5.56
    assert next(pretrained.model.parameters()).dtype == torch.float32
    assert len(logged(full, "eval_loss")) == 2 and (recipe_dir / "runs/full/chat_template.jinja").exists()
    trained = [name for name, parameter in lora.model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert (recipe_dir / "runs/lora/adapter_model.safetensors").exists() and lora.args.packing
    assert len(logged(distilled, "entropy")) == 2 and min(logged(distilled, "loss")) > 0
    assert len(logged(grpo, "reward")) == 2 and (recipe_dir / "runs/grpo/model.safetensors").exists()


CHAT = ["--model_name_or_path", "runs/tiny/model", "--dataset_name", "runs/tiny/chat", "--output_dir", "out"]
TEXT = ["--model_name_or_path", "runs/tiny/model", "--dataset_name", "runs/tiny/text.txt", "--output_dir", "out"]
SHORT = ["--max_steps", "3", "--logging_steps", "1"]
RUNS = {
    "pretrain": ["pretrain", *TEXT, *SHORT, "--sequence_length", "64", "--gradient_accumulation_steps", "2"],
    "continued": ["pretrain", *TEXT, *SHORT, "--sequence_length", "64", "--continued", "--gradient_checkpointing"],
    "sft_assistant": ["sft", *CHAT, *SHORT, "--assistant_only_loss", "--use_peft", "--dtype", "float32"],
}


@pytest.mark.parametrize("run", RUNS)
def test_losses_match_unpatched(run: str, recipe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/docs/test_benchmarks.py::test_steps_with_recipe trains by recipes/sft.py with all weights, and with pictures."""
    ours = logged(train(*RUNS[run]), "loss")
    monkeypatch.setenv("HF_CCE_DISABLE", "1")
    plain = train(*RUNS[run])
    theirs = logged(plain, "loss")
    assert len(ours) == len(theirs) == 3 and not logged(plain, "cce/fused")
    a, b = torch.tensor(ours), torch.tensor(theirs)
    assert_accurate(a[:1], b[:1], b[:1], "first loss")
    assert relative_error(a[-1:], b[-1:]) < 1e-4  # Adam amplifies rounding differences


def test_run_resumes_from_checkpoint(recipe_dir: Path) -> None:
    whole = ["--max_steps", "4", "--logging_steps", "1", "--save_steps", "2", "--learning_rate", "1e-2"]
    first = logged(train("sft", *CHAT, *whole), "loss")
    again = train("sft", *CHAT[:-1], "again", *whole, "--resume_from_checkpoint", "out/checkpoint-2", resumed=2)
    assert again.state.global_step == 4
    assert relative_error(torch.tensor(logged(again, "loss")[2:]), torch.tensor(first[2:])) < 1e-4
    assert abs(first[1] - first[3]) > 1e-2  # a restarted run would not have these losses


def test_custom_reward(recipe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe_dir / "my_rewards.py").write_text(
        "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n", "utf-8"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    prompts = [*CHAT[:3], "runs/tiny/prompts.jsonl", "--output_dir", "out", "--max_completion_length", "8"]
    trainer = train("grpo", *prompts, "--reward", "my_rewards.short", "--max_steps", "1", "--logging_steps", "1")
    assert -40 < logged(trainer, "reward")[0] < 0


def test_qlora(recipe_dir: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trainer = train("sft", *CHAT, *SHORT, "--use_peft", "--load_in_4bit", "--lora_target_modules", "all-linear")
    assert any(isinstance(parameter, bitsandbytes.nn.Params4bit) for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("script", "row", "message"),
    [
        (
            "sft",
            {"prompt": "a", "answer": "b"},
            "takes messages, prompt .* without completions are for recipes/grpo.py",
        ),
        ("sft", {"chosen": "a", "rejected": "b"}, "has chosen, rejected. Preferences are for TRL's DPOTrainer"),
        ("sft", {"content": "a"}, "has content. recipes/pretrain.py takes text in any column: --text_column"),
        ("pretrain", {"messages": []}, "takes text; .* has messages. Such rows are for recipes/sft.py"),
        ("pretrain", {"prompt": "a", "completion": "b"}, "Such rows are for recipes/sft.py"),
        ("pretrain", {"content": "a"}, "has content. Name the column of the text: --text_column"),
        ("grpo", {"messages": []}, "takes prompt; .* has messages. Such rows are for recipes/sft.py"),
        ("grpo", {"text": "a"}, "Such rows are for recipes/pretrain.py"),
        ("distill", {"messages": []}, "takes prompt; .* has messages. Such rows are for recipes/sft.py"),
        ("grpo", {"prompt": "a"}, "needs a column answer, .* --reward"),
    ],
)
def test_wrong_data_names_the_right_recipe(script: str, row: Any, message: str, recipe_dir: Path) -> None:
    (recipe_dir / "rows.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    teacher = ["--teacher_model_name_or_path", CHAT[1]] if script == "distill" else []
    with pytest.raises(SystemExit, match=message):
        load(script).main([*CHAT[:3], "rows.jsonl", "--output_dir", "out", *teacher])


def test_missing_split_is_named(recipe_dir: Path) -> None:
    evaluates = ["--eval_strategy", "steps"]
    with pytest.raises(SystemExit, match="has the splits train, but not test"):
        load("sft").main([*CHAT[:3], "runs/tiny/chat/train.jsonl", "--output_dir", "out", *evaluates])
    with pytest.raises(SystemExit, match="has the splits train, test, but not validation"):
        load("pretrain").main([*CHAT, "--text_column", "messages", *evaluates])


def test_default_precision_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a flag, float16 if bfloat16 is not supported; `accelerate launch` takes precedence."""
    for script in ("sft", "pretrain", "grpo", "distill"):
        recipe = load(script)
        for capability, precision in (((7, 5), "fp16"), ((8, 0), "bf16")):
            with monkeypatch.context() as context:
                context.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
                context.setattr(torch.accelerator, "is_available", lambda: True)
                context.setattr(torch.cuda, "is_available", lambda: True)
                context.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
                found = recipe.machine_defaults()
                assert found["fp16"] is (precision == "fp16") and found["use_cpu"] is False
                assert found["bf16"] in ((True, None) if precision == "bf16" else (False,))
                context.setenv("ACCELERATE_MIXED_PRECISION", "no")
                assert recipe.machine_defaults() == {"use_cpu": False, "fp16": False, "bf16": False}


class Parsed(Exception):
    pass


def test_gpu_commands_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The flags of the recipes and of accelerate parse, and every configuration appears in a command."""
    monkeypatch.chdir(tmp_path)
    names: set[str | None] = set()
    for command in [*commands("With your model, on GPUs"), *commands("Try it")]:
        config, script, arguments = split(command)
        names.add(config)
        if script in ("tiny", "log_probs"):
            continue
        recipe = load(script)
        monkeypatch.setattr(recipe, "read_stream" if script == "pretrain" else "read_data", Mock(side_effect=Parsed))
        with pytest.raises(Parsed):
            recipe.main(arguments)
        if command[0] == "accelerate":
            assert (ROOT / launch_command_parser().parse_args(command[2:]).config_file).exists()
    assert names == {path.stem for path in CONFIGS} | {None}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_slurm_script_trains_on_two_nodes(recipe_dir: Path) -> None:
    """A cluster whose two nodes are both this machine: they train like one process with twice the batch."""
    bin_folder = recipe_dir / "bin"
    bin_folder.mkdir()
    for name, body in {
        "scontrol": "echo 127.0.0.1",
        "srun": 'shift\nSLURM_NODEID=1 "$@" &\nSLURM_NODEID=0 "$@" || exit\nwait $!',
        "accelerate": f'{shlex.quote(sys.executable)} -m accelerate.commands.accelerate_cli "$@"',
    }.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n", "utf-8")
        (bin_folder / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    text = [str(recipe_dir / word) if word.startswith("runs/") else word for word in TEXT]
    one = [*text[:-1], str(recipe_dir / "one"), *SHORT, "--sequence_length", "64", "--per_device_train_batch_size"]
    two = ["recipes/pretrain.py", *text[:-1], str(recipe_dir / "two"), *one[6:], "1", "--save_steps", "3"]
    wanted = {"GPUS": "1", "PORT": port, "CONFIG": f"recipes/accelerate/{PROCESSES}.yaml", "OMP_NUM_THREADS": "1"}
    wanted |= {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "here,here", "SLURM_NNODES": "2"}
    given = {key: value for key, value in environment(".").items() if not key.startswith("ACCELERATE_")}
    done = run(["bash", "recipes/slurm.sh", *two], given | slurm | wanted)
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads((recipe_dir / "two/checkpoint-3/trainer_state.json").read_text("utf-8"))
    losses = torch.tensor([row["loss"] for row in state["log_history"] if "loss" in row])
    single = torch.tensor(logged(train("pretrain", *one, "2"), "loss"))
    assert_accurate(losses[:1], single[:1], single[:1], "first loss")
    assert relative_error(losses[-1:], single[-1:]) < 1e-4


@pytest.mark.slow
def test_log_probs_compares_implementations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "log_probs.json"
    sizes = ["--tokens", "64", "--vocabulary", "16384", "--hidden", "64", "--repeats", "2", "--device", "cpu"]
    assert load("log_probs").main([*sizes, "--json", str(target)]) == 0
    report = json.loads(target.read_text("utf-8"))
    ours, theirs = report["rows"]["linear_log_probs"], report["rows"]["full logits"]
    assert "Largest difference" in capsys.readouterr().out and ours["ms"] > 0 and theirs["ms"] > 0
    assert 0 <= max(report["largest_difference"].values()) < 1e-4
    assert report["relative_difference_of_gradients"] < 1e-5
    assert relative_error(torch.tensor(ours["loss"]), torch.tensor(theirs["loss"])) < 1e-5


def test_log_probs_step_matches_full_logits() -> None:
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
    assert_accurate(ours, theirs, theirs, "a step")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_configs_have_known_keys(path: Path) -> None:
    config = load_config_from_file(str(path))  # raises only on unknown top-level keys
    given = yaml.safe_load(path.read_text("utf-8"))
    known = {action.dest for action in launch_command_parser()._actions}
    for section, prefix in (("fsdp_config", "fsdp_"), ("deepspeed_config", "")):
        for key in given.get(section, {}):
            assert key.removeprefix(prefix) in known or f"{prefix}{key.removeprefix(prefix)}" in known, key
    if path.stem == "fsdp2":
        assert (config.distributed_type.value, config.fsdp_config["fsdp_version"]) == ("FSDP", 2)
    if path.stem == "zero3":
        assert (config.distributed_type.value, config.deepspeed_config["zero_stage"]) == ("DEEPSPEED", 3)
    precision = "fp16" if path.stem.endswith("fp16") else "bf16"
    assert config.mixed_precision == ("no" if config.use_cpu else precision)
