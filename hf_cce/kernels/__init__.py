"""Triton kernels of the loss, for ``hf_cce.ops``.

Functions that ``hf_cce.reference`` has too take the same arguments and give the same results, up to rounding.

A step, file by file:
    labels          valid labels, the number of them, and their own logits
    forward         logits tile by tile, of which statistics stay: hopper's tiles, or those of tiles
    loss            the strategies: what the forward pass keeps, and the scalar loss
        exp_cache       exponentials of the first columns, as far as the memory budget goes
        token_groups    of a frozen head the gradient at once, a group of tokens after the other
        materialized    full logits of few tokens
    filter/         the gradient filter: run has its forward and backward pass
    backward        slab by slab: cached exponentials or recomputed logits, then matmul
    launch_config   tile shapes and slab widths for the device
"""

from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.filter.run import (
    filtered_cross_entropy,
    filtered_gradients,
    filtered_stats,
    token_filtered_gradients,
)
from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.labels import survey_labels
from hf_cce.kernels.loss import (
    cross_entropy,
    dense_cross_entropy,
    grouped_cross_entropy,
    stored_cross_entropy,
    token_gradients,
)
from hf_cce.kernels.materialized import backward as dense_gradients
from hf_cce.kernels.materialized import logits_of as dense_logits
from hf_cce.kernels.token_groups import formed_gradients

__all__ = [
    "cross_entropy",
    "dense_cross_entropy",
    "dense_gradients",
    "dense_logits",
    "filtered_cross_entropy",
    "filtered_gradients",
    "filtered_stats",
    "formed_gradients",
    "grouped_cross_entropy",
    "logit_stats",
    "logit_stats_backward",
    "stored_cross_entropy",
    "survey_labels",
    "token_filtered_gradients",
    "token_gradients",
]
