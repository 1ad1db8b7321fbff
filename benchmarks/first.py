"""Measure the first forward and backward of a loss in fresh processes: with an empty compile cache, then with a full one.

Each process creates the inputs and an optimizer first, so that only the loss's startup is timed: imports, compilation, first
launches. Triton's and torch.compile's caches are in a folder of the run. With --steps, the first 40 training steps of a
two-layer Llama on one sequence are timed instead, including ``apply_cce``: later steps may compile kernels too.

usage: python -m benchmarks.first --json OUT.json [--peers hf_cce "apple cce" …] [--steps]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import write_json
from benchmarks.installed import LOSSES, Missing, install
from benchmarks.origin import origin
from benchmarks.peers import BUILDERS, PACKAGES, make_peers
from hf_cce.diagnostics import machine

DEFAULT_PEERS = ["hf_cce", "hf_cce exact", "torch.compile", "liger", "apple cce"]
DEFAULT_STEP_LOSSES = ["eager", "hf_cce", "hf_cce-exact"]
SHAPE = (8192, 1024, 49152)


def seconds_of(function: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the seconds that one forward and backward take."""
    began = time.perf_counter()
    function().backward()
    machine.synchronize(device)
    return time.perf_counter() - began


def first_call(name: str, shape: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Time the first forward and backward in this process, including the imports of the loss, and the second."""
    n, d, v = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(n, d, device=device, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(v, d, device=device, dtype=dtype) * 0.02)
    labels = torch.randint(v, (n,), device=device)
    torch.optim.AdamW([weight])  # as in every training; importing it loads half of PyTorch
    (hidden[:64] @ weight[:64].t()).float().sum().backward()
    machine.synchronize(device)
    began = time.perf_counter()
    losses, missing = make_peers([name])  # imports the peer
    if missing:
        return {"missing": missing[name]}
    imported = time.perf_counter() - began
    first, second = (seconds_of(lambda: losses[name](hidden, weight, labels), device) for _ in range(2))
    return {"first_s": imported + first, "second_s": second}


def first_steps(name: str, shape: tuple[int, int, int], device: torch.device, count: int = 40) -> dict[str, Any]:
    """Time installing the loss and the first ``count`` training steps in this process (forward and backward)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    n, d, v = shape
    heads = max(1, d // 64)
    config = LlamaConfig(
        vocab_size=v, hidden_size=d, intermediate_size=4 * d, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads,
    )  # fmt: skip
    with device:
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()
    machine.synchronize(device)
    began = time.perf_counter()
    try:
        install(model, name)
    except Missing as error:
        return {"missing": str(error)}
    installed = time.perf_counter() - began
    torch.optim.AdamW(model.parameters())
    ids = torch.randint(v, (1, n), device=device)
    machine.synchronize(device)
    first, *later = (seconds_of(lambda: model(input_ids=ids, labels=ids).loss, device) for _ in range(count))
    return {
        "first_s": installed + first + sum(later),
        "install_s": installed,
        "step_s": first,
        "slowest_later_s": max(later),
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run ``args.times`` processes; ``first_s`` is measured with an empty cache, ``later_s`` with a filled one."""
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        caches["PYTHONDONTWRITEBYTECODE"] = ""  # an installed package has its bytecode
        shape = map(str, args.shape)
        command = [sys.executable, "-m", "benchmarks.first", "--here", name, "--device", args.device, "--shape", *shape]
        runs = []
        for _ in range(args.times):
            done = subprocess.run(
                [*command, *(["--steps"] if args.steps else [])], env={**os.environ, **caches}, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            if done.returncode:
                return {"failed": done.stderr[-2000:]}
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            if "missing" in runs[-1]:
                return runs[-1]
    return {"first_s": runs[0]["first_s"], "later_s": [run["first_s"] for run in runs[1:]], "runs": runs}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"{', '.join(BUILDERS)}; with --steps {', '.join(LOSSES)}"
    parser.add_argument("--peers", nargs="+", metavar="PEER", help=known)
    parser.add_argument("--steps", action="store_true", help="of 40 training steps of a small model")
    parser.add_argument("--shape", nargs=3, type=int, default=SHAPE, metavar=("N", "D", "V"))
    parser.add_argument("--times", type=int, default=3, help="processes, the first with an empty cache")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.peers = args.peers or (DEFAULT_STEP_LOSSES if args.steps else DEFAULT_PEERS)
    known_names = LOSSES if args.steps else BUILDERS
    if unknown := [name for name in args.peers if name not in known_names]:
        parser.error(f"--peers: {unknown[0]!r} is none of {', '.join(known_names)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    n, d, v = args.shape
    device = torch.device(args.device)
    if args.here:
        print(json.dumps((first_steps if args.steps else first_call)(args.here, (n, d, v), device)))
        return 0
    results: dict[str, dict[str, Any]] = {}
    report = {
        **origin("benchmarks.first", arguments, device, *PACKAGES),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "of": "40 training steps of a Llama of two layers" if args.steps else "forward and backward of the loss",
        "shape": {"tokens": n, "hidden_size": d, "vocab_size": v},
        "results": results,
    }
    for name in args.peers:
        results[name] = measure(name, args)
        print(f"{name}: {results[name]}", flush=True)
        if args.json:
            write_json(args.json, report)
    return 1 if any("failed" in result for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
