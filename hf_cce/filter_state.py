"""``FilterState``: what the gradient filter learns from step to step, and what it reports. One object per trained head."""

from __future__ import annotations

import itertools
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# τ: see hf_cce.kernels.filter.select. Where a number is asked for, the errors of dh and dW are a few τ, and more in a head that
# is hardly trained. For "auto" τ only controls what is dropped.
AUTO_TAU = 1e-3  # first threshold of gradient_filter="auto"
# "auto" aims at this share of the error that rounding the logits would make in the same step. The margin covers the error of the
# estimates, and steps between two of them; ``benchmarks.filter_errors`` measures whether it does.
AUTO_SHARE = 0.5
# Likewise where the weight is frozen: the error of dh is estimated more closely than that of dW.
AUTO_SHARE_FROZEN = 0.84
ERROR_PER_TAU = 6.0  # gives the first threshold where an error is asked for
SMALLEST_TAU, LARGEST_TAU = 1e-6, 1e-1

MEASURE_EVERY = 32  # steps between two estimates of the error
# The first steps are all measured, and the first after a pause, during which the threshold grew stale.
MEASURE_FIRST = 4
READ_EVERY = 4  # steps between two looks at the number of kept tiles
# The number is read a fixed number of steps later, so that a run does not depend on how far the host is ahead of the device.
READ_AFTER = 2
SORT_EVERY = 8  # steps that use one order of the vocabulary
COVARIANCE_EVERY = 32  # steps that use one covariance (hf_cce.kernels.filter.corrections)
PAUSE_SHARE = 0.6  # share of kept tiles from which unfiltered products are faster
PAUSE_STEPS = 32  # unfiltered steps before the filter is tried again

_lock = Lock()  # of the module, as a lock cannot be copied or pickled
# An operator of torch.library takes numbers, no objects. Each state still belongs to its model: this only finds it again.
_states: WeakValueDictionary[int, FilterState] = WeakValueDictionary()
_handles = itertools.count(1)


def _capturing() -> bool:
    """True while a CUDA graph is captured: then nothing can be read, and nothing that is allocated may be kept."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _PendingCount(NamedTuple):
    """The number of kept tiles of one step, on its way to the host."""

    kept: Tensor  # on the host once the event is over
    event: Any  # of the copy; None on the CPU
    tiles: int  # kept and dropped
    due: int  # the step that reads it


class FilterState:
    """What the gradient filter learns about one head, from step to step.

    Patched models have one each. To train a head of your own, make one and pass it to every call of ``linear_cross_entropy``.
    Copies and pickles start from scratch.

    It holds the order of the vocabulary, the corrections, the threshold and the last measured errors: 8 · V bytes, and
    D · D + 16 · (V + D) elements of the weight's dtype. The device never waits for the host; the host reads one number that an
    earlier step has left.
    """

    def __init__(self) -> None:
        self._tau: Tensor | None = None
        self._wanted: str | float | None = None  # the gradient_filter that the threshold is for
        self._calls = 0
        self._began = 0  # the first call, or the first after the last pause
        self._last: Any = None  # report of the last step
        self._error: Tensor | None = None
        self._weight_error: Tensor | None = None
        self._paused = 0  # unfiltered steps that are left
        self._probing = True  # "auto" drops nothing until the share of tiles that it would keep is known
        self._pending: _PendingCount | None = None
        self._pinned: list[Tensor] = []  # read by captured graphs, whose replays need them where they are
        self._vocabulary: tuple[Any, Any] | None = None  # (what weight it is an order for, the order)
        self._device: torch.device | None = None
        self._others: dict[torch.device, FilterState] = {}
        self._newest: FilterState | None = None  # of the others, if it was one of them that was asked for last
        self.counters: Any = None  # of the patched model that it belongs to: a compiled call adds to them
        self.handle = next(_handles)
        _states[self.handle] = self

    def __reduce__(self) -> tuple[type[FilterState], tuple[()]]:
        return FilterState, ()  # copies and pickles begin anew

    @staticmethod
    def of(handle: int) -> FilterState | None:
        """Return the state with that ``handle``; None if there is none any more, and for 0."""
        return _states.get(handle)

    def on(self, device: torch.device) -> FilterState:
        """Return the state for tensors on ``device``: this one on its first device, another one on each other.

        The threads of DataParallel share this object, and thresholds are tensors on one device.
        """
        with _lock:
            if self._device is None:
                self._device = device
            self._newest = None if device == self._device else self._others.setdefault(device, FilterState())
            return self._newest or self

    def rehearsal(self, probing: bool) -> FilterState:
        """Return a state for a warm-up: one that drops tiles, or one that only finds out what it would drop."""
        state = FilterState()
        state._wanted, state._probing = self._wanted, probing
        return state

    def threshold(self, gradient_filter: str | float, hidden: Tensor) -> Tensor | None:
        """Return τ as a scalar on the device of ``hidden``, or None for an unfiltered step."""
        if gradient_filter == "auto" and hidden.dtype != torch.bfloat16:
            return None
        self._read_pending()
        if self._paused > 0:
            self._paused -= 1
            return None
        if self._tau is None or self._wanted != gradient_filter or self._tau.device != hidden.device:
            tau = AUTO_TAU if gradient_filter == "auto" else float(gradient_filter) / ERROR_PER_TAU
            first = torch.full((), tau, dtype=torch.float32, device=hidden.device)
            if _capturing():
                return first  # in the graph's memory, which a replay overwrites
            self._tau, self._wanted = first, gradient_filter
        if _capturing():
            self._pinned.append(self._tau)
            if gradient_filter == "auto":  # replays estimate no error, whatever data they get
                return self._tau.clamp_max(AUTO_TAU)
        return self._tau

    def probe_only(self) -> bool:
        """True if this step only finds out what the filter would keep, and drops nothing: "auto", at first and after a pause.

        Where most tiles matter, as at the start of pretraining, the filter does not pay. What it would drop is mostly the
        gradient of absent words: small in norm, but Adam scales it up.
        """
        return self._probing and self._wanted == "auto"

    def vocabulary(self, weight: Tensor) -> Any | None:
        """Return the order that ``keep_vocabulary`` was given for a weight like this, while it is fresh."""
        if self._vocabulary is None or _capturing() or self._calls % SORT_EVERY == 0:
            return None
        of, vocabulary = self._vocabulary
        return vocabulary if of == (weight.shape, weight.device, weight.dtype) else None

    def keep_vocabulary(self, weight: Tensor, vocabulary: Any) -> None:
        """Keep ``vocabulary`` (hf_cce.kernels.filter.order) for steps to come; it takes over a covariance that is fresh."""
        if _capturing():
            return
        of = weight.shape, weight.device, weight.dtype  # tiles, and the padding, differ by dtype
        known = self._vocabulary
        if known is not None and known[0] == of and self._calls % COVARIANCE_EVERY and vocabulary.covariance is None:
            vocabulary.covariance = known[1].covariance
        self._vocabulary = of, vocabulary

    def measure(self) -> bool:
        """True if the error of this step is to be estimated."""
        fresh = self._calls - self._began < MEASURE_FIRST
        return (fresh or self._calls % MEASURE_EVERY == 0) and not _capturing()

    def report(self, report: Any) -> None:
        """Take the report of a backward pass (hf_cce.kernels.filter.workspace.FilterReport), whose tensors are on the device."""
        self._last = report
        tau = self.next_tau(report)
        if tau is not None:
            self._error, self._weight_error, self._tau = report.error, report.weight_error, tau
        due = self._pending is None and (self.probe_only() or self._calls % READ_EVERY == 0)
        if due and not _capturing():
            kept, event = report.kept, None
            if kept.is_cuda:
                host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
                kept = host.copy_(kept, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._pending = _PendingCount(kept, event, report.tiles, self._calls + READ_AFTER)
        self._calls += 1

    def next_tau(self, report: Any) -> Tensor | None:
        """Return the next τ; None if the report has no estimated error.

        For "auto" the errors may be absolute or relative, as only their ratio is used.
        """
        if self._tau is None or self._tau.device != report.tau.device:
            return None
        targets: tuple[Any, ...] = (self._wanted, self._wanted)
        if self._wanted == "auto":
            rounded = (report.rounding_error, report.rounding_weight_error)
            share = AUTO_SHARE_FROZEN if report.weight_error is None else AUTO_SHARE
            targets = tuple(None if x is None else share * x for x in rounded)
        found = zip((report.error, report.weight_error), targets, strict=True)
        measured = [(x, target) for x, target in found if x is not None and target is not None]
        if not measured:
            return None
        ratios = [target / x.clamp_min(1e-12) for x, target in measured]
        step = (ratios[0] if len(ratios) == 1 else torch.minimum(*ratios)).clamp(0.25, 4.0)
        # Estimates scatter: after the first, go half the way, in octaves.
        if self._calls != self._began:
            step = step.sqrt()
        step = step.nan_to_num(1.0)
        return (self._tau * step).clamp(SMALLEST_TAU, LARGEST_TAU)

    def _read_pending(self) -> None:
        """Pause the filter for some steps if it kept too many tiles."""
        pending = self._pending
        if pending is None or _capturing() or self._calls < pending.due:
            return
        if pending.event is not None:
            pending.event.synchronize()
        self._pending = None
        self._probing = int(pending.kept) / pending.tiles > PAUSE_SHARE
        if self._probing:
            self._paused, self._began = PAUSE_STEPS, self._calls

    def stats(self) -> dict[str, float]:
        """Return the measurements of the last filtered step; empty before the first. Waits for the device.

        Returns:
            ``kept``: share of the tiles of the logits' gradient that were computed. ``dropped_mass``: share of the tokens'
            probability in the others. ``tau``: threshold on the error of the logits' gradient. ``error``: estimated relative
            error of the hidden states' gradient. ``weight_error``: of the weight's, NaN if it is frozen. ``dense``: 1 while
            the filter pauses. Under DataParallel they are those of one device.
        """
        if self._newest is not None:
            return self._newest.stats()
        if self._last is None:
            return {}
        return {
            "kept": float(self._last.kept) / self._last.tiles,
            "dropped_mass": float(self._last.dropped.sum()) / self._last.tokens,
            "tau": float(self._last.tau),
            "error": float("nan") if self._error is None else float(self._error),
            "weight_error": float("nan") if self._weight_error is None else float(self._weight_error),
            "dense": float(self._paused > 0),
        }
