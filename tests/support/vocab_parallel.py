"""Vocabulary-parallel losses (head sharded over the ranks) against full logits in float64; for tests/support/ranks.py."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from losses import OPTIONS, SMALL_BUDGET, Options, fused_loss, loss_and_gradients, make_inputs, plain_loss
from numerics import relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from hf_cce import CCEConfig, linear_cross_entropy, linear_log_probs

Case = tuple[int, Options, str, torch.dtype]  # V, options, which labels are ignored, dtype

CASES: dict[str, Case] = {
    **{f"options {i}": (3001, options, "some", torch.float32) for i, options in enumerate(OPTIONS)},
    **{f"all ignored {i}": (99, options, "all", torch.float32) for i, options in enumerate(OPTIONS)},
    **{f"bfloat16 {i}": (3001, options, "none", torch.bfloat16) for i, options in enumerate(OPTIONS)},
    "float64": (999, OPTIONS[1], "some", torch.float64),
    "even": (64, OPTIONS[1], "some", torch.float32),
    "few entries": (3, OPTIONS[1], "none", torch.float32),
    "nothing on the last rank": (1, Options(bias=True, z_loss=0.1), "some", torch.float32),
    "kernels": (203, OPTIONS[1], "some", torch.float32),
    # with two ranks, 50 is the first entry of the second shard
    **{f"ignore_index {i}": (99, Options(ignore_index=i), "none", torch.float32) for i in (0, 50, 98, -1)},
}


def shard_head(mesh: Any, hidden: Tensor, *heads: Tensor | None) -> list[Any]:
    """Replicate the hidden states and shard weight and bias in torch's chunks, one per rank."""
    made: list[Any] = [DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)]
    for x in heads:
        if x is None:
            made.append(None)
            continue
        chunk = -(-len(x) // mesh.size())
        start = min(len(x), chunk * mesh.get_local_rank())
        part = x[start : start + chunk]
        made.append(DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()))
    return made


def all_reduce_head_gradients(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum the shards' gradients of the head, and check that loss and hidden states' gradient are equal on every rank."""
    for name, value in found.items():
        if name in ("weight", "bias"):
            dist.all_reduce(value)
        else:
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), f"{name} differs between the ranks"
    return found


def distances(found: dict[str, Tensor], baseline: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    assert found.keys() == exact.keys() == baseline.keys()
    return {
        "errors": {name: relative_error(value, exact[name]) for name, value in found.items()},
        "baseline": {name: relative_error(value, exact[name]) for name, value in baseline.items()},
    }


def losses(mesh: Any) -> dict[str, Any]:
    """Run every option through the public function, with slabs so small that a rank's shard takes several."""
    results = {}
    for name, (v, options, ignored, dtype) in CASES.items():
        kernels = name == "kernels"
        if kernels and os.environ.get("TRITON_INTERPRET") != "1":
            continue
        n, d = (40, 32) if kernels else (300, 96)  # the interpreter is slow
        config = CCEConfig(implementation="triton") if kernels else SMALL_BUDGET
        inputs, labels = make_inputs(n, d, v, dtype, bias=options.bias, ignored=ignored)
        if name.startswith("ignore_index"):
            labels[::5] = options.ignore_index

        def sharded(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, options: Options, config: CCEConfig = config
        ) -> Tensor:
            hidden, weight, bias = shard_head(mesh, hidden, weight, bias)
            return fused_loss(config)(hidden, weight, bias, y, options)

        exact, baseline = (loss_and_gradients(plain_loss, inputs, labels, options, t) for t in (torch.float64, dtype))
        found = all_reduce_head_gradients(loss_and_gradients(sharded, inputs, labels, options, dtype))
        results[name] = {"dtype": str(dtype).removeprefix("torch."), **distances(found, baseline, exact)}
    return results


def log_probs(mesh: Any) -> dict[str, Any]:
    """Test every statistic that ``linear_log_probs`` supports here, and the gradients of differentiable ones."""
    inputs, labels = make_inputs(200, 64, 1001, torch.float32, bias=True)
    fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logit", "logsumexp")

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        z = 4 * torch.tanh(F.linear(hidden, weight, bias) * 0.8 / 4)
        log_p, valid = z.log_softmax(-1), labels != -100
        at_label = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        entropy, squares = -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1)
        return [x * valid for x in (at_label, entropy, squares.detach(), z.mean(-1), z.logsumexp(-1))]

    def sharded(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        h, w, b = shard_head(mesh, hidden, weight, bias)
        asked = dict.fromkeys(fields[1:], True)
        found = linear_log_probs(h, w, labels, bias=b, logit_scale=0.8, softcap=4.0, config=SMALL_BUDGET, **asked)
        assert found.is_top1 is None
        return [getattr(found, name) for name in fields]

    def run(function: Callable[..., list[Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs if x is not None]
        values = function(*leaves)
        assert not values[2].requires_grad
        weights = torch.linspace(0.5, 1.0, 200, dtype=dtype)
        sum((i + 1) * (x * weights).sum() for i, x in enumerate(values) if i != 2).backward()
        found = {name: x.detach() for name, x in zip(fields, values, strict=True)}
        return found | {name: x.grad for name, x in zip(("hidden", "weight", "bias"), leaves, strict=True)}

    exact, baseline, found = run(plain, torch.float64), run(plain, torch.float32), run(sharded, torch.float32)
    return {"log_probs": {"dtype": "float32", **distances(all_reduce_head_gradients(found), baseline, exact)}}


def wrong_use(mesh: Any) -> dict[str, str]:
    """Return the errors for wrong calls; every rank must raise before it waits for the others."""
    (hidden, weight, _), labels = make_inputs(20, 16, 99, torch.float32, ignored="none")
    h, w = shard_head(mesh, hidden, weight)
    beyond, split = labels.clone(), DTensor.from_local(hidden[:10], mesh, [Shard(0)], run_check=False)
    beyond[3] = 99
    calls: dict[str, Callable[[], Any]] = {
        "label beyond": lambda: linear_cross_entropy(h, w, beyond),
        "label beyond, whole": lambda: linear_cross_entropy(hidden, weight, beyond),
        "label below": lambda: linear_cross_entropy(h, w, -2 - labels, reduction="none"),
        "label below, log_probs": lambda: linear_log_probs(h, w, -2 - labels),
        "plain hidden states": lambda: linear_cross_entropy(hidden, w, labels),
        "split hidden states": lambda: linear_cross_entropy(split, w, labels),
        "plain weight": lambda: linear_cross_entropy(h, weight, labels),
        "bias": lambda: linear_cross_entropy(h, w, labels, bias=torch.zeros(99)),
        "is_top1": lambda: linear_log_probs(h, w, labels, is_top1=True),
        "second derivative": lambda: second_derivative(mesh, hidden, weight, labels),
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
            raised[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def second_derivative(mesh: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    leaf = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(*shard_head(mesh, leaf, weight), labels)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    grad.square().sum().backward()


def traffic(mesh: Any) -> dict[str, int]:
    """Count the collectives of one step by name; nothing may be gathered."""
    (hidden, weight, _), labels = make_inputs(300, 32, 99, torch.float32)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    made = shard_head(mesh, *leaves)
    with CommDebugMode() as mode:
        linear_cross_entropy(*made, labels).backward()
    return {str(name).split(".")[-1]: count for name, count in mode.get_comm_counts().items()}


def sharded_vocabulary_results() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    compared = {**losses(mesh), **log_probs(mesh)}
    return {"compared": compared, "raised": wrong_use(mesh), "traffic": traffic(mesh)}
