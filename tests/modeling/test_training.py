"""A whole training run: the losses of many steps are as close to float64 as with full logits."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numerics import assert_accurate
from transformers import GPT2Config, GPT2LMHeadModel

from hf_cce import apply_cce
from hf_cce.diagnostics.check import computes_no_logits

STEPS, ROWS, LENGTH, VOCABULARY, USED = 64, 4, 25, 1024, 64


def train(dtype: torch.dtype, fused: bool = False) -> torch.Tensor:
    """Return the losses [STEPS] of a small GPT-2 on arithmetic sequences modulo 64."""
    sizes: dict[str, Any] = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH)
    tokens: dict[str, Any] = dict(bos_token_id=0, eos_token_id=0)
    # GPT-2 runs entirely in float64; Llama computes its norms in float32.
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    random = np.random.RandomState(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(0.1 * random.standard_normal(tuple(parameter.shape))))
    model.to(dtype).train()
    if fused:
        apply_cce(model, computes_no_logits(torch.device("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        starts, steps = random.randint(USED, size=(ROWS, 1)), random.randint(1, 4, size=(ROWS, 1))
        ids = torch.from_numpy((starts + steps * np.arange(LENGTH)) % USED)
        labels = ids.masked_fill(torch.arange(LENGTH) < 3, -100)
        if dtype == torch.float64:  # Transformers' loss is in float32
            loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert not fused or model.cce_stats()["fused"] == STEPS
    return torch.stack(losses)


def test_the_losses_of_64_steps() -> None:
    exact = train(torch.float64)
    assert exact[-1] < 0.25 * exact[0]
    assert_accurate(train(torch.float32, fused=True), train(torch.float32), exact, "losses")
