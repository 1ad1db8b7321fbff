"""``hf-cce estimate`` against peaks measured on an H200, against live tensors counted on a CPU, and its output."""

import functools
import json
import logging
import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from command import hf_cce
from peak_memory import PeakMemory
from tiny_config import tiny_config
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MambaConfig

from hf_cce.config import MIB
from hf_cce.diagnostics import estimate as diagnostics
from hf_cce.diagnostics.estimate import LoRA, Model
from hf_cce.diagnostics.machine import GIB
from hf_cce.diagnostics.shapes import SHAPES, Shape, config_named, config_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
STEPS_TOLERANCE = 0.02  # 0.3 % at most when this was written
estimated = functools.cache(diagnostics.estimate)
SIX_LAYERS = Shape("llama", 64, 6, 4, 4, 256, 4096)
BUDGETS = {"hf_cce-256mib": 256 * MIB, "hf_cce-1gib": GIB, "hf_cce-2gib": 2 * GIB}
command = functools.partial(hf_cce, "estimate")


def off(estimated: float, measured: float) -> float:
    return estimated / measured - 1


def measured_steps() -> list[Any]:
    found = []
    for path in sorted(RESULTS.glob("steps_*.json")):
        report = json.loads(path.read_text("utf-8"))
        if report["settings"].get("loop") in ("sft", "recipe"):
            continue  # TRL's own fused head makes no full logits
        for name, row in report["results"].items():
            way = "full" if name == "eager" else "cce" if name.startswith("hf_cce") else ""
            if way and row["status"] == "ok":
                budget = BUDGETS.get(name)
                if "memory_budget=268435456" in row["installed"]:  # the default when that file was written
                    budget = 256 * MIB
                found.append(pytest.param(report["settings"], way, budget, row, id=f"{path.stem}-{name}"))
    return found


@pytest.mark.parametrize(("settings", "way", "budget", "row"), measured_steps())
def test_step_peaks_match_measurements(
    settings: dict[str, Any], way: str, budget: int | None, row: dict[str, Any]
) -> None:
    found = estimated(settings["model"], settings["batch"], settings["sequence"], memory_budget=budget)
    assert found.model.parameters == row["parameters"]
    step = found.steps[way + (", checkpointing" if settings["gradient_checkpointing"] else "")]
    assert abs(off(step.peak, row["peak_gib"] * GIB)) < STEPS_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RESULTS.glob("fits_*.json")), ids=lambda path: path.stem)
def test_fits_matches_measurements(path: Path) -> None:
    """Of the batches that were measured to fit, at most the largest sixth may be rejected."""
    report = json.loads(path.read_text("utf-8"))
    settings, results = report["settings"], report["results"]
    for size in settings["gib"]:
        for way, loss in (("full", "eager"), ("cce", "hf_cce")):
            largest = results[loss]["fits"][f"{size:g}"]
            for batch, fits in ((largest + 1, False), (largest * 5 // 6, True)):
                found = diagnostics.estimate(settings["model"], batch, settings["sequence"], gpu_memory=int(size * GIB))
                assert found.steps[way].fits is fits, f"{way}, {size} GiB, batch {batch}"


def measured_losses() -> list[Any]:
    found = []
    for path in [*RESULTS.glob("flat*.json"), *RESULTS.glob("heads*.json")]:
        report = json.loads(path.read_text("utf-8"))
        for result in report["results"].values():
            sizes = tuple(result["problem"][key] for key in "NDV")
            for name, way in (("eager", "full"), ("hf_cce", "cce")):
                row = result["rows"].get(name, {})
                if report["dtype"] == "bfloat16" and "extra_mib" in row:
                    found.append(pytest.param(way, sizes, row["extra_mib"], id=f"{path.stem}-{name}-{sizes}"))
    return found


@pytest.mark.parametrize(("way", "sizes", "extra_mib"), measured_losses())
def test_loss_memory_matches_measurements(way: str, sizes: tuple[int, int, int], extra_mib: float) -> None:
    n, d, v = sizes
    model = Model("", "", 0, v, d, 0)
    whole, left, few = diagnostics.loss_bytes(way, n, model, "bfloat16")
    measured = extra_mib * MIB + left  # the measurement excludes the gradients
    if way == "cce" and not few and n < 8192:  # for fewer tokens the kernels use less than the budget
        assert 0.4 < measured / whole < 1.01
    else:
        assert abs(off(whole, measured)) < 0.05


def assert_peak(estimated: Any, way: str, model: Any, vocabulary: int) -> None:
    """Compare with the live tensors of a step on a CPU: independent of the estimate's code, with the same phases as on a GPU."""
    ids = torch.randint(vocabulary, (4, 256))
    with PeakMemory({p.untyped_storage()._cdata for p in model.parameters()}) as memory:
        model(input_ids=ids, labels=ids).loss.backward()
    assert estimated.model.weights == sum(p.numel() * 4 for p in model.parameters())
    peak = estimated.steps[way].peak
    assert peak is not None
    peak -= estimated.model.weights + estimated.optimizer + diagnostics.WORKSPACES  # a CPU has no workspaces
    assert -0.02 < off(peak, memory.peak) < 0.04


@pytest.mark.parametrize("vocabulary", [64, 8192])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimate_matches_live_tensors(vocabulary: int, checkpointing: bool) -> None:
    config = config_of(replace(SIX_LAYERS, vocabulary=vocabulary))
    model = LlamaForCausalLM(config).train()
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Transformers renames the argument
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = diagnostics.estimate("small", 4, 256, "float32", config=config)
    assert_peak(found, "full, checkpointing" if checkpointing else "full", model, vocabulary)


def test_lora_estimate_matches_live_tensors() -> None:
    peft = pytest.importorskip("peft")
    config = config_of(SIX_LAYERS)
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=8, target_modules="all-linear")).train()
    found = diagnostics.estimate("small", 4, 256, "float32", config=config, lora=LoRA(8))
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert found.model.gradients == trained == found.optimizer // 2 and not found.model.trains_head
    assert_peak(found, "full", model, 4096)


def test_lora_counts_the_linear_layers_of_gpt2() -> None:
    peft = pytest.importorskip("peft")
    config = GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=4)
    model = peft.get_peft_model(
        GPT2LMHeadModel(config), peft.LoraConfig(r=8, target_modules="all-linear", fan_in_fan_out=True)
    )
    lora, qlora = (diagnostics.estimate("gpt2", 1, 64, config=config, lora=LoRA(8, packed)) for packed in (False, True))
    assert lora.model.gradients == sum(p.numel() * 4 for p in model.parameters() if p.requires_grad) > 0
    assert qlora.model.weights < lora.model.weights


@pytest.mark.slow
def test_qlora_packs_linear_weights() -> None:
    lora, qlora = (diagnostics.estimate("smollm2-135m", 1, 1024, lora=LoRA(16, packed)) for packed in (False, True))
    linear = 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert abs(lora.model.weights - qlora.model.weights - linear * (2 - 4.127 / 8)) < 1000
    assert lora.steps["cce"].activations == qlora.steps["cce"].activations
    assert lora.model.gradients == qlora.model.gradients
    for arguments in ((), ("--lora",), ("--qlora", "--lora-rank", "64")):
        shown = command("smollm2-135m", "--seq-length", "1024", *arguments)
        assert shown.exit_code == 0 and ("rank 64" in shown.stdout) == ("64" in arguments)


def test_mixed_precision_keeps_weight_casts_once() -> None:
    config = config_of(replace(SHAPES["tiny"], vocabulary=4096))

    def kept(batch: int, dtype: str) -> int:
        found = diagnostics.estimate("tiny", batch, 64, dtype, config=config)
        assert dtype != "mixed" or found.model.weights == 4 * found.model.parameters
        return found.steps["full"].activations or 0

    row = {dtype: kept(2, dtype) - kept(1, dtype) for dtype in ("mixed", "bfloat16")}
    fixed = {dtype: kept(1, dtype) - row[dtype] for dtype in row}
    linear = sum(
        p.numel() for name, p in LlamaForCausalLM(config).named_parameters() if "proj" in name
    )  # the tied head is not part of the base model
    assert 2 * linear <= fixed["mixed"] - fixed["bfloat16"] < 2 * linear + 8 * 64 * 64
    assert row["bfloat16"] < row["mixed"] < 2 * row["bfloat16"]


def test_verdict_by_size_of_saving() -> None:
    much = diagnostics.estimate("qwen2.5-0.5b", 4, 8192)
    assert diagnostics.verdict(much).startswith("hf_cce saves 54% of the peak, 100.7 → 46.4 GiB")
    nothing = diagnostics.estimate("smollm2-135m", 1, 512)
    assert nothing.few_tokens
    assert diagnostics.verdict(nothing).startswith("hf_cce saves nothing here: 512 tokens make 25 million")
    assert nothing.steps["cce"].peak == nothing.steps["full"].peak
    assert diagnostics.estimate("smollm2-135m", 16, 512).few_tokens is False
    narrow = config_of(replace(SHAPES["smollm2-135m"], vocabulary=512))  # byte-level vocabulary
    weights = diagnostics.estimate("llama-3.2-1b", 1, 400)  # 51 million logits against 10 GB of weights and optimizer
    for little in (diagnostics.estimate("narrow", 32, 4096, config=narrow), weights):
        text = diagnostics.verdict(little)
        assert not little.few_tokens and text.startswith("hf_cce saves little here"), text


def test_unknown_activations_are_not_guessed() -> None:
    config = MambaConfig(vocab_size=32_000, hidden_size=64, num_hidden_layers=2)
    found = diagnostics.estimate("mamba", 8, 1024, config=config)
    (note,), step = found.notes, found.steps["full"]
    assert "no attention" in note and step.peak is step.fits is step.activations is None
    assert step.loss == 12 * 8 * 1024 * 32_000 and "is unknown" in diagnostics.verdict(found)


def test_folder_file_and_json(tmp_path: Path) -> None:
    config_of(SHAPES["smollm2-135m"]).save_pretrained(tmp_path)
    level = logging.getLogger("transformers").level
    options = ("--batch-size", "4", "--seq-length", "2048", "--gpu-memory", "24")
    shown = command(str(tmp_path), *options)
    assert shown.exit_code == 0, shown
    for text in ("135 million parameters", "4 × 2,048 tokens make 403 million logits", "fits in 24 GiB"):
        assert text in shown.stdout
    assert logging.getLogger("transformers").level == level and "\x1b" not in shown.stdout
    found = command(str(tmp_path / "config.json"), *options, "--json", "-")
    report = json.loads(found.stdout)
    estimate = diagnostics.estimate("smollm2-135m", 4, 2048, gpu_memory=24 * GIB)
    same = {**asdict(estimate), "verdict": diagnostics.verdict(estimate)}
    for key in ("steps", "optimizer", "logits", "verdict"):
        assert report[key] == json.loads(json.dumps(same))[key], key
    assert shown.stdout.startswith(report["verdict"] + "\n")


def test_given_memory_is_used_without_a_look_at_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in exclusive mode that another process uses raises when its properties are read."""
    busy = Mock(side_effect=RuntimeError("CUDA-capable device(s) is/are busy or unavailable"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    assert command("smollm2-135m", "--gpu-memory", "24").exit_code == 0
    assert "busy" in command("smollm2-135m").stderr


def test_documented_output_is_current() -> None:
    page = (RESULTS.parents[1] / "docs/reference/cli.md").read_text("utf-8")
    for line in re.findall(r"^(?:\$ )?hf-cce estimate (.*)$", page, re.MULTILINE):
        shown = command(*line.split()).stdout
        text = "\n".join(line.rstrip() for line in shown.strip().splitlines())
        assert text in page, f"hf-cce estimate {line}: write\n{text}"


def test_model_type_uses_default_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name takes precedence."""
    shown = command("llama", "--batch-size", "2", "--seq-length", "1024", "--gpu-memory", "80")
    assert shown.exit_code == 0, shown
    assert "llama: LlamaForCausalLM, 6,738 million parameters, vocabulary 32,000" in shown.stdout
    (note,) = [line for line in shown.stdout.splitlines() if line.startswith("Note:")]
    assert "llama is a model type; the sizes are the defaults of LlamaConfig" in note
    assert not diagnostics.estimate("qwen2.5-0.5b", 1, 64).notes
    config_of(SHAPES["tiny"]).save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    assert config_named("llama").vocab_size == SHAPES["tiny"].vocabulary
    assert not diagnostics.estimate("llama", 1, 64).notes


def test_initialization_from_weight_values_is_skipped() -> None:
    """Gemma 3's vision tower initializes from weight values, which fake tensors do not have; tied weights stay tied."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = tiny_config(Gemma3Config)
    found = diagnostics.estimate("gemma3", 2, 32, config=config)
    assert found.steps["full"].peak
    assert found.model.parameters == sum(p.numel() for p in Gemma3ForConditionalGeneration(config).parameters())


def test_image_text_model_is_estimated_as_text_model() -> None:
    from transformers import CLIPVisionConfig, LlavaConfig

    text = config_of(replace(SHAPES["tiny"], vocabulary=32_000))
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    whole = diagnostics.estimate("llava", 4, 1024, config=LlavaConfig(text_config=text, vision_config=vision))
    alone = diagnostics.estimate("llama", 4, 1024, config=text)
    assert whole.model.parameters > alone.model.parameters and whole.model.vocabulary == 32_000
    assert whole.steps and whole.steps.keys() == alone.steps.keys()
    for way, step in whole.steps.items():
        assert step.loss == alone.steps[way].loss and step.activations == alone.steps[way].activations
    assert any("text only" in note for note in whole.notes) and not alone.notes
