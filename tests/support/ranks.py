"""One step of a patched and an unpatched model on several ranks under every engine; for test_ranks.py and test_ranks_gpu.py.

usage: torchrun --nproc-per-node 2 tests/support/ranks.py OUT.json [DEVICE DTYPE ENGINE …]

With DEVICE ("cpu" or "cuda") and DTYPE ("float32" or "bfloat16"), a larger Llama is run under the named engines.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import FAMILIES, batch, cce_warnings, float64_copy, loss_and_grads, tiny_llama, with_lora
from numerics import relative_error
from processes import counters, finish, relative_errors, results_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from vocab_parallel import sharded_vocabulary_results

from hf_cce import apply_cce
from hf_cce.deferred import head_input
from hf_cce.deferred.logits import LazyLogits

DEVICE = "cpu"  # or "cuda:<rank>"; main sets it
ROWS = 4


def mesh_of(shape: tuple[int, ...], **names: Any) -> Any:
    return init_device_mesh(DEVICE.partition(":")[0], shape, **names)


# Each function below puts a model under an engine, with the patch applied before or after.
Patch = Callable[[Any], Any]


def ddp(model: Any, patch: Patch) -> Any:
    return DistributedDataParallel(patch(model))


def patched_first(engine: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, patch: engine(patch(model), lambda model: model)


def _layers(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)


def fsdp2(model: Any, patch: Patch, **options: Any) -> Any:
    """Group the head with the final norm, as accelerate does; the group stays unsharded until the backward."""
    _layers(model, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    return patch(fully_shard(model, **options))


def fsdp2_root(model: Any, patch: Patch, **options: Any) -> Any:
    _layers(model)
    return patch(fully_shard(model, **options))


def fsdp2_compiled_head(model: Any, patch: Patch) -> Any:
    """Compile the head, as accelerate's regional compilation does; its weight is freed before the model's output is seen."""
    model = fsdp2_root(model, patch, reshard_after_forward=True)
    model.lm_head.compile(backend="eager")
    return model


def fsdp2_head_alone(model: Any, patch: Patch, **options: Any) -> Any:
    """Put the head in its own FSDP group, which frees its weight right after its forward."""
    _layers(model)
    fully_shard(model.lm_head, **options)
    return patch(fully_shard(model))


def fsdp2_few_tokens(model: Any, patch: Patch) -> Any:
    """Take full logits for few tokens on one rank only, as on GPUs: only the other would gather the freed weight again."""
    model, real = fsdp2_head_alone(model, patch), head_input.has_few_tokens
    if hasattr(model, "cce_stats"):
        apply_cce(model, memory_budget="123MiB")
        head_input.has_few_tokens = lambda hidden_states, weight, config: (
            dist.get_rank() == 0 if config.memory_budget == 123 << 20 else real(hidden_states, weight, config)
        )
    return model


def fsdp2_adapted_head(model: Any, patch: Patch) -> Any:
    """Put a LoRA-adapted head with a bias in its own group: FSDP2 derives dynamic classes from PEFT's."""
    fsdp2_head_alone(model.get_base_model(), lambda base: base)
    return patch(model)


def fsdp2_peft_root(model: Any, patch: Patch) -> Any:
    """Put the head in the group of a PeftModel around the causal LM, which frees it after the forward, as accelerate does."""
    _layers(model.get_base_model())
    return patch(fully_shard(model, reshard_after_forward=True))


def fsdp1(model: Any, patch: Patch, **options: Any) -> Any:
    """Use the FSDP1 wrapper: each layer is a unit, and the head belongs to the root unit."""
    options = {"auto_wrap_policy": ModuleWrapPolicy({type(model.model.layers[0])}), "use_orig_params": True, **options}
    return patch(FullyShardedDataParallel(model, device_id=torch.device(DEVICE), **options))


def fsdp1_head_alone(model: Any, patch: Patch) -> Any:
    """Put the head in its own FSDP1 unit, which frees its weight right after its forward: full logits with a warning."""
    head = model.lm_head
    return fsdp1(model, patch, auto_wrap_policy=CustomPolicy(lambda module: module is head))


def tensor_parallel(model: Any, patch: Patch, head: str = "lm_head") -> Any:
    """Use torch's tensor parallelism: the head's vocabulary is sharded and a hook gathers the logits."""
    mesh = mesh_of((dist.get_world_size(),))
    parallelize_module(model, mesh, {head: ColwiseParallel(output_layouts=Replicate())})
    return patch(model)


def tensor_parallel_sequence(model: Any, patch: Patch) -> Any:
    """Shard the head's input along the sequence; torch's hook gathers it."""
    mesh = mesh_of((dist.get_world_size(),))
    before = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    parallelize_module(model, mesh, {"model.norm": before})
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.norm": SequenceParallel(), "lm_head": head})
    return patch(model)


def tensor_parallel_fsdp2(model: Any, patch: Patch) -> Any:
    """Use a 2-D mesh with the head alone in its FSDP2 group (2 × 2 ranks are checked by hand)."""
    mesh = mesh_of((1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    _layers(model, mesh=mesh["data"])
    fully_shard(model.lm_head, mesh=mesh["data"])
    return patch(fully_shard(model, mesh=mesh["data"]))


def tensor_parallel_logits_split(model: Any, patch: Patch) -> Any:
    """The head returns sharded logits and the model's loss gathers them: full logits with a warning."""
    mesh = mesh_of((dist.get_world_size(),))
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(use_local_output=False)})
    inner = model.loss_function
    model.loss_function = lambda logits, **kwargs: inner(logits=logits.full_tensor(), **kwargs)
    return patch(model)


def tensor_parallel_plan(model: Any, patch: Patch) -> Any:
    """Apply Transformers' own plan to the whole model, which requires loading it from disk."""
    folder = Path(sys.argv[1]).parent / f"saved-{type(model).__name__}-{model.config.tie_word_embeddings}"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    options: dict[str, Any] = {"tp_plan": "auto"}
    if hasattr(transformers, "DistributedConfig"):
        options = {"distributed_config": transformers.DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}
    model = type(model).from_pretrained(folder, **options)
    head = model.lm_head.weight
    assert isinstance(head, DTensor) and not head.placements[0].is_replicate(), "the plan was not applied"
    return patch(model.train())


def tensor_parallel_plan_compiled(model: Any, patch: Patch) -> Any:
    """A compiled graph materializes full logits, warns while tracing, and counts nothing."""
    model = tensor_parallel_plan(model, patch)
    torch._dynamo.reset()
    model.compile(backend="eager")
    return model


def large(dtype: torch.dtype, extra_entries: int = 0) -> Any:
    """Return a model whose sizes do not fit the kernels' tiles: on a GPU 32,003 entries and hidden size 640; smaller on a CPU."""
    entries, width = (32003, 640) if DEVICE != "cpu" else (1003, 192)
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32}
    with torch.device(DEVICE):
        model = tiny_llama(vocab_size=entries + extra_entries, hidden_size=width, intermediate_size=2 * width, **heads)
    with torch.no_grad():
        model.lm_head.weight.mul_(4 / width**0.5)  # logits with a standard deviation near 2
    return model.to(dtype)


ENGINES: dict[str, Callable[..., Any]] = {
    "ddp": ddp,
    "ddp_patched_late": lambda model, patch: patch(DistributedDataParallel(model)),
    # Each rank has a part of every sequence, with labels shifted before the split; no layer mixes tokens
    "context_parallel": ddp,
    "fsdp2": fsdp2,
    "fsdp2_patched_first": patched_first(fsdp2),
    "fsdp2_root": fsdp2_root,
    "fsdp2_compiled_head": fsdp2_compiled_head,
    "fsdp2_root_resharded": partial(fsdp2_root, reshard_after_forward=True),
    "fsdp2_mixed": partial(fsdp2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)),
    "fsdp2_head_alone": fsdp2_head_alone,
    # Another forward runs before the backward and frees the weight that the gradients need
    "fsdp2_forward_between": fsdp2_head_alone,
    "fsdp2_few_tokens": fsdp2_few_tokens,
    "fsdp2_adapted_head": fsdp2_adapted_head,
    "fsdp2_peft_root": fsdp2_peft_root,
    "fsdp1": fsdp1,
    "fsdp1_flat": partial(fsdp1, use_orig_params=False),
    "fsdp1_patched_first": patched_first(fsdp1),
    "fsdp1_mixed": partial(fsdp1, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
    "fsdp1_head_alone": fsdp1_head_alone,
    "tensor_parallel": tensor_parallel,
    "tensor_parallel_bias": tensor_parallel,
    "tensor_parallel_softcap": tensor_parallel,
    "tensor_parallel_logsumexp": tensor_parallel,  # Bamba's z-loss calls logsumexp on its logits
    "tensor_parallel_sequence": tensor_parallel_sequence,
    "tensor_parallel_mixed": tensor_parallel,  # under autocast
    "tensor_parallel_fsdp2": tensor_parallel_fsdp2,
    "tensor_parallel_logits_split": tensor_parallel_logits_split,
    # The sharded layer is inside the head: full logits with a warning
    "tensor_parallel_lora": partial(tensor_parallel, head="base_model.model.lm_head.base_layer"),
    "tensor_parallel_plan": tensor_parallel_plan,
    "tensor_parallel_plan_tied": tensor_parallel_plan,
    "tensor_parallel_plan_compiled": tensor_parallel_plan_compiled,
}
# In torch 2.8, without hf_cce, too, frozen shards become trainable, and mixed gradients of the head are wrong
if torch.__version__ < (2, 9):
    del ENGINES["tensor_parallel_lora"], ENGINES["fsdp2_mixed"]
# For four ranks: after its forward the head is resharded over two of them, and an evaluation leaves it so
FOUR_RANK_ENGINES = {"fsdp2_head_over_some": partial(fsdp2_head_alone, reshard_after_forward=2)}
MODELS: dict[str, Callable[[], Any]] = {
    "context_parallel": lambda: tiny_llama(num_hidden_layers=0),
    "tensor_parallel_bias": FAMILIES["phi"].build,
    "tensor_parallel_softcap": lambda: FAMILIES["gemma2"].build(tie_word_embeddings=False),
    "tensor_parallel_logsumexp": lambda: FAMILIES["bamba"].build(tie_word_embeddings=False),
    "fsdp2_adapted_head": lambda: with_lora(FAMILIES["phi"].build(), target_modules=["lm_head"]),
    "fsdp2_peft_root": lambda: with_lora(tiny_llama(), modules_to_save=["lm_head"]),
    "tensor_parallel_lora": lambda: with_lora(tiny_llama(), target_modules=["lm_head"]),
    # transformers 5.17 accepts only even sizes
    "tensor_parallel_plan": lambda: tiny_llama(vocab_size=100),
    "tensor_parallel_plan_compiled": lambda: tiny_llama(vocab_size=100),
    "tensor_parallel_plan_tied": lambda: FAMILIES["llama_tied"].build(vocab_size=100),
}


BUILD: Callable[[], Any] = tiny_llama
OPTIONS: dict[str, Any] = {}  # for apply_cce


def full_gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def step(
    model: Any, inputs: dict[str, Tensor], items: int, world: int, extra_forward: Callable[[], Any] = lambda: None
) -> dict[str, Tensor]:
    """Return this rank's loss and the full gradients as Trainer computes them: a sum over ``items``, times the ranks."""
    loss = model(**inputs, num_items_in_batch=torch.tensor(items)).loss * world
    extra_forward()
    loss.backward()
    total = loss.detach() / world
    dist.all_reduce(total)
    found = {"loss": total}
    if isinstance(model, FullyShardedDataParallel):  # FSDP1 gathers parameters but not the gradients of flat ones
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0 if parameter.grad is None else parameter.grad)
        with FullyShardedDataParallel.summon_full_params(model):
            for name, parameter in model.named_parameters():
                found[name.replace("_fsdp_wrapped_module.", "")] = parameter.detach().clone()
        return found
    return found | {name.removeprefix("module."): grad for name, grad in full_gradients(model).items()}


def gradients_of_loss_on_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return all gradients of a cross entropy plus an entropy on the logits of a call without labels."""
    model.zero_grad(set_to_none=True)
    logits = model(**{name: value for name, value in inputs.items() if "labels" not in name}).logits.float()
    target = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    log_p = logits.log_softmax(-1)
    loss = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + (log_p.exp() * log_p).sum(-1).mean()
    )
    loss.backward()
    return torch.cat([grad.flatten() for grad in full_gradients(model).values()])


def read_after_step(model: Any, inputs: dict[str, Tensor]) -> str:
    """Return the error of reading logits after an optimizer step and another forward; "" if there is none."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model(**inputs)  # FSDP gathers the new weights where the old ones were
    try:
        output.logits.sum()
    except RuntimeError as error:
        return str(error)
    return ""


def unsplit_step(model: Any, inputs: dict[str, Tensor], items: int, mixed: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Run ``step`` with all rows on every rank and no gradient averaging; also return the logits."""
    with torch.autocast(DEVICE.partition(":")[0], torch.bfloat16, enabled=mixed):
        output = model(**inputs, num_items_in_batch=torch.tensor(items))
    logits = output.logits.materialize() if isinstance(output.logits, LazyLogits) else output.logits
    output.loss.backward()
    gradients = {name.replace("base_layer.", ""): grad for name, grad in full_gradients(model).items()}
    found = {"loss": output.loss.detach(), **gradients}
    return found, logits.full_tensor() if isinstance(logits, DTensor) else logits.detach()


def run(engine: str, whole: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor, build = engine.startswith("tensor_parallel"), MODELS.get(engine, BUILD)
    rows = slice(None) if tensor else slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    inputs, items = {key: value[rows] for key, value in whole.items()}, int((whole["labels"][:, 1:] != -100).sum())
    if engine == "context_parallel":
        shifted = torch.nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
        whole = {"input_ids": whole["input_ids"], "labels": whole["labels"], "shift_labels": shifted}
        inputs = {key: value.chunk(world, dim=1)[rank].contiguous() for key, value in whole.items()}
    logits: dict[str, Tensor] = {}
    logits_loss_gradients: dict[str, Tensor] = {}  # gradients of a loss on the logits of a call without labels
    parameter_types: dict[str, dict[str, str]] = {}  # parameter types after an evaluation
    report: dict[str, Any] = {"warnings": [], "errors": {}, "twin": {}}
    options = OPTIONS
    if engine == "fsdp2_forward_between" and os.environ.get("TRITON_INTERPRET") == "1":
        options = {**OPTIONS, "implementation": "triton"}  # the portable one computes its gradients in the forward
    for name, patch in (("twin", lambda model: model), ("errors", partial(apply_cce, **options))):
        model = (ENGINES | FOUR_RANK_ENGINES)[engine](build().to(DEVICE), patch)

        def extra_forward(model: Any = model) -> None:
            if engine == "fsdp2_forward_between":
                with torch.no_grad():
                    model(input_ids=inputs["input_ids"])

        with cce_warnings() as messages:
            if tensor:
                found, logits[name] = unsplit_step(model, inputs, items, engine == "tensor_parallel_mixed")
            else:
                with torch.no_grad():
                    first, second = (model.eval()(**inputs).logits for _ in range(2))
                    logits[name] = first + 0.0  # read after another forward, once FSDP has gathered the head again
                    assert torch.equal(logits[name], second)
                model.train()
                if isinstance(model, FullyShardedDataParallel):  # ``step`` overwrites its parameters
                    model(**inputs, num_items_in_batch=torch.tensor(items)).loss.backward()
                    once = {}
                else:
                    once = {key: value.clone() for key, value in step(model, inputs, items, world).items()}
                model.zero_grad(set_to_none=True)  # the first step must not affect the second
                found = step(model, inputs, items, world, extra_forward)
                report["repeats"] = bool(once) and all(torch.equal(once[key], found[key]) for key in found)
                with torch.no_grad():
                    model.eval()(**inputs)
                parameter_types[name] = {key: type(value).__name__ for key, value in model.named_parameters()}
        report[name] = relative_errors(found, reference)
        if name == "errors":
            report["warnings"], report["stats"] = messages, counters(model)
        if not tensor:
            logits_loss_gradients[name] = gradients_of_loss_on_logits(model.train(), inputs)
            report["read after step"] = read_after_step(model, inputs)
    report["same parameters"] = parameter_types.get("twin") == parameter_types.get("errors")
    report["same logits"] = torch.equal(*logits.values())
    report["logits"] = relative_error(*logits.values())
    if logits_loss_gradients:
        report["without labels"] = relative_error(logits_loss_gradients["errors"], logits_loss_gradients["twin"])
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, report)
    report["repeats"] = all(each.get("repeats") for each in ranks)
    for key in report["errors"]:  # the worst over the ranks
        report["errors"][key] = max(each["errors"][key] for each in ranks)
    return report


def run_engines(engines: list[str], whole: dict[str, Tensor]) -> dict[str, Any]:
    inputs = {**whole, "num_items_in_batch": (whole["labels"][:, 1:] != -100).sum().cpu()}

    def compared(engine: str) -> dict[str, Any]:
        model = MODELS.get(engine, BUILD)().to(DEVICE)
        return run(engine, whole, loss_and_grads(float64_copy(model), inputs, double=True))

    return results_of(engines, compared)


def main(path: Path, device: str = "", dtype: str = "", *engines: str) -> None:
    global DEVICE, ROWS, BUILD
    torch.set_num_threads(4 if device == "cuda" else 1)
    if device == "cuda":
        DEVICE = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if engines:
        ROWS = 32
        BUILD = partial(large, getattr(torch, dtype))
        MODELS["tensor_parallel_plan"] = partial(BUILD, extra_entries=1)
        # Otherwise PyTorch would handle so few tokens; the filter's error is tested elsewhere
        OPTIONS.update(implementation="triton" if device == "cuda" else "auto", gradient_filter=None)
    vocab_size = BUILD().config.vocab_size
    whole = {key: value.to(DEVICE) for key, value in batch(rows=ROWS, vocab_size=vocab_size).items()}
    results = run_engines(list(engines or ENGINES), whole)
    if not engines:
        results["vocab_parallel"] = sharded_vocabulary_results()
    finish(path, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
