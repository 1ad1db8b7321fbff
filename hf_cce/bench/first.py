"""How long the first forward and backward of a loss takes, in processes of their own: with an empty cache, and with a full one.

Each process makes the inputs and an optimizer, multiplies two matrices and waits, so that nothing but the loss's own start
is timed: its imports, its compilation, the launch of everything once. --times processes share one cache, after the first,
which begins with none: Triton's and torch.compile's caches lie in a folder of the run.

With --step it is the first training step of a Llama of two layers, whose loss was installed before its optimizer and its batch
were made: what a training waits for, of which full logits' is the part that is not the loss's.

usage: python -m hf_cce.bench.first --json OUT.json [--peers hf_cce "apple cce" …] [--step]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_cce.bench import machine
from hf_cce.bench.files import write_json
from hf_cce.bench.installed import LOSSES, Missing, install
from hf_cce.bench.peers import BUILDERS, PACKAGES, Loss, make_peers

PEERS = ["hf_cce", "hf_cce exact", "torch.compile", "liger", "apple cce"]
OF_STEPS = ["eager", "hf_cce", "hf_cce-exact"]
SHAPE = (8192, 1024, 49152)


def first_call(name: str, shape: tuple[int, int, int], device: str) -> dict[str, Any]:
    """Seconds of the first forward and backward in this process, imports of the loss included, and of the second."""
    n, d, v = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(n, d, device=device, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(v, d, device=device, dtype=dtype) * 0.02)
    labels = torch.randint(v, (n,), device=device)
    torch.optim.AdamW([weight])  # every training has one, and it brings half of PyTorch
    (hidden[:64] @ weight[:64].t()).float().sum().backward()
    machine.synchronize(hidden.device)

    def seconds_of(loss: Loss) -> float:
        began = time.perf_counter()
        loss(hidden, weight, labels).backward()
        machine.synchronize(hidden.device)
        hidden.grad = weight.grad = None
        return time.perf_counter() - began

    began = time.perf_counter()
    losses, missing = make_peers([name])  # imports it
    if missing:
        return {"missing": missing[name]}
    imported = time.perf_counter() - began
    return {"first_s": imported + seconds_of(losses[name]), "second_s": seconds_of(losses[name])}


def first_step(name: str, shape: tuple[int, int, int], device: str) -> dict[str, Any]:
    """Seconds of the first training step in this process, forward and backward, and of the second; of installing the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    n, d, v = shape
    config = LlamaConfig(
        vocab_size=v, hidden_size=d, intermediate_size=4 * d, num_hidden_layers=2,
        num_attention_heads=max(1, d // 64), num_key_value_heads=max(1, d // 64),
    )  # fmt: skip
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    machine.synchronize(model.device)
    began = time.perf_counter()
    try:
        install(model, name)
    except Missing as error:
        return {"missing": str(error)}
    installed = time.perf_counter() - began
    torch.optim.AdamW(model.parameters())
    sequence = min(n, 2048)
    ids = torch.randint(v, (n // sequence, sequence), device=device)
    machine.synchronize(model.device)

    def seconds() -> float:
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        machine.synchronize(model.device)
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return {"install_s": installed, "first_s": seconds(), "second_s": seconds()}


def measure(name: str, shape: tuple[int, int, int], times: int, device: str, step: bool) -> dict[str, Any]:
    """``first_s`` with an empty cache, ``later_s`` of each process after that."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        }
        command = [
            sys.executable,
            "-m",
            "hf_cce.bench.first",
            "--here",
            name,
            "--device",
            device,
            "--shape",
            *map(str, shape),
            *(["--step"] if step else []),
        ]
        runs = []
        for _ in range(times):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                return {"failed": done.stderr[-2000:]}
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            if "missing" in runs[-1]:
                return runs[-1]
    return {"first_s": runs[0]["first_s"], "later_s": [run["first_s"] for run in runs[1:]], "runs": runs}


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| loss | first process, s | later processes, s |", "|---|---|---|"]
    for name, result in results.items():
        if "first_s" in result:
            later = ", ".join(f"{seconds:.2f}" for seconds in result["later_s"])
            lines.append(f"| {name} | {result['first_s']:.2f} | {later} |")
        else:
            lines.append(f"| {name} | {next(iter(result.values())).strip().splitlines()[-1]} | |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", nargs="+", metavar="PEER", help=f"{', '.join(BUILDERS)}; with --step {', '.join(LOSSES)}"
    )
    parser.add_argument("--step", action="store_true", help="of a whole training step of a small model")
    parser.add_argument(
        "--shape", nargs=3, type=int, default=SHAPE, metavar=("N", "D", "V"), help="default: %(default)s"
    )
    parser.add_argument(
        "--times", type=int, default=3, help="processes, the first with an empty cache; default: %(default)s"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    n, d, v = args.shape
    peers, known = args.peers or (OF_STEPS if args.step else PEERS), LOSSES if args.step else BUILDERS
    if unknown := [name for name in peers if name not in known]:
        parser.error(f"--peers: {unknown[0]!r} is none of {', '.join(known)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device")
    if args.here:
        print(json.dumps((first_step if args.step else first_call)(args.here, (n, d, v), args.device)))
        return 0
    results: dict[str, dict[str, Any]] = {}
    report = {
        "command": machine.command("hf_cce.bench.first", arguments),
        "device": machine.device_name(torch.device(args.device)),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": machine.versions("torch", "triton", "transformers", *PACKAGES),
        "of": "training step of a Llama of two layers" if args.step else "forward and backward of the loss",
        "shape": {"tokens": n, "hidden_size": d, "vocab_size": v},
        "results": results,
    }
    for name in peers:
        results[name] = measure(name, (n, d, v), args.times, args.device, args.step)
        print(table({name: results[name]}).splitlines()[-1], file=sys.stderr, flush=True)
        if args.json:
            write_json(args.json, report)
    print(table(results))
    return 1 if any("failed" in result for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
