"""Every causal LM and image-text-to-text class of the installed Transformers, tiny: patched, it trains like the unpatched one.

``tests/support/tiny.py`` builds the models. Each class is supported, refused with a reason, or listed as an exception. The
reasons for exceptions are tested here, so an outdated entry fails.
"""

import copy
import importlib.util
import inspect
from typing import Any

import classes
import pytest
import tiny
import torch
import transformers
from models import BATCH, assert_same_training, float64_copy, head_of, logits_made, loss_and_grads, module_state, stats
from numerics import assert_accurate
from tiny_options import OPTIONS

from hf_cce import apply_cce, remove_cce
from hf_cce.patches import refused
from hf_cce.patches.refused import SPECIAL, why_refuse_class

CLASSES = [*tiny.CAUSAL, *tiny.MULTIMODAL]
REFUSED = [name for name in CLASSES if why_refuse_class(getattr(transformers, name)) is not None]
UNFUSED = {"DoryForCausalLM", "IdeficsForVisionText2Text"}  # special classes whose loss is computed from full logits
TESTED = [name for name in CLASSES if name not in {*REFUSED, *tiny.UNBUILT, *tiny.BROKEN}]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", TESTED)
def test_training_matches_unpatched(name: str) -> None:
    """Loss and gradients; the patched model makes no logits, and the spy sees those of the unpatched one."""
    plain = tiny.build_or_skip(name)
    patched, reference = apply_cce(copy.deepcopy(plain)), float64_copy(plain)
    made = []
    for model in (plain, patched):
        with logits_made(model=model) as seen:
            loss_and_grads(model, tiny.text(name))
        made.append(bool(seen))
    assert made[0] or tiny.OLDER  # the spy does not know the logits of every class of an older Transformers
    assert made[1] is (made[0] and name in SPECIAL), seen
    for inputs in (tiny.text(name), {**tiny.text(name, ignored=False), "num_items_in_batch": torch.tensor(17.0)}):
        assert_same_training(patched, plain, inputs, reference=reference, redraw=True)
    counters = stats(patched)
    assert (counters.calls, counters.few_tokens) == (3, 0)
    assert (counters.fused, counters.missed, counters.materialized) == ((0, 3, 3) if name in UNFUSED else (3, 0, 0))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "PhiForCausalLM", "RoCBertForCausalLM"])
def test_small_head_error_is_detected(name: str) -> None:
    """A head that is off by 1e-5 is detected, in well- and in ill-conditioned models."""
    plain = tiny.build_or_skip(name)
    patched = apply_cce(copy.deepcopy(plain))
    with torch.no_grad():
        head_of(patched).weight.mul_(1 + 1e-5)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_training(patched, plain, tiny.text(name), redraw=True)


@pytest.mark.parametrize("name", [name for name in tiny.PICTURES if name in CLASSES])
def test_training_on_images_matches_unpatched(name: str) -> None:
    plain = tiny.build_or_skip(name, with_images=True)
    patched, inputs = apply_cce(copy.deepcopy(plain)), tiny.pictures(name)
    assert_same_training(patched, plain, inputs, redraw=True)
    assert (stats(patched).fused, stats(patched).materialized) == (1, 0)
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    assert loss_and_grads(patched, inputs)["loss"] != loss_and_grads(patched, other)["loss"], "the image must matter"
    with logits_made(model=patched) as seen:
        loss_and_grads(patched, inputs)
    assert seen == []


@pytest.mark.parametrize("name", TESTED)
def test_evaluation_generation_and_removal(name: str) -> None:
    plain = tiny.build_or_skip(name)
    patched = apply_cce(copy.deepcopy(plain))
    generates = not tiny.OLDER or tiny.generates(name)
    results = []
    for model in (plain, patched):
        loss_and_grads(model, tiny.text(name))
        model.eval()
        inputs = tiny.text(name)
        with torch.no_grad():
            evaluated = model(**inputs)
        assert len(evaluated.logits) == BATCH
        generated = tiny.generate(model, name) if generates else torch.zeros(())
        results.append((evaluated.logits, evaluated.loss, generated))
        model.train()
    (logits, loss, tokens), (our_logits, our_loss, our_tokens) = results
    assert torch.equal(our_logits, logits) and torch.equal(our_tokens, tokens)
    assert_accurate(our_loss, loss, loss.double(), "loss of an evaluation")
    assert module_state(patched) != module_state(plain)
    remove_cce(patched)
    assert module_state(patched) == module_state(plain)


@pytest.mark.parametrize("name", sorted({*REFUSED, *refused.REFUSED}))
def test_refused_class_is_unchanged(name: str) -> None:
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    attributes = sorted(vars(cls))
    with pytest.raises(ValueError, match=f"{name} cannot be patched: .*It is unchanged"):
        apply_cce(cls)
    assert sorted(vars(cls)) == attributes
    reason = why_refuse_class(cls) or ""
    if "no labels" in reason or "has no forward" in reason:
        assert "labels" not in inspect.signature(cls.forward).parameters
    elif "codebook" in reason:
        assert isinstance(cls(tiny.config(name)).get_output_embeddings(), torch.nn.ModuleList)
    else:
        assert name == "ProphetNetForCausalLM"


def test_class_tables_are_complete() -> None:
    """``supported_models`` and ``hf-cce models`` use these names without loading the classes."""
    assert set(REFUSED) == set(CLASSES) & set(refused.REFUSED)
    for table in (OPTIONS, tiny.FORWARD, tiny.IMAGE_TOKENS, tiny.PICTURES, tiny.UNBUILT, refused.SPECIAL):
        unknown = set(table) - set(CLASSES)
        assert not unknown or tiny.OLDER


@pytest.mark.skipif(tiny.OLDER, reason="the page is of a newer Transformers")
def test_models_page_is_current() -> None:
    """A class added by a newer Transformers is tested above automatically, and reported here until the table has it."""
    assert classes.stale() == [], "python -m tests.support.classes --write"


@pytest.mark.parametrize("name", tiny.BROKEN)
def test_broken_class_fails_unpatched(name: str) -> None:
    with pytest.raises(AttributeError, match=tiny.BROKEN[name]):
        tiny.build(name)(**tiny.text(name))


@pytest.mark.parametrize("name", [name for name in tiny.UNBUILT if name in CLASSES])
def test_untested_class_cannot_be_built(name: str) -> None:
    """Once a class can be built, its entry must be removed."""
    if importlib.util.find_spec(tiny.UNBUILT[name]) is not None:
        pytest.skip(f"{tiny.UNBUILT[name]} is installed here, and is not where the tests run")
    with pytest.raises(ImportError, match=tiny.UNBUILT[name]):
        tiny.build(name)
