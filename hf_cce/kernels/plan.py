"""The plan of a launch: tile shapes, pipeline depth, slab widths. All choices that depend on the device are made here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


def specialises() -> bool:
    """Whether hf_cce.kernels.hopper has run on a GPU with this version of Triton.

    It compiles with later ones too, but where programs wait for each other a mistake of the compiler can make them wait forever:
    one of 3.6 did.
    """
    return re.fullmatch(r"3\.6\.\d+", triton.__version__) is not None


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
    # Add up tile by tile instead of in one long sum, whose error float32 and float16 would show: see sparse._add_in_parts.
    in_parts: bool = False
    specialised: bool = False  # hf_cce.kernels.hopper can be used

    def label_constants(self) -> dict[str, Any]:
        """Constants of the kernel of labels' logits. Fewer than 64 rows are no product for Hopper's tensor cores."""
        return {
            "BLOCK_R": 16 if self.num_warps == 1 else 64,
            "BLOCK_K": self.block_k,
            "PRECISION": self.precision,
            "UPCAST": self.upcast,
            # Four warps spill before Ampere, as they do in tiles of logits, whose number then serves here too.
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
    """The plan for ``hidden`` [N, D] and ``weight`` [V, D].

    Hopper's shapes are the fastest of those measured, interleaved, on an H200 at D = 768 to 4,096; the numbers are in
    ``hf_cce/bench/results/2026-11-21-h200-plans.txt``.
    """
    precision = "tf32" if hidden.dtype == torch.float32 and _allows_tf32() else "ieee"
    if hidden.device.type == "cpu":  # the interpreter: small tiles, so that tests cross tile borders
        return Plan(16, 32, 32, 1, 1, False, "ieee", upcast=True)
    if hidden.dtype == torch.float32:
        return Plan(64, 64, 32, 4, 3, False, precision)
    major = torch.cuda.get_device_capability(_gpu(hidden))[0]
    if major < 8:
        # ptxas has no registers for more: tiles of 128 by 128 spill thousands of bytes, and these with 4 warps hundreds
        return Plan(64, 64, 32, 8, 3, False, precision)
    if major != 9:
        # fits the shared memory of every GPU from compute capability 8.0 on
        return Plan(128, 128, 32, 8, 3, False, precision)
    tma = _tma_ready(hidden) and _tma_ready(weight)
    special = tma and specialises()
    if backward:
        return Plan(128, 128, 64, 8, 3, tma, precision, specialised=special)
    if hidden.shape[1] >= 3072:
        return Plan(128, 256, 64, 8, 3, tma, precision, specialised=special)
    return Plan(128, 128, 64, 4, 3, tma, precision, specialised=special)


def specialised(plan: Plan, bias: Tensor | None, softcap: float, *wanted: Any) -> bool:
    """Whether hf_cce.kernels.hopper does it: plain logits, scaled perhaps, and none of the other statistics ``wanted``."""
    return (
        plan.specialised and bias is None and softcap == 0 and not any(x is not None and x is not False for x in wanted)
    )


def filter_plan(hidden: Tensor, weight: Tensor) -> Plan:
    """The plan of the filtered loss; its tiles of BLOCK_M by BLOCK_N are what is kept or dropped."""
    plan = replace(make_plan(hidden, weight), in_parts=hidden.dtype == torch.float32)
    if (
        hidden.shape[1] * hidden.element_size() % 16
    ):  # the kernels work on contiguous copies, whose rows then start anywhere
        plan = replace(plan, use_tma=False, specialised=False)
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
    processors = torch.cuda.get_device_properties(_gpu(hidden)).multi_processor_count
    # Triton 3.9 does not compile it where accumulators are in tensor memory.
    if hidden.dtype == torch.float16 and torch.cuda.get_device_capability(_gpu(hidden))[0] != 10:
        plan = replace(plan, in_parts=True)
    if plan.block_m != 128:  # float32, and GPUs before Ampere
        # 4 warps of the product with gathered rows of the weight spill
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


def _gpu(x: Tensor) -> torch.device | None:
    """That of ``x``, or the current one where launches are only listed."""
    return None if x.is_meta else x.device


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the newer fp32_precision, as Transformers does for tf32=True, it cannot be asked for
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _tma_ready(x: Tensor) -> bool:
    """TMA wants 16-byte aligned rows."""
    return (
        TensorDescriptor is not None
        and x.data_ptr() % 16 == 0
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % 16 == 0
    )


def operand(x: Tensor, rows: int, plan: Plan) -> Any:
    """``x`` as the kernels want it: a TMA descriptor for blocks [rows, BLOCK_K], or the tensor itself."""
    return TensorDescriptor.from_tensor(x, [rows, plan.block_k]) if plan.use_tma else x


def descriptor(x: Tensor, rows: int, cols: int, plan: Plan) -> Any:
    """As ``operand``, for blocks [rows, cols]."""
    return TensorDescriptor.from_tensor(x, [rows, cols]) if plan.use_tma else x


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own serves kernels' constants too, and takes the host 5 µs a call where a step has forty."""
    return -(-a // b)


def power_of_2(x: int) -> int:
    """The next from ``x`` on."""
    return 1 << (x - 1).bit_length()


def slab_width(n: int, v: int, bytes_per_logit: int, block_n: int, budget: int) -> int:
    """Columns of the vocabulary whose logits' gradients fit the budget: a multiple of ``block_n``, slabs of even width."""
    widest = max(block_n, budget // max(1, n * bytes_per_logit) // block_n * block_n)
    if widest >= v:
        return v
    slabs = ceil_div(v, widest)
    return ceil_div(ceil_div(v, slabs), block_n) * block_n


def row_major(x: Tensor) -> Tensor:
    """``x`` [·, D], or a copy where the entries of a row do not lie side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(width: int) -> int:
    """From one row of ``width`` numbers to the next, such that each begins aligned whatever the width is.

    cuBLAS takes several times as long where rows are not aligned; Triton would compile what reads them a second time.
    """
    return ceil_div(width, 16) * 16


def empty_slab(like: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width], rows ``padded(width)`` apart."""
    slab = like.new_empty((rows, padded(width)))
    if (
        not like.is_cuda
    ):  # 16-bit products of PyTorch 2.13 on CPUs with AMX read the ends of rows, too, and 0 · NaN is NaN
        slab.zero_()
    return slab[:, :width]
