"""Transformers: make the head of a causal LM defer its product during training calls, and during any call with labels.

Cause: a causal LM's forward multiplies hidden states [B, S, D] by the head [V, D] and passes all logits [B, S, V] to its loss,
or to a trainer that computes one. Versions: transformers 5.0 and newer, read and tested with 5.0, 5.17 and 5.23. Can be removed
when Transformers offers a hook between the head and the loss.

How: two module hooks on the model. Before such a call the head's ``forward`` is replaced by one that returns deferred logits
(``hf_cce.deferred``); after the call, or an exception, it is restored. After a compiled call it stays replaced, see
``_restore_forward``. After Ctrl-C, when torch runs no hooks, it stays replaced until ``apply_cce`` or ``remove_cce``; deferred
logits are correct in any use.

Hooks leave ``model.forward`` unchanged: Trainer and ``generate`` inspect its signature, accelerate, TRL and DeepSpeed wrap it.
As functions without closures, they also work in copies, pickles and DataParallel replicas of the model. The head is patched per
call, because by the next call it may be another module: resized, quantized, or wrapped by PEFT. State lives in
``model._hf_cce`` and, during a call, in the head's ``__dict__``: the call, linked to the call that it interrupts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_cce.config import CCEConfig
from hf_cce.deferred.adapters import SumOfProducts
from hf_cce.deferred.head_input import HeadInput, deferred_product, wrap_head_input
from hf_cce.deferred.lazy_tensor import LazyTensor
from hf_cce.deferred.logits import LazyLogits, to_eager
from hf_cce.deferred.token_sums import TokenSums, label_groups
from hf_cce.deferred.training_call import OptimizerSteps, Stats, TrainingCall, warn
from hf_cce.filter_state import FilterState
from hf_cce.head_checks import adapter_in, find_head, output_embeddings, why_not_defer
from hf_cce.patches import bnb, distillation, peft_tuner, preference, trl
from hf_cce.patches.marking import STATE
from hf_cce.patches.refused import why_refuse


class _Entry(NamedTuple):
    """State of a head during a call of its model."""

    call: TrainingCall | None  # None: use the head's own forward
    previous_entry: Any = None  # the entry of the call that this one interrupts
    keeps_forward: bool = False  # a compiled call had replaced the head's forward, which stays replaced after this call
    thread: int | None = None  # that runs the call; None in a graph
    compiled: Any = None  # (module, attribute, value) of a head that was compiled by itself, see ``_without_graph``

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy or pickle of the head, which is in no call; after Ctrl-C, this may hold an autograd graph."""
        return type(None), ()


# Patched models, for code that runs while Dynamo traces and gets only constants. Copies of a patched model are not among them.
_models: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()


@dataclass
class Patch:
    """State of one patched model: options, counters and the two hooks."""

    config: CCEConfig
    stats: Stats = field(default_factory=Stats)
    filter_state: FilterState = field(default_factory=FilterState)
    token_sums: TokenSums = field(default_factory=TokenSums)
    handles: list[RemovableHandle] = field(default_factory=list)
    outermost: Any = None  # weak reference to the wrapper that ``apply_cce`` was given
    head_forward: Any = None  # the head's forward during a call, see ``_forward_of``
    warned: bool = False
    expects_entropy: bool = False  # after log-probabilities, the training loop asked for the entropy of the same logits

    def __post_init__(self) -> None:
        self.filter_state.counters = self.stats
        # A key of ``_models``; a string, as Dynamo makes numbers that change symbolic
        self.key = str(self.filter_state.handle)

    def __getstate__(self) -> dict[str, Any]:
        # Both refer to modules that may have been replaced since
        return {**vars(self), "head_forward": None, "outermost": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _prepare()  # the process that unpickles a model may not have called ``patch``
        vars(self).update(state)
        self.__post_init__()

    def warn_unfused(self, why: str) -> None:
        """Warn, once, of a loss that another library computes without full logits, or a model without logits."""
        if not self.warned:
            self.warned = True
            warn(
                f"hf_cce: a training call of this model did not use the fused loss: {why}. The loss is correct; no memory is "
                "saved."
            )

    def run_with_hooks(self, model: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``call``, which calls the model's forward without its hooks, and do the work of both hooks around it."""
        output = changed = None
        _before(model, args, kwargs)
        try:
            output = call(*args, **kwargs)
        finally:
            changed = _after(model, args, kwargs, output)
        return output if changed is None else changed


def _prepare() -> None:
    """Prepare this process for patched models. Not done at import, as it loads Dynamo and PEFT."""
    peft_tuner.install()
    OptimizerSteps.watch()
    torch.compiler.assume_constant_result(_warn_full_logits)
    torch.compiler.assume_constant_result(_install_while_tracing)


def patch(model: nn.Module, config: CCEConfig, outermost: nn.Module | None = None) -> None:
    """Patch one instance, inside the wrapper ``outermost``; on a patched one, only replace the options."""
    _prepare()
    state, root = patch_of(model), None if outermost is None else weakref.ref(outermost)
    hooks = [] if state is None else [handle.id in (handle.hooks_dict_ref() or ()) for handle in state.handles]
    if state is not None and hooks and all(hooks):
        state.config, state.outermost = config, root
        head = find_head(model)
        while head is not None and head.__dict__.get(STATE) is not None:  # left by calls that Ctrl-C interrupted
            _restore_forward(head)
        return
    unpatch(model)  # its hooks were removed by other code, or with those of a copy that shares them (compile_regions)
    _drop_graphs()
    state = Patch(config, outermost=root)
    state.handles = [
        model.register_forward_pre_hook(_before, prepend=True, with_kwargs=True),
        model.register_forward_hook(_after, with_kwargs=True, always_call=True),
    ]
    setattr(model, STATE, state)
    _models[state.key] = model
    model.cce_stats = functools.partial(cce_stats, state)  # type: ignore[assignment]


def cce_stats(state: Patch) -> dict[str, float]:
    """Return the counters of a patched model's training calls, counts as int; ``model.cce_stats()``. Synchronizes the device.

    Returns:
        ``calls``: calls in training mode. ``fused``: losses without logits (a call may have several). ``few_tokens``: calls with
        so few tokens that the model's own loss is faster and was used. ``missed``: calls that ended without a fused loss.
        ``materialized``: how often full logits were computed, by a head that cannot defer or afterwards; ``read``: how many of
        these because ``outputs.logits`` was used. ``bypassed``: calls that used TRL's own fused head. ``traced``: 1 if a
        compiled graph contains the fused loss; such a graph counts only its scalar cross-entropies, each as a call.
        With ``token_stats``, means over all labels so far: ``token_accuracy``, ``entropy``, ``perplexity``, and ``loss_group_i``
        for each group i in the calls' ``loss_groups``. Once the gradient filter has run, also the ``FilterState.stats`` of its
        last step.
    """
    if not state.handles:
        raise RuntimeError("the model is no longer patched")
    counted = {key: int(value) for key, value in vars(state.stats).items()}
    return {**counted, **state.token_sums.means(), **state.filter_state.stats()}


def unpatch(model: nn.Module) -> None:
    """Undo ``patch``; do nothing on an unpatched model."""
    state = patch_of(model)
    if state is None:
        return
    _drop_graphs()
    for handle in state.handles:
        handle.remove()
    state.handles.clear()
    delattr(model, STATE)
    model.__dict__.pop("cce_stats", None)
    head = find_head(model)
    if head is not None:
        _remove_forward(head)


def _drop_graphs() -> None:
    """Drop all compiled graphs: Dynamo does not guard on a module's hooks, so a compiled call of the model would keep its own."""
    dynamo = sys.modules.get("torch._dynamo")
    # Without graphs, ``reset`` would only import Inductor, which takes seconds on a machine with a GPU
    if dynamo is not None and dynamo.utils.counters:
        torch.compiler.reset()


def patch_of(model: nn.Module) -> Patch | None:
    state = model.__dict__.get(STATE)
    return state if isinstance(state, Patch) else None


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state = patch_of(model)
    if state is None:
        return
    groups = kwargs.pop("loss_groups", None)  # not an argument of any model
    compiling, labels = torch.compiler.is_compiling(), kwargs.get("labels") is not None
    if compiling:
        _install_while_tracing(state.key, model.training)
    head = find_head(model)
    training = model.training and torch.is_grad_enabled()
    if head is None:
        if training and labels:  # ``patch_class`` does not check instances
            _close(state, TrainingCall(state.config, state.stats, reasons=[str(why_refuse(model))]), head)
        return
    previous_entry = None if compiling else head.__dict__.get(STATE)
    if previous_entry is None and getattr(model, "_is_replica", False):
        _remove_forward(head)  # left on the original by a compiled call, it uses the original's weights
    outer_entry = None if compiling else _current_entry(head)
    if outer_entry is not None and outer_entry.call is not None and outer_entry.call.owner is not state:
        call = outer_entry.call  # the outer model computes the loss
    elif kwargs.get("fused_lm_head"):  # of TRL; count its loss, or the call as bypassed
        call, counted = None, training and (labels or kwargs.get("shift_labels") is not None)
        of_trl = TrainingCall(state.config, state.stats, state.filter_state) if counted else TrainingCall(state.config)
        of_trl.model = None if compiling else weakref.ref(model)
        if not (compiling or trl.begin_call(of_trl)) and counted:
            _note_bypass(state)
    else:
        call = _new_call(model, state, head, kwargs, groups, training)
    if call is not None or previous_entry is not None:
        _install_forward(model, state, head, _Entry(call, previous_entry))


def _new_call(model: Any, state: Patch, head: Any, kwargs: Any, groups: Any, training: bool) -> TrainingCall | None:
    """Return the call if the head is to defer its product. Otherwise return None, and count a call that should, but cannot."""
    compiling, labels = torch.compiler.is_compiling(), kwargs.get("labels") is not None
    replica = getattr(model, "_is_replica", False)  # of DataParallel
    if not ((training and labels) if compiling or replica else (training or labels)):  # their outputs contain no logits
        return None
    wrapper = None if compiling or state.outermost is None else state.outermost()  # None if it was deleted
    outer = None if compiling else weakref.ref(model if wrapper is None else wrapper)
    if training:
        filter_state = None if replica else state.filter_state  # a threshold lives on one device
        call = TrainingCall(state.config, state.stats, filter_state, state, outer, head, labels)
    else:
        call = TrainingCall(state.config, owner=state, model=outer, head=head, evaluation=True)
    reason = why_not_defer(head, _foreign_forward(head), compiling)
    if groups is not None and training and not compiling:
        if not state.config.token_stats:
            raise ValueError("loss_groups needs token_stats=True, as in apply_cce(model, token_stats=True)")
        shifted = kwargs.get("shift_labels")
        call.loss_groups = label_groups(groups, kwargs.get("labels") if shifted is None else shifted)
    if reason is not None:
        if training:
            call.reasons.append(reason)
            call.note_full_logits()  # the head is about to compute them
            _close(state, call, head)
        return None
    if not compiling:  # in a graph 4-bit heads are refused
        bnb.install()
    if not labels:
        preference.install()
        distillation.install()
    return call


def _install_forward(model: nn.Module, state: Patch, head: nn.Module, entry: _Entry) -> None:
    """Replace the head's forward by ``_deferring_forward`` for the duration of a call."""
    if not torch.compiler.is_compiling():
        keeps = head.__dict__.get(STATE) is None and _is_deferring_forward(head.__dict__.get("forward"))
        compiled = _without_graph(output_embeddings(model), head)
        entry = entry._replace(keeps_forward=keeps, thread=threading.get_ident(), compiled=compiled)
    head.forward = _forward_of(model, state, head)
    setattr(head, STATE, entry)


def _without_graph(called_head: Any, head: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Let a head that was compiled by itself run in eager mode; return what ``_restore_forward`` restores.

    Its graph would compute nothing, and deferred logits from a graph are no tensors: the model's own code may need one.
    """
    if called_head is not head:  # a torch._dynamo.OptimizedModule
        before = called_head, "forward", called_head.forward
        vars(called_head)["forward"] = head.__call__
    elif head._compiled_call_impl is not None:
        before = head, "_compiled_call_impl", head._compiled_call_impl
        head._compiled_call_impl = None
    else:
        return None
    return before


def _current_entry(head: nn.Module) -> _Entry | None:
    """Return the entry of the call that this thread runs, or None. Results of two threads must not share a call."""
    entry = head.__dict__.get(STATE)
    if not torch.compiler.is_compiling():
        while entry is not None and entry.thread not in (None, threading.get_ident()):
            entry = entry.previous_entry
    return entry


def _foreign_forward(head: nn.Module) -> Any:
    """Return the forward that others, such as accelerate, have set on the head instance, or None."""
    forward = head.__dict__.get("forward")
    return forward.args[1] if _is_deferring_forward(forward) else forward


def _forward_of(model: nn.Module, state: Patch, head: nn.Module) -> Any:
    """Return the head's replaced forward. The same object at each call if possible, as Dynamo makes a new graph for a new one."""
    forward, foreign = head.__dict__.get("forward"), _foreign_forward(head)
    if _is_deferring_forward(forward) and forward.args[0] is head:  # of an outer call, or left by a compiled call
        return forward
    forward = state.head_forward
    if forward is None or forward.args[0] is not head or forward.args[1] is not foreign:
        forward = functools.partial(_deferring_forward, head, foreign)
        if not getattr(model, "_is_replica", False):  # replicas share the state but have heads of their own
            state.head_forward = forward
    return forward


def _install_while_tracing(key: str, training: bool) -> None:
    """End a call that Ctrl-C interrupted and, in training, replace the head's forward, before Dynamo traces more of the head.

    Otherwise the first trace would find the head's own forward (always before torch 2.12), and a second call, or a second trace
    after a graph break, would take other branches.
    """
    if (model := _models.get(key)) is None:
        return
    head, state = find_head(model), patch_of(model)
    if head is None or state is None:
        return
    entry = head.__dict__.get(STATE)
    if entry is not None and entry.call is not None and entry.call.owner is state:
        del head.__dict__[STATE]
    if training and why_not_defer(head, _foreign_forward(head), compiling=True) is None:
        head.forward = _forward_of(model, state, head)


def _deferring_forward(head: Any, foreign: Any, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the deferred output of the head's own forward, or of a ``foreign`` one, such as accelerate's."""
    if hidden_states is None and "input" in kwargs:  # the argument's name in torch.nn.Linear
        hidden_states = kwargs.pop("input")
    entry = _current_entry(head)
    call = None if entry is None else entry.call
    if call is not None and not (call.evaluation or torch.is_grad_enabled()):
        call.without_gradients, call = True, None
    elif not isinstance(hidden_states, torch.Tensor) or isinstance(hidden_states, HeadInput):
        call = None  # wrapped already, if accelerate added a hook around a forward that a compiled call had left
    forward = functools.partial(type(head).forward, head) if foreign is None else foreign
    if call is None:  # this may be the Linear inside an adapter, with the adapter's deferred input
        return forward(hidden_states, *args, **kwargs)
    if foreign is None and type(head).forward is nn.Linear.forward:
        return deferred_product(hidden_states, head.weight, head.bias, call)
    call.adapted = type(head).forward is not nn.Linear.forward
    hidden_states = wrap_head_input(hidden_states, call)
    is_adapter = hasattr(head, "base_layer") and not torch.compiler.is_compiling()
    with _defer_base_layer(head, call) if is_adapter else contextlib.nullcontext():
        output = forward(hidden_states, *args, **kwargs)
    if isinstance(output, SumOfProducts):
        return output.deferred()
    if isinstance(output, HeadInput):
        output = output.hidden_states
    if isinstance(output, torch.Tensor) and not isinstance(output, LazyTensor) and not call.few_tokens:
        call.note_full_logits()  # the head, or an adapter on it, does something that cannot be deferred
    return output


@contextlib.contextmanager
def _defer_base_layer(head: nn.Module, call: TrainingCall) -> Iterator[None]:
    """Let the Linear inside an adapter defer its product too, for hidden states that the adapter has changed (OFT)."""
    base: Any = head
    while hasattr(base, "base_layer"):
        base = base.base_layer
    previous, forward = base.__dict__.get("forward"), base.forward

    def deferring_forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(wrap_head_input(x, call) if type(x) is torch.Tensor else x, *args, **kwargs)

    base.forward = deferring_forward
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
    entry = _restore_forward(head)
    call = None if entry is None else entry.call
    if call is not None and call.owner is not state:  # of a patched model that contains this one
        call = None
    if kwargs.get("fused_lm_head"):
        call = None if torch.compiler.is_compiling() else trl.end_call()
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
        # A compiled graph and DataParallel's gather return tensors only
        return _replace_logits(output, lambda value: None)
    if any(isinstance(x, LazyLogits) and not isinstance(x, torch.Tensor) for x in _values_of(output)):
        # From a compiled graph of only the head or the model's forward, without FSDP2's hooks that gather the weight for the
        # backward pass: a weight that was freed must not be used.
        call.model = None
        return _replace_logits(output, lambda value: to_eager(value.recipe))
    return None


def _is_deferring_forward(forward: Any) -> TypeGuard[functools.partial[Any]]:
    return isinstance(forward, functools.partial) and forward.func is _deferring_forward


def _restore_forward(head: nn.Module) -> _Entry | None:
    """End the current call and restore the entry of the call that it interrupted, or else the head's own forward.

    Dynamo turns setting and deleting an attribute in one graph into deleting an attribute that never existed. So in a graph the
    replaced forward stays, without a call, and does what the original does. Later eager calls leave it there too, because
    without it the next compiled call would be traced again. ``unpatch`` removes it.
    """
    entry = head.__dict__.get(STATE)
    if torch.compiler.is_compiling():
        if entry is not None:
            setattr(head, STATE, None)
        return entry
    if entry is not None and entry.compiled is not None:
        module, name, value = entry.compiled
        vars(module)[name] = value
    if entry is not None and entry.previous_entry is not None:
        setattr(head, STATE, entry.previous_entry)
        return entry
    head.__dict__.pop(STATE, None)
    if entry is not None and not entry.keeps_forward:
        _remove_forward(head)
    return entry


def _remove_forward(head: nn.Module) -> None:
    """End all calls, and give the head and the layers inside an adapter on it their own forwards back."""
    for module in head.modules():
        module.__dict__.pop(STATE, None)
        forward = module.__dict__.get("forward")
        if _is_deferring_forward(forward):
            if forward.args[1] is None:
                del module.forward
            else:
                module.forward = forward.args[1]


def _values_of(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()


def _replace_logits(output: Any, change: Any) -> Any:
    """Return the output with changed logits; a tuple drops logits that become None, as ``to_tuple`` does."""
    changed = [change(value) if isinstance(value, LazyLogits) else value for value in _values_of(output)]
    if isinstance(output, tuple):
        return tuple(new for old, new in zip(output, changed, strict=True) if new is not None or old is None)
    return type(output)(**dict(zip(output, changed, strict=True))) if isinstance(output, dict) else output


def _note_bypass(state: Patch) -> None:
    """Count a call of TRL's forward, which bypasses the head and the model's loss, and warn once that the patch has no effect."""
    state.stats.bypassed += 1
    if state.stats.bypassed == 1:
        warn(
            "hf_cce: apply_cce has no effect on this training: TRL replaces the model's forward with its own fused LM head "
            "(trl.trainer.utils.add_fused_lm_head), which bypasses the model's forward and loss. Training is correct, and "
            "TRL's head also avoids full logits."
        )


def _close(state: Patch, call: TrainingCall, head: nn.Module | None) -> None:
    """Count a finished training call; warn once per model if it missed the fused loss or computed full logits."""
    if torch.compiler.is_compiling():
        if call.full_logits and call.fused == 0:
            _warn_full_logits(_why_unfused(call, None))
        return
    call.closed = True
    state.stats.calls += 1 - call.traced  # the graph counts traced losses itself
    if call.fused == 0 and call.has_fused_result and not call.full_logits:
        call.note_fused()
    deferred = call.vocab_size is not None  # by another pass through the head
    if call.without_gradients and not (deferred or call.few_tokens):
        call.reasons.append(
            "the head's forward runs without gradients, for example in a checkpoint with use_reentrant=True"
        )
        call.note_full_logits()
    if (call.few_tokens or not call.labels) and not (call.reasons or call.full_logits):
        return  # without labels, the logits are read after the call
    missed = call.fused == 0
    state.stats.missed += missed
    if (missed or call.reasons) and not state.warned:
        why = _why_unfused(call, head)
        if call.full_logits:
            state.warned = True
            _warn_full_logits(why)
        else:  # TRL's own fused head, or a loss of the model that takes no logits
            state.warn_unfused(why)


def _why_unfused(call: TrainingCall, head: nn.Module | None) -> str:
    """Return why ``call`` did not use the fused loss; the adapter on ``head`` if nothing else is known."""
    why = "; ".join(dict.fromkeys(call.reasons))
    adapter = None if head is None or (why and not call.unknown_adapter) else adapter_in(head)
    if adapter is not None:
        return (
            f"PEFT trains an adapter ({adapter}) on its LM head, which the fused loss does not support. To train without "
            'logits, leave the LM head out of target_modules, or train the whole head: modules_to_save=["lm_head"]'
        )
    if not why and call.full_logits:
        why = "its LM head, or a function that replaces the head's forward, computes more than one linear layer"
    return why or "its loss is not a cross entropy of its LM head's output"


def _warn_full_logits(why: str) -> bool:
    """Warn that full logits are computed. While a graph is traced this runs once, as Dynamo treats the call as a constant."""
    warn(f"hf_cce fell back to full logits: {why}. The loss is correct; no memory is saved.")
    return True
