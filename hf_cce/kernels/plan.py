"""The plan of a launch: tile shapes, pipeline depth, slab widths. All choices that depend on the device are made here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


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
    group_m: int = 8  # row blocks that share weight tiles in L2

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


def make_plan(hidden: Tensor, weight: Tensor) -> Plan:
    """The plan for ``hidden`` [N, D] and ``weight`` [V, D]; forward and backward of one call must use the same."""
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if hidden.device.type != "cuda":  # the interpreter: small tiles, so that tests cross tile borders
        return Plan(16, 32, 32, 1, 1, False, "ieee", upcast=True)
    hopper = torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    if hidden.dtype == torch.float32:
        return Plan(64, 64, 32, 4, 3, False, precision)
    tma = hopper and _tma_ready(hidden) and _tma_ready(weight)
    if hopper:
        return Plan(128, 256, 64, 8, 3, tma, precision)
    return Plan(128, 128, 32, 8, 3, False, precision)


def _tma_ready(x: Tensor) -> bool:
    """TMA wants 16-byte aligned rows."""
    return TensorDescriptor is not None and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def operand(x: Tensor, rows: int, plan: Plan) -> Any:
    """``x`` as the kernels want it: a TMA descriptor for blocks [rows, BLOCK_K], or the tensor itself."""
    return TensorDescriptor.from_tensor(x, [rows, plan.block_k]) if plan.use_tma else x


def slab_width(n: int, v: int, bytes_per_logit: int, block_n: int, budget: int) -> int:
    """Columns of the vocabulary whose logits' gradients fit the budget: a multiple of ``block_n``, slabs of even width."""
    widest = max(block_n, budget // max(1, n * bytes_per_logit) // block_n * block_n)
    if widest >= v:
        return v
    slabs = triton.cdiv(v, widest)
    return triton.cdiv(triton.cdiv(v, slabs), block_n) * block_n
