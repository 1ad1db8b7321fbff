"""Pretraining with Trainer on streamed text, without full logits: from random weights, or with --continued from trained ones.

Data: a folder, a file (.jsonl, .json, .parquet, .csv, .txt) or a dataset on the Hub with a text column. It is streamed during
training, shuffled within a buffer, and cut into sequences of equal length; documents are joined by the end-of-text token.

    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/pretrain.py --output_dir out --max_steps 1000 \\
        --model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name HuggingFaceFW/fineweb-edu --dataset_config sample-10BT

Resume: --resume_from_checkpoint out/checkpoint-500        Evaluation: --eval_strategy steps, on the split validation
All other flags are those of transformers.TrainingArguments; --help lists them. HF_CCE_DISABLE=1 trains the same without hf_cce.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_cce import CCECallback

FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass
class PretrainArguments:
    """Model and data arguments."""

    model_name_or_path: str = field(
        metadata={"help": "configuration and tokenizer; a folder or a name on the Hugging Face Hub"}
    )
    dataset_name: str = field(metadata={"help": "a folder, a file or a dataset on the Hugging Face Hub"})
    dataset_config: str | None = field(default=None, metadata={"help": "which configuration of the data set"})
    train_split: str = field(default="train", metadata={"help": "the split that is trained on"})
    validation_split: str = field(default="validation", metadata={"help": "the split that --eval_strategy reads"})
    text_column: str = field(default="text", metadata={"help": "the column that holds the text"})
    sequence_length: int = field(default=2048, metadata={"help": "tokens of a sequence"})
    shuffle_buffer: int = field(default=10_000, metadata={"help": "documents among which the next one is drawn"})
    continued: bool = field(default=False, metadata={"help": "start from the model's weights, not from random ones"})
    attn_implementation: str | None = field(default=None, metadata={"help": "for example flash_attention_2"})


def machine_defaults() -> dict[str, Any]:
    """Return device and precision: from `accelerate launch`, or else what this machine supports."""
    gpu = torch.accelerator.is_available()
    best = "fp16" if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0) else "bf16"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", best if gpu else "no")
    return {"use_cpu": not gpu, "fp16": precision == "fp16", "bf16": precision == "bf16"}


def read_stream(args: PretrainArguments, split: str) -> Any:
    """Return the documents of a split; exit with a message if it is missing or its rows belong to another recipe."""
    name = args.dataset_name
    if (file := Path(name)).is_file() and file.suffix in FILES:
        whole = {"sample_by": "document"} if file.suffix == ".txt" else {}
        data = load_dataset(FILES[file.suffix], data_files={"train": name}, streaming=True, **whole)
    else:
        data = load_dataset(name, args.dataset_config, streaming=True)
    if split not in data:
        raise SystemExit(f"--dataset_name {name} has the splits {', '.join(data)}, but not {split}")
    columns = data[split].column_names or list(next(iter(data[split])))
    if args.text_column not in columns:
        rows = {"messages", "conversations", "prompt", "completion"} & set(columns)
        other = "Such rows are for recipes/sft.py" if rows else "Name the column of the text: --text_column"
        raise SystemExit(
            f"recipes/pretrain.py takes {args.text_column}; {name} has {', '.join(sorted(columns))}. {other}."
        )
    return data[split].select_columns(args.text_column)


def sequences(stream: Any, tokenizer: Any, args: PretrainArguments) -> Any:
    """Cut the stream's documents into sequences of equal length, dropping the remainder of every 1,000 documents."""

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = tokenizer(rows[args.text_column], add_special_tokens=False)["input_ids"]
        tokens = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in documents))
        length = args.sequence_length
        made = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": made, "labels": made}

    return stream.map(cut, batched=True, remove_columns=[args.text_column])


def main(arguments: list[str] | None = None) -> Trainer:
    kinds: Any = (PretrainArguments, TrainingArguments)  # Any: HfArgumentParser's annotation excludes dataclasses
    parser = HfArgumentParser(kinds)
    parser.set_defaults(max_steps=1000, **machine_defaults())
    args, training = parser.parse_args_into_dataclasses(arguments)
    documents = read_stream(args, args.train_split).shuffle(seed=training.seed, buffer_size=args.shuffle_buffer)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    if tokenizer.eos_token_id is None:
        raise SystemExit(f"--model_name_or_path {args.model_name_or_path}: its tokenizer has no end-of-text token")
    evaluates = training.eval_strategy != "no"

    torch.manual_seed(training.seed)
    how = {
        "dtype": torch.float32,
        "attn_implementation": args.attn_implementation,
    }  # autocast computes in half precision
    if args.continued:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **how)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_name_or_path), **how)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=sequences(documents, tokenizer, args),
        eval_dataset=sequences(read_stream(args, args.validation_split), tokenizer, args) if evaluates else None,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[CCECallback()],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
