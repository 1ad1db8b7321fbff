"""Transformers: the head of a causal LM defers its multiplication during a training call with labels.

Cause: a causal LM's forward multiplies hidden states [B, S, D] with the head [V, D] and hands all logits [B, S, V] to
its loss. Versions: transformers 5.0 and newer, read and tested with 5.0, 5.17 and 5.23. It can go when Transformers
offers a hook between the head and the loss.

How: two module hooks on the model, module-level functions, no closure. Before a training call the head's ``forward`` is
swapped for one that hands ``HeadInput`` to the forward that was there; after the call, or an exception, it is put back.
Hooks and not a new ``model.forward``, because the signature that Trainer and ``generate`` inspect, the forward that
accelerate, TRL and DeepSpeed wrap, copies, pickles and DataParallel replicas then stay what they are (a forward that
closes over the bound original trains the original's weights after a deepcopy). Swapped per call, not for good, because
the head may be another module by the next call: resized, quantised, wrapped by PEFT. Between calls the head is
untouched. State lives in ``model._hf_cce`` and, during a call, in the head's own ``__dict__``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from hf_cce.calls import Call, Stats, outside
from hf_cce.config import CCEConfig
from hf_cce.deferred import DeferredLogits
from hf_cce.filter_state import FilterState
from hf_cce.head import (
    LINEAR,
    PARTITIONED,
    RESHARDS,
    adapter_in,
    asks_for_a_tensor,
    find_head,
    keep_whole,
    path_to,
    why_not_defer,
    why_others_not,
)
from hf_cce.head_input import HeadInput
from hf_cce.patches import peft_tuner, tensor_parallel, trl, zero3
from hf_cce.patches.refused import labels_position
from hf_cce.policy import PolicyLogits
from hf_cce.terms import TermSum

STATE = "_hf_cce"
AROUND = "_hf_cce_around"  # on a head, during calls: for each of them what it has interrupted, a call of the same model or None


@dataclass
class Patch:
    """What one patched model carries: its options, its counters, its two hooks."""

    config: CCEConfig
    labels_position: int | None  # where forward takes labels when they come without a name
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState = field(default_factory=FilterState)
    handles: list[RemovableHandle] = field(default_factory=list)
    forward: Any = None  # the head's forward during a call: kept, because Dynamo makes a new graph for a new object
    warned: bool = False
    # A trainer that reads log-probabilities from logits without labels is in a step; see patches.preference
    policy: bool = False
    loss_only: bool = False  # an evaluation that keeps the loss alone is in a step; see patches.evaluation
    set_loss_function: bool = False
    path: str | None = None  # of the head, by names

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "forward": None}  # it holds a head, which may have been replaced since

    def __setstate__(self, state: dict[str, Any]) -> None:
        peft_tuner.enter(STATE)  # where a model is unpickled nobody may have called ``patch``
        vars(self).update(state)

    def end_evaluation(self, model: nn.Module) -> None:
        """Of a step for the loss alone, also where a KeyboardInterrupt has ended it, after which torch runs no hook."""
        self.loss_only = False
        if (head := find_head(model)) is not None:
            _put_back(head)

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
    """What happened in the training calls of a patched model; ``model.cce_stats()``. Waits for the device.

    Returns:
        ``calls`` with labels; ``fused``, losses that made no logits (a call may have several); ``few_tokens``, calls of so few
        tokens that the model's own loss was left to do it, which is then faster; ``missed``, calls that ended without a fused
        loss; ``materialised``, how often full logits were made nevertheless, by a head that cannot put them off or afterwards,
        and ``read``, how often of these for somebody who used ``outputs.logits``; ``bypassed``, calls that TRL answered with a
        fused head of its own; ``traced``, 1 where a compiled graph, in which nothing is counted, holds the fused loss; and, once
        the gradient filter has run, what ``FilterState.stats`` says of its last step.
    """
    if not state.handles:
        raise RuntimeError("the model is not patched any more")
    stats = state.stats
    return {**{key: float(value) for key, value in vars(stats).items()}, **state.filter_state.stats()}


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
        _put_back(head)


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


def _note_loss_type(model: nn.Module, state: Patch) -> None:
    """Take that back where the model has been given a ``loss_type`` since: what is set by name would win over it."""
    if state.set_loss_function and getattr(model, "loss_type", None) is not None:
        _leave_the_loss(model, state)


def _leave_the_loss(model: nn.Module, state: Patch) -> None:
    if (
        state.set_loss_function and model.__dict__.get("_loss_function") is _default_loss()
    ):  # nobody has set another since
        model.__dict__.pop("_loss_function", None)
    state.set_loss_function = False


def _default_loss() -> Any:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING["ForCausalLM"]


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state, head = patch_of(model), find_head(model)
    if state is None or head is None or _in_another(state, head):
        return
    if not torch.compiler.is_compiling():
        _note_loss_type(model, state)
        _interrupt(state, head)
    _put_back(head)  # that, or what was left by a call that a KeyboardInterrupt ended
    training = model.training and torch.is_grad_enabled()
    policy = training and state.policy and not torch.compiler.is_compiling() and not _has_labels(state, args, kwargs)
    training = policy or (training and _has_labels(state, args, kwargs))
    if kwargs.get("fused_lm_head"):
        training |= model.training and torch.is_grad_enabled() and kwargs.get("shift_labels") is not None
        call = Call(state.config, state.stats, state.filter_state) if training else Call(state.config, Stats())
        if (torch.compiler.is_compiling() or not trl.enter(call)) and training:
            _note_bypass(state)
        return
    if not training:
        if state.loss_only and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _before_evaluation(model, state, head, _has_labels(state, args, kwargs))
        return
    call = Call(state.config, state.stats, state.filter_state, kind=PolicyLogits if policy else None, owner=state)
    reason = _why_not(model, state, head)
    if policy and hasattr(model, "_get_fsdp_state"):
        reason = "FSDP looks for tensors in the output of a model, and a call without labels has only logits"
    if reason == RESHARDS and not torch.compiler.is_compiling():  # a graph cannot change that, and gets real logits
        call.kept_whole = keep_whole(head)
        reason = None
    if reason == PARTITIONED and not policy:
        reason = zero3.why_not(head, compiling=torch.compiler.is_compiling())
        if reason is None:
            zero3.enter(head, call)
    if reason is not None:
        if torch.compiler.is_compiling():
            _tell(reason)
        call.note_refused(reason)
        call.note_full_logits()  # as the head is about to
        _close(state, call, head)
        return
    call.checkpoint = _checkpoint()
    _swap(model, state, head, call)


def _why_not(model: nn.Module, state: Patch, head: nn.Module) -> str | None:
    """Why the head cannot put its multiplication off. What there is a way around, of FSDP2 and ZeRO-3, comes last."""
    if torch.compiler.is_compiling():
        return tensor_parallel.why_not(head, compiling=True) or why_not_defer(head)
    state.path = path_to(model, head, state.path)
    return tensor_parallel.why_not(head, compiling=False) or why_others_not(model, state.path) or why_not_defer(head)


def _before_evaluation(model: nn.Module, state: Patch, head: nn.Module, labels: bool) -> None:
    """Let a call without gradients put its logits off, where nothing more is needed than to swap the head's forward."""
    if not labels or getattr(model, "_is_replica", False):
        return
    if _why_not(model, state, head) is None and not any(map(asks_for_a_tensor, model._forward_hooks.values())):
        _swap(model, state, head, Call(state.config, evaluation=True, owner=state))


def _swap(model: nn.Module, state: Patch, head: nn.Module, call: Call) -> None:
    """Put ``_deferring_forward`` in the place of the head's, for the time of ``call``."""
    previous = head.__dict__.get("forward")
    if _is_ours(previous):  # left by a compiled call
        previous = previous.args[1]
    forward = state.forward
    if forward is None or forward.args[0] is not head or forward.args[1] is not previous:
        forward = functools.partial(_deferring_forward, head, previous)
        if not getattr(model, "_is_replica", False):  # replicas share the state, each has a head of its own
            state.forward = forward
    setattr(head, STATE, call)
    head.forward = forward


def _deferring_forward(head: Any, previous: Any, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The head's own forward, or the one that accelerate had put there, on an input that does not multiply."""
    if hidden_states is None and "input" in kwargs:  # as torch.nn.Linear calls it
        hidden_states = kwargs.pop("input")
    call = head.__dict__.get(STATE)
    deferring = call is not None and (call.evaluation or torch.is_grad_enabled())
    if not (deferring and isinstance(hidden_states, torch.Tensor)):
        call = None
    if call is not None and not call.evaluation and _checkpoint() != call.checkpoint:
        call.note_refused(
            "the model's forward puts its head into a checkpoint, which calls it anew in the backward pass"
        )
        call.note_full_logits()
        call = None
    output = None
    if call is not None:
        if call.handles:
            output = zero3.run(head, hidden_states, call)
        else:
            output = tensor_parallel.run(previous, hidden_states, call)
        if output is None and not call.handles:
            call.adapted = type(head).forward is not nn.Linear.forward
            hidden_states = HeadInput(hidden_states, call)
            if F.linear is not LINEAR and previous is None:  # only a plain Linear comes here then
                output = hidden_states.linear(head.weight, head.bias)
    if output is None:
        forward = functools.partial(type(head).forward, head) if previous is None else previous
        output = forward(hidden_states, *args, **kwargs)
    if call is not None and isinstance(output, torch.Tensor) and not call.few_tokens:
        call.note_full_logits()  # by a head, or an adapter on it, that does more than is known to be put off
    return output.deferred() if isinstance(output, TermSum) else output


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    state, head = patch_of(model), find_head(model)
    if state is None or head is None or _in_another(state, head):
        return None
    call = _put_back(head)
    if not torch.compiler.is_compiling():
        _resume(model, state, head)
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
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1 and _in_reentrant_checkpoint():
        return _with_logits(output)
    if torch.compiler.is_compiling() or getattr(model, "_is_replica", False):
        return _without_deferred(output)  # a graph and DataParallel's gather hand on tensors only
    for value in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ():
        # Deferred in a graph (of the head, or of the model's forward alone), which knows no versions: from here on they count.
        if isinstance(value, DeferredLogits) and value._versions is None and value._made is None:
            value._versions = value._ingredient_versions()
    return None


def _in_another(state: Patch, head: nn.Module) -> bool:
    """Whether a patched model around this one (BLIP-2 around its language model) has a call under way: the loss is its."""
    call = head.__dict__.get(STATE)
    if call is None or call.owner is state or torch.compiler.is_compiling():
        return False
    # it has not if a KeyboardInterrupt ended that call, and nobody has put the head back
    return call.owner is not None and _calls_under_way(call.owner) > 0


def _calls_under_way(state: Patch) -> int:
    """How many calls of the model of ``state`` are on this thread's stack, one inside the other."""
    calls, found = (nn.Module._call_impl.__code__, Patch.around.__code__), 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in calls:
            caller = frame.f_locals["self"]
            found += (caller if isinstance(caller, Patch) else patch_of(caller)) is state
        frame = frame.f_back
    return found


def _interrupt(state: Patch, head: nn.Module) -> None:
    """Note the call that goes on after this one: a model may call itself, to distil or to generate, and read its own loss."""
    outer, around = head.__dict__.get(STATE), head.__dict__.setdefault(AROUND, [])
    if (outer is not None or around) and _calls_under_way(state) < 2:  # all of it left by a KeyboardInterrupt
        around.clear()
        outer = None
    around.append(outer if outer is not None and outer.owner is state else None)


def _resume(model: nn.Module, state: Patch, head: nn.Module) -> None:
    """Let the call go on that this one has interrupted."""
    around = head.__dict__.get(AROUND)
    outer = around.pop() if around else None
    if not around:
        head.__dict__.pop(AROUND, None)
    if outer is None:
        return
    if outer.kept_whole:
        outer.kept_whole = keep_whole(head)
    if outer.handles:
        outer.handles.clear()
        zero3.enter(head, outer)
    _swap(model, state, head, outer)


def _is_ours(forward: Any) -> TypeGuard[functools.partial[Any]]:
    return isinstance(forward, functools.partial) and forward.func is _deferring_forward


def _put_back(head: nn.Module) -> Call | None:
    """Undo the swap of the head's forward; the call it belonged to, None where there was none.

    Dynamo turns an attribute that is set and deleted in one graph into a deletion of what never was. So in a graph the
    swapped forward stays, without a call, and does what it replaced; the next call outside, or ``unpatch``, removes it.
    """
    call = head.__dict__.get(STATE)
    if torch.compiler.is_compiling():
        if call is not None:
            setattr(head, STATE, None)
        return call
    for handle in () if call is None else call.handles:
        handle.remove()
    # Its backward pass reshards it; other calls do so by themselves.
    for group in () if call is None else call.kept_whole:
        group.restore()
    head.__dict__.pop(STATE, None)
    forward = head.__dict__.get("forward")
    if _is_ours(forward):
        previous = forward.args[1]
        if previous is None:
            del head.forward
        else:
            head.forward = previous
    return call


def _has_labels(state: Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "labels" in kwargs:
        return kwargs["labels"] is not None
    position = state.labels_position
    return position is not None and position < len(args) and args[position] is not None


def _without_deferred(output: Any) -> Any:
    """The same return value, its logits None; a tuple without them, as ``to_tuple`` leaves None out."""
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, DeferredLogits))
    if not isinstance(output, dict):
        return output
    fields = {name: None if isinstance(value, DeferredLogits) else value for name, value in output.items()}
    return type(output)(**fields)


def _checkpoint() -> int | None:
    """Which checkpoint (not reentrant) this runs in, the innermost, by what that does to tensors that are saved; None in none."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or torch.compiler.is_compiling():
        return None
    hooks = top(True)
    return id(hooks[0]) if hooks and "checkpoint" in getattr(hooks[0], "__qualname__", "") else None


def _in_reentrant_checkpoint() -> bool:
    """Whether torch.utils.checkpoint calls the model anew, and will look for tensors in what it returns."""
    code, frame = CheckpointFunction.backward.__code__, sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_code is code


def _with_logits(output: Any) -> Any:
    """The same return value with real logits, which the first call, without gradients, made as well."""
    real = lambda value: value.materialize() if isinstance(value, DeferredLogits) else value  # noqa: E731
    if isinstance(output, tuple):
        return tuple(map(real, output))
    return type(output)(**{name: real(value) for name, value in output.items()}) if isinstance(output, dict) else output


def _note_bypass(state: Patch) -> None:
    """A call of TRL's forward, which calls neither the head nor the model's loss: say once that nothing comes of us."""
    if torch.compiler.is_compiling():
        return
    state.stats.bypassed += 1
    if state.stats.bypassed == 1:
        warnings.warn(
            "hf_cce: apply_cce has no effect on this training: TRL replaces the model's forward with its own fused LM head "
            "(trl.trainer.utils.add_fused_lm_head), so neither the model's forward nor its loss is called. The training is "
            "right, and what it saves is TRL's doing.",
            stacklevel=outside(),
        )


def _close(state: Patch, call: Call, head: nn.Module) -> None:
    """Count a finished training call, and say once per model when it missed the fused loss, or made logits after all."""
    if torch.compiler.is_compiling():
        return
    call.closed = True
    state.stats.calls += 1
    if (call.few_tokens or call.kind is not None) and not call.reasons:
        return  # with a kind of its own, the logits are read after the call
    missed = call.fused == 0 and not call.traced
    state.stats.missed += missed
    if (missed or call.reasons) and not state.warned:
        state.warned = True
        why = "; ".join(dict.fromkeys(call.reasons)) or "its loss is no cross entropy of the output of its LM head"
        known = bool(call.reasons) and not any("asked for the logits" in reason for reason in call.reasons)
        adapter = None if known else adapter_in(head)
        if adapter is not None:
            why = (
                f"PEFT trains an adapter ({adapter}) on its LM head, and the two are not known to be one linear head. To train "
                "without logits, leave the LM head out of target_modules, or train it whole: "
                'modules_to_save=["lm_head"]'
            )
        if call.full_logits:
            _tell(why)
        else:  # TRL's own fused head did it, or a loss of the model's own that takes no logits
            warnings.warn(
                f"hf_cce: a training call of this model ended without our fused loss: {why}. The loss is right; "
                "it only costs what it cost before.",
                stacklevel=outside(),
            )


def _tell(why: str) -> bool:
    """Warn that logits are made. While a graph is traced this runs once, there and then: Dynamo takes it for a constant."""
    warnings.warn(
        f"hf_cce: a training call of this model made full logits, so it saves no memory: {why}. The loss is right; "
        "it only costs what it cost before.",
        stacklevel=outside(),
    )
    return True
