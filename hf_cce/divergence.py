"""``linear_divergence``: distillation losses between two linear heads, with less memory than full logits.

Legend: N tokens, D hidden size, V vocabulary. Logits are z = softcap · tanh(x / softcap) / T with
x = logit_scale · (hidden_states · weightᵀ + bias) and T the temperature.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from hf_cce import checks
from hf_cce.checks import Reduction
from hf_cce.config import CCEConfig
from hf_cce.dispatch import Problem, choose_implementation, dispatch_divergence
from hf_cce.divergence_rows import DivergenceRows, divergence_kernels
from hf_cce.divergence_spec import DivergenceSpec, Head
from hf_cce.divergence_topk import TopK, TopKRows
from hf_cce.ops import compute_context
from hf_cce.spec import LossSpec, Tokens, accumulation_dtype

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["lump", "renormalize"]
MAX_TOP_K = 1024  # the kernel holds this many of a teacher's tokens at once


class TeacherHead(NamedTuple):
    """A teacher given by hidden states and LM head. It gets no gradients.

    Attributes:
        hidden_states: [..., D_t]; D_t may differ from the student's D.
        weight: [V_t, D_t].
        bias: [V_t] or None.
        logit_scale: factor on the logits, before the softcap.
        softcap: positive, or None.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None


class TeacherTopK(NamedTuple):
    """A teacher given by its k most probable tokens, as inference servers return them. It gets no gradients.

    Attributes:
        ids: [..., k], all different within a position.
        log_probs: [..., k], at the temperature of the call. Entries of minus infinity are padding: they are left out, whatever
            their ids are. A position with padding only has a divergence of 0.
        tail: ``"lump"`` treats all other tokens as one more event, whose probability is 1 minus the sum of the k others and at
            least the machine epsilon; ``"renormalize"`` divides both distributions by their sums over the k tokens.
    """

    ids: Tensor
    log_probs: Tensor
    tail: Tail = "lump"


class Target(NamedTuple):
    """A teacher given by probabilities [..., V], which need not sum to 1, or by their logarithms. Only for the forward KL."""

    values: Tensor
    log: bool


class Options(NamedTuple):
    """The options of ``divergences`` beside ``CCEConfig``."""

    beta: float  # 0 for the forward KL, 1 for the reverse KL
    temperature: float
    reduction: Reduction = "none"
    num_items_in_batch: Tensor | int | float | None = None
    entropy: bool = False  # also return the student's entropy
    # All tokens will have the same upstream gradient. If they do not, the result is right, but takes longer.
    summed: bool = True


@_disable_dynamo  # unlike torch.compiler.disable, it keeps the types of the arguments
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: TeacherHead | TeacherTopK | Tensor,
    *,
    student_bias: Tensor | None = None,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items_in_batch: Tensor | int | float | None = None,
    config: CCEConfig | None = None,
) -> Tensor:
    """Compute the divergence of a student's next-token distribution from a teacher's, with less memory than full logits.

    The loss of a token is KL(p_teacher ‖ p_student) for ``"forward_kl"``, KL(p_student ‖ p_teacher) for ``"reverse_kl"``, and for
    ``"jsd"`` the generalized Jensen-Shannon divergence β KL(p_teacher ‖ m) + (1 − β) KL(p_student ‖ m) with the mixture
    m = (1 − β) p_student + β p_teacher (Agarwal et al., 2024, arXiv 2306.13649; β as in TRL). It is not multiplied by T².

    In code that ``torch.compile`` compiles, this function runs outside the graph.

    The vocabularies may be padded differently: both softmaxes are over the first min(V, V_t) entries, and the student's other
    entries get zero gradient.

    Args:
        student_hidden: [..., D], floating point.
        student_weight: [V, D], same dtype and device. Under autocast both are cast as for a matmul.
        teacher: a ``TeacherHead``, a ``TeacherTopK``, or logits [..., V_t], on the student's device.
        student_bias: [V], same dtype, or None.
        kind: which divergence to compute, see above.
        beta: β in (0, 1), used by the JSD only.
        temperature: T, positive; both models' logits are divided by it. The log-probabilities of a ``TeacherTopK`` must be at T.
        mask: [...], bool or integers; zero (False) excludes a token, even if its hidden states are NaN.
        logit_scale: factor on the student's logits, applied before the softcap.
        softcap: the student's softcap, positive, or None to disable.
        reduction: ``"mean"`` over the tokens that are not excluded, ``"sum"`` or ``"none"``.
        num_items_in_batch: with ``"mean"``, divide the sum by this instead.
        config: options, of which ``memory_budget`` and ``implementation`` apply; see ``CCEConfig``. If a budget in bytes has no
            room for float32 sums of the weight's gradient, the kernels compute some logits twice; where they do not run, and
            for a ``TeacherTopK``, the sums exceed the budget.

    Returns:
        A scalar, or [...] for ``reduction="none"`` (zero where masked), in float32 (float64 for float64 inputs). The mean over no
        tokens is 0. Differentiable in the student's hidden states, weight and bias.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: shapes, dtypes, devices or options are invalid.
        RuntimeError: in a double backward, under ``torch.func`` transforms or forward-mode AD, or if ``config`` requires
            kernels that cannot run here.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {get_args(Kind)}, got {kind!r}")
    checks.check_reduction(reduction, num_items_in_batch)
    checks.check_numbers(beta=beta, temperature=temperature)
    if kind == "jsd" and not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta must lie in (0, 1), got {beta}; for 0 and 1, use kind='forward_kl' and kind='reverse_kl'"
        )
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    student = TeacherHead(student_hidden, student_weight, student_bias, logit_scale, softcap)
    beta_of_kind = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": float(beta)}[kind]
    options = Options(beta_of_kind, float(temperature), reduction, num_items_in_batch, summed=reduction != "none")
    return divergences(student, teacher, options, mask, config)[0]


class Divergence(torch.autograd.Function):
    """Autograd function for (divergence [N], student entropy [N] or empty), zero for tokens that are not selected.

    ``factor``: a scalar that upstream gradients contain; None: no gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, student: Head, teacher: Head | TopK, tokens: Tokens,
        spec: DivergenceSpec, factor: Tensor | float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n, teacher_type = hidden.shape[0], cast(Any, type(teacher))
        student, ctx.kept = student._replace(hidden=hidden, weight=weight, bias=bias), None
        if n == 0 or (tokens.indices is not None and len(tokens.indices) == 0):
            # A kernel cannot be launched for zero tokens.
            spec = spec._replace(plan=spec.plan._replace(triton=False, multiplies=False, way="keep"))
        of_rows = _of_rows(student, teacher, tokens, spec)
        with compute_context(hidden):
            if spec.plan.way == "one_pass":
                divergence, entropy, ctx.kept = of_rows.one_pass(ctx.needs_input_grad[:3])
            else:
                divergence, entropy, ctx.kept = of_rows.divergences(factor if spec.plan.way == "keep" else None)
        ctx.stats = of_rows.stats
        # save_for_backward refuses tensors made in inference mode; ctx may hold the teacher's, since they get no gradients.
        given = [x if isinstance(x, Tensor) and not x.is_inference() else None for x in teacher]
        ctx.teacher = teacher_type(*(x if saved is None else None for x, saved in zip(teacher, given, strict=True)))
        ctx.save_for_backward(hidden, weight, bias, *tokens, *given)
        ctx.options = student[3:], spec, factor
        ctx.set_materialize_grads(False)
        entropy = tokens.scatter(entropy, n) if spec.entropy else entropy
        ctx.mark_non_differentiable(entropy)
        return tokens.scatter(divergence, n), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        if torch.is_grad_enabled():  # autograd would treat the result as a constant
            raise RuntimeError(
                "linear_divergence has no second derivative; remove create_graph=True, or use full logits"
            )
        (form, spec, factor), saved = ctx.options, ctx.saved_tensors  # read once: a checkpoint unpacks each only once
        student, tokens, given = Head(*saved[:3], *form), Tokens(*saved[3:5]), saved[5:]
        teacher = type(ctx.teacher)(*(x if y is None else y for x, y in zip(ctx.teacher, given, strict=True)))
        of_rows = _of_rows(student, teacher, tokens, spec, ctx.stats)
        summed = grad.stride() == (0,)  # the gradient of a sum or a mean: equal for all tokens
        grad = grad.to(accumulation_dtype(student.hidden.dtype))
        of_tokens = tokens.gather(grad[:, None])[:, 0].contiguous()
        needs = ctx.needs_input_grad[:3]
        kept: Any = ctx.kept
        ctx.kept = None  # a second backward pass computes it again
        with compute_context(student.hidden):
            if spec.plan.way == "keep":
                kept = kept or of_rows.divergences(factor)[2]
                grads = of_rows.gradients(kept, of_tokens, needs)
            elif kept is not None and summed:
                grads = of_rows.gradients_of_sums(kept, grad[0], needs)
            else:
                kept = None  # free it first
                grads = of_rows.gradients_by_blocks(of_tokens, needs)
        grad_hidden, grad_weight, grad_bias = grads
        n, v = len(student.hidden), len(student.weight)
        return tokens.scatter(grad_hidden, n), _pad(grad_weight, v), _pad(grad_bias, v), *[None] * 5


def _pad(grad: Tensor | None, v: int) -> Tensor | None:
    """Append zeros for vocabulary entries that only the student has."""
    if grad is None or len(grad) == v:
        return grad
    return F.pad(grad, (*[0, 0] * (grad.dim() - 1), 0, v - len(grad)))


def _of_rows(
    student: Head, teacher: Head | TopK, tokens: Tokens, spec: DivergenceSpec, stats: Tensor | None = None
) -> DivergenceRows:
    """Select the rows of ``tokens``, and limit both heads to the vocabulary entries of the smaller one."""
    if isinstance(teacher, TopK):
        return TopKRows(student._replace(hidden=tokens.gather(student.hidden)), teacher, tokens, spec)
    sizes = (x.hidden.shape[1] if x.weight is None else x.weight.shape[0] for x in (student, teacher))
    heads, v = [], min(sizes)
    for x in (student, teacher):
        x = x.columns(0, v)
        x = x if x.weight is None else x._replace(hidden=tokens.gather(x.hidden))
        if student.hidden.dtype == torch.float64 and x.weight is not None:
            bias = None if x.bias is None else x.bias.double()
            x = x._replace(hidden=x.hidden.double(), weight=x.weight.double(), bias=bias)
        heads.append(divergence_kernels().with_contiguous_rows(x) if spec.plan.triton else x)
    return DivergenceRows(heads[0], heads[1], tokens, spec, stats)


def divergences(
    student: TeacherHead,
    teacher: TeacherHead | TeacherTopK | Target | Tensor,
    options: Options,
    mask: Tensor | None,
    config: CCEConfig | None,
) -> tuple[Tensor, Tensor | None]:
    """Return (divergence [...] or reduced, student entropy [...] without gradient or None)."""
    beta, temperature, reduction, num_items_in_batch, entropy, summed = options
    config, x = checks.check_config(config), student.hidden_states
    head, flat = _prepare_head(student, "student_", temperature), _prepare_mask(mask, x)
    n, dtype, device = len(head.hidden), head.hidden.dtype, head.hidden.device
    divisor = checks.make_divisor(reduction, num_items_in_batch, device)
    items = divisor.items
    if items is None and not divisor.number and flat is not None:
        items = flat.sum()
    factor: Tensor | float = 1 / (divisor.number or max(n, 1))
    if items is not None:
        items = items.to(accumulation_dtype(dtype))
        factor = torch.where(items == 0, 0.0, items.reciprocal())
    given = _prepare_teacher(teacher, x, temperature)
    # Raises if kernels are required, but cannot run.
    choose_implementation(device, dtype, config.implementation)
    if isinstance(given, TopK):
        kernels, form = given.ids.shape[1] <= MAX_TOP_K, "top_k"
    else:
        kernels = given.hidden.dtype in (torch.float16, torch.bfloat16, torch.float32)
        form = "logits" if given.weight is None else "head"
    operands = head[:3]
    needs: Any = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in operands)
    problem = Problem(n, head.hidden.shape[1], len(head.weight), dtype, device)
    loss_spec = LossSpec.of(config, n, needs)
    spec = DivergenceSpec(beta, entropy, dispatch_divergence(problem, loss_spec, kernels, form, summed))
    found, entropies = Divergence.apply(
        *operands, head, given, Tokens.of(flat, device), spec, factor if any(needs) else None
    )
    found = found.view(x.shape[:-1]) if reduction == "none" else found.sum() * factor
    return found, entropies.view(x.shape[:-1]) if entropy else None


def _prepare_head(x: TeacherHead, prefix: str, temperature: float) -> Head:
    """Check ``x``; return it flattened to [N, D], cast for autocast, with the temperature folded into scale and softcap."""
    hidden, weight, bias, logit_scale, softcap = x
    names = (f"{prefix}hidden", f"{prefix}weight", f"{prefix}bias")
    hidden, weight, bias = checks.check_head(hidden, weight, bias, names)
    checks.check_logit_options(logit_scale, softcap, "" if prefix == "student_" else prefix)
    # Dividing the capped logits by T equals dividing both scale and softcap by T.
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return Head(hidden, weight, bias, float(logit_scale) / temperature, float(softcap or 0.0) / temperature)


def _prepare_teacher(
    teacher: TeacherHead | TeacherTopK | Target | Tensor, student_hidden: Tensor, temperature: float
) -> Head | TopK:
    """Check the teacher; return it detached and flattened."""
    if isinstance(teacher, TeacherTopK):
        return _prepare_top_k(teacher, student_hidden)
    if isinstance(teacher, TeacherHead):
        found = _prepare_head(teacher, "teacher ", temperature)
        found = Head._make(x.detach() if isinstance(x, Tensor) else x for x in found)
        shape, name = teacher.hidden_states.shape, "hidden"
    elif isinstance(teacher, Target):
        shape, name = teacher.values.shape, "values"
        found = Head(teacher.values.reshape(-1, shape[-1]), None, None, 1.0, 0.0, "log p" if teacher.log else "p")
    elif isinstance(teacher, Tensor):
        if not teacher.is_floating_point() or teacher.dim() < 1 or teacher.shape[-1] == 0:
            raise ValueError(
                f"teacher logits must be floating point [..., V], got {teacher.dtype} {tuple(teacher.shape)}"
            )
        shape, name = teacher.shape, "logits"
        found = Head(teacher.detach().reshape(-1, shape[-1]), None, None, 1.0 / temperature, 0.0)
    else:
        raise TypeError(
            f"teacher must be a TeacherHead, a TeacherTopK or a tensor of logits, got {checks.type_name(teacher)}"
        )
    checks.check_tokens(f"teacher {name}", found.hidden, shape[:-1], "student_hidden", student_hidden)
    return found


def _prepare_top_k(teacher: TeacherTopK, student_hidden: Tensor) -> TopK:
    ids, log_probs, tail = teacher
    checks.check_tensor("teacher ids", "[..., k]", ids)
    checks.check_tensor("teacher log_probs", "[..., k]", log_probs)
    if tail not in get_args(Tail):
        raise ValueError(f"teacher tail must be one of {get_args(Tail)}, got {tail!r}")
    if ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ValueError(f"teacher ids must be integers (torch.int64, int32 or int16), got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise ValueError(f"teacher log_probs must be floating point, got {log_probs.dtype}")
    for name, x in (("ids", ids), ("log_probs", log_probs)):
        if x.dim() < 1 or x.shape[-1] == 0:
            raise ValueError(f"teacher {name} must have shape [..., k], got {tuple(x.shape)}")
        checks.check_tokens(f"teacher {name}", x, x.shape[:-1], "student_hidden", student_hidden)
    if ids.shape != log_probs.shape:
        raise ValueError(
            f"teacher ids and log_probs must have the same shape, got {tuple(ids.shape)} and {tuple(log_probs.shape)}"
        )
    ids = ids.reshape(-1, ids.shape[-1]).long()
    log_p = log_probs.detach().reshape(ids.shape).to(accumulation_dtype(student_hidden.dtype))
    return TopK(ids, log_p, tail == "lump")


def _prepare_mask(mask: Tensor | None, student_hidden: Tensor) -> Tensor | None:
    """Check ``mask`` and return it as [N] bool."""
    if mask is None:
        return None
    checks.check_tensor("mask", "[...]", mask)
    checks.check_tokens("mask", mask, mask.shape, "student_hidden", student_hidden)
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask must be bool or integers, got {mask.dtype}; it selects tokens but does not weight them")
    return mask.reshape(-1) != 0
