"""``hf-cce check``: does a model train with CCE as it does without? Loss, gradients, logits in evaluation.

There is no exact result of a large model to compare with, so its own rounding is the measure: the unpatched model runs
again with its LM head summing over the hidden dimension in another order, which is the same function. The patched model may
differ by twice as much as that changes, plus sixteen units of rounding. All in float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_cce import CCEConfig, apply_cce, remove_cce
from hf_cce.diagnostics import hub
from hf_cce.diagnostics.tiny import VOCABULARY, WORDS, tiny_config
from hf_cce.diagnostics.tiny_options import OPTIONS

ORDERS = 3  # further roundings of the unpatched model
ROWS, LENGTH = 2, 24
# The weights of a model in a folder; the last: an adapter beside none, whose base model PEFT finds.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "adapter_config.json")
Say = Callable[[str], object]


@dataclass
class Difference:
    """How far the patched model is from the unpatched one in one result, relative to its norm."""

    name: str
    apart: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.apart <= self.allowed


@dataclass
class Report:
    """What the check found."""

    model: str
    device: str
    parameters: int
    losses: tuple[float, float]  # without, with
    differences: list[Difference]  # the loss first, then the gradients, module by module
    stats: dict[str, float]
    evaluation_same: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.evaluation_same and all(difference.ok for difference in self.differences)

    @property
    def saves(self) -> bool:
        """Every loss was answered without logits."""
        return self.stats["fused"] > 0 and self.stats["materialised"] == 0

    def to_json(self) -> dict[str, Any]:
        rows = [{"name": x.name, "apart": x.apart, "allowed": x.allowed, "ok": x.ok} for x in self.differences]
        return {**vars(self), "differences": rows, "same": self.same, "saves": self.saves}


def load(target: str, tiny: bool, device: torch.device) -> Any:
    """The model of a model type, a folder or a name on the hub, in float32; ``tiny``: a small random one of its class.

    Raises:
        ValueError: there is none of that name, it is no causal LM, or the tiny one cannot be built.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    path = Path(target)
    by_type = target in CONFIG_MAPPING and not path.exists()
    config = CONFIG_MAPPING[target] if by_type else type(hub.config_named(target, hub.model_type(target)))
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next((auto for auto in autos if config in auto._model_mapping), None)
    if auto is None:
        raise ValueError(f"{target}: {config.__name__} belongs to no causal LM and to no model for images and text")
    if not (tiny or by_type):
        if path.is_file():
            raise ValueError(f"{target}: a file, and the weights are needed, too; give its folder, or add --tiny")
        if path.is_dir() and not any(any(path.glob(pattern)) for pattern in WEIGHTS):
            raise ValueError(f"{target}: no weights in this folder; for a tiny random model of its class add --tiny")
        loaded: Any = auto.from_pretrained(hub.reachable(target), dtype=torch.float32)
        return loaded.to(device)
    cls: Any = auto._model_mapping[config]
    torch.manual_seed(0)
    try:
        model = cls(tiny_config(cls.config_class, OPTIONS.get(cls.__name__)))
    except Exception as error:
        raise ValueError(f"{cls.__name__}: no tiny model of it can be built here: {error}") from error
    with torch.no_grad():
        head = model.get_output_embeddings()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter is getattr(head, "weight", None):
                parameter.normal_(std=0.5)  # biases start at zero, and softcap and scale hardly show in small logits
    return model.to(device)


def check(model: Any, say: Say = lambda what: None) -> Report:
    """Run ``model`` without and with CCE on the same random tokens; it is left unpatched, and its gradients empty.

    Raises:
        ValueError: ``apply_cce`` refuses it, or it computes no loss from text alone.
    """
    remove_cce(apply_cce(model))  # what is refused is refused before anything runs
    device = next(model.parameters()).device
    inputs = _inputs(model, device)
    say("without CCE")
    loss, grads = _train(model, inputs)
    noise = dict.fromkeys(grads, 0.0)
    loss_noise = 0.0
    for seed in range(ORDERS):
        say(f"without CCE, rounded differently ({seed + 1} of {ORDERS})")
        with _reordered(model, seed):
            other, others = _train(model, inputs)
        loss_noise = max(loss_noise, abs(other - loss))
        noise = {name: max(noise[name], _apart(others[name], grads[name])) for name in grads}
        del others
    evaluated = _evaluate(model, inputs)
    say("with CCE")
    # On a GPU so few tokens would be left to PyTorch, and nothing would be checked.
    apply_cce(model, CCEConfig(implementation="triton" if device.type == "cuda" else "auto", gradient_filter=None))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched_loss, patched = _train(model, inputs)
        stats = model.cce_stats()
        same = torch.equal(_evaluate(model, inputs), evaluated)
    finally:
        remove_cce(model)
    model.zero_grad(set_to_none=True)
    if patched.keys() != grads.keys():
        raise ValueError(f"gradients of {sorted(patched.keys() ^ grads.keys())} are there with or without CCE only")
    rows = [Difference("loss", abs(patched_loss - loss) / abs(loss), _allowed(loss_noise / abs(loss)))]
    rows += [Difference(name, _apart(patched[name], grads[name]), _allowed(noise[name])) for name in grads]
    return Report(
        type(model).__name__,
        str(device),
        sum(parameter.numel() for parameter in model.parameters()),
        (loss, patched_loss),
        rows,
        stats,
        same,
        [str(each.message) for each in caught if "hf_cce" in str(each.message)],
    )


def _inputs(model: Any, device: torch.device) -> dict[str, Any]:
    """Random text with a padded row and labels that are not scored."""
    words = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(
        3, WORDS if words == VOCABULARY else words, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {**{name: value.to(device) for name, value in inputs.items()}, "use_cache": False}


def _train(model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, one vector a module: a bias before a softmax has none but rounding, and shares its weight's."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # dropout
    try:
        loss = model(**inputs).loss
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(model).__name__} does not run on text alone: {error}") from error
    if loss is None or not math.isfinite(float(loss.detach())):
        raise ValueError(f"{type(model).__name__} gives the loss {loss} on random text")
    loss.backward()
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(name.rpartition(".")[0] or name, []).append(parameter.grad.flatten())
    return float(loss.detach()), {name: torch.cat(values) for name, values in groups.items()}


def _evaluate(model: Any, inputs: dict[str, Any]) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits


@contextmanager
def _reordered(model: Any, seed: int) -> Iterator[None]:
    """Meanwhile the LM head, where it is a plain linear layer, sums over the hidden dimension in another order."""
    head: Any = model.get_output_embeddings()
    plain = type(head) is nn.Linear
    if not plain:
        yield
        return
    order = torch.randperm(head.in_features, generator=torch.Generator().manual_seed(seed)).to(head.weight.device)
    previous = vars(head).get("forward")
    head.forward = lambda hidden: nn.functional.linear(hidden[..., order], head.weight[:, order], head.bias)
    try:
        yield
    finally:
        del head.forward
        if previous is not None:
            head.forward = previous


def _apart(value: Tensor, reference: Tensor) -> float:
    size = float(reference.double().norm())
    apart = float((value.double() - reference.double()).norm())
    return apart / size if size > 0 else apart


def _allowed(noise: float) -> float:
    return 2 * noise + 16 * torch.finfo(torch.float32).eps
