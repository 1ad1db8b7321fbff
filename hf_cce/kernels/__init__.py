"""Triton kernels of the loss, for ``hf_cce.ops``.

The functions that ``hf_cce.portable`` has too take the same arguments and give the same results, but for rounding; the others are
faster ways that only a GPU has.
"""

from hf_cce.kernels.ahead import compile_ahead
from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.cross_entropy import (
    cross_entropy,
    dense_cross_entropy,
    grouped_cross_entropy,
    stored_cross_entropy,
    token_gradients,
)
from hf_cce.kernels.dense import backward as dense_gradients
from hf_cce.kernels.dense import multiplied as dense_logits
from hf_cce.kernels.filter.run import (
    filtered_cross_entropy,
    filtered_gradients,
    filtered_stats,
    token_filtered_gradients,
)
from hf_cce.kernels.forward import logit_stats, survey_labels
from hf_cce.kernels.grouped import formed_gradients
from hf_cce.kernels.launch import LOADING

__all__ = [
    "LOADING",
    "compile_ahead",
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
