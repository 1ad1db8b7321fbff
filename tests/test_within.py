"""A patched model whose forward does more: it calls itself, or puts its head into a checkpoint. It trains as it did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import (
    FAMILIES,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    exact,
    loss_and_grads,
    stats,
    tiny_llama,
)
from transformers import LlamaForCausalLM

from hf_cce import apply_cce


class Distils(LlamaForCausalLM):
    """Logits of itself without gradients come before its loss."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with torch.no_grad():
                self(input_ids=input_ids)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Samples(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with torch.no_grad():
                self.generate(input_ids=input_ids[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Drops(LlamaForCausalLM):
    """R-Drop: two losses of one batch, one inside the other."""

    def forward(self, input_ids: Any = None, labels: Any = None, inner: bool = False, **kwargs: Any) -> Any:
        first = None if inner else self(input_ids=input_ids, labels=labels, inner=True, **kwargs)
        second = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if first is not None:
            second.loss = (first.loss + second.loss) / 2
        return second


class Fails(LlamaForCausalLM):
    """And goes on: another call of itself raises within."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            with pytest.raises(RuntimeError, match="not this time"):
                self(input_ids=input_ids, labels=None, fail=True)
        if kwargs.pop("fail", False):
            raise RuntimeError("not this time")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def of(kind: Any) -> Any:
    plain = tiny_llama()
    model = kind(plain.config).train()
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize(("kind", "losses"), [(Distils, 1), (Samples, 1), (Drops, 2), (Fails, 1)])
def test_a_model_that_calls_itself(kind: Any, losses: int, recwarn: Any) -> None:
    plain = of(kind)
    patched = apply_cce(copy.deepcopy(plain))
    before = set(vars(patched.lm_head))
    for steps in (1, 2):
        assert_same_training(patched, plain, batch())
        assert_fused(patched, steps * losses)
    assert set(vars(patched.lm_head)) == before and not [w for w in recwarn if "hf_cce" in str(w.message)]


def test_a_hook_that_calls_the_model() -> None:
    plain = of(LlamaForCausalLM)
    reference = loss_and_grads(exact(plain), batch(), double=True)
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):

        def looks(module: Any, args: Any, model: Any = model) -> None:
            if not getattr(model, "looking", False):
                model.looking = True
                with torch.no_grad():
                    model(input_ids=batch()["input_ids"])
                model.looking = False

        model.model.register_forward_pre_hook(looks)
    twin, found = loss_and_grads(plain, batch()), loss_and_grads(patched, batch())
    assert_results_as_good(found, twin, reference)
    assert_fused(patched, 1)


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within a call"])
def test_what_ctrl_c_leaves_is_gone_with_the_next_call(inner: bool) -> None:
    """torch runs no hook then: neither the head nor what was interrupted may stay as they were."""
    plain = of(Distils if inner else LlamaForCausalLM)
    patched = apply_cce(copy.deepcopy(plain))
    stop = [True]

    def stops(module: Any, args: Any) -> None:
        if stop[0] and (not inner or not torch.is_grad_enabled()):
            raise KeyboardInterrupt

    patched.model.norm.register_forward_pre_hook(stops)
    plain.model.norm.register_forward_pre_hook(lambda module, args: None)
    before = set(vars(patched.lm_head))
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    stop[0] = False
    assert_same_training(patched, plain, batch())
    assert set(vars(patched.lm_head)) == before and stats(patched).fused == 1


def test_a_loss_type_that_is_set_later() -> None:
    """GPT-2 has none of its own; the one by which we name its loss must not win over it."""
    plain = FAMILIES["gpt2"].build()
    patched = apply_cce(copy.deepcopy(plain))
    for model in (plain, patched):
        model.loss_type = "ForMaskedLM"
    assert_same_training(patched, plain, batch())
