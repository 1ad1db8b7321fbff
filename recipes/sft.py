"""Supervised fine-tuning with TRL without materialized logits: full, LoRA or QLoRA, of text or image-text models.

Data: a folder, a file (.jsonl, .json, .parquet, .csv) or a dataset on the Hub with one of
    messages              chats; the tokenizer needs a chat template
    prompt, completion    the loss covers only the completion
    text                  plain text, one row each
and with `images` next to messages or prompt for an image-text model.

    accelerate launch --config_file recipes/accelerate/one_gpu.yaml recipes/sft.py --output_dir out \\
        --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --dataset_name trl-lib/Capybara

LoRA:   --use_peft --lora_target_modules all-linear        QLoRA (pip install bitsandbytes): add --load_in_4bit
To keep the input embedding on the CPU (the LM head must stay on the GPU): --model_init_kwargs
        '{"device_map": {"model.embed_tokens": "cpu", "model.layers": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}}'
Chats:  --assistant_only_loss        Speed: --packing       Evaluation: --eval_strategy steps, on the split test
Resume: --resume_from_checkpoint out/checkpoint-500        Logs: --report_to wandb        Hub: --push_to_hub
All flags are TRL's: --help lists them, --config FILE.yaml reads them. HF_CCE_DISABLE=1 trains the same without hf_cce.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

from hf_cce import CCECallback

FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def machine_defaults() -> dict[str, Any]:
    """Return device and precision: from `accelerate launch`, or else what this machine supports. TRL assumes bfloat16."""
    gpu = torch.accelerator.is_available()
    best = "fp16" if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0) else "bf16"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", best if gpu else "no")
    return {"use_cpu": not gpu, "fp16": precision == "fp16", "bf16": None if precision == "bf16" else False}


def read_data(script: ScriptArguments, splits: list[str], text_field: str) -> Any:
    """Return the data set's splits; exit with a message if they are missing or their rows belong to another recipe."""
    name = str(script.dataset_name)
    if (file := Path(name)).is_file() and file.suffix in FILES:
        data = load_dataset(FILES[file.suffix], data_files={"train": name}, streaming=script.dataset_streaming)
    else:
        data = load_dataset(name, script.dataset_config, streaming=script.dataset_streaming)
    if missing := [split for split in splits if split not in data]:
        raise SystemExit(f"--dataset_name {name} has the splits {', '.join(data)}, but not {', '.join(missing)}")
    columns = set(data[splits[0]].column_names or next(iter(data[splits[0]])))
    if columns & {"messages", "conversations", "input_ids", text_field} or columns >= {"prompt", "completion"}:
        return data
    if columns >= {"chosen", "rejected"}:
        other = "Preferences are for TRL's DPOTrainer with callbacks=[CCECallback()]"
    elif "prompt" in columns:
        other = "Prompts without completions are for recipes/grpo.py"
    else:
        other = "recipes/pretrain.py takes text in any column: --text_column"
    found = ", ".join(sorted(columns))
    raise SystemExit(
        f"recipes/sft.py takes messages, prompt + completion, or {text_field}; {name} has {found}. {other}."
    )


def main(arguments: list[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> SFTTrainer:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    parser.set_defaults(dtype=None, **machine_defaults())
    script, training, model = parser.parse_args_and_config(arguments)
    if script.dataset_name is None:
        parser.error("--dataset_name is missing: a folder, a file or a dataset on the Hugging Face Hub")
    if model.dtype is None:  # frozen weights in half precision; trained weights in float32, under autocast
        half = "float16" if training.fp16 else "bfloat16"
        model.dtype = half if model.use_peft and (training.fp16 or training.bf16) else "float32"
    evaluates = training.eval_strategy != "no"
    splits = [script.dataset_train_split] + [script.dataset_test_split] * evaluates
    data = read_data(script, splits, training.dataset_text_field)

    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }
    quantization = get_quantization_config(model)
    if quantization is not None:  # modules that a device_map puts on the CPU stay unquantized
        quantization.llm_int8_enable_fp32_cpu_offload = True
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=data[splits[0]],
        eval_dataset=data[splits[1]] if evaluates else None,
        quantization_config=quantization,
        peft_config=get_peft_config(model),
        callbacks=[CCECallback(), *callbacks],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    return trainer


if __name__ == "__main__":
    main()
