"""``hf-cce estimate``: what a training step holds in GPU memory without and with CCE, from the configuration alone.

Activations are counted on tensors without data; what the loss holds is arithmetic whose factors were measured (a test
compares with ``benchmarks/results``). One process, AdamW, no gradient accumulation, packed rows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hf_cce import CCEConfig
from hf_cce.diagnostics.activations import ITEM, Activations, Adapters, Model, weigh
from hf_cce.diagnostics.shapes import config_named, is_model_type
from hf_cce.dispatch import EAGER_BYTES, Problem, explain_dispatch, materialized_bytes

GIB = 1 << 30
WAYS = ("full", "cce")  # full logits, CCE
# "backward": gradients, what the backward pass of a layer takes on top, and with checkpointing the layer once more.
HELD = ("weights and optimizer", "activations", "logits and loss", "backward", "cuBLAS")
WORKSPACES = 64 << 20  # of cuBLAS: one for the forward and one for the backward pass's thread, 32 MiB on Hopper GPUs
RESERVED = {"full": 1.11, "cce": 1.01}  # what PyTorch's allocator takes from the GPU, as a multiple of the peak
# With CCE also as a multiple of its scratch, which is cut differently at each moment of a step; of no more scratch than this
# without gradient checkpointing, where activations fill the gaps.
SCRATCHES, SCRATCH_WITH_ACTIVATIONS = 2.15, 256 << 20
CONTEXT = 536 << 20  # CUDA's own
MOST_ROWS = 1 << 20
LITTLE = 0.1  # of the peak: a smaller saving is called little


@dataclass(frozen=True)
class Step:
    """Bytes of a training step."""

    activations: int
    peak: int
    at_peak: dict[str, int]  # by ``HELD``; adds up to ``peak``
    largest_batch: int  # that fits; 0: none does


@dataclass
class Estimate:
    """One step; ``plain`` and ``checkpointing`` by way (``WAYS``), empty where the activations are unknown."""

    model: Model
    batch: int
    sequence: int
    dtype: str
    gpu_memory: int
    logits: int
    loss: dict[str, int]
    optimizer: int
    few_tokens: bool
    plain: dict[str, Step] = field(default_factory=dict)
    checkpointing: dict[str, Step] = field(default_factory=dict)
    unknown: str | None = None  # why there are no activations
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return all sizes in bytes."""
        return {**asdict(self), "verdict": verdict(self)}


def this_gpu() -> int | None:
    """Return the bytes of the first GPU's memory, None where there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def loss_bytes(way: str, tokens: int, model: Model, dtype: str, budget: int | None = None) -> tuple[int, int, bool]:
    """Return the peak of the loss with the gradients it leaves, these gradients, and whether CCE keeps full logits."""
    item, logits = ITEM[dtype], tokens * model.vocabulary
    weight = 4 if dtype in ("mixed", "float32") else 2
    left = model.trains_head * model.vocabulary * model.hidden * weight + tokens * model.hidden * item
    config, kind = CCEConfig(memory_budget=budget or "auto"), getattr(torch, "bfloat16" if dtype == "mixed" else dtype)
    sizes = tokens, model.hidden, model.vocabulary
    found = explain_dispatch(*sizes, kind, config=config, frozen=not model.trains_head)
    few = found.strategy == "full_logits"
    if way == "full" or few:
        # The gradients of hidden states and weight are made when two of the three copies of the logits are free again.
        return max(EAGER_BYTES * logits, item * logits + left), left, few
    if found.logits_dtype in (torch.bfloat16, torch.float16):
        return materialized_bytes(Problem(*sizes, kind, torch.device("cuda")), found.logits_dtype) + left, left, few
    return min(found.memory_budget, 4 * logits) + left, left, few  # float32 logits of all tokens need no more


@dataclass(frozen=True)
class Run:
    """A training of ``model`` on rows of ``sequence`` tokens, in one way, with gradient checkpointing or without."""

    way: str
    model: Model
    activations: Activations
    sequence: int
    dtype: str
    budget: int | None
    checkpointing: bool

    def kept(self, batch: int) -> int:
        """Return the bytes of activations."""
        row = (self.activations.checkpointed or 0) if self.checkpointing else self.activations.row
        return self.activations.fixed + batch * row

    def at_peak(self, batch: int) -> dict[str, int]:
        """Return what is held, by ``HELD``, at the largest of three moments of a step."""
        model = self.model
        kept, tokens = self.kept(batch), batch * self.sequence
        loss, left, few = loss_bytes(self.way, tokens, model, self.dtype, self.budget)
        # Full logits leave their gradients after the peak of the loss, except for very few tokens.
        logits = tokens * model.vocabulary * ITEM[self.dtype]
        made = left if (self.way == "cce" and not few) or loss == logits + left else 0
        # Backward through the last layer holds two of its largest gradients. With checkpointing the layer is computed again,
        # and the first of these gradients takes its place when the second is made.
        widest, layer = self.activations.widest, self.activations.layer
        again = batch * (widest + layer if self.checkpointing else 2 * widest) + model.unpacked
        # The backward pass of the loss; of the last layer; all gradients and no activation.
        moments = ((kept, loss - made, made), (kept, 0, left + again), (0, 0, model.gradients))
        held = (model.weights + 2 * model.gradients, *max(moments, key=sum), WORKSPACES)  # Adam has two moments
        return dict(zip(HELD, held, strict=True))

    def reserved(self, peak: float, tokens: int) -> float:
        """Return the bytes that PyTorch's allocator takes from the GPU for a step of that ``peak``."""
        if self.way == "full":
            return RESERVED["full"] * peak
        config = CCEConfig(memory_budget=self.budget or "auto")
        scratch = min(config.scratch(tokens), 4 * tokens * self.model.vocabulary)
        in_pieces = scratch if self.checkpointing else min(scratch, SCRATCH_WITH_ACTIVATIONS)
        return RESERVED["cce"] * peak + SCRATCHES * in_pieces

    def largest_batch(self, gpu_memory: int) -> int:
        """Return the largest batch that fits, 0 if not even one row does."""
        runs = [self]
        if self.way == "cce" and self.activations.checkpointed is not None:
            # Few activations do not fill the gaps of the scratch, so without checkpointing it takes no less.
            runs.append(replace(self, checkpointing=True))

        def too_many(batch: int) -> bool:
            return any(
                run.reserved(sum(run.at_peak(batch).values()), batch * self.sequence) > gpu_memory - CONTEXT
                for run in runs
            )

        return bisect_left(range(1, MOST_ROWS), True, key=too_many)

    def step(self, batch: int, gpu_memory: int) -> Step:
        held = self.at_peak(batch)
        return Step(self.kept(batch), sum(held.values()), held, self.largest_batch(gpu_memory))


def estimate(
    name: str,
    batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    gpu_memory: int = 24 * GIB,
    memory_budget: int | None = None,
    config: Any = None,
    adapters: Adapters | None = None,
) -> Estimate:
    """Return what a step of ``batch`` rows of ``sequence`` tokens holds, and the largest batch for ``gpu_memory`` bytes.

    Raises:
        ValueError: ``name`` names no configuration of a language model.
    """
    by_type = config is None and is_model_type(name)
    config = config_named(name) if config is None else config
    model, activations = weigh(name, config, sequence, dtype, adapters)
    tokens = batch * sequence
    loss = {way: loss_bytes(way, tokens, model, dtype, memory_budget) for way in WAYS}
    few = loss["cce"][2]
    # CCE's peak without the gradients, which are counted in "backward":
    peaks = {way: peak - left if way == "cce" and not few else peak for way, (peak, left, _) in loss.items()}
    found = Estimate(
        model, batch, sequence, dtype, gpu_memory, tokens * model.vocabulary, peaks, 2 * model.gradients, few,
        notes=_notes(config, adapters),
    )  # fmt: skip
    if by_type:
        found.notes.append(f"{name} is a model type: the sizes are the defaults of {type(config).__name__}")
    if isinstance(activations, str):
        found.unknown = activations
        return found
    for way in WAYS:
        run = Run(way, model, activations, sequence, dtype, memory_budget, checkpointing=False)
        found.plain[way] = run.step(batch, gpu_memory)
        if activations.checkpointed is not None:
            found.checkpointing[way] = replace(run, checkpointing=True).step(batch, gpu_memory)
    return found


def _notes(config: Any, adapters: Adapters | None) -> list[str]:
    notes = []
    if adapters is not None:
        kind = "QLoRA: weights of linear layers in 4 bits (NF4)" if adapters.quantized else "LoRA"
        notes.append(f"{kind}, float32 adapters of rank {adapters.rank} on every linear layer but the head")
    if getattr(config.get_text_config(), "final_logit_softcapping", None):
        notes.append("this model caps its logits: full logits take more than is counted here")
    if getattr(config, "vision_config", None) is not None:
        notes.append("only rows of text are counted; what the vision tower keeps comes on top")
    return notes


def verdict(found: Estimate) -> str:
    """Say what CCE saves, and why where it is little."""
    model, tokens = found.model, found.batch * found.sequence
    if found.few_tokens:
        return (
            f"CCE brings nothing here: {tokens:,} tokens make {found.logits / 1e6:.0f} million logits. Up to 42 million, if they "
            "fit memory_budget, a patched model keeps its own loss, which is then the faster one."
        )
    if not found.plain:
        saved = found.loss["full"] - found.loss["cce"]
        return f"CCE saves {saved / GIB:.1f} GiB of what the loss takes; the rest of the step is not known."
    shares, texts = [], []
    for name, steps in (("", found.plain), ("with gradient checkpointing ", found.checkpointing)):
        if steps:
            before, after = steps["full"].peak, steps["cce"].peak
            shares.append(1 - after / before)
            texts.append(f"{name}{shares[-1]:.0%} of the peak, {before / GIB:.1f} → {after / GIB:.1f} GiB")
    both = "; ".join(texts)
    if shares[0] >= LITTLE:
        return f"CCE saves {both}."
    why = (
        f"its vocabulary ({model.vocabulary:,}) is small against its layers ({model.layers} of width {model.hidden:,})"
    )
    if max(shares) >= LITTLE:
        return f"CCE brings little without gradient checkpointing: {both}; without it {why}."
    if model.weights + 3 * model.gradients + WORKSPACES >= found.plain["full"].peak:
        why = f"{tokens:,} tokens are so few that weights, gradients and optimizer fill the memory"
    return f"CCE brings little here: {both}: {why}."
