"""``hf-cce doctor``: passes a good installation, finds problems and names a command that fixes them, with or without torch."""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest
import torch
from command import ROOT, environment, hf_cce, run
from test_gradcheck import tampered

from hf_cce import CCEConfig
from hf_cce.diagnostics import check, doctor, gradcheck, machine

CPU = torch.device("cpu")
command = partial(hf_cce, "doctor")


def process(before: str, *arguments: str, folders: tuple[Path, ...] = (), **more: str) -> CompletedProcess[str]:
    """Run the command in a new Python process that executes ``before`` first, with ``folders`` on its import path."""
    code = f"import sys\n{before}\nfrom hf_cce.cli.app import main\nsys.exit(main(['doctor', *{arguments!r}]))"
    given = {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0", **more}
    return run([sys.executable, "-c", code], environment(*folders, ROOT, **given))


@pytest.fixture(autouse=True)
def portable_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip Triton's interpreter: it is slow, and nobody trains with it."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(gradcheck, "CONFIGS", {"portable": CCEConfig("portable")})


def test_good_installation_passes() -> None:
    found = command("--json", "-")
    assert found.exit_code == 0, found
    report = json.loads(found.stdout)
    assert report["ok"] and {check["status"] for check in report["checks"]} <= {"ok", "note"}
    names = [check["name"] for check in report["checks"]]
    assert {"python", *doctor.REQUIRED, "triton", "self-test cpu", "transformers model"} <= set(names)
    on_cpu = [choice for choice in report["implementations"] if choice["device"] == "cpu"]
    assert [choice["dtype"] for choice in on_cpu] == ["float32", "bfloat16"]
    assert all(choice["implementation"] == "portable" and "PyTorch" in choice["why"] for choice in on_cpu)


def test_wrong_gradients_fail_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck, "linear_cross_entropy", tampered(1.01))
    found = command()
    assert found.exit_code == 1
    assert "self-test cpu" in found.stdout and "less accurate than allowed" in found.stdout and "∂" in found.stdout
    problems = 1 + torch.cuda.device_count()  # the CPU and each GPU
    assert "hf-cce gradcheck --device cpu" in found.stdout and f"{problems} problem" in found.stdout


def test_kernel_compile_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=SyntaxError("the compiler gave up\nat line 3"))
    monkeypatch.setattr(gradcheck, "linear_cross_entropy", broken)
    choices, check = doctor.self_test(CPU)
    assert not choices and check.status == doctor.WRONG and check.found == "SyntaxError: the compiler gave up"


def test_unfused_model_loss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._model().status == doctor.OK
    right = check.check
    monkeypatch.setattr(check, "check", lambda model: right(model) | {"saves": False})
    found = doctor._model()
    assert found.status == doctor.WRONG and "saves no memory" in found.found and found.fix


def test_missing_torch_and_transformers() -> None:
    done = process("sys.modules.update(torch=None, transformers=None)")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert 'pip install "torch>=2.8"' in done.stdout and 'pip install "transformers>=5.0"' in done.stdout
    assert re.search(r"torch +wrong +not installed", done.stdout) and "2 problems found" in done.stdout
    assert "\x1b" not in done.stdout  # no color without a terminal


def test_torch_that_fails_to_load(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = process("", "--json", "-", folders=(tmp_path,))
    assert done.returncode == 1, done.stderr
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "torch"]
    assert "cannot be loaded: OSError: libcudart.so.12" in check["found"] and "--force-reinstall" in check["fix"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
def test_gpu_invisible_to_torch(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Tesla T4, 550.54'\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = process("sys.modules.update(trl=None)", PATH=path)
    assert done.returncode == 1 and not done.stderr
    assert "Tesla T4, 550.54" in done.stdout and "built without CUDA" in done.stdout
    assert f"pip install --force-reinstall torch --index-url {doctor.CUDA_WHEELS}" in done.stdout


def test_triton_is_required_only_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "versions", lambda *names: dict.fromkeys(names))
    assert doctor.triton(False).status == doctor.OK
    assert doctor.triton(True).status == doctor.WRONG and "triton" in (doctor.triton(True).fix or "")
    monkeypatch.setattr(doctor.machine, "versions", lambda *names: dict.fromkeys(names, "3.1.0"))
    assert doctor.triton(True).status == doctor.WRONG and "3.1.0" in doctor.triton(True).found


def test_minimum_versions_match_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    optional = {name: least for name, (least, _) in doctor.OPTIONAL.items()}
    for name, least in {**doctor.REQUIRED, **optional, "triton": doctor.TRITON}.items():
        assert re.search(rf'"{name}>={re.escape(least)}[";]', text), name


@pytest.mark.gpu
def test_self_test_runs_kernels_on_gpu() -> None:
    choices, check = doctor.self_test(torch.device("cuda", 0))
    assert check.status == doctor.OK, check
    found = {choice["dtype"]: choice["implementation"] for choice in choices}
    assert found == {"bfloat16": "triton", "float32": "portable"}  # cuBLAS runs the products


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1", "3.7.0", "3.6.0+git1"])
def test_hopper_kernels_by_triton_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from hf_cce.kernels import launch_config

    monkeypatch.setattr(triton, "__version__", version)
    for capability in ((9, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        found = doctor.hopper_kernels(torch.device("cuda", 0))
        expected = capability == (9, 0) and launch_config.is_hopper_validated()
        assert found.startswith("specialized") is expected and bool(found) is (capability == (9, 0))


def test_older_gpu_is_noted_and_uses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 as torch describes it; nothing runs on the device."""
    device = torch.device("cuda", 0)
    facts = {"name": "Tesla T4", "memory_gib": 14.6, "capability": "7.5", "cuda": "12.6"}
    monkeypatch.setattr(doctor.machine, "gpu_facts", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert machine.half_dtype(device) is torch.float16 and machine.half_dtype(CPU) is torch.bfloat16
    check = doctor._gpu(device)
    assert check.status == doctor.NOTE
    assert "7.5, CUDA 12.6: the PyTorch fallback runs, in float32 or float16" in check.found
