"""``linear_cross_entropy`` and ``linear_log_probs``: argument checks, label shift and reductions around the operators.

Legend: B batch, T sequence, D hidden size, V vocabulary. Logits are z = softcap · tanh(x / softcap) with
x = logit_scale · (hidden_states · weightᵀ + bias), or x itself without a softcap.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import checks, dispatch, ops, sharded
from hf_cce.checks import Reduction
from hf_cce.config import CCEConfig
from hf_cce.filter_state import FilterState
from hf_cce.reference import add_smoothing_and_z_loss
from hf_cce.spec import Inputs, LogitStats, LossSpec, WantedStats
from hf_cce.strategies import SUM, validate_labels

Form = tuple[int, float, float]  # ignore_index, logit_scale, softcap (0: no softcap)
_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


class LogProbs(NamedTuple):
    """Result of ``linear_log_probs``: tensors with the shape of ``labels``; None for statistics that were not requested.

    Values are float32 (float64 for float64 inputs), and zero or False at ignored positions.

    Attributes:
        log_probs: log p(label); differentiable.
        entropy: −Σ p log p in nats; differentiable.
        log_sum_sq_probs: log Σ p²; no gradient.
        mean_logit: mean of the logits over the vocabulary; differentiable.
        is_top1: bool, True where the label has the largest logit.
        logsumexp: log Σ exp z; differentiable.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top1: Tensor | None = None
    logsumexp: Tensor | None = None


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: Tensor | int | float | None = None,
    shift: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    config: CCEConfig | None = None,
    filter_state: FilterState | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(logits, labels)`` of a linear head without materializing the logits.

    The loss of a token is lse − (1 − ε) z_label − ε · mean(z) + z_loss · lse², with ε = ``label_smoothing`` (as in
    ``F.cross_entropy``) and lse = logsumexp(z); the z-loss is PaLM's (Chowdhery et al., 2022, section 5).

    Args:
        hidden_states: [..., D], floating point.
        weight: [V, D], same dtype and device. Under autocast both are cast as for a matmul. Under tensor parallelism,
            ``weight`` and ``bias`` are DTensors with ``[Shard(0)]`` and ``hidden_states`` is replicated; nothing is gathered.
        labels: [...], integers in [0, V) or ``ignore_index``.
        bias: [V], same dtype, or None.
        logit_scale: factor on the logits, applied before the softcap.
        softcap: positive, or None to disable.
        ignore_index: label of positions that do not contribute to the loss.
        reduction: ``"mean"`` over the labels that are not ignored, ``"sum"`` or ``"none"``.
        num_items_in_batch: with ``"mean"``, divide the sum by this instead: the number of labels in all micro-batches and
            processes, as Trainer counts it.
        shift: use ``labels[..., t + 1]`` as the label of position t; the last position has no label.
        label_smoothing: ε in [0, 1].
        z_loss: non-negative.
        config: options; see ``CCEConfig``.
        filter_state: the gradient filter's state for this head, kept across steps. Without it the error is not measured, and
            ``gradient_filter="auto"`` skips nothing.

    Returns:
        A scalar, or [...] for ``reduction="none"`` (zero where ignored), in float32 (float64 for float64 inputs). When every
        label is ignored, or there are no tokens, the mean is 0 with zero gradients; ``F.cross_entropy`` returns NaN.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: shapes, dtypes, devices or options are invalid, or, on the CPU, a label is out of range. On a GPU such a
            label fails a device-side assertion.
        RuntimeError: in a double backward, under ``torch.func`` transforms or forward-mode AD, or if ``config`` requires
            kernels that cannot run here.
    """
    config = checks.check_config(config)
    if not isinstance(shift, bool):
        raise TypeError(f"shift must be True or False, got {checks.type_name(shift)}")
    checks.check_reduction(reduction, num_items_in_batch)
    checks.check_numbers(label_smoothing=label_smoothing, z_loss=z_loss)
    label_smoothing, z_loss = checks.to_number(label_smoothing), checks.to_number(z_loss)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if z_loss < 0.0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}")
    x, form = _prepare_inputs(
        Inputs(hidden_states, weight, bias, labels), ignore_index, logit_scale, softcap, filter_state
    )
    if shift:
        if labels.dim() == 0:
            raise ValueError("labels must have a sequence dimension to be shifted, got a scalar")
        labels = F.pad(labels.long(), (0, 1), value=form[0])[..., 1:]
        x = Inputs(x.hidden, x.weight, x.bias, labels.reshape(-1))
    spec = _make_spec(x, config, form, label_smoothing, z_loss)
    is_sharded = _is_vocab_sharded(x)
    divisor = checks.make_divisor(reduction, num_items_in_batch, x.hidden.device)
    if reduction != "none" and not is_sharded:
        return ops.cross_entropy(x, spec, divisor, filter_state)
    wanted = WantedStats(mean=label_smoothing > 0)
    loss = add_smoothing_and_z_loss(*_statistics(is_sharded, x, spec, wanted, z_loss > 0, None), spec)
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() * validate_labels(x, spec, divisor).to(loss.dtype)


def linear_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
    log_sum_sq_probs: bool = False,
    mean_logit: bool = False,
    is_top1: bool = False,
    logsumexp: bool = False,
    config: CCEConfig | None = None,
    filter_state: FilterState | None = None,
) -> LogProbs:
    """Compute the log-probability of each label under a linear head, and optional statistics, without materializing the logits.

    Args:
        hidden_states: [..., D], as in ``linear_cross_entropy``.
        weight: [V, D], as in ``linear_cross_entropy``.
        labels: [...], as in ``linear_cross_entropy``, but never shifted.
        bias: [V] or None.
        logit_scale: factor on the logits, applied before the softcap; use 1 / temperature for a sampling temperature.
        softcap: as in ``linear_cross_entropy``.
        ignore_index: as in ``linear_cross_entropy``.
        entropy: return ``LogProbs.entropy``.
        log_sum_sq_probs: return ``LogProbs.log_sum_sq_probs``.
        mean_logit: return ``LogProbs.mean_logit``.
        is_top1: return ``LogProbs.is_top1``.
        logsumexp: return ``LogProbs.logsumexp``.
        config: as in ``linear_cross_entropy``.
        filter_state: if given, gradients go through the gradient filter; otherwise they are exact. The filter suits losses
            that weight tokens about equally. Under torch.compile gradients are always exact.

    Returns:
        ``LogProbs``; each requested field has the shape of ``labels``.

    Raises:
        TypeError, ValueError, RuntimeError: as in ``linear_cross_entropy``.
    """
    config = checks.check_config(config)
    x, form = _prepare_inputs(
        Inputs(hidden_states, weight, bias, labels), ignore_index, logit_scale, softcap, filter_state
    )
    is_sharded = _is_vocab_sharded(x)
    if is_sharded and is_top1:
        raise ValueError("is_top1 is not available if the vocabulary is split over processes; leave it out")
    spec = _make_spec(x, config, form)
    wanted = WantedStats(mean_logit, entropy, log_sum_sq_probs, is_top1)
    losses, stats = _statistics(is_sharded, x, spec, wanted, logsumexp, filter_state)

    def shaped(values: Tensor, wanted: bool) -> Tensor | None:
        return values.view(labels.shape) if wanted else None

    return LogProbs(
        -losses.view(labels.shape),
        shaped(stats.entropy, entropy),
        shaped(stats.log_sum_sq, log_sum_sq_probs),
        shaped(stats.mean_logit, mean_logit),
        shaped(stats.is_top1, is_top1),
        shaped(stats.lse, logsumexp),
    )


def _is_vocab_sharded(x: Inputs) -> bool:
    """Return True if the vocabulary is sharded over processes (tensor parallelism); raise for other DTensors."""
    hidden, weight, bias, _ = x
    if not any(map(sharded.is_dtensor, (hidden, weight, bias))):
        return False
    reason = sharded.why_not_sharded(hidden, weight, bias)
    if reason is not None:
        raise ValueError(
            f"weight: {reason}. Under tensor parallelism, hidden_states must be a replicated DTensor, and weight and bias must "
            "be DTensors with [Shard(0)] on the same mesh. A weight that is sharded by FSDP must be gathered first (unshard)"
        )
    return True


def _make_spec(x: Inputs, config: CCEConfig, form: Form, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossSpec:
    hidden, weight, bias, _ = x  # not x[:3]: Dynamo of torch 2.8 cannot slice a named tuple
    needs = [value is not None and value.requires_grad and torch.is_grad_enabled() for value in (hidden, weight, bias)]
    return LossSpec.of(config, hidden.shape[0], (needs[0], needs[1], needs[2]), form, label_smoothing, z_loss)


def _statistics(
    is_sharded: bool, x: Inputs, spec: LossSpec, wanted: WantedStats, with_lse: bool, filter_state: FilterState | None
) -> tuple[Tensor, LogitStats]:
    """Return the same as ``ops.statistics``; ``is_top1`` is empty if the vocabulary is sharded."""
    if not is_sharded:
        return ops.statistics(x, spec, wanted, with_lse, filter_state)
    validate_labels(x, spec, SUM)
    stats = sharded.logit_stats(x, spec, wanted)
    return stats.lse - stats.label_logit, stats


def has_few_tokens(hidden_states: Tensor, weight: Tensor, config: CCEConfig | None = None) -> bool:
    """Return True if hidden_states [..., D] has so few tokens that PyTorch's full logits are used; see ``CCEConfig``."""
    if torch.compiler.is_compiling():  # shapes may change
        return False
    config = checks.check_config(config)
    (v, d), n = weight.shape, hidden_states.numel() // max(1, hidden_states.shape[-1])
    dtype, device = hidden_states.dtype, hidden_states.device
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    needs = [x.requires_grad and torch.is_grad_enabled() for x in (hidden_states, weight)]
    spec = LossSpec.of(config, n, (needs[0], needs[1], False))
    return dispatch.prefers_full_logits(dispatch.Problem(n, d, v, dtype, device), spec)


def rounds_logits(hidden_states: Tensor, weight: Tensor, config: CCEConfig | None) -> bool:
    """Return True if losses of hidden_states [..., D] are computed from logits rounded to its dtype, as by PyTorch."""
    device, dtype = hidden_states.device, hidden_states.dtype
    implementation = dispatch.choose_implementation(device, dtype, checks.check_config(config).implementation)
    return implementation == "portable" or has_few_tokens(hidden_states, weight, config)


def _prepare_inputs(
    x: Inputs, ignore_index: int, logit_scale: float, softcap: float | None, filter_state: FilterState | None
) -> tuple[Inputs, Form]:
    """Check everything that can be checked without reading data; cast for autocast; flatten to [N, D] and [N]."""
    hidden_states, weight, bias, labels = x
    if not isinstance(ignore_index, checks.INTEGERS) or isinstance(ignore_index, bool):
        raise TypeError(
            f"ignore_index must be an int, got {checks.type_name(ignore_index)}; to ignore no labels, keep the default -100"
        )
    if not isinstance(filter_state, (FilterState, type(None))):
        raise TypeError(f"filter_state must be a FilterState or None, got {checks.type_name(filter_state)}")
    hidden_states, weight, bias = checks.check_head(hidden_states, weight, bias, ("hidden_states", "weight", "bias"))
    checks.check_tensor("labels", "[...]", labels)
    checks.check_tokens("labels", labels, labels.shape, "hidden_states", hidden_states)
    if labels.dtype not in _LABEL_DTYPES:
        advice = "" if labels.is_floating_point() else "; convert them with labels.long()"
        raise ValueError(f"labels must be integers (torch.int64, int32, int16 or uint8), got {labels.dtype}{advice}")
    checks.check_logit_options(logit_scale, softcap)
    # flatten makes no view of a tensor that has this shape already
    flat = hidden_states.flatten(0, -2) if hidden_states.dim() > 1 else hidden_states[None]
    x = Inputs(flat, weight, bias, labels.flatten().long().contiguous())
    return x, (checks.to_number(ignore_index, int), checks.to_number(logit_scale), float(softcap or 0.0))
