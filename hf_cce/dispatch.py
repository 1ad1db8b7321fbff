"""Choice of the strategy that computes a loss, from its sizes, dtype, device and options. No other module picks one.

``explain_dispatch`` returns the decision and its reason without needing tensors.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import NamedTuple

import torch

from hf_cce import strategies
from hf_cce.config import CCEConfig
from hf_cce.fallback import CHUNK_BYTES, FULL_PRECISION, fits_token_losses
from hf_cce.filter_state import FilterState
from hf_cce.matmul import supports_fp32_out
from hf_cce.quantized import FrozenWeight
from hf_cce.spec import DivergencePlan, Divisor, Inputs, LossSpec, WantedStats
from hf_cce.strategies import SUM, Strategy

# Minimum compute capability for implementation="auto" and for implementation="triton". The kernels compile for a T4 (7.5), but
# have not been run on one.
MIN_CAPABILITY, MIN_CAPABILITY_FORCED = (8, 0), (7, 5)

# Thresholds, measured on an H200.
FILTER_FROM = 1.5e11  # work (tokens · hidden size · vocabulary) from which the filter pays off
FILTER_TOKENS = 2048  # and tokens: as many as fill a GPU with blocks
# Up to this size of all logits in the inputs' dtype, few kernel launches win: PyTorch multiplies, also where the kernels could.
ONE_BLOCK_BYTES = 256 << 20
ONE_PASS_TOKENS = 1024  # tokens per block of a divergence whose gradients are summed over blocks, by default
TILE_TOKENS = 512  # tokens from which the kernels, too, multiply for a divergence
# By default, all logits of a divergence in 16 bits are kept up to one of these sizes, depending on what blocks cost.
SMALL_LOGITS, MEDIUM_LOGITS, LARGE_LOGITS = 1 << 30, 2 << 30, 4 << 30
# PyTorch's own loss on full logits is fastest up to this many logits, where the time is spent on the host. The PyTorch fallback
# launches more kernels than full logits do.
FULL_LOGITS_MAX, FULL_LOGITS_MAX_FALLBACK = 42_000_000, 90_000_000
# The same for losses with a softcap, label smoothing or a z-loss, which cost PyTorch more launches, but not the row kernels.
FULL_LOGITS_MAX_OPTIONS = 16_000_000
BYTES_PER_LOGIT = 12  # per logit: log-probabilities and the gradients of log-probabilities and logits, in float32
# The maximum of tokens · hidden size · vocabulary for 16-bit dtypes and an odd vocabulary: GEMMs on unaligned rows are slow.
FULL_LOGITS_MAX_WORK_ODD = 1.6e10


class Problem(NamedTuple):
    """Sizes, dtype and device of one loss."""

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


class Explanation(NamedTuple):
    """Result of ``explain_dispatch``."""

    strategy: str  # a key of WHY
    implementation: str  # "triton" if the kernels can multiply, too, else "portable"; unused by "full_logits"
    why: str
    memory_budget: int  # bytes of workspace it may use


WHY = {
    "full_logits": "few tokens: PyTorch's own loss on full logits is fastest and needs little memory",
    "filtered": "Triton kernels skip parts of the gradient that are close to zero",
    "exact": "Triton kernels compute the full gradient",
    "one_block": "few tokens or float32: PyTorch multiplies, and kernels turn all logits into gradients, with few launches",
    "one_pass": "PyTorch multiplies, and gradients are computed in the forward pass, in blocks of tokens",
    "recompute": "PyTorch computes the logits twice, in slabs of the vocabulary",
}


def choose_implementation(device: torch.device, dtype: torch.dtype, implementation: str = "auto") -> str:
    """Return what multiplies: ``"triton"``, or ``"portable"`` for PyTorch; raise if the one asked for cannot run."""
    if implementation == "auto" and dtype == torch.float32:
        return "portable"  # cuBLAS is faster than Triton's full-precision matmul
    if runs_kernels(device, dtype, implementation):
        return "triton"
    if implementation == "triton":
        why = why_no_triton(device, dtype, MIN_CAPABILITY_FORCED)
        raise RuntimeError(f"implementation='triton' cannot run here: {why}; use implementation='auto'")
    return "portable"


def runs_kernels(device: torch.device, dtype: torch.dtype, implementation: str) -> bool:
    """Return True if the kernels can run, at least those that turn PyTorch's products into gradients."""
    if implementation == "portable" or (implementation == "auto" and device.type == "cpu"):
        return False
    return why_no_triton(device, dtype, MIN_CAPABILITY_FORCED if implementation == "triton" else MIN_CAPABILITY) is None


def why_no_triton(device: torch.device, dtype: torch.dtype, least: tuple[int, int] = MIN_CAPABILITY) -> str | None:
    """Return why the kernels cannot run for ``dtype`` on ``device``, or None. ``least``: minimum compute capability.

    On a machine without CUDA, a CUDA device stands for a GPU that runs the kernels.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels support float32, bfloat16 and float16, but the tensors are {dtype}"
    capability = _capability(device) if device.type == "cuda" else None
    if device.type == "cuda" and capability is None:
        return None
    if device.type == "cpu":
        # Triton's interpreter is for tests only: it is thousands of times slower than PyTorch.
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the kernels need an NVIDIA GPU, but the tensors are on the CPU (TRITON_INTERPRET=1 is for tests)"
    elif capability is None or torch.version.cuda is None:
        return f"the kernels need an NVIDIA GPU, but the tensors are on {device}"
    elif capability < least:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, but the kernels need {least[0]}.{least[1]}"
    # Checked last: if the device is the problem, installing Triton does not help.
    if not _has_triton():
        return "the package triton is not installed (pip install triton)"
    return strategies.compile_failures.get(device)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def prefers_full_logits(p: Problem, spec: LossSpec) -> bool:
    """Return True if host time dominates and full logits fit the budget: PyTorch's own operators are then the fastest."""
    logits = p.tokens * p.vocab_size
    if not 0 < logits <= FULL_LOGITS_MAX_FALLBACK or p.device.type != "cuda" or spec.implementation == "triton":
        return False
    odd = p.vocab_size % 2 and p.dtype not in FULL_PRECISION and p.work > FULL_LOGITS_MAX_WORK_ODD
    falls_back = choose_implementation(p.device, p.dtype, spec.implementation) == "portable"
    most = FULL_LOGITS_MAX_FALLBACK if falls_back else FULL_LOGITS_MAX
    if any(spec.needs) and runs_kernels(p.device, p.dtype, spec.implementation):
        options = spec.softcap or spec.label_smoothing or spec.z_loss
        most = FULL_LOGITS_MAX_OPTIONS if options else FULL_LOGITS_MAX
    if odd or logits > most or p.dtype == torch.float64:
        return False
    if falls_back and spec.auto_budget:
        return True
    # The weight's gradient is computed last and reuses memory of the logits.
    return BYTES_PER_LOGIT * logits - _head_gradient_bytes(p, spec) <= spec.memory_budget


def _head_gradient_bytes(p: Problem, spec: LossSpec) -> int:
    return p.dtype.itemsize * p.vocab_size * p.hidden_size if spec.needs[1] else 0


def _budget(p: Problem, spec: LossSpec, strategy: str) -> int:
    """Return the workspace in bytes: the user's budget or, for "auto", what makes ``strategy`` fast."""
    if not spec.auto_budget:
        return spec.memory_budget
    if strategy == "full_logits":
        return max(spec.memory_budget, BYTES_PER_LOGIT * p.tokens * p.vocab_size)
    if strategy in ("one_pass", "one_block") and p.device.type != "cpu":
        # Room for blocks of logits and for the float32 accumulator of the weight's gradient.
        logits, head = p.tokens * p.vocab_size, _head_gradient_bytes(p, spec)
        least = spec.memory_budget
        if p.dtype in FULL_PRECISION:  # products of smaller blocks leave a part of the GPU idle
            least = max(2 * least, 1 << 30)
        else:  # each block reads the head again, and each chunk launches many kernels
            least = max(least, min(BYTES_PER_LOGIT * logits // 3, 1 << 30))
        wanted = max(least, BYTES_PER_LOGIT * logits // 10) + head
        # At most what full logits take, or fallback.token_losses: all logits in the inputs' dtype, without the accumulator.
        one_block = p.dtype.itemsize * logits + min(CHUNK_BYTES, head)
        return max(spec.memory_budget, min(wanted, max(BYTES_PER_LOGIT * logits - head, one_block)))
    if strategy == "exact":
        return max(spec.memory_budget, _head_gradient_bytes(p, spec))
    return spec.memory_budget


def may_filter(p: Problem, spec: LossSpec, wanted: WantedStats | None = None) -> bool:
    """Return True if the filter supports this loss (or the ``wanted`` statistics) and pays off; assumes Triton kernels."""
    if spec.gradient_filter is None:
        return False
    # In float16 and float32, one long sum of kept tiles has visible rounding errors on a GPU. Tests interpret the filter in both.
    if p.dtype != torch.bfloat16 and (spec.gradient_filter == "auto" or p.device.type == "cuda"):
        return False
    need_hidden, need_weight, need_bias = spec.needs
    if need_bias or spec.label_smoothing or not (need_hidden or need_weight):
        return False
    if wanted is not None and (wanted.mean or wanted.log_sum_sq or (wanted.entropy and spec.softcap)):
        return False
    return p.tokens >= FILTER_TOKENS and p.work >= FILTER_FROM


def grads_in_forward(dtype: torch.dtype) -> bool:
    """Return True if ``hf_cce::cross_entropy`` computes gradients in its forward pass: one graph serves all sizes."""
    return dtype != torch.float16  # where gradients that a GradScaler has not scaled yet would underflow


def one_pass_pays(p: Problem, spec: LossSpec) -> bool:
    """Return True if the PyTorch fallback computes gradients in the forward pass, not from recomputed slabs of logits."""
    if p.dtype in FULL_PRECISION:
        return True
    on_cpu = p.device.type == "cpu"
    # On a CPU a 16-bit matmul cannot write float32 results, which summing dW over several token blocks would need.
    # On a GPU, the sums over token blocks need a float32 accumulator of dW, half of which is in the memory of dW itself.
    accumulates = not on_cpu and (spec.auto_budget or 2 * _head_gradient_bytes(p, spec) <= spec.memory_budget)
    one_block = fits_token_losses(p.tokens, p.vocab_size, p.dtype, on_cpu, spec.memory_budget)
    return accumulates or one_block or not spec.needs[1]


def choose_unfiltered(p: Problem, spec: LossSpec, implementation: str) -> str:
    """Return the name of the unfiltered strategy, a key of ``WHY``, for a loss that does not prefer full logits."""
    if implementation == "triton":
        # Without gradients, the tile kernels compute the logits once, too: fewer launches pay off for few tokens only.
        pays = any(spec.needs) or p.tokens * p.vocab_size <= FULL_LOGITS_MAX
        return "one_block" if pays and is_few(p, spec) else "exact"
    if not one_pass_pays(p, spec):
        return "recompute"
    one = any(spec.needs) and 0 < one_block_bytes(p) <= _budget(p, spec, "one_pass")
    return "one_block" if one and runs_kernels(p.device, p.dtype, spec.implementation) else "one_pass"


def is_few(p: Problem, spec: LossSpec, most: int = 0) -> bool:
    """Return True if all logits in the inputs' dtype are few and fit the budget, or take at most ``most`` bytes."""
    return 0 < one_block_bytes(p) <= max(most, min(spec.memory_budget, ONE_BLOCK_BYTES))


def one_block_bytes(p: Problem) -> int:
    """Return the bytes of all logits in the inputs' dtype, which their gradient overwrites."""
    return p.tokens * p.dtype.itemsize * (p.vocab_size + -p.vocab_size % 16)


def dispatch(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """Return the strategy for a scalar loss."""
    if prefers_full_logits(Problem.of(x), spec):  # checked first, because host time dominates here
        return strategies.FullLogits(spec, divisor, False)
    return dispatch_fused(x, spec, divisor, state)


def dispatch_fused(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """Return the strategy for a scalar loss, full logits excluded (autograd records those)."""
    p = Problem.of(x)
    if (remaining := _spec_after_dequantization(x, spec)) is None:
        return strategies.Recompute(spec, divisor, False)
    spec = remaining
    implementation = choose_implementation(p.device, p.dtype, spec.implementation)
    # "auto" bounds the error by measuring it across steps, which needs a FilterState.
    tau, keeps_state = None, state is not None
    if implementation == "triton" and (keeps_state or spec.gradient_filter != "auto") and may_filter(p, spec):
        state = state or FilterState()
        tau = state.threshold(spec.gradient_filter, x.hidden)  # type: ignore[arg-type]
    unfiltered = _build_strategy(choose_unfiltered(p, spec, implementation), p, spec, divisor)
    if tau is None or state is None:
        return unfiltered
    return strategies.Filtered(spec, divisor, state, tau, keeps_state, unfiltered)


def _spec_after_dequantization(x: Inputs, spec: LossSpec) -> LossSpec | None:
    """Return ``spec`` if a quantized weight can be dequantized whole, else None: dequantize it in slabs.

    The dequantized weight may take half the budget, and is deducted from it; for "auto", as much memory as full logits.
    """
    if not isinstance(x.weight, FrozenWeight):
        return spec
    whole = x.hidden.element_size() * x.weight.numel()
    if spec.auto_budget:
        return spec if whole <= BYTES_PER_LOGIT * x.hidden.shape[0] * x.weight.shape[0] else None
    return spec._replace(memory_budget=spec.memory_budget - whole) if 2 * whole <= spec.memory_budget else None


def dispatch_statistics(
    x: Inputs, spec: LossSpec, wanted: WantedStats, with_lse: bool, state: FilterState | None
) -> Strategy:
    """Return the strategy for per-token statistics. A ``state`` enables the gradient filter."""
    p = Problem.of(x)
    if prefers_full_logits(p, spec):
        return strategies.FullLogits(spec, SUM, False)
    filters = state is not None and may_filter(p, spec, wanted)
    statistics = dispatch_fused_statistics(x, spec, wanted, with_lse=with_lse or filters)
    if state is None or not filters or not statistics.triton:
        return statistics
    tau = state.threshold(spec.gradient_filter, x.hidden)  # type: ignore[arg-type]
    return statistics if tau is None else strategies.FilteredStatistics(state, tau, statistics)


def dispatch_fused_statistics(
    x: Inputs, spec: LossSpec, wanted: WantedStats, keeps_logits: bool = True, with_lse: bool = True
) -> strategies.Statistics:
    """Return the strategy for exact per-token statistics, full logits excluded. ``keeps_logits``: it may keep logits."""
    p = Problem.of(x)
    if (remaining := _spec_after_dequantization(x, spec)) is None:
        return strategies.Statistics(spec, wanted, False)
    only_losses = keeps_logits and any(spec.needs) and not with_lse and not any(wanted)
    if choose_implementation(p.device, p.dtype, spec.implementation) == "triton":
        # The kernels would compute the logits again in the backward pass. Memory as large as dW, if that is needed, saves this.
        most = _head_gradient_bytes(p, spec) if spec.auto_budget else 0
        few = only_losses and is_few(p, remaining, most)
        return (strategies.TokenLosses if few else strategies.Statistics)(remaining, wanted, True)
    kept, workspace, fits = _kept_logits(p, remaining.memory_budget, spec.auto_budget, any(spec.needs))
    remaining = remaining._replace(memory_budget=kept + workspace)
    if not (keeps_logits and fits):
        return strategies.Statistics(remaining, wanted, False)
    if only_losses and runs_kernels(p.device, p.dtype, spec.implementation):
        return strategies.TokenLosses(remaining, wanted, True)
    # In 16 bits, PyTorch would round the factors of the tokens with the hidden states, for the gradients of weight and bias.
    rounds = p.dtype not in FULL_PRECISION and (any(spec.needs[1:]) or not supports_fp32_out(x.hidden))
    return (strategies.TokenLosses if only_losses and not rounds else strategies.StatisticsKeepingLogits)(
        remaining, wanted, False
    )


def _kept_logits(p: Problem, memory_budget: int, auto: bool, trains: bool) -> tuple[int, int, bool]:
    """Return the bytes of the logits that a pass in PyTorch keeps if it ``trains``, its other workspace, and whether they fit."""
    logits = p.tokens * p.vocab_size
    kept = p.dtype.itemsize * logits if trains else 0
    if auto:
        # Float32 chunks as large as the kept 16-bit logits need few launches; both take a third of full logits' memory.
        return kept, max(memory_budget, BYTES_PER_LOGIT * logits // 6), True
    return kept, memory_budget - kept, 2 * kept <= memory_budget


def dispatch_divergence(p: Problem, spec: LossSpec, kernels: bool, teacher: str, summed: bool) -> DivergencePlan:
    """Return how to compute a divergence.

    ``kernels``: they support the teacher, which is given by its "head", its "logits" or its "top_k" tokens. ``summed``: the
    upstream gradient is the same for all tokens.
    """
    kept, workspace, fits = _kept_logits(p, spec.memory_budget, spec.auto_budget, any(spec.needs))
    triton = kernels and runs_kernels(p.device, p.dtype, spec.implementation)
    tiles = triton and teacher != "top_k" and choose_implementation(p.device, p.dtype, spec.implementation) == "triton"
    # PyTorch's products would be rounded to bfloat16.
    multiplies = tiles and p.dtype == torch.bfloat16 and p.tokens >= TILE_TOKENS
    narrow = p.dtype not in FULL_PRECISION
    # Elsewhere, PyTorch cannot write float32 products of 16-bit operands: sums would take products in float32, and gradients of
    # hidden states would be rounded before and after the upstream gradient is known.
    can_sum = tiles or not narrow or (p.device.type == "cuda" and torch.version.hip is None)
    one_pass = summed and any(spec.needs) and can_sum
    keep = DivergencePlan(workspace, triton, multiplies, "keep")
    in_blocks = DivergencePlan(spec.memory_budget, triton, multiplies, "one_pass" if one_pass else "blocks")
    if not spec.auto_budget:
        if triton and kept + ONE_BLOCK_BYTES <= spec.memory_budget:  # room for blocks of the teacher's logits
            return keep
        return keep if fits and not tiles else in_blocks
    # Bytes of float32 sums beside the buffers of the gradients
    sums = _head_gradient_bytes(p, spec) + 4 * p.tokens * p.hidden_size if narrow else 0
    if tiles:  # blocks compute the logits twice, unless all upstream gradients are equal
        # The teacher's logits, if given, take as much.
        most = SMALL_LOGITS if one_pass and teacher == "head" else LARGE_LOGITS
        if any(spec.needs) and kept <= most:
            return keep._replace(memory_budget=max(workspace, 512 << 20))
        of_both = 2 * p.dtype.itemsize * p.vocab_size  # the logits of a token, of student and teacher
        return in_blocks._replace(memory_budget=sums + ONE_PASS_TOKENS * of_both)
    if one_pass and narrow and teacher != "top_k" and kept > MEDIUM_LOGITS:
        return in_blocks._replace(memory_budget=sums + MEDIUM_LOGITS)
    # Half of it is for chunks; for few tokens, as much as full logits take
    logits = p.tokens * p.vocab_size
    most = 2 * min(8 * logits, 1 << 30) if teacher == "top_k" else min(BYTES_PER_LOGIT * logits, 1 << 30)
    return keep._replace(memory_budget=max(2 * workspace, most))


def dispatch_traced(x: Inputs, spec: LossSpec, divisor: Divisor, state: FilterState | None) -> Strategy:
    """Return the strategy for the operator ``hf_cce::cross_entropy``, whose graph serves any number of tokens."""
    if grads_in_forward(x.hidden.dtype):
        return dispatch_fused(x, spec, divisor, state)
    triton = choose_implementation(x.hidden.device, x.hidden.dtype, spec.implementation) == "triton"
    return strategies.Recompute(spec, divisor, triton)


def _build_strategy(strategy: str, p: Problem, spec: LossSpec, divisor: Divisor) -> Strategy:
    spec = spec._replace(memory_budget=_budget(p, spec, strategy))
    kinds = {
        "one_block": strategies.OneBlock,
        "one_pass": strategies.OnePass,
        "recompute": strategies.Recompute,
        "exact": strategies.Exact,
    }
    # Only the kernels run "exact", only PyTorch recomputes.
    triton = strategy == "exact" or (strategy != "recompute" and runs_kernels(p.device, p.dtype, spec.implementation))
    return kinds[strategy](spec, divisor, triton)


def explain_dispatch(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    config: CCEConfig | None = None,
    frozen: bool = False,
) -> Explanation:
    """Return how the scalar loss of a patched model is computed, and why.

    Args:
        device: a device or device type. On a machine without CUDA, ``"cuda"`` stands for a GPU that runs the kernels; for one
            that does not, such as a T4, pass ``CCEConfig("portable")``.
        frozen: True if the head's weight needs no gradient.
    """
    config, device = config or CCEConfig(), torch.device(device)
    spec = LossSpec.of(config, tokens, (True, not frozen, False))
    p = Problem(tokens, hidden_size, vocab_size, dtype, device)
    implementation = choose_implementation(device, dtype, config.implementation)
    why_not = why_no_triton(device, dtype) if config.implementation == "auto" else None
    strategy = (
        "filtered" if implementation == "triton" and may_filter(p, spec) else choose_unfiltered(p, spec, implementation)
    )
    strategy = "full_logits" if prefers_full_logits(p, spec) else strategy
    why = "; ".join(filter(None, (WHY[strategy], why_not)))
    return Explanation(strategy, implementation, why, _budget(p, spec, strategy))
