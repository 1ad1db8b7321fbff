"""``hf-cce estimate``: estimate the GPU memory of a training step without and with CCE, from the configuration alone.

The model's forward runs on fake tensors; the storages that autograd saves are the activations. The memory of the loss is
calculated. One process, AdamW, no gradient accumulation. A test compares with peaks measured in ``benchmarks/results``.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights  # some initializers read the values of the weights
from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2

from hf_cce import CCEConfig
from hf_cce.diagnostics.machine import GIB, first_line
from hf_cce.diagnostics.shapes import auto_class, config_named, is_model_type
from hf_cce.dispatch import BYTES_PER_LOGIT, FULL_LOGITS_MAX, Problem, explain_dispatch, one_block_bytes

# Bytes per element of an activation, by training dtype; mixed is float32 weights under bfloat16 autocast, as Trainer's bf16=True.
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "mixed": 2}
NF4_BYTES = 4.127 / 8  # bytes per weight under QLoRA: 4-bit NormalFloat with double quantization
WORKSPACES = 64 << 20  # of cuBLAS: one each for the threads of forward and backward, 32 MiB on Hopper GPUs
CONTEXT = GIB  # reserved for the CUDA context
MARGIN = 1.12  # memory that PyTorch's allocator reserves, as a multiple of the peak
SMALL_SAVING = 0.1  # share of the peak; a smaller saving is called little


class LoRA(NamedTuple):
    """Float32 adapters on every linear layer but the head; ``four_bit``: the base weights are in 4 bits (QLoRA)."""

    rank: int
    four_bit: bool = False


@dataclass(frozen=True)
class Model:
    """Sizes of a model that determine its memory."""

    name: str
    architecture: str
    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    weights: int = 0  # bytes
    gradients: int = 0  # bytes, trainable parameters only
    trains_head: bool = True


@dataclass(frozen=True)
class Step:
    """Bytes of a training step in one variant; None if the activations are unknown."""

    loss: int  # logits and loss
    activations: int | None = None
    peak: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Estimate:
    """One training step in each variant: "full", "cce", and both with ", checkpointing" if the model supports it."""

    model: Model
    batch: int
    sequence: int
    dtype: str
    gpu_memory: int
    logits: int
    optimizer: int
    few_tokens: bool
    steps: dict[str, Step]
    notes: list[str]


def loss_bytes(variant: str, tokens: int, model: Model, dtype: str, budget: int | None = None) -> tuple[int, int, bool]:
    """Return the peak bytes of the loss with its gradients, the bytes of these gradients, and whether CCE uses full logits."""
    item_bytes, logits = ITEM[dtype], tokens * model.vocabulary
    weight_bytes = 4 if dtype in ("mixed", "float32") else 2
    gradient_bytes = model.hidden * (model.trains_head * model.vocabulary * weight_bytes + tokens * item_bytes)
    config = CCEConfig(memory_budget=budget or "auto")
    torch_dtype = getattr(torch, "bfloat16" if dtype == "mixed" else dtype)
    sizes = tokens, model.hidden, model.vocabulary
    found, unfiltered = (
        explain_dispatch(*sizes, torch_dtype, config=each, frozen=not model.trains_head)
        for each in (config, replace(config, gradient_filter=None))
    )
    few_tokens = found.strategy == "full_logits"
    if variant == "full" or few_tokens:
        # The gradients of hidden states and weight are allocated after two of the three copies of the logits were freed.
        peak = max(BYTES_PER_LOGIT * logits, item_bytes * logits + gradient_bytes)
    elif found.strategy == "one_block":
        peak = one_block_bytes(Problem(*sizes, torch_dtype, torch.device("cuda"))) + gradient_bytes
    else:  # the filter may pause; float32 logits of all tokens need no more
        peak = min(max(found.memory_budget, unfiltered.memory_budget), 4 * logits) + gradient_bytes
    return peak, gradient_bytes, few_tokens


class _FlashAttention(torch.autograd.Function):
    """Save what the attention kernels of a GPU save; on fake tensors PyTorch would save all attention scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        b, heads, n, _ = query.shape
        out = query.new_empty(b, n, heads, value.shape[-1]).transpose(1, 2)  # the kernels' layout
        ctx.save_for_backward(query, key, value, out, query.new_empty(b, heads, n, dtype=torch.float32))
        return out


class _OnGPU(TorchFunctionMode):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        # On fake tensors Transformers repeats keys and values for all heads; on a GPU it does not.
        if 0 < self.kv_heads < key.shape[1] == query.shape[1]:
            key, value = (x.new_empty(x.shape[0], self.kv_heads, *x.shape[2:]) for x in (key, value))
        return _FlashAttention.apply(query, key, value)


def saved_for_backward(lm: Any, batch: int, sequence: int, mixed: bool) -> tuple[int, int]:
    """Return the bytes that autograd saves in a forward up to the head, without parameters, and those of the largest tensor."""
    parameters = {p.untyped_storage()._cdata for p in lm.parameters()}
    saved: dict[int, Any] = {}  # keeps the storages alive, as a freed address may be reused

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage
        return x

    kv_heads = getattr(lm.config.get_text_config(), "num_key_value_heads", None) or 0
    with (
        _OnGPU(kv_heads),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        hidden = lm.base_model(input_ids=torch.zeros(batch, sequence, dtype=torch.long), use_cache=False)[0]
        # Head and loss save the hidden states.
        F.linear(hidden, hidden.new_empty(1, hidden.shape[-1], requires_grad=True))
    sizes = [storage.nbytes() for storage in saved.values()]
    return sum(sizes), max(sizes)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence torch and Transformers; the caller reports errors."""
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _build_model(name: str, config: Any, dtype: torch.dtype) -> Any:
    """Build the LM of ``config``, with torch's SDPA if it is supported, else with its default attention."""
    auto = auto_class(name, config)
    for options in ({"attn_implementation": "sdpa"}, {}):
        try:
            # Transformers writes options into the configuration, so each try gets a copy.
            lm = auto.from_config(copy.deepcopy(config), dtype=dtype, **options)
            lm.tie_weights()  # no_init_weights skips this
            return lm.train()
        except Exception as error:  # a configuration with inconsistent sizes may raise anything
            why = first_line(error)
    raise ValueError(f"{name}: cannot build a causal LM from this configuration: {why}")


def _add_adapters(lm: Any, head: Any, rank: int) -> list[Tensor]:
    """Freeze ``lm`` and add adapters to all its linear layers but the head; return the weights of these layers."""
    lm.requires_grad_(False)
    adapted = [x for x in lm.modules() if isinstance(x, (torch.nn.Linear, Conv1D)) and x is not head]
    for layer in adapted:
        inputs, outputs = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
        layer.down = torch.nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
        layer.up = torch.nn.Linear(rank, outputs, bias=False, dtype=torch.float32)
        layer.register_forward_hook(_adapt)
    return [layer.weight for layer in adapted]


def _adapt(layer: Any, args: tuple[Tensor], result: Tensor) -> Tensor:
    """Add the adapter's product as in PEFT, where each layer casts its input to the adapter's float32."""
    return (result + 2.0 * layer.up(layer.down(args[0].float()))).to(result.dtype)


def _describe_model(name: str, lm: Any, lora: LoRA | None) -> Model:
    """Add adapters to ``lm`` unless ``lora`` is None, and return its sizes."""
    head = lm.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{name}: {type(lm).__name__} has no LM head")
    (vocabulary, hidden), parameters = head.weight.shape, sum(p.numel() for p in lm.parameters())
    adapted = [] if lora is None else _add_adapters(lm, head, lora.rank)
    packed = adapted if lora is not None and lora.four_bit else []
    sizes = {p: p.numel() * p.element_size() for p in lm.parameters()}
    return Model(
        name,
        type(lm).__name__,
        parameters,
        vocabulary,
        hidden,
        getattr(lm.config.get_text_config(), "num_hidden_layers", 0),
        weights=sum(sizes.values()) - sum(int(w.numel() * (w.element_size() - NF4_BYTES)) for w in packed),
        gradients=sum(size for p, size in sizes.items() if p.requires_grad),
        trains_head=head.weight.requires_grad,
    )


def estimate(
    name: str,
    batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    gpu_memory: int = 24 * GIB,
    memory_budget: int | None = None,
    config: Any = None,
    lora: LoRA | None = None,
) -> Estimate:
    """Estimate the memory of a step of ``batch`` rows of ``sequence`` tokens, and whether it fits into ``gpu_memory`` bytes.

    ``config``: the model's configuration; by default looked up by ``name``.
    """
    by_type = config is None and is_model_type(name)
    config = config_named(name) if config is None else config
    notes = [f"{name} is a model type; the sizes are the defaults of {type(config).__name__}"] if by_type else []
    if lora is not None:
        kind = "QLoRA, weights of linear layers in 4 bits (NF4)" if lora.four_bit else "LoRA"
        notes.append(f"{kind}, float32 adapters of rank {lora.rank} on every linear layer except the head")
    if getattr(config.get_text_config(), "final_logit_softcapping", None):
        notes.append("this model applies a softcap to its logits, so full logits take more memory than estimated here")
    if getattr(config, "vision_config", None) is not None:
        notes.append("the estimate is for text only; the vision tower needs additional memory")
    saved: dict[str, tuple[int, int]] = {}
    with FakeTensorMode(), no_init_weights(), _silent():
        lm = _build_model(name, config, torch.float32 if dtype == "mixed" else getattr(torch, dtype))
        model = _describe_model(name, lm, lora)
        try:
            if not getattr(lm.config.get_text_config(), "num_attention_heads", None):
                raise ValueError(
                    f"{model.architecture} has no attention, and the memory of its custom kernels is unknown"
                )
            saved[""] = saved_for_backward(lm, batch, sequence, dtype == "mixed")
            if lm.supports_gradient_checkpointing:
                lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
                saved[", checkpointing"] = saved_for_backward(lm, batch, sequence, dtype == "mixed")
        except Exception as error:  # not all models run on fake tensors
            what = "with checkpointing " if saved else ""
            notes.append(f"activations and peak {what}are unknown: {first_line(error)}")
    tokens = batch * sequence
    steps: dict[str, Step] = {}
    for variant in ("full", "cce"):
        loss, gradient_bytes, few_tokens = loss_bytes(variant, tokens, model, dtype, memory_budget)
        for suffix in saved:
            steps[variant + suffix] = _step(model, loss, gradient_bytes, saved[""], saved[suffix], gpu_memory)
        steps.setdefault(variant, Step(loss))
    return Estimate(
        model, batch, sequence, dtype, gpu_memory, tokens * model.vocabulary, 2 * model.gradients, few_tokens, steps, notes
    )  # fmt: skip


def _step(
    model: Model, loss: int, gradient_bytes: int, plain: tuple[int, int], saved: tuple[int, int], gpu_memory: int
) -> Step:
    """Return the step with ``saved`` activations (total, largest tensor); ``plain`` are those without checkpointing."""
    (all_activations, largest), (activations, _) = plain, saved
    # Backward through the last layer holds two gradients of the largest size; with checkpointing, one and the recomputed layer.
    recomputed = largest + (largest if activations == all_activations else all_activations // max(1, model.layers))
    # The peak is in the loss, in backward through the last layer, or after backward (all gradients, no activations).
    transient = max(activations + loss, activations + gradient_bytes + recomputed, model.gradients)
    peak = model.weights + 2 * model.gradients + transient + WORKSPACES  # 2: Adam's moments
    return Step(loss, activations, peak, MARGIN * peak + CONTEXT <= gpu_memory)


def verdict(found: Estimate) -> str:
    if found.few_tokens:
        tokens, millions = found.batch * found.sequence, found.logits / 1e6
        return (
            f"hf_cce saves nothing here: {tokens:,} tokens make {millions:.0f} million logits. For up to "
            f"{FULL_LOGITS_MAX / 1e6:.0f} million logits that fit memory_budget, a patched model uses its own loss, "
            "which is faster."
        )
    if found.steps["full"].peak is None:
        saved = found.steps["full"].loss - found.steps["cce"].loss
        return f"hf_cce saves {saved / GIB:.1f} GiB of the memory of the loss; the rest of the step is unknown."
    shares, texts = [], []
    for suffix, title in (("", ""), (", checkpointing", "with gradient checkpointing ")):
        if "full" + suffix in found.steps:
            before, after = (found.steps[variant + suffix].peak or 0 for variant in ("full", "cce"))
            shares.append(1 - after / before)
            texts.append(f"{title}{shares[-1]:.0%} of the peak, {before / GIB:.1f} → {after / GIB:.1f} GiB")
    if max(shares) >= SMALL_SAVING:
        return f"hf_cce saves {'; '.join(texts)}."
    return f"hf_cce saves little here: {'; '.join(texts)}. The logits are small compared to the rest of the step."
