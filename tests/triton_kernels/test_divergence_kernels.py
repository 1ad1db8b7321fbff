"""The divergences' kernels: on a GPU for real, elsewhere in Triton's interpreter with tiles small enough to cross borders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from divergences import EVERYTHING, KINDS, Case, check

from hf_cce import CCEConfig, divergence_passes

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TRITON = CCEConfig(implementation="triton")
# The interpreter truncates where a GPU rounds to bfloat16, so bfloat16 gradients are checked on GPUs only.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch implementation must not answer in their place."""
    monkeypatch.setattr(divergence_passes, "_logits_parts", None)
    monkeypatch.setattr(divergence_passes, "_mixture_sums", None)
    monkeypatch.setattr(divergence_passes, "_slab_gradient", None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["head", "logits"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case, form: str, dtype: torch.dtype) -> None:
    check(replace(case, form=form), dtype, TRITON, DEVICE)
    check(replace(case, form=form, **EVERYTHING), dtype, TRITON, DEVICE)


@pytest.mark.parametrize("vocab_sizes", [(131, 144), (160, 131)])
@pytest.mark.parametrize("form", ["head", "logits"])
def test_vocabularies_that_differ_in_padding(form: str, vocab_sizes: tuple[int, int]) -> None:
    check(Case("jsd", form=form, vocab_sizes=vocab_sizes, bias=True, reduction="none"), torch.float32, TRITON, DEVICE)


@pytest.mark.parametrize("form", ["lump", "renormalize"])
def test_top_k(form: str) -> None:
    check(Case("jsd", form=form, masked=True), torch.float32, TRITON, DEVICE)


@pytest.mark.parametrize("form", ["head", "logits"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_many_slabs(case: Case, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(student: Any, spec: Any, per_column: int, beside: int = 0) -> list[slice]:
        v = student.weight.shape[0]
        return [slice(start, min(v, start + 128)) for start in range(0, v, 128)]

    monkeypatch.setattr(divergence_passes, "slabs_of", narrow)
    check(replace(case, form=form, masked=True), torch.float32, TRITON, DEVICE)
