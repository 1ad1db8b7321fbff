"""Compile every Triton kernel ahead of time for every architecture, without a GPU, and report its resource usage.

    python -m tests.support.aot              # compile, compare with tests/support/aot_budget.json, print each kernel's usage
    python -m tests.support.aot --write      # the same, and write the result as the new budget
    python -m tests.support.aot --arch 90    # one architecture

The compiled kernels are those that the steps of launches.py launch. Each architecture runs in a process of its own, because the
tests' process interprets kernels.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.command import ROOT, python

KERNELS = ROOT / "hf_cce" / "kernels"
BUDGET = Path(__file__).with_name("aot_budget.json")
KIB = 1 << 10
# Shared memory per block in bytes, by architecture (CUDA programming guide, technical specifications).
SHARED_LIMIT = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
TENSOR_MEMORY_LIMIT = 512  # columns, on Blackwell
REGISTER_SLACK = 8  # allocation granularity of registers per thread
HIDDEN_SIZES = (1024, 2880, 4096)  # plans depend on the hidden size and on whether it is a multiple of 256
# Steps of launches.py to compile in addition to all steps with every option: each kernel takes seconds.
PLAIN_STEPS = ("cached", "grouped", "grouped, trained", "whole cache", "filtered", "filtered, frozen")
OTHER_DTYPES = ("cached", "grouped", "statistics", "reverse KL")


def jitted_kernels() -> set[str]:
    """Return ``module.function`` of every launched ``@triton.jit`` function in hf_cce/kernels: its name ends in _kernel."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            jitted = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list)
            if jitted and node.name.endswith("_kernel"):
                found.add(f"{module}.{node.name}")
    return found


def budget_label(function: Any, arguments: dict[str, Any], dtype: Any) -> str:
    """Return a compilation's name in the budget: what differs between launches of a kernel, except number alignment.

    Arguments that are None come last, with a minus sign.
    """
    constants = {p.name: arguments.get(p.name, p.default) for p in function.params if p.is_constexpr}
    blocks = [str(value) for name, value in constants.items() if name.startswith("BLOCK_")]
    launch = [
        f"{short}{arguments[name]}" for name, short in (("num_warps", "w"), ("num_stages", "s")) if name in arguments
    ]
    others = {name: value for name, value in constants.items() if name not in ("GROUP_M", "PRECISION")}
    flags = [
        name if value is True else f"{name}={value}"
        for name, value in others.items()
        if value is not None and value is not False and not name.startswith("BLOCK_")
    ]
    flags += [f"-{p.name}" for p in function.params if not p.is_constexpr and arguments.get(p.name) is None]
    dtype_part = [str(dtype).removeprefix("torch.")] if has_matmul(function) else []
    return " ".join(filter(None, [kernel_name(function), *dtype_part, "x".join(blocks), *launch, *flags]))


def kernel_name(function: Any) -> str:
    return f"{function.fn.__module__.removeprefix('hf_cce.kernels.')}.{function.fn.__name__}"


def has_matmul(function: Any) -> bool:
    """Return True if a kernel has a matrix product, so that its tiles and resource usage depend on the dtype."""
    return any(p.name in ("PRECISION", "STAT_N") for p in function.params)


def compile_all(arch: int, done: Callable[[str, Callable[[], Any]], None]) -> None:
    """Call ``done(label, compile)`` once for each compilation of an architecture."""
    import torch  # imported here: tests import this module without Triton

    from tests.support import launches

    seen: set[str] = set()
    first: dict[Any, Any] = {}  # the dtype of each kernel's first launch
    dtypes = [*([torch.bfloat16] if arch >= 80 else []), torch.float16, torch.float32]
    dtype = dtypes[0]

    def launch(function: Any, arguments: dict[str, Any], compile: Callable[[], Any]) -> None:
        label = budget_label(function, arguments, dtype)
        if label not in seen and (has_matmul(function) or first.setdefault(function.fn, dtype) == dtype):
            seen.add(label)
            done(label, compile)

    launches.pretend(arch, launch)
    for d in HIDDEN_SIZES:
        plain = launches.steps(launches.PLAIN, dtype, d, 49_152)
        for name in filter(plain.__contains__, PLAIN_STEPS):
            plain[name]()
        if arch == 90:  # the kernels of hopper.py have a scale, but no softcap
            scaled = launches.steps(launches.SCALED, dtype, d, 50_257)
            for name in ("cached", "filtered"):
                scaled[name]()
    for dtype in dtypes:
        for d in HIDDEN_SIZES:
            every = launches.steps(launches.EVERYTHING, dtype, d, 50_257)
            for name in every if dtype == dtypes[0] else OTHER_DTYPES:
                every[name]()


def cuobjdump() -> str | None:
    """Return the path of the tool that reads binaries, from Triton or from the CUDA toolkit."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump")


def resource_usage(built: Any) -> dict[str, int]:
    """Return a kernel's registers and stack bytes per thread, and shared memory bytes and tensor memory columns per block."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = subprocess.run([cuobjdump(), "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    # Registers are spilled to the stack, in local memory. LOCAL is another part of local memory and is empty.
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    found = {"registers": numbers["REG"], "stack": numbers["STACK"] + numbers["LOCAL"], "shared": built.metadata.shared}
    tensor_memory = getattr(built.metadata, "tmem_size", None)
    return {**found, "tensor_memory": tensor_memory} if tensor_memory else found


def measure(arch: int) -> dict[str, dict[str, Any]]:
    """Return the resource usage of every compilation of an architecture by label, or ``{"failed": why}``."""
    found: dict[str, dict[str, Any]] = {}

    def done(label: str, compile: Callable[[], Any]) -> None:
        try:
            found[label] = resource_usage(compile())
        except Exception as error:  # Triton raises many types; go on with the other kernels
            found[label] = {"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}

    compile_all(arch, done)
    return found


def measure_in_subprocess(arch: int) -> dict[str, dict[str, Any]]:
    """Run ``measure`` in a new process, where kernels are compiled instead of interpreted."""
    code = f"import json; from tests.support import aot; print(json.dumps(aot.measure({arch})))"
    return json.loads(python(code, interpreted=False).splitlines()[-1])


def violations(
    arch: int, found: dict[str, dict[str, Any]], budget: dict[str, dict[str, int]], same_compiler: bool = True
) -> list[str]:
    """Return one sentence for each problem in ``found``.

    Another Triton version has another ptxas and other numbers. Then only the hardware limits are checked.
    """
    rewrite = "if that is meant, run python -m tests.support.aot --write"
    wrong = []
    if same_compiler:
        wrong += [f"sm_{arch} {label}: in the budget, but not launched; {rewrite}" for label in budget.keys() - found]
    for label, needs in found.items():
        where = f"sm_{arch} {label}"
        if "failed" in needs:
            wrong.append(f"{where}: does not compile: {needs['failed']}")
            continue
        if needs["shared"] > SHARED_LIMIT[arch]:
            wrong.append(f"{where}: {needs['shared']:,} bytes of shared memory, the GPU has {SHARED_LIMIT[arch]:,}")
        if needs.get("tensor_memory", 0) > TENSOR_MEMORY_LIMIT:
            wrong.append(f"{where}: {needs['tensor_memory']} columns of tensor memory, of {TENSOR_MEMORY_LIMIT}")
        if not same_compiler:
            continue
        if label not in budget:
            wrong.append(f"{where}: not in the budget; {rewrite}")
            continue
        for what, count in needs.items():
            allowed = budget[label].get(what, 0) + (REGISTER_SLACK if what == "registers" else 0)
            if count > allowed:
                wrong.append(f"{where}: {what} {count:,}, allowed {allowed:,}; {rewrite}")
    return sorted(wrong)


def read_budget() -> dict[str, Any]:
    """Return ``{"triton": version, "sm_90": {label: {"registers": …, "stack": …, "shared": …}}, …}``."""
    return json.loads(BUDGET.read_text("utf-8")) if BUDGET.exists() else {}


def write_budget(budget: dict[str, Any]) -> None:
    """Write one line per kernel, so that diffs show each kernel's change."""
    lines = [f' "triton": {json.dumps(budget["triton"])}']
    for name in (f"sm_{arch}" for arch in SHARED_LIMIT if f"sm_{arch}" in budget):
        rows = [f"  {json.dumps(label)}: {json.dumps(needs)}" for label, needs in sorted(budget[name].items())]
        lines.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, nargs="*", default=[*SHARED_LIMIT])
    parser.add_argument("--write", action="store_true", help="make what is found the budget")
    args = parser.parse_args()
    budget, wrong = read_budget(), []
    same = budget.get("triton") == version("triton")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch, found in zip(args.arch, pool.map(measure_in_subprocess, args.arch), strict=True):
            for label, needs in found.items():
                print(
                    f"sm_{arch} {label}: " + ", ".join(f"{what} {count}" for what, count in needs.items()), flush=True
                )
            if args.write:
                budget[f"sm_{arch}"] = {label: needs for label, needs in found.items() if "failed" not in needs}
                same = True
            wrong += violations(arch, found, budget.get(f"sm_{arch}", {}), same)
    if args.write:
        write_budget({**budget, "triton": version("triton")})
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
