"""Launch configuration by device, dtype and shape: tiles, pipeline depth, slab widths, TMA."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Triton versions with which hf_cce.kernels.hopper was validated on a GPU. It compiles with others too, but its warps wait for
# each other, so a compiler bug can hang the launch. Triton 3.6 had such a bug.
HOPPER_VERSIONS = ("3.6", "3.9")
# Versions with which one flat loop over tiles and the hidden size is faster. It needs more registers than Triton 3.9 leaves.
FLATTEN_VERSIONS = ("3.6",)


def is_hopper_validated() -> bool:
    return _is_triton_release(triton.__version__, HOPPER_VERSIONS)


@cache
def _is_triton_release(version: str, minors: tuple[str, ...]) -> bool:
    """Return True if ``version`` is a release of one of these minor versions."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    return release is not None and release[1] in minors


@dataclass(frozen=True)
class Plan:
    """Tiles of BLOCK_M tokens by BLOCK_N vocabulary entries; each step of the product covers BLOCK_K of the hidden size."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool
    precision: str  # of ``tiles.dot``: "ieee" or "tf32"; "upcast" in the interpreter
    group_m: int = 64  # row blocks that share weight tiles in L2
    hopper: bool = False  # hf_cce.kernels.hopper can be used

    def constants(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "TMA": self.use_tma,
            "PRECISION": self.precision,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def make_plan(hidden: Tensor, weight: Tensor, backward: bool = False) -> Plan:
    """Choose the tiles for ``hidden`` [N, D] and ``weight`` [V, D]. Those for Hopper are the fastest measured on an H200."""
    precision = "tf32" if hidden.dtype == torch.float32 and _allows_tf32() else "ieee"
    if hidden.device.type == "cpu":  # the interpreter: small tiles, so that tests cross tile borders
        return Plan(16, 32, 32, 1, 1, False, "upcast")
    if hidden.dtype == torch.float32:
        return Plan(64, 64, 32, 4, 3, False, precision)
    major = _capability(None if hidden.is_meta else hidden.device)[0]
    if major < 8:
        # Larger tiles or four warps spill registers.
        return Plan(64, 64, 32, 8, 3, False, precision)
    if major != 9:
        # Fits the shared memory of every GPU with compute capability 8.0 or higher.
        return Plan(128, 128, 32, 8, 3, False, precision)
    tma = _tma_ready(hidden) and _tma_ready(weight)
    hopper = tma and is_hopper_validated()
    if backward:
        return Plan(128, 128, 64, 8, 3, tma, precision, hopper=hopper)
    if hidden.shape[1] >= 3072:
        return Plan(128, 256, 64, 8, 3, tma, precision, hopper=hopper)
    return Plan(128, 128, 64, 4, 3, tma, precision, hopper=hopper)


def uses_hopper(plan: Plan, bias: Tensor | None, softcap: float, more_statistics: bool = False) -> bool:
    """Return True if hf_cce.kernels.hopper computes the tiles: no bias, no softcap, no statistics but logsumexp and energy."""
    return plan.hopper and bias is None and softcap == 0 and not more_statistics


class ProductPlan(NamedTuple):
    """Launch configuration of a product of kept tiles with the weight (for dh) or with the hidden states (for dW)."""

    block_k: int  # columns of a tile (for dh) or tokens of a tile (for dW) that one step multiplies
    block_d: int  # columns of dh or dW that one program computes at a time
    num_warps: int
    num_stages: int = 3

    def constants(self) -> dict[str, int]:
        return dict(zip(("BLOCK_K", "BLOCK_D", "num_warps", "num_stages"), self, strict=True))


@dataclass(frozen=True, kw_only=True)
class FilterPlan(Plan):
    """Tiles of the filtered loss, and launch configuration of the kernels over kept tiles (hf_cce.kernels.filter.sparse)."""

    programs: int  # programs that share the kept tiles
    for_hidden: ProductPlan
    for_weight: ProductPlan
    flatten: bool  # the kernel that computes the kept tiles has one loop over tiles and the hidden size


def filter_plan(hidden: Tensor, weight: Tensor) -> FilterPlan:
    """Choose the tiles that the filter keeps or drops as a whole. On a GPU, only losses in bfloat16 are filtered."""
    plan = make_plan(hidden, weight)
    if hidden.shape[1] * hidden.element_size() % 16:  # rows of the sorted, contiguous copies are not aligned
        plan = replace(plan, use_tma=False, hopper=False)
    if hidden.device.type == "cpu":
        programs, for_hidden, for_weight = 3, ProductPlan(16, 32, 1), ProductPlan(16, 64, 1)
    elif not plan.use_tma:
        plan, programs = replace(plan, block_n=128, num_warps=8), 2 * num_sms(hidden)
        for_hidden = for_weight = ProductPlan(32, 128, 8)
    else:
        plan, programs = replace(plan, block_n=128, num_warps=4, num_stages=3), 2 * num_sms(hidden)
        for_hidden = ProductPlan(64, 128, 4, num_stages=5)
        for_weight = ProductPlan(64, 256, 8) if hidden.shape[1] % 256 == 0 else ProductPlan(64, 128, 4)
    flatten = plan.hopper and _is_triton_release(triton.__version__, FLATTEN_VERSIONS)
    return FilterPlan(**vars(plan), programs=programs, for_hidden=for_hidden, for_weight=for_weight, flatten=flatten)


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # raised if the newer fp32_precision was set before, as Transformers does for tf32=True
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


@cache
def _capability(device: torch.device | None) -> tuple[int, int]:
    """Return the compute capability of ``device``; None: the current GPU, for meta tensors, which a warm-up uses."""
    return torch.cuda.get_device_capability(device)


def num_sms(x: Tensor) -> int:
    """Return the number of streaming multiprocessors of the GPU of ``x``, or of the current GPU for meta tensors."""
    return _num_sms(None if x.is_meta else x.device)


@cache  # looked up at every launch
def _num_sms(device: torch.device | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tma_ready(x: Tensor) -> bool:
    """Return True if TMA can read ``x``: it requires 16-byte aligned rows."""
    return x.data_ptr() % 16 == 0 and x.stride(0) > 0 and x.stride(0) * x.element_size() % 16 == 0


def operand(x: Tensor, rows: int, plan: Plan, cols: int = 0) -> Any:
    """Return the kernel argument for ``x``: ``x``, or a TMA descriptor of blocks [rows, cols or BLOCK_K] if the plan uses TMA."""
    return TensorDescriptor.from_tensor(x, [rows, cols or plan.block_k]) if plan.use_tma else x


def ceil_div(a: int, b: int) -> int:
    """Return ⌈a / b⌉, without the host overhead of ``triton.cdiv``."""
    return -(-a // b)


def slab_width(n: int, v: int, bytes_per_logit: int, block_n: int, budget: int) -> int:
    """Return the width of equal slabs of the logits' gradient that fit the budget: a multiple of ``block_n``, or ``v``."""
    widest = max(block_n, budget // max(1, n * bytes_per_logit) // block_n * block_n)
    if widest >= v:
        return v
    slabs = ceil_div(v, widest)
    return ceil_div(ceil_div(v, slabs), block_n) * block_n


def row_major(x: Tensor) -> Tensor:
    """Return ``x`` [·, D], copied if its rows are not contiguous: the kernels do not take the stride of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(width: int) -> int:
    """Return the stride of rows of ``width`` numbers that keeps every row aligned.

    With unaligned rows, cuBLAS is several times slower and Triton compiles another version of the kernel.
    """
    return ceil_div(width, 16) * 16


def empty_slab(like: Tensor, rows: int, width: int) -> Tensor:
    """Allocate a tensor [rows, width] with row stride ``padded(width)``."""
    slab = like.new_empty((rows, padded(width)))
    if not like.is_cuda:  # on CPUs with AMX, PyTorch 2.13 also multiplies the padding between rows, and 0 · NaN is NaN
        slab.zero_()
    return slab[:, :width]
