"""How kernels are launched: tile shapes, pipeline depth, slab widths. Everything that depends on the device is decided here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


# What depends on the version of Triton.
# With these hf_cce.kernels.hopper was proven right on a GPU. It compiles with others, too. But its warps wait for each other, so
# a compiler bug can make a launch hang, and Triton 3.6 had one.
HOPPER_VERSIONS = ("3.6", "3.9")
# With these one flat loop over tiles and the hidden size is faster. It takes registers, of which Triton 3.9 has none left.
FLATTEN_VERSIONS = ("3.6",)


def runs_on(versions: tuple[str, ...]) -> bool:
    """Whether the installed Triton is a release of one of these minor versions."""
    return _is_release_of(triton.__version__, versions)


@cache
def _is_release_of(version: str, versions: tuple[str, ...]) -> bool:
    release = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    return release is not None and release[1] in versions


def hopper_is_proven() -> bool:
    """Whether hf_cce.kernels.hopper may be used with the installed version of Triton."""
    return runs_on(HOPPER_VERSIONS)


@dataclass(frozen=True)
class Plan:
    """Tiles of BLOCK_M tokens by BLOCK_N vocabulary entries, multiplied BLOCK_K of the hidden size at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool
    precision: str  # of a float32 dot: "ieee" or "tf32"
    upcast: bool = False  # multiply in float32: the interpreter cannot multiply bfloat16
    group_m: int = 64  # row blocks that share weight tiles in L2
    # of the kernels over kept tiles alone (hf_cce.kernels.filter.sparse)
    sparse_block_k: int = 64
    block_d: int = 128  # columns of a gradient's tile
    sparse_warps: int = 4
    hidden_stages: int = 3
    weight_stages: int = 3
    weight_block_d: int = 128
    weight_warps: int = 4
    tile_warps: int = 4
    programs: int = 264  # that share the kept tiles
    # Sum each tile apart: the rounding error of one long sum shows in float32 and float16 (sparse._add_in_parts).
    in_parts: bool = False
    hopper: bool = False  # hf_cce.kernels.hopper can be used

    @property
    def flatten(self) -> bool:
        """Whether the loops of ``sparse._kept_tiles_kernel`` are one."""
        return self.hopper and runs_on(FLATTEN_VERSIONS)

    def label_constants(self) -> dict[str, Any]:
        """Constants of ``labels._label_logit_kernel``. Hopper's tensor cores multiply no fewer than 64 rows."""
        return {
            "BLOCK_R": 16 if self.num_warps == 1 else 64,
            "BLOCK_K": self.block_k,
            "PRECISION": self.precision,
            "UPCAST": self.upcast,
            # Four warps spill before Ampere.
            "num_warps": self.num_warps if self.block_m < 128 else 4,
            "num_stages": 4,
        }

    def constants(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "TMA": self.use_tma,
            "PRECISION": self.precision,
            "UPCAST": self.upcast,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def make_plan(hidden: Tensor, weight: Tensor, backward: bool = False) -> Plan:
    """Pick the tiles for ``hidden`` [N, D] and ``weight`` [V, D], of the forward or the backward pass.

    Hopper's are the fastest of those measured on an H200.
    """
    precision = "tf32" if hidden.dtype == torch.float32 and _allows_tf32() else "ieee"
    if hidden.device.type == "cpu":  # the interpreter: small tiles, so that tests cross tile borders
        return Plan(16, 32, 32, 1, 1, False, "ieee", upcast=True)
    if hidden.dtype == torch.float32:
        return Plan(64, 64, 32, 4, 3, False, precision)
    major = capability(hidden)[0]
    if major < 8:
        # Larger tiles, or four warps, spill registers.
        return Plan(64, 64, 32, 8, 3, False, precision)
    if major != 9:
        # Fits the shared memory of every GPU from compute capability 8.0 on.
        return Plan(128, 128, 32, 8, 3, False, precision)
    tma = _tma_ready(hidden) and _tma_ready(weight)
    special = tma and hopper_is_proven()
    if backward:
        return Plan(128, 128, 64, 8, 3, tma, precision, hopper=special)
    if hidden.shape[1] >= 3072:
        return Plan(128, 256, 64, 8, 3, tma, precision, hopper=special)
    return Plan(128, 128, 64, 4, 3, tma, precision, hopper=special)


def uses_hopper(plan: Plan, bias: Tensor | None, softcap: float, *wanted: Any) -> bool:
    """Whether hf_cce.kernels.hopper can compute these tiles: no bias, no softcap, and none of the statistics ``wanted``."""
    return plan.hopper and bias is None and softcap == 0 and not any(x is not None and x is not False for x in wanted)


def filter_plan(hidden: Tensor, weight: Tensor) -> Plan:
    """Pick the tiles of the filtered loss: the filter keeps or drops tiles of BLOCK_M by BLOCK_N."""
    plan = replace(make_plan(hidden, weight), in_parts=hidden.dtype == torch.float32)
    if hidden.shape[1] * hidden.element_size() % 16:  # rows of the contiguous copies in sorted order are not aligned
        plan = replace(plan, use_tma=False, hopper=False)
    if hidden.device.type == "cpu":
        return replace(
            plan,
            sparse_block_k=16,
            block_d=32,
            weight_block_d=64,
            sparse_warps=1,
            weight_warps=1,
            tile_warps=1,
            programs=3,
        )
    processors = num_processors(hidden)
    # Not on compute capability 10, where accumulators are in tensor memory: Triton 3.9 does not compile it.
    if hidden.dtype == torch.float16 and capability(hidden)[0] != 10:
        plan = replace(plan, in_parts=True)
    if plan.block_m != 128:  # float32, and GPUs before Ampere
        # With four warps the product with gathered rows of the weight spills.
        plan = replace(plan, sparse_warps=8, weight_warps=plan.num_warps, tile_warps=plan.num_warps)
        return replace(plan, sparse_block_k=32, block_d=64, weight_block_d=64, programs=2 * processors)
    if not plan.use_tma:
        return replace(
            plan, block_n=128, sparse_block_k=32, sparse_warps=8, weight_warps=8, tile_warps=8, programs=2 * processors
        )
    plan = replace(plan, block_n=128, num_warps=4, num_stages=3, hidden_stages=5, programs=2 * processors)
    if plan.in_parts:  # twice the accumulators
        return replace(plan, block_d=64, weight_block_d=64)
    return replace(plan, weight_block_d=256, weight_warps=8) if hidden.shape[1] % 256 == 0 else plan


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # raised once somebody used the newer fp32_precision, as Transformers does for tf32=True
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of the GPU of ``x``; of the current one for the tensors of a warm-up, which are on no device."""
    return _capability(None if x.is_meta else x.device)


@cache
def _capability(device: torch.device | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def num_processors(x: Tensor) -> int:
    """The streaming multiprocessors of the GPU of ``x``, likewise."""
    return torch.cuda.get_device_properties(None if x.is_meta else x.device).multi_processor_count


def _tma_ready(x: Tensor) -> bool:
    """TMA wants 16-byte aligned rows."""
    return (
        TensorDescriptor is not None
        and x.data_ptr() % 16 == 0
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % 16 == 0
    )


def operand(x: Tensor, rows: int, plan: Plan) -> Any:
    """Wrap ``x`` for a kernel: a TMA descriptor of blocks [rows, BLOCK_K], or the tensor itself."""
    return TensorDescriptor.from_tensor(x, [rows, plan.block_k]) if plan.use_tma else x


def descriptor(x: Tensor, rows: int, cols: int, plan: Plan) -> Any:
    """As ``operand``, for blocks [rows, cols]."""
    return TensorDescriptor.from_tensor(x, [rows, cols]) if plan.use_tma else x


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉, without the host time of ``triton.cdiv``."""
    return -(-a // b)


def power_of_2(x: int) -> int:
    """The smallest power of 2 that is at least ``x``."""
    return 1 << (x - 1).bit_length()


def slab_width(n: int, v: int, bytes_per_logit: int, block_n: int, budget: int) -> int:
    """Columns of a slab of the logits' gradient, so that it fits the budget: a multiple of ``block_n``, all slabs alike."""
    widest = max(block_n, budget // max(1, n * bytes_per_logit) // block_n * block_n)
    if widest >= v:
        return v
    slabs = ceil_div(v, widest)
    return ceil_div(ceil_div(v, slabs), block_n) * block_n


def row_major(x: Tensor) -> Tensor:
    """``x`` [·, D], or a copy if the entries of a row are not side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(width: int) -> int:
    """The stride of rows of ``width`` numbers that keeps each row aligned.

    On unaligned rows cuBLAS is several times slower, and Triton compiles a kernel once more.
    """
    return ceil_div(width, 16) * 16


def empty_slab(like: Tensor, rows: int, width: int) -> Tensor:
    """Allocate [rows, width], rows ``padded(width)`` apart."""
    slab = like.new_empty((rows, padded(width)))
    if not like.is_cuda:  # on CPUs with AMX, PyTorch 2.13 multiplies what lies between rows, too, and 0 · NaN is NaN
        slab.zero_()
    return slab[:, :width]
