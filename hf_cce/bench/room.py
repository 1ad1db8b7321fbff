"""What a training step takes of a GPU beyond what it holds, and the largest batch for which there is room.

A measured reserve (``results/*-steps-*.json``, ``*-fits-*.json``; a test compares), which ``hf-cce estimate`` says beside its
batches.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_cce import CCEConfig
from hf_cce.dispatch import DENSE_BYTES, EAGER_BYTES

GIB = 1 << 30
# What PyTorch's allocator took from the GPU, as a multiple of the peak, in steps of three models: larger blocks fragment more,
# and not alike; 1.04 to 1.13 with full logits, 1.01 to 1.12 compiled.
RESERVED = {"eager": 1.112, "compiled": 1.1, "cce": 1.01}
# With full logits those are the largest blocks: 0.14 to 0.32 of what they take. Where they are small, so is the multiple.
RESERVED_LEAST, RESERVED_OF_LOGITS = 1.08, 0.3
CONTEXT = 536 << 20  # CUDA's context; a guess that suits most GPUs
# In multiples of CCE's scratch, what it is cut into: with gradient checkpointing, and without (of so much scratch at most)
PIECES_CHECKPOINTED, PIECES, PIECES_OF = 2.15, 1.8, 256 << 20


def reserved(
    way: str,
    peak: float,
    tokens: int,
    memory_budget: int | None,
    checkpointing: bool = False,
    vocabulary: int = 1 << 20,
) -> float:
    """Bytes that PyTorch's allocator takes from the GPU for a step of that ``peak``.

    What CCE's scratch is cut into differs from one moment of a step to the next. Where activations are kept, other tensors find
    room in what it leaves but for some hundreds of MiB; with gradient checkpointing there are none that would.
    """
    pieces, logits = 0.0, tokens * vocabulary
    if way == "eager":
        by_logits = peak + RESERVED_OF_LOGITS * EAGER_BYTES * logits
        return max(RESERVED_LEAST * peak, min(RESERVED[way] * peak, by_logits))
    if way == "cce" and 4 * logits > DENSE_BYTES:  # fewer are one tensor, which is cut into nothing
        scratch = min(CCEConfig(memory_budget=memory_budget).scratch(tokens), 4 * logits)  # see loss_bytes
        pieces = PIECES_CHECKPOINTED * scratch if checkpointing else PIECES * min(scratch, PIECES_OF)
    return RESERVED[way] * peak + pieces


def largest(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number of rows that ``fits``, which no larger one does; 0 if not even one, ``most`` if more do."""
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


def said() -> str:
    """In words, what the largest batches leave room for."""
    beyond = {way: f"{factor - 1:.0%}" for way, factor in RESERVED.items()}
    return (
        f"Largest batches leave room for what PyTorch's allocator takes beyond the peak: today {RESERVED_LEAST - 1:.0%} to "
        f"{beyond['eager']},\ncompiled {beyond['compiled']}, with CCE {beyond['cce']} and up to {PIECES_CHECKPOINTED:g} times "
        f"its scratch; and for {CONTEXT / GIB:.1f} GiB of CUDA's own."
    )
