"""Tiny causal LMs, and how a patched one is compared with the one as it is: loss, every gradient, logits that are made."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from numerics import as_good, assert_as_good
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cce import apply_cce
from hf_cce.api import causal_lm
from hf_cce.deferred.lazy_tensor import LazyGrad, LazyTensor
from hf_cce.head_checks import find_head
from hf_cce.patches.causal_lm import patch_of

VOCABULARY, HIDDEN, BATCH, LENGTH = 99, 32, 2, 24  # more tokens (48) than hidden sizes: [V, D] is smaller than logits
LossOf = Callable[[Any, Any], Tensor]  # the loss of a model for a batch
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Family:
    """How to build one family; ``options`` go on top of the common sizes, ``drop`` takes common ones away."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def build(self, **options: Any) -> Any:
        """The model in fp32 training mode, from a fixed seed."""
        sizes = {key: value for key, value in _COMMON.items() if key not in self.drop}
        config = getattr(transformers, self.config)(**{**sizes, **self.options, **options})
        torch.manual_seed(0)
        return randomise(getattr(transformers, self.model)(config)).train()


def head_of(model: Any) -> Any:
    """Its LM head."""
    head = find_head(model)
    assert head is not None
    return head


def randomise(model: Any) -> Any:
    """Random biases (they start at zero) and a head large enough for softcap and scale to show in the loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
        head_of(model).weight.normal_(std=0.5)
    return model


_LLAMA = ("LlamaForCausalLM", "LlamaConfig")
_BART = {"d_model": HIDDEN, "dropout": 0.0, "is_decoder": True, "is_encoder_decoder": False} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 40))
}
# What differs between head and loss; every other class is in test_all_classes.py.
FAMILIES: dict[str, Family] = {
    "llama": Family(*_LLAMA, {"tie_word_embeddings": False}),
    "llama_tied": Family(*_LLAMA, {"tie_word_embeddings": True}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16, "final_logit_softcapping": 5.0}),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 3.0}),
    "phi": Family("PhiForCausalLM", "PhiConfig", {"tie_word_embeddings": False}),  # a bias
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_positions": 64}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        drop=(*_SIZES, "max_position_embeddings"),
    ),
    "bert": Family(
        "BertLMHeadModel",
        "BertConfig",
        {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        drop=("num_key_value_heads",),
    ),
    "bart": Family("BartForCausalLM", "BartConfig", _BART, drop=_SIZES),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2, "num_local_experts": 4},
    ),
    "bamba": Family(
        "BambaForCausalLM",
        "BambaConfig",
        {"z_loss_coefficient": 0.1, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
        | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    ),
}


def tiny_llama(**options: Any) -> Any:
    """The model for everything that does not depend on the family."""
    return FAMILIES["llama"].build(**options)


def twins(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model as it is, and its copy with the patch."""
    plain = FAMILIES[family].build(**options)
    return plain, apply_cce(copy.deepcopy(plain))


@contextmanager
def told() -> Iterator[list[str]]:
    """What hf_cce warns of within, each warning as often as it was given."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if "hf_cce" in str(warning.message)]


def batch(*, ignored: bool = True, rows: int = BATCH, seed: int = 1, words: int = VOCABULARY) -> dict[str, Tensor]:
    """``input_ids`` [B, S] below ``words`` with labels; ``ignored``: a row padded at its end, and an unscored prompt."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, words, (rows, LENGTH), generator=generator)
    labels = input_ids.clone()
    inputs = {"input_ids": input_ids, "labels": labels}
    if ignored:
        inputs["attention_mask"] = torch.ones_like(input_ids)
        inputs["attention_mask"][0, -5:] = 0
        labels[0, -5:] = -100
        labels[:, :3] = -100
    return inputs


class StayDouble(TorchFunctionMode):
    """float64 stays float64 where a model's code asks for float32 (norms, softmax, the loss): the exact reference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


def exact(model: Any) -> Any:
    """A float64 copy of an unpatched model; run it with ``loss_and_grads(..., double=True)``."""
    model = copy.deepcopy(model).double()
    model.config._experts_implementation = "eager"  # torch's grouped_mm takes no float64
    return model


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def own_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    """What the model says its loss is."""
    return model(**inputs).loss


def loss_and_grads(model: Any, inputs: Any, *, double: bool = False, loss_of: LossOf = own_loss) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name; parameters without a gradient are left out."""
    model.zero_grad(set_to_none=True)
    if double:
        usual = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            inputs = {name: value.double() if _is_float(value) else value for name, value in inputs.items()}
            with StayDouble():
                loss = loss_of(model, inputs)
        finally:
            torch.set_default_dtype(usual)
    else:
        loss = loss_of(model, inputs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _by_module(results: dict[str, Tensor], head: set[str]) -> dict[str, Tensor]:
    """Gradients of one module as one vector, those of the head one by one.

    A bias in front of a softmax has a gradient that is zero but for rounding (the key bias of attention) or nearly so;
    its own relative error is chance, and says something only next to the weight it belongs to.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, value in results.items():
        groups.setdefault(name if name in head else name.rpartition(".")[0] or name, []).append(value.flatten())
    return {name: torch.cat(values) for name, values in groups.items()}


def assert_same_training(
    patched: Any,
    plain: Any,
    inputs: dict[str, Any],
    *,
    reference: Any = None,
    redraw: bool = False,
    loss_of: LossOf = own_loss,
) -> None:
    """Loss and every gradient of ``patched`` are as close to float64 as those of the unpatched ``plain``.

    With ``redraw`` the unpatched one may show its rounding noise in several orders of summation, where one is not enough.
    """
    reference = exact(plain) if reference is None else reference
    reference = loss_and_grads(reference, inputs, double=True, loss_of=loss_of)
    twin, actual = (loss_and_grads(model, inputs, loss_of=loss_of) for model in (plain, patched))
    assert actual.keys() == twin.keys()
    assert math.isfinite(float(twin["loss"]))
    mine = {id(parameter) for parameter in head_of(plain).parameters()}
    head = {name for name, parameter in plain.named_parameters() if id(parameter) in mine}
    actual, twin, reference = (_by_module(results, head) for results in (actual, twin, reference))
    draw = lambda other: _by_module(loss_and_grads(other, inputs, loss_of=loss_of), head)  # noqa: E731
    assert_results_as_good(actual, twin, reference, plain=plain if redraw else None, draw=draw)


def assert_results_as_good(
    actual: dict[str, Tensor],
    twin: dict[str, Tensor],
    reference: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    plain: Any = None,
    draw: Callable[[Any], dict[str, Tensor]] | None = None,
) -> None:
    """Each of ``actual`` by itself, as close as ``twin`` is.

    With ``plain``, ``draw`` shows the rounding of that model in other orders where one does not tell how large it is.
    """
    twins = [twin]
    for name, value in actual.items():
        told = as_good(value, [each[name] for each in twins], reference[name], dtype)
        if not told and plain is not None and draw is not None and len(twins) == 1:
            twins += [draw(_reordered(plain, seed)) for seed in range(7)]
        assert_as_good(value, [each[name] for each in twins], reference[name], name, dtype)


def _reordered(model: Any, seed: int) -> Any:
    """The same model, its LM head summing over the hidden dimension in another order: the same function, rounded anew.

    Where a gradient is ill-conditioned (a query in front of a peaked softmax), the error of one computation is one draw of
    rounding noise, amplified; how large the unpatched model's own error is, several draws tell.
    """
    model = copy.deepcopy(model)
    head = head_of(model)
    head = getattr(head, "base_layer", head)  # of one that PEFT adapts
    order = torch.randperm(head.weight.shape[1], generator=torch.Generator().manual_seed(seed))
    head.forward = lambda hidden: torch.nn.functional.linear(hidden[..., order], head.weight[:, order], head.bias)
    return model


class _Spy(TorchDispatchMode):
    def __init__(self, tokens: int, besides: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.tokens = tokens
        self.besides = besides
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            made_of_nothing = isinstance(value, (LazyTensor, LazyGrad)) or (isinstance(value, Tensor) and value.is_meta)
            large = isinstance(value, Tensor) and not made_of_nothing and value.numel() >= self.tokens * VOCABULARY
            if large and VOCABULARY in value.shape and tuple(value.shape) not in self.besides:
                self.seen.append(f"{func} made {tuple(value.shape)}")
        return result


@contextmanager
def logits_made(tokens: int = BATCH * LENGTH - BATCH, model: Any = None) -> Iterator[list[str]]:
    """The operations outside our own that made a tensor of ``tokens`` x vocabulary, in forward and backward.

    Those of the shape of a parameter of ``model`` are left out: they are its gradient. A dispatch mode sees
    ``torch.ops.hf_cce`` as one operation, not what happens inside.
    """
    shapes = {tuple(parameter.shape) for parameter in model.parameters()} if model is not None else set()
    assert not [shape for shape in shapes if shape[-1] == VOCABULARY and math.prod(shape[:-1]) >= tokens]
    with _Spy(tokens, shapes) as spy:
        yield spy.seen


def anatomy(model: nn.Module) -> dict[str, Any]:
    """What a patch could leave behind: class, attributes and hooks of the model and of every module in it."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    return {
        name: (type(module), sorted(vars(module)), [len(getattr(module, hook) or ()) for hook in hooks])
        for name, module in model.named_modules()
    }


def with_open_gates(model: Any) -> Any:
    """``model`` with LLaMA-Adapter's prompts at work: their gates are zero at first, and the prompts do nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaption_gate" in name:
                parameter.fill_(0.5)
    return model


def stats(model: Any) -> Any:
    """The counters of a patched model, bare or wrapped."""
    patch = patch_of(causal_lm(model))
    assert patch is not None
    return patch.stats


def assert_fused(model: Any, calls: int | None = None) -> None:
    """Every training call so far was answered without logits."""
    counters = stats(model)
    assert counters.fused > 0 and counters.materialized == counters.missed == 0
    assert calls is None or counters.calls == calls
