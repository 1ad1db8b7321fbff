"""Reinforcement learning with TRL's GRPO: log-probabilities and entropies of the policy without materialized logits.

Data: a folder, a file (.jsonl, .json, .parquet, .csv) or a dataset on the Hub with `prompt` (text or messages). Other columns
are passed to the reward. The reward below gives 1 if the completion contains the row's `answer`. For your own reward, pass
--reward my_module.function.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/grpo.py --output_dir out \\
        --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --dataset_name prompts.jsonl

All other flags are TRL's: --help lists them (--num_generations, --max_completion_length, --use_vllm, --use_peft, --beta),
--config FILE.yaml reads them. HF_CCE_DISABLE=1 runs the same training without hf_cce.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from hf_cce import CCECallback

FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class GRPOArguments(ScriptArguments):
    """TRL's script arguments, plus the reward."""

    reward: str | None = field(
        default=None, metadata={"help": "dotted name of a function; default: holds_answer, here"}
    )


def holds_answer(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for each completion that contains the answer of its row, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(str(wanted) in text) for text, wanted in zip(texts, answer, strict=True)]


def machine_defaults() -> dict[str, Any]:
    """Return device and precision: from `accelerate launch`, or else what this machine supports. TRL assumes bfloat16."""
    gpu = torch.accelerator.is_available()
    best = "fp16" if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0) else "bf16"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", best if gpu else "no")
    return {"use_cpu": not gpu, "fp16": precision == "fp16", "bf16": None if precision == "bf16" else False}


def read_data(script: GRPOArguments) -> Any:
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
        raise SystemExit(f"recipes/grpo.py takes prompt; {name} has {found}. Such rows are for recipes/{other}.")
    if script.reward is None and "answer" not in columns:
        raise SystemExit(
            f"The reward of recipes/grpo.py needs a column answer, which {name} lacks; name your own: --reward"
        )
    return data[split]


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    parser = TrlParser((GRPOArguments, GRPOConfig, ModelConfig))
    parser.set_defaults(dtype=None, **machine_defaults())
    script, training, model = parser.parse_args_and_config(arguments)
    if script.dataset_name is None:
        parser.error("--dataset_name is missing: a folder, a file or a dataset on the Hugging Face Hub")
    if model.dtype is None:  # frozen weights in half precision; trained weights in float32, under autocast
        half = "float16" if training.fp16 else "bfloat16"
        model.dtype = half if model.use_peft and (training.fp16 or training.bf16) else "float32"
    data, reward = read_data(script), holds_answer
    if script.reward is not None:
        module, _, name = script.reward.rpartition(".")
        sys.path.insert(0, os.getcwd())
        reward = getattr(importlib.import_module(module), name)

    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
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
