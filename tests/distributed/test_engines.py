"""A patched model under autocast, torch.compile, DataParallel, accelerate and PEFT."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from models import (
    FAMILIES,
    anatomy,
    assert_fused,
    assert_results_as_good,
    assert_same_training,
    batch,
    exact,
    logits_made,
    loss_and_grads,
    stats,
    tiny_llama,
)
from numerics import assert_as_good
from torch import nn
from torch._dynamo.testing import CompileCounter

from hf_cce import apply_cce, remove_cce
from hf_cce.api import causal_lm
from hf_cce.patches.causal_lm import patch_of


@pytest.mark.parametrize("family", ["llama", "gemma2", "bart", "phi"])
def test_autocast(family: str) -> None:
    """bf16 autocast: no further from float64 than the unpatched model under autocast."""
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    reference = loss_and_grads(exact(plain), batch(), double=True)
    results = []
    for model in (plain, patched):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**batch())
        output.loss.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert output.logits.dtype is torch.bfloat16
    for name in ("lm_head.weight", "lm_head.bias"):
        if name in results[0]:
            assert_as_good(results[1][name], results[0][name], reference[name], name, torch.bfloat16)
    everything = [torch.cat([r[n].flatten() for n in reference if n != "loss"]) for r in (*results, reference)]
    assert_as_good(everything[1], everything[0], everything[2], "gradient", torch.bfloat16)
    assert torch.equal(output.logits.materialize(), patched.eval().to(torch.float32) and _autocast_logits(patched))


def _autocast_logits(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch()).logits


def test_bfloat16_weights() -> None:
    plain = tiny_llama().bfloat16()
    patched = apply_cce(copy.deepcopy(plain))
    reference = loss_and_grads(exact(plain), batch(), double=True)
    twin, actual = loss_and_grads(plain, batch()), loss_and_grads(patched, batch())
    assert actual["lm_head.weight"].dtype is torch.bfloat16
    assert_as_good(
        actual["lm_head.weight"], twin["lm_head.weight"], reference["lm_head.weight"], "head", torch.bfloat16
    )
    assert_as_good(actual["loss"], twin["loss"], reference["loss"], "loss", torch.bfloat16)


@pytest.mark.parametrize("name", ["MambaForCausalLM", "FalconMambaForCausalLM"])
def test_a_float32_head_over_a_bfloat16_body(name: str) -> None:
    """Families that cast the hidden states to the dtype of the head."""
    import tiny

    def build() -> Any:
        model = tiny.build(name).bfloat16()
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().float())  # untied from the embeddings
        return model

    plain, patched = build(), apply_cce(build())
    reference = loss_and_grads(exact(plain), tiny.text(name), double=True)
    twin, actual = loss_and_grads(plain, tiny.text(name)), loss_and_grads(patched, tiny.text(name))
    assert_fused(patched, calls=1)
    (head,) = (key for key, value in patched.named_parameters() if value is patched.get_output_embeddings().weight)
    assert actual[head].dtype is torch.float32
    for key in (head, "loss"):
        assert_as_good(actual[key], twin[key], reference[key], key, torch.bfloat16)


def test_a_head_of_another_dtype_is_an_error_as_before() -> None:
    """Where the family does not cast, torch's own message comes, from the same place."""
    messages = []
    for model in (tiny_llama(), apply_cce(tiny_llama())):
        model.bfloat16().lm_head.float()
        with pytest.raises(RuntimeError) as caught:
            model(**batch())
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_torch_compile_in_one_graph(family: str) -> None:
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    inputs = {**batch(), "use_cache": False}
    for model in (plain, patched):
        model(**inputs)  # the MoE models of Transformers install hooks behind a lock in their first call
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(patched, fullgraph=True, backend=counter)
    try:
        compiled(**inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        assert family == "mixtral"
        with pytest.raises(type(error)):
            torch.compile(plain, fullgraph=True, backend="eager")(**inputs)
        pytest.skip(f"transformers {transformers.__version__} does not compile {family} without us either")
    for _ in range(2):
        output = compiled(**inputs)
    assert counter.frame_count == 1, "something that changes with every call recompiles"
    assert output.logits is None and stats(patched).traced
    assert type(output) is type(plain(**inputs))
    output.loss.backward()
    actual = {"loss": output.loss.detach(), **{n: p.grad for n, p in patched.named_parameters()}}
    twin, reference = loss_and_grads(plain, inputs), loss_and_grads(exact(plain), inputs, double=True)
    for name in ("loss", *(n for n in actual if "head" in n or "wte" in n)):
        assert_as_good(actual[name], twin[name], reference[name], name)
    patched.eval(), plain.eval()
    assert torch.equal(compiled(**inputs).logits, plain(**inputs).logits)
    remove_cce(compiled)
    torch.compile(plain)  # leaves a mark of its own
    assert anatomy(patched) == anatomy(plain)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_torch_compile_of_a_step_around_the_model(family: str) -> None:
    """Here Dynamo traces the hooks into the user's graph."""
    plain = FAMILIES[family].build()
    patched = apply_cce(copy.deepcopy(plain))
    inputs = {**batch(), "use_cache": False}
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(model: Any, **inputs: Any) -> torch.Tensor:
        return 2.0 * model(**inputs).loss

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    losses = [compiled(patched, **inputs) for _ in range(4)]
    assert counter.frame_count <= 2 and stats(patched).traced
    assert_as_good(losses[-1], step(plain, **inputs), step(exact(plain), **inputs), "loss")
    assert_same_training(patched, plain, batch())
    compiled(patched, **inputs)
    remove_cce(patched)
    assert anatomy(patched) == anatomy(plain)


@pytest.mark.parametrize("way", ["wrapper", "in place", "around"])
def test_patching_a_compiled_model_drops_its_graphs(way: str) -> None:
    model, inputs = tiny_llama(), {**batch(), "use_cache": False}
    compiled = torch.compile(lambda **inputs: model(**inputs), fullgraph=True, backend="eager")
    if way == "wrapper":
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    elif way == "in place":
        model.compile(fullgraph=True, backend="eager")
        compiled = model
    target = compiled if isinstance(compiled, nn.Module) else model
    assert compiled(**inputs).logits is not None
    apply_cce(target)
    assert compiled(**inputs).logits is None
    remove_cce(target)
    assert compiled(**inputs).logits is not None


def test_a_data_parallel_replica_returns_tensors_only() -> None:
    """As torch.nn.parallel.replicate builds them, short of moving them: its gather takes tensors only."""
    model = apply_cce(tiny_llama())
    modules = list(model.modules())
    replicas = [module._replicate_for_data_parallel() for module in modules]
    for module, replica in zip(modules, replicas, strict=True):
        for name, child in module._modules.items():
            setattr(replica, name, replicas[modules.index(child)])
        for name, parameter in module._parameters.items():
            object.__setattr__(replica, name, None if parameter is None else parameter * 1)
        for name, buffer in module._buffers.items():
            replica._buffers[name] = buffer
    output = replicas[0](**batch())
    assert output.logits is None and "logits" not in output.keys()  # noqa: SIM118
    assert replicas[0](**batch(), return_dict=False)[0].dim() == 0
    output.loss.backward()
    assert model.lm_head.weight.grad is not None
    assert_fused(model, calls=2)
    assert patch_of(model).forward is None, "the model would keep a replica's head alive"


@pytest.fixture
def fresh_accelerate() -> Any:
    """Its state is one per process, and whichever test came first has set the precision."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_wraps_and_unwraps() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        first, later = apply_cce(tiny_llama()), tiny_llama()
        prepared = [accelerator.prepare(first), apply_cce(accelerator.prepare(later))]
        plain = accelerator.prepare(tiny_llama())
        expected = loss_and_grads(plain, batch())
        reference = loss_and_grads(exact(tiny_llama()), batch(), double=True)
        for model in prepared:
            actual = loss_and_grads(model, batch())
            assert_as_good(actual["loss"], expected["loss"], reference["loss"], "loss", torch.bfloat16)
            output = model(**batch())
            assert output.logits.dtype is torch.float32 and torch.equal(
                output.logits.materialize(), plain(**batch()).logits
            )
        assert_fused_but_read(first), assert_fused_but_read(later)
        for keep in (True, False):
            unwrapped = accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=keep)
            before = stats(unwrapped).fused
            loss_and_grads(unwrapped, batch())
            assert stats(unwrapped).fused == before + 1
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def assert_fused_but_read(model: Any) -> None:
    assert stats(model).missed == 0 and stats(model).fused == stats(model).calls


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_device_hooks_on_the_head(when: str) -> None:
    """They rewrite ``head.forward``; weights that only exist inside of it are another matter (offload)."""
    hooks = pytest.importorskip("accelerate.hooks")
    plain, model = tiny_llama(), tiny_llama()
    if when == "after":
        apply_cce(model)
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    apply_cce(model)
    hooked = model.lm_head.forward
    assert_same_training(model, plain, batch())
    assert_fused(model, calls=1)
    assert model.lm_head.forward is hooked
    hooks.remove_hook_from_module(model.lm_head)
    assert "forward" not in vars(model.lm_head) or model.lm_head.forward == nn.Linear.forward.__get__(model.lm_head)


# PEFT
@pytest.mark.gpu
@pytest.mark.parametrize("head_on", ["cuda", "cpu"])
def test_the_head_on_another_device(head_on: str) -> None:
    """A model split by ``device_map``: accelerate moves the hidden states to the head, and the logits back.

    A head on the CPU beside a body on a GPU is offloaded: its weight comes to the GPU for the head's forward.
    """
    accelerate = pytest.importorskip("accelerate")
    body = "cpu" if head_on == "cuda" else "cuda"
    places = {"model": body, "lm_head": head_on}

    def split(patch_first: bool | None) -> Any:
        model = tiny_llama()
        if patch_first:
            apply_cce(model, implementation="triton")
        model = accelerate.dispatch_model(model, {key: 0 if x == "cuda" else x for key, x in places.items()})
        if patch_first is False:
            apply_cce(model, implementation="triton")
        return model

    plain, reference = split(None), loss_and_grads(exact(tiny_llama()), batch(), double=True)
    twin = loss_and_grads(plain, batch())
    for patch_first in (True, False):
        patched = split(patch_first)
        actual = loss_and_grads(patched, batch())
        assert_fused(patched, calls=1)
        for name, value in actual.items():
            assert value.device == twin[name].device
            assert_as_good(value, twin[name], reference[name], name)


def lora(**options: Any) -> Callable[[Any], Any]:
    return lambda peft: peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["lm_head"], "init_lora_weights": False, **options}
    )


def newer(peft: Any, name: str) -> Any:
    return getattr(peft, name, None) or pytest.skip(f"peft {peft.__version__} has no {name}")


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "all-linear": lora(target_modules="all-linear"),
    "saved-head": lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora-head": lora(target_modules=["q_proj", "lm_head"]),
    "lora-dropout": lora(lora_dropout=0.4, lora_alpha=3),
    "rslora-head": lora(use_rslora=True, r=4),
    "dora-head": lora(target_modules=["q_proj", "lm_head"], use_dora=True, lora_alpha=3),
    "dora-dropout": lora(use_dora=True, lora_dropout=0.4),
    "dora-bias": lora(use_dora=True, bias="all"),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "vera": lambda peft: peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "ia3": lambda peft: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False
    ),
    "ia3-input": lambda peft: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=["lm_head"], init_ia3_weights=False
    ),
    "loha": lambda peft: peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "lokr": lambda peft: peft.LoKrConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "oft": lambda peft: peft.OFTConfig(
        task_type="CAUSAL_LM", r=0, oft_block_size=8, target_modules=["lm_head"], init_weights=False, module_dropout=0.0
    ),
    "boft": lambda peft: peft.BOFTConfig(
        task_type="CAUSAL_LM", boft_block_size=4, target_modules=["lm_head"], init_weights=False, bias="boft_only"
    ),
    "adalora": lambda peft: peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, target_modules=["lm_head"],
        init_lora_weights=False,
    ),
    "delora": lambda peft: peft.DeloraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_weights=False),
    "glora": lambda peft: newer(peft, "GloraConfig")(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"]),
    "c3a": lambda peft: peft.C3AConfig(task_type="CAUSAL_LM", block_size=1, target_modules=["lm_head"], init_weights=False),
}  # fmt: skip
FALL_BACK = ("c3a",)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("target", ADAPTERS)
@pytest.mark.parametrize("first", ["peft", "cce"])
def test_peft(target: str, first: str, family: str) -> None:
    """Phi's head has a bias, which DoRA leaves alone and IA3 scales."""
    peft = pytest.importorskip("peft")
    if family == "phi" and first == "cce":
        pytest.skip("once is enough")
    config, inputs = ADAPTERS[target](peft), batch(rows=4)  # logits are then larger than the head's weight twice

    def build(cce: bool) -> Any:
        model = FAMILIES[family].build()
        if cce and first == "cce":
            apply_cce(model)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config)
        with torch.no_grad():  # some adapters start with parameters that do nothing
            for name, parameter in wrapped.named_parameters():
                if parameter.requires_grad and "lora" not in name and "saved" not in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return apply_cce(wrapped) if cce and first == "peft" else wrapped

    plain, patched = build(False), build(True)

    def step(model: Any, double: bool = False) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)  # the same dropout
        return loss_and_grads(model, inputs, double=double)

    def move(models: list[Any], grads: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for model in models:
                for name, parameter in model.named_parameters():
                    if name in grads:
                        parameter -= 0.05 * grads[name].to(parameter.dtype)

    reference_model = exact(build(False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            with logits_made(4 * 23, patched) if number else nullcontext([]) as seen:
                actual = step(patched)
            twin, reference = step(plain), step(reference_model, double=True)
            assert actual.keys() == twin.keys() and len(actual) > 1
            # A key's bias has a gradient of rounding alone: over 40 seeds it is off by 3.2e-6 in the median, unpatched by 3.4e-6.
            assert_results_as_good(
                actual, twin, reference, torch.float32, plain if target == "dora-bias" else None, step
            )
            move([patched, plain, reference_model], reference)
    ours = [str(w.message) for w in caught if "hf_cce" in str(w.message)]
    if target in FALL_BACK:
        assert stats(patched).missed == stats(patched).materialized == 3 and len(ours) == 1
    else:
        assert_fused(patched, calls=3)
        assert ours == seen == []
    remove_cce(patched)
    assert patch_of(causal_lm(patched)) is None


def test_an_adapter_that_calls_forward_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PEFT did before 0.21, past the hooks of the model; an unpatched model stays called that way."""
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    peft = pytest.importorskip("peft")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    monkeypatch.setattr(utils.BaseTuner, "forward", forward)
    monkeypatch.setattr(utils.BaseTuner, "__call__", utils.BaseTuner.__call__)  # to be put back
    monkeypatch.setattr("hf_cce.patches.peft_tuner.version", lambda _: "0.20.1")

    def build() -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(tiny_llama(), lora(target_modules="all-linear")(peft))

    plain, patched = build(), apply_cce(build())
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    twin, reference = loss_and_grads(plain, batch()), loss_and_grads(exact(build()), batch(), double=True)
    for name, value in loss_and_grads(patched, batch()).items():
        assert_as_good(value, twin[name], reference[name], name)
    assert_fused(patched, calls=1)
    assert hooked == []
    remove_cce(patched)
    assert type(patched(**batch()).logits) is torch.Tensor


@pytest.mark.parametrize("kind", ["lora", "dora", "dora-dropout"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "two adapters"])
def test_lora_on_the_head(how: str, kind: str) -> None:
    """Adapters in float32 over a head in bfloat16, as PEFT makes them; under autocast; and two at once."""
    peft = pytest.importorskip("peft")
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    config = lora(r=4, use_dora="dora" in kind, lora_dropout=0.3 if "dropout" in kind else 0.0)(peft)

    def build(patched: bool) -> Any:
        model = tiny_llama().to(dtype)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config)
        if how == "two adapters":
            wrapped.add_adapter("other", config)
            wrapped.base_model.set_adapter(["default", "other"])
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        return apply_cce(wrapped) if patched else wrapped

    def step(model: Any, double: bool = False) -> dict[str, torch.Tensor]:
        """Of several batches: which of two bfloat16 runs is closer in one small matrix is luck."""
        found = []
        for seed in range(1 if how == "two adapters" else 12):
            torch.manual_seed(seed)  # the same dropout
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and not double):
                found.append(loss_and_grads(model, batch(seed=seed), double=double))
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    patched = build(True)
    actual, twin, reference = step(patched), step(build(False)), step(exact(build(False)), double=True)
    assert_fused(patched, calls=1 if how == "two adapters" else 12)
    per_adapter = 2 if kind == "lora" else 3
    assert sum("lora" in name for name in actual) == per_adapter * (2 if how == "two adapters" else 1)
    rounding = torch.float32 if how == "two adapters" else torch.bfloat16
    for name, value in actual.items():
        assert_as_good(value, twin[name], reference[name], name, rounding)


@pytest.mark.parametrize("target", ["lora-head", "dora-head", "ia3"])
def test_adapters_on_the_head_compile(target: str) -> None:
    """In as many graphs as a plain head, one more than without us; and who asks for logits afterwards gets those of the sum."""
    peft = pytest.importorskip("peft")

    def build(patched: bool) -> Any:
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(tiny_llama(), ADAPTERS[target](peft))
        return apply_cce(wrapped) if patched else wrapped

    plain, patched = build(False), build(True)
    inputs = {**batch(), "use_cache": False}
    made = patched(**inputs).logits
    expected, reference = plain(**inputs).logits, exact(build(False))(**inputs).logits
    assert_as_good(made.materialize(), expected, reference, "logits")
    assert stats(patched).fused == stats(patched).calls == 1
    torch._dynamo.reset()
    counts = []
    for model in (plain, patched):
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter)
        for _ in range(3):
            output = compiled(**inputs)
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0] + 1 and stats(patched).traced and output.logits is None
    output.loss.backward()
    actual = {"loss": output.loss.detach(), **{n: p.grad for n, p in patched.named_parameters() if p.grad is not None}}
    twin, reference = loss_and_grads(plain, inputs), loss_and_grads(exact(build(False)), inputs, double=True)
    for name in twin:
        assert_as_good(actual[name], twin[name], reference[name], name)


def test_a_graph_that_makes_logits_says_so_once_when_it_is_traced() -> None:
    """In a plain loop, too; and it stays one graph."""

    class Mine(nn.Linear):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states)

    def build() -> Any:
        model = tiny_llama()
        model.lm_head = Mine(32, 99, bias=False)
        return model

    patched, inputs = apply_cce(build()), {**batch(), "use_cache": False}
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(patched, fullgraph=True, backend=counter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            output = compiled(**inputs)
    (told,) = [str(w.message) for w in caught if "hf_cce" in str(w.message)]
    assert "Mine, which is no plain torch.nn.Linear" in told and "fell back to full logits" in told
    assert counter.frame_count == 1 and isinstance(output.logits, torch.Tensor)
    assert not stats(patched).traced and stats(patched).calls == 0
