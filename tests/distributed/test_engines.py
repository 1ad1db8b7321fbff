"""Patched models under autocast, torch.compile, DataParallel and accelerate."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from models import (
    assert_fused,
    assert_same_training,
    batch,
    cce_warnings,
    float64_copy,
    head_of,
    loss_and_grads,
    model_loss,
    module_state,
    stats,
    tiny_llama,
    twins,
    with_lora,
)
from numerics import assert_accurate
from peft import OFTConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from tiny_config import TEXT_VOCAB_SIZE, tiny_config
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import replicate

from hf_cce import apply_cce, remove_cce
from hf_cce.patches.causal_lm import patch_of

NO_CACHE = {**batch(), "use_cache": False}  # for compiled calls


def in_autocast(model: Any, inputs: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**inputs).loss


def assert_no_further_than_unpatched(patched: Any, plain: Any, inputs: Any, loss_of: Any = model_loss) -> None:
    """Compare loss, head gradient and all gradients together with float64, in bfloat16; one small matrix would be too noisy."""
    twin, actual = (loss_and_grads(model, inputs, loss_of=loss_of) for model in (plain, patched))
    reference = loss_and_grads(float64_copy(plain), inputs, double=True)
    for each in (twin, actual, reference):
        each["gradient"] = torch.cat([value.double().flatten() for name, value in each.items() if name != "loss"])
    own = {id(parameter) for parameter in head_of(patched).parameters()}
    head = [name for name, parameter in patched.named_parameters() if id(parameter) in own]
    for name in ("loss", "gradient", *head):
        assert_accurate(actual[name], twin[name], reference[name], name, torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bart", "phi"])
def test_autocast(family: str) -> None:
    plain, patched = twins(family)
    assert_no_further_than_unpatched(patched, plain, batch(), in_autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, expected = patched(**batch()).logits, patched.eval()(**batch()).logits
    assert logits.dtype is torch.bfloat16 and torch.equal(logits.materialize(), expected)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "MarianMTModel"])
def test_float32_logits_bias_under_autocast(name: str) -> None:
    """Encoder-decoders keep ``final_logits_bias`` in float32; adding it to bfloat16 logits makes logits and loss float32."""
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    plain = kind(tiny_config(kind.config_class)).train()
    plain.final_logits_bias.normal_()
    patched = apply_cce(copy.deepcopy(plain))
    assert_no_further_than_unpatched(patched, plain, batch(vocab_size=TEXT_VOCAB_SIZE), in_autocast)
    assert_fused(patched, 1)
    for model in (plain, patched):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**batch(vocab_size=TEXT_VOCAB_SIZE))
        assert outputs.loss.dtype is outputs.logits.dtype is torch.float32


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_bfloat16_weights(family: str) -> None:
    """The loss is in float32, as docs/start/support.md promises. BART computes its own from logits in bfloat16."""
    plain, patched = (model.bfloat16() for model in twins(family))
    assert_no_further_than_unpatched(patched, plain, batch())
    assert head_of(patched).weight.grad.dtype is torch.bfloat16
    assert (plain(**batch()).loss.dtype is torch.float32) == (family == "llama")
    assert patched(**batch()).loss.dtype is torch.float32


@pytest.mark.parametrize("name", ["MambaForCausalLM", "FalconMambaForCausalLM"])
def test_float32_head_on_bfloat16_body(name: str) -> None:
    """These families cast the hidden states to the head's dtype."""
    plain = tiny.build(name).bfloat16()
    head = head_of(plain)
    head.weight = nn.Parameter(head.weight.detach().float())  # untied from the embeddings
    patched = apply_cce(copy.deepcopy(plain))
    assert_no_further_than_unpatched(patched, plain, tiny.text(name))
    assert_fused(patched, calls=1)
    assert head_of(patched).weight.grad.dtype is torch.float32


# With dynamic=True the numbers of Gemma's config are symbols
@pytest.mark.parametrize(("family", "dynamic"), [("gemma2", True), ("mixtral", None), ("gpt2", None)])
def test_torch_compile_in_one_graph(family: str, dynamic: bool | None) -> None:
    plain, patched = twins(family)
    for model in (plain, patched):
        model.loss_type = model.loss_type or "ForCausalLM"  # GPT-2 has none; Transformers' warning would stop Dynamo
        model(**NO_CACHE)  # the first call of Transformers' MoE models installs hooks behind a lock
    counter = CompileCounter()
    compiled = torch.compile(patched, fullgraph=True, dynamic=dynamic, backend=counter)
    try:
        compiled(**NO_CACHE)
    except torch._dynamo.exc.TorchDynamoException as error:
        assert family == "mixtral"
        with pytest.raises(type(error)):
            torch.compile(plain, fullgraph=True, backend="eager")(**NO_CACHE)
        pytest.skip(f"transformers {transformers.__version__} does not compile {family} without us either")
    graphs = counter.frame_count
    for _ in range(2):
        output = compiled(**NO_CACHE)
    assert counter.frame_count == graphs == 1, "something that changes with every call recompiles"
    assert output.logits is None and stats(patched).traced
    assert type(output) is type(plain(**NO_CACHE))
    assert_same_training(
        patched, plain, NO_CACHE, loss_of=lambda model, inputs: (compiled if model is patched else model)(**inputs).loss
    )
    patched.eval(), plain.eval()
    assert torch.equal(compiled(**NO_CACHE).logits, plain(**NO_CACHE).logits)
    remove_cce(compiled)
    torch.compile(plain)  # leaves its own marker on the model
    assert module_state(patched) == module_state(plain)


def test_torch_compile_of_step_function_with_hook_of_accelerate() -> None:
    """The forward that the hook leaves behind when it is removed is traced again."""
    hooks = pytest.importorskip("accelerate.hooks")
    plain, patched = twins("llama")
    hooks.add_hook_to_module(patched.lm_head, hooks.ModelHook())
    compiled = torch.compile(lambda: patched(**NO_CACHE).loss, fullgraph=True, backend="eager")
    expected, exact = (model(**NO_CACHE).loss for model in (plain, float64_copy(plain)))
    for hooked in (True, False):
        if not hooked:
            hooks.remove_hook_from_module(patched.lm_head)
        for _ in range(2):
            assert_accurate(compiled(), expected, exact, "loss")
    assert stats(patched).fused == 4


@pytest.mark.parametrize("what", ["backward", "graph break", "dynamic", "no labels first"])
def test_traced_again(what: str) -> None:
    """At a graph break or a dynamic shape Dynamo traces again, and raises if the second trace takes another branch."""
    plain, patched = twins()

    def step(model: Any) -> torch.Tensor:
        if what == "no labels first":
            with torch.no_grad():
                model(**{**NO_CACHE, "labels": None})
        loss = model(**NO_CACHE).loss
        if what == "backward":
            loss.backward()
        elif what != "dynamic":
            torch._dynamo.graph_break()
        return loss * 1.0

    counter = CompileCounter()
    compiled = torch.compile(step, dynamic=what == "dynamic", backend=counter)
    losses, frames = [], []
    for _ in range(3):
        patched.zero_grad()
        losses.append(compiled(patched).detach())
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1 and stats(patched).fused == 3
    assert_accurate(losses[-1], step(plain), step(float64_copy(plain)), "loss")
    if what == "backward":
        assert_accurate(patched.lm_head.weight.grad, plain.lm_head.weight.grad, plain.lm_head.weight.grad, "gradient")


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_eager_calls_between_compiled_ones(family: str) -> None:
    """They leave the head's forward as the graph of a step function expects it, so nothing is compiled again."""
    plain, patched = twins(family)
    counter = CompileCounter()

    def step(model: Any) -> torch.Tensor:
        return 2.0 * model(**NO_CACHE).loss

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(3):
        apply_cce(patched)  # as CCECallback does at each train()
        loss = compiled(patched)
        loss.backward()
        assert_accurate(loss, step(plain), step(float64_copy(plain)), "loss")
        assert_same_training(patched, plain, batch())
        assert torch.equal(patched.eval()(**batch()).logits, plain(**batch()).logits)
        patched.generate(batch()["input_ids"], max_new_tokens=2)
        patched.train()
    assert counter.frame_count == 1 and stats(patched).traced
    assert_fused(patched, calls=6)
    compiled(patched)
    remove_cce(patched)
    assert module_state(patched) == module_state(plain)


def test_compiled_call_leaves_a_head_that_cannot_defer_as_it_was() -> None:
    """A forward of ours around the head's would hide what tensor parallelism has put there."""
    patched = apply_cce(tiny_llama())
    patched.lm_head._hf_tp_plan = "colwise"
    with pytest.warns(UserWarning, match="a head under tensor parallelism"):
        torch.compile(model_loss, backend="eager")(patched, NO_CACHE)
    assert "forward" not in patched.lm_head.__dict__


class OwnLinear(nn.Linear):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    "reason", ["needs the full logits", "computes more than one linear layer", "OwnLinear, which is not a plain"]
)
def test_compiled_call_that_needs_full_logits_warns_once(reason: str) -> None:
    """The warning comes while tracing, and the model stays a single graph."""
    plain, patched = twins()
    for model in (plain, patched):
        if reason == "needs the full logits":
            model.loss_function = lambda logits, labels, **_: (1.0 - logits.float()).square().mean()
        elif "OwnLinear" in reason:
            model.lm_head.__class__ = OwnLinear
        else:  # in a graph, this adapter's own product cannot be deferred
            torch.manual_seed(0)
            get_peft_model(model, OFTConfig(target_modules=["lm_head"], oft_block_size=4))
    counter = CompileCounter()
    compiled = torch.compile(patched, fullgraph=True, backend=counter)
    with cce_warnings() as messages:
        for _ in range(2):
            assert_same_training(
                patched, plain, NO_CACHE, loss_of=lambda model, x: (compiled if model is patched else model)(**x).loss
            )
    (message,) = messages
    assert reason in message and "fell back to full logits" in message and counter.frame_count == 1
    assert (compiled(**NO_CACHE).logits is None) == (reason == "needs the full logits")
    assert stats(patched).calls == stats(patched).fused == 0 and not stats(patched).traced


def test_models_that_share_a_head_are_compiled_once() -> None:
    first, second = tiny_llama(), tiny_llama()
    second.lm_head = first.lm_head
    apply_cce(first), apply_cce(second)
    counter = CompileCounter()
    compiled = [torch.compile(model, backend=counter) for model in (first, second)]
    for _ in range(3):
        losses = [each(**batch(), use_cache=False).loss for each in compiled]
    assert counter.frame_count == 2 and losses[0] == losses[1]
    assert stats(first).fused == stats(second).fused == 3


@pytest.mark.parametrize("compiled", ["outer", "inner"])
def test_compiled_model_inside_patched_model(compiled: str) -> None:
    name = "Blip2ForConditionalGeneration"
    plain = tiny.build(name)
    patched = copy.deepcopy(plain)
    for model in (patched, patched.language_model):
        apply_cce(model)
    (patched if compiled == "outer" else patched.language_model).compile(backend="eager")
    assert_same_training(patched, plain, tiny.text(name), redraw=True)
    assert_fused(patched)
    assert stats(patched.language_model).calls == 0


@pytest.mark.parametrize("trained", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapter_added_after_a_compiled_call(trained: dict[str, Any]) -> None:
    """The head inside the adapter still has the forward that the graph gave to it."""
    plain, patched = twins()
    torch.compile(model_loss, backend="eager")(patched, NO_CACHE)
    plain, patched = (with_lora(model, **trained) for model in (plain, patched))
    assert_same_training(patched, plain, batch())
    assert_fused(patched)
    remove_cce(patched)
    assert module_state(patched) == module_state(plain)


@pytest.mark.parametrize(
    "way", ["wrapper", *(pytest.param(way, marks=pytest.mark.slow) for way in ("in place", "around"))]
)
def test_patching_compiled_model_drops_its_graphs(way: str) -> None:
    model = tiny_llama()
    compiled = torch.compile(lambda **inputs: model(**inputs), fullgraph=True, backend="eager")
    if way == "wrapper":
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    elif way == "in place":
        model.compile(fullgraph=True, backend="eager")
        compiled = model
    target = compiled if isinstance(compiled, nn.Module) else model
    assert compiled(**NO_CACHE).logits is not None
    apply_cce(target)
    assert compiled(**NO_CACHE).logits is None
    remove_cce(target)
    assert compiled(**NO_CACHE).logits is not None


def test_patching_resets_dynamo_only_after_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, a reset imports Inductor."""
    resets: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    model = tiny_llama()
    torch._dynamo.utils.counters.clear()
    apply_cce(model)
    remove_cce(model)
    assert resets == []
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    apply_cce(model)
    assert resets == [True]


def test_instance_of_a_patched_class_gets_a_graph_of_its_own() -> None:
    compiled = torch.compile(lambda model: model(**NO_CACHE).logits, fullgraph=True, backend="eager")
    plain = tiny_llama()
    assert compiled(plain) is not None
    apply_cce(type(plain))
    try:
        assert compiled(tiny_llama()) is None
    finally:
        remove_cce(type(plain))


@pytest.mark.parametrize("trained", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.usefixtures("one_rank")
def test_head_with_a_layer_that_peft_gives_to_fsdp1(trained: dict[str, Any]) -> None:
    model = with_lora(tiny_llama(), **trained)
    options = {"auto_wrap_policy": fsdp_auto_wrap_policy(model), "device_id": torch.device("cpu")}
    wrapped = apply_cce(FullyShardedDataParallel(model, use_orig_params=True, **options))
    with cce_warnings() as messages:
        wrapped(**batch()).loss.backward()
    assert len(messages) == 1 and "is a separate FSDP1 unit" in messages[0]


def replica_of(model: nn.Module) -> Any:
    """Return a replica as DataParallel makes it, on the CPU: copies of the tensors take the place of those sent to a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        copies = lambda tensors, devices, detach=False: [[tensor * 1 for tensor in tensors]]  # noqa: E731
        patch.setattr(sys.modules[replicate.__module__], "_broadcast_coalesced_reshape", copies)
        return replicate(model, [0])[0]


def test_data_parallel_replica_returns_tensors() -> None:
    """DataParallel gathers only tensors."""
    model = apply_cce(tiny_llama())
    replica = replica_of(model)
    output = replica(**batch())
    assert output.logits is None and "logits" not in output.keys()  # noqa: SIM118
    assert replica(**batch(), return_dict=False)[0].dim() == 0
    output.loss.backward()
    assert model.lm_head.weight.grad is not None
    assert_fused(model, calls=2)
    assert patch_of(model).head_forward is None, "the model would keep a replica's head alive"


@pytest.mark.parametrize("lora", [False, True])
def test_data_parallel_replica_of_a_compiled_model_uses_its_own_head(lora: bool) -> None:
    model = apply_cce(tiny_llama())
    torch.compile(model_loss, backend="eager")(model, NO_CACHE)
    if lora:
        with_lora(model, target_modules=["lm_head"], init_lora_weights=True)
    replica = replica_of(model.eval())
    layer = replica.lm_head.base_layer if lora else replica.lm_head
    layer.weight = layer.weight * 2
    assert torch.equal(replica(**batch(), use_cache=False).logits, 2 * model(**batch(), use_cache=False).logits)


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_wraps_and_unwraps() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(mixed_precision="bf16", cpu=True)
    first, later = apply_cce(tiny_llama()), tiny_llama()
    prepared = [accelerator.prepare(first), apply_cce(accelerator.prepare(later))]
    plain = accelerator.prepare(tiny_llama())
    expected = loss_and_grads(plain, batch())
    reference = loss_and_grads(float64_copy(tiny_llama()), batch(), double=True)
    for model in prepared:
        actual = loss_and_grads(model, batch())
        assert_accurate(actual["loss"], expected["loss"], reference["loss"], "loss", torch.bfloat16)
        logits = model(**batch()).logits
        assert logits.dtype is torch.float32 and torch.equal(logits.materialize(), plain(**batch()).logits)
    for model in (first, later):
        assert stats(model).missed == 0 and stats(model).fused == stats(model).calls
    for keep in (True, False):
        unwrapped = accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=keep)
        before = stats(unwrapped).fused
        loss_and_grads(unwrapped, batch())
        assert stats(unwrapped).fused == before + 1


@pytest.mark.slow
def test_accelerate_device_hooks_after_a_compiled_call() -> None:
    """The hooks call the forward that the graph gave to the head."""
    hooks = pytest.importorskip("accelerate.hooks")
    plain, patched = twins()
    compiled = torch.compile(model_loss, backend="eager")
    compiled(patched, NO_CACHE)
    hooks.add_hook_to_module(patched.lm_head, hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert_same_training(patched, plain, NO_CACHE)
    assert_same_training(
        patched, plain, NO_CACHE, loss_of=lambda model, x: (compiled if model is patched else model_loss)(model, x)
    )
    assert_fused(patched)


def test_compiled_calls_of_an_unpickled_model_in_a_new_process() -> None:
    """Nothing but unpickling tells Dynamo how to trace our functions, and new hooks must not replace the unpickled ones."""
    code = """
import pickle, sys, torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
model, inputs = pickle.load(sys.stdin.buffer)
class Head(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)
model.lm_head.__class__ = Head
torch.compile(model, fullgraph=True, backend="eager")(**inputs)  # warns while it is traced
model.lm_head.__class__ = torch.nn.Linear
add_hook_to_module(model.lm_head, AlignDevicesHook("cpu"))  # its calls interrupt the graph
torch.compile(model, backend="eager")(**inputs)
for _ in range(500):  # a new process numbers hooks from zero again
    model.register_forward_hook(lambda *_: None), model.register_forward_pre_hook(lambda *_: None)
model(**inputs)
assert model._hf_cce.stats.fused == 2, model._hf_cce.stats
"""
    data = pickle.dumps((apply_cce(tiny_llama()), NO_CACHE))
    subprocess.run([sys.executable, "-c", code], input=data, check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_device_hooks_on_the_head(when: str, offload: bool) -> None:
    """The hooks rewrite ``head.forward``. With offload, its weight exists only in that forward and is held for the loss."""
    hooks = pytest.importorskip("accelerate.hooks")

    def hooked(model: Any) -> Any:
        weights = {"weight": model.lm_head.weight.detach().clone()} if offload else None
        hook = hooks.AlignDevicesHook("cpu", offload=offload, io_same_device=True, weights_map=weights)
        hooks.add_hook_to_module(model.lm_head, hook)
        return model

    plain = hooked(tiny_llama())
    patched = apply_cce(hooked(tiny_llama())) if when == "after" else hooked(apply_cce(tiny_llama()))
    head, forward = patched.lm_head, patched.lm_head.forward
    assert_same_training(patched, plain, batch(), reference=float64_copy(tiny_llama()))
    assert_fused(patched, calls=1)
    assert head.forward == forward and head.weight.is_meta == offload
    hooks.remove_hook_from_module(head)
    assert "forward" not in vars(head) or head.forward == nn.Linear.forward.__get__(head)


@pytest.mark.gpu
@pytest.mark.parametrize("head_on", ["cuda", "cpu"])
def test_head_on_another_device(head_on: str) -> None:
    """A model split by ``device_map``: accelerate moves the hidden states to the head and the logits back.

    A head on the CPU with a body on a GPU is offloaded: its weight is copied to the GPU for the head's forward.
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

    plain, reference = split(None), loss_and_grads(float64_copy(tiny_llama()), batch(), double=True)
    twin = loss_and_grads(plain, batch())
    for patch_first in (True, False):
        patched = split(patch_first)
        actual = loss_and_grads(patched, batch())
        assert_fused(patched, calls=1)
        for name, value in actual.items():
            assert value.device == twin[name].device
            assert_accurate(value, twin[name], reference[name], name)
