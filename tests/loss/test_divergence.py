"""``linear_divergence`` against full logits: every kind, form of the teacher, option and reduction.

Kernels run on a GPU if there is one, else in Triton's interpreter with tiles small enough that inputs span several.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from divergences import (
    EVERYTHING,
    KINDS,
    Case,
    Inputs,
    check,
    fused_divergence,
    make_inputs,
    outcome,
    plain_divergence,
    teacher_logits,
    token_divergences,
    top_k,
)
from forced_strategies import BFLOAT16
from numerics import assert_accurate, assert_all_accurate
from peak_memory import PeakMemory
from torch.utils.checkpoint import checkpoint

from hf_cce import (
    CCEConfig,
    TeacherHead,
    TeacherTopK,
    dispatch,
    divergence,
    divergence_rows,
    divergence_spec,
    divergence_topk,
    fallback,
    linear_divergence,
    reference,
)
from hf_cce.config import MIB
from hf_cce.kernels import divergence as divergence_kernels
from hf_cce.kernels import rows as kernel_rows
from hf_cce.spec import DivergencePlan, LossSpec, Tokens


def fused_outcome(x: Inputs, case: Case, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return outcome(x, lambda *leaves: fused_divergence(x, leaves, case), dtype)


FORMS = ("head", "logits", "lump", "renormalize")
NAMES = ("rows", "blocks", "triton rows", "triton blocks")
IMPLEMENTATIONS_AND_DTYPES = [
    *((name, dtype) for name in ("rows", "blocks") for dtype in (torch.float64, torch.bfloat16)),
    *((name, dtype) for name in ("rows", "blocks", "triton rows") for dtype in (torch.float32, torch.float16)),
    # Only a GPU writes float32 products of float16 operands, which sums over blocks need.
    *(pytest.param(name, torch.float16, marks=pytest.mark.gpu) for name in ("triton blocks", "triton partial blocks")),
    *(
        pytest.param(name, *BFLOAT16.values, marks=BFLOAT16.marks)
        for name in ("triton rows", "triton shifted", "triton shifted blocks", "triton shifted partial blocks")
    ),
]


# A test runs with each of these, unless it has a list of its own.
@pytest.fixture(params=KINDS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=NAMES)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def config(implementation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CCEConfig]:
    """Yield a config for ``implementation``, and make sure that no other one runs in its place."""
    triton, blocks = implementation.startswith("triton"), implementation.endswith("blocks")

    def dispatch_divergence(p: Any, spec: Any, kernels: bool, teacher: str, summed: bool) -> DivergencePlan:
        way: Any = "keep"
        top_k = teacher == "top_k"
        if blocks and not (top_k and ("shifted" in implementation or p.dtype == torch.float16)):
            exact = triton or p.dtype in (torch.float32, torch.float64)
            way = "one_pass" if summed and exact and any(spec.needs) else "blocks"
        return DivergencePlan(spec.memory_budget, triton and kernels, "shifted" in implementation and not top_k, way)

    monkeypatch.setattr(divergence, "dispatch_divergence", dispatch_divergence)
    if blocks:  # as on a GPU, where tokens that are not selected are only masked
        monkeypatch.setattr(reference, "_would_sync", lambda _: True)
        of = Tokens.of
        monkeypatch.setattr(Tokens, "of", lambda mask, device: of(mask, torch.device("cuda")))
    for module in (divergence_rows, fallback):  # several blocks of tokens
        monkeypatch.setattr(module, "tokens_per_block", lambda *_: 8)
    if "partial" in implementation:  # the weight's gradient is not summed over blocks as a whole
        monkeypatch.setattr(divergence_rows, "MIN_TOKENS", 10**9)
    monkeypatch.setattr(kernel_rows, "BLOCK", 16)  # of which a kernel takes four
    monkeypatch.setattr(divergence_kernels, "SAMPLE", 16)
    if triton:
        monkeypatch.setattr(divergence_rows, "divergence_and_neg_grad", None)
        monkeypatch.setattr(divergence_topk, "divergence_on_support", None)
    # and several chunks in each, or slabs of the vocabulary
    chunks = divergence_rows.chunks
    monkeypatch.setattr(divergence_rows, "chunks", lambda n, row_bytes, _: chunks(n, 1, 7 if n < 64 else 29))
    # cuBLAS may round partial sums of small products to 16 bits, for rows of our layout others than for PyTorch's.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield CCEConfig("triton" if triton else "portable")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES, ids=str)
def test_kinds(case: Case, form: str, implementation: str, dtype: torch.dtype, config: CCEConfig, device: str) -> None:
    every = dtype == torch.float32 or ("partial" in implementation and form in ("head", "logits"))
    others = [{"reduction": name, "masked": True} for name in ("sum", "none")] if every else [{}]
    for options in ({"temperature": 1.7}, EVERYTHING, *others):
        check(replace(case, form=form, **options), dtype, config, device)


@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("form", ["p", "log p"])
def test_targets_whose_sum_is_not_one(
    form: str, implementation: str, dtype: torch.dtype, config: CCEConfig, device: str
) -> None:
    # In 16 bits without a bias or a softcap (see ``test_kinds``), with which the rounding of a few numbers decides the errors
    others = [EVERYTHING, {"reduction": "none"}] if dtype.itemsize > 2 else [{"masked": True}]
    for options in ({}, *others):
        check(Case(form=form, **options), dtype, config, device)


@pytest.mark.parametrize("vocab_sizes", [(131, 144), (160, 131)])
@pytest.mark.parametrize("form", ["head", "logits"])
def test_vocabularies_that_differ_in_padding(
    case: Case, form: str, vocab_sizes: tuple[int, int], config: CCEConfig, device: str
) -> None:
    case = replace(case, form=form, vocab_sizes=vocab_sizes, bias=True, reduction="none")
    check(case, torch.float32, config, device)


def test_masked_tokens_are_not_read() -> None:
    for form in FORMS:
        case = Case("jsd", form=form, masked=True)
        x = make_inputs(case, torch.float32)
        expected = fused_outcome(x, case)
        assert x.mask is not None
        x.hidden[~x.mask] = torch.nan
        x.teacher_hidden[~x.mask] = torch.nan
        assert all(map(torch.equal, fused_outcome(x, case), expected))


@pytest.mark.parametrize("upstream", [math.inf, math.nan])
def test_upstream_gradients_of_masked_tokens_are_ignored(
    upstream: float, form: str, config: CCEConfig, device: str
) -> None:
    """The mean over each sequence divides by zero for one that is masked as a whole, even if it is left out afterwards."""
    case = Case(form=form, masked=True, reduction="none")
    x, found = make_inputs(case, torch.float32, device), []
    for value in (0.0, upstream):
        x.upstream = torch.where(x.mask, x.upstream, value)
        found.append(outcome(x, lambda *leaves: fused_divergence(x, leaves, case, config)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("part", ["student", "teacher"])
def test_nan_gives_a_nan_loss(case: Case, form: str, part: str, config: CCEConfig, device: str) -> None:
    case = replace(case, form=form, reduction="none")
    x = make_inputs(case, torch.float32, device)
    (x.hidden if part == "student" else x.teacher_hidden)[1, 2, 3] = torch.nan
    found = fused_divergence(x, x.student(torch.float32), case, config).isnan()
    assert found[1, 2] and found.sum() == 1


def test_all_tokens_masked(form: str) -> None:
    for case in (Case(form=form, masked=True), Case("jsd", form=form, masked=True)):
        x = make_inputs(case, torch.float32)
        assert x.mask is not None
        x.mask[:] = False
        assert not any(each.any() for each in fused_outcome(x, case))


@pytest.mark.parametrize(
    ("case", "dtype", "logit"),
    [
        (Case("forward_kl", form="logits"), torch.float32, -math.inf),
        (Case("jsd", form="logits"), torch.float32, -math.inf),
        (Case("reverse_kl", form="logits", reduction="sum"), torch.float16, -600.0),
    ],
    ids=str,
)
def test_teacher_logits_of_minus_infinity_or_hundreds(case: Case, dtype: torch.dtype, logit: float) -> None:
    """Entries without a probability do not contribute, and gaps of hundreds between log-probabilities do not overflow."""
    check(case, dtype, x=replace(make_inputs(case, dtype), ruled_out=logit))


@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
@pytest.mark.parametrize("beta", [0.5, 0.9])
@pytest.mark.parametrize("form", ["head", "logits"])
def test_probabilities_whose_share_of_the_mixture_underflows(
    form: str, beta: float, config: CCEConfig, device: str
) -> None:
    """Log-probabilities fall to −130: (1 − β) p underflows for some of the student's that do not."""
    case, x = Case("jsd", form=form, beta=beta), make_inputs(Case(), torch.float32, device)
    x.hidden, x.weight = torch.ones(2, 10, 1, device=device), torch.linspace(0.0, -130.0, 131, device=device)[:, None]
    x.teacher_hidden, x.teacher_weight = x.hidden, 2.0 * x.weight
    check(case, torch.float32, config, x=x)


@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
@pytest.mark.parametrize("tail", ["lump", "renormalize"])
def test_padding_of_a_top_k_teacher_changes_nothing(case: Case, tail: str, config: CCEConfig, device: str) -> None:
    x = make_inputs(case, torch.float32, device)
    ids, log_probs, _ = top_k(x, replace(case, form=tail))
    more = torch.cat((ids[..., 1:2], torch.full_like(ids[..., :2], -100)), -1)  # a repeated id, and invalid ones
    nothing = torch.full(more.shape, -torch.inf, device=device)
    short = TeacherTopK(ids, log_probs, tail)  # type: ignore[arg-type]
    padded = short._replace(ids=torch.cat((ids, more), -1), log_probs=torch.cat((log_probs, nothing), -1))
    empty = short._replace(ids=more, log_probs=nothing)
    loss = partial(linear_divergence, kind=case.kind, beta=case.beta, config=config)
    baseline, actual, zeros = (outcome(x, partial(loss, teacher=teacher)) for teacher in (short, padded, empty))
    exact = outcome(x, partial(linear_divergence, teacher=short, kind=case.kind, beta=case.beta), torch.float64)
    assert_all_accurate(actual, baseline, exact)
    assert not any(zero.any() for zero in zeros)


@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
def test_the_tail_of_a_student_that_predicts_nothing_else_is_a_constant(
    case: Case, config: CCEConfig, device: str
) -> None:
    x, eps = make_inputs(replace(case, bias=True), torch.float32, device), torch.finfo(torch.float32).eps
    x.bias = torch.full((131,), -torch.inf, device=device).index_fill(0, torch.arange(5, device=device), 0.0)
    ids = torch.arange(5, device=device).expand(2, 10, 5)
    log_pt = torch.full_like(ids, -2.0, dtype=torch.float32)
    teacher = TeacherTopK(ids, log_pt)

    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        log_ps = F.linear(hidden, weight, bias)[..., :5].log_softmax(-1)
        tails = (torch.full_like(log_ps[..., :1], math.log(eps)), (-log_pt.exp().sum(-1, keepdim=True)).log1p())
        return token_divergences(
            *(torch.cat(pair, -1) for pair in zip((log_ps, log_pt), tails, strict=True)), case
        ).mean()

    loss = partial(linear_divergence, teacher=teacher, kind=case.kind, beta=case.beta, config=config)
    actual = outcome(x, lambda hidden, weight, bias: loss(hidden, weight, student_bias=bias))
    assert_all_accurate(actual, outcome(x, plain), outcome(x, plain, torch.float64))


@pytest.mark.parametrize("implementation", ["triton shifted"])
def test_a_bias_that_rules_out_the_entries_whose_logits_shift_the_others(config: CCEConfig, device: str) -> None:
    case = Case("jsd", bias=True)
    x = make_inputs(case, torch.float32, device)
    x.bias = torch.zeros(131, device=device).index_fill(0, torch.arange(16, device=device), -torch.inf)
    check(case, torch.bfloat16, config, x=x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device-side assertion would end the process")
@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
@pytest.mark.parametrize("wrong", [-1, 131])
def test_an_id_out_of_range(wrong: int, config: CCEConfig) -> None:
    x, ids = make_inputs(Case(), torch.float32), torch.arange(40).view(2, 10, 2)
    ids[1, 9, 1] = wrong
    with pytest.raises(ValueError, match=rf"ids must lie in \[0, 131\), .* got {min(wrong, 0)} to {max(wrong, 38)}"):
        linear_divergence(x.hidden, x.weight, TeacherTopK(ids, torch.full((2, 10, 2), -1.0)), config=config)


@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
def test_top_k_that_the_student_rules_out(case: Case, config: CCEConfig, device: str) -> None:
    """The student gives nearly all its probability to the tail. The gradient is small, and no difference of large numbers."""
    case = replace(case, form="lump")
    x = make_inputs(case, torch.float32, device)
    ids = top_k(x, case).ids.unique()
    x.bias = torch.zeros(131, device=device).index_fill(0, ids[:100], -20.0)
    check(case, torch.float32, config, x=x)


@pytest.mark.parametrize("implementation", ["rows", "triton rows"])
@pytest.mark.parametrize("tail", ["lump", "renormalize"])
def test_masked_tokens_of_a_student_that_never_predicts_id_0(
    case: Case, tail: str, config: CCEConfig, device: str
) -> None:
    case = replace(case, form=tail, masked=True, bias=True)
    x = make_inputs(case, torch.float32, device)
    x.bias[0] = -torch.inf
    ids = torch.arange(1, 6, device=device).expand(2, 10, 5)
    teacher = TeacherTopK(ids, torch.full_like(ids, -3.0, dtype=torch.float32), tail)  # type: ignore[arg-type]
    loss = partial(linear_divergence, kind=case.kind, mask=x.mask, config=config)
    found = outcome(x, lambda hidden, weight, bias: loss(hidden, weight, teacher, student_bias=bias))
    assert all(each.isfinite().all() for each in found)


def test_gradient_of_one_input_alone() -> None:
    case = Case(bias=True)
    x = make_inputs(case, torch.float32)
    _, *expected = fused_outcome(x, case)
    for index in range(3):
        leaves = [leaf.detach().requires_grad_(i == index) for i, leaf in enumerate(x.student(torch.float32))]
        (found,) = torch.autograd.grad(fused_divergence(x, leaves, case), [leaves[index]])
        assert torch.equal(found, expected[index])


def test_a_second_backward_gives_the_same_gradients(case: Case, form: str) -> None:
    x = make_inputs(replace(case, form=form, **EVERYTHING), torch.bfloat16)
    leaves = x.student(torch.bfloat16)
    loss = fused_divergence(x, leaves, replace(case, form=form, **EVERYTHING))
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("implementation", ["rows", "blocks"])
def test_in_a_checkpoint(form: str, config: CCEConfig, device: str) -> None:
    case = Case(form=form, **EVERYTHING)
    x = make_inputs(case, torch.float32, device)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return fused_divergence(x, leaves, case, config)

    assert all(map(torch.equal, outcome(x, partial(checkpoint, loss, use_reentrant=False)), outcome(x, loss)))


@pytest.mark.parametrize("implementation", ["blocks", "triton blocks"])
def test_gradients_for_equal_upstream_gradients_serve_no_other_pass(case: Case, config: CCEConfig, device: str) -> None:
    """Neither one with other upstream gradients, nor a second one."""
    case = replace(case, reduction="none")
    x, beta = make_inputs(case, torch.float32, device), {"forward_kl": 0.0, "reverse_kl": 1.0}.get(case.kind, case.beta)
    teacher = TeacherHead(x.teacher_hidden, x.teacher_weight)

    def fused(*leaves: torch.Tensor) -> torch.Tensor:
        return divergence.divergences(TeacherHead(*leaves), teacher, divergence.Options(beta, 1.0), None, config)[0]

    def second(*leaves: torch.Tensor) -> torch.Tensor:
        found = fused(*leaves)
        torch.autograd.grad(3 * found.sum(), leaves, retain_graph=True)
        return found

    exact, baseline = (
        outcome(x, lambda *leaves: plain_divergence(x, leaves, case), dtype) for dtype in (torch.float64, torch.float32)
    )
    for loss in (fused, second):
        assert_all_accurate(outcome(x, loss), baseline, exact)
    plain = outcome(x, lambda *leaves: fused(*leaves).sum())
    assert_all_accurate(outcome(x, lambda *leaves: second(*leaves).sum()), plain, plain)


@pytest.mark.parametrize("form", ["head", "lump"])
def test_divergences_of_tokens_may_be_changed_in_place(case: Case, form: str, config: CCEConfig, device: str) -> None:
    case = replace(case, form=form, reduction="none")
    x = make_inputs(case, torch.float32, device)
    expected, found = (
        outcome(x, lambda *leaves, double=double: double(fused_divergence(x, leaves, case, config)))
        for double in (lambda y: y * 2, lambda y: y.mul_(2))
    )
    assert_all_accurate(found, expected, expected)


def test_num_items_in_batch() -> None:
    case = Case(masked=True, reduction="sum")
    x = make_inputs(case, torch.float32)
    leaves = x.student(torch.float32)
    total, teacher = fused_divergence(x, leaves, case), TeacherHead(x.teacher_hidden, x.teacher_weight)
    for items in (7, torch.tensor(7), 7.0):
        found = linear_divergence(*leaves, teacher, mask=x.mask, num_items_in_batch=items)
        assert_accurate(found, total / 7, total.double() / 7, f"{items!r}")


def test_autocast_casts_like_a_matmul() -> None:
    case = Case("reverse_kl")
    x = make_inputs(case, torch.float32)
    leaves = x.student(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_divergence(x, leaves, case)
        baseline = plain_divergence(x, leaves, case)
    exact = plain_divergence(x, x.student(torch.float64), case)
    assert_accurate(loss, baseline, exact, "loss", torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(loss, leaves))


def test_the_teacher_gets_no_gradient() -> None:
    x = make_inputs(Case(), torch.float32)
    hidden, weight = x.teacher_hidden.requires_grad_(), x.teacher_weight.requires_grad_()
    loss = linear_divergence(*x.student(torch.float32), TeacherHead(hidden, weight))
    loss.backward()
    assert hidden.grad is None and weight.grad is None


def test_a_teacher_made_in_inference_mode(form: str) -> None:
    for case in (Case(form=form, masked=True), Case("jsd", form=form)):
        x = make_inputs(case, torch.float32)
        with torch.inference_mode():
            made = replace(x, teacher_hidden=x.teacher_hidden.clone(), teacher_weight=x.teacher_weight.clone())
            teacher: Any = TeacherHead(made.teacher_hidden, made.teacher_weight, torch.zeros(131))
            if form != "head":
                teacher = teacher_logits(made) if form == "logits" else top_k(made, case)
        found = outcome(x, partial(linear_divergence, teacher=teacher, kind=case.kind, mask=x.mask))
        assert all(map(torch.equal, found, fused_outcome(x, case)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["head", "logits"])
def test_a_narrow_teacher_of_a_float64_student(case: Case, form: str, dtype: torch.dtype) -> None:
    """The accumulation dtype follows the student: the result is that for the same teacher in float64."""
    x = make_inputs(replace(case, masked=True), dtype)
    found = []
    for wide in (True, False):
        hidden, weight = (t.double() if wide else t for t in (x.teacher_hidden, x.teacher_weight))
        logits = teacher_logits(x)
        teacher = TeacherHead(hidden, weight) if form == "head" else logits.double() if wide else logits
        loss = partial(linear_divergence, teacher=teacher, kind=case.kind, beta=case.beta, mask=x.mask)
        found.append(outcome(x, loss, torch.float64))
    assert_all_accurate(found[1], found[0], found[0])


@pytest.mark.parametrize("tail", ["lump", "renormalize"])
def test_a_teacher_changed_in_place_before_the_backward_pass_is_an_error(
    tail: str, config: CCEConfig, device: str
) -> None:
    case = Case(form=tail)
    x = make_inputs(case, torch.float32, device)
    leaves, teacher = x.student(torch.float32), top_k(x, case)
    loss = linear_divergence(*leaves, teacher, config=config)
    teacher.ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    for case in (Case(), Case(form="lump")):
        x = make_inputs(case, torch.float32)
        leaves = x.student(torch.float32)
        with pytest.raises(RuntimeError, match="has no second derivative; remove create_graph=True"):
            torch.autograd.grad(fused_divergence(x, leaves, case), leaves[:1], create_graph=True)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("form", ["head", "lump"])
@pytest.mark.parametrize("case", [Case(), Case("jsd")], ids=str)
def test_memory_stays_within_the_budget(case: Case, form: str, trains: bool) -> None:
    x = make_inputs(replace(case, form=form, vocab_sizes=(20_000, 20_000)), torch.float32, n=256, d=16, dt=16)
    config = CCEConfig(memory_budget=4 * MIB)
    leaves = x.student(torch.float32)
    known = {t.untyped_storage()._cdata for t in (*leaves, x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)}
    teacher: Any = TeacherHead(x.teacher_hidden, x.teacher_weight)
    if form == "lump":
        teacher = TeacherTopK(torch.arange(8).expand(2, 128, 8), torch.full((2, 128, 8), -3.0))
    with PeakMemory(known) as memory, torch.set_grad_enabled(trains):
        loss = linear_divergence(*leaves, teacher, kind=case.kind, beta=case.beta, config=config)  # type: ignore[arg-type]
        if trains:
            torch.autograd.grad(loss, leaves)
    gradients_bytes = sum(4 * leaf.numel() for leaf in leaves) if trains else 0
    logits = 4 * 256 * 20_000
    assert memory.peak - gradients_bytes <= 5 * MIB < logits / 3


@pytest.mark.parametrize("implementation", ["triton shifted partial blocks"])
@pytest.mark.parametrize("form", ["head", "logits"])
def test_slabs_of_the_vocabulary_stay_within_the_budget(
    form: str, config: CCEConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of dW that are computed from recomputed logits need slabs of both models' logits and float32 products."""
    monkeypatch.setattr(divergence_rows, "chunks", fallback.chunks)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As on a GPU: on a CPU, the product would copy its operands to float32."""
        gc.collect()  # Triton's interpreter leaves the arguments of a launch in reference cycles
        return torch.zeros(len(a), b.shape[1], device=a.device)

    monkeypatch.setattr(divergence_rows, "multiply", multiply)
    monkeypatch.setattr(kernel_rows, "BLOCK", 1024)
    n, v, d, budget = 64, 10_000, 64, MIB
    hidden, weight, gradient = (torch.randn(size, d).to(device, torch.bfloat16) for size in (n, v, v))
    given = torch.randn(n, v).to(device, torch.bfloat16)
    mask = torch.arange(n, device=device) % 3 > 0
    tokens = Tokens.of(mask, mask.device)
    student = divergence_spec.Head(hidden, weight, None, 1.0, 0.0)
    teacher = student if form == "head" else divergence_spec.Head(given, None, None, 1.0, 0.0)
    spec = divergence_spec.DivergenceSpec(0.0, False, DivergencePlan(budget, True, True, "one_pass"))
    rows = divergence_rows.DivergenceRows(student, teacher, tokens, spec)
    rows.keep_stats()
    assert rows.stats is not None
    rows.stats.zero_()
    known = {
        t.untyped_storage()._cdata for t in (hidden, weight, gradient, given, *tokens, rows.stats) if t is not None
    }
    with PeakMemory(known) as memory:
        rows.write_weight_gradient(gradient, v // 2, 1.0, torch.ones((), device=device))
    assert budget // 2 < memory.peak <= budget + 16 * 1024  # and numbers of each token
    assert not gradient[v // 2 :].any() and gradient[: v // 2].any(dim=1).all()


def test_backward_leaves_the_hidden_states_alone() -> None:
    """Writing to them, even the same values, would break the backward pass of other operations that saved them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (20, 30))
    x = hidden * 1.0
    saved = x.square().sum()
    teacher = TeacherTopK(torch.arange(4, device=device).expand(20, 4), torch.full((20, 4), -2.0, device=device))
    for given in (teacher, torch.randn(20, 30, device=device), TeacherHead(hidden, weight)):
        linear_divergence(x, weight, given).backward(retain_graph=True)
    saved.backward()


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "dtype", "options", "summed", "way"),
    [
        (8192, 151936, torch.bfloat16, {}, True, "one_pass"),
        (8192, 151936, torch.bfloat16, {}, False, "keep"),
        (16384, 151936, torch.bfloat16, {}, False, "blocks"),
        (8192, 100000, torch.bfloat16, {}, False, "keep"),
        (8192, 100000, torch.bfloat16, {}, True, "one_pass"),
        (8192, 49152, torch.bfloat16, {}, True, "keep"),
        (400, 151936, torch.bfloat16, {}, True, "keep"),
        (8192, 65536, torch.float32, {"implementation": "triton"}, True, "one_pass"),
        (8192, 151936, torch.bfloat16, {"memory_budget": "256MiB"}, True, "one_pass"),
        (8192, 32768, torch.bfloat16, {"memory_budget": "256MiB"}, True, "one_pass"),
        (8192, 151936, torch.bfloat16, {"memory_budget": "1GiB"}, False, "blocks"),
        (8192, 151936, torch.bfloat16, {"memory_budget": "4GiB"}, False, "keep"),
        (8192, 151936, torch.float32, {}, True, "keep"),
        (8192, 151936, torch.float32, {"memory_budget": "1GiB"}, True, "one_pass"),
        (8192, 151936, torch.float32, {"memory_budget": "1GiB"}, False, "blocks"),
        (8192, 151936, torch.float16, {"implementation": "portable"}, True, "one_pass"),
        (8192, 151936, torch.float16, {"implementation": "portable"}, False, "keep"),
    ],
)
def test_the_way_of_a_divergence_on_a_gpu(
    tokens: int, vocab_size: int, dtype: torch.dtype, options: dict[str, Any], summed: bool, way: str
) -> None:
    problem = dispatch.Problem(tokens, 896, vocab_size, dtype, torch.device("cuda"))
    spec = LossSpec.of(CCEConfig(**options), tokens, (True, True, False))
    budget, kernels, _, found = dispatch.dispatch_divergence(problem, spec, True, "head", summed)
    assert found == way and kernels == (options.get("implementation") != "portable") and budget > 0


@pytest.mark.parametrize(("vocab_size", "block", "part"), [(151936, 512, 256), (49152, 768, 1 << 30)])
def test_a_small_budget_has_room_for_parts_of_the_teachers_logits(
    vocab_size: int, block: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []
    monkeypatch.setattr(divergence_rows, "token_blocks", lambda *given: blocks.append(given[4]) or (None,) * 4)
    hidden, weight = (torch.empty(n, 896, dtype=torch.bfloat16, device="meta") for n in (8192, vocab_size))
    plan = DivergencePlan(256 * MIB, triton=True, multiplies=True, way="one_pass")
    head, spec = divergence_spec.Head(hidden, weight, None, 1.0, 0.0), divergence_spec.DivergenceSpec(0.0, False, plan)
    of_rows = divergence_rows.DivergenceRows(head, head, Tokens(), spec)
    of_rows.one_pass((True, True, False))
    assert (*blocks, of_rows.part_tokens) == (block, part)
    assert 2 * vocab_size * (block + min(block, part)) + 4 * hidden.numel() <= plan.memory_budget


def test_more_logits_are_kept_if_the_teacher_has_as_many() -> None:
    """That is fastest, and full logits take several times as much."""
    for tokens, needs, way in ((8192, True, "keep"), (16384, True, "one_pass"), (8192, False, "blocks")):
        problem = dispatch.Problem(tokens, 896, 151936, torch.bfloat16, torch.device("cuda"))
        spec = LossSpec.of(CCEConfig(), tokens, (needs, needs, False))
        assert dispatch.dispatch_divergence(problem, spec, True, "logits", summed=True).way == way


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_logits_in_16_bits_are_kept_where_float32_products_of_them_do_not_exist(device: str) -> None:
    problem = dispatch.Problem(8192, 896, 151936, torch.float16, torch.device(device))
    spec = LossSpec.of(CCEConfig(), 8192, (True, True, False))
    found = dispatch.dispatch_divergence(problem, spec, True, "head", summed=True)
    assert found[1:] == (False, False, "keep")
