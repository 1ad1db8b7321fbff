"""Transformers: a callback that stands before those which report to W&B, TensorBoard and the like.

Cause: Trainer puts the callbacks of ``report_to`` before those that it is given, and hands all of them the same dict of logs, one
after the other. What a later one adds, the earlier have already sent on. Versions: read and tested with transformers 5.0 and
5.23. It can go when a callback can ask for its place, or add to the logs before they are handed round.

How: no event says which ``CallbackHandler`` calls, so it is looked for among the callers. Its list is changed in place, while the
handler goes through it: the callback at index i, whose turn it is, moves to 0; those before it, which have had their turn, move
up by one; and who comes next stays at i + 1.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


def stand_first(callback: TrainerCallback) -> None:
    """Move ``callback`` to the front of the handler that is calling it; where none is found, all stays as it is."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            places = [i for i, other in enumerate(handler.callbacks) if other is callback]
            if places:
                handler.callbacks.insert(0, handler.callbacks.pop(places[0]))
                return
        frame = frame.f_back


def contexts(trainer: Any, method: str, model: Any) -> ExitStack:
    """What those callbacks of ``trainer`` that have a method of this name return for ``model``: entered, in their order."""
    with ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, method):
                stack.enter_context(getattr(callback, method)(model))
        return stack.pop_all()
