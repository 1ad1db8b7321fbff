"""Launches find the same kernel as Triton would, and a first step compiles the kernels of all steps."""

from pathlib import Path

import pytest
import triton

from tests.support.command import python

SAME_AS_TRITON = """
import itertools
import torch
from triton.tools.tensor_descriptor import TensorDescriptor
from hf_cce.kernels import launcher
from tests.support.launches import replace_driver
from tests.triton_kernels.test_launcher import do_nothing

replace_driver(90)
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

FIRST_STEPS = """
import torch, triton
from hf_cce import FilterState, linear_cross_entropy

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device="cuda"))])
compiled = []
triton.knobs.compilation.listener = lambda **about: compiled.append(about["src"].name)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(49_152, 512, device="cuda", dtype=torch.bfloat16) * 0.1)
labels = torch.randint(2_000, (8_193,), device="cuda")[1:]  # not aligned, like those of one sequence in Transformers' loss
hidden = (weight[labels] * SIZE + torch.randn(8_192, 512, device="cuda").bfloat16()).detach().requires_grad_()
state = FilterState()
for step in range(12):
    linear_cross_entropy(hidden, weight, labels.clone() if step % 2 else labels, filter_state=state).backward()
    if step == 0:
        first = len(compiled)
print("first", first, "later", compiled[first:], state.stats())
"""


@triton.jit
def do_nothing(x):
    pass


def test_launch_keys_differ_where_triton_compiles_two_kernels(tmp_path: Path) -> None:
    print(python(SAME_AS_TRITON, interpreted=False, TRITON_CACHE_DIR=str(tmp_path)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "other_kernels"), [("0.0", False), ("60.0", True)], ids=["the filter pauses", "it drops most"]
)
def test_the_first_step_compiles_what_later_steps_need(size: str, other_kernels: bool, tmp_path: Path) -> None:
    if other_kernels:  # an empty cache tells that kernels are missing before one is compiled
        (tmp_path / "other").mkdir()
    printed = python(FIRST_STEPS.replace("SIZE", size), interpreted=False, TRITON_CACHE_DIR=str(tmp_path))
    assert "later []" in printed, printed
