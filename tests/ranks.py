"""One step of a patched and an unpatched model on several ranks, under every engine that runs on a CPU; for test_ranks.py.

usage: torchrun --nproc-per-node 2 tests/ranks.py OUT.json
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import batch, exact, loss_and_grads, stats, tiny_llama
from numerics import relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hf_cce import apply_cce

ROWS = 4


def ddp(model: Any, patch: Callable[[Any], Any]) -> Any:
    return DistributedDataParallel(patch(model))


def ddp_patched_late(model: Any, patch: Callable[[Any], Any]) -> Any:
    return patch(DistributedDataParallel(model))


def _layers(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)


def fsdp2(model: Any, patch: Callable[[Any], Any], **options: Any) -> Any:
    """As accelerate groups: the head with the final norm, whole until the backward pass."""
    _layers(model, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    return patch(fully_shard(model, **options))


def fsdp2_patched_first(model: Any, patch: Callable[[Any], Any]) -> Any:
    return fsdp2(patch(model), lambda model: model)


def fsdp2_root(model: Any, patch: Callable[[Any], Any]) -> Any:
    _layers(model)
    return patch(fully_shard(model))


def fsdp2_mixed(model: Any, patch: Callable[[Any], Any]) -> Any:
    return fsdp2(model, patch, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))


def fsdp2_head_alone(model: Any, patch: Callable[[Any], Any]) -> Any:
    """In a group of its own, which would free its weight right after its forward."""
    _layers(model)
    fully_shard(model.lm_head)
    return patch(fully_shard(model))


def tensor_parallel(model: Any, patch: Callable[[Any], Any]) -> Any:
    """As Transformers' own plan: the vocabulary in shards, the logits gathered. Real logits, and a warning."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return patch(model)


ENGINES = {
    f.__name__: f
    for f in (
        ddp,
        ddp_patched_late,
        fsdp2,
        fsdp2_patched_first,
        fsdp2_root,
        fsdp2_mixed,
        fsdp2_head_alone,
        tensor_parallel,
    )
}


def step(model: Any, inputs: dict[str, Tensor], items: int, world: int) -> dict[str, Tensor]:
    """Loss of this rank's rows and the whole gradients, as Trainer forms them: a sum over ``items``, times the ranks."""
    loss = model(**inputs, num_items_in_batch=torch.tensor(items)).loss * world
    loss.backward()
    total = loss.detach() / world
    dist.all_reduce(total)
    found = {"loss": total if world > 1 else loss.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def run(engine: Callable[..., Any], whole: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = engine is tensor_parallel
    rows = slice(None) if tensor else slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    inputs, items = {key: value[rows] for key, value in whole.items()}, int((whole["labels"][:, 1:] != -100).sum())
    outcome: dict[str, Any] = {"told": [], "errors": {}, "twin": {}}
    for name, patch in (("twin", lambda model: model), ("errors", apply_cce)):
        model = engine(tiny_llama(), patch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if tensor:  # every rank has all rows, and no gradient is averaged
                loss = model(**inputs, num_items_in_batch=torch.tensor(items)).loss
                loss.backward()
                grads = {key: p.grad for key, p in model.named_parameters()}
                found = {"loss": loss.detach()} | {
                    key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in grads.items()
                }
            else:
                step(model, inputs, items, world)
                model.zero_grad(set_to_none=True)
                found = step(
                    model, inputs, items, world
                )  # the first leaves nothing behind that a second would trip over
        assert found.keys() == reference.keys()
        outcome[name] = {key: relative_error(value, reference[key]) for key, value in found.items()}
        whole_of = [torch.cat([x[key].double().flatten() for key in reference]) for x in (found, reference)]
        outcome[name]["everything"] = relative_error(*whole_of)
        if name == "errors":
            outcome["told"] = [str(w.message) for w in caught if "hf_cce" in str(w.message)]
            counted = stats(model)
            outcome["stats"] = {key: getattr(counted, key) for key in ("calls", "fused", "missed", "materialised")}
    return outcome


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = batch(rows=ROWS)
    items = int((whole["labels"][:, 1:] != -100).sum())
    reference = loss_and_grads(
        exact(copy.deepcopy(tiny_llama())), {**whole, "num_items_in_batch": torch.tensor(items)}, double=True
    )
    results = {}
    for name, engine in ENGINES.items():
        try:
            results[name] = run(engine, whole, reference)
        except Exception as error:  # the other engines are of interest too
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        dist.barrier()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
