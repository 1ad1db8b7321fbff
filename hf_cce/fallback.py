"""PyTorch fallback with three GEMMs, as many as full logits need, for losses and for statistics of tokens.

The gradient of a token's loss is computed while its logits exist, up to a factor that the backward pass applies:

- ``token_losses`` overwrites the logits of all tokens with their gradient. The factor may differ by token.
- ``token_blocks`` sums the gradients of blocks of tokens, in float32. The factor is one number.

Statistics of tokens have several upstream gradients: ``logit_stats`` keeps all logits, and ``logit_stats_backward`` overwrites
them with their gradient. Kept logits have the inputs' dtype; the head is never copied to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import reference
from hf_cce.config import MIB
from hf_cce.matmul import ALIGNED, multiply, multiply_add, supports_fp32_out
from hf_cce.reference import scratch_bytes
from hf_cce.spec import Inputs, LogitStats, LossSpec, TokenGrads, Tokens, WantedStats, accumulation_dtype

# Minimum tokens per block: a CPU multiplies fewer less efficiently, and adding their product to dW costs more than the product.
MIN_BLOCK_TOKENS = 256
# Up to this size a CPU keeps all 16-bit logits at once: blocks would save little memory and cost a fourth GEMM.
ALL_LOGITS_BYTES_CPU = 64 * MIB
# Bytes of logits converted to float32 at a time: enough rows to keep a GPU busy, few enough for a CPU's cache.
CHUNK_BYTES, CHUNK_BYTES_CPU = 128 * MIB, 4 * MIB
PRODUCT_BYTES = 32 * MIB  # bytes of a float32 product that is rounded at a time; fits a GPU's cache
FULL_PRECISION = (torch.float32, torch.float64)


def fits_token_losses(tokens: int, vocab_size: int, dtype: torch.dtype, on_cpu: bool, memory_budget: int) -> bool:
    """Return True if ``token_losses`` fits the budget: logits in the inputs' dtype, and float32 chunks of them."""
    room = memory_budget - min(CHUNK_BYTES, memory_budget // 2)
    if on_cpu:
        room = min(memory_budget // 2, max(ALL_LOGITS_BYTES_CPU, scratch_bytes(tokens, vocab_size, 4, memory_budget)))
    return tokens * vocab_size * dtype.itemsize <= room


def chunks(n: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Split ``n`` rows of ``row_bytes`` into slices of at most ``chunk_bytes`` bytes, of 128 · k rows where more than 128 fit."""
    size = max(1, chunk_bytes // row_bytes)
    size -= size % 128 if size > 128 else 0
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def empty_logits(hidden: Tensor, v: int, rows: int, triton: bool = True) -> Tensor:
    """Allocate logits [rows, V]. On a GPU, rows are padded: 16-bit and TF32 GEMMs are slow on unaligned rows.

    Float32 rows are padded only for kernels (``triton``): PyTorch's operators would copy them.
    """
    on_gpu = hidden.is_cuda or hidden.is_meta  # a warm-up uses meta tensors
    padded = on_gpu and (triton or hidden.dtype not in FULL_PRECISION)
    stride = -(-v // ALIGNED) * ALIGNED if padded else v
    return hidden.new_empty((rows, stride))[:, :v]


def logits_to_gradients(
    z: Tensor, labels: Tensor, spec: LossSpec, scale: Tensor | float, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Overwrite the products ``z`` [n, V] with scale · ∂loss/∂z; return (loss [n], lse [n]), zero where ignored.

    Ignored rows of ``z`` get arbitrary finite values if their hidden states are zero.
    """
    ignored, plain = labels == spec.ignore_index, _is_plain(spec)
    (n, v), acc_dtype, smoothing = z.shape, accumulation_dtype(z.dtype), spec.label_smoothing
    y, scale = labels.masked_fill(ignored, 0)[:, None], scale * spec.logit_scale
    label_log_p, lse, mean = (torch.empty((n, 1), dtype=acc_dtype, device=z.device) for _ in range(3))
    label_logit = z.gather(1, y).to(acc_dtype) if plain else torch.empty_like(mean)
    unscaled = plain and not isinstance(scale, Tensor) and scale == 1.0
    # log_softmax copies rows that it has to convert or that are padded; on a GPU, it converts float16 without a copy.
    converted = z.dtype != acc_dtype and not (z.is_cuda and z.dtype == torch.float16)
    copied = acc_dtype.itemsize if converted else 0 if z.is_contiguous() else z.element_size()
    row_bytes = v * (acc_dtype.itemsize + copied if plain else acc_dtype.itemsize * (2 + (spec.softcap > 0)))
    for rows in chunks(n, row_bytes, _chunk_bytes(z, spec, CHUNK_BYTES if plain else 2 * CHUNK_BYTES)):
        f = z[rows] if plain else _processed(z[rows], spec, copy=False)
        log_p = F.log_softmax(f, 1, dtype=acc_dtype)
        if not plain:
            torch.gather(f, 1, y[rows], out=label_logit[rows])
        torch.gather(log_p, 1, y[rows], out=label_log_p[rows])
        if has_bias:  # a bias of −inf may mask the label, or id 0 of an ignored one: −inf − (−inf) would be NaN
            top, at = f.max(1, keepdim=True)
            torch.sub(top, log_p.gather(1, at), out=lse[rows])
        elif spec.z_loss:
            torch.sub(label_logit[rows], label_log_p[rows], out=lse[rows])
        if smoothing:
            torch.mean(f, 1, keepdim=True, out=mean[rows])
        if unscaled and any(spec.needs):
            torch.exp(log_p, out=z[rows])
        elif any(spec.needs):
            g = log_p.exp_()
            if spec.z_loss:
                g.mul_(1 + 2 * spec.z_loss * lse[rows])
            if smoothing:
                g.sub_(smoothing / v)
            if spec.softcap:  # times the derivative 1 − (f / softcap)²
                g.addcmul_(f.mul(g), f, value=-1 / spec.softcap**2)
            torch.mul(g, scale, out=z[rows])
            del g
        del f, log_p  # free them before the next ones are allocated
    loss, lse = -label_log_p, lse if has_bias else label_logit - label_log_p
    if smoothing:
        loss += smoothing * (label_logit - mean)
    if spec.z_loss:
        loss += spec.z_loss * lse.square()
    if any(spec.needs):
        at_label = label_log_p.expm1()
        if smoothing:
            at_label += smoothing - smoothing / v
        if spec.z_loss:
            at_label += 2 * spec.z_loss * lse * label_log_p.exp()
        if spec.softcap:
            at_label *= 1 - (label_logit / spec.softcap).square()
        z.scatter_(1, y, (at_label * scale).to(z.dtype))
    # Not in place: the caller of a loss may change it in place, which autograd refuses for a view.
    return loss[:, 0].masked_fill(ignored, 0.0), lse[:, 0].masked_fill(ignored, 0.0)


def _chunk_bytes(z: Tensor, spec: LossSpec, least: int) -> int:
    """Return the bytes for chunks of ``z``: on a GPU what it leaves of the budget, at least ``least`` if half allows it."""
    if not z.is_cuda:
        return CHUNK_BYTES_CPU
    return max(spec.memory_budget - z.element_size() * z.numel(), min(least, spec.memory_budget // 2))


def fp16_scale(logit_scale: float) -> float:
    """Return the factor of logit gradients in float16, a power of two against underflow; it allows for their ``logit_scale``."""
    return 1024.0 / 2.0 ** max(0, math.frexp(logit_scale)[1] - 1)


def _is_plain(spec: LossSpec) -> bool:
    return spec.logit_scale == 1.0 and not (spec.softcap or spec.label_smoothing or spec.z_loss)


def products(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute h Wᵀ + b [n, V] in the inputs' dtype."""
    if bias is None:
        multiply_add(out, hidden, weight.t(), first=True)
        return out
    return torch.addmm(bias, hidden, weight.t(), out=out)


ToGradients = Callable[[Tensor, Tensor, LossSpec, Tensor | float, bool], tuple[Tensor, Tensor]]


@dataclass
class LogitGrads:
    """The gradient of the tokens' losses with respect to h Wᵀ + b [n, V] times ``scale``, without upstream gradients."""

    logits: Tensor
    hidden: Tensor  # [n, D], zero in ignored rows
    tokens: Tokens  # of ``reference.select_rows``
    scale: Tensor | float

    def finalize(self, x: Inputs, spec: LossSpec, by: Tensor) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias, times ``by``, a scalar or a factor of each token [N]."""
        by = by.to(accumulation_dtype(self.logits.dtype)) / self.scale
        by_token, common = split_factors(x.hidden.dtype, by) if by.dim() else (by.new_ones(len(x.hidden)), by)
        by_row = self.tokens.gather(torch.where(x.labels == spec.ignore_index, 0, by_token))
        hidden, self.hidden = self.hidden, self.hidden.new_empty(0)
        grad_hidden, *others = logit_products(self.logits, hidden, x.weight, spec.needs, by_row, common)
        return [self.tokens.scatter(grad_hidden, len(x.hidden)), *others]


def split_factors(dtype: torch.dtype, by_row: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split factors of rows [n] for ``logit_products``: in float16 into those of at most 1 and a common power of two."""
    if dtype != torch.float16 or not by_row.numel():
        return by_row, None
    by = torch.ldexp(by_row.new_ones(()), torch.frexp(by_row.abs().amax()).exponent)
    return by_row / by, by


def logit_products(
    g: Tensor, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], by_row: Tensor, by: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias from those of the logits, g [n, V] times ``by_row`` [n] times ``by``.

    In float16, ``by`` may be as small as is needed to keep ``by_row`` in its range. ``g`` may be overwritten.
    """
    need_hidden, need_weight, need_bias = needs
    fp32_out = supports_fp32_out(g)
    if g.dtype == torch.float16 and not fp32_out:  # the products would overflow float16
        factors = by_row if by is None else by_row * by
        for rows in chunks(len(g), 4 * g.shape[1], CHUNK_BYTES_CPU):
            torch.mul(g[rows].float(), factors[rows, None], out=g[rows])
        by_row, by = torch.ones_like(factors), None
    factors = by_row if by is None else by_row * by
    grad_hidden = grad_weight = grad_bias = None
    # On a CPU, PyTorch rounds bfloat16 products, but can multiply them by a number first. ``by_row`` is then 0 or 1.
    cpu_rounds = g.dtype == torch.bfloat16 and g.device.type == "cpu" and not fp32_out
    if need_weight and by is not None and (cpu_rounds or g.dtype == torch.float16):
        grad_weight = _scaled_product(g.t(), hidden * by_row[:, None].to(g.dtype), by, weight)
    elif need_weight:
        grad_weight = torch.mm(g.t(), torch.mul(hidden, factors[:, None]).to(g.dtype))
    if need_hidden and by is not None and cpu_rounds:
        grad_hidden = _scaled_product(g, weight, by, hidden).mul_(by_row[:, None])
    elif need_hidden:
        product = multiply(g, weight, may_round=True)
        grad_hidden = product if product.dtype == g.dtype else torch.empty_like(product, dtype=g.dtype)
        torch.mul(product, factors[:, None], out=grad_hidden)
    if need_bias:
        if g.dtype in FULL_PRECISION or fp32_out:
            largest = torch.cat((by_row, by_row.new_full((1,), 1e-30))).abs().amax()  # by_row may be empty
            grad_bias = multiply(g.t(), (by_row / largest).to(g.dtype)[:, None])[:, 0] * largest
        else:  # PyTorch would round the product to 16 bits, before it is multiplied by ``by``
            grad_bias = by_row.new_zeros(g.shape[1])
            for rows in chunks(len(g), 4 * g.shape[1], CHUNK_BYTES_CPU):
                grad_bias += by_row[rows] @ g[rows].to(by_row.dtype)
        grad_bias = (grad_bias if by is None else grad_bias * by).to(g.dtype)
    return grad_hidden, grad_weight, grad_bias


def _scaled_product(a: Tensor, b: Tensor, by: Tensor, like: Tensor) -> Tensor:
    """Return a · b times the scalar ``by`` in 16 bits, rounded once."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if not supports_fp32_out(a):
        return out.addmm_(a, b, beta=0, alpha=float(by))  # on a CPU: reading ``by`` does not synchronize
    for rows in chunks(len(out), 4 * out.shape[1], PRODUCT_BYTES):
        torch.mul(multiply(a[rows], b), by, out=out[rows])
    return out


def gradient_scale(hidden: Tensor, logit_scale: float, factor: Tensor | float) -> Tensor | float:
    """Return what the logits' gradient is multiplied by before it is rounded to 16 bits; the products are divided by it.

    It includes the mantissa of the loss's ``factor``: multiplying by the remaining power of two adds no rounding.
    """
    scale = fp16_scale(logit_scale) if hidden.dtype == torch.float16 else 1.0
    if hidden.dtype in FULL_PRECISION:
        return scale
    if not isinstance(factor, Tensor):
        return scale * math.frexp(factor)[0]
    return torch.where(factor > 0, torch.frexp(factor).mantissa, 1.0) * scale


def token_losses(
    x: Inputs, spec: LossSpec, make_factor: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor, LogitGrads]:
    """Return (loss [N], lse [N], factor, logits' gradient), with the logits of all tokens at once.

    ``make_factor``, called when a GPU has its first GEMM, checks the labels and returns a factor that upstream gradients contain.
    """
    (hidden, _, _, labels), tokens = reference.select_rows(x, spec, mask=any(spec.needs))
    z = products(hidden, x.weight, x.bias, empty_logits(hidden, x.weight.shape[0], len(hidden), triton=False))
    factor = make_factor()
    scale = gradient_scale(hidden, spec.logit_scale, factor)
    loss, lse = (
        tokens.scatter(each, len(x.labels)) for each in logits_to_gradients(z, labels, spec, scale, x.bias is not None)
    )
    return loss, lse, factor, LogitGrads(z, hidden, tokens, scale)


@dataclass
class GradSums:
    """Result of ``token_blocks``: ``scale`` times the gradients of Σ loss, accumulated in float32 (float64)."""

    hidden: Tensor | None  # [n, D]
    tokens: Tokens  # of ``reference.select_rows``
    bias: Tensor | None  # [V]
    grad_weight: Tensor | None  # [V, D] in the weight's dtype
    scale: float
    first_rows: Tensor | None = None  # [rows, D], of the weight: as many as fit ``grad_weight``, in its memory
    other_rows: Tensor | None = None  # [V − rows, D], of the weight

    def finalize(self, x: Inputs, spec: LossSpec, by: Tensor) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias, times the scalar ``by``."""
        dtype, multiplier = x.hidden.dtype, by.to(accumulation_dtype(x.hidden.dtype)) / self.scale

        def rounded(sums: Tensor | None) -> Tensor | None:
            if sums is None or sums.dtype == dtype:
                return None if sums is None else sums.mul_(multiplier)
            return torch.mul(sums, multiplier, out=torch.empty_like(sums, dtype=dtype))

        grad_hidden, self.hidden = self.tokens.scatter(rounded(self.hidden), len(x.hidden)), None
        grad_bias = rounded(self.bias)
        if self.first_rows is None or self.grad_weight is None or self.first_rows.dtype == dtype:
            return [grad_hidden, rounded(self.first_rows), grad_bias]
        # In ascending order, a row is read before its memory is overwritten.
        for part in chunks(len(self.first_rows), 4 * x.weight.shape[1], PRODUCT_BYTES):
            self.grad_weight[part] = self.first_rows[part] * multiplier
        if self.other_rows is not None:
            torch.mul(self.other_rows, multiplier, out=self.grad_weight[len(self.first_rows) :])
        return [grad_hidden, self.grad_weight, grad_bias]


def token_blocks(
    x: Inputs,
    spec: LossSpec,
    make_factor: Callable[[], Tensor],
    to_gradients: ToGradients | None = None,
    block: int = 0,
    computes_products: bool = False,
    all_rows: bool = True,
) -> tuple[Tensor, Tensor, Tensor, GradSums]:
    """Return (loss [n], lse [N], factor, sums) from blocks of tokens with the whole vocabulary; n: see ``select_rows``.

    ``block``: tokens per block; 0 for as many as the budget allows. ``computes_products``: ``to_gradients`` does, into
    uninitialized memory. Without ``all_rows``, the sums omit the rows of the weight that do not fit its own buffer.
    """
    (hidden, _, _, labels), tokens = reference.select_rows(x, spec, mask=any(spec.needs))
    (n, d), v, (need_hidden, need_weight, need_bias) = hidden.shape, x.weight.shape[0], spec.needs
    dtype, device, acc_dtype = hidden.dtype, hidden.device, accumulation_dtype(hidden.dtype)
    most = math.inf if supports_fp32_out(hidden) else 1.0
    sums = GradSums(
        torch.empty((n, d), dtype=acc_dtype, device=device) if need_hidden else None,
        tokens,
        torch.empty(v, dtype=acc_dtype, device=device) if need_bias else None,
        torch.empty_like(x.weight, memory_format=torch.contiguous_format) if need_weight else None,
        min(most, fp16_scale(spec.logit_scale)) if dtype == torch.float16 else 1.0,
    )
    room = spec.memory_budget
    if sums.grad_weight is not None:
        fit = v if dtype == acc_dtype else v * dtype.itemsize // acc_dtype.itemsize // ALIGNED * ALIGNED
        # Only a part of the buffer: an odd number of 16-bit entries cannot be viewed as float32.
        part = sums.grad_weight.view(-1)[: fit * d * acc_dtype.itemsize // dtype.itemsize]
        sums.first_rows = part.view(acc_dtype).view(fit, d)
        if fit < v and all_rows:
            sums.other_rows = torch.empty((v - fit, d), dtype=acc_dtype, device=device)
            room = max(room - sums.other_rows.nbytes, room // 2)
    spec = spec._replace(memory_budget=room)
    losses, lse = (torch.empty(n, dtype=acc_dtype, device=device) for _ in range(2))
    block = block or tokens_per_block(n, v, dtype, not hidden.is_cuda, room)
    slab = empty_logits(hidden, v, min(block, n), triton=to_gradients is not None)
    for start in range(0, max(n, 1), block):
        rows = slice(start, min(n, start + block))
        h = hidden[rows]
        z = slab[: h.shape[0]]
        if not computes_products:
            products(h, x.weight, x.bias, z)
        if start == 0:  # a GPU has its first GEMM
            valid, factor = labels != spec.ignore_index, make_factor()
            for total in (sums.first_rows, sums.other_rows, sums.bias):
                if total is not None:
                    total.zero_()
        losses[rows], lse[rows] = (to_gradients or logits_to_gradients)(
            z, labels[rows], spec, sums.scale, x.bias is not None
        )
        if sums.hidden is not None:
            sums.hidden[rows] = multiply(z, x.weight, may_round=True)
        if sums.first_rows is not None:
            multiply_add(sums.first_rows, z[:, :fit].t(), h)
        if sums.other_rows is not None:
            multiply_add(sums.other_rows, z[:, fit:].t(), h)
        if sums.bias is not None:
            mask = valid[rows, None].to(z.dtype)
            rounds = dtype != acc_dtype and not supports_fp32_out(z)
            sums.bias.add_(z.mul_(mask).sum(0, dtype=acc_dtype) if rounds else multiply(z.t(), mask)[:, 0])
    if sums.hidden is not None:
        sums.hidden.mul_(valid[:, None])
    return losses, tokens.scatter(lse, len(x.labels)), factor, sums


def tokens_per_block(n: int, v: int, dtype: torch.dtype, on_cpu: bool, memory_budget: int) -> int:
    """Return the tokens per block of logits: blocks of about equal size, on a GPU if possible multiples of 128."""
    room = scratch_bytes(n, v, dtype.itemsize, memory_budget) if on_cpu else memory_budget
    room -= min(CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES, room // 2)
    least = min(memory_budget // 2, MIN_BLOCK_TOKENS * v * dtype.itemsize)
    most = max(16, max(room, least) // (v * dtype.itemsize))
    if most < 128:
        return most
    blocks = -(-max(n, 1) // (most - most % 128))
    unit = 1 if on_cpu else 128  # without a much smaller last block on a CPU
    return -(-max(n, 1) // (unit * blocks)) * unit


class KeptLogits(NamedTuple):
    """What ``logit_stats`` keeps for the gradients of the tokens of ``reference.select_rows``."""

    products: Tensor  # h Wᵀ + b [n, V] in the inputs' dtype
    top_logit: Tensor  # [n], the largest logit
    top_log_p: Tensor  # [n], its log p
    hidden: Tensor  # [n, D]
    tokens: Tokens


def logit_stats(
    x: Inputs, spec: LossSpec, wanted: WantedStats, check_labels: Callable[[], object]
) -> tuple[LogitStats, Tensor, KeptLogits | None]:
    """Return the statistics of each token, −log p(label) [N] and, if a gradient is needed, logits for ``logit_stats_backward``.

    −log p(label) is more accurate than the difference of the statistics if p(label) is close to 1.
    """
    (hidden, _, _, labels), tokens = reference.select_rows(x, spec, mask=any(spec.needs))
    n, v, acc_dtype = len(hidden), x.weight.shape[0], accumulation_dtype(hidden.dtype)
    keeps = any(spec.needs)
    block = max(1, n) if keeps else tokens_per_block(n, v, hidden.dtype, not hidden.is_cuda, spec.memory_budget // 2)
    slab = empty_logits(hidden, v, min(block, n), triton=False)
    y = labels.masked_fill(labels == spec.ignore_index, 0)[:, None]
    label_logit, log_prob, top_logit, top_log_p = slab.new_empty((4, n, 1), dtype=acc_dtype)
    mean, entropy, log_sum_sq = (log_prob.new_empty(n if each else 0) for each in wanted[:3])
    copies = 2 + 3 * wanted.entropy + wanted.log_sum_sq  # as many float arrays [n, V] exist at once
    for start in range(0, n, block):
        h = hidden[start : start + block]
        z = slab[: len(h)]
        products(h, x.weight, x.bias, z)
        if start == 0:
            check_labels()
        for chunk in chunks(len(h), copies * acc_dtype.itemsize * v, _chunk_bytes(slab, spec, CHUNK_BYTES)):
            rows = slice(start + chunk.start, start + chunk.stop)
            f = z[chunk] if _is_plain(spec) else _processed(z[chunk], spec)
            log_p = F.log_softmax(f, 1, dtype=acc_dtype)
            label_logit[rows] = f.gather(1, y[rows])
            torch.gather(log_p, 1, y[rows], out=log_prob[rows])
            top_logit[rows], at = f.max(1, keepdim=True)  # finite, unlike the label's, which a bias may mask
            torch.gather(log_p, 1, at, out=top_log_p[rows])
            others = reference.mean_entropy_and_squares(f, log_p, wanted)
            for whole, part in zip((mean, entropy, log_sum_sq), others, strict=True):
                if part is not None:
                    whole[rows] = part
            del f, log_p  # free them before the next ones are allocated
    valid = x.labels != spec.ignore_index
    top1 = label_logit >= top_logit if wanted.top1 else top_logit[:0]
    found = [(top_logit - top_log_p)[:, 0], label_logit[:, 0], mean, entropy, log_sum_sq, top1[:, 0], -log_prob[:, 0]]
    *stats, losses = reference.zero_ignored(found, valid, tokens)
    kept = KeptLogits(slab, top_logit[:, 0], top_log_p[:, 0], hidden, tokens) if keeps else None
    return LogitStats(*stats), losses, kept


def _processed(z: Tensor, spec: LossSpec, copy: bool = True) -> Tensor:
    """Return logits in the accumulation dtype from products ``z`` [n, V], which are kept if ``copy``."""
    f = z.to(accumulation_dtype(z.dtype), copy=copy)
    return reference.apply_scale_and_softcap_(f, spec.logit_scale, spec.softcap)


def logit_stats_backward(
    kept: KeptLogits, x: Inputs, spec: LossSpec, lse: Tensor, entropy: Tensor | None, grads: TokenGrads
) -> list[Tensor | None]:
    """Return the gradients of hidden, weight and bias. The kept logits are overwritten."""
    (z, top_logit, top_log_p, hidden, tokens), v = kept, x.weight.shape[0]
    labels = tokens.gather(x.labels)
    lse, entropy, grads = reference.select_grads(x.labels, tokens, spec, lse, entropy, grads)
    sign, narrow = torch.ones_like(lse), z.dtype not in FULL_PRECISION
    if _is_plain(spec) and grads.entropy is None and grads.mean is None:
        # z − top is exact where p matters, z − lse is not. In 16 bits, where z itself is less exact, p · |gradient of lse| is
        # therefore computed as one exponential; the sign goes into the products, where it adds no rounding.
        y, shift = labels.masked_fill(labels == spec.ignore_index, 0)[:, None], top_logit
        if narrow:
            shift, sign = lse - grads.lse.abs().log(), torch.where(grads.lse < 0, -1.0, sign)
        p_label = (z.gather(1, y)[:, 0] - top_logit + top_log_p).exp()
        at_label = sign * (p_label * grads.lse + grads.label)
        for rows in chunks(len(z), lse.element_size() * v, _chunk_bytes(z, spec, CHUNK_BYTES)):
            torch.exp(z[rows] - shift[rows, None], out=z[rows])
            if not narrow:
                z[rows].mul_((top_log_p.exp() * grads.lse)[rows, None])
        z.scatter_(1, y, at_label[:, None].to(z.dtype))
    else:
        for chunk in chunks(len(z), 3 * lse.element_size() * v, _chunk_bytes(z, spec, CHUNK_BYTES)):
            f = z[chunk] if _is_plain(spec) else _processed(z[chunk], spec, copy=False)
            # More accurate than z − lse, which matters if p(label) is close to 1.
            log_p = F.log_softmax(f, 1, dtype=lse.dtype)
            some_entropy = None if entropy is None else entropy[chunk]
            of_chunk = grads.map(itemgetter(chunk))
            z[chunk] = reference.logit_gradients(log_p, f, spec, some_entropy, of_chunk, labels[chunk], 0, v)
            del f, log_p  # free them before the next ones are allocated
    grad_hidden, *others = logit_products(z, hidden, x.weight, spec.needs, sign)
    return [tokens.scatter(grad_hidden, len(x.hidden)), *others]
