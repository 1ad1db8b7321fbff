"""The recipe of deferred logits: hidden states, weight and bias of a head, and the operations recorded since."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.deferred.lazy_tensor import TensorMeta, compute_logits, version_of
from hf_cce.deferred.operations import Meaning, Op, apply_ops, meaning
from hf_cce.deferred.training_call import OptimizerSteps, TrainingCall, is_freed
from hf_cce.quantized import FrozenWeight
from hf_cce.sharded import as_replicated, to_local

CHANGED = (
    "cannot compute these deferred logits or their gradient: the hidden states or the LM head have changed since the forward "
    "pass (optimizer.step()?); read them before the step, or keep the result of their materialize()"
)


class SharedStorage:
    """The full logits, once computed, shared by all lazy tensors that in torch would have the same memory and shape."""

    def __init__(self, values: Tensor | None = None, version: int = 0, in_graph: bool = False) -> None:
        self.values: Any = values
        self.version = version  # of ``values`` when they were computed
        self.in_graph = in_graph
        self.is_exposed = False  # a kernel or NumPy has got the address of ``values``, and may write there at any time
        self.known: list[tuple[Tensor, Tensor]] = []  # (token ids [..., K], values that were returned for them)

    @property
    def is_modified(self) -> bool:
        """True if the values were modified in place. A graph has no versions, so there values count as modified once computed."""
        return self.values is not None and (self.in_graph or self.values._version != self.version)


@dataclass(eq=False)  # never changed; not a NamedTuple, whose _replace breaks the graphs of torch 2.8 to 2.11
class Recipe:
    """How to compute the logits, or what the loss needs of them, from hidden states, weight and bias.

    In eager code these three are ``leaves``: the inputs of the head, detached from the model's graph. The lazy gradient passes
    the gradients of the leaves on to the inputs (``hf_cce.deferred.lazy_tensor``).
    """

    hidden_states: Any
    weight: Any
    bias: Any
    call: TrainingCall
    cast: torch.dtype | None = None  # the dtype in which autocast would compute the product
    ops: tuple[Op, ...] = ()
    class_first: bool = False  # finally transposed from [B, S, V] to [B, V, S], as F.cross_entropy expects
    leaves: tuple[Tensor | None, ...] = ()
    contiguous: bool = False  # the head's input was; with a bias, torch rounds 16-bit products of other layouts twice
    # To detect reads after optimizer.step(). Version counters do not show the changes of FSDP and DeepSpeed, so after a step of
    # any optimizer some entries of the weight are compared, which synchronizes; after an evaluation always, because an average of
    # the weights, or a merged adapter, may be exchanged through ``.data``.
    versions: tuple[int | None, ...] = ()  # of the leaves
    step: int = 0  # optimizer steps taken before
    entries: Tensor | None = None  # of the weight
    part_of: tuple[Recipe, Any] | None = None  # (whole, op): these hidden states are ``op(whole.hidden_states)``
    split: Any = None  # (split, index) for one of the parts that a split makes, as in ``for row in logits``
    aliases: Any = ()  # list of the ``SharedStorage`` objects with values that torch would put on one storage (views)

    @property
    def meta(self) -> TensorMeta:
        dtype, device = self.weight.dtype if self.cast is None else self.cast, self.hidden_states.device
        for name, value in self.ops:
            if name == "to":
                dtype, device = (value, device) if isinstance(value, torch.dtype) else (dtype, value)
        tokens, v = tuple(self.hidden_states.shape[:-1]), self.weight.shape[0]
        return TensorMeta(torch.Size((tokens[0], v, tokens[1]) if self.class_first else (*tokens, v)), dtype, device)

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.hidden_states, self.weight, self.bias

    @property
    def meaning(self) -> Meaning:
        return meaning(self.ops)

    def replace(self, **changes: Any) -> Recipe:
        # Not vars(self), which breaks the graphs of torch 2.11
        values = {name: getattr(self, name) for name in _FIELDS}
        if "hidden_states" in changes or "bias" in changes:
            values["part_of"] = values["split"] = None
        values.update(changes)
        return Recipe(**values)

    def with_operands(self, hidden_states: Any, weight: Any, bias: Any) -> Recipe:
        return self.replace(hidden_states=hidden_states, weight=weight, bias=bias)

    def with_leaves(self) -> Recipe:
        """Return the recipe on detached leaves that stand for the operands."""
        leaves = tuple(None if x is None else x.detach().requires_grad_(x.requires_grad) for x in self.operands)
        versions, entries = tuple(map(version_of, leaves)), sample_of(self.weight)
        made = self.replace(leaves=leaves, aliases=[], versions=versions, step=OptimizerSteps.taken, entries=entries)
        return made.with_operands(*leaves).replace(contiguous=self.hidden_states.is_contiguous())

    def without_operands(self) -> Recipe:
        return self.replace(hidden_states=None, weight=None, bias=None, leaves=(), aliases=())

    def is_copy_of(self, other: Recipe) -> bool:
        """Return True if both compute the same logits from the same tensors."""
        same = all(x is y for x, y in zip(self.operands, other.operands, strict=True))
        return same and self.ops == other.ops and self.class_first == other.class_first

    def with_ops(self, *ops: Op) -> Recipe:
        """Return the recipe with ``ops`` recorded after its own; the result has memory of its own."""
        return self.replace(ops=(*self.ops, *ops), aliases=[])

    def build(self) -> Tensor:
        hidden_states = self.hidden_states.contiguous() if self.contiguous else self.hidden_states
        with self.call.unsharded(self.weight, self.bias), self.without_autocast():  # the recipe contains its casts
            made = apply_ops(self.ops, compute_logits(hidden_states, self.weight, self.bias, self.cast))
        return made.transpose(1, 2) if self.class_first else made

    def scratch_bytes(self) -> int:
        """Return the memory that a result computed by blocks of tokens may take."""
        return (self.call.config or CCEConfig()).workspace_bytes(math.prod(self.hidden_states.shape[:-1]))

    def mask_ops(self) -> list[Op]:
        return [op for op in self.ops if op[0] == "mask"]

    def loss_arguments(self) -> dict[str, Any]:
        """Return the arguments of the fused loss. A low bias gives masked entries probability zero in every dtype."""
        hidden_states, weight, bias = (x if x is None or self.cast is None else x.to(self.cast) for x in self.operands)
        for _, (ids, _) in self.mask_ops():
            bias = (weight.new_zeros(len(weight)) if bias is None else bias).index_fill(0, ids, -6e4)
        form: Any = self.meaning.form
        inputs = {"hidden_states": as_replicated(hidden_states, weight), "weight": weight, "bias": bias}
        return {**inputs, "logit_scale": form[0], "softcap": form[1], "config": self.call.config}

    def without_autocast(self) -> Any:
        device = self.hidden_states.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()

    def check_fresh(self) -> None:
        if not self.versions:
            return
        changed = self.versions != tuple(map(version_of, self.leaves))
        may_differ = self.step != OptimizerSteps.taken or (self.call.evaluation and self.call.closed)
        if not changed and self.entries is not None and may_differ:
            weight = self.leaves[1]  # not self.weight, which may be a part of the vocabulary
            with self.call.unsharded(weight):
                now = sample_of(weight)
                changed = now is not None and not torch.allclose(now, self.entries, rtol=0, atol=0, equal_nan=True)
        if changed:
            raise RuntimeError(CHANGED)


_FIELDS = tuple(Recipe.__dataclass_fields__)


def sample_of(weight: Any) -> Any:
    """Return a copy of about 64 by 64 entries of this process's part of ``weight``; None if it is quantized or freed by FSDP."""
    if isinstance(weight, FrozenWeight):
        return None
    part = to_local(weight.detach())
    if is_freed(part):
        return None
    return part[:: max(1, part.shape[0] // 64), :: max(1, part.shape[1] // 64)].clone()
