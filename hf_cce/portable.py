"""The loss in plain PyTorch: for CPUs, Apple GPUs and old NVIDIA GPUs, and the executable specification of the kernels.

Legend: N tokens, D hidden size, V vocabulary. z = softcap(logit_scale · (h Wᵀ + b)), p = softmax(z), lse = logsumexp(z).

Two algorithms, because two things can be scarce:

- ``logit_stats`` / ``logit_stats_backward`` walk over slabs of the vocabulary and hold one slab of logits at a time. Every
  gradient is formed from recomputed logits (four GEMMs), so any gradient of the statistics can be asked for, any number of times.
- ``cross_entropy``, in full precision, walks over blocks of tokens, each with the whole vocabulary, and forms the gradients in
  the forward pass (three GEMMs, as many as full logits need): the gradient of its result is one scalar for all tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce.config import MIB

# Below this, saving memory helps nobody, and smaller slabs starve the GEMMs.
SCRATCH_FLOOR = 16 * MIB
# As few tokens at a time do, to which the gradient of the weight is added anew each time: on two cores 256 of 576 × 49,152 took
# 305 ms in blocks of 64 and 219 in blocks of 128, where full logits took 241.
LEAST_TOKENS = 128


# Where the first call of a process runs in several threads, MKL computes a part of it to 12 bits or so, once in some hundred
# processes on a busy machine (PyTorch's issue 188792, oneMKL 2024.2). One number takes one thread, and then all is settled.
for _dtype in (torch.float32, torch.float64):
    _one = torch.ones(1, dtype=_dtype, device="cpu")
    _one.exp(), _one.log(), _one.tanh()  # what is called below


class Stats(NamedTuple):
    """Per-token statistics of the logits, each [N] in float32 (float64 for float64 inputs); zero where a label is ignored."""

    lse: Tensor
    label_logit: Tensor
    mean_logit: Tensor  # empty unless asked for, as are the following
    entropy: Tensor
    log_sum_sq: Tensor
    is_top1: Tensor  # bool


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scratch_bytes(n: int, v: int, itemsize: int, memory_budget: int) -> int:
    """A tenth of what the logits would take, but at least ``SCRATCH_FLOOR`` and at most the budget."""
    return min(memory_budget, max(SCRATCH_FLOOR, n * v * itemsize // 10))


def _token_block(n: int, v: int, bytes_per_logit: int, memory_budget: int) -> int:
    """Tokens per block of ``cross_entropy``; multiples of 32, which GEMM and softmax over the first dimension like."""
    wanted = max(scratch_bytes(n, v, bytes_per_logit, memory_budget), LEAST_TOKENS * v * bytes_per_logit)
    block = min(wanted, memory_budget) // (v * bytes_per_logit)
    return max(16, block if block < 32 else block - block % 32)  # of fewer than 16, rounding suffers


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float) -> Tensor:
    """Logits of one slab [N, slab] in the accumulation dtype, as few temporaries as possible."""
    z = torch.mm(hidden, weight.t())
    z = z.to(accumulation_dtype(z.dtype))
    if bias is not None:
        z.add_(bias)
    if logit_scale != 1.0:
        z.mul_(logit_scale)
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)
    return z


def _slab_width(
    n: int, v: int, dtype: torch.dtype, copies: int, memory_budget: int, per_column: int = 0, beside: int = 0
) -> int:
    """Columns of a slab that has ``copies`` float arrays [N, width], one more of a narrow ``dtype``, and ``per_column`` bytes.

    ``beside``: bytes that lie there all the while; where they are most of the scratch memory a slab takes a quarter of it.
    """
    wide = torch.finfo(accumulation_dtype(dtype)).bits // 8
    per_column += n * (wide * copies + (dtype.itemsize if dtype.itemsize < wide else 0))
    scratch = scratch_bytes(n, v, wide, memory_budget)
    width = max(scratch - beside, scratch // 4) // max(per_column, 1)
    return max(16, min(v, width))


def survey_labels(
    labels: Tensor, ignore_index: int, v: int, num_items: Tensor | None, divisor: float
) -> tuple[Tensor, Tensor]:
    """(whether every label is in [0, V) or ignored, what a sum of losses is multiplied by), scalars; see ``hf_cce.choice``."""
    valid = labels != ignore_index
    ok = ~(valid & ((labels < 0) | (labels >= v))).any()
    if divisor > 0:
        return ok, torch.full((), 1 / divisor, dtype=torch.float64, device=labels.device)
    items = valid.sum() if num_items is None else num_items
    items = items.to(labels.device, torch.float32 if labels.device.type == "mps" else torch.float64)
    return ok, torch.where(items == 0, 0.0, 1 / torch.where(items == 0, 1.0, items))


def logit_stats(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    want_mean: bool,
    want_entropy: bool,
    want_log_sum_sq: bool,
    want_top1: bool,
    memory_budget: int,
) -> Stats:
    """One pass over slabs of the vocabulary with a running maximum, as in online softmax (Milakov & Gimelshein, 2018)."""
    n_all, v = labels.numel(), weight.shape[0]
    valid = labels != ignore_index
    rows = valid.nonzero().squeeze(1)
    hidden, labels = (hidden, labels) if rows.numel() == n_all else (hidden[rows], labels[rows])
    n, wide = labels.numel(), accumulation_dtype(hidden.dtype)

    def vector(value: float) -> Tensor:
        return torch.full((n,), value, dtype=wide, device=hidden.device)

    top, total, label_logit = vector(-math.inf), vector(0), vector(0)
    z_sum, weighted, squares = vector(0), vector(0), vector(0)
    width = _slab_width(n, v, hidden.dtype, 1 + want_entropy, memory_budget)
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _logits(hidden, weight[start:stop], None if bias is None else bias[start:stop], logit_scale, softcap)
        inside = (labels >= start) & (labels < stop)
        local = (labels - start).clamp_(0, stop - start - 1)
        label_logit += torch.where(inside, z.gather(1, local[:, None]).squeeze(1), 0)
        if want_mean:
            z_sum += z.sum(1)
        new_top = torch.maximum(top, z.amax(1))
        shift = torch.where(new_top == -math.inf, 0, top - new_top)  # -inf − -inf would be NaN
        decay = shift.exp()
        z.sub_(torch.where(new_top == -math.inf, 0, new_top)[:, None])
        e = z.exp() if want_entropy else z.exp_()
        if want_entropy:
            weighted = torch.where(total > 0, weighted + shift * total, 0) * decay + z.mul_(e).nan_to_num_(0.0).sum(1)
        total = total * decay + e.sum(1)
        if want_log_sum_sq:
            squares = squares * decay * decay + e.square_().sum(1)
        top = new_top
        del z, e  # or they would still be there while the next slab is made
    log_total = total.log()
    lse = top + log_total

    def scatter(x: Tensor, wanted: bool = True) -> Tensor:
        if not wanted:
            return x.new_empty(0)
        return x if n == n_all else x.new_zeros(n_all).index_copy_(0, rows, x)

    return Stats(
        scatter(lse),
        scatter(label_logit),
        scatter(z_sum / v, want_mean),
        scatter(log_total - weighted / total, want_entropy),
        scatter(squares.log() - 2 * log_total, want_log_sum_sq),
        scatter(label_logit >= top) if want_top1 else top.new_empty(0),
    )


def logit_stats_backward(
    grad_lse: Tensor,  # [N]
    grad_label: Tensor,  # [N]
    grad_mean: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,  # [N]
    entropy: Tensor | None,  # [N]; needed with grad_entropy
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the statistics in ``hidden`` [N, D], ``weight`` [V, D] and ``bias`` [V]; empty where not needed.

    With H the entropy: ∂lse/∂z = p, ∂z_label/∂z = one-hot, ∂(mean z)/∂z = 1/V, ∂H/∂z = −p · (z − (lse − H)).
    """
    v, wide = weight.shape[0], accumulation_dtype(hidden.dtype)
    all_hidden = hidden
    rows = (labels != ignore_index).nonzero().squeeze(1)
    if rows.numel() != labels.numel():
        hidden, labels, lse, grad_lse, grad_label = (x[rows] for x in (hidden, labels, lse, grad_lse, grad_label))
        grad_mean = None if grad_mean is None else grad_mean[rows]
        grad_entropy = None if grad_entropy is None else grad_entropy[rows]
        entropy = None if entropy is None else entropy[rows]
    n = labels.numel()
    grad_hidden = torch.zeros(hidden.shape if need_hidden else 0, dtype=wide, device=hidden.device)
    grad_weight = (
        weight.new_zeros(weight.shape)
        if need_weight and not n
        else weight.new_empty(weight.shape if need_weight else 0)
    )
    grad_bias = weight.new_zeros(v if need_bias else 0)
    narrow = hidden.dtype != wide
    # Rows of the weight in float32; and what oneDNN takes in several threads for a product of narrow numbers, as much again
    weight_copy = 8 * weight.shape[1] if narrow else 0
    sums = 4 * hidden.numel() if narrow and need_hidden else 0  # of grad_hidden
    keep_z = grad_entropy is not None or softcap > 0
    width = _slab_width(n, v, hidden.dtype, 1 + keep_z + (grad_entropy is not None), memory_budget, weight_copy, sums)
    for start in range(0, v if n else 0, width):
        stop = min(v, start + width)
        z = _logits(hidden, weight[start:stop], None if bias is None else bias[start:stop], logit_scale, softcap)
        g = (z - lse[:, None] if keep_z else z.sub_(lse[:, None])).exp_()
        if grad_entropy is not None and entropy is not None:
            z.clamp_(min=-1e30)  # −inf would make NaN of p · z = 0
            g.mul_((z - (lse - entropy)[:, None]).mul_(-grad_entropy[:, None]).add_(grad_lse[:, None]))
        else:
            g.mul_(grad_lse[:, None])
        if grad_mean is not None:
            g.add_((grad_mean / v)[:, None])
        inside = (labels >= start) & (labels < stop)
        local = (labels - start).clamp_(0, stop - start - 1)
        g.scatter_add_(1, local[:, None], torch.where(inside, grad_label, 0)[:, None])
        if softcap:
            g.mul_(z.div_(softcap).square_().neg_().add_(1))
        if logit_scale != 1.0:
            g.mul_(logit_scale)
        if need_bias:
            grad_bias[start:stop] = g.sum(0)
        if need_hidden:
            # In float32 also for narrow dtypes: a product rounded per slab would be worse than one over all of V.
            grad_hidden.addmm_(g, weight[start:stop].to(wide))
        if need_weight:
            torch.mm(g.to(hidden.dtype).t(), hidden, out=grad_weight[start:stop])
        del z, g
    grad_hidden = grad_hidden.to(hidden.dtype)
    if need_hidden and n != all_hidden.shape[0]:
        grad_hidden = all_hidden.new_zeros(all_hidden.shape).index_copy_(0, rows, grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def forms_gradients(dtype: torch.dtype) -> bool:
    """Whether ``cross_entropy`` forms the gradients itself: for a narrow dtype it would need the weight's in float32 as well."""
    return dtype in (torch.float32, torch.float64)


def cross_entropy(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``factor`` · Σ over tokens of the loss, the tokens' lse [N], and the gradients of that sum where they are formed here.

    Loss of a token: lse − (1 − ε) z_label − ε · mean(z) + z_loss · lse², with ε the label smoothing.
    """
    if forms_gradients(hidden.dtype):
        return _with_gradients(
            hidden, weight, bias, labels, factor, ignore_index, logit_scale, softcap, label_smoothing, z_loss,
            need_hidden, need_weight, need_bias, memory_budget,
        )  # fmt: skip
    stats = logit_stats(
        hidden, weight, bias, labels, ignore_index, logit_scale, softcap, label_smoothing > 0, False, False, False,
        memory_budget,
    )  # fmt: skip
    loss = stats.lse - stats.label_logit
    if label_smoothing:
        loss = loss + label_smoothing * (stats.label_logit - stats.mean_logit)
    if z_loss:
        loss = loss + z_loss * stats.lse.square()
    return loss.sum() * factor, stats.lse, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)


def token_gradients(
    grad: Tensor, factor: Tensor, lse: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """∂/∂lse, ∂/∂z_label and ∂/∂mean(z), [N] each, of ``grad`` · ``factor`` · Σ loss; the last only with label smoothing."""
    g = (grad * factor).to(lse.dtype).expand_as(lse)
    grad_lse = g * (1 + 2 * z_loss * lse) if z_loss else g.contiguous()
    grad_label = (g * (label_smoothing - 1)).contiguous()
    return grad_lse, grad_label, (g * -label_smoothing).contiguous() if label_smoothing else None


def _with_gradients(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    factor: Tensor,  # scalar
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``cross_entropy`` in full precision: blocks of tokens with the whole vocabulary, loss and gradients in one pass."""
    n_all, v, d = labels.numel(), weight.shape[0], weight.shape[1]
    valid = labels != ignore_index
    picked = valid.nonzero().squeeze(1)
    everything = picked.numel() == n_all
    wide, c = accumulation_dtype(hidden.dtype), float(factor)
    lse_all = torch.zeros(n_all, dtype=wide, device=hidden.device)
    grad_hidden = hidden.new_zeros(hidden.shape if need_hidden else 0)
    grad_weight = weight.new_empty((v, d) if need_weight else 0)
    grad_bias = weight.new_zeros(v if need_bias else 0)
    need_any = need_hidden or need_weight or need_bias
    n = picked.numel()
    block = _token_block(n, v, hidden.dtype.itemsize * (2 if softcap and need_any else 1), memory_budget)
    # [V, tokens], not [tokens, V]: measured on two cores at 96 tokens, the three GEMMs take 25 % less in this orientation.
    scratch = hidden.new_empty(v * max(16, min(block, n)) if n else 0)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    for start in range(0, n, block):
        stop = min(n, start + block)
        rows = slice(start, stop) if everything else picked[start:stop]
        h, y, size = hidden[rows], labels[rows], stop - start
        if size < 16:  # measured: with fewer columns MKL sums over V naively, ten times the rounding error
            h, y, size = F.pad(h, (0, 0, 0, 16 - size)), F.pad(y, (0, 16 - size)), 16
        z = torch.mm(weight, h.t(), out=scratch[: v * size].view(v, size))
        if bias is not None:
            z.add_(bias[:, None])
        if logit_scale != 1.0:
            z.mul_(logit_scale)
        if softcap:
            z.div_(softcap).tanh_().mul_(softcap)
        top, at_label = z.amax(0), z.gather(0, y[None])
        mean = z.mean(0) if label_smoothing else None
        jacobian = z.div(softcap).square_().neg_().add_(1) if softcap and need_any else None
        # Not torch.softmax: over the first dimension it sums naively, and its error grows with V.
        z.sub_(top).exp_()
        norm = z.sum(0)
        lse = top + norm.log()
        lse_all[rows] = lse[: stop - start]
        loss = lse - at_label[0]
        if mean is not None:
            loss = loss + label_smoothing * (at_label[0] - mean)
        if z_loss:
            loss = loss + z_loss * lse.square()
        total += loss[: stop - start].sum()
        if not need_any:
            continue
        # z becomes norm · ∂loss/∂z: the division by norm costs nothing on the small factors h and grad_hidden.
        if z_loss:
            z.mul_(1 + 2 * z_loss * lse)
        z.scatter_add_(0, y[None], (norm * (label_smoothing - 1))[None])
        if label_smoothing:
            z.sub_(norm * (label_smoothing / v))
        if jacobian is not None:
            z.mul_(jacobian)
        weights = (c * logit_scale) / norm
        weights[stop - start :] = 0
        if need_hidden:
            grad_hidden[rows] = torch.mm(weight.t(), z).mul_(weights).t()[: stop - start]
        if need_weight:
            # beta=0 ignores what is in the fresh buffer, so it need not be zeroed first
            grad_weight.addmm_(z, h * weights[:, None], beta=0.0 if start == 0 else 1.0)
        if need_bias:
            grad_bias.add_(torch.mv(z, weights))
    if need_weight and not n:
        grad_weight.zero_()
    return total * factor, lse_all, grad_hidden, grad_weight, grad_bias
