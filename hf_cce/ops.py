"""The operators behind the loss, registered with torch.library: schema, implementation by device, fake tensors, autograd.

``hf_cce::logit_stats`` gives per-token statistics of logits that are never written, and any gradient of them;
``hf_cce::cross_entropy_sum`` gives the summed loss with its gradients formed in the same pass, which is the cheaper way where
the portable implementation computes in full precision. Both take two-dimensional, checked inputs: see ``hf_cce.loss``.
"""

from __future__ import annotations

import importlib.util
import os
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
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device.type == "cpu":
        # Triton's interpreter is for tests, thousands of times slower than PyTorch.
        return (
            None if _interpreted() else "the tensors are on the CPU (set TRITON_INTERPRET=1 to interpret the kernels)"
        )
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the kernels are for NVIDIA GPUs and the tensors are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> ModuleType:
    from hf_cce import kernels  # late: importing hf_cce must not import Triton

    return kernels


def _implementation(hidden: Tensor, implementation: str) -> Any:
    return portable if choose_implementation(hidden.device, hidden.dtype, implementation) == "portable" else _kernels()


def check_labels(labels: Tensor, ignore_index: int, v: int) -> None:
    """Every label is in [0, V) or ignored: on a CUDA device by a device-side assertion, elsewhere by ``ValueError``."""
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= v))
    if labels.is_cuda:
        torch._assert_async(~bad.any(), f"hf_cce: labels must lie in [0, {v}) or equal ignore_index={ignore_index}")
    elif bool(bad.any()):
        raise ValueError(
            f"labels must lie in [0, {v}) or equal ignore_index, but {int(bad.sum())} do not (the first is "
            f"{int(labels[bad][0])}); check the tokenizer against the size of lm_head, or set ignore_index"
        )


@torch.library.custom_op("hf_cce::logit_stats", mutates_args=())
def logit_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    want_mean: bool,
    want_entropy: bool,
    want_log_sum_sq: bool,
    want_top1: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lse, label_logit, mean_logit, entropy, log_sum_sq, is_top1), each [N], empty where not wanted. ``softcap`` 0 is none."""
    check_labels(labels, ignore_index, weight.shape[0])
    # Autocast is settled by the caller; inside, a cast of what is already an accumulator would lose it.
    with torch.autocast(hidden.device.type, enabled=False):
        return tuple(
            _implementation(hidden, implementation).logit_stats(
                hidden, weight, bias, labels, ignore_index, logit_scale, softcap,
                want_mean, want_entropy, want_log_sum_sq, want_top1, memory_budget,
            )
        )  # fmt: skip


@logit_stats.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    want_mean, want_entropy, want_log_sum_sq, want_top1 = others[6:10]
    n, wide = hidden.shape[0], portable.accumulation_dtype(hidden.dtype)

    def vector(wanted: bool = True, dtype: torch.dtype = wide) -> Tensor:
        return hidden.new_empty(n if wanted else 0, dtype=dtype)

    return (
        vector(),
        vector(),
        vector(want_mean),
        vector(want_entropy),
        vector(want_log_sum_sq),
        vector(want_top1, torch.bool if want_top1 else wide),
    )


@torch.library.custom_op("hf_cce::logit_stats_backward", mutates_args=())
def logit_stats_backward(
    grad_lse: Tensor,
    grad_label: Tensor,
    grad_mean: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of hidden [N, D], of weight [V, D], of bias [V]), each in its input's dtype, empty where not needed."""
    with torch.autocast(hidden.device.type, enabled=False):
        return tuple(
            _implementation(hidden, implementation).logit_stats_backward(
                grad_lse, grad_label, grad_mean, grad_entropy, hidden, weight, bias, labels, lse, entropy,
                ignore_index, logit_scale, softcap, need_hidden, need_weight, need_bias, memory_budget,
            )
        )  # fmt: skip


def _fake_gradients(
    hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        weight.new_empty(weight.shape[0] if need_bias else 0),
    )


@logit_stats_backward.register_fake
def _(
    g1: Tensor, g2: Tensor, g3: Tensor, g4: Tensor, hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return _fake_gradients(hidden, weight, *others[7:10])


def _save_stats(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, ignore_index, logit_scale, softcap, _, want_entropy = inputs[:9]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[4], output[5])
    ctx.save_for_backward(hidden, weight, bias, labels, output[0], output[3] if want_entropy else None)
    ctx.options = (ignore_index, logit_scale, softcap)
    ctx.memory_budget, ctx.implementation = inputs[-2], inputs[-1]


def _stats_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_lse = torch.zeros_like(lse) if grads[0] is None else grads[0].contiguous()
    grad_label = torch.zeros_like(lse) if grads[1] is None else grads[1].contiguous()
    dh, dw, db = torch.ops.hf_cce.logit_stats_backward(
        grad_lse, grad_label, grads[2], grads[3], hidden, weight, bias, labels, lse, entropy,
        *ctx.options, need_hidden, need_weight, need_bias, ctx.memory_budget, ctx.implementation,
    )  # fmt: skip
    return (dh if need_hidden else None, dw if need_weight else None, db if need_bias else None, *[None] * 10)


logit_stats.register_autograd(_stats_gradients, setup_context=_save_stats)


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> Any:
    raise RuntimeError(
        "the fused loss has no second derivative; compute it with full logits (remove_cce(model), or torch's own "
        "cross_entropy), or drop create_graph=True"
    )


logit_stats_backward.register_autograd(_refuse_second_derivative)


@torch.library.custom_op("hf_cce::cross_entropy_sum", mutates_args=())
def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: Tensor,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(factor · Σ loss, lse [N], gradients of hidden [N, D], weight [V, D] and bias [V], empty where not needed)."""
    check_labels(labels, ignore_index, weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return portable.cross_entropy_sum(
            hidden, weight, bias, labels, factor, ignore_index, logit_scale, softcap,
            label_smoothing, z_loss, need_hidden, need_weight, need_bias, memory_budget,
        )  # fmt: skip


@cross_entropy_sum.register_fake
def _(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wide = portable.accumulation_dtype(hidden.dtype)
    gradients = _fake_gradients(hidden, weight, *others[8:11])
    return hidden.new_empty((), dtype=wide), hidden.new_empty(hidden.shape[0], dtype=wide), *gradients


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, factor = inputs[:5]
    _, lse, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, labels, factor, lse)
    ctx.options, ctx.smoothing, ctx.z_loss, ctx.memory_budget = inputs[5:8], inputs[8], inputs[9], inputs[13]
    # Detached, since an output that knows its node and a node that holds the output would be a cycle.
    ctx.gradients = [x.detach() for x in gradients]


def _sum_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, labels, factor, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if grad is None:
        return (None,) * 14
    eager = type(grad) is Tensor and not torch.compiler.is_compiling()
    if not eager:
        gradients = [x * grad.to(x.dtype) for x in ctx.gradients]
    elif (
        ctx.gradients is not None and not torch.is_grad_enabled()
    ):  # enabled: create_graph=True, which the else branch refuses
        # Handed out once, scaled in place: a copy would hold the gradient of the weight twice. A second backward recomputes.
        gradients, ctx.gradients = ctx.gradients, None
        if float(grad) != 1.0:
            gradients = [x.mul_(grad.to(x.dtype)) for x in gradients]
    else:
        g = (grad * factor).to(lse.dtype).expand_as(lse)
        smoothing = ctx.smoothing
        gradients = torch.ops.hf_cce.logit_stats_backward(
            (g * (1 + 2 * ctx.z_loss * lse)).contiguous(), (g * (smoothing - 1)).contiguous(),
            (g * -smoothing).contiguous() if smoothing else None, None, hidden, weight, bias, labels, lse, None,
            *ctx.options, *needs, ctx.memory_budget, "portable",
        )  # fmt: skip
    return (*(x if need else None for x, need in zip(gradients, needs, strict=True)), *[None] * 11)


cross_entropy_sum.register_autograd(_sum_gradients, setup_context=_save_sum)
