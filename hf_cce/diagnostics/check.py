"""``hf-cce check``: compare loss, gradients and evaluation logits of a model with and without CCE.

A large model has no exact result to compare with, so its own rounding error sets the limit: the unpatched model runs again with
its LM head summing over the hidden dimension in another order. The patched model may differ by ``gradcheck.allowed_error`` of
that difference. Everything is in float32.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cce import CCEConfig, apply_cce, remove_cce
from hf_cce.diagnostics.gradcheck import allowed_error, relative_error
from hf_cce.diagnostics.machine import Progress, first_line
from hf_cce.diagnostics.shapes import SHAPES, auto_class, config_named, is_model_type
from hf_cce.dispatch import why_no_triton

REORDERED_RUNS = 3  # of the unpatched model, with other orders of summation
ROWS, LENGTH = 2, 24


def load(target: str, tiny: bool, device: torch.device) -> tuple[Any, bool]:
    """Return the float32 model of a folder, a name on the hub or a model type, and whether its weights are random.

    ``tiny``: build a small model of the same class with random weights, as for a model type or a known shape.
    """
    target = str(Path(target).parent) if Path(target).is_file() else target  # a config.json
    config = config_named(target)
    auto = auto_class(target, config)
    if tiny or is_model_type(target) or target.lower() in SHAPES:
        return _tiny(target, auto, config).to(device), True
    try:
        return auto.from_pretrained(target, dtype=torch.float32).to(device), False
    except OSError as error:
        if not Path(target).exists():
            raise
        raise ValueError(f"{target}: no weights found; pass a folder with weights, or add --tiny") from error


def _tiny(target: str, auto: Any, config: Any) -> Any:
    """Build a model of ``config`` with two layers, two heads and few experts; vocabulary size and head dimension stay.

    A model without attention heads only gets fewer layers.
    """
    try:
        text = config.get_text_config()
        small, heads = {"num_hidden_layers": 2}, getattr(text, "num_attention_heads", None)
        if heads:
            width = 2 * (getattr(text, "head_dim", None) or text.hidden_size // heads)
            experts = max(4, getattr(text, "num_experts_per_tok", None) or 0)
            small |= {
                "num_attention_heads": 2, "hidden_size": width, "intermediate_size": 2 * width,
                "num_key_value_heads": 2 if getattr(text, "num_key_value_heads", heads) == heads else 1,
                "moe_intermediate_size": width, "num_experts": experts, "num_local_experts": experts,
            }  # fmt: skip
        for name, size in small.items():
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, size)
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            kinds = getattr(text, name, None)
            if kinds and not isinstance(getattr(type(text), name, None), property):  # derived from other sizes
                setattr(text, name, [kinds[0], kinds[-1]])
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ValueError(
            f"{target}: cannot build a tiny model from this configuration; pass a folder with weights ({first_line(error)})"
        ) from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)  # biases start at zero, where errors in them do not show
    return model


def check(model: Any, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Run ``model`` without and with CCE on the same random tokens; leave it unpatched and without gradients.

    In the JSON-ready report, "differences" of the loss and of the gradients of each module are relative to the norm; "saves"
    tells that no full logits were computed.
    """
    remove_cce(apply_cce(model))  # raises before anything runs if the model is not supported
    device = next(model.parameters()).device
    inputs = _inputs(model, device)
    progress("without hf_cce")
    plain = _train(model, inputs)
    noise = _rounding(model, inputs, plain, progress)
    evaluated = _evaluate(model, inputs)
    progress("with hf_cce")
    apply_cce(model, computes_no_logits(device))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched = _train(model, inputs)
        stats = model.cce_stats()
        same = torch.equal(_evaluate(model, inputs), evaluated)
    finally:
        remove_cce(model)
    if patched.keys() != plain.keys():
        raise ValueError(
            f"only one of the runs with and without hf_cce has gradients of {sorted(patched.keys() ^ plain.keys())}"
        )
    rows = []
    for name, error in _errors(patched, plain).items():
        limit = allowed_error(noise[name], torch.float32)
        rows.append({"name": name, "error": error, "allowed": limit, "ok": error <= limit})
    return {
        "model": type(model).__name__,
        "device": str(device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": (float(plain["loss"]), float(patched["loss"])),
        "differences": rows,
        "stats": stats,
        "evaluation_same": same,
        "warnings": [str(each.message) for each in caught if "hf_cce" in str(each.message)],
        "same": same and all(row["ok"] for row in rows),
        "saves": stats["fused"] > 0 and stats["materialized"] == 0,
    }


def computes_no_logits(device: torch.device) -> CCEConfig:
    """Return a config that avoids full logits even for few tokens: the kernels, or else a memory budget too small for them."""
    if device.type == "cuda" and why_no_triton(device, torch.float32) is None:
        return CCEConfig("triton", gradient_filter=None)
    return CCEConfig(memory_budget=1 << 20, gradient_filter=None)


def _rounding(model: Any, inputs: dict[str, Any], plain: dict[str, Tensor], progress: Progress) -> dict[str, float]:
    """Return the effect of rounding on each result of the unpatched model; 0 if its head is not a plain linear layer."""
    head: Any = model.get_output_embeddings()
    noise = dict.fromkeys(plain, 0.0)
    for seed in range(REORDERED_RUNS if type(head) is nn.Linear else 0):
        progress(f"without hf_cce, rounded differently ({seed + 1} of {REORDERED_RUNS})")
        order = torch.randperm(head.in_features, generator=torch.Generator().manual_seed(seed)).to(head.weight.device)

        def reordered(head: Any, args: Any, output: Any, order: Tensor = order) -> Tensor:
            return F.linear(args[0][..., order], head.weight[:, order], head.bias)

        with head.register_forward_hook(reordered):
            found = _errors(_train(model, inputs), plain)
        noise = {name: max(noise[name], found[name]) for name in noise}
    return noise


def _inputs(model: Any, device: torch.device) -> dict[str, Any]:
    """Return random text with a padded row and some ignored labels."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    # Lower half only: special tokens, such as those for images, are at the end of most vocabularies.
    ids = torch.randint(3, max(4, vocab_size // 2), (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {**{name: value.to(device) for name, value in inputs.items()}, "use_cache": False}


def _train(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Run a training step; return "loss", and the gradients as one vector per module.

    Not per parameter, because the gradient of a bias before a softmax is nothing but rounding error.
    """
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # dropout
    try:
        loss = model(**inputs).loss
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(model).__name__} does not run on text alone: {error}") from error
    if loss is None or not math.isfinite(float(loss.detach())):
        raise ValueError(f"the loss of {type(model).__name__} on random text must be finite, got {loss}")
    loss.backward()
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(name.rpartition(".")[0] or name, []).append(parameter.grad.flatten())
            parameter.grad = None  # freed with its group
    return {"loss": loss.detach(), **{name: torch.cat(groups.pop(name)) for name in list(groups)}}


@torch.no_grad()
def _evaluate(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model.eval()(**inputs).logits


def _errors(results: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(results[name], value.double()) for name, value in plain.items()}


def verdict(report: dict[str, Any]) -> str:
    if not report["same"]:
        wrong, total = sum(not row["ok"] for row in report["differences"]), len(report["differences"])
        what = f"{wrong} of {total} results differ by more than rounding" if wrong else "the evaluation logits differ"
        return f"Do not train this model with hf_cce: {what}. Please report this with the output of --json."
    if not report["saves"]:
        why = " ".join(report["warnings"]) or "The loss was computed from full logits."
        return f"hf_cce trains this model correctly, but saves no memory. {why}"
    return "Loss and gradients are the same with and without hf_cce, and no full logits are materialized."
