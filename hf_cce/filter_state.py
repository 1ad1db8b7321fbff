"""``FilterState``: the gradient filter's state across steps, and its measurements. One object per trained head."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# τ is the threshold of hf_cce.kernels.filter.select. With a numeric gradient_filter, the errors of dh and dW are a few τ, and
# more if the head is barely trained. With "auto", τ only controls what is dropped.
AUTO_TAU = 1e-3  # initial τ for gradient_filter="auto"
# "auto" targets this share of the error that rounding the logits would cause in the same step. The margin covers errors of the
# estimates and the steps between them; ``benchmarks.filter_errors`` checks that it is enough.
AUTO_SHARE = 0.5
# The same for a frozen weight: the error of dh is estimated more accurately than that of dW.
AUTO_SHARE_FROZEN = 0.84
ERROR_PER_TAU = 6.0  # the initial τ for a numeric gradient_filter is that number divided by this
SMALLEST_TAU, LARGEST_TAU = 1e-6, 1e-1

MEASURE_EVERY = 32  # steps between two estimates of the error
# Steps that are all measured at the start, and again after a pause, during which the threshold became stale.
MEASURE_FIRST = 4
READ_EVERY = 4  # steps between two reads of the number of kept tiles
# The count is read a fixed number of steps later, so that results do not depend on how far the host runs ahead of the device.
READ_AFTER = 2
SORT_EVERY = 8  # steps that reuse one order of the vocabulary
COVARIANCE_EVERY = 32  # steps that reuse one covariance (hf_cce.kernels.filter.corrections)
PAUSE_SHARE = 0.6  # share of kept tiles above which unfiltered products are faster
PAUSE_STEPS = 32  # unfiltered steps before the filter is tried again

# States by handle, as torch.library operators take numbers, not objects. The references are weak: the model owns the state.
_states: WeakValueDictionary[int, FilterState] = WeakValueDictionary()
_handles = itertools.count(1)


def _capturing() -> bool:
    """Return True during CUDA graph capture, when nothing can be read and new allocations must not be kept."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _PendingCount(NamedTuple):
    """The number of kept tiles of one step, while it is copied to the host."""

    kept: Tensor  # on the host after ``event``
    event: Any  # of the copy; None on the CPU
    tiles: int  # total number, kept and dropped
    due: int  # the step that reads it


class FilterState:
    """State of the gradient filter for one head, kept across steps.

    Each patched model has one. To train a head of your own, create one and pass it to every call of ``linear_cross_entropy``.
    Copies and unpickled objects start empty.

    It holds the order of the vocabulary, the corrections, the threshold and the last measured errors: 8 · V bytes, and
    D · D + 16 · (V + D) elements of the weight's dtype. The device never waits for the host; the host reads one number from an
    earlier step.
    """

    def __init__(self) -> None:
        self._tau: Tensor | None = None
        self._gradient_filter: str | float | None = None  # the gradient_filter that the threshold is for
        self._steps = 0  # filtered steps so far
        self._first_step = 0  # value of ``_steps`` at the start, or after the last pause
        self._last: Any = None  # report of the last step
        self._error: Tensor | None = None
        self._weight_error: Tensor | None = None
        self._paused = 0  # remaining unfiltered steps
        self._probing = True  # "auto" drops nothing until the share of tiles that it would keep is known
        self._pending: _PendingCount | None = None
        self._pinned: list[Tensor] = []  # tensors that replays of captured graphs read at their old address
        self._vocabulary: tuple[Any, Any] | None = None  # ((shape, device, dtype) of the weight, order)
        self.counters: Any = None  # counters of the patched model, incremented by compiled calls
        self.handle = next(_handles)
        _states[self.handle] = self

    def __reduce__(self) -> tuple[type[FilterState], tuple[()]]:
        return FilterState, ()  # copies and unpickled objects start empty

    @staticmethod
    def of(handle: int) -> FilterState | None:
        """Return the state with this ``handle``; None for 0, or if the state no longer exists."""
        return _states.get(handle)

    def for_warm_up(self, probing: bool) -> FilterState:
        """Return a state for ``warm_up``: one that only probes the filter if ``probing``, else one that drops tiles."""
        state = FilterState()
        state._gradient_filter, state._probing = self._gradient_filter, probing
        return state

    def threshold(self, gradient_filter: str | float, hidden: Tensor) -> Tensor | None:
        """Return τ as a scalar on the device of ``hidden``, or None for an unfiltered step; counts down a pause."""
        self._read_pending()
        if self._paused > 0:
            self._paused -= 1
            return None
        if self._tau is None or self._gradient_filter != gradient_filter or self._tau.device != hidden.device:
            tau = AUTO_TAU if gradient_filter == "auto" else float(gradient_filter) / ERROR_PER_TAU
            first = torch.full((), tau, dtype=torch.float32, device=hidden.device)
            if _capturing():
                return first  # in the graph's memory, which replays overwrite
            if self._tau is not None:  # of another gradient_filter or device: start again
                self._first_step, self._probing, self._pending = self._steps, True, None
            self._tau, self._gradient_filter = first, gradient_filter
        if _capturing():
            self._pinned.append(self._tau)
            if gradient_filter == "auto":  # replays never estimate the error, so τ must suit any data
                return self._tau.clamp_max(AUTO_TAU)
        return self._tau

    def probe_only(self) -> bool:
        """Return True if this step only measures what the filter would keep: for "auto", at the start and after a pause.

        While most tiles matter, as at the start of pretraining, the filter does not pay off. It would mostly drop gradients of
        vocabulary entries that are absent from the batch: small in norm, but Adam scales them up.
        """
        return self._probing and self._gradient_filter == "auto"

    def vocabulary(self, weight: Tensor) -> Any | None:
        """Return the cached order for a weight of this shape, device and dtype; None if there is none or it is stale."""
        if self._vocabulary is None or _capturing() or self._steps % SORT_EVERY == 0:
            return None
        key, vocabulary = self._vocabulary
        return vocabulary if key == (weight.shape, weight.device, weight.dtype) else None

    def keep_vocabulary(self, weight: Tensor, vocabulary: Any) -> None:
        """Cache ``vocabulary`` (hf_cce.kernels.filter.order) for later steps; reuse the previous covariance while fresh."""
        if _capturing():
            return
        key = weight.shape, weight.device, weight.dtype  # tile sizes and padding depend on the dtype
        known = self._vocabulary
        if known is not None and known[0] == key and self._steps % COVARIANCE_EVERY and vocabulary.covariance is None:
            vocabulary.covariance = known[1].covariance
        self._vocabulary = key, vocabulary

    def should_measure(self) -> bool:
        """Return True if the error of this step should be estimated."""
        fresh = self._steps - self._first_step < MEASURE_FIRST
        return (fresh or self._steps % MEASURE_EVERY == 0) and not _capturing()

    def end_step(self, report: Any) -> None:
        """Store the report of a backward pass (kernels.filter.workspace.FilterReport) and update τ. Does not synchronize."""
        self._last = report
        tau = self.next_tau(report)
        if tau is not None:
            self._error, self._weight_error, self._tau = report.error, report.weight_error, tau
        due = self._pending is None and (self.probe_only() or self._steps % READ_EVERY == 0)
        if due and not _capturing():
            kept, event = report.kept, None
            if kept.is_cuda:
                host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
                kept = host.copy_(kept, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._pending = _PendingCount(kept, event, report.tiles, self._steps + READ_AFTER)
        self._steps += 1

    def next_tau(self, report: Any) -> Tensor | None:
        """Return the next τ; None if the report has no estimated error.

        For "auto" the errors may be absolute or relative, as only their ratio is used.
        """
        if self._tau is None or self._tau.device != report.tau.device:
            return None
        targets: tuple[Any, ...] = (self._gradient_filter, self._gradient_filter)
        if self._gradient_filter == "auto":
            rounded = (report.rounding_error, report.rounding_weight_error)
            share = AUTO_SHARE_FROZEN if report.weight_error is None else AUTO_SHARE
            targets = tuple(None if x is None else share * x for x in rounded)
        found = zip((report.error, report.weight_error), targets, strict=True)
        measured = [(x, target) for x, target in found if x is not None and target is not None]
        if not measured:
            return None
        ratios = [target / x.clamp_min(1e-12) for x, target in measured]
        step = (ratios[0] if len(ratios) == 1 else torch.minimum(*ratios)).clamp(0.25, 4.0)
        # Estimates are noisy: after the first one, take half the step on a log scale.
        if self._steps != self._first_step:
            step = step.sqrt()
        step = step.nan_to_num(1.0)
        return (self._tau * step).clamp(SMALLEST_TAU, LARGEST_TAU)

    def _read_pending(self) -> None:
        """Read the pending count, and pause the filter for some steps if it kept too many tiles."""
        pending = self._pending
        if pending is None or _capturing() or self._steps < pending.due:
            return
        if pending.event is not None:
            pending.event.synchronize()
        self._pending = None
        self._probing = int(pending.kept) / pending.tiles > PAUSE_SHARE
        if self._probing:
            self._paused, self._first_step = PAUSE_STEPS, self._steps

    def stats(self) -> dict[str, float]:
        """Return the measurements of the last filtered step; empty before the first. Synchronizes.

        Returns:
            ``kept``: share of the tiles of the logits' gradient that were computed. ``dropped_mass``: share of the probability
            in the other tiles. ``tau``: threshold on the error of the logits' gradient. ``error``: estimated relative error of
            the hidden states' gradient. ``weight_error``: that of the weight's gradient, NaN if it is frozen. ``dense``: 1
            while the filter is paused.
        """
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
