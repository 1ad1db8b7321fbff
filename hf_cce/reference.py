"""The loss in plain PyTorch: the executable specification of the kernels, and the fallback for any gradient of any statistic.

Legend: N tokens, D hidden size, V vocabulary. z = softcap(logit_scale · (h Wᵀ + b)), p = softmax(z), lse = logsumexp(z).

``logit_stats`` and ``logit_stats_backward`` walk over slabs of the vocabulary and hold one slab of logits at a time. Gradients
are formed from recomputed logits (four GEMMs), so any gradient of the statistics can be asked for, any number of times.
``hf_cce.fallback`` is faster where the loss is one scalar.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_cce.config import MIB
from hf_cce.quantized import dense, scratch_per_row
from hf_cce.spec import Divisor, Inputs, LossSpec, Stats, TokenGrads, Wanted, accumulation_dtype

# Below this, saving memory helps nobody, and smaller slabs starve the GEMMs.
SCRATCH_FLOOR = 16 * MIB

# Where the first call of a process runs in several threads, MKL computes a part of it to 12 bits or so, once in some hundred
# processes on a busy machine (PyTorch's issue 188792, oneMKL 2024.2). A call on one number runs in one thread and avoids that.
for _dtype in (torch.float32, torch.float64):
    _one = torch.ones(1, dtype=_dtype, device="cpu")
    _one.exp(), _one.log(), _one.tanh()  # what is called below


def scratch_bytes(n: int, v: int, itemsize: int, memory_budget: int) -> int:
    """A tenth of what the logits would take, but at least ``SCRATCH_FLOOR`` and at most the budget."""
    return min(memory_budget, max(SCRATCH_FLOOR, n * v * itemsize // 10))


def has_wide_products(x: Tensor) -> bool:
    """Whether PyTorch multiplies narrow tensors like ``x`` into float32."""
    return x.is_cuda and torch.version.cuda is not None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, accumulated in the dtype of ``total``, without converting CUDA operands."""
    if a.dtype == total.dtype == b.dtype:
        total.addmm_(a, b)
    elif has_wide_products(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def validate_labels(labels: Tensor, ignore_index: int, v: int, divisor: Divisor) -> tuple[Tensor, Tensor]:
    """(whether every label is in [0, V) or ignored, what a sum of losses is multiplied by), scalars on the labels' device."""
    valid = labels != ignore_index
    inside = torch.where(valid, labels, 0)
    ok = (inside.clamp(0, v - 1) == inside).all()
    if divisor.number > 0:
        return ok, torch.full((), 1 / divisor.number, dtype=torch.float64, device=labels.device)
    wide = torch.float32 if labels.device.type == "mps" else torch.float64
    if divisor.items is None:  # of no label the sum is zero, whatever it is divided by
        return ok, valid.sum().clamp_(min=1).to(wide).reciprocal_()
    items = divisor.items.to(labels.device, wide)
    return ok, torch.where(items == 0, 0.0, 1 / torch.where(items == 0, 1.0, items))


def token_losses(stats: Stats, spec: LossSpec) -> Tensor:
    """Loss of each token [N]: lse − (1 − ε) z_label − ε · mean(z) + z_loss · lse², with ε the label smoothing."""
    loss = stats.lse - stats.label_logit
    if spec.label_smoothing:
        loss = loss + spec.label_smoothing * (stats.label_logit - stats.mean_logit)
    return loss + spec.z_loss * stats.lse.square() if spec.z_loss else loss


def token_gradients(grad: Tensor, factor: Tensor, lse: Tensor, spec: LossSpec) -> TokenGrads:
    """Gradients in the statistics of ``grad`` · ``factor`` · Σ loss."""
    g = (grad * factor).to(lse.dtype).expand_as(lse)
    of_lse = g * (1 + 2 * spec.z_loss * lse) if spec.z_loss else g.contiguous()
    smoothing = spec.label_smoothing
    of_label = (g * (smoothing - 1)).contiguous()
    return TokenGrads(of_lse, of_label, (g * -smoothing).contiguous() if smoothing else None)


def logit_stats(x: Inputs, spec: LossSpec, wanted: Wanted) -> Stats:
    """One pass over slabs of the vocabulary with a running maximum, as in online softmax (Milakov & Gimelshein, 2018)."""
    n_all, v = x.labels.numel(), x.weight.shape[0]
    valid = x.labels != spec.ignore_index
    rows = _rows(valid)
    hidden, labels = (x.hidden, x.labels) if rows is None else (x.hidden[rows], x.labels[rows])
    n, wide = labels.numel(), accumulation_dtype(hidden.dtype)

    def vector(value: float) -> Tensor:
        return torch.full((n,), value, dtype=wide, device=hidden.device)

    top, total, label_logit = vector(-math.inf), vector(0), vector(0)
    z_sum, weighted, squares = vector(0), vector(0), vector(0)
    width = _slab_width(n, v, hidden.dtype, 1 + wanted.entropy, spec.memory_budget, scratch_per_row(x.weight))
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _slab_logits(hidden, x, spec, start, stop)
        inside, local = _labels_inside(labels, start, stop)
        label_logit += torch.where(inside, z.gather(1, local).squeeze(1), 0)
        if wanted.mean:
            z_sum += z.sum(1)
        new_top = torch.maximum(top, z.amax(1))
        shift = torch.where(new_top == -math.inf, 0, top - new_top)  # -inf − -inf would be NaN
        decay = shift.exp()
        z.sub_(torch.where(new_top == -math.inf, 0, new_top)[:, None])
        e = z.exp() if wanted.entropy else z.exp_()
        if wanted.entropy:
            weighted = torch.where(total > 0, weighted + shift * total, 0) * decay + z.mul_(e).nan_to_num_(0.0).sum(1)
        total = total * decay + e.sum(1)
        if wanted.log_sum_sq:
            squares = squares * decay * decay + e.square_().sum(1)
        top = new_top
        del z, e  # or they would still be there while the next slab is made
    log_total = total.log()

    def scatter(values: Tensor, wanted: bool = True) -> Tensor:
        if not wanted:
            return values.new_empty(0)
        if rows is None:
            return torch.where(valid, values, values.new_zeros(()))
        return values.new_zeros(n_all).index_copy_(0, rows, values)

    return Stats(
        scatter(top + log_total),
        scatter(label_logit),
        scatter(z_sum / v, wanted.mean),
        scatter(log_total - weighted / total, wanted.entropy),
        scatter(squares.log() - 2 * log_total, wanted.log_sum_sq),
        scatter(label_logit >= top) if wanted.top1 else top.new_empty(0),
    )


def logit_stats_backward(
    x: Inputs,
    spec: LossSpec,
    lse: Tensor,
    entropy: Tensor | None,
    grads: TokenGrads,
    grad_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the statistics in hidden [N, D], weight [V, D] and bias [V]; empty where not needed.

    ``grad_weight``: where to write that of the weight, if not into memory of its own.
    With H the entropy, needed with ``grads.entropy``: ∂lse/∂z = p, ∂z_label/∂z = one-hot, ∂(mean z)/∂z = 1/V,
    ∂H/∂z = −p · (z − (lse − H)).
    """
    (hidden, weight, _, labels), (need_hidden, need_weight, need_bias) = x, spec.needs
    v, wide = weight.shape[0], accumulation_dtype(hidden.dtype)
    valid = labels != spec.ignore_index
    rows = _rows(valid)
    if rows is not None:
        hidden, labels, lse = (tensor[rows] for tensor in (hidden, labels, lse))
        entropy = None if entropy is None else entropy[rows]
        grads = TokenGrads(*(None if g is None else g[rows] for g in grads))  # type: ignore[arg-type]
    elif _would_wait(hidden):  # masked instead of left out: p is exp(−inf) there
        hidden, lse = torch.where(valid[:, None], hidden, 0), torch.where(valid, lse, math.inf)
        grads = TokenGrads(*(None if g is None else torch.where(valid, g, 0) for g in grads))  # type: ignore[arg-type]
    n = labels.numel()
    grad_hidden = torch.zeros(hidden.shape if need_hidden else 0, dtype=wide, device=hidden.device)
    if grad_weight is None:
        grad_weight = hidden.new_empty(weight.shape if need_weight else 0)
    if not n:
        grad_weight.zero_()
    grad_bias = hidden.new_zeros(v if need_bias else 0)
    narrow = hidden.dtype != wide
    # Rows of the weight in float32; and what oneDNN takes in several threads for a product of narrow numbers, as much again
    weight_copy = (8 * weight.shape[1] if narrow else 0) + scratch_per_row(weight)
    sums = 4 * hidden.numel() if narrow and need_hidden else 0  # of grad_hidden
    copies = 1 + _keeps_logits(spec, grads) + (grads.entropy is not None)
    width = _slab_width(n, v, hidden.dtype, copies, spec.memory_budget, weight_copy, sums)
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _slab_logits(hidden, x, spec, start, stop)
        g = _logit_gradients(z, spec, lse, entropy, grads, labels, start, v)
        if need_bias:
            grad_bias[start:stop] = g.sum(0)
        rounded = g.to(hidden.dtype)
        if need_hidden:
            # Not rounded to a narrow dtype for each slab: that would be worse than one product over all of V.
            add_product(grad_hidden, rounded if g.is_cuda else g, dense(weight[start:stop]))
        if need_weight:
            torch.mm(rounded.t(), hidden, out=grad_weight[start:stop])
        del z, g, rounded  # or they would still be there while the next slab is made
    grad_hidden = grad_hidden.to(hidden.dtype)
    if need_hidden and rows is not None:
        grad_hidden = x.hidden.new_zeros(x.hidden.shape).index_copy_(0, rows, grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def _would_wait(x: Tensor) -> bool:
    """Whether the host would wait for a device to know which tokens have a label."""
    return x.device.type != "cpu"


def _rows(valid: Tensor) -> Tensor | None:
    """The tokens with a label where some have none; None for all, and where asking would wait for a GPU."""
    if _would_wait(valid):
        return None
    rows = valid.nonzero().squeeze(1)
    return None if rows.numel() == valid.numel() else rows


def _slab_width(
    n: int, v: int, dtype: torch.dtype, copies: int, memory_budget: int, per_column: int = 0, beside: int = 0
) -> int:
    """Columns of a slab that has ``copies`` float arrays [N, width], one more of a narrow ``dtype``, and ``per_column`` bytes.

    ``beside``: bytes that lie there all the while; where they are most of the scratch memory a slab takes a quarter of it.
    """
    wide = accumulation_dtype(dtype).itemsize
    per_column += n * (wide * copies + (dtype.itemsize if dtype.itemsize < wide else 0))
    scratch = scratch_bytes(n, v, wide, memory_budget)
    width = max(scratch - beside, scratch // 4) // max(per_column, 1)
    return max(16, min(v, width))


def _slab_logits(hidden: Tensor, x: Inputs, spec: LossSpec, start: int, stop: int) -> Tensor:
    """Logits [N, stop − start] in the accumulation dtype, with as few temporaries as possible."""
    z = torch.mm(hidden, dense(x.weight[start:stop]).t())
    z = z.to(accumulation_dtype(z.dtype))
    if x.bias is not None:
        z.add_(x.bias[start:stop])
    if spec.logit_scale != 1.0:
        z.mul_(spec.logit_scale)
    return z.div_(spec.softcap).tanh_().mul_(spec.softcap) if spec.softcap else z


def _labels_inside(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(whether the label lies in [start, stop) [N], its column or any other [N, 1])."""
    return (labels >= start) & (labels < stop), (labels - start).clamp_(0, stop - start - 1)[:, None]


def _keeps_logits(spec: LossSpec, grads: TokenGrads) -> bool:
    """Whether the gradient of the logits needs the logits themselves beside their exponentials."""
    return grads.entropy is not None or spec.softcap > 0


def _logit_gradients(
    z: Tensor,
    spec: LossSpec,
    lse: Tensor,
    entropy: Tensor | None,
    grads: TokenGrads,
    labels: Tensor,
    start: int,
    v: int,
) -> Tensor:
    """Gradient of a slab of logits before scale and softcap; uses up ``z``."""
    g = (z - lse[:, None] if _keeps_logits(spec, grads) else z.sub_(lse[:, None])).exp_()
    if grads.entropy is not None and entropy is not None:
        z.clamp_(min=-1e30)  # −inf would make NaN of p · z = 0
        g.mul_((z - (lse - entropy)[:, None]).mul_(-grads.entropy[:, None]).add_(grads.lse[:, None]))
    else:
        g.mul_(grads.lse[:, None])
    if grads.mean is not None:
        g.add_((grads.mean / v)[:, None])
    inside, local = _labels_inside(labels, start, start + z.shape[1])
    g.scatter_add_(1, local, torch.where(inside, grads.label, 0)[:, None])
    if spec.softcap:
        g.mul_(z.div_(spec.softcap).square_().neg_().add_(1))
    return g.mul_(spec.logit_scale) if spec.logit_scale != 1.0 else g
