"""test_ranks.py on two GPUs with NCCL and a larger model; a few engines also run on the CPU, to exercise this code."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from losses import OPTIONS, PLAIN, Options, full_logits, fused_loss, loss_and_gradients, make_inputs, plain_loss
from numerics import assert_accurate
from processes import assert_within_budget, run_on_ranks
from ranks import ENGINES

from hf_cce import CCEConfig, linear_log_probs

GPUS = [
    "ddp",
    "ddp_patched_late",
    "fsdp2",
    "fsdp2_patched_first",
    "fsdp2_root",
    "fsdp2_head_alone",
    "fsdp1",
    "tensor_parallel",
    "tensor_parallel_sequence",
    "tensor_parallel_fsdp2",
    "tensor_parallel_plan",
]
IN_BFLOAT16 = ["ddp", "fsdp2", "fsdp2_head_alone", "fsdp1", "tensor_parallel", "tensor_parallel_plan"]
# Float32 weights that the engine or autocast multiplies in bfloat16
MIXED = ["fsdp2_mixed", "fsdp1_mixed", "tensor_parallel_mixed"]
FEW = ["ddp", "fsdp2", "tensor_parallel"]
CASES = [
    *(("cuda", "float32", engine) for engine in GPUS + MIXED),
    *(("cuda", "bfloat16", engine) for engine in IN_BFLOAT16),
    *(("cpu", dtype, engine) for dtype in ("float32", "bfloat16") for engine in FEW),
]
if os.environ.get("HF_CCE_ALL_RANKS"):  # run every GPU test's code on a CPU
    CASES += [("cpu", *case) for _, *case in CASES if ("cpu", *case) not in CASES]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def marked(cases: list[Any]) -> list[Any]:
    """Mark the "cuda" cases as tests for two GPUs."""
    marks = [pytest.mark.gpu, two_gpus]
    return [
        pytest.param(*case, marks=marks if case[0] == "cuda" else [], id=" ".join(map(str, case))) for case in cases
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of two processes for a device and a dtype; each pair is started once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def get(device: str, dtype: str) -> dict[str, Any]:
        if (device, dtype) not in found:
            engines = [engine for a, b, engine in CASES if (a, b) == (device, dtype)]
            path = tmp_path_factory.mktemp("ranks") / "ranks.json"
            found[device, dtype] = run_on_ranks("ranks.py", path, device, dtype, *engines, device=device)
        return found[device, dtype]

    return get


@pytest.mark.slow  # on a CPU, each dtype starts two processes
@pytest.mark.parametrize(("device", "dtype", "engine"), marked(CASES))
def test_step_matches_one_process(device: str, dtype: str, engine: str, results: Any) -> None:
    result = results(device, dtype)[engine]
    assert_within_budget(result, half=dtype == "bfloat16" or engine in MIXED)
    tensor, counted = engine.startswith("tensor_parallel"), result["stats"]
    steps = 1 if tensor else 2
    missed = int(engine == "tensor_parallel_plan")  # full logits with a warning, see test_ranks.py
    assert counted == {"calls": steps, "fused": steps - missed, "missed": missed, "materialized": int(tensor)}
    assert len(result["warnings"]) == missed


# One process, two devices
@pytest.mark.parametrize(
    ("device", "dtype"), marked([(d, t) for d in ("cuda", "cpu") for t in ("float32", "bfloat16")])
)
@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_run_on_device_of_tensors(device: str, dtype: str, options: Options) -> None:
    """Run on the second GPU while the first one is current: forward, and backward on autograd's threads."""
    kind, place = getattr(torch, dtype), "cpu" if device == "cpu" else "cuda:1"
    implementation = "portable" if device == "cpu" else "triton"
    config = CCEConfig(implementation=implementation, gradient_filter=None)
    inputs, labels = make_inputs(333, 640 if device == "cuda" else 96, 3001, kind, place, bias=options.bias)
    exact, twin = (loss_and_gradients(plain_loss, inputs, labels, options, t) for t in (torch.float64, kind))
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.synchronize(1)
    actual = loss_and_gradients(fused_loss(config), inputs, labels, options, kind)
    for name, value in actual.items():
        assert value.device == torch.device(place)
        assert_accurate(value, twin[name], exact[name], name, kind)
    found = linear_log_probs(*inputs[:2], labels, bias=inputs[2], entropy=True, is_top1=True, config=config)
    statistics = []
    for t in (kind, torch.float64):
        z = full_logits(*(None if x is None else x.to(t) for x in inputs), PLAIN)  # type: ignore[arg-type]
        log_p = (z if t == torch.float64 else z.float()).log_softmax(-1)
        at_label, valid = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0], labels != -100
        statistics.append((at_label * valid, -(log_p.exp() * log_p).sum(-1) * valid))
    for a, twin_of, best in zip((found.log_probs, found.entropy), *statistics, strict=True):
        assert a is not None and a.device == torch.device(place)
        assert_accurate(a, twin_of, best, "log_probs", kind)
    if device == "cuda":
        assert torch.cuda.current_device() == 0


def test_gpu_cases_are_known_engines() -> None:
    assert {engine for _, _, engine in CASES} <= set(ENGINES)
