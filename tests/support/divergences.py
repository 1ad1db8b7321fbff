"""Reference divergences on full logits in plain PyTorch, and helpers to compare them with ``linear_divergence``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numerics import assert_all_accurate
from torch import Tensor

from hf_cce import CCEConfig, TeacherHead, TeacherTopK, linear_divergence
from hf_cce.divergence import Options, Target, divergences


@dataclass(frozen=True)
class Case:
    """One call. If the vocabulary sizes differ, the difference is padding."""

    kind: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    form: str = "head"  # of the teacher: head, logits, lump, renormalize; for the forward KL also p, log p
    masked: bool = False
    reduction: str = "mean"
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    vocab_sizes: tuple[int, int] = (131, 131)  # of student and teacher

    @property
    def options(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "beta": self.beta, "temperature": self.temperature, "reduction": self.reduction,
            "logit_scale": self.logit_scale, "softcap": self.softcap,
        }  # fmt: skip


KINDS = (Case(), Case("reverse_kl"), Case("jsd", beta=0.2))
EVERYTHING = {"bias": True, "logit_scale": 0.7, "softcap": 5.0, "temperature": 1.7, "masked": True}


@dataclass
class Inputs:
    hidden: Tensor  # [2, N/2, D]
    weight: Tensor
    bias: Tensor | None
    teacher_hidden: Tensor  # [2, N/2, D_t]
    teacher_weight: Tensor
    mask: Tensor | None
    upstream: Tensor  # for reduction="none"
    ruled_out: float | None = None  # the teacher's logit of every third entry

    def student(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x for x in (self.hidden, self.weight, self.bias) if x is not None]
        return [x.detach().to(dtype, copy=True).requires_grad_() for x in leaves]


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", n: int = 20, d: int = 72, dt: int = 40) -> Inputs:
    """Return inputs whose logits have standard deviation 2; a third of the tokens is masked, including whole blocks."""
    g = torch.Generator().manual_seed(n * 7919 + d * 31 + dt)
    (vs, vt), half = case.vocab_sizes, n // 2

    def random(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * by).to(device, dtype)

    mask = None
    if case.masked:
        mask = torch.rand(2, half, generator=g) > 0.3
        mask[1, half // 2 :] = False
        mask = mask.to(device)
    return Inputs(
        random(2, half, d), random(vs, d, by=2 * d**-0.5), random(vs) if case.bias else None, random(2, half, dt),
        random(vt, dt, by=2 * dt**-0.5), mask, torch.rand(2, half, generator=g).to(device),
    )  # fmt: skip


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ p (log p − log q). Entries with p = 0 do not contribute, unlike in ``F.kl_div``."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)


def token_divergences(log_ps: Tensor, log_pt: Tensor, case: Case) -> Tensor:
    if case.kind != "jsd":
        return kl(log_pt, log_ps) if case.kind == "forward_kl" else kl(log_ps, log_pt)
    b = case.beta
    log_m = torch.logaddexp(log_ps + math.log(1 - b), log_pt + math.log(b))
    return (1 - b) * kl(log_ps, log_m) + b * kl(log_pt, log_m)


def top_k(x: Inputs, case: Case) -> TeacherTopK:
    logits = (x.teacher_hidden.float() @ x.teacher_weight.float().t()) / case.temperature
    log_probs, ids = logits.log_softmax(-1).topk(5, dim=-1)
    return TeacherTopK(ids, log_probs, case.form)  # type: ignore[arg-type]


def plain_divergence(x: Inputs, leaves: Sequence[Tensor], case: Case) -> Tensor:
    """Compute full logits in the dtype of ``leaves``, as a model would, and the rest in float32 (float64 for float64)."""
    hidden, weight = leaves[:2]
    acc_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    z = (F.linear(hidden, weight, *leaves[2:]).to(acc_dtype)) * case.logit_scale
    if case.softcap:
        z = case.softcap * torch.tanh(z / case.softcap)
    z = z / case.temperature
    if case.form in ("head", "logits"):
        head = [t.to(hidden.dtype) for t in (x.teacher_hidden, x.teacher_weight)]
        zt = F.linear(*head) if case.form == "head" else teacher_logits(x)
        zt = zt.to(acc_dtype) / case.temperature
        v = min(case.vocab_sizes)
        losses = token_divergences(z[..., :v].log_softmax(-1), zt[..., :v].log_softmax(-1), case)
    elif case.form in ("p", "log p"):
        target, is_log = target_of(x, case)
        losses = F.kl_div(z.log_softmax(-1), target.to(acc_dtype), reduction="none", log_target=is_log).sum(-1)
    else:
        teacher = top_k(x, case)
        log_ps, log_pt = z.log_softmax(-1).gather(-1, teacher.ids), teacher.log_probs.to(acc_dtype)
        if case.form == "lump":
            log_ps, log_pt = (torch.cat((y, torch.log1p(-y.exp().sum(-1, keepdim=True))), -1) for y in (log_ps, log_pt))
        losses = token_divergences(log_ps.log_softmax(-1), log_pt.log_softmax(-1), case)
    mask = torch.ones_like(losses) if x.mask is None else x.mask.to(losses)
    losses = losses * mask
    if case.reduction == "none":
        return losses
    return losses.sum() / (mask.sum() if case.reduction == "mean" else 1)


def teacher_logits(x: Inputs) -> Tensor:
    z = F.linear(x.teacher_hidden, x.teacher_weight)
    return z if x.ruled_out is None else z.masked_fill(torch.arange(z.shape[-1]) % 3 == 0, x.ruled_out)


def target_of(x: Inputs, case: Case) -> Target:
    """Return probabilities, every seventh of which is 0, whose sums are about 2, or their logarithms. One token has none."""
    p = 2.0 * teacher_logits(x).softmax(-1) * (torch.arange(case.vocab_sizes[1], device=x.hidden.device) % 7 > 0)
    p[1, 2] = 0.0
    p = p.to(x.hidden.dtype)
    return Target(p.log() if case.form == "log p" else p, case.form == "log p")


def fused_divergence(x: Inputs, leaves: Sequence[Tensor], case: Case, config: CCEConfig | None = None) -> Tensor:
    teacher: Any
    if case.form in ("p", "log p"):
        student = TeacherHead(*leaves, *[None] * (3 - len(leaves)), case.logit_scale, case.softcap)  # type: ignore[arg-type]
        options = Options(0.0, case.temperature, case.reduction, summed=case.reduction != "none")  # type: ignore[arg-type]
        return divergences(student, target_of(x, case), options, x.mask, config)[0]
    if case.form == "head":
        teacher = TeacherHead(x.teacher_hidden, x.teacher_weight)
    else:
        teacher = teacher_logits(x) if case.form == "logits" else top_k(x, case)
    bias = leaves[2] if len(leaves) > 2 else None
    return linear_divergence(
        leaves[0], leaves[1], teacher, student_bias=bias, mask=x.mask, config=config, **case.options
    )


def outcome(x: Inputs, loss_of: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return ``loss_of(hidden, weight, [bias])`` with the student in ``dtype``, and its gradients."""
    leaves = x.student(dtype)
    loss = loss_of(*leaves)
    return [loss, *torch.autograd.grad(loss, leaves, x.upstream.to(loss.dtype) if loss.dim() else None)]


def check(
    case: Case, dtype: torch.dtype, config: CCEConfig | None = None, device: str = "cpu", x: Inputs | None = None
) -> None:
    """Check that loss and gradients, of ``x`` or of random inputs, are as close to float64 as full logits in ``dtype``."""
    x = make_inputs(case, dtype, device) if x is None else x
    exact, baseline = (outcome(x, lambda *leaves: plain_divergence(x, leaves, case), t) for t in (torch.float64, dtype))
    actual = outcome(x, lambda *leaves: fused_divergence(x, leaves, case, config), dtype)
    assert_all_accurate(actual, baseline, exact, str(case), dtype)
