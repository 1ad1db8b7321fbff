"""``hf-cce estimate``: what a training step will hold in GPU memory, from the configuration alone, without and with CCE.

Activations are counted on tensors without data; what the loss holds is arithmetic whose factors were measured (a test
compares with ``benchmarks/results``). One process, AdamW, all weights trained, no gradient accumulation, packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_cce import CCEConfig
from hf_cce.diagnostics import hub
from hf_cce.diagnostics.activations import PRECISIONS, Activations, Model, weigh
from hf_cce.diagnostics.shapes import SHAPES, config_of
from hf_cce.dispatch import DENSE_BYTES, EAGER_BYTES, Problem, explain_dispatch, materialized_bytes

GIB = 1 << 30
WAYS = ("eager", "compiled", "cce")  # full logits, torch.compile of the loss, CCE
# "backward": gradients, what the backward pass of a layer takes on top, and with checkpointing the layer once more.
HELD = ("weights and optimizer", "activations", "logits and loss", "backward", "cuBLAS")
WORKSPACES = 64 << 20  # of cuBLAS: one for the forward and one for the backward pass's thread, 32 MiB on Hopper GPUs
# What PyTorch's allocator takes from the GPU, as a multiple of the peak. With full logits those are the largest blocks, and
# where they are small so is the multiple.
RESERVED = {"eager": 1.112, "compiled": 1.1, "cce": 1.01}
RESERVED_LEAST, RESERVED_OF_LOGITS = 1.08, 0.3
# On top, in multiples of CCE's scratch, which is cut differently at each moment of a step: with gradient checkpointing, and
# without (of so much scratch at most), where activations fill the gaps.
PIECES_CHECKPOINTED, PIECES, PIECES_OF = 2.15, 1.8, 256 << 20
CONTEXT = 536 << 20  # CUDA's own
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

    def to_json(self) -> dict[str, Any]:
        """Return all sizes in bytes."""
        return {**asdict(self), "verdict": verdict(self)}


def this_gpu() -> float | None:
    """Return the GiB of the first GPU, None where there is none."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None


def config_named(name: str) -> Any:
    """Return the configuration of a name in ``SHAPES``, a folder or file, a model type, or a model on the hub.

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
    """Return the configuration class of a model type, None where ``name`` is none."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name] if name in CONFIG_MAPPING and not Path(name).exists() else None


def loss_bytes(way: str, tokens: int, model: Model, dtype: str, budget: int | None = None) -> tuple[int, int, bool]:
    """Return (peak with the gradients that the loss leaves, those gradients, whether few tokens keep the model's own loss)."""
    item, logits = PRECISIONS[dtype].activation, tokens * model.vocabulary
    weight = model.vocabulary * model.hidden
    left = weight * PRECISIONS[dtype].weight + tokens * model.hidden * item
    config, kind = CCEConfig(memory_budget=budget or "auto"), getattr(torch, "bfloat16" if dtype == "mixed" else dtype)
    found = explain_dispatch(tokens, model.hidden, model.vocabulary, kind, config=config)
    few = found.strategy == "full_logits"
    if way == "eager" or (way == "cce" and few):
        # The gradients of hidden states and weight are made when two of the three blocks are free again.
        return max(EAGER_BYTES * logits, item * logits + left), left, few
    if way == "compiled":  # of model.loss_function: the logits, which the head wrote before, and their gradient
        return max(2 * item * logits, item * logits + left), left, few
    problem = Problem(tokens, model.hidden, model.vocabulary, kind, torch.device("cuda"))
    narrow = found.logits_dtype if found.logits_dtype is not torch.float32 else None
    # float32 logits of all tokens are the most it has use for
    most = materialized_bytes(problem, narrow) if narrow else min(config.scratch(tokens), 4 * logits)
    return most + left, left, few


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
        weights = self.model.parameters * PRECISIONS[self.dtype].weight
        kept, tokens = self.kept(batch), batch * self.sequence
        loss, left, few = loss_bytes(self.way, tokens, self.model, self.dtype, self.budget)
        # Full logits leave their gradients after the peak of the loss, but for very few tokens.
        logits = tokens * self.model.vocabulary * PRECISIONS[self.dtype].activation
        made = left if (self.way == "cce" and not few) or loss == logits + left else 0
        # Backward through the last layer holds two of its largest gradients. What checkpointing computes again comes on top:
        # the first of those gradients takes its place when the second is made.
        widest, layer = self.activations.widest, self.activations.layer
        again = batch * (widest + layer if self.checkpointing else 2 * widest)
        # The loss differentiated; the last layer; all gradients, no activation left.
        moments = ((kept, loss - made, made), (kept, 0, left + again), (0, 0, weights))
        held = (3 * weights, *max(moments, key=sum), WORKSPACES)  # weights and Adam's two moments
        return dict(zip(HELD, held, strict=True))

    def reserved(self, peak: float, tokens: int) -> float:
        """Return the bytes that PyTorch's allocator takes from the GPU for a step of that ``peak``."""
        pieces, logits = 0.0, tokens * self.model.vocabulary
        if self.way == "eager":
            by_logits = peak + RESERVED_OF_LOGITS * EAGER_BYTES * logits
            return max(RESERVED_LEAST * peak, min(RESERVED["eager"] * peak, by_logits))
        if self.way == "cce" and 4 * logits > DENSE_BYTES:  # fewer are one tensor
            scratch = min(CCEConfig(memory_budget=self.budget or "auto").scratch(tokens), 4 * logits)
            pieces = PIECES_CHECKPOINTED * scratch if self.checkpointing else PIECES * min(scratch, PIECES_OF)
        return RESERVED[self.way] * peak + pieces

    def taken(self, batch: int) -> float:
        """Return the bytes that a step takes from the GPU, without CUDA's own."""
        return self.reserved(sum(self.at_peak(batch).values()), batch * self.sequence)

    def largest_batch(self, gpu_memory: int) -> int:
        """Return the largest batch that fits."""
        checkpointed = Run(**{**vars(self), "checkpointing": True})

        def fits(batch: int) -> bool:
            most = self.taken(batch)
            if self.way == "cce" and self.activations.checkpointed is not None:
                # Few activations do not fill the gaps of the scratch, so without checkpointing it takes no less.
                most = max(most, checkpointed.taken(batch))
            return most <= gpu_memory - CONTEXT

        return largest(fits)

    def step(self, batch: int, gpu_memory: int) -> Step:
        held = self.at_peak(batch)
        return Step(self.kept(batch), sum(held.values()), held, self.largest_batch(gpu_memory))


def largest(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """Return the largest number of rows that ``fits``; 0 if not even one does, ``most`` if more do."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        if high >= most:
            return most
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def estimate(
    name: str,
    batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    gpu_memory: float = 24.0,
    memory_budget: int | None = None,
    config: Any = None,
) -> Estimate:
    """Return what a step of ``batch`` rows of ``sequence`` tokens holds, and the largest batch for ``gpu_memory`` GiB.

    Raises:
        ValueError: ``name`` names no configuration of a language model.
    """
    by_type = _of_type(name) if config is None else None
    config = config_named(name) if config is None else config
    model, activations = weigh(name, config, sequence, dtype)
    tokens = batch * sequence
    weights = model.parameters * PRECISIONS[dtype].weight
    loss = {way: loss_bytes(way, tokens, model, dtype, memory_budget) for way in WAYS}
    found = Estimate(
        model, batch, sequence, dtype, round(gpu_memory * GIB), tokens * model.vocabulary,
        # CCE's peak without the gradients, which are counted in "gradients":
        {way: peak - left if way == "cce" and not few else peak for way, (peak, left, few) in loss.items()},
        weights, 2 * weights, weights, loss["cce"][2], notes=_notes(name, model, sequence, config, by_type),
    )  # fmt: skip
    if isinstance(activations, str):
        found.unknown = activations
        return found
    if model.attention == "eager":
        found.notes.append("this model has no attention by torch's SDPA; with eager attention it keeps all scores")
    for checkpointing, steps in ((False, found.plain), (True, found.checkpointing)):
        if checkpointing and activations.checkpointed is None:
            continue
        for way in WAYS:
            run = Run(way, model, activations, sequence, dtype, memory_budget, checkpointing)
            steps[way] = run.step(batch, found.gpu_memory)
    return found


def _notes(name: str, model: Model, sequence: int, config: Any, by_type: Any) -> list[str]:
    notes = []
    if by_type is not None:
        notes.append(
            f"{name} is a model type: the sizes are the defaults of {by_type.__name__}, not those of a model you may have in "
            "mind; for that give its folder, its config.json or its name on the hub"
        )
    if model.softcapped:
        notes.append("this model caps its logits: without CCE they take more than is counted here")
    if getattr(config, "vision_config", None) is not None:
        notes.append("only rows of text are counted; what the vision tower keeps comes on top")
    if model.positions and sequence > model.positions:
        notes.append(f"this model is made for rows of up to {model.positions:,} tokens")
    return notes


def verdict(found: Estimate) -> str:
    """Say what CCE brings here, and why where it is little."""
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


def reserve() -> str:
    """Say what the largest batches leave room for."""
    beyond = {way: f"{factor - 1:.0%}" for way, factor in RESERVED.items()}
    return (
        f"Largest batches leave room for what PyTorch's allocator takes beyond the peak: full logits {RESERVED_LEAST - 1:.0%} "
        f"to {beyond['eager']},\ncompiled {beyond['compiled']}, with CCE {beyond['cce']} and up to {PIECES_CHECKPOINTED:g} "
        f"times its scratch; and for {CONTEXT / GIB:.1f} GiB of CUDA's own."
    )
