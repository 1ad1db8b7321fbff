"""Triton kernels of the loss. Same functions, same arguments, same results as ``hf_cce.portable``."""

from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.cross_entropy import cross_entropy, filtered_cross_entropy, filtered_gradients, token_gradients
from hf_cce.kernels.forward import logit_stats, survey_labels

__all__ = [
    "cross_entropy",
    "filtered_cross_entropy",
    "filtered_gradients",
    "logit_stats",
    "logit_stats_backward",
    "survey_labels",
    "token_gradients",
]
