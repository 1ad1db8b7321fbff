"""The loss in plain PyTorch: the executable specification of the kernels, and the fallback for gradients of any statistic.

Legend: N tokens, D hidden size, V vocabulary. z = softcap(logit_scale · (h Wᵀ + b)), p = softmax(z), lse = logsumexp(z).

``logit_stats`` and ``logit_stats_backward`` loop over slabs of the vocabulary. The backward pass computes the logits again (four
GEMMs in all), so it works for any upstream gradient, any number of times. ``hf_cce.fallback`` is faster for a scalar loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_cce.config import MIB
from hf_cce.matmul import multiply_add
from hf_cce.quantized import dense, scratch_per_row
from hf_cce.spec import Divisor, Inputs, LogitStats, LossSpec, TokenGrads, Tokens, WantedStats, accumulation_dtype

# Minimum workspace: less would save no memory that matters, and small slabs make the GEMMs slow.
MIN_SCRATCH_BYTES = 16 * MIB
MIN_ROWS_CPU = 16  # with fewer rows, MKL sums over the vocabulary naively: ten times the rounding error
# logsumexp of ignored tokens, so that their probabilities are zero; finite, because 0 · inf would be NaN.
IGNORED_LSE = 1e30

# MKL bug (PyTorch issue 188792, oneMKL 2024.2): if the first call in a process is multi-threaded, a part of the result may have
# only about 12 correct bits, once in some hundred processes on a busy machine. A first call on one element is single-threaded.
for _dtype in (torch.float32, torch.float64):
    _one = torch.ones(1, dtype=_dtype, device="cpu")
    _one.exp(), _one.log(), _one.tanh()  # the functions used below


def scratch_bytes(n: int, v: int, itemsize: int, memory_budget: int) -> int:
    """Return a tenth of the logits' size, but at least ``MIN_SCRATCH_BYTES`` and at most the budget."""
    return min(memory_budget, max(MIN_SCRATCH_BYTES, n * v * itemsize // 10))


def validate_labels(labels: Tensor, ignore_index: int, v: int, divisor: Divisor) -> tuple[Tensor, Tensor]:
    """Return (True if all labels are in [0, V) or ignored, factor on the summed loss), scalars on the labels' device."""
    valid = labels != ignore_index
    inside = torch.where(valid, labels, 0)
    ok = (inside.clamp(0, v - 1) == inside).all()
    if divisor.number > 0:
        return ok, torch.full((), 1 / divisor.number, dtype=torch.float64, device=labels.device)
    factor_dtype = torch.float32 if labels.device.type == "mps" else torch.float64
    if divisor.items is None:  # without labels the sum is zero, and any divisor will do
        return ok, valid.sum(dtype=factor_dtype).clamp_(min=1).reciprocal_()
    items = divisor.items.to(labels.device, factor_dtype)
    return ok, torch.where(items == 0, 0.0, 1 / torch.where(items == 0, 1.0, items))


def add_smoothing_and_z_loss(loss: Tensor, stats: LogitStats, spec: LossSpec) -> Tensor:
    """Return the loss of each token [N]: lse − (1 − ε) z_label − ε · mean(z) + z_loss · lse², with ε the label smoothing.

    ``loss`` [N] is lse − z_label.
    """
    if spec.label_smoothing:
        loss = loss + spec.label_smoothing * (stats.label_logit - stats.mean_logit)
    return loss + spec.z_loss * stats.lse.square() if spec.z_loss else loss


def zero_if_all_ignored(grad: Tensor, labels: Tensor, spec: LossSpec) -> Tensor:
    """Return the loss's upstream gradient; zero without labels, where a division by their count may have made it infinite."""
    return torch.where((labels == spec.ignore_index).all(), 0.0, grad)


def mean_entropy_and_squares(z: Tensor, log_p: Tensor, wanted: WantedStats) -> tuple[Tensor | None, ...]:
    """Return mean logit, entropy and log Σ p² [N] of logits ``z`` [N, V] with log-probabilities ``log_p``, None if not wanted."""
    return (
        # The gradient of a mean would be a tensor [N, V] of its own.
        z.sum(1, dtype=log_p.dtype) / z.shape[1] if wanted.mean else None,
        # With p = 0, p · log p would be 0 · (−inf) = NaN.
        -(log_p.exp() * log_p.clamp(min=-1e30)).sum(1) if wanted.entropy else None,
        log_p.detach().exp().square_().sum(1).log_() if wanted.log_sum_sq else None,
    )


def select_rows(x: Inputs, spec: LossSpec, mask: bool = True) -> tuple[Inputs, Tokens]:
    """Return the inputs of the tokens that have a label, and these tokens.

    On a GPU no token is left out, because finding them would synchronize. The hidden states of tokens without a label are zeroed,
    so that NaN there cannot propagate; on a GPU only if ``mask``.
    """
    valid = x.labels != spec.ignore_index
    if _would_sync(valid):
        return (x._replace(hidden=torch.where(valid[:, None], x.hidden, 0)) if mask else x), Tokens()
    rows = valid.nonzero()[:, 0]
    if len(rows) == len(valid):
        return x, Tokens()
    labeled = len(rows)
    if labeled < MIN_ROWS_CPU:
        rows = torch.cat((rows, (~valid).nonzero()[: MIN_ROWS_CPU - labeled, 0]))
    hidden = x.hidden[rows]
    hidden[labeled:] = 0
    return x._replace(hidden=hidden, labels=x.labels[rows]), Tokens(indices=rows)


def select_grads(
    labels: Tensor, tokens: Tokens, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads
) -> tuple[Tensor, Tensor | None, TokenGrads]:
    """Return statistics and their upstream gradients for the ``tokens`` of ``select_rows``; ignored tokens get no gradient."""
    valid = labels != spec.ignore_index
    lse, grads = torch.where(valid, lse, IGNORED_LSE), grads.map(lambda g: torch.where(valid, g, 0))
    return tokens.gather(lse), None if entropy is None else tokens.gather(entropy), grads.map(tokens.gather)


def zero_ignored(stats: Iterable[Tensor], valid: Tensor, tokens: Tokens) -> list[Tensor]:
    """Return ``stats``, each of ``tokens`` or empty, for all tokens, with zeros (False) where not ``valid``; new tensors."""
    stats = [tokens.scatter(s, len(valid)) if s.numel() else s for s in stats]
    return [torch.where(valid, s, s.new_zeros(())) if s.numel() else torch.empty_like(s) for s in stats]


def logit_stats(x: Inputs, spec: LossSpec, wanted: WantedStats) -> LogitStats:
    """Compute the statistics in one pass over slabs of logits, as in online softmax (Milakov & Gimelshein, 2018)."""
    valid = x.labels != spec.ignore_index
    x, tokens = select_rows(x, spec, mask=False)
    hidden, labels, v = x.hidden, x.labels, x.weight.shape[0]
    n, acc_dtype = labels.numel(), accumulation_dtype(hidden.dtype)
    total, label_logit, z_sum, weighted, squares = torch.zeros((5, n), dtype=acc_dtype, device=hidden.device).unbind()
    top = torch.full_like(total, -math.inf)
    width = _slab_width(hidden, v, 1 + wanted.entropy, spec.memory_budget, scratch_per_row(x.weight))
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _slab_logits(hidden, x, spec, start, stop)
        inside, columns = _labels_inside(labels, start, stop)
        label_logit += torch.where(inside, z.gather(1, columns).squeeze(1), 0)
        if wanted.mean:
            z_sum += z.sum(1)
        new_top = torch.maximum(top, z.amax(1))
        shift = torch.where(new_top == -math.inf, 0, top - new_top)  # −inf − (−inf) would be NaN
        decay = shift.exp()
        z.sub_(torch.where(new_top == -math.inf, 0, new_top)[:, None])
        e = z.exp() if wanted.entropy else z.exp_()
        if wanted.entropy:
            weighted = torch.where(total > 0, weighted + shift * total, 0) * decay + z.mul_(e).nan_to_num_(0.0).sum(1)
        total = total * decay + e.sum(1)
        if wanted.log_sum_sq:
            squares = squares * decay * decay + e.square_().sum(1)
        top = new_top
        del z, e  # free them before the next slab is allocated
    log_total, nothing = total.log(), total.new_empty(0)
    stats = (
        top + log_total,
        label_logit,
        z_sum / v if wanted.mean else nothing,
        log_total - weighted / total if wanted.entropy else nothing,
        squares.log() - 2 * log_total if wanted.log_sum_sq else nothing,
        label_logit >= top if wanted.top1 else nothing,
    )
    return LogitStats(*zero_ignored(stats, valid, tokens))


def logit_stats_backward(
    x: Inputs, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of hidden [N, D], weight [V, D] and bias [V]; empty where not needed.

    ``entropy`` (H) is required with ``grads.entropy``.
    ∂lse/∂z = p, ∂z_label/∂z = one-hot, ∂(mean z)/∂z = 1/V, ∂H/∂z = −p · (z − (lse − H)).
    """
    n_all, (need_hidden, need_weight, need_bias) = x.labels.numel(), spec.needs
    (hidden, weight, _, labels), tokens = select_rows(x, spec)
    lse, entropy, grads = select_grads(x.labels, tokens, spec, lse, entropy, grads)
    n, v, acc_dtype = labels.numel(), weight.shape[0], accumulation_dtype(hidden.dtype)
    grad_hidden = torch.zeros(hidden.shape if need_hidden else 0, dtype=acc_dtype, device=hidden.device)
    grad_weight = hidden.new_empty(weight.shape if need_weight else 0)
    if not n:
        grad_weight.zero_()
    grad_bias = hidden.new_zeros(v if need_bias else 0)
    is_16_bit = hidden.dtype != acc_dtype
    # Bytes per weight row: its float32 copy, and as much again that multi-threaded oneDNN takes for a 16-bit matmul.
    weight_copy = (8 * weight.shape[1] if is_16_bit else 0) + scratch_per_row(weight)
    sums = 4 * hidden.numel() if is_16_bit and need_hidden else 0  # bytes of the float32 accumulator of grad_hidden
    copies = 1 + (spec.softcap > 0) + (grads.entropy is not None)
    width = _slab_width(hidden, v, copies, spec.memory_budget, weight_copy, sums)
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _slab_logits(hidden, x, spec, start, stop)
        log_p = z - lse[:, None] if spec.softcap else z.sub_(lse[:, None])
        g = logit_gradients(log_p, z, spec, entropy, grads, labels, start, v)
        if need_bias:
            grad_bias[start:stop] = g.sum(0)
        rounded = g.to(hidden.dtype)
        if need_hidden:
            # Accumulated in float32: rounding each slab to 16 bits would be less accurate than one product over all of V.
            multiply_add(grad_hidden, rounded if g.is_cuda else g, dense(weight[start:stop]))
        if need_weight:
            torch.mm(rounded.t(), hidden, out=grad_weight[start:stop])
        del z, log_p, g, rounded  # free them before the next slab is allocated
    grad_hidden = grad_hidden.to(hidden.dtype)
    return tokens.scatter(grad_hidden, n_all) if need_hidden else grad_hidden, grad_weight, grad_bias


def _would_sync(x: Tensor) -> bool:
    """Return True if finding the tokens with a label would synchronize with a device."""
    return x.device.type != "cpu"


def _slab_width(
    hidden: Tensor, v: int, copies: int, memory_budget: int, column_bytes: int = 0, reserved_bytes: int = 0
) -> int:
    """Return the columns of a slab that takes ``copies`` float arrays [N, width], plus one in a 16-bit ``dtype``.

    ``column_bytes``: more bytes per column. ``reserved_bytes``: bytes allocated during the whole loop.
    """
    n, dtype, acc_itemsize = len(hidden), hidden.dtype, accumulation_dtype(hidden.dtype).itemsize
    column_bytes += n * (acc_itemsize * copies + (dtype.itemsize if dtype.itemsize < acc_itemsize else 0))
    # A GPU gets the whole budget, because launches for small slabs would take longer than their kernels.
    scratch = memory_budget if hidden.is_cuda else scratch_bytes(n, v, acc_itemsize, memory_budget)
    width = max(scratch - reserved_bytes, scratch // 4) // max(column_bytes, 1)
    return max(16, min(v, width))


def _slab_logits(hidden: Tensor, x: Inputs, spec: LossSpec, start: int, stop: int) -> Tensor:
    """Return logits [N, stop − start] in the accumulation dtype, with as few temporaries as possible."""
    weight = dense(x.weight[start:stop]).t()
    # The sum is rounded once, as in ``hf_cce.fallback``: the logsumexp may be from there.
    z = torch.mm(hidden, weight) if x.bias is None else torch.addmm(x.bias[start:stop], hidden, weight)
    return apply_scale_and_softcap_(z.to(accumulation_dtype(z.dtype)), spec.logit_scale, spec.softcap)


def apply_scale_and_softcap_(z: Tensor, logit_scale: float, softcap: float) -> Tensor:
    """Apply scale and softcap (0: none) in place."""
    if logit_scale != 1.0:
        z.mul_(logit_scale)
    return z.div_(softcap).tanh_().mul_(softcap) if softcap else z


def _labels_inside(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return (mask of labels in [start, stop) [N], column of each label in the slab, clamped to it [N, 1])."""
    return (labels >= start) & (labels < stop), (labels - start).clamp_(0, stop - start - 1)[:, None]


def logit_gradients(
    log_p: Tensor,
    z: Tensor,
    spec: LossSpec,
    entropy: Tensor | None,
    grads: TokenGrads,
    labels: Tensor,
    start: int,
    v: int,
) -> Tensor:
    """Return the gradient of a slab of logits before scale and softcap; overwrites ``log_p`` and, with a softcap, ``z``."""
    if grads.entropy is not None and entropy is not None:
        g = log_p.exp()
        # With p = 0, p · log p would be 0 · (−inf) = NaN.
        centered = log_p.clamp_(min=-1e30).add_(entropy[:, None])
        g.mul_(centered.mul_(-grads.entropy[:, None]).add_(grads.lse[:, None]))
    else:
        g = log_p.exp_().mul_(grads.lse[:, None])
    if grads.mean is not None:
        g.add_((grads.mean / v)[:, None])
    inside, columns = _labels_inside(labels, start, start + z.shape[1])
    g.scatter_add_(1, columns, torch.where(inside, grads.label, 0)[:, None])
    if spec.softcap:
        g.mul_(z.div_(spec.softcap).square_().neg_().add_(1))
    return g.mul_(spec.logit_scale) if spec.logit_scale != 1.0 else g
