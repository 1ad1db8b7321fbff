"""Count what autograd keeps of a model's forward pass on a GPU, by running it on tensors without data."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_cce.diagnostics.machine import first_line
from hf_cce.diagnostics.shapes import auto_class

# Bytes of an activation, by dtype of the training; mixed is float32 weights under bfloat16 autocast, as Trainer's bf16=True.
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "mixed": 2}
NF4_BYTES = 4.127 / 8  # of a weight under QLoRA: 4-bit NormalFloat with double quantization


@dataclass(frozen=True)
class Adapters:
    """LoRA of this rank on every linear layer but the head, in float32; ``quantized``: over weights of 4 bits (QLoRA)."""

    rank: int
    quantized: bool = False


@dataclass(frozen=True)
class Model:
    """Sizes of a model that decide its memory."""

    name: str
    architecture: str
    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    weights: int = 0  # bytes
    gradients: int = 0  # bytes of all that is trained
    trains_head: bool = True
    unpacked: int = 0  # bytes of the largest 4-bit weight while it is multiplied in 16 bits


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of a forward pass up to the head: ``fixed`` + ``row`` for each row of the batch."""

    fixed: int
    row: int
    checkpointed: int | None  # per row with gradient checkpointing; None: the model does not support it
    layer: int  # per row, in the largest layer: what checkpointing computes again
    widest: int  # per row: the largest single tensor


class _FlashAttention(torch.autograd.Function):
    """Keep what the attention kernels of a GPU keep; on CPU tensors PyTorch would keep all scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kv_heads: int) -> Tensor:
        b, heads, n, _ = query.shape
        out = query.new_empty(b, n, heads, value.shape[-1]).transpose(1, 2)  # the kernels' layout
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # On tensors without data Transformers repeats keys and values for all heads; on a GPU it does not.
        if 0 < kv_heads < key.shape[1] == query.shape[1]:
            key, value = (x.new_empty(x.shape[0], kv_heads, *x.shape[2:]) for x in (key, value))
        ctx.save_for_backward(query, key, value, out, lse)
        return out


class _OnGPU(TorchFunctionMode):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FlashAttention.apply(*args[:3], self.kv_heads)
        return func(*args, **(kwargs or {}))


class _Count:
    """Bytes of the storages that autograd keeps, each once and without parameters, in all and in each layer."""

    def __init__(self, model: Any) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self.kept: dict[int, Any] = {}  # holds the storages: the address of a freed one may come again
        self.total = self.widest = 0
        self.inputs: list[int] = []
        self.layers: list[int] = []
        self.hooks = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                self.hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self._leave))

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self.parameters and storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.total += storage.nbytes()
            self.widest = max(self.widest, storage.nbytes())
        return x

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.inputs.append(hidden.numel() * hidden.element_size())
        self.layers.append(-self.total)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self.layers[-1] += self.total


def _counted(model: Any, batch: int, sequence: int, mixed: bool) -> _Count:
    count = _Count(model)
    kv_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None) or 0
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    with (
        _OnGPU(kv_heads),
        torch.autograd.graph.saved_tensors_hooks(count.pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        model.base_model(input_ids=ids, use_cache=False)
    for hook in count.hooks:
        hook.remove()
    return count


class _LoRALinear(torch.nn.Module):
    """A linear layer with an adapter as PEFT computes it: each layer casts its input to the adapter's float32."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        return (result + 2.0 * self.up(self.down(x.float()))).to(result.dtype)


def _with_adapters(lm: Any, adapters: Adapters) -> list[Tensor]:
    """Freeze ``lm`` and put adapters on its linear layers; return the weights of these layers."""
    lm.requires_grad_(False)
    head, adapted = lm.get_output_embeddings(), []
    for parent in list(lm.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not head:
                adapted.append(child.weight)
                setattr(parent, name, _LoRALinear(child, adapters.rank))
    return adapted


def _built(name: str, config: Any, dtype: torch.dtype) -> Any:
    """Build the LM of ``config``, with torch's SDPA if it can, else with its default attention."""
    from transformers.initialization import no_init_weights

    auto = auto_class(name, config)
    for options in ({"attn_implementation": "sdpa"}, {}):
        try:
            with no_init_weights():  # some initializers look at the values of the weights
                # Transformers writes options into the configuration, so each try gets a copy.
                lm = auto.from_config(copy.deepcopy(config), dtype=dtype, **options)
            lm.tie_weights()  # which no_init_weights leaves out
            return lm.train()
        except Exception as error:  # a configuration of sizes that do not fit raises anything
            why = first_line(error)
    raise ValueError(f"{name}: no causal LM can be made of this configuration: {why}")


def _described(name: str, lm: Any, adapters: Adapters | None) -> Model:
    """Return the sizes of ``lm``, after ``adapters`` were put on it.

    Raises:
        ValueError: it has no LM head.
    """
    head = lm.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{name}: {type(lm).__name__} has no LM head")
    vocabulary, hidden = head.weight.shape
    parameters = sum(p.numel() for p in lm.parameters())
    adapted = [] if adapters is None else _with_adapters(lm, adapters)
    packed = adapted if adapters is not None and adapters.quantized else []
    size = {p: p.numel() * p.element_size() for p in lm.parameters()}
    return Model(
        name,
        type(lm).__name__,
        parameters,
        vocabulary,
        hidden,
        getattr(lm.config.get_text_config(), "num_hidden_layers", 0),
        weights=sum(size.values()) - sum(int(w.numel() * (w.element_size() - NF4_BYTES)) for w in packed),
        gradients=sum(size[p] for p in lm.parameters() if p.requires_grad),
        trains_head=head.weight.requires_grad,
        unpacked=max((2 * w.numel() for w in packed), default=0),
    )


def weigh(
    name: str, config: Any, sequence: int, dtype: str, adapters: Adapters | None = None
) -> tuple[Model, Activations | str]:
    """Return the model of ``config`` and what it keeps of rows of ``sequence`` tokens, or why that is not known.

    Raises:
        ValueError: Transformers has no causal LM for ``config``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    wide = torch.float32 if dtype == "mixed" else getattr(torch, dtype)
    logging.disable()  # what goes wrong here is caught and reported
    try:
        with FakeTensorMode():
            lm = _built(name, config, wide)
            model = _described(name, lm, adapters)
            if not getattr(lm.config.get_text_config(), "num_attention_heads", None):
                return (
                    model,
                    f"{type(lm).__name__} has no attention, and what its own kernels keep on a GPU is not known",
                )
            try:
                one, two = (_counted(lm, batch, sequence, dtype == "mixed") for batch in (1, 2))
            except Exception as error:  # not all models run on tensors without data
                return model, f"its forward does not run on tensors without data ({first_line(error)})"
    finally:
        logging.disable(logging.NOTSET)
    # Head and loss keep the last hidden states, the final norm's output.
    last = sequence * model.hidden * ITEM[dtype]
    row = two.total - one.total
    checkpointed = row - sum(two.layers) // 2 + sum(two.inputs) // 2 + last if two.layers else None
    layer = max(two.layers, default=0) // 2
    return model, Activations(one.total - row, row + last, checkpointed, layer, one.widest)
