"""What a training step of a model will hold in GPU memory, from its configuration alone, without and with CCE.

Nothing is allocated: the model's own forward runs on tensors without data, and what autograd would keep of it is counted. What
the loss holds is arithmetic, its factors measured (``results/*-bench-*.json``, ``*-steps-*.json``; a test compares). One
process, AdamW, all weights trained, no gradient accumulation, rows packed full: a mask of padding makes SDPA keep more.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_cce import CCEConfig
from hf_cce.bench import hub
from hf_cce.bench.room import CONTEXT, GIB, largest, reserved
from hf_cce.bench.shapes import SHAPES, config_of
from hf_cce.dispatch import EAGER_BYTES, Problem, explain_dispatch, materialized_bytes

WAYS = ("eager", "compiled", "cce")
# "backward": gradients, and what the backward pass of a layer takes on top, with checkpointing all of the layer once more.
HELD = ("weights and optimizer", "activations", "logits and loss", "backward", "cuBLAS")
# What PyTorch lends cuBLAS, for the forward pass's thread and the backward pass's: 32 MiB each on Hopper GPUs, 8 on others. In
# 37 of 42 measured runs on H200s the peak was 68 to 107 MB above the rest.
WORKSPACES = 64 << 20
SMALL_BUDGET = 256 << 20  # the default's, of up to 8,192 tokens
LITTLE = 0.1  # of the peak: a saving below is called little


@dataclass(frozen=True)
class Precision:
    """Bytes of an element of weights and gradients, of each of Adam's two moments, and of an activation."""

    weight: int
    activation: int


PRECISIONS = {
    "bfloat16": Precision(2, 2),
    "float16": Precision(2, 2),
    "float32": Precision(4, 4),
    "mixed": Precision(4, 2),  # float32 weights under bfloat16 autocast, as Trainer's bf16=True
}


@dataclass(frozen=True)
class Model:
    """What of a model's configuration decides its memory."""

    name: str
    architecture: str
    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    softcapped: bool  # the logits pass through tanh, which keeps more of them
    attention: str | None  # as Transformers names it; "eager" keeps all scores
    positions: int | None  # tokens a row may have


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of a forward pass up to the head: ``fixed`` + ``row`` for each row of the batch."""

    fixed: int
    row: int
    checkpointed: int | None  # of a row, with gradient checkpointing; None: the model has no layers that can be
    layer: int  # of a row, in the largest layer: what checkpointing computes again
    widest: int  # of a row: the largest single tensor


@dataclass(frozen=True)
class Step:
    """Bytes of a training step. ``loss``: logits, what is made of them, and the gradients that the loss leaves behind."""

    loss: int
    activations: int
    peak: int
    at_peak: dict[str, int]  # what is held at that moment, by ``HELD``; adds up to ``peak``
    largest_batch: int  # that fits; 0: none does


@dataclass
class Estimate:
    """Of one step; ``plain`` and ``checkpointing`` by way (``WAYS``), empty where the activations are unknown."""

    model: Model
    batch: int
    sequence: int
    dtype: str
    gpu_memory: int
    logits: int
    loss: dict[str, int]
    weights: int
    optimizer: int
    gradients: int
    few_tokens: bool
    plain: dict[str, Step] = field(default_factory=dict)
    checkpointing: dict[str, Step] = field(default_factory=dict)
    unknown: str | None = None  # why there are no activations
    notes: list[str] = field(default_factory=list)
    small: str | None = None  # why the largest batches of a small model are not what one expects

    def to_json(self) -> dict[str, Any]:
        """All sizes in bytes."""
        return {**asdict(self), "verdict": verdict(self)}


def this_gpu() -> float | None:
    """GiB of the first GPU here; None where there is none."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None


def config_named(name: str) -> Any:
    """The configuration of a shape of ``hf_cce.bench.shapes``, a folder or file, a model type, or a model on the hub.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if name.lower() in SHAPES:
        return config_of(SHAPES[name.lower()])
    by_type = _of_type(name)
    if by_type is not None:
        return by_type()
    return hub.config_named(name, f"one of {', '.join(SHAPES)}, or {hub.model_type(name)}")


def _of_type(name: str) -> Any:
    """The class of configurations of a model type, as ``hf-cce check`` takes them; None where ``name`` is none."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name] if name in CONFIG_MAPPING and not Path(name).exists() else None


class _FlashAttention(torch.autograd.Function):
    """Keeps what the attention kernels on a GPU keep; on a CPU's tensors PyTorch would write all scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kv_heads: int) -> Tensor:
        b, heads, n, _ = query.shape
        out = query.new_empty(b, n, heads, value.shape[-1]).transpose(1, 2)  # as the kernels lay it out
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # Only while a graph is traced, as here, keys and values come repeated for all heads (transformers' use_gqa_in_sdpa).
        if 0 < kv_heads < key.shape[1] == query.shape[1]:
            key, value = (x.new_empty(x.shape[0], kv_heads, *x.shape[2:]) for x in (key, value))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("only the forward pass is counted")


class _OnGPU(TorchFunctionMode):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FlashAttention.apply(*args[:3], self.kv_heads)
        return func(*args, **(kwargs or {}))


class Count:
    """Bytes of the storages that autograd keeps, once each, parameters apart; and how many of them came in each layer."""

    def __init__(self, model: Any) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.own = {p.untyped_storage()._cdata for p in model.parameters()}
        self.kept: dict[int, Any] = {}  # holds them: the address of one that is gone may come again
        self.total = self.widest = 0
        self.inputs: list[int] = []
        self.layers: list[int] = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave)

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self.own and storage._cdata not in self.kept:
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


def _counted(model: Any, batch: int, sequence: int, mixed: bool) -> Count:
    count = Count(model)
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or 0
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    with (
        _OnGPU(kv_heads),
        torch.autograd.graph.saved_tensors_hooks(count.pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        model.base_model(input_ids=ids, use_cache=False)
    return count


@contextmanager
def _silent(logger: str) -> Iterator[None]:
    """What is caught and told in our words need not be logged as well."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _built(name: str, config: Any, dtype: torch.dtype) -> Any:
    """The LM of ``config``, with torch's SDPA where it can, else with the attention that is its default."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    why = ""
    # Some weights are drawn by code that looks at them, as in Gemma 3's vision tower: these are not drawn.
    drawing: tuple[Callable[[], Any], ...] = (nullcontext, no_init_weights)
    for made, options, drawn in product(
        (AutoModelForCausalLM, AutoModelForImageTextToText), ({"attn_implementation": "sdpa"}, {}), drawing
    ):
        try:
            with drawn():
                # A copy each: Transformers writes into it what was asked for.
                lm = made.from_config(copy.deepcopy(config), dtype=dtype, **options)
            lm.tie_weights()  # where nothing was drawn nothing was tied
            return lm.train()
        except Exception as error:
            why = why or hub.first_line(error)
    raise ValueError(f"{name}: no causal LM can be made of this configuration: {why}")


def weigh(name: str, config: Any, sequence: int, dtype: str) -> tuple[Model, Activations | str]:
    """The model of ``config`` and what it keeps for rows of ``sequence`` tokens, or why that cannot be said.

    Raises:
        ValueError: Transformers has no causal LM for ``config``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    wide = torch.float32 if dtype == "mixed" else getattr(torch, dtype)
    with FakeTensorMode(), _silent("torch._subclasses.fake_tensor"), _silent("transformers"):
        lm = _built(name, config, wide)
        head = lm.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ValueError(f"{name}: {type(lm).__name__} has no LM head")
        vocabulary, hidden = head.weight.shape
        text = lm.config.get_text_config()
        model = Model(
            name, type(lm).__name__, sum(p.numel() for p in lm.parameters()), vocabulary, hidden,
            getattr(text, "num_hidden_layers", 0), bool(getattr(text, "final_logit_softcapping", None)),
            text._attn_implementation, getattr(text, "max_position_embeddings", None),
        )  # fmt: skip
        if not getattr(text, "num_attention_heads", None):
            return model, f"{type(lm).__name__} has no attention, and what its own kernels keep on a GPU is not known"
        try:
            one, two = (_counted(lm, batch, sequence, dtype == "mixed") for batch in (1, 2))
        except Exception as error:  # its code is not ours, and not all code runs on tensors without data
            return model, f"its forward does not run on tensors without data ({hub.first_line(error)})"
    # Kept hidden states of the last layer for head and loss: the final norm's output, once.
    last = sequence * hidden * PRECISIONS[dtype].activation
    row = two.total - one.total
    # Hooks of the first count are still there in the second, but write into the first.
    n = len(two.layers)
    checkpointed = row - sum(two.layers) // 2 + sum(two.inputs) // 2 + last if n else None
    largest = max(two.layers, default=0) // 2
    return model, Activations(one.total - row, row + last, checkpointed, largest, one.widest)


def loss_bytes(
    way: str, tokens: int, model: Model, dtype: str, memory_budget: int | None = None
) -> tuple[int, int, bool]:
    """(at its peak, with the gradients it leaves; those gradients alone; whether few tokens leave the loss to the model)."""
    item, logits = PRECISIONS[dtype].activation, tokens * model.vocabulary
    weight = model.vocabulary * model.hidden
    left = weight * PRECISIONS[dtype].weight + tokens * model.hidden * item
    config, kind = CCEConfig(memory_budget=memory_budget), getattr(torch, "bfloat16" if dtype == "mixed" else dtype)
    found = explain_dispatch(tokens, model.hidden, model.vocabulary, kind, config=config)
    few = found.strategy == "full_logits"
    if way == "eager" or (way == "cce" and few):
        # The gradients of hidden states and weight are made when two of the three are gone.
        return max(EAGER_BYTES * logits, item * logits + left), left, few
    if way == "compiled":  # of model.loss_function: the logits, which the head wrote before, and their gradient
        return max(2 * item * logits, item * logits + left), left, few
    problem = Problem(tokens, model.hidden, model.vocabulary, kind, torch.device("cuda"))
    narrow = found.logits_dtype if found.logits_dtype is not torch.float32 else None
    # float32 logits of all tokens are the most it has use for
    most = materialized_bytes(problem, narrow) if narrow else min(config.scratch(tokens), 4 * logits)
    return most + left, left, few


def estimate(
    name: str,
    batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    gpu_memory: float = 24.0,
    memory_budget: int | None = None,
    config: Any = None,
) -> Estimate:
    """What a step of ``batch`` rows of ``sequence`` tokens holds, each way, and the largest batch for ``gpu_memory`` GiB.

    Raises:
        ValueError: ``name`` names no configuration of a language model.
    """
    by_type = _of_type(name) if config is None else None
    config = config_named(name) if config is None else config
    model, activations = weigh(name, config, sequence, dtype)
    precision, tokens = PRECISIONS[dtype], batch * sequence
    weights = model.parameters * precision.weight
    loss = {way: loss_bytes(way, tokens, model, dtype, memory_budget) for way in WAYS}
    found = Estimate(
        model, batch, sequence, dtype, round(gpu_memory * GIB), tokens * model.vocabulary,
        # What the user can do nothing about, the gradients, is in "gradients":
        {way: peak - left if way == "cce" and not few else peak for way, (peak, left, few) in loss.items()},
        weights, 2 * weights, weights, loss["cce"][2],
    )  # fmt: skip
    if by_type is not None:
        found.notes.append(
            f"{name} is a model type: the sizes are those that {by_type.__name__} has by default, not those of a model "
            "you may have in mind; for that give its folder, its config.json or its name on the hub"
        )
    if model.softcapped:
        found.notes.append("this model caps its logits: without CCE they take more than is counted here")
    if model.attention == "eager" and not isinstance(activations, str):
        found.notes.append("this model has no attention by torch's SDPA; with eager attention it keeps all scores")
    if getattr(config, "vision_config", None) is not None:
        found.notes.append(
            "counted are rows of text: an image's tokens count as others, but what the vision tower keeps does not"
        )
    if model.positions and sequence > model.positions:
        found.notes.append(f"this model is made for rows of up to {model.positions:,} tokens")
    if isinstance(activations, str):
        found.unknown = activations
        return found
    for checkpointing, steps in ((False, found.plain), (True, found.checkpointing)):
        if checkpointing and activations.checkpointed is None:
            continue
        for way in WAYS:
            bytes_now = _peak(way, batch, sequence, model, activations, dtype, memory_budget, checkpointing)
            most = _most(way, sequence, model, activations, dtype, memory_budget, checkpointing, found.gpu_memory)
            steps[way] = Step(*bytes_now, most)
    if memory_budget is None and found.checkpointing:
        plain, checkpointed = (
            _most("cce", sequence, model, activations, dtype, SMALL_BUDGET, each, found.gpu_memory)
            for each in (False, True)
        )
        found.small = _scratch_outweighs(found, plain, checkpointed)
    return found


def _most(
    way: str,
    sequence: int,
    model: Model,
    activations: Activations,
    dtype: str,
    memory_budget: int | None,
    checkpointing: bool,
    gpu_memory: int,
) -> int:
    """The largest batch of which a step fits."""

    def taken(rows: int, checkpointing: bool) -> float:
        peak = _peak(way, rows, sequence, model, activations, dtype, memory_budget, checkpointing)[2]
        return reserved(way, peak, rows * sequence, memory_budget, checkpointing, model.vocabulary)

    def fits(rows: int) -> bool:
        most = taken(rows, checkpointing)
        if way == "cce" and not checkpointing and activations.checkpointed is not None:
            # Without it no less is taken than with it: so few activations do not fill what the scratch leaves.
            most = max(most, taken(rows, True))
        return most <= gpu_memory - CONTEXT

    return largest(fits)


def _scratch_outweighs(found: Estimate, plain: int, checkpointed: int) -> str | None:
    """Why checkpointing brings a small model no batch, or CCE a smaller one than torch.compile; what a small budget lets fit."""
    now, saved = found.plain["cce"].largest_batch, found.checkpointing["cce"].largest_batch
    behind = any(
        steps["cce"].largest_batch < steps["compiled"].largest_batch for steps in (found.plain, found.checkpointing)
    )
    if not (saved <= now or behind) or plain < now or checkpointed <= saved:
        return None
    return (
        "CCE's scratch grows with the batch (memory_budget, 256 MiB for each 8,192 tokens) and outweighs the activations of so "
        f"small a model{'' if saved > now else ', so that checkpointing lets no larger batch fit'}; with --memory-budget "
        f"{SMALL_BUDGET >> 20} it stays as it is, and {plain:,} rows fit, with gradient checkpointing {checkpointed:,}"
    )


def _peak(
    way: str,
    batch: int,
    sequence: int,
    model: Model,
    activations: Activations,
    dtype: str,
    memory_budget: int | None,
    checkpointing: bool,
) -> tuple[int, int, int, dict[str, int]]:
    """(loss, activations, peak, what is held then): the largest of three moments of a step."""
    weights = model.parameters * PRECISIONS[dtype].weight
    row = (activations.checkpointed or 0) if checkpointing else activations.row
    kept = activations.fixed + batch * row
    loss, left, few = loss_bytes(way, batch * sequence, model, dtype, memory_budget)
    # With full logits the gradients are made when the most is over, but for those of very few tokens.
    logits = batch * sequence * model.vocabulary * PRECISIONS[dtype].activation
    made = left if (way == "cce" and not few) or loss == logits + left else 0
    at_rest = 3 * weights  # and Adam's moments
    # Backward through the last layer: two of its largest gradients at a time. What checkpointing computes again comes on top, of
    # which the first of those has taken the place when the second is made.
    again = batch * (activations.widest + activations.layer if checkpointing else 2 * activations.widest)
    # The loss differentiated; the last layer; all gradients, no activation left.
    moments = ((kept, loss - made, made), (kept, 0, left + again), (0, 0, weights))
    held = (at_rest, *max(moments, key=sum), WORKSPACES)
    return loss, kept, sum(held), dict(zip(HELD, held, strict=True))


def verdict(found: Estimate) -> str:
    """In words: what CCE brings here, and why, where it is little."""
    model, tokens = found.model, found.batch * found.sequence
    if found.few_tokens:
        return (
            f"CCE brings nothing here: {tokens:,} tokens make {found.logits / 1e6:.0f} million logits. Up to 42 million, if they "
            "fit memory_budget, a patched model keeps its own loss, which is then the faster one."
        )
    saved = found.loss["eager"] - found.loss["cce"]
    if not found.plain:
        return f"CCE saves {saved / GIB:.1f} GiB of what the loss takes; the rest of the step is not known."
    shares = {}
    for name, steps in (("", found.plain), ("with gradient checkpointing ", found.checkpointing)):
        if steps:
            before, after = steps["eager"].peak, steps["cce"].peak
            shares[name] = (1 - after / before, before, after)
    words = "; ".join(
        f"{name}{share:.0%} of the peak, {before / GIB:.1f} → {after / GIB:.1f} GiB"
        for name, (share, before, after) in shares.items()
    )
    if shares[""][0] >= LITTLE:
        return f"CCE saves {words}."
    why = (
        f"its vocabulary ({model.vocabulary:,}) is small against its layers ({model.layers} of width {model.hidden:,})"
    )
    if max(share for share, _, _ in shares.values()) >= LITTLE:
        return f"CCE brings little without gradient checkpointing: {words}; without it {why}."
    if 3 * found.weights + found.gradients + WORKSPACES >= found.plain["eager"].peak:
        why = f"{tokens:,} tokens are so few that weights, gradients and optimizer fill the memory"
    return f"CCE brings little here: {words}: {why}."
