"""Measure distillation losses on a CUDA GPU: time, memory and error of ``linear_divergence`` and its peers.

usage: python -m benchmarks.divergence --out FILE [--shapes 8192,896,1536,151936 …] [--kinds forward_kl,jsd] [--peers hf_cce,trl]

A shape is tokens, student hidden size, teacher hidden size, vocabulary. The loss is the mean over tokens, with gradients of the
student's hidden states and head, on random data. The limit is each matrix product once, 2NV(3D + D_t) operations at the GEMM
rate measured in this run. Errors are relative to float32. Memory excludes the gradients.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.files import write_json
from benchmarks.origin import origin
from hf_cce import CCEConfig, TeacherHead, linear_divergence
from hf_cce.config import MIB

SHAPES = "8192,896,1536,151936 4096,896,1536,151936 4096,2048,4096,128256"
MIXED = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # student hidden states and head, then the teacher's


def from_logits(zs: Tensor, zt: Tensor, beta: float) -> Tensor:
    """Return the divergence of each token."""
    log_ps, log_pt = F.log_softmax(zs, -1), F.log_softmax(zt, -1)
    if beta == 0.0:
        return (log_pt.exp() * (log_pt - log_ps)).sum(-1)
    if beta == 1.0:
        return (log_ps.exp() * (log_ps - log_pt)).sum(-1)
    log_m = torch.logaddexp(log_ps + math.log(1 - beta), log_pt + math.log(beta))
    return beta * (log_pt.exp() * (log_pt - log_m)).sum(-1) + (1 - beta) * (log_ps.exp() * (log_ps - log_m)).sum(-1)


def full(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, beta: float) -> Tensor:
    return from_logits((hs @ ws.T).float(), (ht @ wt.T).float(), beta).mean()


def ours(kind: str, budget: int | None) -> Loss:
    config = CCEConfig() if budget is None else CCEConfig(memory_budget=budget)
    return lambda hs, ws, ht, wt: linear_divergence(
        hs, ws, TeacherHead(ht, wt), kind=kind, beta=0.5, config=config  # type: ignore[arg-type]
    )  # fmt: skip


def trl(beta: float) -> Loss:
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    return lambda hs, ws, ht, wt: function.apply(hs, ws, None, ht, wt, None, beta)[0].mean()


def liger(beta: float) -> Loss:
    function = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
    return lambda hs, ws, ht, wt: function.apply(hs, ws, ht, wt, None, beta, -100, 1.0)


def make(peer: str, kind: str) -> Loss:
    """Build a peer: hf_cce, full, compile, trl or liger; hf_cce:1024 sets a budget in MiB."""
    name, _, option = peer.partition(":")
    beta = MIXED[kind]
    if name == "hf_cce":
        return ours(kind, int(option) * MIB if option else None)
    if name == "trl":
        return trl(beta)
    if name == "liger":
        return liger(beta)
    return partial(torch.compile(full, dynamic=False) if name == "compile" else full, beta=beta)


def median_ms(step: Callable[[], object], repeats: int) -> float:
    for _ in range(2):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def reference(inputs: tuple[Tensor, ...], beta: float) -> tuple[Tensor, Tensor, float]:
    """Return (gradient of the hidden states, gradient of the head, loss) computed in float32."""
    hs, ws, ht, wt = inputs
    head, teacher, total = ws.float().requires_grad_(), wt.float(), 0.0
    hidden_grad = torch.empty(hs.shape, device=hs.device)
    for rows in torch.arange(len(hs), device=hs.device).split(512):
        hidden = hs[rows].float().requires_grad_()
        loss = from_logits(hidden @ head.T, ht[rows].float() @ teacher.T, beta).sum() / len(hs)
        loss.backward()
        hidden_grad[rows], total = hidden.grad, total + loss.item()  # type: ignore[assignment]
    assert head.grad is not None
    return hidden_grad, head.grad, total


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.float() - exact).norm() / exact.norm())


def measure(
    loss: Loss, inputs: tuple[Tensor, ...], exact: tuple[Tensor, Tensor, float], repeats: int
) -> dict[str, float]:
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        found = loss(hidden, weight, *inputs[2:])
        found.backward()
        return found.detach()

    began = time.time()
    value = float(step())
    first = time.time() - began
    ms = median_ms(step, repeats)
    assert hidden.grad is not None and weight.grad is not None
    errors = relative(hidden.grad, exact[0]), relative(weight.grad, exact[1]), abs(value - exact[2]) / abs(exact[2])
    hidden.grad = weight.grad = None
    clean()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    above = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    return dict(
        zip(("ms", "mib", "error_hidden", "error_weight", "error_loss", "first_s"),
        (ms, above / MIB, *errors, first), strict=True),
    )  # fmt: skip


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def problem(n: int, ds: int, dt: int, v: int) -> tuple[Tensor, ...]:
    """Return random inputs whose logits have standard deviation 2 (student) and 3 (teacher)."""
    torch.manual_seed(0)
    shapes = (((n, ds), 2.0), ((v, ds), ds**-0.5), ((n, dt), 3.0), ((v, dt), dt**-0.5))
    return tuple(torch.randn(shape, device="cuda").mul_(by).bfloat16() for shape, by in shapes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written anew after each figure")
    parser.add_argument("--shapes", nargs="*", default=SHAPES.split())
    parser.add_argument("--kinds", default="forward_kl,reverse_kl,jsd")
    parser.add_argument("--peers", default="hf_cce,compile,trl")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = False
    header = origin("benchmarks.divergence", arguments, torch.device("cuda"), "torch", "triton", "trl", "liger-kernel")
    report: dict[str, Any] = {**header, "results": []}
    for shape in args.shapes:
        n, ds, dt, v = sizes = tuple(map(int, shape.split(",")))
        inputs = problem(n, ds, dt, v)
        rate = 2 * n * v * ds / median_ms(lambda x=inputs: x[0] @ x[1].T, 5)  # type: ignore[misc]
        limit = 2 * n * v * (3 * ds + dt) / rate
        print(f"{shape}: GEMM {rate / 1e9:.0f} TFLOP/s, limit {limit:.2f} ms", flush=True)
        for kind in args.kinds.split(","):
            exact = reference(inputs, MIXED[kind])
            clean()
            for peer in args.peers.split(","):
                row: dict[str, Any] = {"shape": sizes, "kind": kind, "peer": peer, "limit_ms": limit}
                try:
                    row |= measure(make(peer, kind), inputs, exact, args.repeats)
                    print(
                        f"  {kind:10s} {peer:12s} {row['ms']:7.2f} ms = {row['ms'] / limit:.2f} × limit, {row['mib']:6.0f} MiB, "
                        f"error dh {row['error_hidden']:.1e} dW {row['error_weight']:.1e} loss {row['error_loss']:.1e}, "
                        f"first {row['first_s']:.1f} s",
                        flush=True,
                    )
                except Exception as error:  # out of memory or not installed: go on with the other peers
                    row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                    print(f"  {kind:10s} {peer:12s} {row['failed']}", flush=True)
                report["results"].append(row)
                write_json(args.out, report)
                clean()
            del exact
        del inputs
        clean()


if __name__ == "__main__":
    main()
