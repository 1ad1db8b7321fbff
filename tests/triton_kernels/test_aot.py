"""Every kernel compiles for every architecture that we name, and needs no more registers or memory there than it did."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import aot
import pytest

pytest.importorskip("triton")


def test_every_kernel_has_a_spec_and_every_spec_a_kernel() -> None:
    kernels, specs = aot.jitted_kernels(), {spec.kernel for spec in aot.SPECS}
    assert kernels - specs == set(), (
        "kernels without a spec in tests/support/aot_specs.py, so nobody compiles them for other GPUs"
    )
    assert specs - kernels == set(), "specs in tests/support/aot_specs.py without a kernel"
    assert len({(spec.kernel, spec.plan) for spec in aot.SPECS}) == len(aot.SPECS)


def test_the_budget_names_every_architecture() -> None:
    assert aot.read_budget().keys() == {"triton", *(f"sm_{arch}" for arch in aot.SHARED_LIMIT)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.skipif(aot.cuobjdump() is None, reason="neither Triton nor the machine has cuobjdump")
@pytest.mark.parametrize("arch", aot.SHARED_LIMIT)
def test_kernels_compile_within_the_budget(arch: int) -> None:
    """One process an architecture, so that pytest-xdist can run them side by side; Triton's own cache serves later runs."""
    budget = aot.read_budget()
    wrong = aot.complaints(
        arch, aot.measure_elsewhere(arch), budget[f"sm_{arch}"], budget["triton"] == version("triton")
    )
    assert not wrong, "\n".join(wrong)


LOOPS = """
import re
from tests.support import aot
for build in aot.builds(90):
    if build.spec.name == "_hopper_tiles_kernel" and build.label.endswith(("stats", "ratio", "store", "gradient")):
        text = aot.compiled(build, 90).asm["ttgir"]
        carried = re.findall(r"scf.for .*? -> \\((.*?)\\) +:", re.sub("tensor<.*?>", "tensor", text))
        print(sorted(found.count(",") + 1 for found in carried))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_loops_carry_what_is_loaded_ahead() -> None:
    """Triton 3.6 took a tile's depth for dead, so that all tiles got the first one's, and programs waited forever: see hopper.py.

    Of each of the three roles the loop over tiles carries stage, phase and depth; the loops within, stage and phase, and with
    accumulators also those and the stage before.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LOOPS], cwd=aot.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    found = done.stdout.split("\n")[:-1]
    assert len(found) == 4, done.stderr
    assert set(found) == {"[2, 3, 3, 3, 4, 4]"}


FITS = {"registers": 100, "stack": 0, "shared": 1024}


@pytest.mark.parametrize(
    ("found", "budget", "expected"),
    [
        ({"a": FITS}, {"a": FITS}, None),
        ({"a": {**FITS, "registers": 100 + aot.REGISTER_SLACK}}, {"a": FITS}, None),
        ({"a": {**FITS, "registers": 101 + aot.REGISTER_SLACK}}, {"a": FITS}, "sm_86 a: registers 109, allowed 108"),
        ({"a": {**FITS, "stack": 8}}, {"a": FITS}, "sm_86 a: stack 8, allowed 0"),
        ({"a": {**FITS, "shared": 1040}}, {"a": FITS}, "sm_86 a: shared 1,040, allowed 1,024"),
        ({"a": {**FITS, "shared": 99 * 1024 + 1}}, {"a": {**FITS, "shared": 1 << 20}}, "the GPU has 101,376"),
        ({"a": {**FITS, "tensor_memory": 513}}, {"a": {**FITS, "tensor_memory": 513}}, "513 columns of tensor memory"),
        ({"a": FITS}, {}, "sm_86 a: not in the budget"),
        ({}, {"a": FITS}, "sm_86 a: in the budget, but there is no such kernel"),
        ({"a": {"failed": "ValueError: no"}}, {"a": FITS}, "sm_86 a: does not compile: ValueError: no"),
    ],
)
def test_what_is_complained_about(found: dict[str, Any], budget: dict[str, Any], expected: str | None) -> None:
    wrong = aot.complaints(86, found, budget)
    assert len(wrong) == (expected is not None)
    assert expected is None or expected in wrong[0]


def test_another_compiler_is_held_to_the_limits_of_the_hardware_alone() -> None:
    more = {**FITS, "registers": 255, "stack": 64}
    assert not aot.complaints(86, {"a": more}, {"a": FITS}, same_compiler=False)
    assert aot.complaints(86, {"a": {**more, "shared": 1 << 20}}, {"a": FITS}, same_compiler=False)


def test_the_plans_are_those_of_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hopper, ampere = (aot.plan_constants("forward", arch, torch.bfloat16, 4096) for arch in (90, 80))
    assert hopper["TMA"] and not ampere["TMA"]
    tiles, products = (
        aot.plan_constants(f"{which} gradient", 90, torch.bfloat16, 4096) for which in ("hidden", "weight")
    )
    assert tiles["BLOCK_N"] == products["BLOCK_N"] == 128 and tiles["BLOCK_D"] < products["BLOCK_D"] == 256


def test_literals_are_read_from_the_launches() -> None:
    assert aot.launch_literals("_validate_labels_kernel") == {"BLOCK": 4096, "num_warps": 8}
