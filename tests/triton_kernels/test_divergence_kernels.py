"""The divergences' kernels: on a GPU for real, elsewhere in Triton's interpreter with tiles small enough to cross borders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from divergences import EVERYTHING, KINDS, Case, check, narrow_slabs
from ways import DEVICE

from hf_cce import CCEConfig, divergence_passes

pytest.importorskip("triton")
TRITON = CCEConfig(implementation="triton")
# The interpreter truncates where a GPU rounds to bfloat16, so bfloat16 gradients are checked on GPUs only.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


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
    cut = narrow_slabs(monkeypatch, 128)
    check(replace(case, form=form, masked=True), torch.float32, TRITON, DEVICE)
    assert cut
