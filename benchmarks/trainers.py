"""The steps of ``benchmarks.onestep`` driven by Transformers' Trainer or TRL's SFTTrainer, as their users start them.

The data are rows of token ids that are ready, so that nothing but training is timed; losses are put in as by a user: hf_cce by
its callback, the others into the model.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch

from benchmarks.installed import Missing, install
from benchmarks.job import Job, Marks, token_ids
from hf_cce import CCECallback, CCEConfig

LOOPS = ("plain", "trainer", "sft")
OURS = {"hf_cce": CCEConfig(), "hf_cce-exact": CCEConfig(gradient_filter=None)}
LIGER_IN_TRAINER = "SFTConfig(use_liger_kernel=True)"


def _callback(job: Job, device: torch.device, before_timing: Any) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """A mark at the begin of each timed step, and at the end of the last."""

        def __init__(self) -> None:
            self.marks = Marks(device)
            self.losses: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.warmup:
                before_timing()
            if state.global_step >= job.warmup:
                self.marks.mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.warmup + job.steps:
                self.marks.mark()

    return Clock()


def train(job: Job, model: Any, before_timing: Any) -> tuple[list[float], list[float], str]:
    """Train ``model`` for all steps of ``job``.

    Returns:
        (milliseconds of each timed step, mean loss of all steps in a list of one, what was done, in words).

    Raises:
        Missing: TRL is not installed, or the loss cannot be put into this trainer.
    """
    device = torch.device(job.device)
    clock = _callback(job, device, before_timing)
    callbacks: list[Any] = [clock]
    if job.loss in OURS:
        callbacks.append(CCECallback(OURS[job.loss], on_unused="raise"))
        done = f"CCECallback({OURS[job.loss]})"
    else:
        done = install(model, job.loss) if job.loop == "trainer" or job.loss != "liger" else LIGER_IN_TRAINER
    loss = run(job, model, callbacks)
    return clock.marks.milliseconds(), [loss], done


def run(job: Job, model: Any, callbacks: list[Any]) -> float:
    """Train ``model`` for all steps of ``job`` in its loop, with ``callbacks``; the mean loss.

    Raises:
        Missing: TRL is not installed.
    """
    from transformers import Trainer, TrainingArguments

    device = torch.device(job.device)
    rows = torch.from_numpy(token_ids(job)).flatten(0, 1).long()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder, "max_steps": job.warmup + job.steps, "per_device_train_batch_size": job.batch,
            "learning_rate": job.learning_rate, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "report_to": [],
            "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0, "seed": job.seed,
            "weight_decay": 0.01, "gradient_checkpointing": job.gradient_checkpointing, "use_cpu": device.type == "cpu",
            "bf16": False, "dataloader_num_workers": 0,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if job.loop == "trainer":
                trainer: Any = Trainer(
                    model=model, args=TrainingArguments(**options), callbacks=callbacks,
                    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                )  # fmt: skip
            else:
                trainer = _sft(job, model, options, rows, callbacks)
        # In the order given, as the plain loop takes them.
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        return float(trainer.train().training_loss)


def _sft(job: Job, model: Any, options: dict[str, Any], rows: torch.Tensor, callbacks: list[Any]) -> Any:
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        raise Missing(f"{type(error).__name__}: {error}") from error
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    ends = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(job.tokenizer_file), eos_token=ends, pad_token=ends
    )
    args = trl.SFTConfig(
        **options,
        max_length=job.sequence,
        dataset_kwargs={"skip_prepare_dataset": True},
        use_liger_kernel=job.loss == "liger",
    )
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}), processing_class=tokenizer,
        callbacks=callbacks,
    )  # fmt: skip
