"""Launches find the same kernel as Triton would, and a first step compiles the kernels of all steps."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton

from tests.support.command import python

SAME_AS_TRITON = """
import itertools
import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor
from hf_cce.kernels import launcher
from tests.support.launches import Driver
from tests.triton_kernels.test_launcher import do_nothing

driver.set_active(Driver(90))
numbers = (1, 0, 3, 16, 2**31, 2**31 + 16, 1.0, None)
single, half = torch.empty(64, device="meta"), torch.empty(64, dtype=torch.float16, device="meta")
matrix = torch.empty(64, 64, device="meta")
blocks = [TensorDescriptor.from_tensor(matrix, [rows, 32]) for rows in (16, 32)]
args = (*numbers, single, half, *blocks, TensorDescriptor.from_tensor(matrix.half(), [16, 32]))
kernel_of, key_of = {}, {}
for i, arg in enumerate(args):
    kernel_of[i] = id(do_nothing.warmup(arg, grid=(1,)))
    key_of[i] = launcher._specialization(arg)
for i, k in itertools.combinations(range(len(args)), 2):
    if kernel_of[i] != kernel_of[k]:
        assert key_of[i] != key_of[k], (args[i], args[k], key_of[i])
print("kernels", len(set(kernel_of.values())), "keys", len(set(key_of.values())))
"""

COMPILES = """
import torch
from triton.runtime import driver
from hf_cce.kernels.filter.select import _count_kernel
from tests.support.launches import Driver

driver.set_active(Driver(90))
energy, counts = torch.empty(64, device="meta"), torch.empty(512, dtype=torch.int32, device="meta")

def compile():
    compiled = _count_kernel.function.warmup(energy, counts, 64, BLOCK=2048, num_warps=4, grid=(1,))
    print(compiled.hash, len(compiled.asm["cubin"]))
"""

# Fails on a disk that is not writable, continues once there is room, and leaves the disk read-only.
FAULTS = """
import os, subprocess

def remount(options):
    subprocess.run(["mount", "-o", "remount," + options, os.environ["TRITON_CACHE_DIR"]], check=True)

try:
    compile()
except OSError as error:
    print(error.strerror)
remount("rw,size=64m")
compile()
remount("ro")
"""

FIRST_STEPS = """
import torch, triton
from hf_cce import FilterState, linear_cross_entropy

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device="cuda"))])
compiled = []
triton.knobs.compilation.listener = lambda **about: compiled.append(about["src"].name)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(49_152, 512, device="cuda", dtype=torch.bfloat16) * 0.1)
labels = torch.randint(2_000, (8_192,), device="cuda")
hidden = (weight[labels] * SIZE + torch.randn(8_192, 512, device="cuda").bfloat16()).detach().requires_grad_()
state = FilterState()
for step in range(12):
    linear_cross_entropy(hidden, weight, labels, filter_state=state).backward()
    if step == 0:
        first = len(compiled)
print("first", first, "later", compiled[first:], state.stats())
"""


@triton.jit
def do_nothing(x):
    pass


def test_launch_keys_differ_where_triton_compiles_two_kernels(tmp_path: Path) -> None:
    print(python(SAME_AS_TRITON, interpreted=False, TRITON_CACHE_DIR=str(tmp_path)))


def compile_in_a_process(cache: Path, code: str = "compile()") -> str:
    return python(COMPILES + code, interpreted=False, TRITON_CACHE_DIR=str(cache))


@pytest.mark.slow
def test_eight_processes_fill_one_cache(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        printed = list(threads.map(compile_in_a_process, [tmp_path] * 8))
    assert len(set(printed)) == 1 and int(printed[0].split()[1]) > 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert written and compile_in_a_process(tmp_path) == printed[0]
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
@pytest.mark.parametrize(
    ("options", "error"), [("ro", "Read-only file system"), ("size=16k", "No space left on device")], ids=["ro", "full"]
)
def test_a_cache_on_a_read_only_or_full_disk(options: str, error: str, tmp_path: Path) -> None:
    """The error names the cause. The same process then continues, and the next one reads the cache it left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=False).returncode:
        pytest.skip("mount is not allowed")
    try:
        message, compiled = compile_in_a_process(disk, FAULTS).splitlines(keepends=True)
        assert message.strip() == error
        assert compile_in_a_process(disk) == compiled == compile_in_a_process(tmp_path / "other")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["0.0", "60.0"], ids=["the filter pauses", "it drops most"])
def test_the_first_step_compiles_what_later_steps_need(size: str, tmp_path: Path) -> None:
    printed = python(FIRST_STEPS.replace("SIZE", size), interpreted=False, TRITON_CACHE_DIR=str(tmp_path))
    assert "later []" in printed, printed
