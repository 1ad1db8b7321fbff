"""Force each strategy of a scalar loss on the kernels for inputs of any size; inputs for which the filter drops tiles."""

import math
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses import Inputs, Options, check_against_plain, fused_loss
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_cce import CCEConfig, dispatch, kernels

# "one_block": PyTorch multiplies, and a kernel overwrites all logits with their gradient.
# "partial_exp_cache": the first slab, one tile wide, is cached, and the others are computed twice.
# "exp_products": all columns are cached, and multiplied without a pass that turns them into gradients.
# "token_groups": likewise, for one group of tokens at a time, in the forward pass.
STRATEGIES = (
    "one_block", "exp_cache", "partial_exp_cache", "exp_products", "token_groups", "filtered", "exact",
)  # fmt: skip
PRODUCT_STRATEGIES = ("exp_products", "token_groups")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Tests of bfloat16 run in the interpreter, and on a GPU they are among those that need one.
BFLOAT16 = pytest.param(torch.bfloat16, marks=[pytest.mark.gpu] if DEVICE == "cuda" else [])
in_the_interpreter = pytest.mark.skipif(
    DEVICE == "cuda", reason="a GPU filters only bfloat16, and its tiles are larger than these inputs"
)
KEEPS_ALL = 1e-9  # a gradient_filter that drops only zeros
_COUNTER_OF_FUNCTION = {
    "row_losses": "one_block",
    "row_gradients": "one_block gradients",
    "exact_stats": "",  # counted by what it saves
    "scale_precomputed_gradients": "precomputed gradients",
    "filtered_forward": "filtered",
    "logit_stats": "exact",
    "filtered_gradients": "filtered gradients",
    "logit_stats_backward": "recomputed gradients",
    "filtered_stats": "filtered statistics",
}
_COUNTER_OF_SAVED = {"PrecomputedGradients": "token_groups", "ExpCache": "exp_cache", "NoneType": "exact"}


def applies(strategy: str, options: Options, dtype: torch.dtype) -> bool:
    """Return True if ``strategy`` supports these options. The kernels of "exact" support all of them, and so does "portable"."""
    if strategy == "portable":
        return True
    if options.reduction == "none" or options.label_smoothing:
        return strategy in ("exact", "one_block")
    if strategy in PRODUCT_STRATEGIES and options.bias and not options.frozen:  # the bias needs a gradient
        return False
    if strategy in ("exp_cache", "partial_exp_cache", *PRODUCT_STRATEGIES):
        return dtype != torch.float16  # not enough range
    return strategy != "filtered" or not (options.bias or (DEVICE == "cuda" and dtype != torch.bfloat16))


def dtype_for(strategy: str) -> torch.dtype:
    """Return float32, or a dtype that ``strategy`` supports: a GPU filters only bfloat16."""
    if strategy == "filtered" and DEVICE == "cuda":
        return torch.bfloat16
    return torch.float32


def forward_counter(strategy: str) -> str:
    own = {"partial_exp_cache": "exp_cache", "exp_products": "exp_cache"}
    return own.get(strategy, strategy)


def backward_counter(strategy: str) -> str:
    own = {"one_block": "one_block", "filtered": "filtered", "token_groups": "precomputed"}
    return f"{own.get(forward_counter(strategy), 'recomputed')} gradients"


def force_strategy(monkeypatch: pytest.MonkeyPatch, strategy: str) -> Counter[str]:
    """Route every scalar loss through ``strategy`` from now on, if it applies; return the count of each strategy."""
    monkeypatch.setattr(dispatch, "FILTER_FROM", 0.0 if strategy == "filtered" else math.inf)
    monkeypatch.setattr(dispatch, "FILTER_TOKENS", 0)
    monkeypatch.setattr(dispatch, "ONE_BLOCK_BYTES", math.inf if strategy == "one_block" else 0)
    monkeypatch.setattr(dispatch, "FULL_LOGITS_MAX_FALLBACK", 0)  # for "portable" on a GPU
    from hf_cce.kernels import backward, exact, exp_cache, exp_products

    # With several slabs of the product. "exp_cache" has none, also with a frozen head.
    monkeypatch.setattr(exp_products, "PRODUCT_BYTES", 4 << 20 if torch.cuda.is_available() else 1 << 12)
    pays_and_fits = exp_products.pays_and_fits
    monkeypatch.setattr(exp_products, "TOKENS_PER_WIDTH", 0)
    for module in (backward, exact):
        monkeypatch.setattr(module, "pays_and_fits", lambda *args: strategy == "exp_products" and pays_and_fits(*args))
    if strategy in ("partial_exp_cache", "exact", "token_groups"):
        # a whole tile of every plan, on a GPU and in the interpreter
        width = (256 if torch.cuda.is_available() else 32) if strategy == "partial_exp_cache" else 0
        monkeypatch.setattr(
            exp_cache, "_scratch_columns", lambda shape, *_: 0 if shape.dtype == torch.float16 else min(shape.v, width)
        )

    def group_size(shape: Any, num_tiles: int, block_m: int, needs: tuple[bool, bool, bool], *_: Any) -> int:
        if strategy != "token_groups" or shape.dtype == torch.float16 or needs[2] or not needs[0]:
            return 0
        return 256 if torch.cuda.is_available() else 16  # whole row blocks of every plan

    monkeypatch.setattr(exact, "group_size", group_size)
    return count_strategies(monkeypatch)


def count_strategies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counting(function: Any, name: str) -> Any:
        def wrapper(*args: Any) -> Any:
            result = function(*args)
            if result is None:  # does not fit the budget
                return None
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            if not any(x.is_meta for x in tensors):  # exclude warm-up calls
                counts[name or _COUNTER_OF_SAVED[type(result[1]).__name__]] += 1
            return result

        return wrapper

    for function, name in _COUNTER_OF_FUNCTION.items():
        monkeypatch.setattr(kernels, function, counting(getattr(kernels, function), name))
    return counts


def use_hopper_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an H200's plans without launching or multiplying anything, for tensors without memory."""
    from hf_cce.kernels import launch_config, launcher

    pytest.importorskip("hf_cce.kernels.hopper", exc_type=ImportError)  # Triton 3.4 lacks parts that it imports
    monkeypatch.setattr(launch_config, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(launch_config, "is_hopper_validated", lambda: True)
    monkeypatch.setattr(launcher.Kernel, "_find", lambda *args: (lambda *args: None, ()))
    for name, module in list(sys.modules.items()):
        if name.startswith(("hf_cce.kernels", "hf_cce.matmul")) and hasattr(module, "multiply_add"):
            monkeypatch.setattr(module, "multiply_add", lambda *_, **__: None)


def config_for(strategy: str, **options: Any) -> CCEConfig:
    implementation = "portable" if strategy == "portable" else "triton"
    return CCEConfig(implementation, **{"gradient_filter": KEEPS_ALL if strategy == "filtered" else None, **options})


def check_strategy(
    strategy: str, inputs: Inputs, labels: Tensor, options: Options, dtype: torch.dtype, what: str = ""
) -> None:
    loss = fused_loss(config_for(strategy))
    check_against_plain(loss, inputs, labels, options, dtype, f"{what} {options}, {strategy}")


def trained_like_inputs(
    n: int, d: int, v: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden [N, D], weight [V, D], labels [N]) as late in training: labels follow a Zipf law, and most are predicted.

    The predicted entry's logit is slightly above the logsumexp of the others. Those have a part common to all tokens, with
    standard deviation 2, which favors frequent entries, and an individual part with standard deviation 1.
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(v, d, generator=g) / d**0.5
    frequency = 1.0 / torch.arange(1, v + 1)
    labels, other = torch.multinomial(frequency, 2 * n, replacement=True, generator=g).view(2, n)
    predicted = torch.where(torch.rand(n, generator=g) < 0.8, labels, other)
    hidden = (math.log(v) + 4.5) * weight[predicted] + torch.randn(n, d, generator=g)
    few = min(v, 2 * d)
    common = weight[:few].t() @ frequency[:few].log()
    hidden += (common / common.norm()) * (2 * d**0.5)
    labels[::7] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)
