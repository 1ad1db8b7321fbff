"""The reference loss on full logits in plain PyTorch, and helpers to compare it with the fused loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numerics import assert_accurate
from torch import Tensor

from hf_cce import CCEConfig, FilterState, linear_cross_entropy

SMALL_BUDGET = CCEConfig(memory_budget=1 << 20)  # small enough that every loop takes several iterations
Inputs = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Options:
    logit_scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    frozen: bool = False  # only the hidden states get a gradient
    ignore_index: int = -100


PLAIN = Options()
EVERYTHING = Options(0.7, 5.0, True, 0.1, 1e-2, "mean")
OPTIONS = (PLAIN, EVERYTHING, Options(bias=True, reduction="none"), Options(softcap=5.0, reduction="sum"))


def make_inputs(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: str = "cpu",
    bias: bool = False,
    ignored: str = "some",
    logit_std: float = 2.0,
) -> tuple[Inputs, Tensor]:
    """Return ((hidden_states [N, D], weight [V, D], bias [V] or None), labels [N])."""
    g = torch.Generator().manual_seed(n * 7919 + d * 31 + v)
    hidden = torch.randn(n, d, generator=g)
    weight = torch.randn(v, d, generator=g) * (logit_std / d**0.5)
    labels = torch.randint(v, (n,), generator=g)
    if ignored == "some":
        labels[::3] = -100
        labels[n // 2 : n // 2 + 40] = -100  # includes whole blocks of ignored tokens
        if n > 1:
            labels[-1] = v - 1
    elif ignored == "all":
        labels[:] = -100
    offsets = torch.randn(v, generator=g).to(device, dtype) if bias else None
    return (hidden.to(device, dtype), weight.to(device, dtype), offsets), labels.to(device)


def full_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    return scaled_and_capped(F.linear(hidden, weight, bias), options)


def scaled_and_capped(z: Tensor, options: Options) -> Tensor:
    z = z * options.logit_scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def plain_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
    return loss_of_logits(full_logits(hidden, weight, bias, options), labels, options)


def plain_loss_reversed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options
) -> Tensor:
    """Compute ``plain_loss`` from a logsumexp, with all sums in reverse order: shows the rounding error of float64."""
    valid, smoothing = labels != options.ignore_index, options.label_smoothing
    z = full_logits(hidden.flip(1), weight.flip(0, 1), None if bias is None else bias.flip(0), options)
    at_label = z.gather(1, (len(weight) - 1 - labels.where(valid, 0))[:, None])[:, 0]
    lse = z.logsumexp(-1)
    loss = (lse - (1 - smoothing) * at_label - smoothing * z.mean(-1) + options.z_loss * lse.square()) * valid
    return reduced(loss, valid, options)


def loss_of_logits(z: Tensor, labels: Tensor, options: Options) -> Tensor:
    z = z if z.dtype == torch.float64 else z.float()
    smoothing, ignored = options.label_smoothing, options.ignore_index
    loss = F.cross_entropy(z, labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
    valid = labels != ignored
    return reduced(loss + options.z_loss * z.logsumexp(-1).square() * valid, valid, options)


def reduced(loss: Tensor, valid: Tensor, options: Options) -> Tensor:
    if options.reduction == "mean":
        return loss.sum() / valid.sum().clamp(min=1)
    return loss.sum() if options.reduction == "sum" else loss


def fused_loss(config: CCEConfig | None = None, state: FilterState | None = None) -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, logit_scale=options.logit_scale, softcap=options.softcap,
            label_smoothing=options.label_smoothing, z_loss=options.z_loss, reduction=options.reduction,
            ignore_index=options.ignore_index, config=config, filter_state=state,
        )  # fmt: skip

    return loss


def fused_step(
    inputs: Inputs,
    labels: Tensor,
    gradient_filter: Any,
    options: Options = PLAIN,
    state: FilterState | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (loss, hidden gradient, weight gradient) of the kernels with that ``gradient_filter``; the bias is frozen."""
    hidden, weight = (x.detach().clone().requires_grad_(need) for x, need in zip(inputs, needs, strict=False))
    config = CCEConfig("triton", gradient_filter=gradient_filter)
    loss = fused_loss(config, state)(hidden, weight, inputs[2], labels, options)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def plain_step(
    inputs: Inputs, labels: Tensor, options: Options = PLAIN, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().to(dtype, copy=True).requires_grad_() for x in inputs[:2])
    loss = plain_loss(hidden, weight, None if inputs[2] is None else inputs[2].to(dtype), labels, options)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def loss_and_gradients(
    loss: Callable[..., Tensor], inputs: Inputs, labels: Tensor, options: Options, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return loss and gradients with every input in ``dtype``, with uneven upstream gradients for per-token losses.

    The loss scale of float16 training applies to every dtype: without it, float16 gradients underflow in both implementations.
    """
    leaves = [None if x is None else x.detach().to(dtype) for x in inputs]
    for x in leaves[: 1 if options.frozen else 3]:
        if x is not None:
            x.requires_grad_()
    result = loss(*leaves, labels, options)
    upstream = torch.linspace(0.5, 1.0, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)
    (result * upstream / max(1, result.numel())).sum().mul(4096.0).backward()
    found = {"loss": result.detach()}
    names = ("hidden", "weight", "bias")
    found.update({k: x.grad for k, x in zip(names, leaves, strict=True) if x is not None and x.requires_grad})
    return found


def check_against_plain(
    loss: Callable[..., Tensor],
    inputs: Inputs,
    labels: Tensor,
    options: Options,
    dtype: torch.dtype,
    what: str,
    then: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> None:
    """Check that ``then(loss)`` and its gradients in ``dtype`` are as accurate as with full logits in ``dtype``."""

    def run(loss: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return loss_and_gradients(lambda *arguments: then(loss(*arguments)), inputs, labels, options, dtype)

    exact, actual, baselines = run(plain_loss, torch.float64), run(loss, dtype), [run(plain_loss, dtype)]
    if dtype is torch.float64:
        baselines.append(run(plain_loss_reversed, dtype))
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert value.dtype == baselines[0][name].dtype
        assert_accurate(value, [each[name] for each in baselines], exact[name], f"{what}: {name}", dtype)
