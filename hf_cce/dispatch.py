"""The only place that decides how a loss is computed: sizes, dtype, device and options become one strategy.

``explain_dispatch`` tells what it decides, and why, without tensors.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.fallback import CHUNK, FULL_PRECISION, fits_one_block
from hf_cce.filter_state import FilterState
from hf_cce.quantized import FrozenWeight
from hf_cce.spec import Divisor, Inputs, LossSpec, Wanted
from hf_cce.strategies import (
    SUM,
    Exact,
    Filtered,
    FilteredStatistics,
    FullLogits,
    Materialized,
    OnePass,
    Recompute,
    Statistics,
    Strategy,
    compile_failure,
    validate_labels,
)

# Compute capability from which "auto" takes the kernels, and from which implementation="triton" may try them: they compile for a
# T4, but have not run on one.
CAPABILITY, EXPERIMENTAL = (8, 0), (7, 5)

# Thresholds, by measurement on an H200.
# Tokens times hidden size times vocabulary from which the filter pays, and the tokens that fill a GPU with blocks:
FILTER_FROM = 1.5e11
FILTER_TOKENS = 2048
# Bytes of full logits in float32 up to which the fewest launches win; and, where those would be more and no filter is wanted, in
# the 16 bits of the inputs, rounded as in PyTorch's own loss:
DENSE_BYTES = 256 << 20
NARROW_BYTES = 256 << 20
# Logits up to which PyTorch's own operators are the fastest, as the host is the slower side:
EAGER_LOGITS = 42_000_000
EAGER_BYTES = 12  # of each there: log-probabilities, and the gradients in these and in the logits, in float32
# As rows of an odd number of logits are multiplied slowly, tokens times hidden size times an odd vocabulary:
EAGER_WORK_ODD = 1.6e10


class Problem(NamedTuple):
    """The sizes of one loss, and where it is computed."""

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Inputs) -> Problem:
        (n, d), v = x.hidden.shape, x.weight.shape[0]
        return cls(n, d, v, x.hidden.dtype, x.hidden.device)

    @property
    def work(self) -> int:
        return self.tokens * self.hidden_size * self.vocab_size


class Decision(NamedTuple):
    """One strategy, by name, and its implementation."""

    strategy: str  # a key of WHY
    implementation: str  # "triton" or "portable"; of full logits: what validates the labels
    logits_dtype: torch.dtype | None = None  # of "materialized"


class Explanation(NamedTuple):
    """What ``explain_dispatch`` returns."""

    strategy: str
    implementation: str
    logits_dtype: torch.dtype | None
    why: str
    memory_budget: int  # bytes of scratch memory it may take


WHY = {
    "full_logits": "few tokens: PyTorch's own loss on full logits is fastest and needs little memory",
    "materialized": "few tokens: full logits fit the memory budget, and the kernels with the fewest launches are fastest",
    "filtered": "Triton kernels skip parts of the gradient that are close to zero",
    "exact": "Triton kernels compute the full gradient",
    "one_pass": "PyTorch computes the gradients in the forward pass, in blocks of tokens",
    "recompute": "PyTorch computes the logits twice, in slabs of the vocabulary",
}


def choose_implementation(device: torch.device, dtype: torch.dtype, implementation: str = "auto") -> str:
    """``"triton"`` or ``"portable"`` for tensors of ``dtype`` on ``device``.

    Raises:
        RuntimeError: ``implementation="triton"`` where the kernels cannot run; the message says why.
    """
    if implementation == "portable" or (implementation == "auto" and device.type == "cpu"):
        return "portable"
    if implementation == "auto" and dtype == torch.float32:
        return "portable"  # cuBLAS multiplies; Triton's products in full precision are slower
    why = why_no_triton(device, dtype, EXPERIMENTAL if implementation == "triton" else CAPABILITY)
    if implementation == "triton" and why:
        raise RuntimeError(f"implementation='triton' cannot run here: {why}; use implementation='auto'")
    return "portable" if why else "triton"


def why_no_triton(device: torch.device, dtype: torch.dtype, least: tuple[int, int] = CAPABILITY) -> str | None:
    """Why the kernels cannot run for tensors of ``dtype`` on ``device``, or None. ``least``: of compute capability."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels support float32, bfloat16 and float16, but the tensors are {dtype}"
    if device.type == "cpu":
        # Triton's interpreter is for tests, thousands of times slower than PyTorch.
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the kernels need an NVIDIA GPU, but the tensors are on the CPU (TRITON_INTERPRET=1 is for tests)"
    elif device.type != "cuda" or torch.version.cuda is None:
        return f"the kernels need an NVIDIA GPU, but the tensors are on {device}"
    else:
        capability = _capability(device)
        if capability < least:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, but the kernels need {least[0]}.{least[1]}"
    # Last: where the device is the reason, installing Triton changes nothing.
    if not _has_triton():
        return "the package triton is not installed (pip install triton)"
    return compile_failure(device)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def few_tokens(p: Problem, spec: LossSpec) -> bool:
    """Whether a step waits for the host alone: then nothing is faster than what PyTorch does in C++, if it fits the budget."""
    logits = p.tokens * p.vocab_size
    odd = p.vocab_size % 2 and p.work > EAGER_WORK_ODD
    if odd or not (0 < logits <= EAGER_LOGITS and p.device.type == "cuda" and spec.implementation != "triton"):
        return False
    # The weight's gradient, made last, takes over memory of the logits.
    taken_over = _head_gradient_bytes(p, spec)
    return EAGER_BYTES * logits - taken_over <= _budget(p, spec, "full_logits") and p.dtype != torch.float64


def _head_gradient_bytes(p: Problem, spec: LossSpec) -> int:
    return p.dtype.itemsize * p.vocab_size * p.hidden_size if spec.needs[1] else 0


def _budget(p: Problem, spec: LossSpec, strategy: str) -> int:
    """Bytes of scratch memory: what the user allows or, if "auto", what pays."""
    if not spec.auto_budget:
        return spec.memory_budget
    if strategy == "full_logits":
        # Larger budgets only where PyTorch is the alternative: the kernels take less of the device's time.
        portable = p.dtype in FULL_PRECISION or spec.implementation == "portable"
        return EAGER_BYTES * EAGER_LOGITS if portable else spec.memory_budget
    if strategy == "one_pass" and p.device.type != "cpu":
        # Blocks of logits, and the head's gradient summed in float32.
        logits, head = p.tokens * p.vocab_size, _head_gradient_bytes(p, spec)
        wanted = max(spec.memory_budget * (p.dtype.itemsize // 2), EAGER_BYTES * logits // 10) + head
        # No more than full logits: those of one block are all there is beside the head's gradient, which is made after them.
        one_block = p.dtype.itemsize * logits + min(CHUNK, head)
        return max(spec.memory_budget, min(wanted, max(EAGER_BYTES * logits - head, one_block)))
    if strategy == "exact":
        return max(spec.memory_budget, _head_gradient_bytes(p, spec))
    return spec.memory_budget


def may_filter(p: Problem, spec: LossSpec, wanted: Wanted | None = None) -> bool:
    """Whether the gradient filter pays, and can serve this loss, or the statistics that are ``wanted``, on the kernels."""
    if spec.gradient_filter is None or (spec.gradient_filter == "auto" and p.dtype != torch.bfloat16):
        return False
    need_hidden, need_weight, need_bias = spec.needs
    if need_bias or spec.label_smoothing or not (need_hidden or need_weight):
        return False
    if wanted is not None and (wanted.mean or wanted.log_sum_sq or (wanted.entropy and spec.softcap)):
        return False
    return p.tokens >= FILTER_TOKENS and p.work >= FILTER_FROM


def materialized_dtype(p: Problem, memory_budget: int, filtered: bool) -> torch.dtype | None:
    """That of full logits, if these fit: float32, or, of 16-bit inputs that no filter is for, their own; else None."""
    candidates = [(torch.float32, DENSE_BYTES)]
    if p.dtype.itemsize < 4 and not filtered:
        candidates.append((p.dtype, NARROW_BYTES))
    for dtype, most in candidates:
        if 0 < materialized_bytes(p, dtype) <= min(memory_budget, most):
            return dtype
    return None


def materialized_bytes(p: Problem, dtype: torch.dtype) -> int:
    """Bytes of full logits of ``dtype`` in the kernels, with what their gradient needs."""
    # Rows are aligned, and the gradient of the hidden states is of two products, in float32, where V is not.
    return p.tokens * (dtype.itemsize * (p.vocab_size + 15) + 4 * p.hidden_size * (p.vocab_size % 8 > 0))


def forms_gradients(dtype: torch.dtype) -> bool:
    """Whether the operator ``hf_cce::cross_entropy`` returns gradients: whatever the sizes, as one graph serves any.

    Not in float16, which would lose those that a GradScaler has not yet scaled.
    """
    return dtype != torch.float16


def one_pass_pays(p: Problem, spec: LossSpec) -> bool:
    """Whether PyTorch forms the gradients in the forward pass, rather than from slabs of the vocabulary."""
    if p.dtype in FULL_PRECISION:
        return True
    on_cpu = p.device.type == "cpu"
    # A CPU has no products of narrow numbers into float32, to add those of several blocks of tokens up with.
    one_block = fits_one_block(p.tokens, p.vocab_size, p.dtype, on_cpu, spec.memory_budget)
    return any(spec.needs) and (not on_cpu or one_block or not spec.needs[1])


def decide(p: Problem, spec: LossSpec, implementation: str, filtered: bool) -> Decision:
    """The strategy of more than few tokens on this ``implementation``. ``filtered``: the filter is for this loss, not paused."""
    if implementation == "portable":
        return Decision("one_pass" if one_pass_pays(p, spec) else "recompute", implementation)
    return Decision("filtered", implementation) if filtered else unfiltered(p, spec, False)


def unfiltered(p: Problem, spec: LossSpec, filtered: bool) -> Decision:
    """What the kernels do without the filter, or, if ``filtered``, where the budget has no room for it."""
    trains = spec.needs[0] or spec.needs[1]
    dtype = None if spec.label_smoothing or not trains else materialized_dtype(p, spec.memory_budget, filtered)
    return Decision("exact" if dtype is None else "materialized", "triton", dtype)


def dispatch(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """The strategy of a scalar loss."""
    if few_tokens(Problem.of(x), spec):  # first, as the host is the slower side here
        return FullLogits(spec, divisor)
    return dispatch_fused(x, spec, divisor, state)


def dispatch_fused(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """The strategy of a scalar loss that autograd does not record: all but full logits."""
    p = Problem.of(x)
    beside = _beside_dequantized(x, spec)
    if beside is None:
        return Recompute(spec, divisor, False)
    spec = beside
    implementation = choose_implementation(p.device, p.dtype, spec.implementation)
    # "auto" promises an error, and keeps the promise by measurement: not without a state.
    tau, steered = None, state is not None
    if implementation == "triton" and (steered or spec.gradient_filter != "auto") and may_filter(p, spec):
        state = FilterState() if state is None else state.on(p.device)
        tau = state.threshold(spec.gradient_filter, x.hidden)  # type: ignore[arg-type]
    decision = decide(p, spec, implementation, tau is not None)
    if tau is None or state is None or decision.strategy != "filtered":
        return _made(decision, p, spec, divisor)
    return Filtered(spec, divisor, state, tau, steered, _made(unfiltered(p, spec, True), p, spec, divisor))


def _beside_dequantized(x: Inputs, spec: LossSpec) -> LossSpec | None:
    """``spec`` with the budget that a quantised weight leaves, dequantised whole; None where that is to be done in slabs.

    Whole it may take half the budget or, if that is "auto", as much as full logits.
    """
    if not isinstance(x.weight, FrozenWeight):
        return spec
    whole = x.hidden.element_size() * x.weight.numel()
    if spec.auto_budget:
        return spec if whole <= EAGER_BYTES * x.hidden.shape[0] * x.weight.shape[0] else None
    return replace(spec, memory_budget=spec.memory_budget - whole) if 2 * whole <= spec.memory_budget else None


def dispatch_statistics(x: Inputs, spec: LossSpec, wanted: Wanted, state: FilterState | None) -> Strategy:
    """The strategy of the tokens' statistics, filtered only with a ``state``."""
    p = Problem.of(x)
    triton = choose_implementation(p.device, p.dtype, spec.implementation) == "triton"
    beside = _beside_dequantized(x, spec)
    statistics = Statistics(beside or spec, wanted, triton and beside is not None)
    if state is None or not statistics.triton or not may_filter(p, spec, wanted):
        return statistics
    state = state.on(p.device)
    tau = state.threshold(spec.gradient_filter, x.hidden)  # type: ignore[arg-type]
    return statistics if tau is None else FilteredStatistics(spec, SUM, state, tau, True, statistics)


def dispatch_traced(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """The strategy of the operator ``hf_cce::cross_entropy``, whose graph serves any number of tokens."""
    if forms_gradients(x.hidden.dtype):
        return dispatch_fused(x, spec, divisor, state)
    triton = choose_implementation(x.hidden.device, x.hidden.dtype, spec.implementation) == "triton"
    return Recompute(spec, divisor, triton)


def loss_factor(x: Inputs, spec: LossSpec, divisor: Divisor) -> Tensor:
    """What the sum of the tokens' losses is multiplied by, a scalar; checks the labels."""
    triton = choose_implementation(x.labels.device, x.hidden.dtype, spec.implementation) == "triton"
    return validate_labels(x.labels, spec, x.weight.shape[0], divisor, triton)


def _made(decision: Decision, p: Problem, spec: LossSpec, divisor: Divisor) -> Strategy:
    budget = _budget(p, spec, decision.strategy)
    if budget != spec.memory_budget:
        spec = replace(spec, memory_budget=budget)
    if decision.logits_dtype is not None:
        return Materialized(spec, divisor, decision.logits_dtype)
    kinds = {"one_pass": OnePass, "recompute": Recompute, "exact": Exact}
    return kinds[decision.strategy](spec, divisor, decision.implementation == "triton")


def explain_dispatch(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    config: CCEConfig | None = None,
    frozen: bool = False,
) -> Explanation:
    """How the scalar loss of a patched model is computed, and why.

    Args:
        device: one of this machine's, or a type of device. Where this machine has no CUDA device, "cuda" is one that runs the
            kernels.
        frozen: the head's weight needs no gradient.

    Raises:
        RuntimeError: ``config`` asks for kernels that cannot run there.
    """
    config, device = config or CCEConfig(), torch.device(device)
    spec = LossSpec(
        -100, 1.0, 0.0, needs=(True, not frozen, False), memory_budget=config.scratch(tokens),
        auto_budget=config.memory_budget == "auto", implementation=config.implementation, gradient_filter=config.gradient_filter,
    )  # fmt: skip
    p = Problem(tokens, hidden_size, vocab_size, dtype, device)
    absent = device.type == "cuda" and not torch.cuda.is_available()
    implementation: str = config.implementation
    why_not = None
    if absent and implementation == "auto":
        implementation = "portable" if dtype in FULL_PRECISION else "triton"
    elif not absent:
        implementation = choose_implementation(device, dtype, implementation)
        why_not = why_no_triton(device, dtype) if config.implementation == "auto" else None
    found = Decision("full_logits", implementation)
    if not few_tokens(p, spec):
        found = decide(p, spec, implementation, implementation == "triton" and may_filter(p, spec))
    why = "; ".join(filter(None, (WHY[found.strategy], why_not)))
    return Explanation(*found, why, _budget(p, spec, found.strategy))
