"""``hf-cce doctor``: that it passes what is well, sees what is not, and names a command for it, torch or no torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_cce.cli.app import app
from hf_cce.diagnostics import doctor, gradcheck

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def process(before: str = "", *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python of its own, which runs ``before`` first."""
    code = f"import sys\n{before}\nfrom hf_cce.cli.app import main\nsys.argv = ['hf-cce', 'doctor', *{arguments!r}]\nmain()"
    paths = filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **environment, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )


@pytest.fixture
def without_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL takes seconds to load, and is asked once below."""
    monkeypatch.setattr(doctor, "OPTIONAL", {})


@pytest.mark.usefixtures("without_optional")
def test_a_good_machine_passes_and_says_what_runs() -> None:
    found = command("--json", "-")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["ok"] and {check["status"] for check in report["checks"]} <= {"ok", "note"}
    names = [check["name"] for check in report["checks"]]
    assert {"python", *doctor.REQUIRED, "triton", "self-test cpu", "transformers model"} <= set(names)
    on_cpu = [choice for choice in report["implementations"] if choice["device"] == "cpu"]
    assert [choice["dtype"] for choice in on_cpu] == list(doctor.DTYPES)
    assert all(choice["implementation"] == "portable" and "NVIDIA" in choice["why"] for choice in on_cpu)


@pytest.mark.usefixtures("without_optional")
def test_a_loss_that_is_wrong_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradcheck.linear_cross_entropy

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        loss = right(*args, **options)
        return loss.detach() + 1.01 * (loss - loss.detach())  # the value is right, the gradients are 1 % too large

    monkeypatch.setattr(gradcheck, "linear_cross_entropy", wrong)
    found = command()
    assert found.exit_code == 1
    assert "self-test cpu" in found.stdout and "less exact than allowed" in found.stdout and "∂" in found.stdout
    assert "hf-cce gradcheck --device cpu" in found.stdout and "1 thing wrong" in found.stdout
    quiet = command("--quiet")
    assert quiet.exit_code == 1 and not quiet.stdout and "hf-cce gradcheck --device cpu" in quiet.stderr


def test_a_kernel_that_cannot_be_compiled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> torch.Tensor:
        raise SyntaxError("the compiler gave up\nat line 3")

    monkeypatch.setattr(gradcheck, "linear_cross_entropy", broken)
    choices, check = doctor.self_test(CPU)
    assert not choices and check.status == doctor.WRONG and check.found == "SyntaxError: the compiler gave up"


def test_a_model_whose_loss_is_not_fused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_cce

    assert doctor._model().status == doctor.OK
    monkeypatch.setattr(hf_cce, "apply_cce", lambda model: setattr(model, "cce_stats", lambda: {"fused": 0.0}))
    check = doctor._model()
    assert check.status == doctor.WRONG and "(0 fused)" in check.found and check.fix


def test_without_torch_and_transformers_it_says_how_to_get_them() -> None:
    done = process("sys.modules.update(torch=None, transformers=None)")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert 'pip install "torch>=2.8"' in done.stdout and 'pip install "transformers>=5.0"' in done.stdout
    assert re.search(r"torch +wrong +not installed", done.stdout) and "2 things wrong" in done.stdout
    assert "\x1b" not in done.stdout  # no colour, as this is no terminal


def test_a_torch_that_cannot_be_loaded_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = process("", "--json", "-", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "torch"]
    assert "cannot be loaded: OSError: libcudart.so.12" in check["found"] and "--force-reinstall" in check["fix"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
def test_a_gpu_that_torch_cannot_see_is_wrong(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Tesla T4, 550.54'\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = process("sys.modules.update(trl=None)", "--quiet", PATH=path)
    assert done.returncode == 1 and not done.stdout
    assert "Tesla T4, 550.54" in done.stderr and "built without CUDA" in done.stderr
    assert f"pip install --force-reinstall torch --index-url {doctor.CUDA_WHEELS}" in done.stderr


def test_triton_is_wanted_only_where_a_gpu_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "versions", lambda *names: dict.fromkeys(names))
    assert doctor.triton(False).status == doctor.OK
    assert doctor.triton(True).status == doctor.WRONG and "triton" in (doctor.triton(True).fix or "")
    monkeypatch.setattr(doctor.machine, "versions", lambda *names: dict.fromkeys(names, "3.1.0"))
    assert doctor.triton(True).status == doctor.WRONG and "3.1.0" in doctor.triton(True).found


def test_the_minimum_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for name, least in {**doctor.REQUIRED, **doctor.OPTIONAL, "triton": doctor.TRITON}.items():
        assert re.search(rf'"{name}>={re.escape(least)}[";]', text), name
    assert re.search(r'requires-python = ">=3.10"', text) and doctor.PYTHON == (3, 10)


def test_trl_is_asked_whether_its_fused_head_reaches_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused LM head")
    check = doctor._optional("trl", {"torch", "transformers"})
    assert check.status == doctor.OK and "computes by hf_cce" in check.found

    class Other:
        """The function of a TRL whose arguments are not those known."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, more: Any) -> None: ...

        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> Any:
            log_probs = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets[:, None]).squeeze(-1)
            return log_probs, None, None, None, None

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    check = doctor._optional("trl", {"torch", "transformers"})
    assert check.status == doctor.NOTE and "not by hf_cce (hf_cce: apply_cce has no effect" in check.found and check.fix


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_run_and_are_tested() -> None:
    choices, check = doctor.self_test(torch.device("cuda", 0))
    assert check.status == doctor.OK, check
    assert {(choice.dtype, choice.implementation) for choice in choices} == {
        ("bfloat16", "triton"),
        ("float32", "portable"),  # cuBLAS multiplies
    }


@pytest.mark.parametrize(
    ("version", "end"),
    [
        ("3.6.0", "with Hopper's own kernels"),
        ("3.9.1", "with Hopper's own kernels"),
        ("3.7.0", "triton 3.6.x and 3.9.x only"),
        ("3.6.0+git1", "triton 3.6.x and 3.9.x only"),
    ],
)
def test_which_tiles_a_hopper_gpu_gets(version: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    assert doctor.hopper_tiles("9.0", "bfloat16").endswith(end)
    assert not doctor.hopper_tiles("8.9", "bfloat16") and not doctor.hopper_tiles("9.0", "float32")
