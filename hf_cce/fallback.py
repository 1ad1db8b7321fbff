"""The scalar loss in PyTorch, loss and gradients in one pass: three GEMMs, as many as full logits need.

The gradient of the loss is one scalar for all tokens, so the gradients of a block of tokens are formed while its logits are
there, up to a factor that the backward pass brings. Three loops, by what is scarce:

- ``one_block``: all logits fit the budget in the inputs' dtype; they become their gradient in place.
- ``token_blocks``: blocks of tokens with the whole vocabulary; sums in float32. Never waits for a GPU.
- ``column_blocks``: likewise for float32 on a CPU, in the orientation that its GEMMs like.

Products of narrow dtypes stay in them and accumulate in float32: no copy of the head in float32 is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cce import reference
from hf_cce.config import MIB
from hf_cce.reference import add_product, has_wide_products, scratch_bytes
from hf_cce.spec import Inputs, LossSpec, TokenGrads, accumulation_dtype

# Fewer tokens at a time and adding each block's product to the weight's gradient costs more than the product.
LEAST_TOKENS = 128
# Bytes of narrow logits up to which a CPU keeps them all: less would save little, and cost a fourth GEMM.
ONE_BLOCK_CPU = 64 * MIB
# Bytes of float32 logits at a time between two GEMMs: at least as many rows as keep a GPU busy; on a CPU they stay in its cache.
CHUNK, CHUNK_CPU = 64 * MIB, 4 * MIB
PRODUCT = 32 * MIB  # bytes of a float32 product that is rounded at once: a GPU's cache holds it
# float16 has few small numbers: probabilities are kept times this, where products accumulate in float32 or are scaled before.
HALF_SCALE = 1024.0
SLAB = 128 * MIB  # bytes of a slab of the vocabulary that is computed again
ALIGNED = 8  # entries: cuBLAS wants rows of 16-bit numbers to begin there
FULL_PRECISION = (torch.float32, torch.float64)


def fits_one_block(tokens: int, vocab_size: int, dtype: torch.dtype, on_cpu: bool, memory_budget: int) -> bool:
    """Whether ``one_block`` has room: logits in the inputs' dtype, and float32 chunks of them."""
    room = memory_budget - min(CHUNK, memory_budget // 2)
    if on_cpu:
        room = min(memory_budget // 2, max(ONE_BLOCK_CPU, scratch_bytes(tokens, vocab_size, 4, memory_budget)))
    return tokens * vocab_size * dtype.itemsize <= room


def _chunks(n: int, row_bytes: int, most: int) -> Iterator[slice]:
    """As many of ``n`` rows of ``row_bytes`` at a time as ``most`` bytes hold; many begin aligned, as products like it."""
    size = max(1, most // row_bytes)
    size -= size % 128 if size > 128 else 0
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def _logits(hidden: Tensor, v: int, rows: int) -> Tensor:
    """Memory for logits [rows, V]; aligned where a GPU multiplies 16-bit rows that are not slowly."""
    stride = -(-v // ALIGNED) * ALIGNED if hidden.is_cuda and hidden.dtype not in FULL_PRECISION else v
    return hidden.new_empty((rows, stride))[:, :v]


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a · b in the accumulation dtype, rounded to the inputs' before where PyTorch has no such product."""
    if a.dtype in FULL_PRECISION:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if has_wide_products(a) else (a @ b).float()


def _logits_to_gradients(
    z: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """(loss [n], lse [n]), zero where ignored; the products ``z`` [n, V] become scale · ∂loss/∂z.

    What ``z`` leaves of the budget is for float32 chunks of it.
    Rows that are ignored hold anything finite, if the hidden states there are zero.
    """
    ignored = labels == spec.ignore_index
    y = labels.masked_fill(ignored, 0)[:, None]
    least, room = (CHUNK if z.is_cuda else CHUNK_CPU), spec.memory_budget - z.element_size() * z.numel()
    spec = replace(spec, memory_budget=max(room, min(least, spec.memory_budget // 2)) if z.is_cuda else least)
    convert = _plain_chunks if bias is None and _is_plain(spec) else _general_chunks
    loss, lse = (per_token[:, 0].masked_fill_(ignored, 0.0) for per_token in convert(z, bias, y, ignored, spec, scale))
    return loss, lse


def _is_plain(spec: LossSpec) -> bool:
    return spec.logit_scale == 1.0 and not (spec.softcap or spec.label_smoothing or spec.z_loss)


def _plain_chunks(
    z: Tensor, bias: Tensor | None, y: Tensor, ignored: Tensor, spec: LossSpec, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Without options: as few kernels for each chunk as possible, as a host may be slower than its GPU."""
    (n, v), wide, plain = z.shape, accumulation_dtype(z.dtype), not isinstance(scale, Tensor) and scale == 1.0
    label_logit, at_label = z.gather(1, y).to(wide), torch.empty((n, 1), dtype=wide, device=z.device)
    for rows in _chunks(n, wide.itemsize * v, spec.memory_budget):
        part = z[rows]
        log_p = F.log_softmax(part, 1, dtype=wide)
        torch.gather(log_p, 1, y[rows], out=at_label[rows])
        if not plain:
            torch.mul(log_p.exp_(), scale, out=part)
        elif any(spec.needs):
            torch.exp(log_p, out=part)
        del log_p  # or it would still be there while the next is made
    gradient = at_label.expm1()
    z.scatter_(1, y, (gradient if plain else gradient * scale).to(z.dtype))
    return -at_label, label_logit - at_label


def _general_chunks(
    z: Tensor, bias: Tensor | None, y: Tensor, ignored: Tensor, spec: LossSpec, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """With any option; what is ignored becomes zero."""
    (n, v), wide, smoothing = z.shape, accumulation_dtype(z.dtype), spec.label_smoothing
    by = torch.where(ignored, torch.zeros((), dtype=wide, device=z.device), scale).to(wide)[:, None] * spec.logit_scale
    losses, lses = (torch.empty((n, 1), dtype=wide, device=z.device) for _ in range(2))
    for rows in _chunks(n, 5 * wide.itemsize * v, spec.memory_budget):
        f = z[rows].to(wide, copy=True)
        if bias is not None:
            f.add_(bias)
        if spec.logit_scale != 1.0:
            f.mul_(spec.logit_scale)
        if spec.softcap:
            f.div_(spec.softcap).tanh_().mul_(spec.softcap)
        log_p, label_logit = f.log_softmax(1), f.gather(1, y[rows])
        of_label = log_p.gather(1, y[rows])
        # Of a label that a bias of −inf masks, the difference would not be a number.
        lse = label_logit - of_label if bias is None else f.logsumexp(1, keepdim=True)
        loss = -of_label
        if smoothing:
            loss += smoothing * (label_logit - f.mean(1, keepdim=True))
        if spec.z_loss:
            loss += spec.z_loss * lse.square()
        losses[rows], lses[rows] = loss, lse
        if any(spec.needs):
            of_lse = 1 + 2 * spec.z_loss * lse
            at_label = of_label.expm1() + (of_lse - 1) * of_label.exp() + smoothing - smoothing / v
            g = log_p.exp_().mul_(by[rows] * of_lse).sub_(by[rows] * (smoothing / v))
            g.scatter_(1, y[rows], by[rows] * at_label)
            z[rows] = g.mul_(f.div_(spec.softcap).square_().neg_().add_(1)) if spec.softcap else g
        del f, log_p
    return losses, lses


def _without_ignored(x: Inputs, spec: LossSpec) -> Tensor:
    """Hidden states, zero where the label is ignored: what is not a number there must not reach the weight's gradient."""
    return torch.where((x.labels != spec.ignore_index)[:, None], x.hidden, 0)


@dataclass
class PrecomputedGrads:
    """Gradients of hidden, weight and bias for an upstream gradient of one; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def scaled(self, x: Inputs, spec: LossSpec, lse: Tensor, factor: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Times ``grad``, in place: a copy would hold the weight's gradient twice."""
        found = [self.hidden, self.weight, self.bias]
        if x.hidden.device.type == "cpu" and float(grad) == 1.0:
            return found
        return [None if g is None else g.mul_(grad.to(g.dtype)) for g in found]


@dataclass
class LogitGradients:
    """Of one block: the gradient of the logits times ``scale`` [N, V], and the hidden states, zero where ignored."""

    logits: Tensor
    hidden: Tensor
    scale: Tensor | float

    def scaled(self, x: Inputs, spec: LossSpec, lse: Tensor, factor: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Times ``factor`` · ``grad``."""
        g, h, (need_hidden, need_weight, need_bias) = self.logits, self.hidden, spec.needs
        (n, v), d = g.shape, h.shape[1]
        by = (factor * grad).to(accumulation_dtype(g.dtype)) / self.scale
        if g.dtype == torch.float16 and not has_wide_products(g):  # the products, in float16, would be out of range
            for rows in _chunks(n, 4 * v, CHUNK_CPU):
                torch.mul(g[rows].float(), by, out=g[rows])
            by = torch.ones_like(by)
        of_hidden = of_weight = of_bias = None
        if need_hidden:
            valid = torch.where(x.labels != spec.ignore_index, by, 0)[:, None]
            of_hidden = torch.mul(_wide_product(g, x.weight), valid, out=torch.empty_like(h))
        if need_weight and g.dtype in FULL_PRECISION:
            of_weight = torch.mm(g.t(), h * by)
        elif need_weight and g.device.type == "cpu" and not has_wide_products(g):
            number = float(by)
            exact = abs(math.frexp(number)[0]) == 0.5  # a power of two, which costs no rounding: see one_block
            of_weight = torch.mm(g.t(), h * number if exact else h)
            of_weight = of_weight if exact else of_weight.mul_(number)
        elif need_weight:
            of_weight = x.weight.new_empty((v, d))
            for rows in _chunks(v, 4 * d, PRODUCT):
                torch.mul(_wide_product(g[:, rows].t(), h), by, out=of_weight[rows])
        if need_bias:
            of_bias = torch.mul(g.sum(0, dtype=by.dtype), by).to(g.dtype)
        return [of_hidden, of_weight, of_bias]


def one_block(
    x: Inputs, spec: LossSpec, make_factor: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor, LogitGradients]:
    """(factor · Σ loss, lse [N], factor, what the gradients are made of)."""
    hidden = _without_ignored(x, spec)
    z = torch.mm(hidden, x.weight.t(), out=_logits(hidden, x.weight.shape[0], len(hidden)))
    factor = make_factor()
    scale: Tensor | float = HALF_SCALE if hidden.dtype == torch.float16 else 1.0
    if hidden.device.type == "cpu" and hidden.dtype not in FULL_PRECISION:
        # Products are rounded: with the mantissa of the factor, what is left to multiply by is usually a power of two.
        mantissa = torch.frexp(factor).mantissa
        scale = torch.where(mantissa == 0, 1.0, mantissa) * scale
    loss, lse = _logits_to_gradients(z, x.bias, x.labels, spec, scale)
    return loss.sum() * factor, lse, factor, LogitGradients(z, hidden, scale)


@dataclass
class Sums:
    """Of token blocks: ``scale`` times the gradients of Σ loss, accumulated in float32 (float64).

    Of a narrow dtype's weight the first rows are in the memory that the gradient itself will take: as many as fit in float32.
    For the others ``rest`` is allocated where the budget has room; else the backward pass forms them in slabs of the vocabulary.
    """

    hidden: Tensor | None  # [N, D]
    weight: Tensor | None  # [V or fewer, D]
    rest: Tensor | None  # [V less these, D]
    bias: Tensor | None  # [V]
    grad_weight: Tensor | None  # [V, D] in the weight's dtype
    scale: float

    def scaled(self, x: Inputs, spec: LossSpec, lse: Tensor, factor: Tensor, grad: Tensor) -> list[Tensor | None]:
        by = (factor * grad).to(lse.dtype) / self.scale

        def rounded(sums: Tensor | None, like: Tensor | None) -> Tensor | None:
            if sums is None or like is None or sums.dtype == like.dtype:
                return None if sums is None else sums.mul_(by)
            return torch.mul(sums, by, out=torch.empty_like(sums, dtype=like.dtype))

        of_hidden, self.hidden = rounded(self.hidden, x.hidden), None
        of_bias = rounded(self.bias, x.bias)
        if self.weight is None or self.grad_weight is None or self.weight.dtype == x.weight.dtype:
            return [of_hidden, rounded(self.weight, x.weight), of_bias]
        rows = self.weight.shape[0]
        # Ascending: a row is read before its memory is written.
        for part in _chunks(rows, 4 * x.weight.shape[1], PRODUCT):
            self.grad_weight[part] = self.weight[part] * by
        if self.rest is not None:
            torch.mul(self.rest, by, out=self.grad_weight[rows:])
            return [of_hidden, self.grad_weight, of_bias]
        grads = reference.token_gradients(grad, factor, lse, spec)
        _later_rows(x, spec, lse, grads, self.grad_weight, rows)
        return [of_hidden, self.grad_weight, of_bias]


def _later_rows(x: Inputs, spec: LossSpec, lse: Tensor, grads: TokenGrads, grad_weight: Tensor, first: int) -> None:
    """Write the rows of the weight's gradient from ``first`` on, from slabs of recomputed logits."""
    n, v = x.labels.numel(), x.weight.shape[0]
    never = -1 - v  # no label less ``first`` is that small
    valid = x.labels != spec.ignore_index
    if x.bias is not None or not _is_plain(spec):
        if grads.mean is not None:  # taken for the mean over these rows
            grads = grads._replace(mean=grads.mean * ((v - first) / v))
        labels = torch.where(valid, x.labels - first, never)
        rest = Inputs(x.hidden, x.weight[first:], None if x.bias is None else x.bias[first:], labels)
        spec = replace(spec, ignore_index=never, needs=(False, True, False))
        reference.logit_stats_backward(rest, spec, lse, None, grads, grad_weight[first:])
        return
    hidden, of_all = _without_ignored(x, spec), torch.where(valid, grads.lse, 0)[:, None]
    width = max(16, min(SLAB, spec.memory_budget // 2) // (6 * max(n, 1)) // ALIGNED * ALIGNED)
    for start in range(first, v, width):
        stop = min(v, start + width)
        z = torch.mm(hidden, x.weight[start:stop].t())
        p = torch.sub(z, lse[:, None]).exp_()  # in float32
        inside = valid & (x.labels >= start) & (x.labels < stop)
        local = (x.labels - start).clamp_(0, stop - start - 1)[:, None]
        at_label = p.gather(1, local) * of_all + torch.where(inside, grads.label, 0)[:, None]
        torch.mul(p, of_all, out=z).scatter_(1, local, at_label.to(z.dtype))
        torch.mm(z.t(), hidden, out=grad_weight[start:stop])
        del z, p


def token_blocks(x: Inputs, spec: LossSpec, make_factor: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """(factor · Σ loss, lse [N], factor, sums), from blocks of tokens with the whole vocabulary."""
    hidden, (n, d), v = _without_ignored(x, spec), x.hidden.shape, x.weight.shape[0]
    need_hidden, need_weight, need_bias = spec.needs
    dtype, device, on_cpu = hidden.dtype, hidden.device, not hidden.is_cuda
    wide = accumulation_dtype(dtype)
    half = dtype == torch.float16 and has_wide_products(hidden)
    sums = Sums(
        torch.zeros((n, d), dtype=wide, device=device) if need_hidden else None,
        None,
        None,
        torch.zeros(v, dtype=wide, device=device) if need_bias else None,
        torch.empty_like(x.weight, memory_format=torch.contiguous_format) if need_weight else None,
        HALF_SCALE if half else 1.0,
    )
    room = spec.memory_budget
    if sums.grad_weight is not None:
        fit = v if dtype == wide else v * dtype.itemsize // wide.itemsize // ALIGNED * ALIGNED
        sums.weight = sums.grad_weight.view(-1).view(wide)[: fit * d].view(fit, d).zero_()
        rest = (v - fit) * d * wide.itemsize
        if rest and has_wide_products(hidden) and room - rest >= min(room // 2, LEAST_TOKENS * v * wide.itemsize):
            sums.rest, room = torch.zeros((v - fit, d), dtype=wide, device=device), room - rest
    spec = replace(spec, memory_budget=room)
    block = _token_block(n, v, dtype, on_cpu, room)
    slab = _logits(hidden, v, min(block, n))
    losses, lse = (torch.empty(n, dtype=wide, device=device) for _ in range(2))
    valid, factor = (x.labels != spec.ignore_index)[:, None], make_factor()
    for start in range(0, n, block):
        rows = slice(start, min(n, start + block))
        h = hidden[rows]
        z = torch.mm(h, x.weight.t(), out=slab[: h.shape[0]])
        losses[rows], lse[rows] = _logits_to_gradients(z, x.bias, x.labels[rows], spec, sums.scale)
        if sums.hidden is not None:
            torch.mul(_wide_product(z, x.weight), valid[rows], out=sums.hidden[rows])
        if sums.weight is not None:
            fit = sums.weight.shape[0]
            add_product(sums.weight, z[:, :fit].t(), h)
            if sums.rest is not None:
                add_product(sums.rest, z[:, fit:].t(), h)
        if sums.bias is not None:
            sums.bias.add_(z.sum(0, dtype=wide))
    return losses.sum() * factor, lse, factor, sums


def _token_block(n: int, v: int, dtype: torch.dtype, on_cpu: bool, memory_budget: int) -> int:
    """Tokens of a block of ``token_blocks``: multiples of 128, of nearly one size."""
    room = scratch_bytes(n, v, dtype.itemsize, memory_budget) if on_cpu else memory_budget
    room -= min(CHUNK_CPU if on_cpu else CHUNK, room // 2)
    least = min(memory_budget // 2, LEAST_TOKENS * v * dtype.itemsize)
    most = max(16, max(room, least) // (v * dtype.itemsize))
    if most < 128:
        return most
    blocks = -(-n // (most - most % 128))
    return -(-n // (128 * max(1, blocks))) * 128


def column_blocks(
    x: Inputs, spec: LossSpec, make_factor: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor, PrecomputedGrads]:
    """(factor · Σ loss, lse [N], factor, gradients of that sum), float32 and float64 on a CPU."""
    factor = make_factor()
    (hidden, weight, _, labels), (need_hidden, need_weight, need_bias) = x, spec.needs
    n_all, v, wide = labels.numel(), weight.shape[0], accumulation_dtype(hidden.dtype)
    picked = (labels != spec.ignore_index).nonzero().squeeze(1)
    n = picked.numel()
    lse_all = torch.zeros(n_all, dtype=wide, device=hidden.device)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    grads = PrecomputedGrads(
        hidden.new_zeros(hidden.shape) if need_hidden else None,
        (weight.new_empty if n else weight.new_zeros)(weight.shape) if need_weight else None,
        weight.new_zeros(v) if need_bias else None,
    )
    block = _column_block(
        n, v, hidden.dtype.itemsize * (2 if spec.softcap and any(spec.needs) else 1), spec.memory_budget
    )
    # [V, tokens], not [tokens, V]: measured on two cores at 96 tokens, the three GEMMs take 25 % less in this orientation.
    scratch = hidden.new_empty(v * max(16, min(block, n)) if n else 0)
    scale = float(factor) * spec.logit_scale
    for start in range(0, n, block):
        stop = min(n, start + block)
        rows = slice(start, stop) if n == n_all else picked[start:stop]
        h, y, size = hidden[rows], labels[rows], stop - start
        if size < 16:  # measured: with fewer columns MKL sums over V naively, ten times the rounding error
            h, y, size = F.pad(h, (0, 0, 0, 16 - size)), F.pad(y, (0, 16 - size)), 16
        z = torch.mm(weight, h.t(), out=scratch[: v * size].view(v, size))
        loss, lse, norm = _column_gradients(z, x.bias, y, spec)
        lse_all[rows] = lse[: stop - start]
        total += loss[: stop - start].sum()
        # The division by norm costs nothing on the small factors h and grad_hidden.
        weights = scale / norm
        weights[stop - start :] = 0
        if grads.hidden is not None:
            grads.hidden[rows] = torch.mm(weight.t(), z).mul_(weights).t()[: stop - start]
        if grads.weight is not None:
            # beta=0 ignores what is in the fresh buffer, so it need not be zeroed first
            grads.weight.addmm_(z, h * weights[:, None], beta=0.0 if start == 0 else 1.0)
        if grads.bias is not None:
            grads.bias.add_(torch.mv(z, weights))
    return total * factor, lse_all, factor, grads


def _column_block(n: int, v: int, bytes_per_logit: int, memory_budget: int) -> int:
    """Tokens of a block; multiples of 32, which GEMM and softmax over the first dimension like."""
    wanted = max(scratch_bytes(n, v, bytes_per_logit, memory_budget), LEAST_TOKENS * v * bytes_per_logit)
    block = min(wanted, memory_budget) // (v * bytes_per_logit)
    return max(16, block if block < 32 else block - block % 32)  # of fewer than 16, rounding suffers


def _column_gradients(z: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [n], lse [n], norm [n]) of the products ``z`` [V, n], which become norm · ∂loss/∂z if a gradient is needed."""
    v, need_any, smoothing = z.shape[0], any(spec.needs), spec.label_smoothing
    if bias is not None:
        z.add_(bias[:, None])
    if spec.logit_scale != 1.0:
        z.mul_(spec.logit_scale)
    jacobian = None
    if spec.softcap:
        z.div_(spec.softcap).tanh_()
        jacobian = (
            z.square().neg_().add_(1) if need_any else None
        )  # of the tangent itself: z / softcap would be rounded again
        z.mul_(spec.softcap)
    top, at_label = z.amax(0), z.gather(0, labels[None])[0]
    mean = z.mean(0) if smoothing else None
    # Not torch.softmax: over the first dimension it sums naively, and its error grows with V.
    norm = z.sub_(top).exp_().sum(0)
    lse = top + norm.log()
    loss = lse - at_label
    if mean is not None:
        loss = loss + smoothing * (at_label - mean)
    if spec.z_loss:
        loss = loss + spec.z_loss * lse.square()
    if need_any:
        if spec.z_loss:
            z.mul_(1 + 2 * spec.z_loss * lse)
        z.scatter_add_(0, labels[None], (norm * (smoothing - 1))[None])
        if smoothing:
            z.sub_(norm * (smoothing / v))
        if jacobian is not None:
            z.mul_(jacobian)
    return loss, lse, norm
