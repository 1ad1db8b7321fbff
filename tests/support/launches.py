"""Every kernel launch of training steps, as a GPU of any architecture would receive it, without a GPU.

Tensors are on the device "meta" and Triton is told the architecture. It specializes each launch as usual, so kernels and
argument types need not be listed. Use only in a process of its own, without TRITON_INTERPRET.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hf_cce import divergence_rows, divergence_spec, strategies
from hf_cce.config import MIB
from hf_cce.filter_state import FilterState
from hf_cce.kernels import launch_config
from hf_cce.kernels.divergence_topk import row_top_k_divergences
from hf_cce.kernels.launcher import OPTIONS, Kernel
from hf_cce.spec import DivergencePlan, Divisor, Inputs, LossSpec, Tokens, WantedStats
from hf_cce.strategies import Exact, Filtered, FilteredStatistics, OneBlock, Statistics, Strategy

Step = Callable[[], None]
Launch = Callable[[Any, dict[str, Any], Callable[[], Any]], None]


def replace_driver(arch: int) -> None:
    """Replace Triton's GPU driver."""
    target = GPUTarget("cuda", arch, 32)
    questions = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(SimpleNamespace(**{name: lambda *_, of=answer: of for name, answer in questions.items()}))


def pretend(arch: int, launch: Launch) -> None:
    """Pretend to be a GPU of this architecture that computes nothing, for the rest of the process.

    ``launch(function, arguments, compile)`` replaces each launch; ``compile()`` returns Triton's compiled kernel.
    """
    replace_driver(arch)
    torch.cuda.get_device_capability = lambda *_: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=140 << 30)
    launch_config.is_hopper_validated = lambda: True
    divergence_rows.tokens_per_block = lambda n, *_: n  # the blocks of a CPU do not start at aligned addresses
    divergence_rows.MIN_TOKENS = 10**9  # compute some logits again

    def find(self: Kernel, grid: Any, args: Any, constants: dict[str, Any]) -> Any:
        function = self.function
        given = {p.name: x for p, x in zip(function.params, args, strict=False)} | constants | OPTIONS
        compile = partial(function.warmup, *args, grid=grid, **constants, **OPTIONS)
        return lambda *_: launch(function, given, compile), ()

    Kernel._find = find  # type: ignore[method-assign]


PLAIN = LossSpec(-100, 1.0, 0.0, needs=(True, True, False))
SCALED = PLAIN._replace(logit_scale=0.7)
EVERYTHING = SCALED._replace(softcap=5.0, z_loss=0.1)


def steps(spec: LossSpec, dtype: torch.dtype, d: int, v: int, n: int = 8000) -> dict[str, Step]:
    """Return a step of each strategy by name; with a softcap, also with a bias where that is allowed."""
    hidden, weight, bias = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((n, d), (v, d), (v,)))
    labels, tau = torch.empty(n, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    x, few = Inputs(hidden, weight, None, labels), Inputs(hidden[: n - 7400], weight, None, labels[: n - 7400])
    with_bias, biased, items = x, spec, Divisor()
    if spec.softcap:
        with_bias, biased = x._replace(bias=bias), spec._replace(needs=(True,) * 3)
        items = Divisor(labels.new_empty(()))
    frozen = spec._replace(needs=(True, False, False))

    def exact(spec: LossSpec, mib: int = 256) -> Strategy:
        return Exact(spec._replace(memory_budget=mib * MIB), items, True)

    def filtered(spec: LossSpec) -> Strategy:
        return Filtered(spec, items, FilterState(), tau, True, exact(spec))

    every = WantedStats(True, True, True, True)
    statistics = Statistics(spec, WantedStats(entropy=True, top1=True), True)
    cases: dict[str, tuple[Strategy, Inputs]] = {
        "cached": (exact(biased), with_bias),
        "grouped": (exact(frozen, 640), x),
        "grouped, trained": (exact(spec, 1280), x._replace(weight=weight.new_empty((v + 80_000, d)))),
        "whole cache": (exact(spec, 16 << 10), x),
        "recomputed": (exact(biased._replace(label_smoothing=0.1)), with_bias),
        "full logits": (OneBlock(biased, items, True), few._replace(bias=with_bias.bias)),
        "full logits of few tokens": (
            OneBlock(biased, items, True),
            with_bias._replace(hidden=hidden[:200], labels=labels[:200]),
        ),
        "statistics": (Statistics(biased, every, True), with_bias),
    }
    if dtype == torch.bfloat16:  # GPUs filter no other
        cases |= {
            "filtered": (filtered(spec._replace(gradient_filter="auto")), x),
            "filtered, frozen": (filtered(frozen), x),
            "filtered statistics": (FilteredStatistics(FilterState(), tau, statistics), x),
        }
    found = {name: partial(strategies.run_on_meta, *of) for name, of in cases.items()}
    student = divergence_spec.Head(hidden, weight, with_bias.bias, spec.logit_scale, spec.softcap)
    given = divergence_spec.Head(torch.empty(n, v, dtype=dtype, device="meta"), None, None, 1.0, 0.0)
    for name, beta in (("forward KL", 0.0), ("reverse KL", 1.0), ("JSD", 0.5)):
        found[name] = partial(divergence_step, student, student, beta)
    for form in ("p", "log p"):
        found[f"given {form}"] = partial(divergence_step, student, given._replace(form=form), 0.0)
    return found | {"given logits": partial(divergence_step, student, given, 1.0)}


def divergence_step(student: divergence_spec.Head, teacher: divergence_spec.Head, beta: float) -> None:
    n, needs = student.hidden.shape[0], (True, True, student.bias is not None)
    plan = DivergencePlan(256 * MIB, True, student.hidden.element_size() == 2, "one_pass")
    spec = divergence_spec.DivergenceSpec(beta, beta == 1.0, plan)
    of_rows = divergence_rows.DivergenceRows(student, teacher, Tokens(), spec)
    of_rows.divergences(1.0)
    for divergence_rows.PART_TOKENS in (256, 10**9):  # the teacher's logits in parts, and all at once
        of_rows.part_tokens = 10**9
        sums = of_rows.one_pass(needs)[2]
        of_rows.gradients_of_sums(sums, torch.empty((), device="meta"), needs)
    ids = torch.empty(n, 32, dtype=torch.int64, device="meta")
    for lump in (True, False) if teacher.weight is None else ():
        top_k = (ids, ids.float(), lump)
        row_top_k_divergences(teacher.hidden, top_k, student, beta, torch.empty(n, device="meta"), 1.0)
