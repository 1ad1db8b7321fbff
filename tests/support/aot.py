"""Compiles every Triton kernel ahead of time, for every architecture and without a GPU, and counts what it needs.

    python -m tests.support.aot              # compile, compare with tests/support/aot_budget.json, print what each kernel needs
    python -m tests.support.aot --write      # the same, and make what was found the budget
    python -m tests.support.aot --arch 90    # one architecture

What there is to compile stands in aot_specs.py; a new kernel needs an entry there.
``test_aot.py`` runs ``--json`` in a process of its own for each architecture: the tests' own process interprets kernels.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.aot_specs import SPECS, TYPES, Spec

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "hf_cce" / "kernels"
BUDGET = Path(__file__).with_name("aot_budget.json")
KIB = 1 << 10
# Shared memory that one block can have, in bytes, by architecture (CUDA programming guide, technical specifications).
SHARED_LIMIT = {
    75: 64 * KIB,
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    120: 99 * KIB,
}
TENSOR_MEMORY_LIMIT = 512  # columns, Blackwell's
REGISTER_SLACK = 8  # the unit in which registers are allocated to a thread
HIDDEN_SIZES = (
    1024,
    2880,
    4096,
)  # plans depend on it, and on whether it is a multiple of 256; equal plans are compiled once


def jitted_kernels() -> set[str]:
    """``module.function`` of every ``@triton.jit`` function of hf_cce/kernels that is launched: its name ends in _kernel."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            jitted = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list)
            if jitted and node.name.endswith("_kernel"):
                found.add(f"{module}.{node.name}")
    return found


def launch_literals(name: str) -> dict[str, Any]:
    """The keyword arguments that are literals where the kernel ``name`` is launched, such as BLOCK and num_warps.

    Read from the source, so that a spec cannot fall behind it.
    """
    found: dict[str, Any] = {}
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if launch and ast.unparse(node.func.value).rpartition(".")[2] == name:
                for keyword in node.keywords:
                    if keyword.arg and isinstance(keyword.value, ast.Constant):
                        found.setdefault(keyword.arg, keyword.value.value)
    return found


def _plan(kind: str, arch: int, dtype: Any, hidden_size: int) -> Any:
    """What hf_cce.kernels.launch_config picks on that architecture for aligned tensors; ``kind``: forward, backward or filter."""
    import torch

    from hf_cce.kernels import launch_config

    tensor = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), dtype=dtype, shape=(8192, hidden_size), stride=lambda _: hidden_size,
        element_size=lambda: dtype.itemsize, data_ptr=lambda: 0,
    )  # fmt: skip
    properties = SimpleNamespace(multi_processor_count=132)  # enters no kernel, only how many programs are launched
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        return (
            launch_config.filter_plan(tensor, tensor)
            if kind == "filter"
            else launch_config.make_plan(tensor, tensor, kind == "backward")
        )


def _sparse(plan: Any, block_d: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    """The constants of a product with kept tiles: see hf_cce.kernels.filter.sparse."""
    own = {"BLOCK_K": plan.sparse_block_k, "BLOCK_D": block_d, "num_warps": num_warps, "num_stages": num_stages}
    return {**plan.constants(), **own, "IN_PARTS": plan.in_parts}


def _blocks(plan: Any) -> dict[str, Any]:
    return {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}


# What kernels are launched with: a kind of plan, and its part in their constants.
PLANS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "forward": ("forward", lambda plan: plan.constants()),
    "backward": ("backward", lambda plan: plan.constants()),
    "backward blocks": ("backward", _blocks),
    "filter forward": ("filter", lambda plan: plan.constants()),
    "filter blocks": ("filter", _blocks),
    "kept tiles": (
        "filter",
        lambda plan: {**plan.constants(), "FLATTEN": plan.flatten, "num_warps": plan.tile_warps},
    ),
    "hidden gradient": ("filter", lambda p: _sparse(p, p.block_d, p.sparse_warps, p.hidden_stages)),
    "labels": ("forward", lambda plan: plan.label_constants()),
    "own blocks": ("forward", lambda plan: {}),  # the dtype alone
    "weight gradient": ("filter", lambda p: _sparse(p, p.weight_block_d, p.weight_warps, p.weight_stages)),
}


def plan_constants(key: str, arch: int, dtype: Any, hidden_size: int) -> dict[str, Any]:
    """The constants of the plan ``key`` of PLANS, or of hf_cce.kernels.hopper, for one problem."""
    if key.startswith("hopper"):
        return import_module("hf_cce.kernels.hopper").constants()
    kind, part = PLANS[key]
    return part(_plan(kind, arch, dtype, hidden_size))


@dataclass(frozen=True)
class Build:
    """One compilation; ``label`` is its name in the budget."""

    label: str
    spec: Spec
    dtype: Any
    constants: dict[str, Any]  # constexprs that are not flags, num_warps, num_stages
    flags: dict[str, Any]
    odd: bool  # sizes of type "size" are no multiples of 16


def builds(arch: int) -> Iterator[Build]:
    """Everything to compile for an architecture. Sparing, since each takes seconds."""
    import torch

    for spec in SPECS:
        if spec.archs and arch not in spec.archs:
            continue
        fn = _function(spec)
        literals = {**launch_literals(spec.name), **spec.constants}
        dtypes = [*([torch.bfloat16] if arch >= 80 else []), torch.float16, *([] if _gluon(fn) else [torch.float32])]
        multiplies = spec.plan is not None and not spec.plan.endswith("blocks")
        for dtype in dtypes if multiplies else dtypes[:1]:
            plans: dict[str, dict[str, Any]] = {"": {}}
            if spec.plan:
                picked = [plan_constants(spec.plan, arch, dtype, size) for size in HIDDEN_SIZES]
                plans = {_describe(dtype, constants): constants for constants in picked}
            for shape, constants in plans.items():
                known = {**constants, **literals}
                flags = [p.name for p in fn.params if p.is_constexpr and p.name not in known]
                both = {"plain": dict.fromkeys(flags, False), "everything": dict.fromkeys(flags, True)}
                variants = spec.variants or (both if flags else {"plain": {}})
                for name, on in variants.items():
                    # The smaller variants of one dtype are enough to see what the largest, the last, adds.
                    if dtype != dtypes[0] and name != [*variants][-1]:
                        continue
                    label = " ".join(filter(None, (spec.kernel, shape, name)))
                    odd = name.endswith(("everything", "odd"))
                    yield Build(label, spec, dtype, known, {**dict.fromkeys(flags, False), **on}, odd)


def _function(spec: Spec) -> Any:
    module, _, name = spec.kernel.rpartition(".")
    return getattr(import_module(f"hf_cce.kernels.{module}"), name)


def _describe(dtype: Any, c: dict[str, Any]) -> str:
    blocks = "x".join(str(value) for name, value in c.items() if name.startswith("BLOCK_"))
    dtype_name = str(dtype).removeprefix("torch.")
    launch = f" w{c['num_warps']} s{c['num_stages']}" if "num_warps" in c else ""
    return f"{dtype_name} {blocks}{launch}".rstrip() + (" tma" if c.get("TMA") else "")


def signature(build: Build) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """What Triton's ``ASTSource`` wants: types by name ("constexpr" for constants), constants by name, alignments."""
    types, constexprs, attributes = {}, {}, {}
    values = {**build.constants, **build.flags}
    for index, parameter in enumerate(_function(build.spec).params):
        name = parameter.name
        if parameter.is_constexpr:
            if name not in values:
                raise ValueError(
                    f"{build.spec.kernel}: no value for the constexpr {name}; give it in the spec's constants"
                )
            types[name], constexprs[name] = "constexpr", values[name]
            continue
        kind = build.spec.types.get(name) or TYPES.get(name)
        if kind is None:
            raise ValueError(
                f"{build.spec.kernel}: no type for the argument {name}; give it in tests/support/aot_specs.py"
            )
        kind, _, condition = kind.partition(" if ")
        if condition and not all(values[flag] for flag in condition.split(" and ")):
            types[name], constexprs[name] = "constexpr", None
            continue
        if kind.startswith("tile "):
            kind, _, flag = kind.removeprefix("tile ").partition(" unless ")
            described = values.get("TMA", True) and not (flag and values[flag])
            block = [values[size] for size in kind.split()]
            kind = _descriptor(build.dtype, block, _gluon(_function(build.spec))) if described else "*T"
        if kind == "size":
            kind = "i32" if build.odd else "i32:16"
        aligned = kind.startswith("*") or kind.endswith(":16")
        if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
        types[name] = kind.removesuffix(":16").replace("*T", "*" + _short(build.dtype))
    return types, constexprs, attributes


def _short(dtype: Any) -> str:
    from triton._utils import canonicalize_dtype

    return canonicalize_dtype(str(dtype).removeprefix("torch."))


def _gluon(fn: Any) -> bool:
    return getattr(fn, "is_gluon", lambda: False)()


def _descriptor(dtype: Any, block: list[int], gluon: bool) -> str:
    """The type of a host-made TMA descriptor, spelled as this version of Triton spells it."""
    import torch
    from triton.runtime.jit import mangle_type
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor = torch.empty(block, dtype=dtype)  # of real memory, since the constructor looks at its alignment
    if gluon:
        return mangle_type(import_module("hf_cce.kernels.hopper").blocks(tensor, *block))
    return mangle_type(TensorDescriptor.from_tensor(tensor, block))


def cuobjdump() -> str | None:
    """The tool that reads binaries: Triton brings one, the CUDA toolkit too."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump")


def compiled(build: Build, arch: int) -> Any:
    """What Triton makes of it."""
    import triton  # not at the top: this module is imported where kernels are interpreted, and where there is no Triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constexprs, attributes = signature(build)
    if _gluon(_function(build.spec)):
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(fn=_function(build.spec), signature=types, constexprs=constexprs, attrs=attributes)
    options = {name: build.constants[name] for name in ("num_warps", "num_stages") if name in build.constants}
    options |= import_module("hf_cce.kernels.launch_config").FP_FUSION
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_build(build: Build, arch: int) -> dict[str, int]:
    """Registers and stack bytes a thread, shared memory in bytes and tensor memory in columns a block."""
    built = compiled(build, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = subprocess.run([cuobjdump(), "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    # What does not fit in registers is spilled to the stack, in local memory. LOCAL is another part of it, and empty.
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    found = {"registers": numbers["REG"], "stack": numbers["STACK"] + numbers["LOCAL"], "shared": built.metadata.shared}
    tensor_memory = getattr(built.metadata, "tmem_size", None)
    return {**found, "tensor_memory": tensor_memory} if tensor_memory else found


def measure(arch: int) -> dict[str, dict[str, Any]]:
    """What every build of an architecture needs, by its label; ``{"failed": why}`` for one that does not compile."""
    found: dict[str, dict[str, Any]] = {}
    for build in builds(arch):
        try:
            found[build.label] = compile_build(build, arch)
        except Exception as error:  # Triton raises all kinds, and the other kernels are of interest too
            found[build.label] = {"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}
    return found


def measure_elsewhere(arch: int) -> dict[str, dict[str, Any]]:
    """The same in a process of its own, in which kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.aot", "--arch", str(arch), "--json"], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def complaints(
    arch: int, found: dict[str, dict[str, Any]], budget: dict[str, dict[str, int]], same_compiler: bool = True
) -> list[str]:
    """What is wrong with what was ``found``: one sentence each.

    Another version of Triton brings another ptxas and other numbers; then only the limits of the hardware count.
    """
    rewrite = "if that is meant, run python -m tests.support.aot --write"
    wrong = [
        f"sm_{arch} {label}: in the budget, but there is no such kernel; {rewrite}" for label in budget.keys() - found
    ]
    for label, needs in found.items():
        where = f"sm_{arch} {label}"
        if "failed" in needs:
            wrong.append(f"{where}: does not compile: {needs['failed']}")
            continue
        if needs["shared"] > SHARED_LIMIT[arch]:
            wrong.append(f"{where}: {needs['shared']:,} bytes of shared memory, the GPU has {SHARED_LIMIT[arch]:,}")
        if needs.get("tensor_memory", 0) > TENSOR_MEMORY_LIMIT:
            wrong.append(f"{where}: {needs['tensor_memory']} columns of tensor memory, of {TENSOR_MEMORY_LIMIT}")
        if label not in budget:
            wrong.append(f"{where}: not in the budget; {rewrite}")
            continue
        for what, count in needs.items() if same_compiler else ():
            allowed = budget[label].get(what, 0) + (REGISTER_SLACK if what == "registers" else 0)
            if count > allowed:
                wrong.append(f"{where}: {what} {count:,}, allowed {allowed:,}; {rewrite}")
    return sorted(wrong)


def read_budget() -> dict[str, Any]:
    """``{"triton": version, "sm_90": {label: {"registers": …, "stack": …, "shared": …}}, …}``."""
    return json.loads(BUDGET.read_text("utf-8")) if BUDGET.exists() else {}


def write_budget(budget: dict[str, Any]) -> None:
    """One line a kernel, so that a diff shows what became of each."""
    lines = [f' "triton": {json.dumps(budget["triton"])}']
    for name in (f"sm_{arch}" for arch in SHARED_LIMIT if f"sm_{arch}" in budget):
        rows = [f"  {json.dumps(label)}: {json.dumps(needs)}" for label, needs in sorted(budget[name].items())]
        lines.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, nargs="*", default=[*SHARED_LIMIT])
    parser.add_argument("--json", action="store_true", help="compile here, one architecture, and print JSON")
    parser.add_argument("--write", action="store_true", help="make what is found the budget")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args.arch[0])))
        return 0
    budget, wrong = read_budget(), []
    same = budget.get("triton") == version("triton")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch, found in zip(args.arch, pool.map(measure_elsewhere, args.arch), strict=True):
            for label, needs in found.items():
                print(
                    f"sm_{arch} {label}: " + ", ".join(f"{what} {count}" for what, count in needs.items()), flush=True
                )
            if args.write:
                budget[f"sm_{arch}"] = {label: needs for label, needs in found.items() if "failed" not in needs}
                same = True
            wrong += complaints(arch, found, budget.get(f"sm_{arch}", {}), same)
    if args.write:
        write_budget({**budget, "triton": version("triton")})
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
