"""Triton kernels of the loss, for ``hf_cce.strategies``.

Functions that ``hf_cce.reference`` has too take the same arguments and give the same results, up to rounding.

A step, file by file:
    labels          valid labels, the number of them, and their own logits
    forward         logits tile by tile, of which statistics stay: hopper's tiles, or those of tiles
    loss            the scalar loss, and what the forward pass keeps for the backward pass
        exp_cache       exponentials of the first columns, as far as the memory budget goes
        token_groups    of a frozen head the gradient at once, a group of tokens after the other
    materialized    the scalar loss of few tokens, from full logits
    filter/         the gradient filter: run has its forward and backward pass
    backward        slab by slab: cached exponentials or recomputed logits, then matmul
    launch_config   tile shapes and slab widths for the device
    launcher        each launch; with an empty cache, the compilation of all kernels at once
"""

from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.filter.run import filtered_cross_entropy, filtered_gradients, filtered_stats
from hf_cce.kernels.filter.workspace import BackwardRequest
from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.labels import validate_labels
from hf_cce.kernels.launcher import compiling, when_cold
from hf_cce.kernels.loss import cached_cross_entropy, cross_entropy, grouped_cross_entropy, token_gradients
from hf_cce.kernels.materialized import cross_entropy as materialized_cross_entropy
from hf_cce.kernels.materialized import gradients as materialized_gradients
from hf_cce.kernels.materialized import logits_of as materialized_logits
from hf_cce.kernels.token_groups import formed_gradients

__all__ = [
    "BackwardRequest",
    "cached_cross_entropy",
    "compiling",
    "cross_entropy",
    "filtered_cross_entropy",
    "filtered_gradients",
    "filtered_stats",
    "formed_gradients",
    "grouped_cross_entropy",
    "logit_stats",
    "logit_stats_backward",
    "materialized_cross_entropy",
    "materialized_gradients",
    "materialized_logits",
    "token_gradients",
    "validate_labels",
    "when_cold",
]
