"""What a process's first step waits for begins when a model is patched, where kernels will run and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from models import tiny_llama
from transformers import LlamaForCausalLM

from hf_cce import apply_cce, early, remove_cce


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of threads that would have been started, on a machine with a GPU."""
    started: list[str] = []
    early._reading.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(early.Thread, "start", lambda self: started.append(self.name))
    monkeypatch.setattr(early.Thread, "join", lambda self: started.append("joined"))
    yield started
    early._reading.cache_clear()


def test_once_a_process(begun: list[str]) -> None:
    for _ in range(2):
        apply_cce(tiny_llama())
    assert begun == ["hf_cce: Triton's files"]
    early.finish()
    assert begun[1:] == ["joined"]


def test_without_room_for_a_thread(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(early.Thread, "start", refuse)
    early.begin()
    early.finish()
    assert not begun


def test_for_a_class_too(begun: list[str]) -> None:
    try:
        apply_cce(LlamaForCausalLM)
    finally:
        remove_cce(LlamaForCausalLM)
    assert len(begun) == 1


@pytest.mark.parametrize("without", ["device", "cuda", "kernels", "interpreted", "a newer GPU"])
def test_not_where_no_kernel_will_run(without: str, begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "device":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    elif without == "cuda":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif without == "a newer GPU":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    elif without == "interpreted":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    apply_cce(tiny_llama(), implementation="portable" if without == "kernels" else "auto")
    early.finish()
    assert not begun


def test_what_is_read_is_what_triton_asks_for() -> None:
    """In a process of its own, whose Triton has not read anything yet."""
    pytest.importorskip("triton")
    program = (
        "from hf_cce import early\n"
        "early._reading(); early.finish()\n"
        "from triton.runtime.cache import triton_key\n"
        "print(triton_key.cache_info().currsize, early._reading().is_alive())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "False"]
