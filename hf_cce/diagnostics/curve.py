"""``hf-cce check --curve``: train a small model for 64 steps without and with CCE; compare with the losses in curve.json.

The file has the losses of full logits in float64. With CCE, losses may differ from float64 by twice the largest difference of
full logits in float32, measured here, plus 16 units of float32 at the largest loss: the rule of ``gradcheck.allowed_error``. In
float64, losses may differ from the file by the same number of float64 units. ``python -m hf_cce.diagnostics.curve`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_cce import CCEConfig, apply_cce
from hf_cce.diagnostics.check import computes_no_logits, result_row
from hf_cce.diagnostics.gradcheck import allowed_error
from hf_cce.diagnostics.machine import Progress

GOLDEN = Path(__file__).with_name("curve.json")
STEPS, ROWS, LENGTH, VOCABULARY, USED = 64, 4, 25, 1024, 64


def train(dtype: torch.dtype, device: torch.device, config: CCEConfig | None = None) -> list[float]:
    """Return the losses of a small GPT-2 on arithmetic sequences modulo 64; with ``config`` None, of full logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH)
    tokens: dict[str, Any] = dict(bos_token_id=0, eos_token_id=0)
    # GPT-2 runs entirely in float64; Llama computes its norms in float32.
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    random = np.random.RandomState(0)  # the same numbers in every version of NumPy
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(0.1 * random.standard_normal(tuple(parameter.shape))))
    model.to(device, dtype).train()
    if config is not None:
        apply_cce(model, config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        starts, steps = random.randint(USED, size=(ROWS, 1)), random.randint(1, 4, size=(ROWS, 1))
        ids = torch.from_numpy((starts + steps * np.arange(LENGTH)) % USED).to(device)
        labels = ids.masked_fill(torch.arange(LENGTH, device=device) < 3, -100)
        if dtype == torch.float64:  # Transformers' loss is in float32
            loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(device: torch.device, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Train without and with CCE and compare the losses.

    Returns:
        A JSON-ready report: the curves, and "rows" with the largest difference between two curves and the allowed difference.
        "same" is the result.
    """
    curves, cpu = {"golden": json.loads(GOLDEN.read_text("utf-8"))}, torch.device("cpu")
    progress("full logits in float64")
    curves["exact"] = train(torch.float64, cpu)
    progress("full logits in float32")
    curves["full logits"] = train(torch.float32, device)
    progress("with hf_cce")
    curves["hf_cce"] = train(torch.float32, device, computes_no_logits(device))

    def difference(name: str, other: str) -> float:
        return max(abs(a - b) for a, b in zip(curves[name], curves[other], strict=True))

    largest_loss = max(curves["golden"])
    bound = largest_loss * allowed_error(difference("full logits", "exact") / largest_loss, torch.float32)
    float64_bound = bound * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    rows = [
        result_row(
            "full logits in float64, from the losses stored in the package",
            difference("exact", "golden"),
            float64_bound,
        ),
        result_row("hf_cce in float32, from full logits in float64", difference("hf_cce", "exact"), bound),
        result_row("hf_cce in float32, from the losses stored in the package", difference("hf_cce", "golden"), bound),
    ]
    return {"device": str(device), "curves": curves, "rows": rows, "same": all(row["ok"] for row in rows)}


def verdict(report: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    if report["same"]:
        return f"{STEPS} steps with hf_cce give the same losses as full logits, here and as stored in the package."
    if report["rows"][0]["ok"]:
        return f"{STEPS} steps with hf_cce give other losses than full logits. Please report this with the output of --json."
    return f"{STEPS} steps with full logits give other losses here than with the versions used to build the package."


if __name__ == "__main__":
    from hf_cce.diagnostics.files import write_json

    write_json(GOLDEN, train(torch.float64, torch.device("cpu")))
