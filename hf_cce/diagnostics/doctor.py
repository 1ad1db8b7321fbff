"""``hf-cce doctor``: what is installed, which implementation runs on which device and why, and whether it computes right.

Nothing is imported before its check begins, so a machine without torch or Transformers is diagnosed too, and no failing
check keeps the others from running.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hf_cce.diagnostics import machine

if TYPE_CHECKING:
    import torch

OK, NOTE, WRONG = "ok", "note", "wrong"
PYTHON = (3, 10)
# As in pyproject.toml; a test compares.
REQUIRED = {"torch": "2.8", "transformers": "5.0", "accelerate": "1.1", "numpy": "1.24", "tokenizers": "0.21"}
OPTIONAL = {"peft": "0.18", "trl": "1.10", "matplotlib": "3.8"}
WHAT_FOR = {"peft": "adapters", "trl": "its trainers", "matplotlib": "--plot"}
TRITON = "3.4"
DTYPES = ("float32", "bfloat16")
CUDA_WHEELS = "https://download.pytorch.org/whl/cu126"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One line: what was checked, what was found, and the command that fixes it."""

    name: str
    status: str  # OK, NOTE (nothing is broken) or WRONG
    found: str
    fix: str | None = None


@dataclass(frozen=True)
class Choice:
    """What ``implementation="auto"`` runs for tensors of ``dtype`` on ``device``."""

    device: str
    dtype: str
    implementation: str
    why: str


@dataclass
class Diagnosis:
    """Everything that was found."""

    checks: list[Check] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.status == WRONG]

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.wrong,
            "checks": [asdict(check) for check in self.checks],
            "implementations": [asdict(choice) for choice in self.choices],
        }


def diagnose(say: Say = lambda what: None) -> Diagnosis:
    """Run every check; ``say`` is told what is being checked."""
    found = Diagnosis()
    found.checks.append(_python())
    say("packages")
    for name in REQUIRED:
        found.checks.append(package(name, REQUIRED[name], imported=name in ("torch", "transformers")))
    good = {check.name for check in found.checks if check.status == OK}
    if "torch" in good:
        say("devices")
        devices, checks = _devices()
        found.checks += checks
        found.checks.append(triton(any(_capable(device) for device in devices)))
        for device in devices:
            say(f"self-test on {device}")
            choices, check = self_test(device)
            found.choices += choices
            found.checks.append(check)
        if "transformers" in good:
            say("a small model of Transformers")
            found.checks.append(_model())
    else:
        found.checks += _gpus_without_torch()
    for name in OPTIONAL:
        say(name)
        found.checks.append(_optional(name, good))
    return found


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: (2, 8) for "2.8.0+cu126"."""
    numbers = [int(x) for x in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _install(requirement: str, *options: str) -> str:
    return " ".join(["pip install", *options, f'"{requirement}"'])


def _python() -> Check:
    found = f"{platform.python_version()} ({platform.system()}, {platform.machine()})"
    if sys.version_info[:2] >= PYTHON:
        return Check("python", OK, found)
    return Check("python", WRONG, f"{found}, but hf_cce needs 3.10 or newer", "python3.12 -m venv .venv")


def package(name: str, least: str, *, imported: bool = False) -> Check:
    """Check that ``name`` is installed, new enough and, if ``imported``, can be imported."""
    version, build = machine.versions(name)[name], ""
    command = _install(f"{name}>={least}")
    if imported:
        try:
            module = importlib.import_module(name)
            version = str(getattr(module, "__version__", version))
            build = f", {_build(module)}" if name == "torch" else ""
        except ModuleNotFoundError as error:
            if (error.name or name).split(".")[0] != name:
                what = f"{version} cannot be loaded: {_first_line(error)}"
                return Check(name, WRONG, what, _install(str(error.name)))
            version = None
        except Exception as error:  # a library that is missing is an OSError, a mixed installation anything
            what = f"{version} cannot be loaded: {type(error).__name__}: {_first_line(error)}"
            return Check(name, WRONG, what, _install(f"{name}>={least}", "--force-reinstall"))
    if version is None:
        return Check(name, WRONG, "not installed", command)
    if release(version) < release(least):
        return Check(name, WRONG, f"{version}, but hf_cce needs {least} or newer", f"{command} --upgrade")
    return Check(name, OK, version + build)


def _build(torch: Any) -> str:
    """Return what this torch was built for, in words."""
    if getattr(torch.version, "hip", None):
        return f"built for ROCm {torch.version.hip}"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def triton(wanted: bool) -> Check:
    """Check Triton; ``wanted``: there is a GPU that can run the kernels."""
    version = machine.versions("triton")["triton"]
    name = "triton-windows" if sys.platform == "win32" else "triton"
    if version is None and wanted:
        return Check(
            "triton", WRONG, "not installed: the GPU runs portable PyTorch, slower", _install(f"{name}>={TRITON}")
        )
    if version is None:
        return Check("triton", OK, "not installed, and nothing here needs it")
    if release(version) < release(TRITON) and wanted:
        command = _install(f"{name}>={TRITON}", "--upgrade")
        return Check("triton", WRONG, f"{version}, but the kernels need {TRITON} or newer", command)
    return Check("triton", OK, version + ("" if wanted else ", which nothing here needs"))


def driver_gpus() -> list[str] | None:
    """Return "name, driver version" of each GPU that NVIDIA's driver lists, None without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _gpus_without_torch() -> list[Check]:
    gpus = driver_gpus()
    return [Check("gpu", OK, f"{', '.join(gpus)}; not tested, as there is no torch")] if gpus else []


def _capable(device: torch.device) -> bool:
    import torch

    from hf_cce.dispatch import CAPABILITY

    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= CAPABILITY
    )


def _devices() -> tuple[list[torch.device], list[Check]]:
    """Return the devices that a training could use, the CPU first, and the checks of the GPUs."""
    import torch

    devices, checks = [torch.device("cpu")], []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", i)
        devices.append(device)
        checks.append(_gpu(device))
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
        checks.append(Check("mps", OK, "an Apple GPU: portable PyTorch runs on it"))
    elif len(devices) == 1:
        checks.append(_no_cuda(driver_gpus(), torch.version.cuda))
    return devices, checks


def _gpu(device: torch.device) -> Check:
    import torch

    from hf_cce.dispatch import CAPABILITY

    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    if torch.version.cuda is None:
        return Check(str(device), NOTE, f"{properties.name}, {memory}: no NVIDIA GPU, so portable PyTorch runs")
    version = f"{properties.major}.{properties.minor}"
    found = f"{properties.name}, compute capability {version}, {memory}, CUDA {torch.version.cuda}"
    if (properties.major, properties.minor) < CAPABILITY:
        return Check(str(device), NOTE, f"{found}: the kernels need 8.0 (A100) or newer, so portable PyTorch runs")
    return Check(str(device), OK, found)


def _no_cuda(gpus: list[str] | None, build: str | None) -> Check:
    """Explain why torch sees no CUDA device: ``gpus`` of the driver, torch built for CUDA ``build``."""
    if not gpus:
        why = "no NVIDIA driver here" if gpus is None else "the NVIDIA driver names no GPU"
        return Check("gpu", NOTE, f"none ({why}): portable PyTorch runs on the CPU")
    there = f"the driver names {', '.join(gpus)}"
    if build is None:
        command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
        return Check("gpu", WRONG, f"{there}, but this torch is built without CUDA", command)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return Check("gpu", NOTE, f"{there}, but CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES")
    try:
        import torch

        torch.cuda.init()
        why = "torch gives no reason"
    except Exception as error:
        why = _first_line(error)
    command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
    found = f"{there}, but torch, built for CUDA {build}, cannot use it ({why}): take a newer driver or an older CUDA"
    return Check("gpu", WRONG, found, command)


def self_test(device: torch.device) -> tuple[list[Choice], Check]:
    """Return what runs on ``device`` and why, and the check of loss and gradients of a small problem against float64."""
    name = f"self-test {device}"
    again = f"hf-cce gradcheck --device {device}"
    try:
        choices, compared, worse = _compared(device)
    except Exception as error:  # a kernel that cannot be compiled raises what its compiler likes
        return [], Check(name, WRONG, f"{type(error).__name__}: {_first_line(error)}", again)
    if worse:
        row = max(worse, key=lambda row: row.share)
        found = (
            f"{len(worse)} of {compared} results are less exact than allowed; the worst is {row.quantity} in {row.dtype} "
            f"({row.implementation}): relative error {row.hf_cce[1]:.1e}, allowed {row.allowed:.1e}"
        )
        return choices, Check(name, WRONG, found, again)
    return choices, Check(name, OK, f"{compared} results, loss and gradients, as close to float64 as full logits are")


def _compared(device: torch.device) -> tuple[list[Choice], int, list[Any]]:
    import torch

    from hf_cce import CCEConfig
    from hf_cce.diagnostics import gradcheck
    from hf_cce.dispatch import explain_dispatch

    # Of odd sizes, so that tiles are cut; on a GPU large enough that several of them are there.
    problem = gradcheck.Problem(300, 256, 4003) if device.type == "cuda" else gradcheck.Problem(96, 48, 1003)
    choices: list[Choice] = []
    rows: list[gradcheck.Row] = []
    for dtype in DTYPES:
        if device.type == "cpu":
            # gradcheck would also try the kernels in Triton's interpreter, which nobody trains with.
            configs = [("portable", "", CCEConfig("portable"))]
            why = "the kernels are for NVIDIA GPUs; on a CPU it is always portable PyTorch"
        else:
            configs, notes = gradcheck.configurations(device, dtype)
            why = "; ".join(note.removeprefix("triton: ") for note in notes)
        names = [implementation for implementation, _, _ in configs]
        if not names:
            raise RuntimeError(why)
        chosen = explain_dispatch(8192, 1024, 49152, getattr(torch, dtype), device).implementation
        if chosen == "triton":
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            why = f"an NVIDIA GPU of compute capability {capability} with triton {machine.versions('triton')['triton']}"
            why += hopper_tiles(capability, dtype)
        choices.append(Choice(str(device), dtype, chosen, why))
        for case in (gradcheck.CASES[0], gradcheck.CASES[-1]):
            rows += gradcheck.compare(problem, case, dtype, device, configs)
    return choices, len(rows), [row for row in rows if not row.ok]


def hopper_tiles(capability: str, dtype: str) -> str:
    """Return which kernels a Hopper GPU gets with the installed Triton, to end a sentence; "" for others and float32."""
    if not capability.startswith("9.") or dtype == "float32":
        return ""
    from hf_cce.kernels import launch_config

    if launch_config.hopper_is_proven():
        return "; with Hopper's own kernels"
    versions = " and ".join(f"{version}.x" for version in launch_config.HOPPER_VERSIONS)
    return f"; with the kernels of other GPUs: Hopper's own, which are faster, run with triton {versions} only"


def _tiny_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).train()


def _model() -> Check:
    """Check that a patched model of this Transformers computes its own loss without logits."""
    name, again = "transformers model", _install(f"transformers>={REQUIRED['transformers']}", "--upgrade")
    try:
        import torch

        from hf_cce import apply_cce

        model = _tiny_model()
        ids = torch.arange(64).reshape(2, 32)
        own = float(model(input_ids=ids, labels=ids).loss.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that full logits were made is a warning
            apply_cce(model)
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        ours, fused = float(loss.detach()), model.cce_stats()["fused"]
    except Exception as error:
        return Check(name, WRONG, f"{type(error).__name__}: {_first_line(error)}", again)
    if fused != 1 or abs(ours - own) > 1e-5 * own:
        return Check(name, WRONG, f"patched, its loss is {ours:.6f} instead of {own:.6f} ({fused:.0f} fused)", again)
    return Check(name, OK, f"apply_cce: the loss is the model's own, {own:.6f}, and no logits were made")


def _optional(name: str, good: set[str]) -> Check:
    check = package(name, OPTIONAL[name])
    if check.status == WRONG:
        return Check(name, NOTE, f"{check.found} (needed for {WHAT_FOR[name]} only)", check.fix)
    return _trl(check) if name == "trl" and {"torch", "transformers"} <= good else check


def _trl(check: Check) -> Check:
    """Check that a call of TRL's fused head reaches hf_cce, with a tiny model."""
    try:
        import torch
        from trl.trainer.utils import add_fused_lm_head

        from hf_cce import apply_cce

        model = _tiny_model()
        ids = torch.arange(64).reshape(2, 32)
        add_fused_lm_head(model)
        apply_cce(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        why = next((str(w.message) for w in said if "hf_cce" in str(w.message)), "")
        fits = model.cce_stats()["fused"] == 1
    except Exception as error:
        fits, why = False, f"{type(error).__name__}: {_first_line(error)}"
    if fits:
        return Check("trl", OK, f"{check.found}: the fused head of its trainers computes by hf_cce")
    about = f"{check.found}: its trainers train right, but not by hf_cce ({why or 'its fused head was not answered'})"
    return Check("trl", NOTE, about, _install("trl==1.16.*"))
