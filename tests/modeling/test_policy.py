"""LazyLogits against the tensor they stand for: what people ask of the logits of calls without labels, without making them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, logits_made
from numerics import assert_as_good
from torch import Tensor

from hf_cce.config import CCEConfig
from hf_cce.deferred.logits import LazyLogits, lazy_logits
from hf_cce.deferred.recipe import Recipe
from hf_cce.deferred.training_call import TrainingCall

B, S, D, V = 4, 9, 16, VOCABULARY
MASK = (torch.arange(B * S).view(B, S) % 3 != 1).long()
g = torch.Generator().manual_seed(2)
INDEX = torch.randint(V, (B, S), generator=g)


def by_rows(x: Any, index: Tensor) -> Tensor:
    """As TRL, OpenRLHF and others write it."""
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1) - torch.stack([torch.logsumexp(row, dim=-1) for row in x])


def by_pieces(x: Any, size: int = 8) -> Tensor:
    """TRL's entropy_from_logits."""
    found = []
    for part in x.reshape(-1, x.shape[-1]).split(size, dim=0):
        log_p = F.log_softmax(part, dim=-1)
        found.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(found).reshape(x.shape[:-1])


def smoothed(x: Any, index: Tensor) -> Tensor:
    """Transformers' LabelSmoother."""
    log_p = -F.log_softmax(x, dim=-1)
    return 0.9 * log_p.gather(dim=-1, index=index.unsqueeze(-1)) + 0.1 / V * log_p.sum(
        dim=-1, keepdim=True, dtype=torch.float32
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda x: x,
    "shifted": lambda x: x[:, :-1, :],
    "scaled": lambda x: x.float() * 0.3,
    "capped": lambda x: torch.tanh(x / 5.0) * 5.0,
    "capped and shifted": lambda x: (torch.tanh(x / 5.0) * 5.0)[..., 1:, :].contiguous(),
}


def of(x: Any, whole: Tensor) -> Tensor:
    return whole[:, : x.shape[1]]


# None of them makes logits.
ANSWERED: dict[str, Callable[[Any], Any]] = {
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, of(x, INDEX).unsqueeze(-1)),
    "log-probabilities, along": lambda x: torch.take_along_dim(x.log_softmax(dim=-1), of(x, INDEX).unsqueeze(-1), dim=2),
    "log-probabilities, indexed": lambda x: x[0].log_softmax(-1)[torch.arange(x.shape[1]), of(x, INDEX)[0]],
    "log-probabilities, indexed by ranges": lambda x: x[:, 0].log_softmax(-1)[range(B), INDEX[:, 0] - V],
    "log-probabilities by rows": lambda x: by_rows(x, of(x, INDEX)),
    "log-probabilities by temperature": lambda x: F.log_softmax(x / 0.7, -1, dtype=x.dtype).gather(2, of(x, INDEX)[..., None]),
    "probabilities": lambda x: x.softmax(-1).gather(-1, of(x, INDEX).unsqueeze(-1)).square(),
    "logits of some words": lambda x: x.gather(-1, torch.stack([of(x, INDEX), 98 - of(x, INDEX), of(x, INDEX)], -1)).square(),
    "smoothed": lambda x: smoothed(x, of(x, INDEX)),
    "mean log-probability": lambda x: x.log_softmax(-1).mean(-1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "entropy from the left": lambda x: torch.sum(x.log_softmax(-1) * -x.softmax(-1), dim=-1, keepdim=True),
    "entropy by logarithm": lambda x: (lambda p: (p * p.log()).sum(-1))(x.softmax(-1)),
    "entropy by pieces": by_pieces,
    "entropy by logsumexp": lambda x: torch.logsumexp(x, -1) - (F.softmax(x, -1) * x).sum(-1),
    "entropy of all": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum() / 7,
    "entropy without gradient": lambda x: by_pieces(x.detach()),
    "mean": lambda x: x.mean(),
    "mean of a part": lambda x: x[1:, :-1].mean(),
    "mean by function": lambda x: torch.mean(x, -1).square(),
    "mean of words": lambda x: x[of(x, MASK).bool()].mean(-1).sum(),
    "without gradient": lambda x: x.detach().mean(),
    "most likely": lambda x: x.argmax(dim=-1),
    "most likely, kept": lambda x: x.argmax(-1, keepdim=True),
    "most likely five": lambda x: x.detach().topk(5).indices,
    "most likely, accuracy": lambda x: (x.argmax(-1) == of(x, INDEX)) * 1,
    "most likely word and its logit": lambda x: x.max(-1)[0].square(),
    "most likely three logits": lambda x: torch.topk(x, 3, dim=-1).values.square(),
    "most likely of a part": lambda x: torch.chunk(x.detach(), 3)[0].argmax(-1),
    "parts": lambda x: torch.stack([part.mean() for part in x.chunk(3, dim=0)]),
    "parts of a sequence": lambda x: torch.stack([part.mean() for part in x.chunk(2, 1)]),
    "loss of a part": lambda x: F.cross_entropy(x.chunk(2)[1][of(x, MASK)[2:] == 1], of(x, INDEX)[2:][of(x, MASK)[2:] == 1]),
    "two losses": lambda x: F.cross_entropy(x[:2].reshape(-1, V), of(x, INDEX)[:2].reshape(-1)) - by_rows(x, of(x, INDEX)).mean(),
}  # fmt: skip
REAL: dict[str, Callable[[Any], Any]] = {
    "several words each": lambda x: x.log_softmax(-1).gather(-1, torch.stack([INDEX, INDEX], -1)),
    "mean of tokens": lambda x: x.mean(1),
    "mean, kept": lambda x: x.mean(-1, keepdim=True),
    "parts of the vocabulary": lambda x: x.chunk(3, -1)[1],
    "most likely of all": lambda x: x.argmax(),
    "negative scale": lambda x: F.log_softmax(-x, -1).gather(-1, INDEX.unsqueeze(-1)),
    "mean after a write": lambda x: x.add_(1.0).mean(),
    "a part after a write": lambda x: x.add_(1.0).chunk(2)[0],
    "without gradient after a write": lambda x: x.add_(1.0).detach(),
}


def outcome(
    ask: Callable[[Any], Any], dtype: torch.dtype, deferred: bool, bias: bool
) -> tuple[Any, list[Tensor], TrainingCall]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, D), (V, D), (V,))[: 2 + bias]
    used = [(torch.randn(*shape, generator=generator) * 0.5).to(dtype).requires_grad_() for shape in shapes]
    call = TrainingCall(CCEConfig(memory_budget=1 << 20), labels=False)
    logits = lazy_logits(*used, call=call) if deferred else F.linear(*used)
    result = ask(logits)
    total = result.materialize() if isinstance(result, LazyLogits) else result
    grads = list(torch.autograd.grad(total.sum(), used, allow_unused=True)) if total.requires_grad else []
    return total, grads, call


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ANSWERED)
def test_answered_without_logits(name: str, change: str, bias: bool) -> None:
    def ask(logits: Any) -> Any:
        return ANSWERED[name](CHANGES[change](logits))

    exactly = (lambda x: x * 0.3) if change == "scaled" else CHANGES[change]
    exact, twin = (
        outcome(lambda x: ANSWERED[name](exactly(x)), torch.float64, False, bias),
        outcome(ask, torch.float32, False, bias),
    )
    with logits_made(B * S) as seen:
        actual = outcome(ask, torch.float32, True, bias)
    assert actual[2].stats.materialized == 0
    assert seen == [] or "most likely" in name  # that one makes those of few tokens at a time; here all fit
    if not exact[0].is_floating_point():
        assert torch.equal(actual[0], twin[0])
        return
    assert_as_good(actual[0], twin[0], exact[0], name, torch.float32)
    assert len(actual[1]) == len(exact[1])
    for position, (grad, other, best) in enumerate(zip(actual[1], twin[1], exact[1], strict=True)):
        assert_as_good(grad, other, best, f"{name}: gradient {position}")


@pytest.mark.parametrize("name", REAL)
def test_everything_else_is_asked_of_real_logits(name: str) -> None:
    expected, actual = outcome(REAL[name], torch.float32, False, True), outcome(REAL[name], torch.float32, True, True)
    assert actual[2].stats.materialized == 1 and torch.equal(actual[0], expected[0])
    for grad, other in zip(actual[1], expected[1], strict=True):
        assert torch.equal(grad, other)


def test_few_rows_at_a_time_find_the_same_words() -> None:
    """Also where logits are so many that they do not fit the budget at once."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(500, 8, generator=generator), torch.randn(3001, 8, generator=generator)
    logits = lazy_logits(hidden, weight, call=TrainingCall(CCEConfig(memory_budget=1 << 20), labels=False))
    seen: list[int] = []
    real = Recipe.build
    try:
        Recipe.build = lambda self: seen.append(self.shape.numel()) or real(self)  # type: ignore
        found = logits.argmax(-1)
    finally:
        Recipe.build = real  # type: ignore
    assert torch.equal(found, (hidden @ weight.t()).argmax(-1))
    assert max(seen) * 4 <= 1 << 20 and sum(seen) == 500 * 3001


def test_a_closed_call_tells_who_made_its_logits() -> None:
    """A trainer of another version that asks for something else gets it, and the warning of all who read logits."""
    call = TrainingCall(labels=False)
    logits = lazy_logits(torch.randn(2, 3, D), torch.randn(V, D), call=call)
    call.closed = True
    with pytest.warns(UserWarning, match="outputs.logits of a training call was used"):
        assert math.isfinite(float(logits.softmax(-1).sum()))
    assert call.stats.read == 1
