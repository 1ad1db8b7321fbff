"""Transformers: the head of a causal LM defers its multiplication during a training call, and during any call with labels.

Cause: a causal LM's forward multiplies hidden states [B, S, D] with the head [V, D] and hands all logits [B, S, V] to its loss,
or to a trainer that computes one. Versions: transformers 5.0 and newer, read and tested with 5.0, 5.17 and 5.23. It can go when
Transformers offers a hook between the head and the loss.

How: two module hooks on the model, module-level functions, no closure. Before such a call the head's ``forward`` is
swapped for one that returns lazy logits (``hf_cce.deferred``); after the call, or an exception, it is put back. Hooks and not
a new ``model.forward``, because the signature that Trainer and ``generate`` inspect, the forward that accelerate, TRL and
DeepSpeed wrap, copies, pickles and DataParallel replicas then stay what they are (a forward that closes over the bound
original trains the original's weights after a deepcopy). Swapped per call, not for good, because the head may be another
module by the next call: resized, quantised, wrapped by PEFT. State lives in ``model._hf_cce`` and, during a call, in the
head's own ``__dict__``: the call under way, which knows the one that it interrupts. torch runs no hook after Ctrl-C: the head
then stays swapped until ``apply_cce`` or ``remove_cce``, and answers with lazy logits, which are right for whoever asks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_cce.config import CCEConfig
from hf_cce.deferred.adapters import AdapterHead
from hf_cce.deferred.head_input import HeadInput, head_input, linear
from hf_cce.deferred.lazy_tensor import LazyTensor
from hf_cce.deferred.logits import LazyLogits, to_wrapper
from hf_cce.deferred.training_call import Stats, TokenSums, TrainingCall, warn
from hf_cce.filter_state import FilterState
from hf_cce.head_checks import adapter_in, find_head, why_not_defer
from hf_cce.patches import bnb, distillation, peft_tuner, preference, tensor_parallel, trl
from hf_cce.patches.refused import labels_position

STATE = "_hf_cce"


class _Entry(NamedTuple):
    """What a head is in while a call of its model is under way."""

    call: TrainingCall | None  # None: it does what it always did
    outer: Any = None  # the entry of the call that this one interrupts
    guest: bool = False  # the call is that of a patched model around this one


@dataclass
class Patch:
    """What one patched model carries: its options, its counters, its two hooks."""

    config: CCEConfig
    labels_position: int | None  # where forward takes labels when they come without a name
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState = field(default_factory=FilterState)
    token_sums: TokenSums = field(default_factory=TokenSums)
    handles: list[RemovableHandle] = field(default_factory=list)
    forward: Any = None  # the head's forward during a call: kept, because Dynamo makes a new graph for a new object
    warned: bool = False
    set_loss_function: bool = False

    def __post_init__(self) -> None:
        self.filter_state.counters = self.stats

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "forward": None}  # it holds a head, which may have been replaced since

    def __setstate__(self, state: dict[str, Any]) -> None:
        peft_tuner.enter(STATE)  # where a model is unpickled nobody may have called ``patch``
        vars(self).update(state)
        self.__post_init__()

    def around(self, model: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``call``, which reaches the forward of ``model`` past its hooks, and do before and after it what they would do."""
        output = changed = None
        _before(model, args, kwargs)
        try:
            output = call(*args, **kwargs)
        finally:
            changed = _after(model, args, kwargs, output)
        return output if changed is None else changed


def patch(model: nn.Module, config: CCEConfig) -> None:
    """Patch one instance; on a patched one only the options change."""
    peft_tuner.enter(STATE)
    state = patch_of(model)
    if state is not None and all(handle.id in (handle.hooks_dict_ref() or ()) for handle in state.handles):
        state.config = config
        if (head := find_head(model)) is not None:
            _put_back(head, everything=True)
        return
    unpatch(model)  # somebody has cleared its hooks
    torch.compiler.assume_constant_result(_tell)  # not at import: it loads Dynamo, as Transformers' models have by now
    state = Patch(config, labels_position(type(model)))
    state.handles = [
        model.register_forward_pre_hook(_before, prepend=True, with_kwargs=True),
        model.register_forward_hook(_after, with_kwargs=True, always_call=True),
    ]
    state.set_loss_function = _name_the_loss(model)
    setattr(model, STATE, state)
    model.cce_stats = functools.partial(cce_stats, state)  # type: ignore[assignment]


def cce_stats(state: Patch) -> dict[str, float]:
    """What happened in the training calls of a patched model, counts as int; ``model.cce_stats()``. Waits for the device.

    Returns:
        ``calls`` in training mode; ``fused``, losses that made no logits (a call may have several); ``few_tokens``, calls of so
        few tokens that the model's own loss was left to do it, which is then faster; ``missed``, calls that ended without a fused
        loss; ``materialized``, how often full logits were made nevertheless, by a head that cannot put them off or afterwards,
        and ``read``, how often of these for somebody who used ``outputs.logits``; ``bypassed``, calls that TRL answered with a
        fused head of its own; ``traced``, 1 where a compiled graph holds the fused loss (such a graph counts its
        scalar cross-entropies alone, each as a call); with
        ``token_stats``, means over all labels so far: ``token_accuracy``, ``entropy`` and ``perplexity``; and, once the
        gradient filter has run, what ``FilterState.stats`` says of its last step.
    """
    if not state.handles:
        raise RuntimeError("the model is no longer patched")
    counted = {key: int(value) for key, value in vars(state.stats).items()}
    return {**counted, **state.token_sums.means(), **state.filter_state.stats()}


def unpatch(model: nn.Module) -> None:
    """Take everything back that ``patch`` did; nothing to do on an unpatched model."""
    state = patch_of(model)
    if state is None:
        return
    for handle in state.handles:
        handle.remove()
    state.handles.clear()
    _leave_the_loss(model, state)
    delattr(model, STATE)
    model.__dict__.pop("cce_stats", None)
    head = find_head(model)
    if head is not None:
        _put_back(head, everything=True)


def patch_of(model: nn.Module) -> Patch | None:
    """The state of a patched model, None of any other."""
    state = model.__dict__.get(STATE)
    return state if isinstance(state, Patch) else None


def _name_the_loss(model: nn.Module) -> bool:
    """Set the loss function that the model would fall back to, where it has no ``loss_type`` of its own (GPT-2, BERT).

    The property logs a warning on that way, at which ``torch.compile(fullgraph=True)`` stops, with or without us.
    """
    if getattr(model, "loss_type", None) is not None or "_loss_function" in model.__dict__:
        return False
    model._loss_function = _default_loss()
    return True


def _leave_the_loss(model: nn.Module, state: Patch) -> None:
    """Take that back, but for a loss function that somebody else has set since."""
    if state.set_loss_function and model.__dict__.get("_loss_function") is _default_loss():
        model.__dict__.pop("_loss_function")
    state.set_loss_function = False


def _default_loss() -> Any:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING["ForCausalLM"]


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state, head = patch_of(model), find_head(model)
    if state is None or head is None:
        return
    compiling, labels = torch.compiler.is_compiling(), _has_labels(state, args, kwargs)
    outer = None if compiling else head.__dict__.get(STATE)
    if outer is not None and outer.call is not None and outer.call.owner is not state:  # the loss is that model's
        _put_on(model, state, head, _Entry(outer.call, outer, guest=True))
        return
    if not compiling and getattr(model, "loss_type", None) is not None:
        _leave_the_loss(model, state)  # it would win over the type that the model has been given since
    training = model.training and torch.is_grad_enabled()
    if kwargs.get("fused_lm_head"):
        _enter_trl(state, training and (labels or kwargs.get("shift_labels") is not None))
        deferring = False
    elif compiling or getattr(model, "_is_replica", False):  # whose output holds no logits
        deferring = training and labels
    else:
        deferring = training or labels
    if deferring:
        if training:
            call = TrainingCall(state.config, state.stats, state.filter_state, owner=state, head=head, labels=labels)
        else:
            call = TrainingCall(state.config, owner=state, head=head, evaluation=True)
        reason = tensor_parallel.why_not(head, compiling=compiling) or why_not_defer(head)
        if reason is None:
            if not compiling:  # in a graph 4-bit heads are refused
                bnb.enter()
            if not labels:
                preference.enter()
                distillation.enter()
            _put_on(model, state, head, _Entry(call, outer))
            return
        if training:
            if compiling:
                _tell(reason)
            call.note_refused(reason)
            call.note_full_logits()  # as the head is about to
            _close(state, call, head)
    if outer is not None:
        _put_on(model, state, head, _Entry(None, outer))


def _enter_trl(state: Patch, training: bool) -> None:
    """A call of the fused head that TRL gives to its models: it is answered, or counted as none of ours."""
    call = TrainingCall(state.config, state.stats, state.filter_state) if training else TrainingCall(state.config)
    if (torch.compiler.is_compiling() or not trl.enter(call)) and training:
        _note_bypass(state)


def _put_on(model: nn.Module, state: Patch, head: nn.Module, entry: _Entry) -> None:
    """Put ``_deferring_forward`` in the place of the head's, for the time of a call."""
    previous = head.__dict__.get("forward")
    if _is_ours(previous):  # of a call around this one, or left by a compiled call
        previous = previous.args[1]
    forward = state.forward
    if forward is None or forward.args[0] is not head or forward.args[1] is not previous:
        forward = functools.partial(_deferring_forward, head, previous)
        if not getattr(model, "_is_replica", False):  # replicas share the state, each has a head of its own
            state.forward = forward
    setattr(head, STATE, entry)
    head.forward = forward


def _deferring_forward(head: Any, previous: Any, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What the head's own forward returns, or the one that accelerate had put there, not multiplied out."""
    if hidden_states is None and "input" in kwargs:  # as torch.nn.Linear calls it
        hidden_states = kwargs.pop("input")
    entry = head.__dict__.get(STATE)
    call = None if entry is None else entry.call
    deferring = call is not None and (call.evaluation or torch.is_grad_enabled())
    if not (deferring and isinstance(hidden_states, torch.Tensor)):
        call = None
    plain = previous is None and type(head).forward is nn.Linear.forward
    if call is not None and plain:
        return linear(hidden_states, head.weight, head.bias, call)
    if call is not None:
        call.adapted = type(head).forward is not nn.Linear.forward
        hidden_states = head_input(hidden_states, call)
    forward = functools.partial(type(head).forward, head) if previous is None else previous
    if call is not None and hasattr(head, "base_layer") and not torch.compiler.is_compiling():
        with _base_layer_answers(head, call):
            output = forward(hidden_states, *args, **kwargs)
    else:
        output = forward(hidden_states, *args, **kwargs)
    if isinstance(output, AdapterHead):
        return output.deferred()
    if isinstance(output, HeadInput):
        output = output.hidden_states
    if (
        call is not None
        and isinstance(output, torch.Tensor)
        and not isinstance(output, LazyTensor)
        and not call.few_tokens
    ):
        call.note_full_logits()  # by a head, or an adapter on it, that does more than is known to be put off
    return output


@contextlib.contextmanager
def _base_layer_answers(head: nn.Module, call: TrainingCall) -> Iterator[None]:
    """The Linear inside an adapter puts its product off, too, of hidden states that the adapter has changed (OFT)."""
    base: Any = head
    while hasattr(base, "base_layer"):
        base = base.base_layer
    previous, forward = base.__dict__.get("forward"), base.forward

    def answering(x: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(head_input(x, call) if type(x) is torch.Tensor else x, *args, **kwargs)

    base.forward = answering
    try:
        yield
    finally:
        base.__dict__.pop("forward")
        if previous is not None:
            base.forward = previous


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    state, head = patch_of(model), find_head(model)
    if state is None or head is None:
        return None
    entry = _put_back(head)
    call = None if entry is None or entry.guest else entry.call
    if kwargs.get("fused_lm_head"):
        call = None if torch.compiler.is_compiling() else trl.leave()
        if call is not None and call.stats is state.stats and output is not None:
            _close(state, call, head)
        return None
    if call is None or output is None:  # no training call, or one that raised
        return None
    if call.evaluation:
        call.closed = True
        return None
    _close(state, call, head)
    if torch.compiler.is_compiling() or getattr(model, "_is_replica", False):
        # A graph and DataParallel's gather hand on tensors only
        return _with_logits(output, lambda value: None)
    if any(isinstance(x, LazyLogits) and not isinstance(x, torch.Tensor) for x in _values_of(output)):
        # Deferred in a graph, of the head or of the model's forward alone
        return _with_logits(output, lambda value: to_wrapper(value.recipe))
    return None


def _is_ours(forward: Any) -> TypeGuard[functools.partial[Any]]:
    return isinstance(forward, functools.partial) and forward.func is _deferring_forward


def _put_back(head: nn.Module, everything: bool = False) -> _Entry | None:
    """End the call under way, and give the head back to the one that it interrupted, or its own forward.

    Dynamo turns an attribute that is set and deleted in one graph into a deletion of what never was. So in a graph the
    swapped forward stays, without a call, and does what it replaced; the next call outside, or ``unpatch``, removes it.
    """
    entry = head.__dict__.get(STATE)
    if torch.compiler.is_compiling():
        if entry is not None:
            setattr(head, STATE, None)
        return entry
    if entry is not None and entry.outer is not None and not everything:
        setattr(head, STATE, entry.outer)
        return entry
    head.__dict__.pop(STATE, None)
    forward = head.__dict__.get("forward")
    if _is_ours(forward):
        previous = forward.args[1]
        if previous is None:
            del head.forward
        else:
            head.forward = previous
    return entry


def _has_labels(state: Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "labels" in kwargs:
        return kwargs["labels"] is not None
    position = state.labels_position
    return position is not None and position < len(args) and args[position] is not None


def _values_of(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()


def _with_logits(output: Any, change: Any) -> Any:
    """The same return value with other logits; a tuple without those that are None, as ``to_tuple`` leaves None out."""
    changed = [change(value) if isinstance(value, LazyLogits) else value for value in _values_of(output)]
    if isinstance(output, tuple):
        gone = [isinstance(old, LazyLogits) and new is None for old, new in zip(output, changed, strict=True)]
        return tuple(value for value, left in zip(changed, gone, strict=True) if not left)
    return type(output)(**dict(zip(output, changed, strict=True))) if isinstance(output, dict) else output


def _note_bypass(state: Patch) -> None:
    """A call of TRL's forward, which calls neither the head nor the model's loss: say once that nothing comes of us."""
    if torch.compiler.is_compiling():
        return
    state.stats.bypassed += 1
    if state.stats.bypassed == 1:
        warn(
            "hf_cce: apply_cce has no effect on this training: TRL replaces the model's forward with its own fused LM head "
            "(trl.trainer.utils.add_fused_lm_head), which bypasses the model's forward and loss. Training is correct, and "
            "TRL's head also avoids full logits."
        )


def _close(state: Patch, call: TrainingCall, head: nn.Module) -> None:
    """Count a finished training call, and say once per model when it missed the fused loss, or made logits after all."""
    if torch.compiler.is_compiling():
        return
    call.close()
    state.stats.calls += 1 - call.traced  # those that a graph has counted
    if (call.few_tokens or not call.labels) and not call.reasons:
        return  # without labels, the logits are read after the call
    missed = call.fused == 0
    state.stats.missed += missed
    if (missed or call.reasons) and not state.warned:
        state.warned = True
        why = "; ".join(dict.fromkeys(call.reasons))
        if not why and call.full_logits:
            why = "its LM head, or a function that replaces the head's forward, computes more than one linear layer"
        why = why or "its loss is not a cross entropy of its LM head's output"
        known = bool(call.reasons) and not any("needs the full logits" in reason for reason in call.reasons)
        adapter = None if known else adapter_in(head)
        if adapter is not None:
            why = (
                f"PEFT trains an adapter ({adapter}) on its LM head, which the fused loss does not support. To train "
                "without logits, leave the LM head out of target_modules, or train the whole head: "
                'modules_to_save=["lm_head"]'
            )
        if call.full_logits:
            _tell(why)
        else:  # TRL's own fused head did it, or a loss of the model's own that takes no logits
            warn(
                f"hf_cce: a training call of this model did not use the fused loss: {why}. The loss is correct; no memory is "
                "saved."
            )


def _tell(why: str) -> bool:
    """Warn that logits are made. While a graph is traced this runs once, there and then: Dynamo takes it for a constant."""
    warn(f"hf_cce fell back to full logits: {why}. The loss is correct; no memory is saved.")
    return True
