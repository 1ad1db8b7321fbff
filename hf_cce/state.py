"""What the gradient filter learns while a head is trained, and what it reports: one object per trained head."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

# τ bounds the error of the logits' gradient. On trained heads (hf_cce/bench/results) the error of the hidden states' gradient
# was 2 to 6 τ and that of the weight's 2 to 7 τ, the less a head is trained the more.
AUTO_TAU = 6.5e-4  # to begin with
AUTO_SHARE = 0.75  # of the errors that rounding the logits makes, measured in the same step: "auto" aims there
# and where the weight is frozen: the error found in the hidden states' gradient was at most 1.13 times what was aimed at
AUTO_SHARE_FROZEN = 0.84
ERROR_PER_TAU = 6.0  # to begin with where an error is asked for
SMALLEST_TAU, LARGEST_TAU = 1e-6, 1e-1

MEASURE_EVERY = 32  # steps between two measurements of the error
MEASURE_FIRST = 4  # and the first steps are all measured, as are those after a rest, over which a threshold goes stale
READ_EVERY = 4  # steps between two looks at the share of tiles kept
# Steps after which one is looked at: always as many, or a run would depend on how far ahead of the device the host is. By then
# it is there, unless the host is that many steps ahead; it then waits, and the device has the steps between to work on.
READ_AFTER = 2
SORT_EVERY = 8  # steps for which one order of the vocabulary serves
TILT_EVERY = 32  # and the covariance within dropped tiles (hf_cce.kernels.tilt), which has no order
POINTLESS = 0.6  # share of tiles kept from which dense products are faster
DENSE_STEPS = 32  # before the filter is tried again

_one_at_a_time = Lock()  # of the module, as a lock cannot be copied or pickled


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be asked and nothing that it allocates may be kept."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Underway(NamedTuple):
    """What the filter kept in a step, on its way to the host."""

    kept: Tensor  # tiles, on the host once the event is over
    event: Any  # of the copy; None where there is none
    tiles: int  # that there were
    due: int  # the step that looks at it


class FilterState:
    """Steers the gradient filter of one head from step to step; the device never waits for the host.

    It measures, in its first steps, in those after a rest and every 32 steps, the error that the filter makes in the
    gradients of some tokens' hidden states and of some rows of the weight, and moves the threshold; goes to dense products
    for 32 steps where the filter kept too much; and keeps the order of the vocabulary for 8 steps and the covariance of its
    rows for 32. It holds 8 · V bytes for that
    order, D · D + 16 · (V + D) elements of the weight's dtype (hf_cce.kernels.tilt), 8 bytes for each tile of the last
    step, and a few numbers. ``apply_cce`` makes one per model;
    give one to ``linear_cross_entropy`` where you train a head of your own. Copies and pickles of it begin anew.
    """

    def __init__(self) -> None:
        self._tau: Tensor | None = None
        self._wanted: str | float | None = None
        self._calls = 0
        self._began = 0  # the call that was the first, or the first after the last rest
        self._last: Any = None
        self._error: Tensor | None = None
        self._weight_error: Tensor | None = None
        self._dense = 0  # steps without the filter that are left
        self._trying = True  # nothing is left out until the share of tiles that would be kept is known
        self._share: _Underway | None = None
        self._pinned: list[Tensor] = []  # read by captured graphs, whose replays need them where they are
        self._vocabulary: tuple[Any, Any] | None = None  # what it is an order of, the order
        self._device: torch.device | None = None  # the first one it was for
        self._others: dict[torch.device, FilterState] = {}
        self._newest: FilterState | None = None  # of the others, if it was one of them that was asked for last

    def __getstate__(self) -> dict[str, Any]:
        return FilterState().__dict__

    def __deepcopy__(self, memo: Any) -> FilterState:
        return FilterState()

    def on(self, device: torch.device) -> FilterState:
        """The one that goes with tensors on ``device``: itself on its first device, one of its own on each other.

        DataParallel's threads share this object: each device would find the threshold on the other one, begin anew at every
        step, and never be steered.
        """
        with _one_at_a_time:
            if self._device is None:
                self._device = device
            self._newest = None if device == self._device else self._others.setdefault(device, FilterState())
            return self._newest or self

    def threshold(self, gradient_filter: str | float, hidden: Tensor) -> Tensor | None:
        """τ as a scalar on the device of ``hidden``, or None to leave out nothing in this step."""
        if gradient_filter == "auto" and hidden.dtype != torch.bfloat16:
            return None
        self._look()
        if self._dense > 0:
            self._dense -= 1
            return None
        if self._tau is None or self._wanted != gradient_filter or self._tau.device != hidden.device:
            tau = AUTO_TAU if gradient_filter == "auto" else float(gradient_filter) / ERROR_PER_TAU
            first = torch.full((), tau, dtype=torch.float32, device=hidden.device)
            if _capturing():
                return first  # lives in the graph's memory, which a replay overwrites: not to be kept
            self._tau, self._wanted = first, gradient_filter
        if _capturing():
            self._pinned.append(self._tau)
            if gradient_filter == "auto":  # replays measure nothing, whatever data they get
                return self._tau.clamp_max(AUTO_TAU)
        return self._tau

    def keeps_all(self) -> bool:
        """Whether this step only finds out what the filter would do, and drops nothing: "auto", at first and after each rest.

        Where most tiles matter, as at the start of pretraining, the filter does not pay, and what it drops is most of the
        gradient of words that do not occur: little by its norm, but Adam makes as much of it as of any other.
        """
        return self._trying and self._wanted == "auto"

    def vocabulary(self, weight: Tensor) -> Any | None:
        """The order of the vocabulary that ``keep_vocabulary`` was given for a weight like this, while it is fresh."""
        if self._vocabulary is None or _capturing() or self._calls % SORT_EVERY == 0:
            return None
        of, order = self._vocabulary
        return order if of == (weight.shape, weight.device, weight.dtype) else None

    def keep_vocabulary(self, weight: Tensor, order: Any) -> None:
        if _capturing():
            return
        of = weight.shape, weight.device, weight.dtype  # tiles, and the padding, differ by dtype
        if (
            self._vocabulary is not None
            and self._vocabulary[0] == of
            and self._calls % TILT_EVERY
            and order.tilt is None
        ):
            order.tilt = self._vocabulary[1].tilt
        self._vocabulary = of, order

    def measure(self) -> bool:
        """Whether this step's error is to be measured."""
        fresh = self._calls - self._began < MEASURE_FIRST
        return (fresh or self._calls % MEASURE_EVERY == 0) and not _capturing()

    def report(self, report: Any) -> None:
        """Take what the filter did in a backward pass: hf_cce.kernels.layout.Report, whose tensors are on the device."""
        self._last = report
        self._steer(report)
        due = self._share is None and (self.keeps_all() or self._calls % READ_EVERY == 0)
        if due and not _capturing():
            kept, event = report.kept, None
            if kept.is_cuda:
                host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
                kept = host.copy_(kept, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._share = _Underway(kept, event, report.tiles, self._calls + READ_AFTER)
        self._calls += 1

    def _steer(self, report: Any) -> None:
        """Move τ to where the errors that were measured point."""
        moved = self.moved(report)
        if moved is not None:
            self._error, self._weight_error = report.error, report.weight_error
            self._tau = moved

    def moved(self, report: Any) -> Tensor | None:
        """τ where the errors of a report point; None if none was measured. For "auto" they need not be relative."""
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
        # A measurement of some tokens and rows scatters; after the first, half the way, in octaves, to where it points.
        if self._calls != self._began:
            step = step.sqrt()
        step = step.nan_to_num(1.0)
        return (self._tau * step).clamp(SMALLEST_TAU, LARGEST_TAU)

    def _look(self) -> None:
        """Filter if the share of some steps ago was small enough, else go dense for a while."""
        share = self._share
        if share is None or _capturing():
            return
        if self._calls < share.due:
            return
        if share.event is not None:
            share.event.synchronize()
        self._share = None
        self._trying = int(share.kept) / share.tiles > POINTLESS
        if self._trying:
            self._dense, self._began = DENSE_STEPS, self._calls

    def stats(self) -> dict[str, float]:
        """Of the last step that was filtered; empty before one was. Waits for the device.

        ``kept``: share of the tiles of the logits' gradient that were computed. ``dropped_mass``: share of the tokens'
        probability in the others. ``tau``: the threshold on the error of the logits' gradient. ``error``: the error in the
        gradient of the hidden states that was measured last, relative to its norm; ``weight_error``: likewise of the weight, not
        a number where it is frozen. ``dense``: 1 while the filter rests. Under DataParallel they are those of one device.
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
            "dense": float(self._dense > 0),
        }


def trial(gradient_filter: str | float, hidden: Tensor) -> Callable[[Any], Tensor | None]:
    """``moved`` of a state of its own, for a step that is only tried."""
    state = FilterState()
    state.threshold(gradient_filter, hidden)
    state._calls = 1  # as of later steps, which compute most
    return state.moved
