"""TRL: replace the kernel of ``selective_log_softmax``, ``selective_log_softmax_and_entropy`` and ``entropy_from_logits``.

Cause: the experimental trainers (ORPO, CPO, TPO, A2PO, SDPO, SDFT …) pass ``model(input_ids, …).logits`` to these functions. On
a GPU they run a Triton kernel on the logits' memory, which deferred logits do not have. Elsewhere they use operations that are
supported, but with one pass over the vocabulary per sequence. Versions: TRL 1.16; a TRL whose functions have other arguments is
not patched. Can be removed when TRL gives these trainers its fused LM head.

How: at each call, the three functions look up two names in ``trl.trainer.utils``: the check whether the kernel supports these
tensors, and the kernel. The replacements handle deferred logits and pass everything else on.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hf_cce.deferred.handlers import can_compute_log_probs, log_probs_and_entropy
from hf_cce.deferred.logits import LazyLogits
from hf_cce.patches.marking import replace, signature

SUPPORTED, KERNEL = "_supports_trl_loss_kernel", "_fused_logprob_entropy"
ARGUMENTS = {SUPPORTED: ("logits", "index", "row_mask"), KERNEL: ("logits", "index", "temperature", "row_mask")}


def install() -> None:
    """Replace both functions, once; do nothing if TRL is not loaded or its functions have other arguments."""
    utils: Any = sys.modules.get("trl.trainer.utils")
    functions = {name: getattr(utils, name, None) for name in ARGUMENTS}
    if all(tuple(signature(functions[name]).parameters) == known for name, known in ARGUMENTS.items()):
        replace(utils, SUPPORTED, _supported)
        replace(utils, KERNEL, _kernel)


def _supported(original: Any, logits: Any, index: Any = None, row_mask: Any = None) -> bool:
    return can_compute_log_probs(logits, index) if isinstance(logits, LazyLogits) else original(logits, index, row_mask)


def _kernel(
    original: Any, logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if not isinstance(logits, LazyLogits):
        return original(logits, index, temperature, row_mask)
    scaled = logits if temperature == 1.0 else torch.div(logits, temperature)  # type: ignore[arg-type]
    return log_probs_and_entropy(scaled, index, row_mask)
