"""Training steps of ``benchmarks.onestep`` driven by Transformers' Trainer or TRL's SFTTrainer, as users run them.

The data are pre-tokenized rows, so that only training is timed. hf_cce is installed by its callback, the other losses into the
model. The loop "recipe" runs recipes/sft.py on a saved model and rows of text, optionally with images: "hf_cce" runs it
unchanged, "eager" with HF_CCE_DISABLE=1.
"""

from __future__ import annotations

import os
import runpy
import shlex
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.installed import Missing, install
from benchmarks.job import Job, Marks, token_ids
from hf_cce import CCECallback, CCEConfig
from hf_cce.diagnostics.shapes import SHAPES, config_of

SFT_RECIPE = Path(__file__).parents[1] / "recipes/sft.py"
LOOPS = ("plain", "trainer", "sft")
PATCH = 14  # side in pixels of an image patch, which becomes one token
OURS = {"hf_cce": CCEConfig(), "hf_cce-exact": CCEConfig(gradient_filter=None)}
LIGER_IN_TRAINER = "SFTConfig(use_liger_kernel=True)"


def _callback(job: Job, device: torch.device, before_timing: Any) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Callback that marks the start of each timed step and the end of the last one."""

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
        (milliseconds of each timed step, [mean loss of all steps], description of what was installed).

    Raises:
        Missing: TRL is not installed, or the loss cannot be installed into this trainer.
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
    """Train ``model`` for all steps of ``job`` in its loop, with ``callbacks``; return the mean loss.

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
        # In the given order, as in the plain loop.
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        return float(trainer.train().training_loss)


def _sft(job: Job, model: Any, options: dict[str, Any], rows: torch.Tensor, callbacks: list[Any]) -> Any:
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        raise Missing(f"{type(error).__name__}: {error}") from error

    args = trl.SFTConfig(
        **options,
        max_length=job.sequence,
        dataset_kwargs={"skip_prepare_dataset": True},
        use_liger_kernel=job.loss == "liger",
    )
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}), processing_class=_tokenizer(job),
        callbacks=callbacks,
    )  # fmt: skip


def _tokenizer(job: Job, **options: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    ends = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(job.tokenizer_file), eos_token=ends, pad_token=ends, **options
    )


def run_recipe(job: Job, before_timing: Any) -> tuple[list[float], list[float], str]:
    """Train with recipes/sft.py and the flags ``job.recipe``; return what ``train`` returns.

    Raises:
        Missing: TRL or datasets is not installed, or the recipe does not take this loss.
    """
    if job.loss not in ("eager", "hf_cce"):
        raise Missing("recipes/sft.py trains with hf_cce or, with HF_CCE_DISABLE=1, without")
    clock = _callback(job, torch.device(job.device), before_timing)
    environment = {"HF_CCE_DISABLE": "1"} if job.loss == "eager" else {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment):
        try:
            main = runpy.run_path(str(SFT_RECIPE))["main"]
            _write_model_and_rows(job, Path(folder))
        except ImportError as error:
            raise Missing(f"{type(error).__name__}: {error}") from error
        options = {
            "model_name_or_path": folder, "dataset_name": f"{folder}/rows.parquet", "output_dir": f"{folder}/out",
            "max_length": "none" if job.images else job.sequence, "max_steps": job.warmup + job.steps,
            "per_device_train_batch_size": job.batch, "learning_rate": job.learning_rate, "save_strategy": "no",
            "logging_strategy": "no", "disable_tqdm": True, "report_to": "none", "seed": job.seed,
            "gradient_checkpointing": job.gradient_checkpointing, "attn_implementation": job.attention,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        trainer = main([*flags, *shlex.split(job.recipe)], [clock])
    (loss,) = (row["train_loss"] for row in trainer.state.log_history if "train_loss" in row)
    done = {"flags": job.recipe, "device_map": getattr(trainer.model, "hf_device_map", None), **environment}
    if not environment:
        done["cce_stats"] = trainer.model.cce_stats()
    return clock.marks.milliseconds(), [loss], f"recipes/sft.py, {done}"


def _write_model_and_rows(job: Job, folder: Path) -> None:
    """Write random weights, a tokenizer or processor, and rows.parquet: ``job.sequence`` tokens per row, including image tokens.

    The head is not tied to the embedding, so that a ``device_map`` can place it on another device.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, set_seed

    shape, config = SHAPES[job.model], config_of(SHAPES[job.model], job.sequence)
    config.tie_word_embeddings = False
    patches = (job.images // PATCH) ** 2
    tokenizer = _tokenizer(job)
    texts = tokenizer.batch_decode(torch.from_numpy(token_ids(job)).flatten(0, 1)[:, : job.sequence - patches])
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    set_seed(job.seed)
    if job.images:
        import numpy as np
        from PIL import Image
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaProcessor
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        config.vocab_size += 64
        side = {"height": job.images, "width": job.images}
        LlavaProcessor(
            CLIPImageProcessorPil(size={"shortest_edge": job.images}, crop_size=side),
            tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template="{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
            "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
            "{% endif %}{% endfor %}",
        ).save_pretrained(folder)
        vision = CLIPVisionConfig(  # same width and depth as the decoder
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, image_size=job.images, patch_size=PATCH,
        )  # fmt: skip
        config = LlavaConfig(
            vision_config=vision, text_config=config, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1, image_seq_length=patches, tie_word_embeddings=False,
        )  # fmt: skip
        pixels = np.random.default_rng(job.seed).integers(0, 256, (len(texts), job.images, job.images, 3), np.uint8)
        rows = [
            {
                "images": [Image.fromarray(picture)],
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
            }
            for picture, text in zip(pixels, texts, strict=True)
        ]
    else:
        tokenizer.save_pretrained(folder)
    auto: Any = AutoModelForImageTextToText if job.images else AutoModelForCausalLM
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
