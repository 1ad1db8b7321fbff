"""LazyLogits against the tensor they replace: equal values, gradients, shapes and errors for every operation."""

import copy
import functools
import io
import math
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB_SIZE, KeepFloat64, logits_made
from numerics import assert_accurate, assert_all_accurate, exponent_rounding
from torch import Tensor, nn
from torch.distributions import Categorical

from hf_cce.config import CCEConfig
from hf_cce.deferred import handlers, lazy_tensor, logit_statistics
from hf_cce.deferred.head_input import wrap_head_input
from hf_cce.deferred.lazy_tensor import LazyGrad
from hf_cce.deferred.logits import LazyLogits, lazy_logits
from hf_cce.deferred.recipe import Recipe
from hf_cce.deferred.training_call import TrainingCall
from hf_cce.quantized import FrozenWeight

B, S, D, V = 4, 9, 16, VOCAB_SIZE
MASK = torch.arange(B * S).view(B, S) % 3 != 1
TEACHER = torch.randn(B, S, V, generator=torch.Generator().manual_seed(7))
INDEX = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))
ROWS = torch.tensor([1, 0])
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, V)


def make_inputs(dtype: torch.dtype = torch.float32, bias: bool = True) -> list[Tensor]:
    """Return hidden states [B, S, D], a weight [V, D], and optionally a bias [V]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, D), (V, D), (V,))[: 2 + bias]
    return [(torch.randn(*shape, generator=generator) * 0.5).to(dtype).requires_grad_() for shape in shapes]


def labels(count: int = B * S) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, V, (count,), generator=generator)
    target[::4] = -100
    return target


def run_on_logits(
    use_logits: Callable[[Any], Any], dtype: torch.dtype, deferred: bool, bias: bool = True, labels: bool = True
) -> tuple[Any, list[Tensor], TrainingCall]:
    """Return (result of ``use_logits`` on real or deferred logits, gradients of its sum, the training call with its counters)."""
    inputs, call = make_inputs(dtype, bias), TrainingCall(CCEConfig(memory_budget=1 << 20), labels=labels)
    result = use_logits(lazy_logits(*inputs, call=call) if deferred else F.linear(*inputs))
    grads: list[Tensor] = []
    if isinstance(result, Tensor) and result.requires_grad:
        total = result.materialize() if isinstance(result, LazyLogits) else result
        grads = list(torch.autograd.grad(total.sum(), inputs, allow_unused=True))
    return result, grads, call


def run_in_float64(use_logits: Callable[[Any], Any], bias: bool = True) -> tuple[Any, list[Tensor]]:
    """Return the result and gradients in float64, also where the code asks for float32."""
    with KeepFloat64():
        return run_on_logits(use_logits, torch.float64, False, bias)[:2]


def flat_loss(logits: Any, **options: Any) -> Any:
    logits = logits.reshape(-1, logits.size(-1))
    return F.cross_entropy(logits, labels(logits.shape[0]), **options)


def _assign(logits: Any, key: Any, value: Any) -> None:
    logits[key] = value


def mask_entries(entries: Any, value: float | None = None) -> Callable[[Any], Any]:
    """Write the smallest number to these vocabulary entries at every token, as Chameleon does; then compute the loss."""

    def use_logits(logits: Any) -> Any:
        _assign(logits, (slice(None), slice(None), entries), torch.finfo(logits.dtype).min if value is None else value)
        return flat_loss(logits)

    return use_logits


def after_masking(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def use_logits(logits: Any) -> Any:
        _assign(logits, (..., UNUSED_IDS), torch.finfo(logits.dtype).min)
        return then(logits)

    return use_logits


UNUSED_IDS = [entry for entry in range(V) if entry not in labels().tolist()][:5]
USED_ID = int(labels()[1])

# Each takes logits [B, S, V] and returns a loss without materializing logits.
FUSED_LOSSES: dict[str, Callable[[Any], Any]] = {
    "plain": flat_loss,
    "sum": lambda x: flat_loss(x, reduction="sum"),
    "none": lambda x: flat_loss(x, reduction="none"),
    "ignore_index": lambda x: F.cross_entropy(x.view(-1, V), labels().clamp(min=0), ignore_index=0),
    "label_smoothing": lambda x: flat_loss(x, label_smoothing=0.2),
    "keywords": lambda x: F.cross_entropy(input=x.reshape(-1, V), target=labels()),
    "float": lambda x: flat_loss(x.float()),
    "cloned": lambda x: flat_loss(x.clone()),
    "scale": lambda x: flat_loss(x * 0.3),
    "scale from the left": lambda x: flat_loss(2 * x),
    "divided": lambda x: flat_loss(x / 3.0),
    "function calls": lambda x: flat_loss(torch.div(torch.mul(x, 4.0), 3.0)),
    "softcap": lambda x: flat_loss(torch.tanh(x / 5.0) * 5.0),
    "softcap by method": lambda x: flat_loss(5.0 * (x.float() / 5.0).tanh()),
    "cap of another size": lambda x: flat_loss(torch.tanh(x / 2.0) * 5.0),
    "scale, then softcap": lambda x: flat_loss(torch.tanh(x * 0.7 / 5.0) * 5.0),
    "softcap, then scale": lambda x: flat_loss(torch.tanh(x / 5.0) * 5.0 * 0.5),
    "tanh alone": lambda x: flat_loss(torch.tanh(x)),
    "shifted": lambda x: flat_loss(x[..., :-1, :].contiguous()),
    "sliced": lambda x: flat_loss(x[:, 2:5, :]),
    "one row": lambda x: flat_loss(x[1]),
    "new axis": lambda x: flat_loss(x[:, None, 1:, :]),
    "vocabulary slice": lambda x: F.cross_entropy(x[..., :50].reshape(-1, 50), labels().clamp(max=49)),
    "vocabulary slice, negative": lambda x: F.cross_entropy(x[:, :, :-1].flatten(0, 1), labels().clamp(max=V - 2)),
    "mask": lambda x: flat_loss(x[MASK]),
    "mask and vocabulary slice": lambda x: F.cross_entropy(x[MASK][:, 3:], labels(int(MASK.sum())).clamp(max=90)),
    "rows by index": lambda x: flat_loss(x[ROWS]),
    "pairs by index": lambda x: flat_loss(x[ROWS, ROWS + 2]),
    "flatten": lambda x: F.cross_entropy(torch.flatten(x, 0, 1), labels()),
    "class weights": lambda x: flat_loss(x, weight=CLASS_WEIGHTS.to(x.dtype)),
    "class weights, any index ignored": lambda x: F.cross_entropy(
        x.view(-1, V), labels().masked_fill(labels() < 0, 1000), CLASS_WEIGHTS.to(x.dtype), ignore_index=1000
    ),
    "class weights, none": lambda x: flat_loss(x * 0.5, weight=CLASS_WEIGHTS.to(x.dtype), reduction="none"),
    "classes first": lambda x: F.cross_entropy(x.transpose(1, 2), labels().view(B, S)),
    "classes first, permuted": lambda x: F.cross_entropy(
        (x / 2.0).permute(0, 2, 1).contiguous().float(), labels().view(B, S), reduction="none"
    ),
    "classes first, swapped": lambda x: F.cross_entropy(x.swapaxes(1, -1), labels().view(B, S)),
    "classes first, nll": lambda x: F.nll_loss(x.log_softmax(-1).transpose(1, 2), labels().view(B, S), reduction="none"),
    "rows by a list": lambda x: flat_loss(x[[1, 0, -1]]),
    "rows by a list and dots": lambda x: flat_loss(x[[1, 0], ...]),
    "classes first, mT": lambda x: F.cross_entropy(x.mT, labels().view(B, S)),
    "classes first, moved": lambda x: F.cross_entropy(x.movedim(-1, 1), labels().view(B, S)),
    "selected rows": lambda x: flat_loss(x.index_select(1, ROWS)),
    "narrowed": lambda x: flat_loss(x.narrow(1, -5, 4)),
    "selected row": lambda x: flat_loss(x.select(0, 1)),
    "of log-probabilities": lambda x: flat_loss(x.log_softmax(-1)),
    "nll of log_softmax": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), -1), labels()),
    "nll, class weights": lambda x: nn.NLLLoss(CLASS_WEIGHTS.to(x.dtype))(nn.LogSoftmax(-1)(x.view(-1, V)), labels()),
    "rows of a batch": lambda x: torch.stack([flat_loss(row) for row in x]),
    "split": lambda x: torch.cat([flat_loss(part, reduction="none") for part in x.flatten(0, 1).split([5, 31])]),
    "squeezed": lambda x: flat_loss(x.unsqueeze(1)[:, :, 1:].squeeze(1)),
    "shape as a tuple": lambda x: F.cross_entropy(x.reshape((-1, V)), labels()),
    "type_as": lambda x: flat_loss(x.type_as(torch.zeros(1))),
    "type": lambda x: flat_loss(x.type(torch.float32)),
    "to device": lambda x: flat_loss(x.to("cpu").to(device="cpu", dtype=torch.float32, non_blocking=True)),
    "added bias": lambda x: flat_loss(x + torch.linspace(-1, 1, V)[None]),
    "masked entries": mask_entries(UNUSED_IDS),
    "masked entries, a tensor": mask_entries(torch.tensor(UNUSED_IDS)),
    "masked entries, a slice": mask_entries(slice(UNUSED_IDS[0], UNUSED_IDS[0] + 1)),
    "masked entries, minus infinity": mask_entries(UNUSED_IDS, -math.inf),
    "masked entries, dots": after_masking(flat_loss),
    "masked entries, fewer tokens": after_masking(lambda x: flat_loss(x[:, 1:].contiguous())),
    "masked entries, twice": after_masking(mask_entries([UNUSED_IDS[0] - V, UNUSED_IDS[1]])),
    "masked entries, logsumexp": after_masking(lambda x: x.logsumexp(-1)),
    "logsumexp": lambda x: x.logsumexp(dim=-1).pow(2).mean(),
    "logsumexp, kept": lambda x: torch.logsumexp(x * 0.5, -1, keepdim=True),
    "loss and z-loss": lambda x: flat_loss(x.float()) + 0.1 * torch.logsumexp(x, dim=-1).square().mean(),
}  # fmt: skip


LOSS_COUNTS = {**{name: 0 for name in FUSED_LOSSES if "logsumexp" in name}, "rows of a batch": B, "split": 2}


def by_rows(x: Any, index: Tensor) -> Tensor:
    """Compute log-probabilities as TRL, OpenRLHF and others do."""
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1) - torch.stack([torch.logsumexp(row, dim=-1) for row in x])


def by_pieces(x: Any, size: int = 8) -> Tensor:
    """Compute TRL's entropy_from_logits."""
    found = []
    for part in x.reshape(-1, x.shape[-1]).split(size, dim=0):
        log_p = F.log_softmax(part, dim=-1)
        found.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(found).reshape(x.shape[:-1])


def smoothed(x: Any, index: Tensor) -> Tensor:
    """Compute Transformers' LabelSmoother loss."""
    log_p = -F.log_softmax(x, dim=-1)
    return 0.9 * log_p.gather(dim=-1, index=index.unsqueeze(-1)) + 0.1 / V * log_p.sum(
        dim=-1, keepdim=True, dtype=torch.float32
    )


RECORDED_CHANGES: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda x: x,
    "shifted": lambda x: x[:, :-1, :],
    "scaled": lambda x: x.float() * 0.3,
    "scaled in place": lambda x: operator.itruediv(x[:, 1:].mul_(0.7), 1.3),
    "capped": lambda x: torch.tanh(x / 5.0) * 5.0,
    "capped and shifted": lambda x: (torch.tanh(x / 5.0) * 5.0)[..., 1:, :].contiguous(),
    # A caller may write the results into float64 tensors, which reject float32
    "in float64": lambda x: x.double(),
}


def cut(x: Any, whole: Tensor) -> Tensor:
    return whole[:, : x.shape[1]]


def several(ids: Tensor) -> Tensor:
    return torch.stack([ids, V - 1 - ids, ids], -1)


# Common operations on the logits of calls without labels; none of them materializes logits.
FUSED_OPS: dict[str, Callable[[Any], Any]] = {
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, cut(x, INDEX).unsqueeze(-1)),
    "log-probabilities, along": lambda x: torch.take_along_dim(x.log_softmax(dim=-1), cut(x, INDEX).unsqueeze(-1), dim=2),
    "log-probabilities, along, from the end": lambda x: torch.take_along_dim(x.log_softmax(-1), cut(x, INDEX)[..., None] - V, -1),
    "log-probabilities, indexed": lambda x: x[0].log_softmax(-1)[torch.arange(x.shape[1]), cut(x, INDEX)[0]],
    "log-probabilities, indexed by broadcast": lambda x: x.log_softmax(-1)[
        torch.arange(B)[:, None], torch.arange(x.shape[1])[None], cut(x, INDEX)
    ],
    "log-probabilities, indexed by ranges": lambda x: x[:, 0].log_softmax(-1)[range(B), INDEX[:, 0] - V],
    "log-probabilities by rows": lambda x: by_rows(x, cut(x, INDEX)),
    "log-probabilities by temperature": lambda x: F.log_softmax(x / 0.7, -1, dtype=x.dtype).gather(2, cut(x, INDEX)[..., None]),
    "log-probabilities of several ids": lambda x: x.log_softmax(-1).gather(-1, several(cut(x, INDEX))).square(),
    "probabilities": lambda x: x.softmax(-1).gather(-1, cut(x, INDEX).unsqueeze(-1)).square(),
    "probabilities of several ids": lambda x: (x / 0.7).softmax(-1).gather(-1, several(cut(x, INDEX))).square(),
    "two parts": lambda x: x[:, :-1].logsumexp(-1) - x[:, 1:].logsumexp(-1),
    "logits of entries and a part, scaled": lambda x: (
        x.gather(-1, cut(x, INDEX)[..., None])[:, 1:, 0] - (x[:, 1:] / 1.3).logsumexp(-1)
    ),
    "logits of scaled entries and a part, scaled": lambda x: (
        (x / 1.3).gather(-1, cut(x, INDEX)[..., None])[:, 1:, 0] - (x[:, 1:] / 1.3).logsumexp(-1)
    ),
    "logits of entries": lambda x: x.gather(-1, several(cut(x, INDEX))).square(),
    "logits of two ids": lambda x: x[..., [5, -17]].square(),
    "logits of two ids at one position": lambda x: x[:, -1, torch.tensor([5, 17])].square(),
    "logits of two ids in one row": lambda x: x[0, :, [5, 17]].square() + x[0, -1][[17, 5]],
    "log-probabilities of two ids": lambda x: x.log_softmax(-1)[:, -1][:, [5, 17]].square(),
    "logits of selected ids": lambda x: x.index_select(-1, ROWS).square(),
    "sum": lambda x: x.sum() * x.sum(-1),
    "smoothed": lambda x: smoothed(x, cut(x, INDEX)),
    "mean log-probability": lambda x: x.log_softmax(-1).mean(-1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "entropy from the left": lambda x: torch.sum(x.log_softmax(-1) * -x.softmax(-1), dim=-1, keepdim=True),
    "entropy of the same logits, scaled twice": lambda x: ((x / 2.0).softmax(-1) * F.log_softmax(x / 2.0, -1)).sum(-1),
    "entropy of a part": lambda x: (lambda log_p: -(log_p.exp() * log_p).sum(-1))(x.log_softmax(-1)[:, 1:]),
    "entropy of a copied part": lambda x: (lambda log_p: -(log_p.exp() * log_p).sum(-1))(
        x.log_softmax(-1)[:, 1:].contiguous()
    ),
    "log-probabilities by subtraction": lambda x: (x - x.logsumexp(-1)[..., None]).gather(-1, cut(x, INDEX)[..., None]),
    "log-probabilities by subtraction under no_grad": lambda x: torch.no_grad()(
        lambda: x.sub(x.logsumexp(-1, keepdim=True)).gather(-1, cut(x, INDEX)[..., None])
    )(),
    "a distribution": lambda x: (lambda d: d.log_prob(cut(x, INDEX)) * 2 - d.entropy())(Categorical(logits=x)),
    "a distribution, twice": lambda x: (lambda d: d.log_prob(cut(x, INDEX)) + 2 * d.log_prob(V - 1 - cut(x, INDEX)))(
        Categorical(logits=x)
    ),
    "a distribution's probabilities": lambda x: Categorical(logits=x).probs.gather(-1, cut(x, INDEX)[..., None]),
    "a distribution's most likely": lambda x: Categorical(logits=x).mode,
    "a distribution's mean log-probability": lambda x: Categorical(logits=x).logits.mean(-1),
    "entropy of log-probabilities": lambda x: (lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1))(x.log_softmax(-1)),
    "entropy by logarithm": lambda x: (lambda p: (p * p.log()).sum(-1))(x.softmax(-1)),
    "entropy by pieces": by_pieces,
    "entropy by logsumexp": lambda x: torch.logsumexp(x, -1) - (F.softmax(x, -1) * x).sum(-1),
    "logsumexp after a write to its like": lambda x: (x.logsumexp(-1), x.detach().logsumexp(-1).zero_(), x.logsumexp(-1))[2],
    "entropy of all": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum() / 7,
    "entropy without gradient": lambda x: by_pieces(x.detach()),
    "entropy under no_grad": lambda x: torch.no_grad()(lambda: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1))(),
    "entropy by logsumexp under no_grad": lambda x: torch.no_grad()(
        lambda: torch.logsumexp(x, -1) - (F.softmax(x, -1) * x).sum(-1)
    )(),
    "log-probabilities and then, under no_grad, others": lambda x: x.log_softmax(-1).gather(-1, cut(x, INDEX)[..., None])
    + torch.no_grad()(lambda: x.log_softmax(-1).gather(-1, V - 1 - cut(x, INDEX)[..., None]))(),
    "logsumexp and then, detached, a sum": lambda x: x.logsumexp(-1) + x.detach().log_softmax(-1).sum(-1),
    "mean and new tensors": lambda x: x.mean() + x.new_tensor(2.0) + x.new_full(size=(3,), fill_value=1) * x.new_ones(()),
    "mean": lambda x: x.mean(),
    "mean of entries": lambda x: x[cut(x, MASK)].mean(-1).sum(),
    "without gradient": lambda x: x.detach().mean(),
    "most likely": lambda x: x.argmax(dim=-1),
    "most likely, kept": lambda x: x.argmax(-1, keepdim=True),
    "most likely at one position": lambda x: x[0, -1].argmax(-1),
    "most likely five": lambda x: x.detach().topk(5).indices,
    "most likely entry and its logit": lambda x: x.max(-1)[0].square(),
    "most likely three logits": lambda x: torch.topk(x, 3, dim=-1).values.square(),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), cut(x, TEACHER).softmax(-1), reduction="batchmean"),
    "divergence from one distribution": lambda x: F.kl_div(
        x.log_softmax(-1), CLASS_WEIGHTS.softmax(-1).expand(x.shape), reduction="sum"
    ),
    "divergence of each token": lambda x: F.kl_div(
        x.log_softmax(-1), cut(x, TEACHER).log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1).square(),
    "divergence from log-probabilities": lambda x: F.kl_div(
        x.log_softmax(-1), cut(x, TEACHER).log_softmax(-1), reduction="sum", log_target=True
    ),
    "divergence from unnormalized probabilities, some zero": lambda x: F.kl_div(
        x.log_softmax(-1), cut(x, TEACHER).relu() * cut(x, MASK)[..., None]
    ),
    "most likely of a part": lambda x: torch.chunk(x.detach(), 3)[0].argmax(-1),
    "parts": lambda x: torch.stack([part.mean() for part in x.chunk(3, dim=0)]),
    "parts of a sequence": lambda x: torch.stack([part.mean() for part in x.chunk(2, 1)]),
    "loss of a part": lambda x: F.cross_entropy(x.chunk(2)[1][cut(x, MASK)[2:]], cut(x, INDEX)[2:][cut(x, MASK)[2:]]),
    "two losses": lambda x: F.cross_entropy(x[:2].reshape(-1, V), cut(x, INDEX)[:2].flatten()) - by_rows(x, cut(x, INDEX)).mean(),
}  # fmt: skip
if torch.__version__ < (2, 9):  # take_along_dim refuses negative ids
    del FUSED_OPS["log-probabilities, along, from the end"]


def after_change(use_logits: Callable[[Any], Any], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda logits: use_logits(change(logits))


CASES = [
    *(pytest.param(name, use_logits, True, id=name) for name, use_logits in FUSED_LOSSES.items()),
    *(
        pytest.param(name, after_change(use_logits, change), False, id=f"{name}, {how}")
        for name, use_logits in FUSED_OPS.items()
        for how, change in RECORDED_CHANGES.items()
    ),
]


def by_position(z: Any) -> Tensor:
    z = z.flatten(0, 1)
    return (z[torch.arange(B * S), INDEX.flatten()] - z.logsumexp(-1)).view(B, S)


def verl_entropy(z: Any) -> Tensor:
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


NEARLY_CERTAIN: dict[str, Callable[[Any], Tensor]] = {
    "log_softmax": lambda z: z.log_softmax(-1).gather(-1, INDEX[..., None])[..., 0],
    "several ids": lambda z: z.log_softmax(-1).gather(-1, several(INDEX)[..., :2])[..., 0],
    "gather first": lambda z: (z.gather(-1, INDEX[..., None]) - z.logsumexp(-1, True))[..., 0],
    "logsumexp first": lambda z: -z.logsumexp(-1) + z.gather(-1, INDEX[..., None])[..., 0],
    "after the entropy": lambda z: (
        0 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1) + z.gather(-1, INDEX[..., None])[..., 0] - z.logsumexp(-1)
    ),
    "rows": lambda z: by_rows(z, INDEX),
    "blocks": lambda z: (
        z.gather(-1, INDEX[..., None])[..., 0]
        - torch.cat([block.logsumexp(-1) for block in z.reshape(-1, V).split(5)]).view(B, S)
    ),
    "rows, log_softmax": lambda z: torch.stack(
        [row.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in zip(z, INDEX, strict=True)]
    ),
    "rows, cross entropy": lambda z: torch.stack(
        [-F.cross_entropy(row, ids, reduction="none") for row, ids in zip(z, INDEX, strict=True)]
    ),
    "positions": by_position,
    "two views": lambda z: z[:, :].gather(-1, INDEX[..., None])[..., 0] - z[:, :].logsumexp(-1),
    "maximum": lambda z: z.max(-1).values - z.logsumexp(-1),
    "entropy": verl_entropy,
    "a distribution": lambda z: Categorical(logits=z).log_prob(INDEX),
    # The next three compute full logits
    "many ids": lambda z: z.gather(-1, several(INDEX).repeat(1, 1, 10))[..., 0] - z.logsumexp(-1),
    "logsumexp, then the maximum": lambda z: -z.logsumexp(-1) + z.amax(-1),
    "logsumexp of a token": lambda z: torch.stack(
        [(x.amax(-1) - x.logsumexp(-1)) for x in z.flatten(0, 1).unbind()]
    ).view(B, S),
    "log-probabilities and entropy": lambda z: by_rows(z, INDEX) - 0.1 * verl_entropy(z),
    "entropy and log-probabilities": lambda z: -0.1 * verl_entropy(z) + by_rows(z, INDEX),
    "twice": lambda z: by_rows(z, INDEX) - 0.5 * by_position(z),
    "and probabilities": lambda z: by_rows(z, INDEX) + 0.5 * (z.softmax(-1).gather(-1, INDEX[..., None])[..., 0] - 1),
    "rows, log_softmax, and again": lambda z: by_rows(z, INDEX) + 0.5 * torch.cat(rows(log_prob, z), -1).t(),
    "and other logits": lambda z: by_rows(z, INDEX) - 0 * z.gather(-1, V - 1 - INDEX[..., None])[..., 0],
    "and others": lambda z: by_rows(z, INDEX) - 0 * z.log_softmax(-1).gather(-1, V - 1 - INDEX[..., None])[..., 0],
    "and the entropy of the same": lambda z: (
        by_rows(z, INDEX) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1) - 0.1 * verl_entropy(z)
    ),
    "rows, log_softmax, and the entropy": lambda z: (
        torch.stack([row.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in zip(z, INDEX, strict=True)])
        - 0.1 * verl_entropy(z)
    ),
}


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("name", NEARLY_CERTAIN)
def test_statistics_of_nearly_certain_tokens_in_bfloat16(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding logits and the logsumexp, or their gradients, each by itself would exceed their difference."""
    monkeypatch.setattr(lazy_tensor, "DENSE_GRAD_BYTES", 4 * 20 * V)  # dense gradients are computed in several parts

    def run(seed: int, dtype: torch.dtype, head: Any) -> list[Any]:
        weight = torch.randn(V, 64, generator=torch.Generator().manual_seed(seed)) / 8
        chosen = weight[INDEX]
        hidden = 16 / scale * chosen / chosen.square().sum(-1, keepdim=True)
        double = dtype is torch.float64
        leaves = [(x.double() if double else x).requires_grad_() for x in (hidden.bfloat16(), weight.bfloat16())]
        log_probs = NEARLY_CERTAIN[name](head(*leaves).to(dtype) * scale)
        log_probs.backward(torch.linspace(0.5, 1.5, B * S, dtype=dtype).view(B, S))
        return [log_probs, *(x.grad for x in leaves)]

    seeds, float32 = range(8), torch.float32
    cases = (torch.float64, F.linear), (float32, F.linear), (float32, lazy_logits)
    runs = ([run(seed, *case) for seed in seeds] for case in cases)
    exact, plain, found = ([torch.stack(x) for x in zip(*each, strict=True)] for each in runs)
    assert 0 < exact[0].abs().mean() < 0.1
    if name.startswith("rows, "):  # a logit less a logsumexp in float32, where log_softmax first subtracts the maximum
        assert (found[0] - plain[0]).abs().max() < exponent_rounding(16)
        found[0] = plain[0]
    assert_all_accurate(found, plain, exact, name, torch.bfloat16)


@pytest.mark.parametrize("reverse", [False, True])
def test_divergence_of_similar_distributions_in_bfloat16(reverse: bool) -> None:
    """As in DistiLLM: the gradients of its two terms nearly cancel, so they are added in float32."""

    def run(dtype: torch.dtype, head: Any) -> list[Any]:
        inputs = make_inputs(torch.bfloat16)
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        z, wide = head(*leaves), torch.promote_types(dtype, torch.float32)
        p, log_p = z.softmax(-1, dtype=wide), z.log_softmax(-1, dtype=wide)
        log_q = (1.1 * F.linear(*(x.detach().to(wide) for x in inputs))).log_softmax(-1)
        divergence = -(p * log_q - p * log_p) if reverse else p * log_p - p * log_q
        divergence.sum(-1).mean().backward()
        return [divergence.sum(-1), *(x.grad for x in leaves)]

    exact, plain = run(torch.float64, F.linear), run(torch.bfloat16, F.linear)
    assert_all_accurate(run(torch.bfloat16, lazy_logits), plain, exact, "divergence", torch.bfloat16)


@pytest.mark.parametrize("part", [lambda z: z[:, 1:], lambda z: z[:, :-1].contiguous(), lambda z: z[:, ::2].float()])
def test_full_logits_of_a_part_with_a_bias_in_bfloat16(part: Callable[[Any], Any]) -> None:
    """Not rounded before the bias is added, as torch does in a product with a slice of the hidden states."""
    inputs = make_inputs(torch.bfloat16)
    assert torch.equal(part(lazy_logits(*inputs)).materialize(), part(F.linear(*inputs)))


def rows(function: Callable[[Any, Tensor], Tensor], z: Any, ids: Tensor = INDEX) -> list[Tensor]:
    return [function(row, each) for row, each in zip(z, ids.to(z[0].device), strict=True)]


def log_prob(row: Any, ids: Tensor) -> Tensor:
    return row.log_softmax(-1).gather(-1, ids[:, None].to(row.device))


def class_weighted(row: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(row, ids, torch.linspace(0, 1, V, dtype=row.dtype, device=row.device))


def minus_entropy(row: Any, ids: Tensor) -> Tensor:
    log_p = row.log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1)


def another_bias(z: Any) -> list[Tensor]:
    """Adding a bias changes the logits, although the hidden states stay the same."""
    biased = z.flatten(0, 1) + torch.linspace(0, 5, V, dtype=z.dtype, device=z.device)
    return [z.gather(-1, INDEX[..., None].to(z.device)).flatten() - biased.logsumexp(-1)]


# Loops over parts of the logits, and the number of passes over all tokens, rounded up
LOOPS: dict[str, tuple[Callable[[Any], list[Tensor]], int]] = {
    "log-probabilities": (lambda z: rows(log_prob, z), 1),
    "temperature": (lambda z: rows(lambda row, ids: log_prob(row / 0.7, ids), z), 1),
    "cross entropy": (lambda z: rows(F.cross_entropy, z, INDEX.masked_fill(INDEX > V // 2, -100)), 1),
    "class weights": (lambda z: rows(class_weighted, z), 1),
    "two loops": (lambda z: rows(log_prob, z) + rows(log_prob, z, V - 1 - INDEX), 2),
    "two results of each row": (
        lambda z: rows(lambda row, ids: log_prob(row, ids) - log_prob(row, V - 1 - ids), z), 2,
    ),
    "label smoothing of each row": (
        lambda z: rows(lambda row, ids: 9 * log_prob(row, ids)[:, 0] + row.log_softmax(-1).mean(-1), z), 1,
    ),
    "a temperature of each row": (
        lambda z: [log_prob(row / (1 + i / 10), ids) for i, (row, ids) in enumerate(zip(z, INDEX, strict=True))], 2,
    ),
    "log_softmax of all": (lambda z: rows(lambda row, ids: row.gather(-1, ids[:, None]), z.log_softmax(-1)), 1),
    "logsumexp": (lambda z: rows(lambda row, _: row.logsumexp(-1), z), 1),
    "chunks": (lambda z: rows(F.cross_entropy, z.flatten(0, 1).chunk(2), INDEX.flatten().view(2, -1)), 1),
    "entropy": (lambda z: rows(minus_entropy, z), 1),
    "log-probabilities and entropy": (
        lambda z: rows(lambda row, ids: log_prob(row, ids)[:, 0] + minus_entropy(row, ids), z), 2,
    ),
    "log-probabilities, entropy and logsumexp": (
        lambda z: [*rows(log_prob, z), *rows(minus_entropy, z), *rows(lambda row, _: row.logsumexp(-1), z)], 2,
    ),
    "log-probabilities, the largest logits and the entropy": (
        lambda z: [*rows(log_prob, z), z.max(-1).values, verl_entropy(z)], 2,
    ),
    "log-probabilities and entropy, then the largest logits": (
        lambda z: [
            *rows(lambda row, ids: log_prob(row, ids)[:, 0] + minus_entropy(row, ids), z), z.max(-1).values,
        ], 2,
    ),
    "two splits": (
        lambda z: [
            log_prob(z.flatten(0, 1).chunk(2)[0], INDEX.flatten()[: 2 * S]),
            log_prob(z.flatten(0, 1).split(S)[1], V - 1 - INDEX[1]),
        ], 2,
    ),
    "logsumexp, then single logits": (lambda z: [z.logsumexp(-1), z.gather(-1, INDEX[..., None].to(z.device))], 1),
    "one row": (lambda z: [log_prob(next(iter(z)), INDEX[0])], 1),
    "another_bias": (another_bias, 1),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["portable", "triton"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_parts_of_the_logits(name: str, implementation: Any, device: str, spy: Any) -> None:
    """The gradients of all parts are computed in one pass."""
    passes, (loop, count) = spy(logit_statistics, "linear_log_probs"), LOOPS[name]
    hidden, weight = torch.randn(B, S, 8), torch.randn(V, 8)
    fused_head = functools.partial(lazy_logits, call=TrainingCall(CCEConfig(implementation=implementation)))
    results = []
    for dtype, head in ((torch.float64, F.linear), (torch.float32, F.linear), (torch.float32, fused_head)):
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        found = [x.cpu() for x in loop(head(*leaves))]
        torch.cat([x.flatten() for x in found]).cos().sum().backward()
        results.append([*found, *(x.grad.cpu() for x in leaves if x.grad is not None)])
    exact, plain, fused = results
    assert_all_accurate(fused, plain, exact)
    assert -(-sum(call.options["labels"].numel() for call in passes) // (B * S)) == count


IDS_OF_MANY_TOKENS = torch.tensor([5, 7]).expand(4096, 2)
SUMS: dict[str, Callable[[Any], Tensor]] = {
    # Each slice has a pass of its own, even if the results of an earlier one were freed and their id was given again
    "many passes": lambda z: torch.stack([z[8 * i : 8 * i + 128].logsumexp(-1).mean() for i in range(512)]).mean(),
    "logits of an id": lambda z: z.gather(-1, IDS_OF_MANY_TOKENS).mean(),
    "log-probabilities of an id": lambda z: z.log_softmax(-1).gather(-1, IDS_OF_MANY_TOKENS).mean(),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_many_tokens_are_summed_in_float32(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = 1 + torch.rand(4096, 16, generator=generator), torch.randn(V, 16, generator=generator)

    def gradients(dtype: torch.dtype, head: Any) -> tuple[Tensor, ...]:
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight)]
        return torch.autograd.grad(SUMS[name](head(*leaves)), leaves)

    exact, plain = gradients(torch.float64, F.linear), gradients(torch.bfloat16, F.linear)
    for budget in (1 << 20, 1 << 30):
        head = functools.partial(lazy_logits, call=TrainingCall(CCEConfig(memory_budget=budget)))
        assert_all_accurate(gradients(torch.bfloat16, head), plain, exact)


def test_divergence_with_a_quantized_head_gets_full_logits() -> None:
    """``linear_divergence`` would give the kernels the address of a weight without memory."""
    hidden, weight, _ = make_inputs()
    frozen = FrozenWeight.of(
        lambda start, stop, dtype: weight[start:stop].detach().to(dtype),
        None,
        weight.shape,
        weight.dtype,
        weight.device,
    )
    call = TrainingCall(CCEConfig(), labels=False)
    losses = [
        F.kl_div(logits.log_softmax(-1), TEACHER.softmax(-1), reduction="sum")
        for logits in (lazy_logits(hidden, frozen, None, call=call), F.linear(hidden, weight))
    ]
    assert torch.equal(*losses) and call.stats.materialized == 1


def test_divergence_of_few_tokens_on_a_gpu_uses_torch_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "has_few_tokens", lambda *args: True)
    divergence = FUSED_OPS["divergence of each token"]
    (ours, grads, call), (theirs, expected, _) = (
        run_on_logits(divergence, torch.float32, deferred) for deferred in (True, False)
    )
    assert torch.equal(ours, theirs) and all(map(torch.equal, grads, expected)) and call.stats.materialized == 0


def test_part_of_the_vocabulary_of_a_freed_head_needs_full_logits() -> None:
    """FSDP2 frees the head's weight after its forward. The call gathers a weight, but could not gather a part of it."""
    hidden_states, weight, bias = make_inputs()
    logits = lazy_logits(hidden_states, weight, bias)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="FSDP has freed the LM head's weight"):
        logits[..., :5]


def test_target_of_a_divergence_must_not_change_before_the_sum() -> None:
    target = TEACHER.softmax(-1)
    terms: Any = F.kl_div(lazy_logits(*make_inputs()).log_softmax(-1), target, reduction="none")
    target.mul_(0.5)
    for use in (terms.sum, terms.square):
        with pytest.raises(RuntimeError, match="modified in place"):
            use()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("name", "use_logits", "with_labels"), CASES)
def test_computed_without_logits(name: str, use_logits: Callable[[Any], Any], with_labels: bool, bias: bool) -> None:
    exact, twin = run_in_float64(use_logits, bias), run_on_logits(use_logits, torch.float32, False, bias)
    with logits_made(B * S) as seen:
        actual = run_on_logits(use_logits, torch.float32, True, bias, with_labels)
    assert actual[2].stats.materialized == 0
    # Most likely entries: from the logits of a few tokens at a time; here all fit. Divergences: the target is as large.
    assert seen == [] or "most likely" in name or "divergence" in name
    assert not with_labels or actual[2].fused == LOSS_COUNTS.get(name, 1)
    assert actual[0].dtype is twin[0].dtype
    if not exact[0].is_floating_point():
        assert torch.equal(actual[0], twin[0])
        return
    assert_accurate(actual[0], twin[0], exact[0], name, torch.float32)
    assert_all_accurate(actual[1], twin[1], exact[1], f"{name}: gradient")


def written(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def use_logits(logits: Any) -> Any:
        write(logits)
        return flat_loss(logits.float())

    return use_logits


def doubled(x: Any) -> Any:
    x.register_hook(lambda grad: 2 * grad)
    return x


# Each needs the logits, and the result must equal torch's bit for bit.
MATERIALIZED_OPS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda x: flat_loss(x.sub_(5.0).mul_(2.0)),
    "divided in place by a tensor": lambda x: flat_loss(x.div_(torch.tensor(5.0))),
    "divided in place after a result": written(lambda x: (x.logsumexp(-1), x.div_(5.0))),
    "smoothed class weights": lambda x: flat_loss(x, weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "loss of scaled log-probabilities": lambda x: flat_loss(x.log_softmax(-1) / 2.0),
    "log-probabilities, bounded": lambda x: x.log_softmax(-1).clamp(min=-9.0),
    "log-probabilities, bounded above": lambda x: x.log_softmax(-1).clamp(torch.finfo(x.dtype).min, -1.0).sum(-1),
    "log-probabilities without minus infinity": lambda x: x.log_softmax(-1).clamp(torch.finfo(x.dtype).min).sum(-1),
    "equal log-probabilities": lambda x: x.log_softmax(-1) == x.log_softmax(-1),
    "nll of logits": lambda x: F.nll_loss(x.view(-1, V), labels()),
    "vocabulary slice of a distribution": lambda x: x.softmax(-1)[..., 3:20],
    "softmax over tokens": lambda x: x.softmax(1),
    "product with a detached tensor": lambda x: (x.softmax(-1).detach() * x.log_softmax(-1)).sum(-1),
    "log-probabilities times the softmax of a leaf": lambda x: (
        x.detach().requires_grad_().softmax(-1) * x.log_softmax(-1)
    ).sum(-1),
    "product with softmax of detached logits": lambda x: ((x.detach() / 2.0).softmax(-1) * (x / 2.0).log_softmax(-1)).sum(-1),
    "product with softmax of hooked logits": lambda x: (doubled(x / 2.0).softmax(-1) * (x / 2.0).log_softmax(-1)).sum(-1),
    "product with softmax of other logits": lambda x: ((x / 2.0).softmax(-1) * x.log_softmax(-1)).sum(-1),
    "classes first, scaled": lambda x: F.cross_entropy(x.permute(0, 2, 1) / 2.0, labels().view(B, S), reduction="none"),
    "classes first, nll": lambda x: F.nll_loss(x.transpose(-2, -1).log_softmax(1), labels().view(B, S), reduction="sum"),
    "smallest entries": lambda x: x.topk(3, largest=False).values,
    "many entries": lambda x: x.topk(70).values,
    "tokens first": lambda x: x.transpose(0, 1).contiguous(),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * S, V), 1 / V)),
    "divergence of each entry": lambda x: F.kl_div(x.log_softmax(-1), TEACHER.softmax(-1), reduction="none"),
    "divergence of some entries": lambda x: F.kl_div(x.log_softmax(-1), TEACHER.softmax(-1), reduction="none")[1].sum(-1),
    "divergence of negative logits": lambda x: F.kl_div((-x).log_softmax(-1), TEACHER.softmax(-1), reduction="sum"),
    "divergence of two": lambda x: 2.0 * F.kl_div(x.log_softmax(-1), TEACHER.softmax(-1), reduction="none").sum(1),
    "divergence from a student": lambda x: F.kl_div(
        x.log_softmax(-1), TEACHER.softmax(-1).requires_grad_(), reduction="sum"
    ),
    "one token": lambda x: F.cross_entropy(x[0, 1], torch.tensor(5)),
    "two tanh": lambda x: flat_loss(torch.tanh(torch.tanh(x))),
    "negative scale": lambda x: flat_loss(-1.0 * x),
    "zero scale": lambda x: flat_loss(x * 0.0),
    "scale by a tensor": lambda x: flat_loss(x * torch.tensor(0.5)),
    "rounded division": lambda x: torch.div(x, 2.0, rounding_mode="floor").sum(),
    "bias after scale": lambda x: flat_loss(x * 2.0 + CLASS_WEIGHTS),
    "adapter": lambda x: flat_loss(x + torch.ones(B, S, V)),
    "adapter from the left": lambda x: flat_loss(torch.ones(B, S, V) + x),
    "negated": lambda x: (-x).sum(),
    "matmul": lambda x: (x @ torch.ones(V, 3)).sum(),
    "concatenated": lambda x: flat_loss(torch.cat([x, x], dim=0)),
    "where": lambda x: torch.where(MASK[..., None], x, 0.0),
    "every second entry": lambda x: x[..., ::2],
    "entries by index": lambda x: x[:, :, ROWS[None]],
    "seventeen entries": lambda x: x[..., list(range(17))],
    "entries of some rows": lambda x: x[ROWS, :, ROWS],
    "list of rows and entries": lambda x: x[[0, 1], :, [2, 3]],
    "one entry": lambda x: x[..., 3],
    "list of booleans": lambda x: x[[True, False, False, True]],
    "mask of everything": lambda x: x[torch.ones(B, S, V, dtype=torch.bool)],
    "wrong view": lambda x: x.view(-1, 3),
    "logsumexp over tokens": lambda x: x.logsumexp(dim=1),
    "softmax": lambda x: x.softmax(-1),
    "item": lambda x: x.std().item(),
    "tolist": lambda x: x.tolist(),
    "transposed property": lambda x: x.mT,
    "numpy": lambda x: x.detach().numpy(),
    "equal": lambda x: x == x,
    "integers": lambda x: x.to(torch.int32),
    "eight bits": lambda x: flat_loss(x.to(torch.float8_e4m3fn).float()),
    "dtype view": lambda x: x.view(torch.int32),
    "a masked label": mask_entries([USED_ID, *UNUSED_IDS]),
    "masked entries, smoothed": after_masking(lambda x: flat_loss(x, label_smoothing=0.1)),
    "masked entries, a small number": mask_entries(UNUSED_IDS, -1e4),
    "masked entries, some tokens": written(lambda x: _assign(x, (slice(None), slice(1, None), UNUSED_IDS), -math.inf)),
    "masked entries, values": written(lambda x: _assign(x, (..., UNUSED_IDS), x.new_zeros(5))),
    "masked entries, then scaled": after_masking(lambda x: flat_loss(x * 0.5)),
    "masked entries, then capped": after_masking(lambda x: flat_loss(torch.tanh(x / 5.0) * 5.0)),
    "masked entries, then vocabulary slice": after_masking(lambda x: x[..., 3:]),
    "masked entries, read": after_masking(lambda x: x.softmax(-1).square()),
    "capped, then masked entries": lambda x: mask_entries(UNUSED_IDS)(torch.tanh(x / 5.0) * 5.0),
    "read several times": lambda x: (
        x.argmax(-1), x.softmax(-1).square() + getattr(x, "materialize", lambda: x)()
    )[1],
    "read, then masked entries": lambda x: (x.topk(70), mask_entries(UNUSED_IDS)(x))[1],
    "masked tokens": written(lambda x: _assign(x, 0, torch.finfo(x.dtype).min)),
    "added in place, operator": written(lambda x: x.__iadd__(CLASS_WEIGHTS)),
    "divided in place after a write": written(lambda x: x.add_(1.0).div_(3.0)),
    "written through an alias": written(lambda x: _assign(x.data, MASK, 0.25)),
    "written through a transposed view": written(lambda x: x.transpose(0, 1).mul_(0.5)),
    "new shape in place": lambda x: flat_loss(x.unsqueeze_(0)[0]),
    "new shape in place, then read": lambda x: (x.transpose_(1, 2), x.reshape(x.shape[0] * x.shape[1], -1))[1],
    "new dimension in place, then read": lambda x: (x.unsqueeze_(0), x.sum(x.ndim - 2))[1],
    "array of a dtype": lambda x: torch.from_numpy(np.asarray(x.detach(), dtype=np.float64)),
    "sliced after a write": lambda x: flat_loss(x.add_(CLASS_WEIGHTS)[:, 1:]),
    "several ids by index": lambda x: x.flatten(0, 1)[torch.arange(B * S)[:, None], several(INDEX.flatten())],
    "no ids by index": lambda x: x[:0, 0][torch.arange(0)[:, None], INDEX[:0, :2]],
    "many ids of each": lambda x: x.gather(-1, torch.arange(V).repeat(2)[:129].expand(B, S, -1)),
    "mean of tokens": lambda x: x.mean(1),
    "mean, kept": lambda x: x.mean(-1, keepdim=True),
    "parts of the vocabulary": lambda x: x.chunk(3, -1)[1],
    "most likely of all": lambda x: x.argmax(),
    "log-probabilities of a negative scale": lambda x: F.log_softmax(-x, -1).gather(-1, INDEX.unsqueeze(-1)),
    "a part after a write": lambda x: x.add_(1.0).chunk(2)[0],
    "without gradient after a write": lambda x: x.add_(1.0).detach(),
}  # fmt: skip


FLOAT32_ONLY = {
    "matmul",
    "numpy",
    "array of a dtype",
    "dtype view",
    "probabilities",
    "divergence",
    "smoothed class weights",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATERIALIZED_OPS)
def test_other_operations_materialize(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name in FLOAT32_ONLY:
        pytest.skip("torch itself refuses mixed dtypes here")
    expected, expected_grads, _ = run_on_logits(MATERIALIZED_OPS[name], dtype, False)
    actual, grads, call = run_on_logits(MATERIALIZED_OPS[name], dtype, True)
    assert call.stats.materialized == len(call.reasons) == 1 + name.startswith("product with")
    assert call.fused == 0
    assert type(actual) is type(expected) or isinstance(actual, LazyLogits)
    if isinstance(expected, (float, list)):
        assert actual == expected
        return
    assert_all_accurate(grads, expected_grads, expected_grads, name)  # products of one token differ by rounding
    if name == "one token":
        assert_accurate(actual, expected, expected, name)
    else:
        assert torch.equal(torch.as_tensor(actual), torch.as_tensor(expected))


# Not log_softmax, although a logsumexp is subtracted
OTHER_DIFFERENCES: dict[str, Callable[[Any], Any]] = {
    "less the logsumexp of others": lambda x: (x - (x / 2.0).logsumexp(-1, keepdim=True)).square(),
    "less the logsumexp, detached": lambda x: (x - x.logsumexp(-1, keepdim=True).detach()).square(),
    "less the logsumexp as a leaf": lambda x: (x - x.logsumexp(-1, keepdim=True).detach().requires_grad_()).square(),
    "less the logsumexp with a hook": lambda x: (x - doubled(x.logsumexp(-1))[..., None]).square(),
    "detached, less the logsumexp": lambda x: (x.detach() - x.logsumexp(-1, keepdim=True)).square(),
    "less the logsumexp of other tokens": lambda x: x[:, 1:] - x.logsumexp(-1, keepdim=True)[:, :-1],
    "less the logsumexp under no_grad": lambda x: x - torch.no_grad()(lambda: x.logsumexp(-1, keepdim=True))(),
    "less a changed logsumexp": torch.no_grad()(lambda x: x - x.logsumexp(-1, keepdim=True).add_(1.0)),
    "a distribution of three rows": lambda x: Categorical(logits=x[:3]).expand((2, 3, S)).log_prob(INDEX[:3]),
}


@pytest.mark.parametrize("name", OTHER_DIFFERENCES)
def test_differences_that_need_full_logits(name: str) -> None:
    use_logits = OTHER_DIFFERENCES[name]
    actual, grads, call = run_on_logits(use_logits, torch.float32, True)
    assert call.stats.materialized > 0
    expected, exact = run_on_logits(use_logits, torch.float32, False), run_in_float64(use_logits)
    assert_accurate(actual, expected[0], exact[0], name)
    assert_all_accurate(grads, expected[1], exact[1], f"{name}: gradient")


def test_distributions_reject_nan() -> None:
    hidden, weight = make_inputs(bias=False)
    hidden = hidden.detach().index_fill(0, torch.tensor(1), math.nan).requires_grad_()
    for head in (F.linear, lazy_logits):
        with pytest.raises(ValueError, match="invalid values"):
            Categorical(logits=head(hidden, weight), validate_args=True)  # the default, unless Dynamo has changed it


RECORDED_OPS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "scale": lambda x: x * 0.3 / 1.7,
    "softcap": lambda x: torch.tanh(x / 5.0) * 5.0,
    "softcap by method": lambda x: (x.float() / 5.0).tanh().to(torch.bfloat16) * 5,
    "vocabulary slice": lambda x: x[:, 1:, 3:50],
    "mask": lambda x: x[MASK].double(),
    "added bias": lambda x: x + torch.linspace(-1, 1, V).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECORDED_OPS)
def test_materialize_matches_forward(name: str, dtype: torch.dtype) -> None:
    """Same dtype, same rounding at every recorded step, and torch's gradients."""
    use_logits = RECORDED_OPS[name]
    expected, expected_grads, _ = run_on_logits(use_logits, dtype, False)
    actual, grads, _ = run_on_logits(use_logits, dtype, True)
    assert isinstance(actual, LazyLogits)
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
    # Slices are multiplied as slices; another shape may sum in another order, which changes only the rounding.
    exact = run_on_logits(use_logits, torch.float64, False)
    assert_accurate(actual.materialize(), expected, exact[0], name, dtype)
    assert_all_accurate(grads, expected_grads, exact[1], name, dtype)


ATTRIBUTES = "shape ndim dtype device requires_grad is_cuda is_leaf layout"
METHODS = "size dim numel is_floating_point is_contiguous __len__"
METADATA: list[Callable[[Any], Any]] = [
    *map(operator.attrgetter, ATTRIBUTES.split()),
    *map(operator.methodcaller, METHODS.split()),
    lambda x: x.size(-1),
    lambda x: hasattr(x, "no_such_thing"),
    lambda x: [x.float().dtype, x.half().dtype, x.double().dtype, x.bfloat16().dtype],
    lambda x: x[:, 2].shape,
    lambda x: [f(x, -1, torch.float64).dtype for f in (torch.softmax, torch.log_softmax)],
    lambda x: [x.log_softmax(-1, torch.float64).dtype, F.softmax(x, -1).dtype],
    # If they are the same tensor, a hook on one fires for a loss of the other
    lambda x: [same is x for same in (x.float(), x.to(x.device), x.contiguous())],
    lambda x: (lambda part: part.contiguous() is part)(x[:, 1:]),
    lambda x: bool({x: 1}),
    lambda x: torch.is_tensor(x),
    lambda x: [x.grad_fn is None, x.float().grad_fn is None, x.detach().requires_grad],
]


def test_metadata_without_materializing() -> None:
    for position, use_logits in enumerate(METADATA):
        expected = run_on_logits(use_logits, torch.float32, False)[0]
        actual, _, call = run_on_logits(use_logits, torch.float32, True)
        assert actual == expected, position
        assert call.stats.materialized == 0
    text, _, call = run_on_logits(repr, torch.float32, True)
    assert text == "LazyLogits(shape=(4, 9, 99), dtype=torch.float32, device='cpu', deferred)"
    assert call.stats.materialized == 0


@pytest.mark.parametrize(
    "use_logits",
    [
        lambda x: x.no_such_thing,
        lambda x: x[0, 0, 0, 0],
        lambda x: x.view(5, 5),
        lambda x: x[7],
        lambda x: x.split(2, dim=3),
        lambda x: x.select(3, 0),
        lambda x: x.index_select(3, ROWS),
        lambda x: x.narrow(1, 7, 5),
        lambda x: x[..., V + 3],
        lambda x: F.cross_entropy(x, labels()),
        lambda x: x + "a",
        lambda x: x.to(nonsense=1),
        lambda x: x + torch.ones(7),
    ],
)
def test_raises_like_a_tensor(use_logits: Callable[[Any], Any]) -> None:
    errors = []
    for deferred in (False, True):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run_on_logits(use_logits, torch.float32, deferred)
        errors.append(caught.type)
    assert errors[0] is errors[1]


@pytest.mark.parametrize("changed", [1, 2], ids=["weight", "bias"])
def test_reading_after_head_changed_raises(changed: int) -> None:
    inputs = make_inputs()
    logits = lazy_logits(*inputs)
    part = logits[:, 1:]
    with torch.no_grad():
        inputs[changed].add_(1.0)
    for read in (
        logits.materialize, lambda: logits.argmax(-1), lambda: part.argmax(-1), lambda: logits[1],
        lambda: F.cross_entropy(logits.view(B * S, V), labels()), lambda: logits.logsumexp(-1),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="have changed since"):
            read()


WRITES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x.mul_(2.0),
    "detached": lambda x: x.detach().add_(5.0),
    "real view": lambda x: x[..., ::2].zero_(),
    "view of a view": lambda x: x.view(B * S, V).transpose(0, 1).mul_(0.5),
    "data": lambda x: x.data.zero_(),
    "masked entries": lambda x: _assign(x, (..., UNUSED_IDS), torch.finfo(x.dtype).min),
    "contiguous": lambda x: x.contiguous().mul_(2.0),
    "copied by contiguous": lambda x: x[..., :50].contiguous().mul_(2.0),
    "copied by flatten": lambda x: x[:, :-1].flatten(0, 1).mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_reading_view_after_write_raises(write: Callable[[Any], Any]) -> None:
    """Lazy logits do not show a write to a view of them, and not whether torch would have copied, so reading them raises."""
    hidden_states, weight, _ = make_inputs()
    logits = lazy_logits(hidden_states, weight)
    view, copied = logits[:, 1:], logits.float() * 1.0
    write(logits)
    for read in (lambda: view.softmax(-1), lambda: flat_loss(view), lambda: view.backward(torch.ones(view.shape))):
        with pytest.raises(RuntimeError, match="logits that were modified in place"):
            read()
    assert torch.equal(copied.materialize(), F.linear(hidden_states, weight))


def test_flatten_without_effect_returns_the_same_logits() -> None:
    """As in torch, so hooks and writes concern both; ``view`` returns another tensor."""
    logits = lazy_logits(*make_inputs())
    assert logits.flatten(1, 1) is torch.flatten(logits, -1) is logits
    assert logits.view(logits.shape) is not logits


def test_index_may_be_modified_before_the_backward_pass() -> None:
    """Torch raises then, as it has not copied the index."""

    def use_logits(x: Any, used: Tensor, index: Tensor) -> Any:
        part = x[used].square()
        index.zero_()
        return part

    indices = ROWS.clone(), ROWS.clone()
    expected = run_on_logits(lambda x: use_logits(x, ROWS, indices[0]), torch.float32, False)
    actual = run_on_logits(lambda x: use_logits(x, indices[1], indices[1]), torch.float32, True)
    assert_all_accurate(actual[1], expected[1], expected[1], "gradient")


def test_copies_and_pickles_are_tensors() -> None:
    hidden_states, weight, bias = make_inputs()
    logits = lazy_logits(hidden_states, weight, bias)
    saved = io.BytesIO()
    torch.save({"logits": logits}, saved)
    saved.seek(0)
    copies = [copy.copy(logits), copy.deepcopy(logits.detach()), pickle.loads(pickle.dumps(logits))]
    for each in (*copies, torch.load(saved)["logits"]):
        assert type(each) is Tensor and torch.equal(each, logits.materialize())


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="to_dlpack of torch 2.8 exports a null pointer")
def test_other_libraries_get_the_values_or_an_error() -> None:
    """Never a null pointer, which ends the process; ``to_dlpack`` is C++ that does not ask the tensor's class."""
    logits = lazy_logits(*make_inputs()).detach()
    gradient = LazyGrad.create(logits.meta, (), torch.ones(logits.shape), TrainingCall())
    for each in (logits, gradient):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(each)
    assert torch.equal(torch.from_dlpack(logits), logits.materialize())
    with pytest.raises(AttributeError, match="non-CUDA tensor"):  # torch's own message: it saw the values
        _ = logits.__cuda_array_interface__


def test_values_written_past_torch_count() -> None:
    """A kernel or NumPy that has the address of the logits may write there; no version counter shows it."""
    logits = lazy_logits(*make_inputs())
    logits.detach().numpy()[..., :7] = -1e4
    written = logits.materialize().detach().clone()
    assert (written[..., :7] == -1e4).all()
    assert_accurate(logits.logsumexp(-1), written.logsumexp(-1), written.double().logsumexp(-1), "logsumexp")
    gradient = torch.autograd.grad(logits.logsumexp(-1).sum(), logits)[0]
    assert_accurate(gradient, written.softmax(-1), written.double().softmax(-1), "gradient")


def test_autocast_state_of_head_call_counts() -> None:
    """The autocast state at the head's call counts, not the state when the logits are read or the loss is computed."""
    hidden_states, weight, bias = make_inputs()
    head = nn.Linear(D, V)
    head.weight, head.bias = nn.Parameter(weight), nn.Parameter(bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, expected = head(wrap_head_input(hidden_states, TrainingCall())), head(hidden_states)
    outside, expected_outside = head(wrap_head_input(hidden_states, TrainingCall())), head(hidden_states)
    assert inside.dtype is torch.bfloat16 and torch.equal(inside.materialize(), expected)
    exact = flat_loss(F.linear(hidden_states.double(), head.weight.double(), head.bias.double()))
    assert_accurate(
        flat_loss(inside), flat_loss(expected.float()), exact, "autocast head, loss outside", torch.bfloat16
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(outside.materialize(), expected_outside)
        assert_accurate(flat_loss(outside), flat_loss(expected_outside), exact, "loss in autocast, head outside")


def test_class_weights_under_autocast() -> None:
    """Autocast casts logits in bfloat16 to float32, the usual dtype of class weights."""

    def use_logits(logits: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=logits.dtype is torch.bfloat16):
            return flat_loss(logits, weight=CLASS_WEIGHTS.to(torch.promote_types(logits.dtype, torch.float32)))

    exact, twin = run_in_float64(use_logits), run_on_logits(use_logits, torch.bfloat16, False)
    actual = run_on_logits(use_logits, torch.bfloat16, True)
    assert actual[2].fused == 1 and actual[2].stats.materialized == 0
    results = ((result, *grads) for result, grads in (actual[:2], twin[:2], exact))
    assert_all_accurate(*results, "class weights under autocast", torch.bfloat16)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (None, torch.float32), (torch.float64, None)], ids=str
)
def test_entropy_of_distributions_in_other_dtypes(dtypes: tuple[Any, Any]) -> None:
    """The product has the dtype of torch's, and the same values if it is read."""

    def product(logits: Any) -> Any:
        return F.softmax(logits, -1, dtype=dtypes[0]) * F.log_softmax(logits, -1, dtype=dtypes[1])

    for use_logits in (product, lambda logits: product(logits).sum(-1).float()):
        exact, twin = run_in_float64(use_logits), run_on_logits(use_logits, torch.bfloat16, False)
        actual = run_on_logits(use_logits, torch.bfloat16, True)
        assert actual[0].dtype is twin[0].dtype
        for found, other, best in zip((actual[0], *actual[1]), (twin[0], *twin[1]), (exact[0], *exact[1]), strict=True):
            assert_accurate(found * 1.0, other, best, "entropy", torch.bfloat16)
    assert actual[2].stats.materialized == 0


def test_head_input_acts_as_hidden_states_elsewhere() -> None:
    hidden_states, weight, _ = make_inputs()
    given = wrap_head_input(hidden_states, TrainingCall())
    assert given.shape == hidden_states.shape and given.dtype is hidden_states.dtype
    uses: list[Callable[[Any], Any]] = [
        lambda x: F.dropout(x, 0.0),
        lambda x: x * 2.0,
        lambda x: 2.0 - x,
        lambda x: x[:, 1:],
        lambda x: x @ torch.ones(D, 2),
        lambda x: x.mean(-1),
        lambda x: torch.cat([x, x]),
        lambda x: x.view(-1, D),
        lambda x: -x,
    ]
    for use_logits in uses:
        assert torch.equal(use_logits(given), use_logits(hidden_states))
    deferred = F.linear(given.to(torch.float64), weight.double())
    assert isinstance(deferred, LazyLogits) and deferred.dtype is torch.float64
    with pytest.raises(RuntimeError) as expected:
        F.linear(hidden_states, weight.double())
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        F.linear(given, weight.double())


def test_argmax_in_row_chunks(spy: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(500, 8, generator=generator), torch.randn(3001, 8, generator=generator)
    logits = lazy_logits(hidden, weight, call=TrainingCall(CCEConfig(memory_budget=1 << 20), labels=False))
    built = spy(Recipe, "build")
    assert torch.equal(logits.argmax(-1), (hidden @ weight.t()).argmax(-1))
    seen = [call.result.numel() for call in built]
    assert max(seen) * 4 <= 1 << 20 and sum(seen) == 500 * 3001
