"""Every notebook runs from top to bottom offline, and its stored outputs match such a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, load_module

from hf_cce import dispatch
from hf_cce.diagnostics import notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 150_000
NEEDS = {"sft_lora": ("datasets", "peft", "trl")}

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (pip install 'hf-cce[dev]')")
pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'hf-cce[dev]')")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'hf-cce[dev]')")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'hf-cce[bench]')")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[str]:
    """Return the outputs of a cell: "stdout", "stderr", or the richest MIME type of an image or value."""
    found = []
    for output in cell.outputs:
        kind = output.name if output.output_type == "stream" else sorted(output.get("data", {"error": ""}))[0]
        if not (found and found[-1] == kind == "stdout"):  # prints may arrive in one piece or in several
            found.append(kind)
    return found


def test_notebooks_are_listed() -> None:
    assert {"quickstart", "sft_lora", "pretraining", "log_probs", "kernel"} <= {path.stem for path in NOTEBOOKS}
    index = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    assert all(f"]({path.name})" in index for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_and_small(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run: make notebooks"
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        assert not {"stderr", "error"} & set(kinds(cell)), cell.source
        assert str(ROOT) not in str(cell.outputs) and "/root/" not in str(cell.outputs)
    assert "**Not tried on a T4.**" in notebook.cells[0].source and "OWNER" not in path.read_text("utf-8")
    first, last = cells[0], cells[-1]
    assert "here = begin(" in first.source and "implementation  PyTorch fallback" in str(first.outputs)
    assert last.source.rstrip().splitlines()[-1].startswith("show(") and "time of a step" in str(last.outputs)


def test_t4_uses_float16_and_fallback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the decisions only: the device is fake and nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    for capability, dtype, runs in (
        ((7, 5), torch.float16, "PyTorch fallback"),
        ((8, 9), torch.bfloat16, "Triton kernels"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        dispatch._capability.cache_clear()
        here = notebook.begin()
        printed = capsys.readouterr().out
        assert here.dtype is dtype and here.device.type == "cuda"
        assert f"implementation  {runs}" in printed and str(dtype).removeprefix("torch.") in printed
        assert (notebook.UNTRIED in printed) is (capability == (7, 5))
    dispatch._capability.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_reproduces_stored_outputs(path: Path) -> None:
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    # Raises if a cell fails; the notebooks contain assertions.
    fresh = load_module(ROOT / "notebooks" / "execute.py").execute(path)
    stored = nbformat.read(path, as_version=4)
    for ran, kept in zip(code_cells(fresh), code_cells(stored), strict=True):
        assert ran.source == kept.source
        assert kinds(ran) == kinds(kept), ran.source
