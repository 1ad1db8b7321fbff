"""The deferred product of an LM head, and the wrapped input that defers it while the head's own forward runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_cce.deferred.adapters import SumOfProducts, Term
from hf_cce.deferred.lazy_tensor import LazyTensor, TensorProxy, call_as_tensors, name_of
from hf_cce.deferred.logits import lazy_logits
from hf_cce.deferred.training_call import TrainingCall
from hf_cce.head_checks import why_not_read
from hf_cce.loss import has_few_tokens
from hf_cce.quantized import FrozenWeight, torchao_weight
from hf_cce.sharded import is_dtensor, why_not_sharded

_GRAD_FN: Any = Tensor.grad_fn  # the property of the class


def deferred_product(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: TrainingCall) -> Any:
    """Return the head's product, deferred if that pays and the weight can be read later; otherwise computed.

    In a head that PEFT has wrapped, the deferred product is a ``SumOfProducts``. LoRA adds B (A x): A x is computed at once.
    """
    device = hidden_states.device.type
    if call.vocab_size is not None and weight.shape[0] != call.vocab_size:
        return wrap_head_input(F.linear(hidden_states, weight, bias), call)
    cast = reason = None
    if device == "meta":  # is_autocast_enabled does not accept it either
        reason = "the model is on the meta device, where tensors have no data"
    elif not torch.is_grad_enabled() and not call.evaluation:
        call.without_gradients = True
        return F.linear(hidden_states, weight, bias)
    else:
        if torch.is_autocast_enabled(device) and hidden_states.dtype != torch.float64:  # autocast leaves float64 alone
            cast = torch.get_autocast_dtype(device)
        if not torch.compiler.is_compiling():
            frozen = torchao_weight(weight, hidden_states, cast)
            weight = weight if frozen is None else frozen
        reason = _why_not(hidden_states, weight, bias, cast)
    if reason is not None:
        call.reasons.append(reason)
        call.note_full_logits()
        return F.linear(hidden_states, weight, bias)
    begun = call.adapted and call.vocab_size is not None  # all terms of one head are deferred, or none
    # The model's own loss would add nothing to ``token_sums``.
    few = not begun and call.token_sums is None and has_few_tokens(hidden_states, weight, call.config)
    if few and not call.may_gather_head_again():
        call.stats.few_tokens += not call.few_tokens
        call.few_tokens = True
        return F.linear(hidden_states, weight, bias)
    call.vocab_size = weight.shape[0]
    if is_dtensor(hidden_states):
        return ShardedLogits((hidden_states, weight, bias), call, cast)
    made: Any
    if call.adapted:
        made = SumOfProducts((Term(hidden_states, weight),), bias, weight.dtype if cast is None else cast, call, cast)
    else:
        made = lazy_logits(hidden_states, weight, bias, call=call, cast=cast)
    return made.to(hidden_states.dtype) if isinstance(weight, FrozenWeight) and weight.keeps_dtype else made


def _why_not(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype | None) -> str | None:
    shared = is_dtensor(hidden_states)
    reason = why_not_sharded(hidden_states, weight, bias) if shared else why_not_read(weight, bias)
    if shared and torch.compiler.is_compiling():
        return "torch.compile does not support deferred logits for a head whose vocabulary is split over processes"
    fits = cast is not None or hidden_states.dtype == weight.dtype
    if reason is None and (hidden_states.device != weight.device or not fits):
        return "hidden states and head differ in dtype or device"  # full logits let torch raise its own error
    return reason


class HeadInput(LazyTensor):
    """Hidden states [..., D] in the forward of a head that is more than a Linear; ``F.linear`` on them calls ``linear``.

    Operations that are not in the table use the hidden states themselves. In a head that PEFT has wrapped, their results become
    ``HeadInput`` too, because an adapter may multiply them by a matrix with output size V (MiSS, PSOFT, PVeRA).
    """

    hidden_states: Tensor
    call: TrainingCall

    def _materialize(self, why: str) -> Tensor:
        return self.hidden_states

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        # weight.to(x) only takes the dtype of x, so other arguments do not count, except the factors of a product (VeRA, IA3)
        inputs = tree_leaves(args if name_of(func) == "mul" else args[:1])
        calls = [x.call for x in inputs if isinstance(x, HeadInput)]  # not next(…, default), see ``operations.meaning``
        return _wrap_result(result, calls[0]) if calls else result


def _wrap_result(result: Any, call: TrainingCall) -> Any:
    """Wrap the result of an operation on a ``HeadInput`` as a ``HeadInput``, also inside a tuple."""
    if not call.adapted or call.few_tokens:
        return result
    if type(result) is tuple:
        return tuple(_wrap_result(each, call) for each in result)
    return wrap_head_input(result, call) if type(result) is Tensor and result.is_floating_point() else result


def wrap_head_input(hidden_states: Tensor, call: TrainingCall) -> Any:
    """Wrap hidden states [..., D] as a ``HeadInput``; in eager code this is the same tensor as a subclass."""
    in_graph = torch.compiler.is_compiling() or is_dtensor(hidden_states)
    made: Any = _PlainInput(hidden_states) if in_graph else hidden_states.as_subclass(_TensorInput)
    made.hidden_states, made.call = hidden_states, call
    return made


def _matmul(x: Any, other: Any) -> Any:
    """Defer an adapter's own product (AdaLoRA), once the product of the head has set ``call.vocab_size``."""
    known = x.call.adapted and x.call.vocab_size is not None and isinstance(other, Tensor) and other.dim() == 2
    return deferred_product(x.hidden_states, other.t(), None, x.call) if known else NotImplemented


HeadInput.HANDLERS = {
    "linear": lambda x, weight, bias=None: deferred_product(x.hidden_states, weight, bias, x.call),
    "to": lambda x, *args, **kwargs: wrap_head_input(x.hidden_states.to(*args, **kwargs), x.call),
    "dropout": lambda x, *args, **kwargs: wrap_head_input(F.dropout(x.hidden_states, *args, **kwargs), x.call),
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
}


class _TensorInput(HeadInput, Tensor):
    """Its ``hidden_states`` follow its graph, as an autograd function (VeLoRA, backward hooks) gives it a new ``grad_fn``."""

    _plain: tuple[Any, Tensor]  # (grad_fn of this object, hidden states)

    @property
    def hidden_states(self) -> Tensor:
        made_by = call_as_tensors(_GRAD_FN.__get__, (self,))
        if made_by is not self._plain[0]:
            self._plain = made_by, call_as_tensors(Tensor.as_subclass, (self, Tensor))
        return self._plain[1]

    @hidden_states.setter
    def hidden_states(self, value: Tensor) -> None:
        self._plain = call_as_tensors(_GRAD_FN.__get__, (self,)), value


class _PlainInput(HeadInput, TensorProxy):
    def __init__(self, hidden_states: Tensor) -> None:
        self.shape, self.dtype, self.device = hidden_states.shape, hidden_states.dtype, hidden_states.device
        self.requires_grad = hidden_states.requires_grad

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _wrap_result(super()._call_method(name, *args, **kwargs), self.call)


class ShardedLogits(TensorProxy):
    """Placeholder for the DTensor [..., V] of a head whose vocabulary is sharded. Gathering it returns deferred logits."""

    def __init__(self, operands: tuple[Any, Any, Any], call: TrainingCall, cast: torch.dtype | None) -> None:
        hidden_states, weight, _ = operands
        self.operands = operands  # hidden states, weight and bias, as DTensors
        self.call = call
        self.cast = cast
        self.shape = torch.Size((*hidden_states.shape[:-1], weight.shape[0]))
        self.dtype = weight.dtype if cast is None else cast
        self.device = hidden_states.device
        self.requires_grad = any(x is not None and x.requires_grad for x in operands)
        self.device_mesh = weight.device_mesh

    @property
    def placements(self) -> Any:
        from torch.distributed.tensor import Shard

        return (Shard(self.ndim - 1),)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """Return deferred logits for a replicated placement; redistribute the full logits for any other."""
        whole = placements is not None and all(each.is_replicate() for each in placements)
        if not whole or device_mesh not in (None, self.device_mesh) or kwargs.get("forward_dtype") is not None:
            return self._materialize("redistribute").redistribute(device_mesh, placements, **kwargs)  # type: ignore[attr-defined]
        hidden_states, weight, bias = self.operands
        return lazy_logits(hidden_states.to_local(), weight, bias, call=self.call, cast=self.cast)

    def full_tensor(self, **kwargs: Any) -> Any:
        return self._materialize("full_tensor").full_tensor(**kwargs)  # type: ignore[attr-defined]

    def to_local(self, **kwargs: Any) -> Tensor:
        return self._materialize("to_local").to_local(**kwargs)  # type: ignore[attr-defined]

    def _materialize(self, why: str) -> Tensor:
        self.call.note_materialized(why)
        return F.linear(*self.operands)
