"""``hf-cce bench``: which losses are measured on which problems, and the report that comes of it."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

import hf_cce
from hf_cce.bench import machine
from hf_cce.bench.heads import HEADS, MAX_TOKENS, Head, flat_head, train_head
from hf_cce.bench.measure import GEMMS, Bench, Problem
from hf_cce.bench.peers import PACKAGES, make_peers, make_sweep, sweep_name

Report = Callable[[dict[str, Any]], None]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Shape = tuple[int, int, int]  # N, D, V

GPU_SHAPES: tuple[Shape, ...] = (
    (8192, 1024, 49_152), (4096, 4096, 128_256), (8192, 896, 151_936),
    (128, 896, 151_936), (512, 896, 151_936), (2048, 896, 151_936),
)  # fmt: skip
GPU_HEADS = (("V49152", 8192), ("V49152", 32_768), ("V128256", 8192))
CPU_SHAPES: tuple[Shape, ...] = ((128, 256, 8192), (512, 256, 8192), (512, 256, 16_384))
CPU_HEADS = (("V512", 2048),)
CPU_PEERS = ("hf_cce", "hf_cce exact", "eager")  # the others take minutes to compile there, or do not run


@dataclass(frozen=True)
class Settings:
    """One benchmark. None: what suits the device, see ``resolved``.

    Args:
        shapes: (N, D, V) of flat heads.
        heads: (name, N) of trained heads; the names are those of ``hf_cce.bench.heads.HEADS``.
        peers: names of ``hf_cce.bench.peers.BUILDERS``.
        modes: among "forward" (no gradients), "both" (forward and backward), "frozen" (the weight needs no gradient).
        sweep: gradient filters to run hf_cce with on every problem.
        repeats: timed rounds of each problem.
        head_seconds: training time of each head.
        dtype: of hidden states and weight.
        dataset: text for the heads instead of Python's own sources.
    """

    shapes: tuple[Shape, ...] | None = None
    heads: tuple[tuple[str, int], ...] | None = None
    peers: tuple[str, ...] | None = None
    modes: tuple[str, ...] = ("both", "forward", "frozen")
    sweep: tuple[float, ...] = ()
    repeats: int | None = None
    head_seconds: float | None = None
    dtype: str | None = None
    device: str | None = None
    dataset: str | None = None

    def resolved(self) -> Settings:
        """With every None filled in, and checked. Shapes or heads that are named stand alone.

        Raises:
            ValueError: the device is not there, or a name is not known.
        """
        device = checked_device(self.device)
        gpu = device.type == "cuda"
        own = self.shapes is None and self.heads is None
        filled = replace(
            self,
            device=str(device),
            shapes=(GPU_SHAPES if gpu else CPU_SHAPES) if own else self.shapes or (),
            heads=(GPU_HEADS if gpu else CPU_HEADS) if own else self.heads or (),
            peers=self.peers or (None if gpu else CPU_PEERS),
            repeats=self.repeats or (10 if gpu else 5),
            head_seconds=self.head_seconds or (60.0 if gpu else 3.0),
            dtype=self.dtype or ("bfloat16" if gpu else "float32"),
        )
        if not filled.modes:
            raise ValueError(f"no mode is left to measure; known: {', '.join(GEMMS)}")
        if wrong := sorted(set(filled.modes) - set(GEMMS)):
            raise ValueError(f"unknown mode {', '.join(map(repr, wrong))}; known: {', '.join(GEMMS)}")
        if filled.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {filled.dtype!r}; known: {', '.join(DTYPES)}")
        for name, tokens in filled.heads or ():
            if name not in HEADS:
                raise ValueError(f"unknown head {name!r}; known: {', '.join(HEADS)}")
            if tokens > MAX_TOKENS:
                raise ValueError(f"--head {name}:{tokens}: a trained head keeps {MAX_TOKENS} held-out tokens at most")
        return filled


def shape_of(text: str) -> Shape:
    """(N, D, V) from "8192,1024,49152"."""
    try:
        n, d, v = (int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--shape {text!r}: expected N,D,V, such as 8192,1024,49152") from None
    if min(n, d) < 1 or v < 2:
        raise ValueError(f"--shape {text!r}: N and D must be at least 1, V at least 2")
    return n, d, v


def head_of(text: str) -> tuple[str, int]:
    """(name, N) from "V49152:8192"."""
    name, _, tokens = text.partition(":")
    if not name or not tokens.isdecimal() or not int(tokens):
        raise ValueError(f"--head {text!r}: expected NAME:TOKENS, such as V49152:8192; names: {', '.join(HEADS)}")
    return name, int(tokens)


def checked_device(name: str | None) -> torch.device:
    """The device of this name, or the best for measuring.

    Raises:
        ValueError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r}: expected cpu, cuda, cuda:1, mps …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} sees no NVIDIA GPU here; try --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: torch sees no Apple GPU here; try --device cpu")
    return device


def reference_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What errors are measured against: float64; float32 for shorter dtypes on a GPU where float64 takes 64 times longer."""
    if device.type == "cuda" and dtype.itemsize == 2:
        fast = torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))
        return torch.float64 if fast else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def run(settings: Settings, report: Report = lambda event: None, cache: Path | None = None) -> dict[str, Any]:
    """Measure all of it, problem after problem.

    Args:
        settings: what to measure.
        report: called with {"event": "say", "text"} for progress, and with {"event": "result", "title", "report"} as
            soon as a problem is done; the report is whole each time and may be written.
        cache: folder of the trained heads; default: the user's cache folder.

    Returns:
        Everything measured, ready for JSON. ``results`` by title holds ``problem``, ``gemms_ms`` by mode, and ``rows`` by
        loss. A row's keys are, for forward and backward, ``ms`` (median), ``ms_spread`` (least and most),
        ``gemm_multiple`` (of the three GEMMs), ``wall_ms``, ``extra_mib`` (peak above inputs and gradients),
        ``loss_error``, ``grad_hidden_error``, ``grad_weight_error``; the same with ``forward_`` (of one GEMM) and with
        ``frozen_`` (of two) for the other modes; ``filter`` if the loss tells about it; ``failed`` alone if it raised.

    Raises:
        ValueError: a setting cannot be met.
        RuntimeError: the training of a head failed, or the device has not enough memory for the GEMMs.
    """
    settings = settings.resolved()
    assert settings.dtype and settings.device and settings.repeats and settings.shapes is not None
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    losses, missing = make_peers(settings.peers)
    swept, missing_sweep = make_sweep(settings.sweep)
    losses.update(swept)
    if not losses:
        why = "; ".join(f"{name}: {reason}" for name, reason in (missing | missing_sweep).items())
        raise ValueError(f"none of these peers can run here: {why}")
    reference = reference_dtype(device, dtype)
    result: dict[str, Any] = {
        "device": machine.device_name(device),
        "versions": {
            "python": platform.python_version(),
            "hf_cce": hf_cce.__version__,
            **machine.versions("torch", "triton", "transformers", *PACKAGES),
        },
        "load_average_before": psutil.getloadavg()[0],
        "cpu_used_by_others_before": machine.used_before(),  # well above 0, and CPU times say little
        "dtype": settings.dtype,
        "reference": str(reference).removeprefix("torch."),
        "settings": asdict(settings),
        "sweep": {sweep_name(x): x for x in settings.sweep},
        "missing": missing | missing_sweep,
        "heads": {},
        "results": {},
    }

    def say(text: str) -> None:
        report({"event": "say", "text": text})

    heads = _heads(settings, device, result, say, cache)
    problems: list[tuple[str, dict[str, Any], Callable[[], Problem]]] = []
    for n, d, v in settings.shapes:

        def flat(n: int = n, d: int = d, v: int = v) -> Problem:
            return Problem(*flat_head(n, d, v, device, dtype))

        problems.append((f"flat N={n} D={d} V={v}", {"kind": "flat", "N": n, "D": d, "V": v}, flat))
    for name, n in settings.heads or ():
        head = heads[name]

        def trained(head: Head = head, n: int = n) -> Problem:
            # contiguous: the last rows of a longer head must not be kept alive
            hidden = head.hidden_states[:n].to(device, dtype, copy=True)
            return Problem(hidden, head.weight.to(device, dtype), head.labels[:n].to(device))

        v, d = head.weight.shape
        problems.append((f"trained {name} N={n}", {"kind": "trained", "head": name, "N": n, "D": d, "V": v}, trained))

    report({"event": "start", "problems": len(problems), "report": result})
    for title, about, make in problems:
        bench = Bench(make(), list(settings.modes), reference, lambda text, title=title: say(f"{title}: {text}"))  # type: ignore[misc]
        measured = bench.run(losses, settings.repeats, frozenset(swept))
        result["results"][title] = {"problem": about, **measured}
        report({"event": "result", "title": title, "report": result})
        del bench
        torch.compiler.reset()  # every problem pays for its own compilation, and the limit on recompiling is not met
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def _heads(
    settings: Settings, device: torch.device, result: dict[str, Any], say: Callable[[str], None], cache: Path | None
) -> dict[str, Head]:
    """The trained heads that the problems need, all made before anything is measured."""
    heads: dict[str, Head] = {}
    assert settings.head_seconds
    for name, tokens in settings.heads or ():
        if name not in heads:
            heads[name] = train_head(
                HEADS[name],
                seconds=settings.head_seconds,
                device=device,
                dataset=settings.dataset,
                cache=cache,
                say=lambda text, name=name: say(f"head {name}: {text}"),  # type: ignore[misc]
            )
            result["heads"][name] = {**heads[name].about, "from_cache": heads[name].cached}
            torch.compiler.reset()
        if tokens > (kept := len(heads[name].labels)):
            raise ValueError(
                f"--head {name}:{tokens}: not enough held-out tokens; the text ({heads[name].about['source']}) gave {kept}"
            )
    return heads
