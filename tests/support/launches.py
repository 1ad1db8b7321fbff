"""Every kernel launch of training steps, as a GPU of any architecture would get it, without a GPU.

The tensors are on the device "meta", and Triton is told of the architecture: it specializes each launch as it always does, so
nobody lists kernels or the types of their arguments. Only in a process of its own and without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from hf_cce import divergence_passes as passes
from hf_cce import kernels, strategies
from hf_cce.filter_state import FilterState
from hf_cce.kernels import launch_config
from hf_cce.spec import Divisor, Inputs, LossSpec, Wanted
from hf_cce.strategies import SUM, Exact, Filtered, FilteredStatistics, Materialized, Statistics, Strategy

Step = Callable[[], None]
Launch = Callable[[Any, dict[str, Any], Callable[[], Any]], None]


class Driver:
    """In place of Triton's driver for a GPU."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(arch: int, launch: Launch) -> None:
    """Be a GPU of this architecture from now on, which computes nothing.

    ``launch(function, arguments, compile)`` takes the place of each launch; ``compile()`` returns Triton's compiled kernel.
    """
    driver.set_active(Driver(arch))
    torch.cuda.get_device_capability = lambda *_: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=140 << 30)
    launch_config.hopper_is_proven = lambda: True
    strategies.validate_labels = _validate_labels
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_cce.kernels") and hasattr(module, "multiply_add"):
            module.multiply_add = lambda *_, **__: None  # type: ignore[attr-defined]

    def getitem(function: Any, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> None:
            given = {p.name: x for p, x in zip(function.params, args, strict=False)} | options
            launch(function, given, lambda: function.run(*args, grid=grid, warmup=True, **options))

        return run

    KernelInterface.__getitem__ = getitem  # type: ignore[method-assign]


def _validate_labels(labels: torch.Tensor, spec: LossSpec, v: int, divisor: Divisor, triton: bool) -> torch.Tensor:
    """As that of hf_cce.strategies, which reads whether they are valid."""
    return kernels.validate_labels(labels, spec.ignore_index, v, divisor)[1]


MIB = 1 << 20
PLAIN = LossSpec(-100, 1.0, 0.0, needs=(True, True, False))
SCALED = replace(PLAIN, logit_scale=0.7)
EVERYTHING = replace(SCALED, softcap=5.0, z_loss=0.1)


def steps(spec: LossSpec, dtype: torch.dtype, d: int, v: int, n: int = 8000) -> dict[str, Step]:
    """A step of each strategy, by name; with a softcap also a bias, where that is allowed."""
    hidden, weight, bias = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((n, d), (v, d), (v,)))
    labels, tau = torch.empty(n, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    x, few = Inputs(hidden, weight, None, labels), Inputs(hidden[: n - 7400], weight, None, labels[: n - 7400])
    with_bias, biased, items = x, spec, Divisor()
    if spec.softcap:
        with_bias, biased, items = (
            x._replace(bias=bias),
            replace(spec, needs=(True,) * 3),
            Divisor(labels.new_empty(())),
        )
    frozen = replace(spec, needs=(True, False, False))

    def exact(spec: LossSpec, mib: int = 256) -> Strategy:
        return Exact(replace(spec, memory_budget=mib * MIB), items, True)

    def filtered(spec: LossSpec) -> Strategy:
        return Filtered(spec, items, FilterState(), tau, True, exact(spec))

    every = Wanted(True, True, True, True)
    statistics = Statistics(spec, Wanted(entropy=True, top1=True), True)
    taken: dict[str, tuple[Strategy, Inputs]] = {
        "cached": (exact(biased), with_bias),
        "grouped": (exact(frozen, 640), x),
        "whole": (exact(frozen, 1280), x),
        "recomputed": (exact(replace(biased, label_smoothing=0.1)), with_bias),
        "full logits": (Materialized(biased, items, torch.float32), few._replace(bias=with_bias.bias)),
        "narrow full logits": (Materialized(spec, items, dtype), few),
        "filtered": (filtered(spec), x),
        "filtered, frozen": (filtered(frozen), x),
        "statistics": (Statistics(biased, every, True), with_bias),
        "filtered statistics": (FilteredStatistics(spec, SUM, FilterState(), tau, True, statistics), x),
    }
    found = {name: partial(step, *of) for name, of in taken.items()}
    student = passes.Head(hidden, weight, with_bias.bias, spec.logit_scale, spec.softcap)
    given = passes.Head(torch.empty(n, v, dtype=dtype, device="meta"), None, None, 1.0, 0.0)
    for name, beta in (("forward KL", 0.0), ("reverse KL", 1.0), ("JSD", 0.5)):
        found[name] = partial(divergence_step, student, student, beta)
    return found | {"given logits": partial(divergence_step, student, given, 1.0)}


def step(strategy: Strategy, x: Inputs) -> None:
    """Forward and backward."""
    needs = strategy.spec.needs
    outputs, saved = strategy.forward(x)
    # The gradient of the entropy is not filtered.
    upstream = [
        None if isinstance(strategy, Filtered) and i > 1 else torch.empty_like(y) for i, y in enumerate(outputs)
    ]
    if strategy.backward(x, saved, upstream, needs) is None:
        grads = strategy.token_grads(saved, upstream, True)
        strategies.recompute(x, strategy.spec, saved.in_token_order(), saved.entropy, grads, True)


def divergence_step(student: passes.Head, teacher: passes.Head, beta: float) -> None:
    n = student.hidden.shape[0]
    tokens = passes.Tokens(None, torch.empty((), dtype=torch.int64, device="meta"))
    spec = passes.DivergenceSpec(beta, beta == 1.0, 256 * MIB, True)
    stats = passes.row_stats(student, teacher, tokens, spec)
    wanted = passes.Wanted((True, True, student.bias is not None), student.weight.shape[0])
    rows = (stats.lse, stats.teacher_lse, stats.offset)
    passes.gradients(student, teacher, tokens, rows, torch.empty(n, device="meta"), spec, wanted)
