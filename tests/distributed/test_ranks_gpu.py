"""test_ranks.py on two GPUs with NCCL and a larger model; a few engines also run on the CPU, to exercise this code."""

from typing import Any

import pytest
import torch
from losses import OPTIONS, Options, fused_loss, loss_and_gradients, make_inputs
from processes import assert_within_budget, run_on_ranks
from ranks import ENGINES

from hf_cce import CCEConfig, linear_log_probs

GPUS = [
    "ddp", "ddp_patched_late", "fsdp2", "fsdp2_patched_first", "fsdp2_root", "fsdp2_head_alone", "fsdp1", "tensor_parallel",
    "tensor_parallel_sequence", "tensor_parallel_fsdp2", "tensor_parallel_plan",
]  # fmt: skip
IN_BFLOAT16 = ["ddp", "fsdp2", "fsdp2_head_alone", "fsdp1", "tensor_parallel", "tensor_parallel_plan"]
# Float32 weights that the engine or autocast multiplies in bfloat16
MIXED = ["fsdp2_mixed", "fsdp1_mixed", "tensor_parallel_mixed"]
if torch.__version__ < (2, 9):  # see ranks.py
    MIXED.remove("fsdp2_mixed")
FEW = ["ddp", "fsdp2", "tensor_parallel"]
CASES = [
    *(("cuda", "float32", engine) for engine in GPUS + MIXED),
    *(("cuda", "bfloat16", engine) for engine in IN_BFLOAT16),
    *(("cpu", dtype, engine) for dtype in ("float32", "bfloat16") for engine in FEW),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def marked(cases: list[Any]) -> list[Any]:
    marks = [pytest.mark.gpu, two_gpus]
    return [
        pytest.param(*case, marks=marks if case[0] == "cuda" else [], id=" ".join(map(str, case))) for case in cases
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
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


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_run_on_device_of_tensors(options: Options, dtype: torch.dtype) -> None:
    """On the second GPU, while the first one is current, forward and backward give the bits of the first one."""
    config, found = CCEConfig("triton", gradient_filter=None), []
    torch.cuda.set_device(0)
    for device in ("cuda:0", "cuda:1"):
        inputs, labels = make_inputs(333, 640, 3001, dtype, device, bias=options.bias)
        torch.cuda.synchronize(1)
        found.append(loss_and_gradients(fused_loss(config), inputs, labels, options, dtype))
        stats = linear_log_probs(*inputs[:2], labels, bias=inputs[2], entropy=True, is_top1=True, config=config)
        found[-1] |= {name: value for name, value in stats._asdict().items() if value is not None}
        assert all(value.device == torch.device(device) for value in found[-1].values())
    assert len(found[0]) >= 6 and found[0].keys() == found[1].keys() and torch.cuda.current_device() == 0
    for name, value in found[0].items():
        assert torch.equal(value.cpu(), found[1][name].cpu()), name


def test_gpu_cases_are_known_engines() -> None:
    assert {engine for _, _, engine in CASES} <= set(ENGINES)
