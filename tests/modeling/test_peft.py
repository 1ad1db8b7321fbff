"""A model with a PEFT adapter trains as it does unpatched, without logits, whatever PEFT has turned its head into."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import (
    FAMILIES,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    cce_warnings,
    float64_copy,
    logits_made,
    loss_and_grads,
    model_loss,
    module_state,
    stats,
    tiny_llama,
    twins,
    with_lora,
    with_open_gates,
)
from numerics import assert_accurate, assert_all_accurate
from torch._dynamo.testing import CompileCounter

from hf_cce import apply_cce, remove_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of

peft = pytest.importorskip("peft")

STEPS = 3
CPT = {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3, 4]}


@dataclass(frozen=True)
class Row:
    config: Callable[[], Any]
    trains: tuple[str, ...]  # each must occur in the name of a parameter that gets a gradient
    tied: bool = False
    fused: int = 1  # losses computed per call; 0: full logits


def row(name: str, *trains: str, tied: bool = False, fused: int = 1, **options: Any) -> Row:
    def config() -> Any:
        kind = getattr(peft, name, None) or pytest.skip(f"peft {peft.__version__} has no {name}")
        if missing := options.keys() - inspect.signature(kind).parameters.keys():
            pytest.skip(f"{name} of peft {peft.__version__} has no {', '.join(missing)}")
        return kind(task_type="CAUSAL_LM", **options)

    return Row(config, trains, tied, fused)


def lora(*trains: str, tied: bool = False, **options: Any) -> Row:
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    return row("LoraConfig", *trains, tied=tied, **options)


def of_the_head(name: str, **options: Any) -> Row:
    return row(name, "lm_head", target_modules=["lm_head"], **options)


HEADS: dict[str, Row] = {
    "all-linear": lora(target_modules="all-linear"),
    "saved head": lora("lm_head.modules_to_save", modules_to_save=["lm_head"]),
    "lora": lora("lm_head.lora_A", "q_proj", target_modules=["q_proj", "lm_head"]),
    "lora dropout": lora("lm_head.lora_B", target_modules=["lm_head"], lora_dropout=0.4, lora_alpha=3),
    "dora": lora("lm_head.lora_magn", "q_proj", target_modules=["q_proj", "lm_head"], use_dora=True, lora_alpha=3),
    "dora dropout": lora("lm_head.lora_magn", target_modules=["lm_head"], use_dora=True, lora_dropout=0.4),
    "dora bias": lora("lm_head.lora_magn", target_modules=["lm_head"], use_dora=True, bias="all"),
    "prompt": row("PromptTuningConfig", "prompt_encoder", num_virtual_tokens=3),
    "vera": of_the_head("VeraConfig", r=2, init_weights=False),
    "ia3": of_the_head("IA3Config", feedforward_modules=[], init_ia3_weights=False),
    "ia3 input": of_the_head("IA3Config", feedforward_modules=["lm_head"], init_ia3_weights=False),
    "loha": of_the_head("LoHaConfig", r=2, init_weights=False),
    "lokr": of_the_head("LoKrConfig", r=2, init_weights=False),
    "oft": of_the_head("OFTConfig", r=0, oft_block_size=8, init_weights=False, module_dropout=0.0),
    "boft": of_the_head("BOFTConfig", boft_block_size=4, init_weights=False, bias="boft_only"),
    "adalora head": of_the_head(
        "AdaLoraConfig", init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, init_lora_weights=False
    ),
    "delora": of_the_head("DeloraConfig", r=2, init_weights=False),
    "glora": of_the_head("GloraConfig", r=2),
    "miss": of_the_head("MissConfig", r=2, init_weights=False, miss_dropout=0.4),
    "psoft": of_the_head("PsoftConfig", r=2),
    "pvera": of_the_head("PveraConfig", r=2, init_weights=False),
    "lily": of_the_head("LilyConfig", r=2, init_weights=False),
    "hra": of_the_head("HRAConfig", r=2, init_weights=False),
    "hira": of_the_head("HiraConfig", r=2, init_weights=False),
    "c3a": of_the_head("C3AConfig", fused=0, block_size=1, init_weights=False),
}
# These call the model's forward without its hooks
TUNERS: dict[str, Row] = {
    "adalora": row(
        "AdaLoraConfig", "lora_E", init_r=4, target_r=2, target_modules=["q_proj", "v_proj"], total_step=10, tinit=1,
        tfinal=2, init_lora_weights=False,
    ),
    "adaption": row("AdaptionPromptConfig", "adaption_gate", adapter_len=3, adapter_layers=1),
}  # fmt: skip
ROWS: dict[str, Row] = {
    **HEADS,
    **TUNERS,
    "prefix": row("PrefixTuningConfig", "prompt_encoder", num_virtual_tokens=3),
    # adds its own loss, computed from the same logits
    "cpt": row("CPTConfig", "prompt_encoder", fused=2, **CPT),
    "norms": row("LNTuningConfig", "model.norm.", target_modules=["input_layernorm", "norm"]),
    "tokens tied": lora("embed_tokens.token_adapter", tied=True, trainable_token_indices=[5, 6, 7]),
    "tokens of the head": lora(
        "embed_tokens.token_adapter",
        "lm_head.token_adapter",
        trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [5, 7]},
    ),
    "tokens alone tied": row(
        "TrainableTokensConfig", "trainable_tokens_delta", tied=True, token_indices=[5, 6], init_weights=False
    ),
    "parameter of the head": lora("lm_head.lora_A", "lm_head.lora_B", target_parameters=["lm_head.weight"]),
    "parameter of the head alone": lora("lm_head.lora_B", target_modules=[], target_parameters=["lm_head.weight"]),
    "parameter of the tied head": lora("lm_head.lora_B", tied=True, target_parameters=["lm_head.weight"]),
    # PEFT warns that the tie is broken, for the unpatched and the patched model alike
    "tied, embedding adapted": lora("lora_embedding_A", "lora_embedding_B", tied=True, target_modules=["embed_tokens"]),
    "tied, head adapted": lora("lm_head.lora_A", "lm_head.lora_B", tied=True, target_modules=["q_proj", "lm_head"]),
    "stay tied, embedding adapted": lora(
        "lora_embedding_B", "lm_head.lora_A", tied=True, target_modules=["embed_tokens"], ensure_weight_tying=True
    ),
    "stay tied, head saved": lora(
        "embed_tokens.modules_to_save", tied=True, modules_to_save=["lm_head"], ensure_weight_tying=True
    ),
}
# Phi's head has a bias, which DoRA does not change and IA3 scales
CASES = [
    *((name, first, "llama") for name in ROWS for first in ("peft", "cce")),
    *((name, "cce on the model inside", "llama") for name in TUNERS),
    *((name, "peft", "phi") for name in HEADS),
]


def build(row: Row, patched: str = "", double: bool = False, family: str = "llama", **options: Any) -> Any:
    """Return a PeftModel with a reproducible non-zero adapter, patched before ("cce") or after PEFT ("peft").

    ``options`` override the adapter configuration of the row.
    """
    config = row.config()
    vars(config).update(options)
    model = FAMILIES[family].build(**({"tie_word_embeddings": True} if row.tied else {}))
    if patched == "cce":
        apply_cce(model)
    # Convert a tied model to float64 before PEFT wraps it: copying or casting adapters that share weights unties them, or fails.
    # PSOFT cannot initialize from float64 weights.
    model = float64_copy(model) if double and row.tied else model
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's warning about tied weights
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()
    wrapped = with_open_gates(wrapped.double() if double else wrapped)
    with torch.no_grad():  # some adapters start as a no-op
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if patched == "cce on the model inside":
        apply_cce(wrapped.get_base_model())
    return apply_cce(wrapped) if patched == "peft" else wrapped


def inputs_of(row: Row, seed: int) -> dict[str, torch.Tensor]:
    inputs = batch(rows=4, seed=seed)  # logits are then larger than twice the head's weight
    if row.fused > 1:
        # CPT's token types: 0 is padding, multiples of 4 are labels. PEFT adds a multiple of 4 to the mask in place.
        kinds = torch.full_like(inputs["labels"], 4)
        kinds[:, 12:] = 8
        kinds[inputs["labels"] == -100] = 3
        inputs["input_type_mask"] = kinds * inputs["attention_mask"]
    return inputs


def same_dropout(model: Any, inputs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model_loss(model, inputs)


@pytest.mark.parametrize(("name", "first", "family"), CASES)
def test_loss_and_gradients_over_steps(name: str, first: str, family: str) -> None:
    row = ROWS[name]
    plain, patched, reference = (build(row, how, how == "double", family) for how in ("", first, "double"))
    reference.load_state_dict(plain.state_dict())
    with cce_warnings() as messages:
        for step in range(STEPS):
            inputs = inputs_of(row, step)
            assert_same_training(patched, plain, inputs, reference=reference, redraw=True, loss_of=same_dropout)
            gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
            assert all(any(part in key for key in gradients) for part in row.trains), list(gradients)
            with torch.no_grad():
                for model in (plain, patched, reference):
                    for key, parameter in model.named_parameters():
                        if key in gradients:
                            parameter -= 0.05 * gradients[key].to(parameter.dtype)
        with logits_made(4 * 23, patched) as seen:
            loss_and_grads(patched, inputs_of(row, STEPS))
    if row.fused:
        assert seen == messages == []
        assert_fused(patched, calls=STEPS + 1)
    else:
        assert stats(patched).missed == stats(patched).materialized == STEPS + 1
        assert len(messages) == 1 and 'modules_to_save=["lm_head"]' in messages[0]
    assert stats(patched).fused == row.fused * (STEPS + 1)
    assert type(patched(**inputs)) is type(plain(**inputs))
    remove_cce(patched)
    assert patch_of(causal_lm(patched)) is None


@pytest.mark.parametrize("what", ["velora", "hook on lora_A", "hook on the saved head"])
def test_autograd_functions_inside_the_head(what: str) -> None:
    """VeLoRA's own function and backward hooks stand between the hidden states and the product."""
    options: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"]}
    if what == "velora":
        if not hasattr(peft.tuners.lora, "VeloraConfig"):
            pytest.skip("this PEFT has no VeLoRA")
        options["velora_config"] = peft.tuners.lora.VeloraConfig()
    elif what == "hook on the saved head":
        options = {"modules_to_save": ["lm_head"]}
    fired: list[str] = []

    def build() -> Any:
        model = with_lora(tiny_llama(), **options)
        for name, module in model.named_modules():
            if name.endswith({"hook on lora_A": "lm_head.lora_A.default"}.get(what, "lm_head.modules_to_save.default")):
                module.register_full_backward_hook(lambda *_: fired.append(what))
        return model

    patched, plain = apply_cce(build()), build()
    with warnings.catch_warnings(record=True):
        actual, twin = (loss_and_grads(model, batch()) for model in (patched, plain))
    reference = loss_and_grads(float64_copy(build()), batch(), double=True)
    assert len(fired) == (0 if what == "velora" else 3)
    assert stats(patched).materialized == (what != "velora")
    assert_all_accurate(actual, twin, reference)


@pytest.mark.parametrize("kind", ["lora", "dora", "dora dropout"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "two adapters"])
def test_lora_on_the_head(how: str, kind: str) -> None:
    """Float32 adapters on a bfloat16 head, as PEFT creates them; under autocast; and two adapters at once."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    config = lora(
        r=4, target_modules=["lm_head"], use_dora="dora" in kind, lora_dropout=0.3 if "dropout" in kind else 0.0
    ).config()

    def build(patched: bool) -> Any:
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(tiny_llama().to(dtype), config)
        if how == "two adapters":
            wrapped.add_adapter("other", config)
            wrapped.base_model.set_adapter(["default", "other"])
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        return apply_cce(wrapped) if patched else wrapped

    def step(model: Any, double: bool = False) -> dict[str, torch.Tensor]:
        """Collect results over several batches: with one small matrix, either bfloat16 run may be closer by chance."""
        found = []
        for seed in range(1 if how == "two adapters" else 12):
            torch.manual_seed(seed)  # for the same dropout
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and not double):
                found.append(loss_and_grads(model, batch(seed=seed), double=double))
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    patched = build(True)
    actual, twin, reference = step(patched), step(build(False)), step(float64_copy(build(False)), double=True)
    assert_fused(patched, calls=1 if how == "two adapters" else 12)
    per_adapter = 2 if kind == "lora" else 3
    assert sum("lora" in name for name in actual) == per_adapter * (2 if how == "two adapters" else 1)
    rounding = torch.float32 if how == "two adapters" else torch.bfloat16
    assert_all_accurate(actual, twin, reference, dtype=rounding)


def test_adapter_that_needs_full_logits_warns_without_labels() -> None:
    model = apply_cce(peft.get_peft_model(tiny_llama(), of_the_head("FrodConfig").config()))
    with cce_warnings() as messages:
        for _ in range(2):
            model(input_ids=batch()["input_ids"]).logits.logsumexp(-1).mean().backward()
    assert len(messages) == 1 and "(frod)" in messages[0]


def test_adapter_around_a_compiled_head_gets_full_logits() -> None:
    plain, patched = (with_lora(model, target_modules=["lm_head"]) for model in twins())
    patched.get_output_embeddings().base_layer.compile(backend="eager")
    with pytest.warns(UserWarning, match="a layer inside the head is compiled by itself"):
        assert_same_training(patched, plain, batch())


@pytest.mark.parametrize("name", ["lora", pytest.param("dora", marks=pytest.mark.slow), "ia3", "miss"])
def test_adapters_on_the_head_compile(name: str) -> None:
    """At most one more graph than unpatched (DoRA with PEFT 0.18). Logits read afterwards include the adapter."""
    row = HEADS[name]
    plain, patched, reference = build(row), build(row, "peft"), build(row, double=True)
    reference.load_state_dict(plain.state_dict())
    inputs = {**batch(), "use_cache": False}
    made = patched(**inputs).logits.materialize()
    assert_accurate(made, plain(**inputs).logits, reference(**inputs).logits, "logits")
    assert stats(patched).fused == stats(patched).calls == 1
    counters = [CompileCounter(), CompileCounter()]
    for model, counter in zip((plain, patched), counters, strict=True):
        model.compile(backend=counter)
        for _ in range(3):
            output = model(**inputs)
    assert counters[1].frame_count <= counters[0].frame_count + 1 and stats(patched).traced and output.logits is None
    assert_same_training(patched, plain, inputs, reference=reference)


def test_disabled_adapter_does_not_warn() -> None:
    model = apply_cce(with_lora(tiny_llama(), target_modules=["q_proj", "lm_head"]))
    with cce_warnings() as messages, model.disable_adapter():
        model.get_input_embeddings().weight.requires_grad_()
        model(**batch()).loss.backward()
    assert messages == [] and stats(model).fused == 1


def test_adapter_that_writes_in_place() -> None:
    """PEFT's aLoRA adds in place to the tokens after its invocation, and then reads the dtype."""
    ids = batch()["input_ids"]
    row = lora("lm_head", target_modules=["q_proj", "lm_head"], alora_invocation_tokens=[int(ids[0, 12])])
    assert_same_training(build(row, "peft"), build(row), batch())


# Tuners that call the model's forward without its hooks in every PEFT version; a mixed model, which cannot return its inner
# model; and X-LoRA, which calls that model twice
@pytest.fixture(params=TUNERS)
def tuner(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(tuner: str, **options: Any) -> tuple[Any, Any]:
    return build(TUNERS[tuner], **options), build(TUNERS[tuner], "peft", **options)


def by_position(model: Any, inputs: Any) -> torch.Tensor:
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return model(inputs["input_ids"], **rest).loss


# Ways to call the model. With tuple outputs, AdaLoRA adds no penalty, patched or not.
FORMS = {
    "tuple": lambda model, inputs: model(**inputs, return_dict=False)[0],
    "ids by position": by_position,
    "no task": model_loss,
    "the tuner itself": lambda model, inputs: model_loss(model.base_model, inputs),
}


@pytest.mark.parametrize("form", FORMS)
def test_ways_to_call(tuner: str, form: str) -> None:
    plain, patched = pair(tuner, **({"task_type": None} if form == "no task" else {}))
    assert_same_training(patched, plain, batch(rows=4), loss_of=FORMS[form])
    assert_fused(patched, calls=1)


def test_direct_forward_of_adaption_prompt_is_unpatched() -> None:
    plain, patched = pair("adaption")
    assert torch.equal(*(model.base_model.forward(**batch(rows=4)).loss for model in (plain, patched)))
    assert stats(patched).calls == 0


def test_adalora_penalty() -> None:
    """AdaLoRA adds the penalty to the loss in place; user code may do the same. The penalty itself moves only A and B."""
    inputs, (plain, patched) = batch(rows=4), pair("adalora", orth_reg_weight=0.7)
    _, without = pair("adalora", orth_reg_weight=1e-9)  # PEFT 0.18 rejects 0

    def doubled(model: Any, inputs: Any) -> torch.Tensor:
        loss = model_loss(model, inputs)
        loss *= 2
        return loss

    assert_same_training(patched, plain, inputs, loss_of=doubled)
    assert_fused(patched, calls=1)
    assert float(patched(**inputs).loss.detach() - without(**inputs).loss.detach()) > 0.1


def test_evaluation_and_generation_match_unpatched(tuner: str) -> None:
    plain, patched = (model.eval() for model in pair(tuner))
    inputs = batch(rows=4, ignored=False)
    with torch.no_grad():
        expected, actual = plain(**inputs), patched(**inputs)
    assert torch.equal(actual.logits, expected.logits)
    assert_accurate(actual.loss, expected.loss, expected.loss.double(), "loss")
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
        tokens = [model.generate(input_ids=inputs["input_ids"], **options) for model in (plain, patched)]
        assert torch.equal(*tokens) and tokens[0].shape[1] > inputs["input_ids"].shape[1]
    without = {"input_ids": inputs["input_ids"]}
    assert torch.equal(patched.train()(**without).logits.materialize(), plain.train()(**without).logits)
    assert stats(patched).calls == stats(patched).materialized == 1


def test_unpatched_models_are_unaffected(tuner: str) -> None:
    plain, model = build(TUNERS[tuner]), build(TUNERS[tuner])
    before = module_state(model)
    apply_cce(model)
    model(**batch()).loss.backward()
    assert_fused(model, calls=1)
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    expected = plain(**batch())
    assert type(expected.logits) is torch.Tensor and hooked == []
    remove_cce(model)
    assert patch_of(causal_lm(model)) is None and module_state(model) == before
    outputs = model(**batch())
    assert type(outputs.logits) is torch.Tensor and torch.equal(outputs.loss, expected.loss)


def test_interrupted_forward_leaves_module_state_unchanged(tuner: str) -> None:
    patched = build(TUNERS[tuner], "peft")
    before = module_state(patched)
    handle = patched.get_base_model().model.norm.register_forward_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        patched(**batch())
    handle.remove()
    assert module_state(patched) == before
    patched(**batch()).loss.backward()
    assert_fused(patched, calls=1)


def test_several_adapters(tuner: str) -> None:
    """AdaLoRA trains one adapter and freezes the others; prompts are swapped in and out of the model."""

    def several() -> Any:
        model = build(TUNERS[tuner])
        torch.manual_seed(4)
        config = TUNERS[tuner].config()
        config.inference_mode = tuner == "adalora"
        model.add_adapter("other", config)
        if tuner == "adalora":
            model.base_model.set_adapter(["default", "other"])
        return with_open_gates(model).train()

    plain, patched = several(), apply_cce(several())
    assert_same_training(patched, plain, batch(rows=4))
    if tuner == "adaption":
        for model in (plain, patched):
            model.set_adapter("other")
            with_open_gates(model)
            model.requires_grad_(True)
        assert_same_training(patched, plain, batch(rows=4))
    calls = stats(patched).calls
    assert_fused(patched, calls=1 if tuner == "adalora" else 2)
    with patched.disable_adapter(), plain.disable_adapter():
        patched.requires_grad_(True), plain.requires_grad_(True)
        assert_same_training(patched, plain, batch(rows=4))
    assert_fused(patched, calls=calls + 1)


@pytest.mark.parametrize("replaced", ["before", "after"])
def test_replaced_forward(tuner: str, replaced: str) -> None:
    """accelerate's dispatch replaces forward and keeps the previous one inside."""
    model, called = build(TUNERS[tuner]), []
    if replaced == "after":
        apply_cce(model)
    kept = model.base_model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append("wrapper")
        return kept(*args, **kwargs)

    model.base_model.forward = forward
    if replaced == "before":
        apply_cce(model)
    model(**batch()).loss.backward()
    assert called == ["wrapper"]
    assert_fused(model, calls=1)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "tuner"])
def test_compiled(tuner: str, what: str) -> None:
    """Compile the whole model, or only the tuner, whose ``__call__`` and our hooks stay outside the graph."""
    plain, patched = pair(tuner)
    (patched if what == "model" else patched.base_model).compile(backend="aot_eager")
    with cce_warnings() as messages:
        assert_same_training(patched, plain, batch(rows=4))
    assert stats(patched).traced or stats(patched).fused == 1
    assert messages == [] and stats(patched).missed == stats(patched).materialized == 0


@pytest.mark.parametrize("how", ["model", "tuner"])
def test_mixed_model_and_bare_tuner(how: str) -> None:
    config = lora("q_proj").config()

    def made() -> Any:
        torch.manual_seed(3)
        if how == "tuner":
            return peft.LoraModel(tiny_llama(), config, "default").train()
        model = peft.get_peft_model(tiny_llama(), config, mixed=True)
        model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False))
        model.set_adapter(["default", "other"])
        return model.train()

    patched = apply_cce(made())
    assert_same_training(patched, made(), batch(rows=4))
    assert_fused(patched, calls=1)
    remove_cce(patched)
    assert type(patched(**batch()).logits) is torch.Tensor


def test_x_lora(tmp_path: Path) -> None:
    """X-LoRA's scaling pass calls the model's forward without gradients in the training call; the training call is fused."""
    adapters = {str(number): str(tmp_path / str(number)) for number in range(2)}
    for number, folder in adapters.items():
        torch.manual_seed(int(number))
        config = lora(target_modules=["q_proj", "v_proj"], init_lora_weights=True).config()
        adapter = peft.get_peft_model(tiny_llama(), config)
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapter.save_pretrained(folder)

    def made() -> Any:
        model = tiny_llama(use_cache=False)
        torch.manual_seed(3)
        options = {"hidden_size": 32, "xlora_dropout_p": 0.0, "use_trainable_adapters": True, "adapters": adapters}
        return peft.get_peft_model(model, peft.XLoraConfig(task_type="CAUSAL_LM", **options)).train()

    patched = apply_cce(made())
    actual, twin = loss_and_grads(patched, batch()), loss_and_grads(made(), batch())
    reference = loss_and_grads(float64_copy(made()), batch(), double=True)
    assert actual.keys() == twin.keys()
    # With one layer the classifier's gradient is zero up to rounding.
    others = {name: value for name, value in actual.items() if "classifier" not in name}
    assert_results_as_good(others, twin, reference)
    assert_fused(patched, calls=1)
