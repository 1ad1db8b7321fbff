"""Every kernel compiles for every supported architecture, stays within its resource budget, and is compiled only once."""

import sys
from importlib.metadata import version
from typing import Any

import aot
import pytest
from command import python

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.skipif(aot.cuobjdump() is None, reason="neither Triton nor the machine has cuobjdump")
@pytest.mark.parametrize("arch", aot.SHARED_LIMIT)
def test_kernels_compile_within_the_budget(arch: int) -> None:
    """One process per architecture, so that pytest-xdist can run them in parallel; later runs use Triton's cache."""
    budget = aot.read_budget()
    wrong = aot.violations(
        arch, aot.measure_in_subprocess(arch), budget[f"sm_{arch}"], budget["triton"] == version("triton")
    )
    assert not wrong, "\n".join(wrong)


LOOPS = """
import re
from tests.support import aot

def done(label, compile):
    if label.startswith("hopper."):
        text = compile().asm["ttgir"]
        carried = re.findall(r"scf.for .*? -> \\((.*?)\\) +:", re.sub("tensor<.*?>", "tensor", text))
        print(sorted(found.count(",") + 1 for found in carried))

aot.compile_all(90, done)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_tile_loops_carry_stage_phase_and_depth() -> None:
    """Triton 3.6 treated a tile's depth as dead, so all tiles got the first tile's and programs waited forever; see hopper.py.

    In each of the three roles, the loop over tiles carries stage, phase and depth. Inner loops carry stage and phase, and loops
    with accumulators also those and the previous stage.
    """
    found = python(LOOPS, interpreted=False).splitlines()
    assert len(found) >= 4 and set(found) == {"[2, 3, 3, 3, 4, 4]"}


LAUNCHES = """
from triton import knobs
from tests.support import aot, launches

found = set()
knobs.runtime.jit_cache_hook = lambda **of: found.add((of["fn"].name, of["compile"]["key"])) or True  # compiles nothing

def launch(function, arguments, compile):
    # the default is another in Triton 3.10
    assert arguments["enable_fp_fusion"] is True, function.fn.__name__
    print(aot.kernel_name(function))
    compile()

launches.pretend(90, launch)
import torch
for v in (49_152, 50_257):
    for n in (8000, 8001, 8002, 7999, 7995):
        steps = launches.steps(launches.PLAIN, torch.bfloat16, 1024, v, n)
        # The Hopper kernel has no softcap
        steps["JSD, softcap"] = launches.steps(launches.EVERYTHING, torch.bfloat16, 1024, v, n)["JSD"]
        for name, step in steps.items():
            before = set(found)
            step()
            assert found and (n == 8000 or found == before), (name, v, n, {kernel for kernel, _ in found - before})
"""


def test_every_kernel_is_launched_and_serves_any_number_of_tokens() -> None:
    """Other batch lengths reuse compiled kernels: Triton specializes numbers by their alignment."""
    if not hasattr(pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper"), "warpgroup_mma"):
        pytest.skip("this Triton cannot translate the kernel for Hopper")
    assert aot.jitted_kernels() == set(python(LAUNCHES, interpreted=False).split())


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
        ({}, {"a": FITS}, "sm_86 a: in the budget, but not launched"),
        ({"a": {"failed": "ValueError: no"}}, {"a": FITS}, "sm_86 a: does not compile: ValueError: no"),
    ],
)
def test_violations(found: dict[str, Any], budget: dict[str, Any], expected: str | None) -> None:
    wrong = aot.violations(86, found, budget)
    assert len(wrong) == (expected is not None)
    assert expected is None or expected in wrong[0]


def test_other_compilers_are_checked_against_hardware_limits_only() -> None:
    more = {**FITS, "registers": 255, "stack": 64}
    assert not aot.violations(86, {"a": more}, {"b": FITS}, same_compiler=False)
    assert aot.violations(86, {"a": {**more, "shared": 1 << 20}}, {"a": FITS}, same_compiler=False)
