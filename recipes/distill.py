"""Distillation with TRL's DistillationTrainer: the student generates answers and learns the teacher's distributions for them.

Data: a folder, a file (.jsonl, .json, .parquet, .csv) or a dataset on the Hub with `prompt` (text or messages). Student and
teacher need the same tokenizer; their hidden sizes may differ.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/distill.py --output_dir out \\
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --teacher_model_name_or_path Qwen/Qwen2.5-1.5B-Instruct \\
        --dataset_name prompts.jsonl --beta 0.0

--beta 0 is the forward KL, 1 the reverse KL, values between them the generalized Jensen-Shannon divergence. All other flags are
TRL's: --help lists them (--temperature, --max_completion_length, --use_vllm, --use_peft), --config FILE.yaml reads them.
HF_CCE_DISABLE=1 runs the same training without hf_cce. For your own training loop, use `hf_cce.linear_divergence`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from trl import (
    DistillationConfig,
    DistillationTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from hf_cce import CCECallback

FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def machine_defaults() -> dict[str, Any]:
    """Return device and precision: from `accelerate launch`, or else what this machine supports. TRL assumes bfloat16."""
    gpu = torch.accelerator.is_available()
    best = "fp16" if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0) else "bf16"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", best if gpu else "no")
    return {"use_cpu": not gpu, "fp16": precision == "fp16", "bf16": None if precision == "bf16" else False}


def read_data(script: ScriptArguments) -> Any:
    """Return the training split; exit with a message if its rows belong to another recipe."""
    name, split = str(script.dataset_name), script.dataset_train_split
    if (file := Path(name)).is_file() and file.suffix in FILES:
        data = load_dataset(FILES[file.suffix], data_files={"train": name})
    else:
        data = load_dataset(name, script.dataset_config)
    if split not in data:
        raise SystemExit(f"--dataset_name {name} has the splits {', '.join(data)}, but not {split}")
    columns = data[split].column_names
    if "prompt" not in columns:
        other = "pretrain.py" if columns == ["text"] else "sft.py"
        found = ", ".join(sorted(columns))
        raise SystemExit(f"recipes/distill.py takes prompt; {name} has {found}. Such rows are for recipes/{other}.")
    return data[split]


def main(arguments: list[str] | None = None) -> DistillationTrainer:
    parser = TrlParser((ScriptArguments, DistillationConfig, ModelConfig))
    parser.set_defaults(dtype=None, **machine_defaults())
    script, training, model = parser.parse_args_and_config(arguments)
    if script.dataset_name is None:
        parser.error("--dataset_name is missing: a folder, a file or a dataset on the Hugging Face Hub")
    if training.teacher_model_name_or_path is None:
        parser.error("--teacher_model_name_or_path is missing: a folder or a name on the Hugging Face Hub")
    half = "float16" if training.fp16 else "bfloat16"
    mixed = training.fp16 or training.bf16
    if model.dtype is None:  # frozen weights in half precision; trained weights in float32, under autocast
        model.dtype = half if model.use_peft and mixed else "float32"
    data = read_data(script)

    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }
    training.teacher_model_init_kwargs = {
        "attn_implementation": model.attn_implementation,
        "dtype": half if mixed else "float32",
        **(training.teacher_model_init_kwargs or {}),
    }
    trainer = DistillationTrainer(
        model=model.model_name_or_path,
        teacher_model=training.teacher_model_name_or_path,
        args=training,
        train_dataset=data,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        callbacks=[CCECallback()],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    return trainer


if __name__ == "__main__":
    main()
