"""A patched model from loading to export: it saves and exports exactly what the unpatched model does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import python
from models import batch, tiny_llama
from numerics import assert_accurate
from torch import Tensor, nn

from hf_cce import CCECallback, apply_cce
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

STEPS = 6


def train(folder: Path, *, cce: bool, steps: int = STEPS, resume: bool = False) -> Any:
    """Run LoRA training from ``folder``/base, saving a checkpoint every three steps."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))
    rows = [{name: value[row] for name, value in batch(rows=16).items()} for row in range(16)]
    args = transformers.TrainingArguments(
        output_dir=folder / ("ours" if cce else "plain"), max_steps=steps, save_steps=3, per_device_train_batch_size=2,
        optim="sgd", lr_scheduler_type="constant", learning_rate=0.3,  # AdamW would carry rounding from step to step
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callbacks = [CCECallback(on_unused="raise")] if cce else []
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def resume_in_a_new_process(folder: Path, *, cce: bool) -> None:
    """Finish the same run and save the merged model in ``folder``/ours-merged or plain-merged."""
    code = f"import test_life; from pathlib import Path; test_life.finish(Path({str(folder)!r}), {cce})"
    python(code, folders=(".", "tests/support", "tests/trainers"), CUDA_VISIBLE_DEVICES="")


def finish(folder: Path, cce: bool) -> None:
    trainer = train(folder, cce=cce, resume=True)
    assert trainer.state.global_step == STEPS
    merged = trainer.model.merge_and_unload()
    assert (patch_of(merged) is not None) is cce
    loss = trainer.evaluate()["eval_loss"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    name = "ours" if cce else "plain"
    merged.save_pretrained(folder / f"{name}-merged")
    (folder / f"{name}.json").write_text(json.dumps({"eval": loss, "losses": losses}), "utf-8")


class Logits(nn.Module):
    """Return only the logits, as an exported program does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.slow
def test_train_save_merge_and_export(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    for cce in (True, False):
        train(tmp_path, cce=cce, steps=3)
        resume_in_a_new_process(tmp_path, cce=cce)

    results = {name: json.loads((tmp_path / f"{name}.json").read_text("utf-8")) for name in ("ours", "plain")}
    ours, plain = (torch.tensor([*results[name]["losses"], results[name]["eval"]]) for name in ("ours", "plain"))
    assert len(ours) == STEPS + 1
    assert_accurate(ours, plain, plain, "losses of all steps, and of the evaluation")

    # Checkpoints and the merged model have the same files, keys, shapes, dtypes and configuration.
    for where in ("{}/checkpoint-6", "{}-merged"):
        folders = [tmp_path / where.format(name) for name in ("ours", "plain")]
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert names[0] == names[1]
        (weights,) = [name for name in names[0] if name.endswith(".safetensors")]
        kept = [safetensors.load_file(folder / weights) for folder in folders]
        shapes = [{key: (value.shape, value.dtype) for key, value in each.items()} for each in kept]
        assert shapes[0] == shapes[1]
        (config,) = [name for name in names[0] if name in ("config.json", "adapter_config.json")]
        read = [json.loads((folder / config).read_text("utf-8")) for folder in folders]
        for each in read:
            each["target_modules"] = sorted(each.get("target_modules") or [])
        assert read[0] == read[1]

    served = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours-merged").eval() for _ in range(2)]
    apply_cce(served[0])
    ids = batch(rows=2)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(*(model.generate(ids, **options) for model in served))
    exported = [torch.export.export(Logits(model), (ids,)).module()(ids) for model in served]
    assert torch.equal(*exported)
    if importlib.util.find_spec("onnxscript") is not None:
        programs = [torch.onnx.export(Logits(model), (ids,), dynamo=True).model.graph for model in served]
        assert [node.op_type for node in programs[0]] == [node.op_type for node in programs[1]]
        assert programs[0].initializers.keys() == programs[1].initializers.keys()
