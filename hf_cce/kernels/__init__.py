"""Triton kernels of the loss, called by ``hf_cce.strategies``.

Functions that also exist in ``hf_cce.reference`` take the same arguments and return the same results, up to rounding.

Modules, roughly in the order of a training step:
    labels          check and count the labels, compute their logits
    forward         compute logits tile by tile (with hopper or tiles) and reduce them to statistics per token
    exact           compute statistics for a loss without the gradient filter, and what its backward pass starts from
        exp_cache       cache exponentials of the first columns, as far as the memory budget allows
        exp_products    compute gradients directly from exponentials of all columns
        token_groups    compute gradients in the forward pass, one group of tokens at a time
    rows            compute losses and gradients from rows of full logits, which PyTorch computes
    divergence      compute divergences and gradients from rows of both models' logits; called by hf_cce.divergence_rows
        divergence_topk the same for top-k teachers; called by hf_cce.divergence_topk
    filter/         gradient filter; its forward and backward pass are in run
    backward        for each vocabulary slab, reuse cached exponentials or recompute logits, then multiply
    launch_config   choose tile shapes and slab widths for the device
    launcher        launch kernels; if Triton's cache is empty, compile all of them in parallel
"""

# ruff: noqa: F401 (hf_cce.strategies uses these names)
from hf_cce.kernels.backward import logit_stats_backward
from hf_cce.kernels.exact import exact_stats
from hf_cce.kernels.filter.run import filtered_forward, filtered_gradients, filtered_stats
from hf_cce.kernels.filter.workspace import BackwardRequest
from hf_cce.kernels.forward import logit_stats
from hf_cce.kernels.labels import validate_labels
from hf_cce.kernels.launcher import compiling, when_cold
from hf_cce.kernels.rows import all_logits, logits_to_gradients, row_losses
from hf_cce.kernels.rows import gradients as row_gradients
from hf_cce.kernels.token_groups import PrecomputedGradients, scale_precomputed_gradients
