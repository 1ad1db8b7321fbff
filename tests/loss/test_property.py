"""A sample of the random cases of tests/support/property.py, which describes how to run thousands of them on a GPU."""

import pytest
import torch
from property import check, make_case


@pytest.mark.parametrize("seed", range(60))
def test_random_case_on_the_fallback(seed: int) -> None:
    check(make_case(seed, large=False), "cpu", "portable")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs them on the GPU")
@pytest.mark.parametrize("seed", range(60, 80))
def test_random_case_on_the_kernels(seed: int) -> None:
    pytest.importorskip("triton")
    check(make_case(seed, large=False), "cpu", "triton")
