"""x"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import tiny
from models import BATCH, LENGTH, anatomy, assert_same_training, exact, logits_made, loss_and_grads

from hf_cce import apply_cce, remove_cce

@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_trains_like_the_unpatched_model(name: str) -> None:
    plain = tiny.build(name)
    patched, reference = apply_cce(copy.deepcopy(plain)), exact(plain)
    variants: list[dict[str, Any]] = [tiny.text(name), tiny.text(name, ignored=False), {**tiny.text(name), "num_items_in_batch": torch.tensor(17.0)}]
    for inputs in variants:
        assert_same_training(patched, plain, inputs, reference=reference)
    stats = patched._hf_cce.stats
    assert (stats.calls, stats.fused, stats.missed, stats.materialised) == (len(variants), len(variants), 0, 0)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_training_makes_no_logits(name: str) -> None:
    model = tiny.build(name)
    with logits_made(model=model) as seen:
        loss_and_grads(model, tiny.text(name))
    assert seen, "the spy must see the logits of an unpatched model"
    apply_cce(model)
    with logits_made(model=model) as seen:
        loss_and_grads(model, tiny.text(name))
    assert seen == []


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_is_the_unpatched_model_elsewhere_and_afterwards(name: str) -> None:
    plain = tiny.build(name)
    patched = apply_cce(copy.deepcopy(plain))
    results = []
    for model in (plain, patched):
        loss_and_grads(model, tiny.text(name))
        model.eval()
        inputs = tiny.text(name)
        with torch.no_grad():
            evaluated = model(**inputs)
        generated = model.generate(inputs["input_ids"][:1, :6], max_new_tokens=4, do_sample=False)
        model.train()
        results.append((evaluated.logits, evaluated.loss, generated))
        assert evaluated.logits.shape[:2] == (BATCH, LENGTH)
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)
    assert anatomy(patched) != anatomy(plain)
    remove_cce(patched)
    assert anatomy(patched) == anatomy(plain)
