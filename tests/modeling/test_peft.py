"""A model with an adapter of PEFT trains as it does unpatched, without logits, whatever its head has become."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import (
    FAMILIES,
    assert_fused,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
    own_loss,
    stats,
    tiny_llama,
    told,
    with_open_gates,
)
from numerics import assert_as_good
from torch._dynamo.testing import CompileCounter

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
    fused: int = 1  # losses that a call computes; 0: it gets full logits


def row(name: str, *trains: str, tied: bool = False, fused: int = 1, **options: Any) -> Row:
    def config() -> Any:
        kind = getattr(peft, name, None) or pytest.skip(f"peft {peft.__version__} has no {name}")
        if missing := options.keys() - inspect.signature(kind).parameters.keys():
            pytest.skip(f"{name} of peft {peft.__version__} has no {', '.join(missing)}")
        return kind(task_type="CAUSAL_LM", **options)

    return Row(config, trains, tied, fused)


def lora(*trains: str, tied: bool = False, **options: Any) -> Row:
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    return row("LoraConfig", *trains, tied=tied, **options)


def of_the_head(name: str, **options: Any) -> Row:
    return row(name, "lm_head", target_modules=["lm_head"], **options)


HEADS: dict[str, Row] = {
    "all-linear": lora(target_modules="all-linear"),
    "saved head": lora("lm_head.modules_to_save", modules_to_save=["lm_head"]),
    "lora": lora("lm_head.lora_A", "q_proj", target_modules=["q_proj", "lm_head"]),
    "lora dropout": lora("lm_head.lora_B", target_modules=["lm_head"], lora_dropout=0.4, lora_alpha=3),
    "rslora": lora("lm_head.lora_B", target_modules=["lm_head"], use_rslora=True, r=4),
    "dora": lora("lm_head.lora_magn", "q_proj", target_modules=["q_proj", "lm_head"], use_dora=True, lora_alpha=3),
    "dora dropout": lora("lm_head.lora_magn", target_modules=["lm_head"], use_dora=True, lora_dropout=0.4),
    "dora bias": lora("lm_head.lora_magn", target_modules=["lm_head"], use_dora=True, bias="all"),
    "prompt": row("PromptTuningConfig", "prompt_encoder", num_virtual_tokens=3),
    "vera": of_the_head("VeraConfig", r=2, init_weights=False),
    "ia3": of_the_head("IA3Config", feedforward_modules=[], init_ia3_weights=False),
    "ia3 input": of_the_head("IA3Config", feedforward_modules=["lm_head"], init_ia3_weights=False),
    "loha": of_the_head("LoHaConfig", r=2, init_weights=False),
    "lokr": of_the_head("LoKrConfig", r=2, init_weights=False),
    "oft": of_the_head("OFTConfig", r=0, oft_block_size=8, init_weights=False, module_dropout=0.0),
    "boft": of_the_head("BOFTConfig", boft_block_size=4, init_weights=False, bias="boft_only"),
    "adalora head": of_the_head(
        "AdaLoraConfig", init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, init_lora_weights=False
    ),
    "delora": of_the_head("DeloraConfig", r=2, init_weights=False),
    "glora": of_the_head("GloraConfig", r=2),
    "miss": of_the_head("MissConfig", r=2, init_weights=False, miss_dropout=0.4),
    "psoft": of_the_head("PsoftConfig", r=2),
    "pvera": of_the_head("PveraConfig", r=2, init_weights=False),
    "c3a": of_the_head("C3AConfig", fused=0, block_size=1, init_weights=False),
}
# These call the model past its hooks
TUNERS: dict[str, Row] = {
    "adalora": row(
        "AdaLoraConfig", "lora_E", init_r=4, target_r=2, target_modules=["q_proj", "v_proj"], total_step=10, tinit=1,
        tfinal=2, init_lora_weights=False,
    ),
    "adaption": row("AdaptionPromptConfig", "adaption_gate", adapter_len=3, adapter_layers=1),
}  # fmt: skip
ROWS: dict[str, Row] = {
    **HEADS,
    **TUNERS,
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
    "words alone": row("TrainableTokensConfig", "trainable_tokens_delta", token_indices=[5, 6], init_weights=False),
    "words alone tied": row(
        "TrainableTokensConfig", "trainable_tokens_delta", tied=True, token_indices=[5, 6], init_weights=False
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
}
# Phi's head has a bias, which DoRA leaves alone and IA3 scales
CASES = [
    *((name, first, "llama") for name in ROWS for first in ("peft", "cce")),
    *((name, "cce on the model inside", "llama") for name in TUNERS),
    *((name, "peft", "phi") for name in HEADS),
]


def build(row: Row, patched: str = "", double: bool = False, family: str = "llama") -> Any:
    """A PeftModel whose adapter does something, the same one each time; ``patched`` before PEFT ("cce") or after it."""
    model = FAMILIES[family].build(**({"tie_word_embeddings": True} if row.tied else {}))
    if patched == "cce":
        apply_cce(model)
    # A tied model in float64 before PEFT comes: a copy or a cast of adapters that share their weights is no longer tied, if it
    # can be made. PSOFT initialises from no float64 weight.
    model = exact(model) if double and row.tied else model
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's about tied weights
        wrapped = peft.get_peft_model(model, row.config(), autocast_adapter_dtype=False).train()
    wrapped = with_open_gates(wrapped.double() if double else wrapped)
    with torch.no_grad():  # some start with parameters that do nothing
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if patched == "cce on the model inside":
        apply_cce(wrapped.get_base_model())
    return apply_cce(wrapped) if patched == "peft" else wrapped


def inputs_of(row: Row, seed: int) -> dict[str, torch.Tensor]:
    inputs = batch(rows=4, seed=seed)  # logits are then larger than the head's weight twice
    if row.fused > 1:
        # The kinds of CPT: 0 is padding, a multiple of 4 a label. PEFT adds to the mask in place, and a multiple of 4.
        kinds = torch.full_like(inputs["labels"], 4)
        kinds[:, 12:] = 8
        kinds[inputs["labels"] == -100] = 3
        inputs["input_type_mask"] = kinds * inputs["attention_mask"]
    return inputs


def same_dropout(model: Any, inputs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return own_loss(model, inputs)


@pytest.mark.parametrize(("name", "first", "family"), CASES)
def test_loss_and_gradients_over_steps(name: str, first: str, family: str) -> None:
    row = ROWS[name]
    plain, patched, reference = (build(row, how, how == "double", family) for how in ("", first, "double"))
    reference.load_state_dict(plain.state_dict())
    with told() as messages:
        for step in range(STEPS):
            inputs = inputs_of(row, step)
            assert_same_training(patched, plain, inputs, reference=reference, loss_of=same_dropout)
            gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
            assert all(any(part in key for key in gradients) for part in row.trains), list(gradients)
            with torch.no_grad():
                for model in (plain, patched, reference):
                    for key, parameter in model.named_parameters():
                        if key in gradients:
                            parameter -= 0.05 * gradients[key].to(parameter.dtype)
        with logits_made(4 * 23, patched) as seen:
            loss_and_grads(patched, inputs_of(row, STEPS))
    if row.fused:
        assert seen == messages == []
        assert_fused(patched, calls=STEPS + 1)
    else:
        assert stats(patched).missed == stats(patched).materialized == STEPS + 1 and len(messages) == 1
    assert stats(patched).fused == row.fused * (STEPS + 1)
    assert type(patched(**inputs)) is type(plain(**inputs))
    remove_cce(patched)
    assert patch_of(causal_lm(patched)) is None


@pytest.mark.parametrize("kind", ["lora", "dora", "dora dropout"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "two adapters"])
def test_lora_on_the_head(how: str, kind: str) -> None:
    """Adapters in float32 over a head in bfloat16, as PEFT makes them; under autocast; and two at once."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    config = lora(
        r=4, target_modules=["lm_head"], use_dora="dora" in kind, lora_dropout=0.3 if "dropout" in kind else 0.0
    ).config()

    def build(patched: bool) -> Any:
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(tiny_llama().to(dtype), config)
        if how == "two adapters":
            wrapped.add_adapter("other", config)
            wrapped.base_model.set_adapter(["default", "other"])
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        return apply_cce(wrapped) if patched else wrapped

    def step(model: Any, double: bool = False) -> dict[str, torch.Tensor]:
        """Of several batches: which of two bfloat16 runs is closer in one small matrix is luck."""
        found = []
        for seed in range(1 if how == "two adapters" else 12):
            torch.manual_seed(seed)  # the same dropout
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and not double):
                found.append(loss_and_grads(model, batch(seed=seed), double=double))
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    patched = build(True)
    actual, twin, reference = step(patched), step(build(False)), step(exact(build(False)), double=True)
    assert_fused(patched, calls=1 if how == "two adapters" else 12)
    per_adapter = 2 if kind == "lora" else 3
    assert sum("lora" in name for name in actual) == per_adapter * (2 if how == "two adapters" else 1)
    rounding = torch.float32 if how == "two adapters" else torch.bfloat16
    for name, value in actual.items():
        assert_as_good(value, twin[name], reference[name], name, rounding)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "miss"])
def test_adapters_on_the_head_compile(name: str) -> None:
    """In one graph more than without us, as with a plain head.

    Who asks for logits afterwards gets those of the sum.
    """
    row = HEADS[name]
    plain, patched, reference = build(row), build(row, "peft"), build(row, double=True)
    reference.load_state_dict(plain.state_dict())
    inputs = {**batch(), "use_cache": False}
    made = patched(**inputs).logits.materialize()
    assert_as_good(made, plain(**inputs).logits, reference(**inputs).logits, "logits")
    assert stats(patched).fused == stats(patched).calls == 1
    torch._dynamo.reset()
    counters = [CompileCounter(), CompileCounter()]
    for model, counter in zip((plain, patched), counters, strict=True):
        model.compile(backend=counter)
        for _ in range(3):
            output = model(**inputs)
    assert counters[1].frame_count <= counters[0].frame_count + 1 and stats(patched).traced and output.logits is None
    assert_same_training(patched, plain, inputs, reference=reference)


def test_an_adapter_on_the_head_is_named_with_the_way_out() -> None:
    model = apply_cce(peft.get_peft_model(tiny_llama(), HEADS["c3a"].config()))
    with told() as messages:
        for _ in range(2):
            outputs = model(**batch())
            outputs.loss.backward()
    (message,) = messages
    assert "fell back to full logits" in message and type(outputs.logits) is torch.Tensor
    assert (stats(model).missed, stats(model).materialized) == (2, 2)
    assert "adapter (c3a) on its LM head" in message and "asked for the logits" not in message
    assert "target_modules" in message and 'modules_to_save=["lm_head"]' in message and "The loss is correct" in message


def test_an_adapter_that_adds_nothing_at_present_is_not_blamed() -> None:
    model = apply_cce(peft.get_peft_model(tiny_llama(), HEADS["lora"].config()))
    with told() as messages, model.disable_adapter():
        model.get_input_embeddings().weight.requires_grad_()
        model(**batch()).loss.backward()
    assert messages == [] and stats(model).fused == 1


def test_an_adapter_that_writes_to_some_tokens() -> None:
    """PEFT's aLoRA adds to the tokens from its invocation on, in place, and then asks for the dtype."""
    ids = batch()["input_ids"]
    row = lora("lm_head", target_modules=["q_proj", "lm_head"], alora_invocation_tokens=[int(ids[0, 12])])
    assert_same_training(build(row, "peft"), build(row), batch())
