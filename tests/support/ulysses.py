"""One step under DeepSpeed's sequence parallelism (Ulysses), as set up by accelerate and called by Trainer; for test_zero.py.

usage: torchrun --nproc-per-node 2 tests/support/ulysses.py OUT.json STAGE

DeepSpeed can set this up only once per process, so the same model is run first unpatched, then patched.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from deepspeed.utils import safe_get_full_grad
from models import LENGTH, batch, float64_copy, loss_and_grads, tiny_llama
from processes import counters, finish, relative_errors
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
from zero import FREE_AT_ONCE, skip_shared_memory_extension

from hf_cce import apply_cce


def step(accelerator: Any, engine: Any, part: dict[str, Tensor], ways: Any) -> dict[str, Tensor]:
    loss = deepspeed_sp_compute_loss(accelerator, engine, dict(part), False, ways)
    engine.backward(loss)
    named = accelerator.unwrap_model(engine).named_parameters()
    found = {"loss": loss.detach()} | {name: safe_get_full_grad(parameter).clone() for name, parameter in named}
    engine.step()
    return found


def main(path: Path, stage: int) -> None:
    torch.set_num_threads(1)
    skip_shared_memory_extension()
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    ways = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    config = {"zero_optimization": {"stage": stage, **FREE_AT_ONCE}, "gradient_clipping": 0.0}
    config |= {
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(parallelism_config=ways, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    folder = path.parent / "saved"
    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(folder)
    dist.barrier()
    inputs = batch(rows=1, ignored=False)
    inputs["labels"][:, :5] = -100
    inputs["position_ids"] = torch.arange(LENGTH)[None]
    reference = loss_and_grads(float64_copy(tiny_llama()), inputs, double=True)
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    loader = torch.utils.data.DataLoader([{key: value[0] for key, value in inputs.items()}], batch_size=1)
    engine, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    part = next(iter(loader))  # splits the sequence, after shifting the labels
    assert part["input_ids"].shape[1] == part["shift_labels"].shape[1] == LENGTH // 2 and "labels" not in part
    twin = step(accelerator, engine, part, ways)
    apply_cce(engine)
    actual = step(accelerator, engine, part, ways)
    # DeepSpeed averages over fewer ranks
    times = round(float(twin["lm_head.weight"].norm() / reference["lm_head.weight"].norm()))
    expected = {name: value if name == "loss" else times * value for name, value in reference.items()}
    errors, of_twin = (relative_errors(found, expected) for found in (actual, twin))
    finish(path, {"errors": errors, "twin": of_twin, "stats": counters(model)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
