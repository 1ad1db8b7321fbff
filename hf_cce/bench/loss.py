"""Times and weighs the loss against its peers, interleaved in one process, and checks it in the same run.

usage: python -m hf_cce.bench.loss --json OUT.json [--shape N,D,V ...] [--head HEAD.pt] [--peers NAME ...] [--repeats 10]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_cce import linear_cross_entropy
from hf_cce.bench.files import whole_file
from hf_cce.bench.peers import Loss, make_peers

SHAPES = ("8192,1024,49152", "2048,576,49152", "8192,896,151936", "4096,4096,128256", "8192,2304,256000")
MIB = 1 << 20


def versions() -> dict[str, str]:
    """Of everything that decides a figure."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


class Stopwatch:
    """Times calls one after the other. On a GPU: the device's own time, of calls that are queued while it is busy sleeping.

    Without the sleep, the time that Python needs to launch the first kernels would count as the device's; a training step
    queues its loss while the device still works on the layers before it. ``wall_ms`` is for the other side of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[Any] = []

    def run(self, function: Callable[[], Any]) -> None:
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            self.spans.append((time.perf_counter() - start) * 1e3)
            return
        start_event, stop_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)  # clock cycles, some 2 ms
        start_event.record()
        function()
        stop_event.record()
        self.spans.append((start_event, stop_event))

    def milliseconds(self) -> list[float]:
        if self.device.type != "cuda":
            return self.spans
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in self.spans]


def wall_ms(function: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Milliseconds a call when calls follow each other without a pause: whichever is slower, host or device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def exact_gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ∂/∂hidden, ∂/∂weight) in float64, by the portable implementation in slabs."""
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = linear_cross_entropy(h, w, labels)
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), h.grad, w.grad


def three_gemms(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The matrix products that a dense loss cannot avoid, as one call: logits, and both gradients."""
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device).normal_(std=1e-3)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)

    return run


def measure(
    hidden: Tensor, weight: Tensor, labels: Tensor, losses: dict[str, Loss], repeats: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of figures for one problem: milliseconds, MiB above inputs and gradients, relative errors against float64."""
    device = hidden.device
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    rows: dict[str, dict[str, Any]] = {}
    exact = exact_gradients(hidden.detach(), weight.detach(), labels)

    def step(loss: Loss) -> None:
        h.grad = w.grad = None
        loss(h, w, labels).backward()

    alive: dict[str, Loss] = {}
    for name, loss in losses.items():
        try:
            start = time.perf_counter()
            step(loss)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            first_call = time.perf_counter() - start
            step(loss)
            assert h.grad is not None and w.grad is not None
            rows[name] = {
                "first_call_s": first_call,
                "loss_error": relative_error(loss(h, w, labels).detach(), exact[0]),
                "grad_hidden_error": relative_error(h.grad, exact[1]),
                "grad_weight_error": relative_error(w.grad, exact[2]),
            }
            alive[name] = loss
        except (RuntimeError, ValueError, TypeError) as error:
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            log(f"{name}: {rows[name]['failed']}")
    del exact
    gc.collect()
    if device.type == "cuda":
        for name, loss in alive.items():
            h.grad = w.grad = None
            torch.cuda.empty_cache()
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            step(loss)
            torch.cuda.synchronize(device)
            gradients = sum(x.grad.numel() * x.grad.element_size() for x in (h, w) if x.grad is not None)
            rows[name]["extra_mib"] = (torch.cuda.max_memory_allocated(device) - before - gradients) / MIB
        h.grad = w.grad = None
    gemms = three_gemms(hidden.detach(), weight.detach())
    gemms()
    both = {name: Stopwatch(device) for name in alive}
    forward = {name: Stopwatch(device) for name in alive}
    reference = Stopwatch(device)
    for _ in range(repeats):  # interleaved, and the GEMMs too: clocks fall as the chip warms up
        reference.run(gemms)
        for name, loss in alive.items():
            both[name].run(partial(step, loss))
            with torch.no_grad():
                forward[name].run(partial(loss, h, w, labels))
    three = statistics.median(reference.milliseconds())
    for name, loss in alive.items():
        times, forward_times = both[name].milliseconds(), forward[name].milliseconds()
        rows[name].update(
            ms=statistics.median(times),
            ms_spread=[min(times), max(times)],
            forward_ms=statistics.median(forward_times),
            gemm_multiple=statistics.median(times) / three,
            forward_gemm_multiple=3 * statistics.median(forward_times) / three,
            wall_ms=wall_ms(partial(step, loss), device),
        )
    h.grad = w.grad = None
    return {"three_gemms_ms": three, "rows": rows}


def synthetic(n: int, d: int, v: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A flat head, as at the start of pretraining: logits of standard deviation 0.02 √D."""
    g = torch.Generator(device=device).manual_seed(n + d + v)
    hidden = torch.randn(n, d, device=device, generator=g).to(dtype)
    weight = (0.02 * torch.randn(v, d, device=device, generator=g)).to(dtype)
    return hidden, weight, torch.randint(v, (n,), device=device, generator=g)


def table(title: str, result: dict[str, Any]) -> str:
    lines = [
        f"### {title} (three GEMMs: {result['three_gemms_ms']:.2f} ms)",
        "| | ms | × 3 GEMMs | forward ms | × 1 GEMM | wall ms | MiB above gradients | error loss | dh | dW | first call s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if "failed" in row:
            lines.append(f"| {name} | {row['failed'][:80]} |")
            continue
        lines.append(
            f"| {name} | {row['ms']:.2f} | {row['gemm_multiple']:.2f} | {row['forward_ms']:.2f} | "
            f"{row['forward_gemm_multiple']:.2f} | {row['wall_ms']:.2f} | {row.get('extra_mib', float('nan')):.0f} | "
            f"{row['loss_error']:.1e} | "
            f"{row['grad_hidden_error']:.1e} | {row['grad_weight_error']:.1e} | {row['first_call_s']:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", nargs="*", default=SHAPES, metavar="N,D,V")
    parser.add_argument("--head", type=Path, nargs="*", default=[], help="files with real E [N, D], C [V, D], T [N]")
    parser.add_argument("--tokens", type=int, default=8192, help="of each head file")
    parser.add_argument("--peers", nargs="*")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    losses, missing = make_peers(args.peers)
    report: dict[str, Any] = {
        "command": "python -m hf_cce.bench.loss " + " ".join(arguments if arguments is not None else sys.argv[1:]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "versions": versions(),
        "dtype": args.dtype,
        "missing": missing,
        "results": {},
    }
    problems: list[tuple[str, Callable[[], tuple[Tensor, Tensor, Tensor]]]] = []
    for text in args.shape:
        n, d, v = map(int, text.split(","))
        problems.append((f"flat N={n} D={d} V={v}", partial(synthetic, n, d, v, device, dtype)))
    for path in args.head:

        def load(path: Path = path) -> tuple[Tensor, Tensor, Tensor]:
            head = torch.load(path, map_location=device)
            return head["E"][: args.tokens].to(dtype), head["C"].to(dtype), head["T"][: args.tokens].long()

        problems.append((f"trained {path.stem} N={args.tokens}", load))
    for title, make in problems:
        report["results"][title] = measure(*make(), losses, args.repeats, lambda line: print(line, file=sys.stderr))
        print(table(title, report["results"][title]), flush=True)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.json:
            with whole_file(args.json) as temporary:
                temporary.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
