"""Steps of a patched and an unpatched model under DeepSpeed ZeRO on several ranks; for test_zero.py.

usage: torchrun --nproc-per-node 2 tests/support/zero.py OUT.json [cuda]
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import FAMILIES, batch, cce_warnings, float64_copy, head_of, loss_and_grads
from processes import counters, finish, relative_errors, results_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cce import apply_cce

DEVICE = "cpu"  # or "cuda:<rank>"; main sets it
ROWS, STEPS, RATE = 4, 3, 0.05
# Otherwise a small model would stay gathered from its first forward to the end of the step.
FREE_AT_ONCE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}


OPTIONS: dict[str, Any] = {}  # for apply_cce


def skip_shared_memory_extension() -> None:
    """Skip DeepSpeed's C++ all-reduce for CPUs: it takes a minute to build, and a killed run leaves a stale lock."""
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None


class Traffic(TorchDispatchMode):
    """Count collectives by name, without the module hooks of torch's CommDebugMode, which fail under DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__] = self.counts.get(func.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


class Case(NamedTuple):
    family: str = "llama"
    prepare: Callable[[Any], Any] = lambda model: None
    options: dict[str, Any] = {}  # noqa: RUF012 (DeepSpeed's; never changed)

    def build(self) -> Any:
        model = FAMILIES[self.family].build()
        self.prepare(model)
        return model


CASES = {
    "llama": Case(),
    "tied": Case("llama_tied"),
    "bias": Case("phi"),
    "frozen head": Case(prepare=lambda model: model.lm_head.requires_grad_(False)),
    "only the head": Case(prepare=lambda model: model.requires_grad_(False).lm_head.requires_grad_(True)),
    "checkpointed": Case(prepare=lambda model: model.gradient_checkpointing_enable({"use_reentrant": False})),
    "two micro-batches": Case(options={"gradient_accumulation_steps": 2}),
    "bfloat16": Case(options={"bf16": {"enabled": True}}),
    # A hook reads the logits: they are materialized in addition to the fused loss, and a warning says why
    "watched": Case(
        prepare=lambda model: model.lm_head.register_forward_hook(lambda m, i, logits: logits.amax() and None)
    ),
    "stage 1": Case(),
    "stage 2": Case(),
}


def micro_batches(count: int, rank: int | None, world: int) -> list[dict[str, Tensor]]:
    rows = slice(None) if rank is None else slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return [{key: value[rows].to(DEVICE) for key, value in batch(rows=ROWS, seed=i).items()} for i in range(count)]


def items_in(batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.tensor(sum(int((each["labels"][:, 1:] != -100).sum()) for each in batches))


def reference(case: str, world: int) -> list[dict[str, Tensor]]:
    model, found = float64_copy(CASES[case].build()).to(DEVICE), []
    model.gradient_checkpointing_disable()
    count = CASES[case].options.get("gradient_accumulation_steps", 1)
    for step in range(STEPS):
        chosen = micro_batches(STEPS * count, None, world)[step * count : (step + 1) * count]
        sums: dict[str, Tensor] = {}
        for inputs in chosen:
            made = loss_and_grads(model, {**inputs, "num_items_in_batch": items_in(chosen)}, double=True)
            sums = {key: value + sums.get(key, 0) for key, value in made.items()}
        found.append(sums)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in sums:
                    parameter -= RATE * sums[name]
    return found


def run(case: str, patch: Callable[[Any], Any]) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    import deepspeed

    rank, world = dist.get_rank(), dist.get_world_size()
    model, options = CASES[case].build(), CASES[case].options
    head, count = head_of(model), options.get("gradient_accumulation_steps", 1)
    config = {"train_micro_batch_size_per_gpu": ROWS // world, "zero_allow_untested_optimizer": True, **options}
    stage = int(case[-1]) if "stage" in case else 3
    config |= {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage, **FREE_AT_ONCE}}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    patch(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=RATE), config=config)
    all_batches, mine = micro_batches(STEPS * count, None, world), micro_batches(STEPS * count, rank, world)
    found: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        at, total = slice(step * count, (step + 1) * count), torch.zeros((), device=DEVICE)
        with Traffic() as traffic:
            for inputs in mine[at]:
                # DeepSpeed divides by the number of ranks and micro-batches
                output = engine(**inputs, num_items_in_batch=items_in(all_batches[at]))
                loss = output.loss
                engine.backward(loss * world * count)
                total += loss.detach().float()
                if inputs is not mine[at][-1]:
                    engine.step()
        dist.all_reduce(total)
        if step == 0:  # logits can be read even after the weight has been freed
            made = output.logits.materialize() if hasattr(output.logits, "materialize") else output.logits
        grads = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
        found.append({"loss": total, **grads} | ({"logits": made.detach()} if step == 0 else {}))
        engine.step()
    read = ""
    try:
        if case.startswith("stage"):  # stage 3 leaves the gathered weight of an earlier step unchanged
            output.logits.sum()
    except RuntimeError as error:
        read = str(error)
    seen = {
        "read after the step": read,
        "freed": head.weight.numel() == 0,
        "gathers": traffic.counts.get("_allgather_base_.default", 0),
        "hooks": len(head._forward_hooks),
        "nodes left": getattr(head, "applied_pre_backward_ref_cnt", 0),
        "evaluated": type(model.eval()(**mine[0]).logits.cos()).__name__,
    }
    return found, seen


def compare_with_reference(case: str) -> dict[str, Any]:
    world = dist.get_world_size()
    references, logits = reference(case, world), []
    report: dict[str, Any] = {}
    for name, patch in (("twin", lambda model: model), ("errors", partial(apply_cce, **OPTIONS))):
        patched: list[Any] = []
        with cce_warnings() as messages:
            found, seen = run(case, lambda model, patch=patch, patched=patched: patched.append(patch(model)))
        logits.append(found[0].pop("logits"))
        report[name] = {
            f"{key} at {step}": error
            for step, pair in enumerate(zip(found, references, strict=True))
            for key, error in relative_errors(*pair).items()
        }
        report[f"seen of {name}"] = seen
        if name == "errors":
            report["warnings"] = messages
            report["stats"] = counters(patched[0])
    report["same logits"] = torch.equal(*logits)
    return report


def main(path: Path, device: str = "cpu") -> None:
    global DEVICE
    import deepspeed

    torch.set_num_threads(1)
    if device == "cuda":
        DEVICE = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(DEVICE)
        OPTIONS.update(implementation="triton", gradient_filter=None)  # otherwise PyTorch would handle so few tokens
    skip_shared_memory_extension()
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    finish(path, results_of(CASES, compare_with_reference))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
