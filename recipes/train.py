"""Train a causal LM with CCE, or without to compare: pretraining from scratch, full fine-tuning, LoRA.

Starts as it is, or on any number of devices through accelerate:

    python recipes/train.py --task pretrain --steps 20
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py --task finetune --model NAME --dataset NAME

Without --model a small Llama is built, and without --dataset it learns Python's own sources: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_cce import CCECallback
from hf_cce.bench import installed, machine, memory
from hf_cce.bench.files import write_json
from hf_cce.bench.text import END_OF_TEXT, MAX_CHARACTERS, Corpus, prepare
from hf_cce.bench.training import Settings, fresh_model

TINY = "tiny"
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


class Windows(Dataset[dict[str, torch.Tensor]]):
    """``count`` stretches of ``sequence`` tokens, drawn from the text by ``seed``; read when asked for, never all in memory."""

    def __init__(self, corpus: Corpus, count: int, sequence: int, seed: int) -> None:
        self.tokens, self.sequence = np.load(corpus.tokens_file, mmap_mode="r"), sequence
        if len(self.tokens) <= sequence:
            raise ValueError(f"the text has only {len(self.tokens)} tokens; --sequence {sequence} needs more of it")
        self.starts = np.random.default_rng(seed).integers(len(self.tokens) - sequence, size=count)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]  # past the end: IndexError, which ends a loop over the set
        ids = torch.from_numpy(self.tokens[start : start + self.sequence].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def as_dataset(self) -> Any:
        """The same as a data set of datasets, which SFTTrainer insists on; still read when asked for."""
        from datasets import Dataset as Rows

        def read(lot: dict[str, list[int]]) -> dict[str, list[list[int]]]:
            windows = [self[index] for index in lot["index"]]
            return {name: [window[name].tolist() for window in windows] for name in ("input_ids", "labels")}

        return Rows.from_dict({"index": list(range(len(self)))}).with_transform(read)


@dataclass
class Meter(TrainerCallback):
    """Losses as they are logged, and the time from the end of the first step, in which all is warmed up, to the last."""

    device: torch.device
    losses: list[tuple[int, float]] = field(default_factory=list)
    began: float = 0.0
    before: int = 0  # bytes in use when training began
    first: tuple[float, int] = (0.0, 0)  # when the first step ended, and the tokens seen until then
    last: tuple[float, int] = (0.0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory.reset_peak(self.device)  # what the tokenizer's training took is not meant
        self.before = memory.in_use(self.device)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            machine.synchronize(self.device)
            self.last = time.perf_counter(), state.num_input_tokens_seen
            self.first = self.last if state.global_step == 1 else self.first
        control.should_log |= state.global_step == state.max_steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meaning = "; ".join(f"{name}: {text}" for name, text in TASKS.items())
    parser.add_argument("--task", choices=TASKS, default="pretrain", help=meaning)
    meaning = "; ".join(f"{name}: {text}" for name, text in LOSSES.items())
    parser.add_argument("--loss", choices=LOSSES, default="cce", help=meaning)
    parser.add_argument("--model", default=TINY, metavar="NAME_OR_FOLDER", help="on the hub or here; pretrain takes its "
                        "configuration and tokenizer only; default: a small Llama, random weights")  # fmt: skip
    parser.add_argument("--dataset", metavar="NAME_OR_PATH", help="text file, folder of text files, data set on the hub; with "
                        "lora a data set, .jsonl or .parquet goes to SFTTrainer row by row; default: Python's code")  # fmt: skip
    parser.add_argument("--characters", type=_positive, help=f"of the text to use at most; default: {MAX_CHARACTERS:,}, "
                        "and for the small Llama as many as its tokenizer needs")  # fmt: skip
    parser.add_argument("--steps", type=_positive, default=20)
    parser.add_argument("--batch", type=_positive, default=4, help="sequences a device and a micro-step")
    parser.add_argument("--sequence", type=_positive, default=512, help="tokens a sequence")
    parser.add_argument("--gradient-accumulation", type=_positive, default=1, help="micro-steps a step")
    parser.add_argument("--learning-rate", type=float, help=f"default by task: {LEARNING_RATES}")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; also on where accelerate's mixed_precision is bf16"
    )
    parser.add_argument("--lora-rank", type=_positive, default=16)
    parser.add_argument("--vocabulary", type=_positive, default=16_384, help="of the small Llama, at most")
    parser.add_argument("--hidden", type=_positive, default=256, help="width of the small Llama, a multiple of 64")
    parser.add_argument("--layers", type=_positive, default=4, help="of the small Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--output", type=Path, help="save model and tokenizer here; default: nothing is kept")
    parser.add_argument("--json", type=Path, help="write the summary and all losses here")
    args = parser.parse_args(arguments)
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATES[args.task]
    return args


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises:
        ValueError: it cannot; the message says what to do.
    """
    versions = machine.versions("liger-kernel", "trl", "peft")
    if args.loss == "liger" and args.task == "lora":
        raise ValueError(
            "--loss liger: TRL's SFTTrainer has a fused head of its own, which Liger's loss cannot replace"
        )
    if args.loss == "liger" and versions["liger-kernel"] is None:
        raise ValueError("--loss liger needs the package liger-kernel: pip install liger-kernel")
    if args.loss == "liger" and (args.cpu or not torch.cuda.is_available()):
        raise ValueError("--loss liger needs a GPU: its kernels are Triton's")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and (args.cpu or not torch.accelerator.is_available()):
        raise ValueError(
            "FSDP needs GPUs: on CPUs accelerate would train as with DDP; take recipes/accelerate/cpu_ddp.yaml"
        )
    for package in ("trl", "peft"):
        if args.task == "lora" and versions[package] is None:
            raise ValueError(f"--task lora needs the package {package}: pip install 'hf-cce[trl]'")
    if args.json is not None and args.json.is_dir():
        raise ValueError(f"--json {args.json}: that is a folder; name a file in it")
    if args.model == TINY and args.hidden % 64:
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
        # Both ways must say the same: DeepSpeed compares them.
        "bf16": args.bf16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",
        "logging_steps": max(1, args.steps // 20),
        "logging_first_step": True,
        "include_num_input_tokens_seen": "non_padding" if rows else "no",
        "ddp_find_unused_parameters": False,
        "save_strategy": "no",
        "report_to": [],
        "seed": args.seed,
        # Without a GPU accelerate has to be told, or each process of a distributed run would train alone.
        "use_cpu": args.cpu or not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available() and not args.cpu,
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    if args.gradient_checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    elif (
        args.task != "lora"
    ):  # SFTConfig has it on by default; Transformers 5.23 warns of the name whenever it is given
        del options["gradient_checkpointing"]
    if args.task != "lora":
        return TrainingArguments(**options)
    from trl import SFTConfig

    prepared = {} if rows else {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    return SFTConfig(**options, max_length=args.sequence, **prepared)


def wants_rows(args: argparse.Namespace) -> bool:
    """Whether the data are examples (messages, prompts with completions, texts) for SFTTrainer, and not one long text."""
    if args.task != "lora" or args.dataset is None:
        return False
    path = Path(args.dataset)
    return path.suffix in ROWS if path.exists() else True


def read_rows(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The data set for SFTTrainer, and what it is, for the record."""
    from datasets import load_dataset

    path = Path(args.dataset)
    if path.exists():
        data = load_dataset(ROWS[path.suffix], data_files=str(path), split="train")
    else:
        data = load_dataset(args.dataset, split="train")
    return data, {"source": args.dataset, "rows": len(data), "columns": data.column_names}


def read_text(args: argparse.Namespace, dataset: str | None, say: Any) -> Corpus:
    """The text as tokens of the model's tokenizer, or of one that is trained on it for the small Llama."""
    tiny = args.model == TINY
    enough = max(4_000_000, 640 * args.vocabulary) if tiny else MAX_CHARACTERS
    model, characters = None if tiny else args.model, args.characters or enough
    return prepare(args.vocabulary, dataset=dataset, model=model, characters=characters, say=say)


def read_data(args: argparse.Namespace, count: int, say: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Examples, or ``count`` windows of the text; the tokenizer; and what the data are, for the record."""
    if wants_rows(args):
        data, told = read_rows(args)
        corpus = read_text(args, None, say) if args.model == TINY else None  # for its tokenizer
    else:
        corpus = read_text(args, args.dataset, say)
        data = Windows(corpus, count, args.sequence, args.seed)
        told = {"source": corpus.source, "tokens": corpus.tokens, "tokenizer_entries": corpus.entries}
    if args.model != TINY:
        return data, AutoTokenizer.from_pretrained(args.model), told
    assert corpus is not None
    return data, PreTrainedTokenizerFast(tokenizer_file=str(corpus.tokenizer_file), eos_token=END_OF_TEXT), told


def build_model(args: argparse.Namespace) -> Any:
    """Weights in float32: autocast, FSDP2 and ZeRO-3 compute in bfloat16 from these."""
    set_seed(args.seed)
    if args.model == TINY:
        return fresh_model(Settings("", "", vocabulary=args.vocabulary, hidden=args.hidden, layers=args.layers))
    if args.task == "pretrain":
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)


def build_trainer(
    args: argparse.Namespace, given: TrainingArguments, data: Any, tokenizer: Any, meter: Meter
) -> tuple[Trainer, str]:
    """The Trainer for the task with the loss wanted, and how the loss is computed, in words."""
    model = build_model(args)
    words = model.get_input_embeddings().num_embeddings
    if isinstance(data, Windows) and (most := int(data.tokens.max())) >= words:
        raise ValueError(
            f"--model {args.model}: its tokenizer makes tokens up to {most:,}, and the model has embeddings for {words:,}; "
            "they do not belong together"
        )
    callbacks: list[TrainerCallback] = [meter]
    how = LOSSES[args.loss]
    if args.loss == "cce":
        # A run without the fused loss would be a comparison of eager with eager.
        callback = CCECallback(on_unused="raise")
        callbacks.append(callback)
        how = f"hf_cce, by CCECallback: {callback.config}"
    elif args.loss == "liger":
        how = installed.install(model, "liger")
    if args.task != "lora":
        how = "model.loss_function: full logits" if args.loss == "eager" else how
        # Windows are of one length: Trainer's own collator for a tokenizer would want a token to pad them with.
        trainer = Trainer(
            model=model, args=given, train_dataset=data, data_collator=default_data_collator, processing_class=tokenizer,
            callbacks=callbacks,
        )  # fmt: skip
        return trainer, how
    from peft import LoraConfig
    from trl import SFTTrainer

    how = "TRL's own fused head: logits in chunks" if args.loss == "eager" else how
    adapter = LoraConfig(
        task_type="CAUSAL_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
    )
    if isinstance(data, Windows):
        data = data.as_dataset()
    trainer = SFTTrainer(
        model=model, args=given, train_dataset=data, processing_class=tokenizer, peft_config=adapter, callbacks=callbacks
    )  # fmt: skip
    return trainer, how


def train(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Train, save where asked to, and tell: ready for JSON, the same on every process."""
    rows = wants_rows(args)
    with ExitStack() as stack:
        folder = str(args.output or stack.enter_context(tempfile.TemporaryDirectory()))
        given = training_arguments(args, folder, rows)
        device, processes = given.device, given.world_size
        tokens_a_step = given.train_batch_size * args.sequence * args.gradient_accumulation * processes
        with given.main_process_first(desc="text and tokenizer"):  # the others find both in the cache
            data, tokenizer, told = read_data(args, tokens_a_step // args.sequence * args.steps, say)
        meter = Meter(device)
        trainer, how = build_trainer(args, given, data, tokenizer, meter)
        say(f"{args.task}, {args.loss}: {how}")
        trainer.train()
        used = torch.tensor([[memory.peak(device), meter.before]], device=device)
        peaks, before = trainer.accelerator.gather(used).T.tolist()
        if args.output is not None:
            trainer.save_model(folder)
    seconds, tokens = (b - a for a, b in zip(meter.first, meter.last, strict=True))
    if args.steps == 1:  # all there is, warm-up included
        seconds, tokens = meter.last[0] - meter.began, meter.last[1]
    tokens = tokens if rows else tokens_a_step * max(1, args.steps - 1)
    model: Any = trainer.model
    text_config = model.config.get_text_config()
    return {
        "command": shlex.join(["recipes/train.py", *sys.argv[1:]]),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "task": args.task,
        "loss": args.loss,
        "how": how,
        "model": {
            "class": type(trainer.accelerator.unwrap_model(model)).__name__,
            "vocabulary": text_config.vocab_size,
            "hidden": text_config.hidden_size,
            "layers": text_config.num_hidden_layers,
        },
        "data": told,
        "device": machine.device_name(device),
        "device_type": device.type,
        "processes": processes,
        "distributed": trainer.accelerator.distributed_type.value,
        "mixed_precision": trainer.accelerator.mixed_precision,
        "versions": machine.versions("torch", "transformers", "accelerate", "trl", "peft", "triton", "deepspeed", "hf-cce"),
        "steps": trainer.state.global_step,
        "tokens_a_step": None if rows else tokens_a_step,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": max(peaks),
        "peak_bytes_by_process": peaks,
        "bytes_before_by_process": before,
        "logged_every": given.logging_steps,
        "first_loss": meter.losses[0][1],
        "final_loss": meter.losses[-1][1],
        "losses": meter.losses,
        "cce": model.cce_stats() if args.loss == "cce" else None,
    }  # fmt: skip


def show(report: dict[str, Any], console: Console) -> None:
    """The summary, as a table."""
    table = Table(title=f"{report['task']} with loss {report['loss']}", title_justify="left", show_header=False)
    what = "GPU, allocated" if report["device_type"] == "cuda" else "process"
    peak = max(range(report["processes"]), key=report["peak_bytes_by_process"].__getitem__)
    above = (report["peak_bytes"] - report["bytes_before_by_process"][peak]) / 2**20
    every = "" if report["processes"] == 1 else f", largest of {report['processes']} processes"
    last = "" if report["logged_every"] == 1 else f" (mean of the last {report['logged_every']} steps or fewer)"
    alone = report["processes"] == 1  # accelerate's own word for that is NO
    spread = "1 process" if alone else f"{report['processes']} processes ({report['distributed']})"
    for name, value in {
        "loss": report["how"],
        "device": f"{report['device']}; {spread}, {report['mixed_precision']} mixed precision",
        "steps": f"{report['steps']:,}",
        "tokens/s": f"{report['tokens_per_second']:,.0f}",
        "peak memory": f"{report['peak_bytes'] / 2**20:,.0f} MiB ({what}{every}); {above:,.0f} above the start",
        "first loss": f"{report['first_loss']:.6f}",
        "final loss": f"{report['final_loss']:.6f}{last}",
    }.items():
        table.add_row(name, value)
    if (cce := report["cce"]) is not None:
        few = f"; {cce['few_tokens']:,.0f} left to the model: few tokens" if cce["few_tokens"] else ""
        table.add_row("cce", f"{cce['fused']:,.0f} of {cce['calls']:,.0f} losses of a process without logits{few}")
    console.print(table, markup=False)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    main_process = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not main_process, highlight=False, soft_wrap=True)
    try:
        check(args)
        report = train(args, lambda message: console.print(message, markup=False))
    except (ValueError, OSError, installed.Missing) as error:
        if main_process:
            print(f"error: {error}", file=sys.stderr)
        return 2
    show(report, console)
    if args.json is not None and main_process:
        write_json(args.json, report)
        console.print(f"Numbers: {args.json}", markup=False)
    if not math.isfinite(report["final_loss"]):
        print(f"error: the loss became {report['final_loss']}; try a smaller --learning-rate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
