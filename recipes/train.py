"""Train a causal LM with CCE, or without to compare: pretraining from scratch, full fine-tuning, LoRA.

Starts as it is, or on any number of devices through accelerate:

    python recipes/train.py --task pretrain --steps 20
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py --task finetune --model NAME --dataset NAME

Without --model a small Llama is built, and without --dataset it learns Python's own sources: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_cce import CCECallback

TASKS = {
    "pretrain": "random weights, all of them trained (Trainer)",
    "finetune": "given weights, all of them trained (Trainer)",
    "lora": "given weights, adapters on all linear layers but the head (TRL's SFTTrainer, PEFT)",
}
LOSSES = {
    "cce": "hf_cce: no logits",
    "eager": "Transformers' own: full logits; with lora TRL's own, which makes them in chunks",
    "liger": "Liger's fused linear cross-entropy, its other kernels off; not with lora",
}
LEARNING_RATES = {"pretrain": 1e-3, "finetune": 2e-5, "lora": 2e-4}
ROWS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # files with a row an example; by datasets' builder
END_OF_TEXT = "<|endoftext|>"
CHARACTERS = 4_000_000  # of a text that are read


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``count`` stretches of ``sequence`` tokens, drawn from the text by ``seed``."""

    def __init__(self, tokens: torch.Tensor, count: int, sequence: int, seed: int) -> None:
        if len(tokens) <= sequence:
            raise ValueError(f"the text has only {len(tokens)} tokens, too few for --sequence {sequence}")
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.sequence = tokens, sequence
        self.starts = torch.randint(len(tokens) - sequence, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        ids = self.tokens[start : start + self.sequence]
        return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Meter(TrainerCallback):
    """Losses as they are logged, and the time from the end of the first step, in which all is warmed up, to the last."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
        control.should_log |= state.global_step == state.max_steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="pretrain", help=str(TASKS))
    parser.add_argument("--loss", choices=LOSSES, default="cce", help=str(LOSSES))
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help="on the hub or here; pretrain takes its configuration and "
                        "tokenizer only; default: a small Llama, random weights")  # fmt: skip
    parser.add_argument("--dataset", metavar="NAME_OR_PATH", help="text file, folder of text files, data set on the hub; with "
                        "lora a data set, .jsonl or .parquet goes to SFTTrainer row by row; default: Python's code")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a device and a micro-step")
    parser.add_argument("--sequence", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--gradient-accumulation", type=int, default=1, help="micro-steps a step")
    parser.add_argument("--learning-rate", type=float, help=f"default by task: {LEARNING_RATES}")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="autocast; also where accelerate's mixed_precision is bf16")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=16_384, help="of the small Llama, at most")
    parser.add_argument("--hidden", type=int, default=256, help="width of the small Llama, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="of the small Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--output", type=Path, help="save model and tokenizer here; default: nothing is kept")
    parser.add_argument("--json", type=Path, help="write the summary and all losses here")
    args = parser.parse_args(arguments)
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATES[args.task]
    return args


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises:
        ValueError: it cannot; the message says what to do.
    """
    if args.loss == "liger" and args.task == "lora":
        raise ValueError("--loss liger: TRL's SFTTrainer has a fused head of its own, which Liger's cannot replace")
    if args.loss == "liger" and (args.cpu or not torch.cuda.is_available() or find_spec("liger_kernel") is None):
        raise ValueError("--loss liger needs a GPU and the package liger-kernel: pip install liger-kernel")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and (args.cpu or not torch.accelerator.is_available()):
        raise ValueError(
            "FSDP needs GPUs: on CPUs accelerate would train as with DDP; use recipes/accelerate/cpu_ddp.yaml"
        )
    if args.task == "lora" and (find_spec("trl") is None or find_spec("peft") is None):
        raise ValueError("--task lora needs TRL and PEFT: pip install 'hf-cce[trl]'")
    if args.model is None and args.hidden % 64:
        raise ValueError(f"--hidden must be a multiple of 64 (the width of an attention head), got {args.hidden}")


def training_arguments(args: argparse.Namespace, folder: str, rows: bool) -> TrainingArguments:
    """Trainer's, or SFTTrainer's; made before the model, because from here on DeepSpeed partitions weights as they are made."""
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.gradient_accumulation,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": args.steps // 20,
        # accelerate's file and this must agree: DeepSpeed compares them.
        "bf16": args.bf16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",
        "logging_steps": max(1, args.steps // 20),
        "logging_first_step": True,
        "ddp_find_unused_parameters": False,
        "save_strategy": "no",
        "report_to": [],
        "seed": args.seed,
        # Without a GPU accelerate has to be told, or each process of a distributed run would train alone.
        "use_cpu": args.cpu or not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available() and not args.cpu,
    }
    if args.gradient_checkpointing or args.task == "lora":  # SFTConfig has it on by default
        options["gradient_checkpointing"] = args.gradient_checkpointing
    if args.gradient_checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if args.loss == "liger":
        kernels = {**dict.fromkeys(("rope", "rms_norm", "swiglu"), False), "fused_linear_cross_entropy": True}
        options |= {"use_liger_kernel": True, "liger_kernel_config": kernels}
    if args.task != "lora":
        return TrainingArguments(**options)
    from trl import SFTConfig

    prepared = {} if rows else {"dataset_kwargs": {"skip_prepare_dataset": True}}
    return SFTConfig(**options, max_length=args.sequence, **prepared)


def wants_rows(args: argparse.Namespace) -> bool:
    """Whether the data are examples (messages, prompts with completions, texts) for SFTTrainer, and not one long text."""
    if args.task != "lora" or args.dataset is None:
        return False
    path = Path(args.dataset)
    return path.suffix in ROWS if path.exists() else True


def read_text(args: argparse.Namespace) -> str:
    """The first characters of Python's sources, of a file, of a folder's text files, or of a data set's column "text"."""
    path = Path(args.dataset or sysconfig.get_path("stdlib"))
    if path.is_file():
        return path.read_text("utf-8")[:CHARACTERS]
    if path.is_dir():
        kinds = {".py"} if args.dataset is None else {".txt", ".md", ".py", ".rst"}
        files = sorted(file for file in path.rglob("*") if file.suffix in kinds and "site-packages" not in file.parts)
        random.Random(0).shuffle(files)
        parts, left = [], CHARACTERS
        for file in files if left > 0 else ():
            parts.append(file.read_text("utf-8", errors="ignore")[: max(0, left)])
            left -= len(parts[-1])
        return "".join(parts)
    if path.suffix or args.dataset.startswith((".", "/", "~")):
        raise ValueError(f"--dataset {args.dataset}: no such file or folder")
    from datasets import load_dataset

    return "\n".join(load_dataset(args.dataset, split="train")["text"])[:CHARACTERS]


def read_data(args: argparse.Namespace, count: int) -> tuple[Any, Any]:
    """Examples, or ``count`` windows of the text; and the tokenizer."""
    rows = wants_rows(args)
    text = "" if rows and args.model else read_text(argparse.Namespace(dataset=None) if rows else args)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(
            [text], vocab_size=args.vocabulary, special_tokens=[END_OF_TEXT], show_progress=False
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=trained._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
        )
    if not rows:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        windows = Windows(ids, count, args.sequence, args.seed)
        if args.task != "lora":
            return windows, tokenizer
        from datasets import Dataset

        return Dataset.from_list(
            [{name: x.tolist() for name, x in windows[i].items()} for i in range(len(windows))]
        ), tokenizer
    from datasets import load_dataset

    path = Path(args.dataset)
    if path.exists():
        return load_dataset(ROWS[path.suffix], data_files=str(path), split="train"), tokenizer
    return load_dataset(args.dataset, split="train"), tokenizer


def build_model(args: argparse.Namespace) -> Any:
    """Weights in float32: autocast, FSDP2 and ZeRO-3 compute in bfloat16 from these."""
    set_seed(args.seed)
    if args.model is None:
        heads = args.hidden // 64
        config = LlamaConfig(
            vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers, num_attention_heads=heads, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    if args.task == "pretrain":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)


def build_trainer(args: argparse.Namespace, given: Any, data: Any, tokenizer: Any, meter: Meter) -> Trainer:
    """The Trainer for the task with the loss wanted."""
    callbacks: list[TrainerCallback] = [meter]
    if args.loss == "cce":
        # Without "raise", a run without the fused loss would be a comparison of full logits with full logits.
        callbacks.append(CCECallback(on_unused="raise"))
    options = dict(
        model=build_model(args), args=given, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
    )
    if args.task != "lora":
        # Windows have one length; the default collator would want a token to pad them with.
        return Trainer(data_collator=default_data_collator, **options)
    from peft import LoraConfig
    from trl import SFTTrainer

    rank = args.lora_rank
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(peft_config=adapters, **options)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, save where asked to, and tell: ready for JSON, the same on every process."""
    rows = wants_rows(args)
    with ExitStack() as stack:
        folder = str(args.output or stack.enter_context(tempfile.TemporaryDirectory()))
        given = training_arguments(args, folder, rows)
        sequences = given.train_batch_size * args.gradient_accumulation * given.world_size
        data, tokenizer = read_data(args, sequences * args.steps)
        meter = Meter()
        trainer = build_trainer(args, given, data, tokenizer, meter)
        trainer.train()
        if args.output is not None:
            trainer.save_model(folder)
    model: Any = trainer.model
    seconds = (
        (meter.times[-1] - meter.times[1]) / (args.steps - 1) if args.steps > 1 else meter.times[1] - meter.times[0]
    )
    gpu = given.device.type == "cuda"
    return {
        "task": args.task,
        "loss": args.loss,
        "device": torch.cuda.get_device_name() if gpu else given.device.type,
        "processes": given.world_size,
        "distributed": trainer.accelerator.distributed_type.value,
        "mixed_precision": trainer.accelerator.mixed_precision,
        "steps": trainer.state.global_step,
        "tokens_per_second": None if rows else sequences * args.sequence / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "first_loss": meter.losses[0][1],
        "final_loss": meter.losses[-1][1],
        "losses": meter.losses,
        "cce": model.cce_stats() if args.loss == "cce" else None,
    }


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    main_process = os.environ.get("RANK", "0") == "0"
    try:
        check(args)
        report = train(args)
    except (ValueError, OSError) as error:
        if main_process:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if main_process:
        for name, value in report.items():
            if name != "losses":
                print(f"{name}: {value}")
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
