"""Label kernels that run before the tiles of logits: check the labels, count the valid ones, and compute their logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cce.kernels.inputs import LogitInputs, scale_and_softcap
from hf_cce.kernels.launch_config import Plan, ceil_div
from hf_cce.kernels.launcher import Kernel
from hf_cce.kernels.tiles import dot, softcapped
from hf_cce.spec import Divisor


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _validate_labels_kernel(
    labels,  # [N]
    num_items,  # scalar, or None: count the labels
    divisor,  # used instead, if not None
    ok,  # scalar bool
    factor,  # scalar
    num_tokens,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    bad = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        label = tl.load(labels + at, mask=at < num_tokens, other=ignore_index)
        valid = label != ignore_index
        count += valid.to(tl.int32)
        bad += (valid & ((label < 0) | (label >= vocab_size))).to(tl.int32)
    tl.store(ok, tl.sum(bad) == 0)
    if divisor is not None:
        tl.store(factor, 1.0 / divisor)
    else:
        items = tl.sum(count).to(tl.float32) if num_items is None else tl.load(num_items).to(tl.float32)
        tl.store(factor, tl.where(items == 0.0, 0.0, 1.0 / tl.where(items == 0.0, 1.0, items)))


def validate_labels(labels: Tensor, ignore_index: int, v: int, divisor: Divisor) -> tuple[Tensor, Tensor]:
    """Compute the same as ``hf_cce.reference.validate_labels`` in one launch."""
    labels = labels.contiguous()
    ok = torch.empty((), dtype=torch.bool, device=labels.device)
    factor = torch.empty((), dtype=torch.float32, device=labels.device)
    _validate_labels_kernel[(1,)](
        labels, divisor.items, divisor.number or None, ok, factor, labels.numel(), v, ignore_index, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return ok, factor


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "ignore_index"])
def _label_logit_kernel(
    hidden,  # [N, D]
    weight,  # [V, D]
    bias,  # [V]
    labels,  # [N]
    vocab_perm,  # [V] int32: the weight row of each label; None: the label itself
    out,  # [N], written; zero where the label is ignored
    active,  # [row blocks] int32, written if BLOCK_M > 0: 0 if all tokens of the block are ignored, else 1
    token_perm,  # [N] int64: the row of hidden of each token; None: the token's own index
    sorted_hidden,  # [N, D] contiguous, written if token_perm is given: hidden[token_perm]
    num_tokens,
    vocab_size,
    hidden_size,
    hidden_stride,
    weight_stride,
    ignore_index,
    logit_scale,
    softcap,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the diagonal of the product of hidden states and the weight rows of their labels.

    One dot product per token would suffice, but a matrix product on tensor cores rounds like the tiles of logits, so that the
    rounding cancels in logsumexp − label logit.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    label = tl.load(labels + rows, mask=rows < num_tokens, other=ignore_index)
    in_vocab = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    if vocab_perm is not None:
        label = tl.load(vocab_perm + label, mask=in_vocab, other=0).to(tl.int64)
    inside = rows < num_tokens
    at = rows.to(tl.int64) if token_perm is None else tl.load(token_perm + rows, mask=inside, other=0)
    ks = tl.arange(0, BLOCK_K)
    products = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for k in range(0, hidden_size, BLOCK_K):
        in_d = (k + ks < hidden_size)[None, :]
        mask = in_vocab[:, None] & in_d
        load_mask = mask if token_perm is None else inside[:, None] & in_d
        h = tl.load(hidden + at[:, None] * hidden_stride + (k + ks)[None, :], mask=load_mask, other=0.0)
        if token_perm is not None:
            tl.store(sorted_hidden + rows.to(tl.int64)[:, None] * hidden_size + (k + ks)[None, :], h, mask=load_mask)
        w = tl.load(weight + label.to(tl.int64)[:, None] * weight_stride + (k + ks)[None, :], mask=mask, other=0.0)
        products = dot(h, tl.trans(w), products, PRECISION)
    each = tl.arange(0, BLOCK_R)
    acc = tl.sum(tl.where(each[:, None] == each[None, :], products, 0.0), 1)
    if bias is not None:
        acc += tl.load(bias + label, mask=in_vocab, other=0.0).to(tl.float32)
    if logit_scale is not None:
        acc *= logit_scale
    if softcap is not None:
        acc = softcapped(acc, softcap)
    if token_perm is not None:  # hidden states of ignored tokens were multiplied too, and may hold NaN
        acc = tl.where(in_vocab, acc, 0.0)
    tl.store(out + rows, acc, mask=inside)
    if BLOCK_M > 0:  # noqa: SIM102 (the second is no constant)
        if tl.program_id(0) * BLOCK_R % BLOCK_M == 0:
            block = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_M)
            block_labels = tl.load(labels + block, mask=block < num_tokens, other=ignore_index)
            tl.store(
                active + tl.program_id(0) * BLOCK_R // BLOCK_M, tl.max((block_labels != ignore_index).to(tl.int32), 0)
            )


class LabelLogits(NamedTuple):
    logit: Tensor  # [N] float32, zero where the label is ignored
    # [row blocks] int32, for hf_cce.kernels.hopper: 0 if all tokens of the block are ignored, else 1
    active: Tensor | None = None

    def tokens(self, rows: slice, block_m: int) -> LabelLogits:
        """Select the tokens ``rows``; the first one must start a row block of ``block_m`` tokens."""
        active = None if self.active is None else self.active[rows.start // block_m :]
        return LabelLogits(self.logit[rows], active)


def label_logits(
    inputs: LogitInputs,
    plan: Plan,
    block_m: int = 0,  # tokens per row block of ``active``; 0: do not compute ``active``
    vocab_perm: Tensor | None = None,  # this and the next two: see _label_logit_kernel
    token_perm: Tensor | None = None,
    sorted_hidden: Tensor | None = None,
) -> LabelLogits:
    """Compute the logit of each token's label. Also sort the hidden states if asked to, since the kernel reads them anyway."""
    hidden, weight, bias, labels, ignore_index, *_ = inputs
    n, d, v, _ = inputs.shape
    logit = torch.empty(n, device=hidden.device, dtype=torch.float32)
    active = torch.empty(ceil_div(n, block_m), dtype=torch.int32, device=hidden.device) if block_m else None
    block_r = 64 if hidden.device.type != "cpu" else 16  # Hopper's tensor cores multiply at least 64 rows
    num_warps = 4 if plan.block_m >= 128 else plan.num_warps  # before Ampere, four warps spill registers
    _label_logit_kernel[(ceil_div(n, block_r),)](
        hidden, weight, bias, labels, vocab_perm, logit, active, token_perm, sorted_hidden, n, v, d, hidden.stride(0),
        weight.stride(0), ignore_index, *scale_and_softcap(inputs), PRECISION=plan.precision, BLOCK_M=block_m,
        BLOCK_R=block_r, BLOCK_K=plan.block_k, num_warps=num_warps, num_stages=4,
    )  # fmt: skip
    return LabelLogits(logit, active)
