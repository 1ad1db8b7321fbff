"""lm-evaluation-harness: ``python -m hf_cce.integrations.lm_eval --model hf_cce --model_args pretrained=… --tasks …``.

All arguments of ``lm-eval`` and of its model ``hf`` are supported. For causal LMs, log-likelihoods and the check for greedy
continuations are computed from hidden states and LM head, with the logits of a few tokens at a time; generation is unchanged.
lm-eval loads no plugins, so this module registers its model and runs lm-eval's command. Read and tested with lm-eval 0.4.13.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from hf_cce import apply_cce


@register_model("hf_cce")
class CCEHFLM(HFLM):
    """``HFLM`` with a patched model; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.backend == "causal":
            apply_cce(self.model)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return deferred logits [B, S, V]. In evaluation mode only calls with labels defer, so pass labels, all ignored."""
        if self.backend != "causal":
            return super()._model_call(inps, attn_mask, labels)
        kind, dtype = self.device.type, self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return self.model(input_ids=inps, labels=torch.full_like(inps, -100)).logits


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
