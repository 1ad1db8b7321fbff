"""Every family: a patched model trains exactly as the unpatched one, and is the unpatched one everywhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from models import (
    BATCH,
    FAMILIES,
    LENGTH,
    anatomy,
    assert_fused,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
)
from numerics import assert_as_good

from hf_cce import apply_cce, remove_cce

# What each deviates in is in models.py; these take no num_items_in_batch, their loss is a plain mean.
OWN_LOSS = {"bart"}


@pytest.fixture(autouse=True)
def no_warning(recwarn: Any) -> Any:
    """A patched family never says that it made logits after all."""
    yield
    assert not [str(w.message) for w in recwarn if "hf_cce" in str(w.message)]


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_the_unpatched_model(family: str) -> None:
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    variants: list[dict[str, Any]] = [batch(), batch(ignored=False)]
    if family not in OWN_LOSS:
        variants.append({**batch(), "num_items_in_batch": torch.tensor(17.0)})
    for inputs in variants:
        assert_same_training(patched, plain, inputs)
    stats = patched._hf_cce.stats
    assert (stats.calls, stats.fused, stats.missed, stats.materialized) == (len(variants), len(variants), 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_makes_no_logits(family: str) -> None:
    model = FAMILIES[family].build()
    with logits_made() as seen:
        loss_and_grads(model, batch())
    assert seen, "the spy must see the logits of an unpatched model"
    apply_cce(model)
    with logits_made() as seen:
        loss_and_grads(model, batch())
    assert seen == []


@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_unpatched_model_elsewhere_and_afterwards(family: str) -> None:
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    results = []
    for model in (plain, patched):
        trained = loss_and_grads(model, batch())
        model.eval()
        inputs = batch()
        generated = model.generate(inputs["input_ids"][:1, :6], max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            evaluated = model(**inputs)
        assert isinstance(model(**inputs).logits, torch.Tensor)  # with gradients, as in a probe of a frozen model
        model.train()
        unlabelled = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        unlabelled = unlabelled.materialize() if model is patched else unlabelled
        with torch.no_grad():
            undifferentiated = model(**inputs)
        results.append((generated, evaluated.logits, unlabelled, undifferentiated.logits, evaluated.loss))
        assert evaluated.logits.shape[:2] == (BATCH, LENGTH) and trained
    for before, after in zip(*(each[:-1] for each in results), strict=True):
        assert torch.equal(before, after)
    assert_as_good(results[1][-1], results[0][-1], results[0][-1].double(), "loss of an evaluation")
    assert anatomy(patched) != anatomy(plain)
    remove_cce(patched)
    assert anatomy(patched) == anatomy(plain)


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("gemma2", "final_logit_softcapping", 2.0),
        ("granite", "logits_scaling", 7.0),
        ("cohere", "logit_scale", 0.9),
        ("falcon_h1", "lm_head_multiplier", 0.9),
        ("bamba", "z_loss_coefficient", 0.4),
    ],
)
def test_the_knobs_matter(family: str, option: str, value: float) -> None:
    """The families above would catch a knob that is ignored: another value gives another loss."""
    losses = [
        loss_and_grads(apply_cce(FAMILIES[family].build(**changed)), batch())["loss"]
        for changed in ({}, {option: value})
    ]
    assert abs(losses[0] - losses[1]) > 0.01 * abs(losses[0])


@pytest.mark.parametrize("family", ["bert", "phi", "roberta"])
def test_the_bias_matters(family: str) -> None:
    model = apply_cce(FAMILIES[family].build())
    before = loss_and_grads(model, batch())["loss"]
    with torch.no_grad():
        model.get_output_embeddings().bias.zero_()
    assert abs(loss_and_grads(model, batch())["loss"] - before) > 0.001 * before


@pytest.mark.parametrize("name", ["Bart", "Marian"])
def test_a_float32_bias_on_logits_of_autocast(name: str) -> None:
    """Encoder-decoders keep ``final_logits_bias`` in float32: added to bfloat16 logits it makes them float32, and the loss."""
    kind = {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}[name]
    sizes = {
        f"{part}_{of}": 1 if "layers" in of else 2
        for part in ("encoder", "decoder")
        for of in ("layers", "attention_heads")
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99, d_model=32, encoder_ffn_dim=40, decoder_ffn_dim=40, dropout=0.0, max_position_embeddings=64,
        decoder_start_token_id=2, pad_token_id=1, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(config).train()
    plain.final_logits_bias.normal_()
    patched = apply_cce(copy.deepcopy(plain))
    inputs = {"input_ids": torch.randint(3, 99, (2, 10)), "labels": torch.randint(3, 99, (2, 7))}
    inputs["labels"][0, -3:] = -100
    reference, found = loss_and_grads(exact(plain), inputs, double=True), []
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs)
        assert output.loss.dtype is output.logits.dtype is torch.float32
        output.loss.backward()
        found.append({"loss": output.loss.detach()} | {key: x.grad for key, x in model.named_parameters()})
    assert_fused(patched, 1)
    everything = [torch.cat([x[key].flatten() for key in reference if key != "loss"]) for x in (*found, reference)]
    assert_as_good(everything[1], everything[0], everything[2], "gradient", torch.bfloat16)
    assert_as_good(found[1]["loss"], found[0]["loss"], reference["loss"], "loss", torch.bfloat16)


def test_the_loss_is_float32_whatever_the_weights_are() -> None:
    """As docs/start/support.md has it: BART's own loss is of logits that it leaves in bfloat16."""
    plain = FAMILIES["bart"].build().bfloat16()
    patched = apply_cce(copy.deepcopy(plain))
    assert plain(**batch()).loss.dtype == torch.bfloat16 and patched(**batch()).loss.dtype == torch.float32
