"""TRL's DistillationTrainer with ``linear_divergence``: same losses, metrics and weights as without it at every step."""

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stats, tiny_llama
from numerics import assert_all_accurate
from peft import LoraConfig, get_peft_model
from test_callback import on
from test_trl import STEPS, assert_same_steps, common, of_another_trl, prompts, run, tokenizer, trl

from hf_cce import CCECallback, CCEConfig
from hf_cce.patches import distillation, marking
from hf_cce.patches import trl as trl_patch
from hf_cce.patches.causal_lm import Patch

module = pytest.importorskip(distillation.MODULE)
FUNCTION = getattr(module, distillation.NAME, None)
if FUNCTION is None:
    pytest.skip("this TRL distils another way", allow_module_level=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "forward_kl": {"beta": 0.0},
    "reverse_kl": {"beta": 1.0, "temperature": 0.7},
    "jsd": {"beta": 0.4, "gradient_accumulation_steps": 2},
}


def build(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    args = trl.DistillationConfig(**common(folder, max_completion_length=6, **options))
    return trl.DistillationTrainer(
        model=model, teacher_model=tiny_llama(hidden_size=96), args=args, train_dataset=prompts(), callbacks=callbacks,
        processing_class=tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_match_unpatched_trainer(name: str, tmp_path: Path) -> None:
    trainer = assert_same_steps(tmp_path, build, **OPTIONS[name])
    assert stats(trainer.model).fused == STEPS * OPTIONS[name].get("gradient_accumulation_steps", 1)
    assert {"loss", "entropy"} <= trainer.state.log_history[0].keys()


def test_other_trainers_and_trl_versions_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(build(tmp_path / "a", tiny_llama(), [CCECallback()]))
    assert hasattr(FUNCTION.apply, marking.STATE)  # type: ignore[union-attr]
    seen: list[int] = []
    monkeypatch.setattr(distillation, "divergences", lambda *args, **kwargs: seen.append(1))
    plain = build(tmp_path / "b", tiny_llama(), [])
    assert run(plain)[1] == [] and not seen and len(plain.state.log_history) >= STEPS
    other = of_another_trl(FUNCTION)
    monkeypatch.setattr(module, distillation.NAME, other)
    with pytest.raises(RuntimeError, match="did not use the fused loss"):
        run(build(tmp_path / "c", tiny_llama(), [CCECallback(on_unused="raise")]))
    assert getattr(module, distillation.NAME) is other and not seen


def test_head_of_zero3_gives_its_reason(tmp_path: Path) -> None:
    """A head with a ``ds_id`` is refused; with LoRA, TRL calls the model without its hooks, so no call is counted."""
    model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    trainer = build(tmp_path, model, [CCECallback()])
    model.get_base_model().lm_head.weight.ds_id = 0
    first, second = run(trainer)[1]
    assert "gathers the head only during TRL's call" in first and "an earlier warning gives the reason" in second


def interrupt(**_: Any) -> None:
    raise KeyboardInterrupt


RAISES = on("on_substep_end", interrupt)  # after the first micro-batch of a step


def test_training_after_an_exception(tmp_path: Path) -> None:
    """Nothing is called at the exception: evaluation must use TRL's function even so, and the next training must begin anew."""
    failed = build(tmp_path / "a", tiny_llama(), [CCECallback(), RAISES], gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        failed.train()
    assert failed.evaluate(prompts())["eval_loss"] > 0
    trainer = build(tmp_path / "b", tiny_llama(), [CCECallback(on_unused="raise")])
    run(trainer)
    assert (stats(failed.model).fused, stats(trainer.model).fused) == (1, STEPS)
    assert distillation.current.get() is None


def test_interrupted_training_does_not_keep_the_head(tmp_path: Path) -> None:
    trainer = build(tmp_path, tiny_llama(), [CCECallback(), RAISES], gradient_accumulation_steps=2)
    head = weakref.ref(trainer.model.lm_head)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    del trainer
    gc.collect()
    assert head() is None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, 5.0)])
def test_divergence_entropy_and_gradients(beta: float, scale: float, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    sizes = ((17, 24), (91, 24), (91,), (17, 40), (91, 40), (91,))
    tensors = [torch.randn(size, generator=g) * 0.5 for size in sizes]
    assert trl_patch.intercept(FUNCTION, distillation.ARGUMENTS, distillation.current, distillation._handle_call)
    patch = Patch(CCEConfig())

    def answer(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        arguments = (*leaves, beta, 0.8, scale, softcap, 1.1, softcap)
        token = distillation.current.set(weakref.ref(patch) if ours else None)
        found = FUNCTION.apply(*arguments)  # type: ignore[union-attr]
        distillation.current.reset(token)
        assert found[0].requires_grad and not found[1].requires_grad
        return [*found, *torch.autograd.grad(found[0].square().sum(), leaves[:3])]

    exact, twin, ours = answer(torch.float64, True), answer(torch.float32, False), answer(torch.float32, True)
    assert_all_accurate(ours, twin, exact, dtype=torch.float32)
    assert patch.stats.fused == 2
