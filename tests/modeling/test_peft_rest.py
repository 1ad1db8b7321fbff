"""PEFT's ways of training that test_engines.py leaves out: prefixes, norms, single words, parameters by name, tied embeddings.

All of them without logits, whatever the head has become.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import (
    assert_fused,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
    stats,
    tiny_llama,
)

from hf_cce import apply_cce, remove_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")

STEPS = 3
CPT = {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4]}


@dataclass(frozen=True)
class Row:
    config: Callable[[], Any]
    trains: tuple[str, ...]  # each must be part of the name of a parameter that gets a gradient
    tied: bool = False
    fused: int = 1  # losses that a call computes


def row(name: str, *trains: str, tied: bool = False, fused: int = 1, **options: Any) -> Row:
    def config() -> Any:
        kind = getattr(peft, name)
        if missing := options.keys() - inspect.signature(kind).parameters.keys():
            pytest.skip(f"{name} of peft {peft.__version__} has no {', '.join(missing)}")
        return kind(task_type="CAUSAL_LM", **options)

    return Row(config, trains, tied, fused)


def lora(*trains: str, tied: bool = False, **options: Any) -> Row:
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    return row("LoraConfig", *trains, tied=tied, **options)


ROWS: dict[str, Row] = {
    "prefix": row("PrefixTuningConfig", "prompt_encoder", num_virtual_tokens=3),
    "prefix projected": row(
        "PrefixTuningConfig", "transform.2", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16
    ),
    "p-tuning": row("PromptEncoderConfig", "mlp_head", num_virtual_tokens=3, encoder_hidden_size=16),
    # its own loss after the model's, from the same logits
    "cpt": row("CPTConfig", "prompt_encoder", fused=2, **CPT),
    "cpt decaying": row(
        "CPTConfig", "prompt_encoder", fused=2, **CPT, opt_weighted_loss_type="decay", opt_loss_decay_factor=0.7
    ),
    "norms": row("LNTuningConfig", "model.norm.", target_modules=["input_layernorm", "norm"]),
    "words": lora("embed_tokens.token_adapter", trainable_token_indices=[5, 6, 7]),
    "words tied": lora("embed_tokens.token_adapter", tied=True, trainable_token_indices=[5, 6, 7]),
    "words of the head": lora(
        "embed_tokens.token_adapter",
        "lm_head.token_adapter",
        trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [5, 7]},
    ),
    "words alone": row(
        "TrainableTokensConfig", "embed_tokens.trainable_tokens_delta", token_indices=[5, 6], init_weights=False
    ),
    "words alone tied": row(
        "TrainableTokensConfig", "embed_tokens.trainable_tokens_delta", tied=True, token_indices=[5, 6],
        init_weights=False,
    ),
    "parameter of the head": lora("lm_head.lora_A", "lm_head.lora_B", target_parameters=["lm_head.weight"]),
    "parameter of the head alone": lora("lm_head.lora_B", target_modules=[], target_parameters=["lm_head.weight"]),
    "parameter of the tied head": lora("lm_head.lora_B", tied=True, target_parameters=["lm_head.weight"]),
    # PEFT warns that they cease to be tied: so does the unpatched model, and ours with it
    "tied, embedding adapted": lora("lora_embedding_A", "lora_embedding_B", tied=True, target_modules=["embed_tokens"]),
    "tied, head adapted": lora("lm_head.lora_A", "lm_head.lora_B", tied=True, target_modules=["q_proj", "lm_head"]),
    "stay tied, embedding adapted": lora(
        "lora_embedding_B", "lm_head.lora_A", tied=True, target_modules=["embed_tokens"], ensure_weight_tying=True
    ),
    "stay tied, head adapted": lora(
        "lora_embedding_B", "lm_head.lora_A", tied=True, target_modules=["lm_head"], ensure_weight_tying=True
    ),
    "stay tied, embedding saved": lora(
        "embed_tokens.modules_to_save", tied=True, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "stay tied, head saved": lora(
        "embed_tokens.modules_to_save", tied=True, modules_to_save=["lm_head"], ensure_weight_tying=True
    ),
    "stay tied, words": lora(
        "embed_tokens.token_adapter", tied=True, trainable_token_indices=[5, 6], ensure_weight_tying=True
    ),
}  # fmt: skip


def build(row: Row, patched: str = "", double: bool = False) -> Any:
    """A PeftModel whose adapter does something, the same one each time; ``patched`` before PEFT ("cce") or after it ("peft")."""
    model = tiny_llama(tie_word_embeddings=row.tied)
    if patched == "cce":
        apply_cce(model)
    # In float64 before PEFT comes: a copy or a cast of adapters that share their weights is no longer tied, if it can be made
    model = exact(model) if double else model
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's about tied weights
        wrapped = peft.get_peft_model(model, row.config(), autocast_adapter_dtype=False).train()
    wrapped = wrapped.double() if double else wrapped
    with torch.no_grad():  # some start with parameters that do nothing
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return apply_cce(wrapped) if patched == "peft" else wrapped


def inputs_of(row: Row, seed: int) -> dict[str, torch.Tensor]:
    inputs = batch(rows=4, seed=seed)
    if row.fused > 1:
        # The kinds of CPT: 0 is padding, a multiple of 4 a label. PEFT adds to the mask in place, and a multiple of 4.
        kinds = torch.full_like(inputs["labels"], 4)
        kinds[:, 12:] = 8
        kinds[inputs["labels"] == -100] = 3
        inputs["input_type_mask"] = kinds * inputs["attention_mask"]
    return inputs


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("first", ["peft", "cce"])
def test_loss_and_gradients_over_steps(name: str, first: str) -> None:
    row = ROWS[name]
    plain, patched, reference = build(row), build(row, first), build(row, double=True)
    reference.load_state_dict(plain.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            assert_same_training(patched, plain, inputs_of(row, step), reference=reference)
            gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
            assert all(any(part in key for key in gradients) for part in row.trains), list(gradients)
            with torch.no_grad():
                for model in (plain, patched, reference):
                    for key, parameter in model.named_parameters():
                        if key in gradients:
                            parameter -= 0.05 * gradients[key].to(parameter.dtype)
        with logits_made(4 * 23, patched) as seen:
            loss_and_grads(patched, inputs_of(row, STEPS))
    assert seen == [] == [str(w.message) for w in caught if "hf_cce" in str(w.message)]
    assert_fused(patched, calls=STEPS + 1)
    assert stats(patched).fused == row.fused * (STEPS + 1)
    remove_cce(patched)
    assert patch_of(causal_lm(patched)) is None
