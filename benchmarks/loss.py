"""Measure the loss and its peers on random data and trained heads, interleaved in one process.

usage: python -m benchmarks.loss --head V49152:8192 --shape 8192,896,151936 --peers "hf_cce,eager,liger" --json OUT.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure as instrument
from benchmarks.files import write_json
from benchmarks.heads import HEADS, MAX_TOKENS, Head, train_head
from benchmarks.peers import BUILDERS, PACKAGES, make_peers
from hf_cce.cli.common import DTYPES
from hf_cce.diagnostics import bench
from hf_cce.diagnostics.gradcheck import Inputs
from hf_cce.diagnostics.machine import Progress


def parse_head(text: str) -> tuple[str, int]:
    """Parse "V49152:8192"."""
    name, _, tokens = text.partition(":")
    if name not in HEADS or not tokens.isdecimal() or not 0 < int(tokens) <= MAX_TOKENS:
        known = ", ".join(HEADS)
        raise ValueError(f"--head {text!r}: expected NAME:TOKENS, of {known}, with at most {MAX_TOKENS} tokens")
    return name, int(tokens)


def parse_shape(text: str) -> bench.Shape:
    """Parse "8192,1024,49152"."""
    try:
        n, d, v = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--shape {text!r}: expected N,D,V, such as 8192,1024,49152") from None
    if min(n, d) < 1 or v < 2:
        raise ValueError(f"--shape {text!r}: N and D must be at least 1, V at least 2")
    return n, d, v


def split_list(given: str, separator: str | None = None) -> list[str]:
    return [part.strip() for part in given.split(separator) if part.strip()]


def trained_problem(head: Head, tokens: int, plan: instrument.Plan) -> Inputs:
    """Move the first ``tokens`` of a trained head to the device.

    Raises:
        ValueError: the head has fewer tokens.
    """
    if tokens > len(head.labels):
        raise ValueError(
            f"the text ({head.about['source']}) gave only {len(head.labels)} held-out tokens, not {tokens}"
        )
    # Copy, so that the rest of a longer head does not stay in memory.
    hidden = head.hidden_states[:tokens].to(plan.device, plan.dtype, copy=True)
    return Inputs(hidden, head.weight.to(plan.device, plan.dtype), head.labels[:tokens].to(plan.device))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="", help="N,D,V of random data; several between spaces")
    parser.add_argument("--head", default="", help=f"NAME:TOKENS of a trained head ({', '.join(HEADS)}), likewise")
    parser.add_argument("--peers", default="", help=f"between commas, default all: {', '.join(BUILDERS)}")
    parser.add_argument("--sweep", default="", help="gradient filters to run hf_cce with, too, between commas")
    parser.add_argument("--modes", default=",".join(instrument.PREFIX), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, help="timed rounds")
    parser.add_argument("--head-seconds", type=float, default=60.0, help="training time of a head")
    parser.add_argument("--dataset", help="text file or folder for the heads; default: Python's own sources")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="written anew after each problem")
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, report: dict[str, Any], plan: instrument.Plan, progress: Progress) -> None:
    """Add results to ``report`` and write it to disk after each problem."""
    peers, filters = split_list(args.peers, ","), [float(x) for x in split_list(args.sweep, ",")]
    losses, report["missing"] = make_peers(peers, filters)
    if not losses:
        raise ValueError(f"none of these peers can run here: {report['missing']}")
    report["sweep"], report["heads"] = {f"hf_cce filter {x:g}": x for x in filters}, {}

    def add(title: str, problem: Inputs, about: dict[str, Any]) -> None:
        result = instrument.measure(title, problem, losses, plan, progress)
        report["results"][title] = {**result, "problem": {**about, **result["problem"]}}
        if args.json:
            write_json(args.json, report)

    for shape in map(parse_shape, split_list(args.shape)):
        problem = bench.random_problem(shape, plan.device, plan.dtype)
        add("flat N={} D={} V={}".format(*shape), problem, {"kind": "flat"})
    for name, tokens in map(parse_head, split_list(args.head)):
        head = train_head(HEADS[name], args.head_seconds, plan.device, dataset=args.dataset, progress=progress)
        report["heads"][name] = {**head.about, "from_cache": head.cached}
        torch.compiler.reset()
        add(f"trained {name} N={tokens}", trained_problem(head, tokens, plan), {"kind": "trained", "head": name})


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        plan = instrument.planned(args.device, args.dtype, args.repeats, tuple(split_list(args.modes, ",")))
        report = instrument.header("benchmarks.loss", arguments, plan, *PACKAGES)
        measure(args, report, plan, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = instrument.markdown(report)
    print(text)
    if args.markdown:
        args.markdown.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
