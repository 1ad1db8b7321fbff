"""What computes a loss, the kernels or portable PyTorch; where it runs; and the look at the labels that every loss takes."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_cce import portable


def choose_implementation(device: torch.device, dtype: torch.dtype, implementation: str = "auto") -> str:
    """``"triton"`` or ``"portable"`` for tensors of ``dtype`` on ``device``.

    Raises:
        RuntimeError: ``implementation="triton"`` where the kernels cannot run; the message says why.
    """
    if implementation == "portable" or (implementation == "auto" and device.type == "cpu"):
        return "portable"
    why = _why_no_triton(device, dtype)
    if implementation == "triton" and why:
        raise RuntimeError(f"implementation='triton' cannot run here: {why}; use implementation='auto'")
    return "portable" if why else "triton"


def _why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels compute in float32 and the tensors are {dtype}"
    if device.type == "cpu":
        # Triton's interpreter is for tests, thousands of times slower than PyTorch.
        if not _interpreted():
            return "the kernels are for NVIDIA GPUs and the tensors are on the CPU (TRITON_INTERPRET=1 interprets, for tests)"
    elif device.type != "cuda" or torch.version.cuda is None:
        return f"the kernels are for NVIDIA GPUs and the tensors are on {device}"
    else:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    # Last: where the device is the reason, installing Triton changes nothing.
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_module() -> ModuleType:
    from hf_cce import kernels  # late: importing hf_cce must not import Triton

    return kernels


def module_for(hidden: Tensor, implementation: str) -> Any:
    """The module whose functions compute a loss of ``hidden``: ``hf_cce.kernels``, or ``hf_cce.portable``, its specification."""
    return (
        portable
        if choose_implementation(hidden.device, hidden.dtype, implementation) == "portable"
        else kernels_module()
    )


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its arguments are: make that the device of ``x``."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast of operators on ``x``'s device; entering costs the host microseconds, so only where there is any."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _require(ok: Tensor, labels: Tensor, ignore_index: int, v: int) -> None:
    """Fail unless ``ok``: on a CUDA device by a device-side assertion, elsewhere by ``ValueError``."""
    if ok.is_cuda:
        torch._assert_async(ok, f"hf_cce: labels must lie in [0, {v}) or equal ignore_index={ignore_index}")
    elif not bool(ok):
        bad = labels[(labels != ignore_index) & ((labels < 0) | (labels >= v))]
        raise ValueError(
            f"labels must lie in [0, {v}) or equal ignore_index, but {bad.numel()} do not (the first is {int(bad[0])}); "
            "check the tokenizer against the size of lm_head, or set ignore_index"
        )


def survey(labels: Tensor, ignore_index: int, v: int, num_items: Tensor | None, divisor: float, module: Any) -> Tensor:
    """What a sum of losses is multiplied by, a scalar, by ``module_for``; fails on a label out of range."""
    ok, factor = module.survey_labels(labels, ignore_index, v, num_items, divisor)
    _require(ok, labels, ignore_index, v)
    return factor
