"""``hf-cce doctor``: check what is installed, what runs on each device, and whether its results are correct.

A machine without torch or Transformers is diagnosed too, and a failing check does not stop the others.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from typing import Any, NamedTuple

from hf_cce.diagnostics import machine
from hf_cce.diagnostics.machine import EXPECT, Progress, dtype_name, first_line

if machine.TORCH_ERROR is None:
    import torch

OK, NOTE, WRONG = "ok", "note", "wrong"
# Same as in pyproject.toml; a test compares them.
REQUIRED = {"torch": "2.8", "transformers": "5.0", "accelerate": "1.1", "numpy": "1.24", "tokenizers": "0.21"}
OPTIONAL = {"peft": ("0.18", "adapters"), "trl": ("1.16", "TRL's trainers")}
TRITON = "3.4"
CUDA_WHEELS = "https://download.pytorch.org/whl/cu126"


class Check(NamedTuple):
    """One line: what was checked, what was found, and the command that fixes it."""

    name: str
    status: str  # OK, NOTE (nothing is broken) or WRONG
    found: str
    fix: str | None = None


def diagnose(progress: Progress = lambda what: None) -> dict[str, Any]:
    """Run every check; return a JSON-ready report, whose "implementations" say what runs by device and dtype."""
    checks = [Check("python", OK, f"{platform.python_version()} ({platform.system()}, {platform.machine()})")]
    choices: list[dict[str, str]] = []
    progress("packages")
    checks += [package(name, least, imported=name in ("torch", "transformers")) for name, least in REQUIRED.items()]
    good = {check.name for check in checks if check.status == OK}
    if "torch" in good:
        progress("devices")
        devices, found = _devices()
        checks += [*found, triton(any(_runs_kernels(device) for device in devices))]
        for device in devices:
            progress(f"self-test on {device}")
            here, check = self_test(device)
            choices += here
            checks.append(check)
        if "transformers" in good:
            progress("a small Transformers model")
            checks.append(_model())
    elif gpus := machine.driver_gpus():
        checks.append(Check("gpu", OK, f"{', '.join(gpus)}; not tested, because torch is missing"))
    for name, (least, purpose) in OPTIONAL.items():
        check = package(name, least)
        if check.status == WRONG:
            check = check._replace(status=NOTE, found=f"{check.found} (only needed for {purpose})")
        checks.append(check)
    ok = all(check.status != WRONG for check in checks)
    return {"ok": ok, "checks": [check._asdict() for check in checks], "implementations": choices}


def older(version: str, least: str) -> bool:
    """Return whether ``version``, such as "2.8.0+cu126", is below ``least``, such as "2.8"."""
    first, second = ([int(x) for x in re.findall(r"\d+", each)[:2]] for each in (version, least))
    return first < second


def _install(requirement: str, *options: str) -> str:
    return " ".join(["pip install", *options, f'"{requirement}"'])


def package(name: str, least: str, *, imported: bool = False) -> Check:
    """Check that ``name`` is installed, new enough and, if ``imported``, can be imported."""
    version, build = machine.versions(name)[name], ""
    command = _install(f"{name}>={least}")
    if imported:
        try:
            if name == "torch" and machine.TORCH_ERROR:
                raise machine.TORCH_ERROR  # a second import may fail in another way
            module = importlib.import_module(name)
            version = str(getattr(module, "__version__", version))
            if name == "torch":
                build = f", built for CUDA {module.version.cuda}" if module.version.cuda else ", built without CUDA"
                build = f", built for ROCm {module.version.hip}" if module.version.hip else build
        except Exception as error:  # a missing library is an OSError; a mixed installation can raise anything
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                what = f"{version} cannot be loaded: {type(error).__name__}: {first_line(error)}"
                return Check(name, WRONG, what, _install(f"{name}>={least}", "--force-reinstall"))
            version = None
    if version is None:
        return Check(name, WRONG, "not installed", command)
    if older(version, least):
        return Check(name, WRONG, f"{version}, but hf_cce needs {least} or newer", f"{command} --upgrade")
    return Check(name, OK, version + build)


def triton(wanted: bool) -> Check:
    """Check Triton; ``wanted``: True if a GPU here can run the kernels."""
    name = "triton-windows" if sys.platform == "win32" else "triton"
    if wanted:
        return package(name, TRITON)
    return Check(name, OK, f"{machine.versions(name)[name] or 'not installed'}; no GPU here needs it")


def _runs_kernels(device: torch.device) -> bool:
    from hf_cce.dispatch import MIN_CAPABILITY

    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def _devices() -> tuple[list[torch.device], list[Check]]:
    """Return the devices that training could use, the CPU first, and the checks of the GPUs."""
    devices, checks = [torch.device("cpu")], []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        devices.append(torch.device("cuda", i))
        checks.append(_gpu(devices[-1]))
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
        checks.append(Check("mps", OK, "an Apple GPU: the PyTorch fallback runs on it"))
    elif len(devices) == 1:
        checks.append(_no_cuda(machine.driver_gpus(), torch.version.cuda))
    return devices, checks


def _gpu(device: torch.device) -> Check:
    facts = machine.gpu_facts(device)
    found = f"{facts['name']}, {facts['memory_gib']} GiB, compute capability {facts['capability']}"
    found += f", CUDA {facts['cuda'] or 'none'}"
    if _runs_kernels(device):
        return Check(str(device), OK, found)
    half = dtype_name(machine.half_dtype(device))
    return Check(str(device), NOTE, f"{found}: the PyTorch fallback runs, in float32 or {half}")


def _no_cuda(gpus: list[str] | None, build: str | None) -> Check:
    """Explain why torch sees no CUDA device, given the driver's ``gpus`` and the CUDA version of torch's ``build``."""
    if not gpus:
        why = "no NVIDIA driver found" if gpus is None else "the NVIDIA driver lists no GPU"
        return Check("gpu", NOTE, f"none ({why}): the PyTorch fallback runs on the CPU")
    there = f"the driver lists {', '.join(gpus)}"
    command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
    if build is None:
        return Check("gpu", WRONG, f"{there}, but this torch is built without CUDA", command)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Check("gpu", NOTE, f"{there}, but CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
        why = "torch gives no reason"
    except Exception as error:
        why = first_line(error)
    found = f"{there}, but torch, built for CUDA {build}, cannot use it ({why}): update the driver or use an older CUDA"
    return Check("gpu", WRONG, found, command)


def self_test(device: torch.device) -> tuple[list[dict[str, str]], Check]:
    """Return what runs on ``device`` and why, and compare loss and gradients of a small problem with float64."""
    from hf_cce.diagnostics import gradcheck

    name, again = f"self-test {device}", f"hf-cce gradcheck --device {device}"
    # Odd sizes give partial tiles; on a GPU, several tiles.
    problem = gradcheck.Problem(300, 256, 4003) if device.type == "cuda" else gradcheck.Problem(150, 48, 1003)
    dtypes = ("float32", dtype_name(machine.half_dtype(device)))
    try:
        choices = [_choice(device, dtype) for dtype in dtypes]
        report = gradcheck.gradcheck(problem, device, dtypes, cases=(gradcheck.PLAIN, gradcheck.EVERYTHING))
    except Exception as error:  # a kernel that cannot be compiled may raise anything
        return [], Check(name, WRONG, f"{type(error).__name__}: {first_line(error)}", again)
    if not report["ok"]:
        return choices, Check(name, WRONG, gradcheck.verdict(report), again)
    count = len(report["rows"])
    return choices, Check(name, OK, f"{count} results (loss and gradients) are as close to float64 as with full logits")


def _choice(device: torch.device, dtype: str) -> dict[str, str]:
    """Return what runs on ``device`` in training of usual size."""
    from hf_cce.dispatch import explain_dispatch

    found = explain_dispatch(8192, 1024, 49_152, getattr(torch, dtype), device)
    why = found.why.split(" (TRITON_INTERPRET")[0]  # an option for tests
    if found.implementation == "triton":
        why = "; ".join(filter(None, (why, hopper_kernels(device))))
    what = {"implementation": found.implementation, "why": why, "expect": EXPECT[found.implementation]}
    return {"device": str(device), "dtype": dtype, **what}


def hopper_kernels(device: torch.device) -> str:
    """Return which kernels a Hopper GPU uses, "" for other GPUs."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return ""
    from hf_cce.kernels.launch_config import HOPPER_VERSIONS, is_hopper_validated

    if is_hopper_validated():
        return "specialized kernels for Hopper"
    return f"generic kernels; the faster kernels for Hopper need triton {' or '.join(HOPPER_VERSIONS)}"


def _model() -> Check:
    """Check that a patched model of the installed Transformers trains as it does unpatched, without logits."""
    from hf_cce.diagnostics import check

    name, again = "transformers model", _install(f"transformers>={REQUIRED['transformers']}", "--upgrade")
    try:
        report = check.check(check.load("tiny", True, torch.device("cpu"))[0])
    except Exception as error:
        return Check(name, WRONG, f"{type(error).__name__}: {first_line(error)}", again)
    good = report["same"] and report["saves"]
    return Check(name, OK if good else WRONG, check.verdict(report), None if good else again)
