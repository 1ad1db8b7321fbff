"""Tiny causal LMs, and helpers to compare a patched one with the original: loss, every gradient, materialized logits."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from numerics import assert_accurate, is_accurate
from tiny_config import VOCAB_SIZE, tiny_config
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hf_cce import apply_cce
from hf_cce.api import causal_lm
from hf_cce.deferred.lazy_tensor import LazyGrad, LazyTensor
from hf_cce.head_checks import find_head
from hf_cce.patches.causal_lm import patch_of

BATCH, LENGTH = 2, 24  # 48 tokens, more than hidden sizes: the logits are larger than [V, D]
LossOf = Callable[[Any, Any], Tensor]  # returns a model's loss for a batch
_SMALLER = {"num_hidden_layers": 1, "intermediate_size": 40}  # than tiny_config


@dataclass(frozen=True)
class Family:
    """A class of Transformers and options for tiny_config."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, **options: Any) -> Any:
        cls = getattr(transformers, self.model)
        config = tiny_config(cls.config_class, {**_SMALLER, **self.options, **options})
        torch.manual_seed(0)
        return randomise(cls(config)).train()


def head_of(model: Any) -> Any:
    head = find_head(model)
    assert head is not None
    return head


def randomise(model: Any) -> Any:
    """Randomize biases (zero by default) and enlarge the head's weight, so that softcap and scale affect the loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
        head_of(model).weight.normal_(std=0.5)
    return model


# Families that differ between head and loss; test_all_classes.py covers every other class.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama_tied": Family("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": Family("Gemma2ForCausalLM"),
    "granite": Family("GraniteForCausalLM"),
    # Has a bias. Transformers 5.0 has no default of pad_token_id
    "phi": Family("PhiForCausalLM", {"tie_word_embeddings": False, "pad_token_id": 0}),
    "gpt2": Family("GPT2LMHeadModel"),
    "bert": Family("BertLMHeadModel", {"is_decoder": True}),
    "bart": Family("BartForCausalLM", {"num_hidden_layers": ...}),
    "mixtral": Family("MixtralForCausalLM"),
    "bamba": Family("BambaForCausalLM", {"num_hidden_layers": 2, "attn_layer_indices": [1]}),
}


def tiny_llama(**options: Any) -> Any:
    """Return the model for tests that do not depend on the family."""
    return FAMILIES["llama"].build(**options)


def twins(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    plain = FAMILIES[family].build(**options)
    return plain, apply_cce(copy.deepcopy(plain))


@contextmanager
def cce_warnings() -> Iterator[list[str]]:
    """Collect hf_cce's warnings inside the block, repeated ones included."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if "hf_cce" in str(warning.message)]


def batch(*, ignored: bool = True, rows: int = BATCH, seed: int = 1, vocab_size: int = VOCAB_SIZE) -> dict[str, Tensor]:
    """Return ``input_ids`` [B, S] below ``vocab_size`` with labels; ``ignored`` pads the end of a row and ignores a prompt."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, vocab_size, (rows, LENGTH), generator=generator)
    labels = input_ids.clone()
    inputs = {"input_ids": input_ids, "labels": labels}
    if ignored:
        inputs["attention_mask"] = torch.ones_like(input_ids)
        inputs["attention_mask"][0, -5:] = 0
        labels[0, -5:] = -100
        labels[:, :3] = -100
    return inputs


class KeepFloat64(TorchFunctionMode):
    """Keep float64 where a model's code asks for float32 (norms, softmax, the loss), for an exact reference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs) if func is not Tensor.float else args[0].double()


def float64_copy(model: Any) -> Any:
    """Return a float64 copy of an unpatched model; run it with ``loss_and_grads(..., double=True)``."""
    model = copy.deepcopy(model).double()
    model.config._experts_implementation = "eager"  # torch's grouped_mm does not support float64
    return model


def model_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).loss


def loss_and_grads(model: Any, inputs: Any, *, double: bool = False, loss_of: LossOf = model_loss) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if double:
        usual = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            inputs = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
            with KeepFloat64():
                loss = loss_of(model, inputs)
        finally:
            torch.set_default_dtype(usual)
    else:
        loss = loss_of(model, inputs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _by_module(results: dict[str, Tensor], head: set[str]) -> dict[str, Tensor]:
    """Concatenate the gradients of each module into one vector, except those of the head.

    A bias before a softmax has a gradient that is zero up to rounding (the key bias of attention), or nearly so. Its own
    relative error is random and meaningful only together with the weight it belongs to. So is that of a number added to all
    logits: GLoRA's E, which belongs to the number D.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, value in results.items():
        key = name.replace("glora_E", "glora_D") if name in head else name.rpartition(".")[0] or name
        groups.setdefault(key, []).append(value.flatten())
    return {name: torch.cat(values) for name, values in groups.items()}


def assert_same_training(
    patched: Any,
    plain: Any,
    inputs: dict[str, Any],
    *,
    reference: Any = None,
    redraw: bool = False,
    loss_of: LossOf = model_loss,
) -> None:
    """Check that loss and gradients of ``patched`` are as close to float64 as those of the unpatched ``plain``.

    With ``redraw``, the unpatched model's rounding error is sampled in several summation orders if one is not enough.
    """
    reference = float64_copy(plain) if reference is None else reference
    reference = loss_and_grads(reference, inputs, double=True, loss_of=loss_of)
    twin, actual = (loss_and_grads(model, inputs, loss_of=loss_of) for model in (plain, patched))
    assert actual.keys() == twin.keys()
    assert math.isfinite(float(twin["loss"]))
    mine = {id(parameter) for parameter in head_of(plain).parameters()}
    head = {name for name, parameter in plain.named_parameters() if id(parameter) in mine}
    actual, twin, reference = (_by_module(results, head) for results in (actual, twin, reference))
    draw = lambda seed: _by_module(loss_and_grads(_reordered(plain, seed), inputs, loss_of=loss_of), head)  # noqa: E731
    assert_results_as_good(actual, twin, reference, draw if redraw else None)


def assert_results_as_good(
    actual: dict[str, Tensor],
    twin: dict[str, Tensor],
    reference: dict[str, Tensor],
    draw: Callable[[int], dict[str, Tensor]] | None = None,
) -> None:
    """Check that each of ``actual`` is as close to ``reference`` as ``twin`` is, or as other draws of it by a seed are."""
    twins = [twin]
    for name, value in actual.items():
        for seeds in (range(7), range(7, 31)):
            enough = is_accurate(value, [each[name] for each in twins], reference[name], torch.float32)
            if not enough and draw is not None and len(twins) <= 1 + seeds.start:
                twins += map(draw, seeds)
        assert_accurate(value, [each[name] for each in twins], reference[name], name, torch.float32)


def _reordered(model: Any, seed: int) -> Any:
    """Return a copy whose LM head sums over the hidden dimension in another order: the same function, rounded differently.

    If a gradient is ill-conditioned (a query before a peaked softmax), the error of one run is a single sample of amplified
    rounding noise. Several samples show how large the unpatched model's own error is.
    """
    model = copy.deepcopy(model)
    head = head_of(model)
    head = getattr(head, "base_layer", head)  # the inner layer of a PEFT adapter
    order = torch.randperm(head.weight.shape[1], generator=torch.Generator().manual_seed(seed))
    head.forward = lambda hidden: torch.nn.functional.linear(hidden[..., order], head.weight[:, order], head.bias)
    return model


class _Spy(TorchDispatchMode):
    def __init__(self, tokens: int, excluded_shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.tokens = tokens
        self.excluded_shapes = excluded_shapes
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            is_lazy_or_meta = isinstance(value, (LazyTensor, LazyGrad)) or (isinstance(value, Tensor) and value.is_meta)
            large = isinstance(value, Tensor) and not is_lazy_or_meta and _in_memory(value) >= self.tokens * VOCAB_SIZE
            if large and VOCAB_SIZE in value.shape and tuple(value.shape) not in self.excluded_shapes:
                self.seen.append(f"{func} made {tuple(value.shape)}")
        return result


def _in_memory(x: Tensor) -> int:
    """Return the number of entries of ``x``, counting those once that share memory, as after ``expand``."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)


@contextmanager
def logits_made(tokens: int = BATCH * LENGTH - BATCH, model: Any = None) -> Iterator[list[str]]:
    """Return the operations outside hf_cce that created a tensor of ``tokens`` x vocabulary, in forward and backward.

    Tensors with the shape of a parameter of ``model`` are excluded: they are gradients. A dispatch mode sees
    ``torch.ops.hf_cce`` as one operation, not what happens inside.
    """
    shapes = {tuple(parameter.shape) for parameter in model.parameters()} if model is not None else set()
    assert not [shape for shape in shapes if shape[-1] == VOCAB_SIZE and math.prod(shape[:-1]) >= tokens]
    with _Spy(tokens, shapes) as spy:
        yield spy.seen


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return what a patch could leave behind: class, attributes and hooks of the model and all its modules."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    return {
        name: (type(module), sorted(vars(module)), [len(getattr(module, hook) or ()) for hook in hooks])
        for name, module in model.named_modules()
    }


def with_lora(model: Any, **options: Any) -> Any:
    """Return a PeftModel with a LoRA adapter, of ``q_proj`` by default, whose weights are random and always the same."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


def with_open_gates(model: Any) -> Any:
    """Activate LLaMA-Adapter's prompts: their gates start at zero, which disables them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaption_gate" in name:
                parameter.fill_(0.5)
    return model


def stats(model: Any) -> Any:
    patch = patch_of(causal_lm(model))
    assert patch is not None
    return patch.stats


def assert_fused(model: Any, calls: int | None = None) -> None:
    counters = stats(model)
    assert counters.fused > 0 and counters.materialized == counters.missed == 0
    assert calls is None or counters.calls == calls
