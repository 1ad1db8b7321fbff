"""LM heads quantized by bitsandbytes or torchao: fused if the head multiplies with its dequantized weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    FAMILIES,
    assert_fused,
    assert_same_training,
    batch,
    cce_warnings,
    float64_copy,
    head_of,
    logits_made,
    stats,
)
from numerics import assert_accurate
from torch import Tensor, nn

from hf_cce import CCEConfig, apply_cce, linear_cross_entropy, linear_log_probs
from hf_cce.quantized import FrozenWeight, bitsandbytes_weight

TOKENS = 4 * 23  # of ``batch(rows=4)``, shifted


def four_bit(**options: Any) -> Callable[[Any], Tensor]:
    """Return a function that quantizes the head to 4 bits and returns its dequantized weight in float64."""

    def quantise(model: Any) -> Tensor:
        bnb = pytest.importorskip("bitsandbytes")
        old = head_of(model)
        storage = {"quant_storage": options.get("quant_storage", torch.uint8)}
        kind = {key: options[key] for key in ("compress_statistics", "quant_type") if key in options}
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, old.bias is not None, options.get("compute_dtype"), **kind, **storage
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, module=new, **kind, **storage)
        new.bias = old.bias
        model.set_output_embeddings(new.to("cpu").train())
        state = new.weight.quant_state
        dtype, state.dtype = state.dtype, torch.float32
        weight = bnb.functional.dequantize_4bit(new.weight.data, state)
        state.dtype = dtype
        return weight.double()

    return quantise


def torchao(name: str, **options: Any) -> Callable[[Any], Tensor]:
    def quantise(model: Any) -> Tensor:
        quantization = pytest.importorskip("torchao.quantization")
        head, config = head_of(model), getattr(quantization, name)(**options)
        quantization.quantize_(model, config, filter_fn=lambda module, _: module is head)
        return head_of(model).weight.dequantize(torch.float32).double()

    return quantise


FORMATS: dict[str, Callable[[Any], Tensor]] = {
    "nf4": four_bit(quant_type="nf4", compress_statistics=False),
    "nf4 twice": four_bit(quant_type="nf4", compress_statistics=True),
    "fp4": four_bit(quant_type="fp4", compute_dtype=torch.float32),
    "nf4 stored as float": four_bit(quant_type="nf4", quant_storage=torch.float32),
    "int8": torchao("Int8WeightOnlyConfig"),
    "float8": torchao("Float8WeightOnlyConfig"),
}


def build(
    quantise: Callable[[Any], Tensor], family: str = "llama", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Return a model with a quantized head, and the same model in float64 with the dequantized weight."""
    model = FAMILIES[family].build(tie_word_embeddings=False, hidden_size=64).to(dtype)
    reference = float64_copy(model)
    weight = quantise(model)
    head_of(reference).weight = nn.Parameter(weight, requires_grad=False)
    return model, reference


@pytest.mark.parametrize(
    ("name", "family", "dtype"),
    [
        *((name, "llama", torch.float32) for name in FORMATS),
        *((name, "llama", torch.bfloat16) for name in FORMATS if name != "fp4"),  # which computes in float32
        *(
            (name, family, torch.float32)
            for name in ("nf4", "int8", "float8")
            for family in ("phi", "gemma2", "granite")
        ),
    ],
    ids=str,
)
def test_loss_and_gradients(name: str, family: str, dtype: torch.dtype) -> None:
    (plain, reference), (patched, _) = (build(FORMATS[name], family, dtype) for _ in range(2))
    apply_cce(patched)
    with cce_warnings() as messages:
        assert_same_training(patched, plain, batch(rows=4), reference=reference)
        with logits_made(TOKENS, patched) as seen:
            patched(**batch(rows=4)).loss.backward()
    assert seen == messages == []
    assert_fused(patched, calls=2)


@pytest.mark.parametrize("name", ["nf4", "int8", "float8"])
def test_autocast(name: str) -> None:
    (plain, reference), (patched, _) = (build(FORMATS[name]) for _ in range(2))
    apply_cce(patched)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = patched(**batch(rows=4)), plain(**batch(rows=4))
    assert ours.logits.dtype == theirs.logits.dtype and ours.loss.dtype == theirs.loss.dtype
    with torch.no_grad():
        exact_loss = reference(**batch(rows=4)).loss
    assert_accurate(ours.loss, theirs.loss, exact_loss, "loss", torch.bfloat16)
    assert torch.equal(ours.logits.materialize(), theirs.logits)
    ours.loss.backward()
    assert stats(patched).fused == 1


@pytest.mark.parametrize("name", FORMATS)
def test_evaluation_logits_match_library(name: str) -> None:
    (plain, _), (patched, _) = (build(FORMATS[name]) for _ in range(2))
    apply_cce(patched)
    for model in (plain, patched):
        model.eval()
        head_of(model).train()  # in evaluation, bitsandbytes uses another packing on some CPUs
    with torch.no_grad():
        ours, theirs = patched(**batch(rows=4)), plain(**batch(rows=4))
    assert torch.equal(ours.logits + 0, theirs.logits)
    assert_accurate(ours.loss, theirs.loss, theirs.loss.double(), "loss")


def test_accelerate_hooks_on_the_head() -> None:
    """accelerate adds hooks to every module of a model quantized by bitsandbytes."""
    hooks = pytest.importorskip("accelerate.hooks")
    (plain, reference), (patched, _) = (build(FORMATS["nf4"]) for _ in range(2))
    for model in (plain, patched):
        hooks.add_hook_to_module(head_of(model), hooks.AlignDevicesHook(io_same_device=True))
    assert_same_training(apply_cce(patched), plain, batch(rows=4), reference=reference)
    assert_fused(patched, calls=1)


@pytest.mark.parametrize("name", ["nf4", "int8", "float8"])
def test_lora_on_the_head(name: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_lora_weights=False)
    models = []
    for model in (*build(FORMATS[name]), build(FORMATS[name])[0]):
        model.is_loaded_in_4bit = name == "nf4" and model.dtype == torch.float32  # as from_pretrained sets it
        torch.manual_seed(3)
        models.append(peft.get_peft_model(model, config, autocast_adapter_dtype=False).train())
    plain, reference, patched = models
    for mine, theirs in zip(reference.parameters(), plain.parameters(), strict=True):
        if theirs.requires_grad:
            mine.data.copy_(theirs)
    assert_same_training(apply_cce(patched), plain, batch(rows=4), reference=reference.double())
    assert_fused(patched, calls=1)


def eight_bit(model: Any) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    old = head_of(model)
    new = bnb.nn.Linear8bitLt(old.in_features, old.out_features, False, has_fp16_weights=False, threshold=6.0)
    new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
    model.set_output_embeddings(new.to("cpu").train())


def grouped(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    head = head_of(model)
    quantization.quantize_(model, quantization.IntxWeightOnlyConfig(), filter_fn=lambda module, _: module is head)


@pytest.mark.parametrize(
    ("quantise", "why"),
    [
        (eight_bit, "Linear8bitLt, which quantises the hidden states as well"),
        (grouped, "the head's weight is a IntxUnpackedToInt8Tensor"),
    ],
    ids=["bitsandbytes 8 bit", "torchao intx"],
)
def test_unknown_format_gets_full_logits_and_one_warning(quantise: Any, why: str) -> None:
    plain, patched = (FAMILIES["llama"].build() for _ in range(2))
    quantise(plain), quantise(patched)
    apply_cce(patched)
    with cce_warnings() as messages:
        losses = [model(**batch(rows=4)).loss for model in (plain, patched, patched)]
    (message,) = messages
    assert "fell back to full logits" in message and why in message
    assert torch.equal(losses[0], losses[1]) and stats(patched).materialized == 2


V, D, N = 3001, 128, 70


def packed(nested: bool) -> tuple[FrozenWeight, Tensor, list[int]]:
    """Return a 4-bit weight, its dequantized value, and a list of the row counts dequantized at a time."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    made = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
    frozen = bitsandbytes_weight(*made, torch.float32, torch.nn.functional.linear)
    assert frozen is not None
    read, rows = frozen.read, []

    def counted(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows.append(stop - start)
        return read(start, stop, dtype)

    frozen.read = counted
    return frozen, functional.dequantize_4bit(*made), rows


@pytest.mark.parametrize("nested", [False, True])
def test_dequantized_rows_match_whole(nested: bool) -> None:
    frozen, whole, _ = packed(nested)
    assert torch.equal(frozen.dense(), whole)
    for start, stop in [(0, 1), (1, 2), (7, 900), (1600, V), (V - 1, V)]:
        assert torch.equal(frozen[start:stop].dense(), whole[start:stop])
    part = frozen[100:200][7:50].to(torch.bfloat16)
    assert type(part) is FrozenWeight and torch.equal(part.dense(), whole[107:150].bfloat16())


@pytest.mark.parametrize("budget", ["1MiB", "64MiB", "auto"])
def test_small_budget_dequantizes_in_slabs(budget: str) -> None:
    """The whole weight takes 1.5 MiB."""
    frozen, whole, rows = packed(nested=True)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::9] = -100
    options: dict[str, Any] = {"labels": labels, "config": CCEConfig(memory_budget=budget)}
    results = []
    for weight in (whole, frozen, whole.double()):
        h = hidden.to(weight.dtype, copy=True).requires_grad_()
        loss = linear_cross_entropy(h, weight, **options)
        found = linear_log_probs(h, weight, entropy=True, **options)
        (loss + (found.log_probs * found.entropy).sum()).backward()
        results.append((loss.detach(), found.log_probs.detach(), h.grad))
    for twin, actual, expected in zip(*results, strict=True):
        assert twin is not None and actual is not None and expected is not None
        assert_accurate(actual, twin, expected, budget)
    assert rows and (max(rows) < V) == (budget == "1MiB")


def test_blocks_across_rows_are_not_supported() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    made = functional.quantize_4bit(torch.randn(99, 32))
    assert bitsandbytes_weight(*made, torch.float32, torch.nn.functional.linear) is None
