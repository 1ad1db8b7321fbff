"""Plugins for other trainers: their interface, and a real run if the project is installed (`make test-places`).

If Axolotl or ms-swift is missing, a stub package replaces it, with the one class or dict that the plugin uses.
"""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from command import ROOT, environment
from command import run as run_command
from models import batch, tiny_llama
from test_callback import build, run

from hf_cce import CCECallback, CCEConfig
from hf_cce.patches.causal_lm import patch_of

SWIFT_FILE = ROOT / "hf_cce/integrations/ms_swift.py"


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Install a stub module with these names, and its parent packages."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:i]))
        made.__path__ = []  # type: ignore[attr-defined]
        vars(made).update(names if i == len(parts) else {})
        monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.fixture
def axolotl_plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not installed("axolotl"):
        stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    monkeypatch.delitem(sys.modules, "hf_cce.integrations.axolotl_plugin", raising=False)
    return importlib.import_module("hf_cce.integrations.axolotl_plugin")


def test_axolotl_trains_without_logits(axolotl_plugin: Any, tmp_path: Path) -> None:
    """Axolotl's order: load the model, build the trainer, then add callbacks."""
    from axolotl.integrations.base import BasePlugin

    plugin = axolotl_plugin.CCEPlugin()
    assert isinstance(plugin, BasePlugin)
    cfg = SimpleNamespace(hf_cce={"gradient_filter": None, "memory_budget": 1 << 20})
    trainer = build(tmp_path)
    plugin.post_model_load(cfg, trainer.model)
    patch = patch_of(trainer.model)
    assert patch is not None and patch.config == CCEConfig(gradient_filter=None, memory_budget=1 << 20)
    (callback,) = plugin.add_callbacks_post_trainer(cfg, trainer)
    assert type(callback) is CCECallback and callback.config == patch.config
    trainer.add_callback(callback)
    assert run(trainer) == [] and trainer.model.cce_stats()["fused"] == 6
    assert plugin._config(SimpleNamespace(hf_cce=None)) == CCEConfig()


def test_axolotl_reads_yaml_options(axolotl_plugin: Any) -> None:
    module, name = axolotl_plugin.CCEPlugin().get_input_args().rsplit(".", 1)
    keys = getattr(importlib.import_module(module), name)  # resolves the class as Axolotl does
    given = {"gradient_filter": None, "memory_budget": 1 << 20}
    assert keys(hf_cce=given).model_dump(exclude_none=True) == {"hf_cce": given}  # builds cfg as Axolotl does
    assert keys().model_dump(exclude_none=True) == {}
    for wrong, error in (({"filter": 1}, "unknown option filter"), ({"gradient_filter": 2}, "gradient_filter must be")):
        with pytest.raises(ValueError, match=error):
            keys(hf_cce=wrong)


def test_axolotl_example_config(axolotl_plugin: Any) -> None:
    example = yaml.safe_load((ROOT / "recipes/axolotl.yaml").read_text("utf-8"))
    (name,) = example["plugins"]
    module, _, cls = name.rpartition(".")
    assert getattr(importlib.import_module(module), cls) is axolotl_plugin.CCEPlugin
    assert CCEConfig(**axolotl_plugin.HfCCEArgs(**example).hf_cce) == CCEConfig()


def test_ms_swift_finds_callback_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not installed("swift"):
        stand_in(monkeypatch, "swift.callbacks.mapping", callbacks_map={})
    from swift.callbacks.mapping import callbacks_map

    # ms-swift loads the file by path under a generated name, with its folder on sys.path.
    monkeypatch.syspath_prepend(str(SWIFT_FILE.parent))
    spec = importlib.util.spec_from_file_location("_swift_external_0", SWIFT_FILE)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    callback = callbacks_map["hf_cce"](SimpleNamespace(), SimpleNamespace())
    assert isinstance(callback, CCECallback)
    trainer = build(tmp_path, callback)
    assert run(trainer) == [] and trainer.model.cce_stats()["fused"] == 6


def test_no_module_shadows_a_package() -> None:
    """ms-swift puts the folder on sys.path, so a file named lightning.py would shadow the package."""
    names = {path.stem for path in SWIFT_FILE.parent.glob("*.py")} - {"__init__"}
    assert names and not any(installed(name) for name in names)


def test_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The example of docs/guides/other-trainers.md on a tiny model."""
    lightning = pytest.importorskip("lightning")
    guide = (ROOT / "docs/guides/other-trainers.md").read_text("utf-8")
    (code,) = re.findall(r"^```py\n(import lightning.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: tiny_llama().eval())
    if torch.cuda.is_available():
        monkeypatch.setattr(
            lightning, "Trainer", lambda **options: lightning.pytorch.Trainer(accelerator="cpu", **options)
        )
    rows = [{name: value[row] for name, value in batch(rows=4).items()} for row in range(4)]
    names: dict[str, Any] = {"dataset": rows}
    exec(compile(code, "docs/guides/other-trainers.md", "exec"), names)
    stats = names["module"].model.cce_stats()
    assert stats["fused"] == stats["calls"] == 2 and stats["materialized"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# The released projects, each in its own environment: make test-places


def run_place(folder: Path, *command: str, **more: str) -> str:
    given = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", **more}
    done = run_command([sys.executable, *command], environment(".", AXOLOTL_DO_NOT_TRACK="1", **given), folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Path:
    run_place(tmp_path, str(ROOT / "recipes/tiny.py"), str(tmp_path))
    return tmp_path


def logged(folder: Path, *command: str, **more: str) -> dict[str, list[float]]:
    """Return what three steps log: losses, ms-swift's token accuracy, and the counts of fused losses and full logits."""
    text = run_place(folder, *command, **more)
    assert ("computed without logits" in text) is not bool(more)
    keys = ("loss", "token_acc", "cce/fused", "cce/materialized")
    # Not from standard output: Axolotl prints before its plugins' callbacks run.
    newest = max(folder.rglob("checkpoint-3/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(newest.read_text("utf-8"))["log_history"]
    return {key: [float(entry[key]) for entry in history if key in entry] for key in keys}


def check_the_same(folder: Path, *command: str) -> dict[str, list[float]]:
    """Three steps with hf_cce, none with full logits, give the same losses as without it, to three digits."""
    ours, theirs = logged(folder, *command), logged(folder, *command, HF_CCE_DISABLE="1")
    assert len(ours["loss"]) == 3 and ours["cce/fused"] == [1.0, 2.0, 3.0] and theirs["cce/fused"] == []
    assert ours["cce/materialized"] == [0.0, 0.0, 0.0]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert ours["token_acc"] == theirs["token_acc"]
    return ours


@pytest.mark.slow
def test_released_axolotl(data: Path) -> None:
    pytest.importorskip("axolotl.cli.config")
    cfg = yaml.safe_load((ROOT / "recipes/axolotl.yaml").read_text("utf-8"))
    cfg |= {"base_model": "model", "val_set_size": 0, "sequence_len": 256, "sample_packing": False, "bf16": False}
    cfg["datasets"] = [{**cfg["datasets"][0], "path": "chat/train.jsonl", "ds_type": "json"}]
    cfg |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3, "logging_steps": 1}
    cfg |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # they need CUDA
    (data / "axolotl.yaml").write_text(yaml.safe_dump(cfg), "utf-8")
    check_the_same(data, "-m", "axolotl.cli.train", "axolotl.yaml")


@pytest.mark.slow
def test_released_ms_swift(data: Path) -> None:
    pytest.importorskip("swift.callbacks.mapping")
    found = check_the_same(
        data, "-m", "swift.cli.sft", "--external_plugins", str(SWIFT_FILE), "--callbacks", "hf_cce",
        "--model", "model", "--model_type", "llama", "--template", "chatml", "--use_hf", "true", "--torch_dtype", "float32",
        "--dataset", "chat/train.jsonl", "--split_dataset_ratio", "0", "--tuner_type", "lora", "--max_length", "128",
        "--max_steps", "3", "--logging_steps", "1", "--per_device_train_batch_size", "2",
        "--gradient_accumulation_steps", "1", "--report_to", "none", "--output_dir", "out",
    )  # fmt: skip
    assert len(found["token_acc"]) == 3  # from logits.argmax, which computes the logits of a few tokens at a time


@pytest.mark.slow
def test_released_llama_factory(data: Path) -> None:
    try:
        importlib.import_module("llamafactory.train.tuner")
    except (ImportError, OSError, RuntimeError) as error:  # needs a torchaudio build that matches torch
        pytest.skip(f"LLaMA-Factory cannot be imported: {error}")
    columns = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": "chat/train.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    (data / "dataset_info.json").write_text(json.dumps({"chat": {**entry, "tags": columns}}), "utf-8")
    cfg = {"model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "lora"}
    cfg |= {"dataset_dir": ".", "dataset": "chat", "template": "default", "cutoff_len": 128}
    cfg |= {"output_dir": "out", "overwrite_output_dir": True, "logging_steps": 1, "report_to": "none"}
    cfg |= {"per_device_train_batch_size": 2, "max_steps": 3}
    (data / "factory.yaml").write_text(yaml.safe_dump(cfg), "utf-8")
    check_the_same(data, str(ROOT / "recipes/llama_factory.py"), "factory.yaml")
