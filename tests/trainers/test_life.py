"""A patched model after training: it is merged, saved and exported exactly as the unpatched model is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, loss_and_grads, tiny_llama
from numerics import assert_accurate
from torch import Tensor, nn

from hf_cce import apply_cce
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def train_and_merge(patch: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, init_lora_weights=False)
    model = patch(peft.get_peft_model(tiny_llama(), config))
    loss_and_grads(model, batch())
    torch.optim.SGD(model.parameters(), 0.3).step()
    return model.merge_and_unload()


@pytest.mark.slow
def test_merge_save_and_export(tmp_path: Path) -> None:
    """Checkpoints and resumed runs are compared in test_trainer_features.py."""
    merged = {"ours": train_and_merge(apply_cce), "plain": train_and_merge(lambda model: model)}
    for name, model in merged.items():
        assert (patch_of(model) is not None) is (name == "ours")
        model.save_pretrained(tmp_path / name)
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in merged}
    assert files["ours"] == files["plain"]
    configs = [(tmp_path / name / "config.json").read_text("utf-8") for name in merged]
    assert configs[0] == configs[1]
    ours, plain = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in merged)
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert ours[name].dtype == value.dtype
        assert_accurate(ours[name], value, value, name)

    served = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval() for _ in range(2)]
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
