"""A model on which Liger, Apple's CCE or Unsloth is active is refused by name; what they do not patch is accepted.

The stand-ins are functions with the names and modules of the released ones, installed where those packages install them: on the
instance (``MethodType``), the class, in ``LOSS_MAPPING`` or on ``torch.nn.functional``. An installed liger_kernel runs itself.
"""

import functools
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import FAMILIES, tiny_llama, with_lora
from transformers.loss import loss_utils

from hf_cce import apply_cce
from hf_cce.patches.others import why_other

LLAMA = transformers.LlamaForCausalLM
FORWARDS = {
    "liger": ("liger_kernel.transformers.model.llama", "lce_forward", "Liger's cross-entropy", "liger_kernel_config="),
    "axolotl": (
        "axolotl.integrations.liger.models.deepseekv2", "lce_forward", "from Axolotl's plugin", "liger_cross_entropy: false",
    ),
    "apple": ("cut_cross_entropy.transformers.llama", "cce_forward", "Apple's cut cross-entropy", "cce_patch()"),
    "unsloth": (
        "unsloth.models.llama", "CausalLM_fast_forward.<locals>._CausalLM_fast_forward", "Unsloth", "AutoModelForCausalLM",
    ),
    "unsloth_compiled": ("unsloth_compiled_module_llama", "LlamaForCausalLM.forward", "Unsloth", "without importing unsloth"),
}  # fmt: skip


def function_of(module: str, name: str) -> Any:
    def forward(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        raise AssertionError("nothing here calls it")

    forward.__module__, forward.__qualname__ = module, name
    return forward


def check(target: Any, who: str) -> None:
    module, name, reason, advice = FORWARDS[who]
    before = {key: value for key, value in vars(target).items() if key != "forward"}
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be patched: ") as raised:
        apply_cce(target)
    text = str(raised.value)
    assert reason in text and f"({module}.{name})" in text and advice in text and "It is unchanged" in text
    assert {key: value for key, value in vars(target).items() if key != "forward"} == before


@pytest.mark.parametrize("who", FORWARDS)
def test_patched_instance_or_class_is_refused(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, model = function_of(*FORWARDS[who][:2]), tiny_llama()
    model.forward = MethodType(forward, model)
    check(model, who)
    monkeypatch.setattr(LLAMA, "forward", forward)
    check(tiny_llama(), who)
    check(LLAMA, who)


def test_patch_under_wrappers_is_refused() -> None:
    """accelerate and others wrap forward again, with or without copying its name; ``__wrapped__`` leads to the original."""
    inner = function_of(*FORWARDS["liger"][:2])
    for assigned in (functools.WRAPPER_ASSIGNMENTS, ()):
        outer = functools.wraps(inner, assigned=assigned)(lambda *args, labels=None, **kwargs: None)
        assert assigned or outer.__module__ == __name__
        model = tiny_llama()
        model.forward = MethodType(outer, model)
        check(model, "liger")


def test_patch_inside_peft_is_refused() -> None:
    pytest.importorskip("peft")
    model = tiny_llama()
    model.forward = MethodType(function_of(*FORWARDS["apple"][:2]), model)
    with pytest.raises(ValueError, match="Apple's cut cross-entropy is active"):
        apply_cce(with_lora(model))


def test_unsloth_loss_function_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """patch_loss_functions() writes into LOSS_MAPPING; the class keeps its own forward."""
    theirs = function_of("unsloth_zoo.loss_utils", "patch_loss_functions.<locals>.UnslothForCausalLMLoss")
    model, gpt2 = tiny_llama(), FAMILIES["gpt2"].build()
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", theirs)
    for target in (model, gpt2, LLAMA):
        assert "Unsloth is active on it" in (why_other(target) or "")
    model.loss_function = loss_utils.ForCausalLMLoss  # set explicitly on this model, so it takes precedence
    assert why_other(model) is None


def test_liger_functional_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr(F, "cross_entropy", function_of("liger_kernel.transformers.functional", "liger_cross_entropy"))
    with pytest.raises(ValueError, match=r"Liger's cross-entropy is active on it .*liger_cross_entropy"):
        apply_cce(model)


def test_other_wrappers_are_accepted() -> None:
    """Custom forwards and wrappers, Liger's layers, names with the same prefix, and our own patch applied twice."""
    model = tiny_llama()
    model.model.norm.forward = MethodType(
        function_of("liger_kernel.transformers.rms_norm", "forward"), model.model.norm
    )
    model.forward = MethodType(function_of("liger_kernel_of_mine.model", "forward"), model)
    assert why_other(model) is None
    fresh = tiny_llama()
    assert why_other(apply_cce(fresh)) is None and apply_cce(fresh) is fresh


def test_released_liger() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    options = {"rope": False, "rms_norm": False, "swiglu": False}
    model = tiny_llama()
    patches.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True, **options)
    check(model, "liger")
    model = tiny_llama()
    patches.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False, **options | {"rms_norm": True})
    ours = apply_cce(model)
    assert type(ours) is LLAMA and why_other(ours) is None and torch.is_tensor(ours.lm_head.weight)
