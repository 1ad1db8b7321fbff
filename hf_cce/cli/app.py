"""The command ``hf-cce`` and its sub-commands (the longer ones have a module each). Help does not load torch."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import hf_cce
from hf_cce.cli import demo, estimate
from hf_cce.cli.common import DTYPES, Output, add_device, add_sizes, file, size, table

SHOWN_ROWS = 5
NOT_SUPPORTED = {
    "special": "the loss is correct, but a tensor as large as the logits is still materialized",
    "refused": "apply_cce raises an error",
}
FAILURES = (ValueError, RuntimeError, OSError, ImportError, MemoryError)


def doctor(options: argparse.Namespace, out: Output) -> int:
    """Check this machine: packages, GPUs, what runs on them, and a self-test.

    Exit codes: 0 if everything is fine, 1 if something is wrong (the output shows how to fix it), 2 if the check could not run.
    """
    from hf_cce.diagnostics.doctor import diagnose
    from hf_cce.diagnostics.machine import TITLE

    found = diagnose(out.progress)
    checks = found["checks"]
    wrong = [check for check in checks if check["status"] == "wrong"]
    if wrong:
        out.print(f"{len(wrong)} problem{'s' * (len(wrong) > 1)} found; see the commands below to fix them.\n")
    else:
        out.print("No problems found.\n")
    out.print(table([(check["name"], check["status"], check["found"]) for check in checks], left=3))
    if found["implementations"]:
        out.print("", "What training runs here, compared with full logits:")
    for choice in found["implementations"]:
        title = TITLE[choice["implementation"]]
        out.print(f"  {choice['device']}, {choice['dtype']}: {title}: {choice['expect']}", f"    {choice['why']}")
    for title, status in (("To fix:", "wrong"), ("Optional:", "note")):
        fixes = [f"  {check['name']}: {check['fix']}" for check in checks if check["fix"] and check["status"] == status]
        if fixes:
            out.print("", title, *fixes)
    out.save(found)
    return int(bool(wrong))


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_name_or_path", metavar="MODEL", help="a folder, a name on the Hub, or a model type such as llama"
    )
    parser.add_argument("--tiny", action="store_true", help="use a small random model (always done for a model type)")
    add_device(parser, default="cpu")


def check(options: argparse.Namespace, out: Output) -> int:
    """Train one step of your model without and with hf_cce, and compare.

    The command compares loss, gradients and evaluation logits on random text in float32, on the CPU or on --device. It needs
    memory for the weights and two sets of gradients. --tiny uses a small random model instead.

    Exit codes: 0 if the results agree up to rounding and no full logits were materialized, 1 if they differ or full logits
    were materialized, 2 if the model could not be checked.
    """
    from hf_cce.diagnostics import check as checks
    from hf_cce.diagnostics.machine import checked_device

    model, random = checks.load(options.model_name_or_path, options.tiny, checked_device(options.device or "cpu"))
    report = checks.check(model, out.progress)
    without, with_cce = report["losses"]
    weights = "a tiny model with random weights" if random else "its own weights"
    out.print(
        checks.verdict(report),
        f"{report['model']}, {weights}, {report['parameters']:,} parameters, {report['device']}, float32",
        f"Loss: {without:.7f} without hf_cce, {with_cce:.7f} with hf_cce",
        f"Logits in evaluation: {'identical' if report['evaluation_same'] else 'different'}\n",
    )
    rows = sorted(report["differences"], key=lambda row: -row["error"] / row["allowed"])[:SHOWN_ROWS]
    cells = [(x["name"], f"{x['error']:.1e}", f"{x['allowed']:.1e}", "ok" if x["ok"] else "differs") for x in rows]
    out.print(table([("loss, or gradient of", "error", "allowed", ""), *cells]))
    out.print(f"The {len(rows)} results closest to their limit, of {len(report['differences'])}; --json writes all.")
    out.save(report)
    return int(not (report["same"] and report["saves"]))


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, {"--tokens": "8,192", "--hidden-size": "1,024", "--vocab-size": "49,152"})
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU (float16 on a T4), else float32")
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help="as in CCEConfig, such as 256MiB")
    add_device(parser)


def bench(options: argparse.Namespace, out: Output) -> int:
    """Measure time and memory of the loss on random data.

    All losses take turns in one process: hf_cce with and without the gradient filter, full logits and, on a GPU, torch.compile
    of full logits. Random data are the worst case: the gradient filter drops nothing, as at the start of pretraining.
    Without --tokens, --hidden-size and --vocab-size, several shapes that suit the device are measured; with one of them, a
    single shape.

    Exit codes: 0 if everything was measured, 1 if one of the losses failed, 2 if the benchmark could not run.
    """
    import torch

    from hf_cce.diagnostics import bench as benchmark
    from hf_cce.diagnostics.machine import checked_device, default_dtype

    given = (options.tokens, options.hidden_size, options.vocab_size)
    shapes = ((given[0] or 8192, given[1] or 1024, given[2] or 49_152),) if any(given) else ()
    device = checked_device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else default_dtype(device)
    report = benchmark.bench(shapes, device, dtype, options.memory_budget, out.progress)
    out.print(benchmark.markdown(report))
    out.save(report)
    failed = any("failed" in row for result in report["results"].values() for row in result["rows"].values())
    return int(failed)


def _gradcheck_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="test only this dtype; may be repeated (default: all)"
    )


def gradcheck(options: argparse.Namespace, out: Output) -> int:
    """Compare the errors of loss and gradients with those of full logits, against float64.

    For each result, the case closest to its limit is shown; --json writes all.

    Exit codes: 0 if all results are as close to float64 as full logits in the same dtype, plus rounding, 1 if one is not, 2 if
    the comparison could not run.
    """
    from hf_cce.diagnostics import gradcheck as comparison
    from hf_cce.diagnostics.machine import checked_device

    device = checked_device(options.device)
    problem = comparison.default_problem(device)
    report = comparison.gradcheck(problem, device, tuple(options.dtype or comparison.DTYPES), out.progress)
    out.print(
        comparison.verdict(report),
        f"{report['device']}; {problem.tokens:,} tokens, hidden size {problem.hidden_size:,}, vocabulary "
        f"{problem.vocab_size:,}; errors relative to float64\n",
    )
    closest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        key = row["computed_by"], row["quantity"]
        closest[key] = max(closest.get(key, row), row, key=comparison.error_ratio)
    cells = [("computed in", "", "closest case", "full logits", "hf_cce", "allowed", "")]
    for row in closest.values():
        errors = (f"{row[name]:.1e}" for name in ("full_logits", "hf_cce", "allowed"))
        cells.append((row["computed_by"], row["quantity"], row["case"], *errors, "ok" if row["ok"] else "worse"))
    out.print(table(cells, left=3))
    out.print(*(f"Not compared: {note}" for note in report["notes"]))
    out.save(report)
    return int(not report["ok"])


def models(options: argparse.Namespace, out: Output) -> int:
    """List the model types of the installed Transformers.

    Supported: training materializes no full logits. Special: the loss is correct, but a tensor as large as the logits is still
    materialized. Refused: apply_cce raises an error with the reason.

    Exit codes: 0 if the types were listed, 2 if Transformers cannot be loaded.
    """
    import transformers

    from hf_cce.families import families

    known = families()
    supported = [family.model_type for family in known if family.status == "supported"]
    out.print(f"Supported by hf_cce, in transformers {transformers.__version__}: {len(supported)} model types")
    indent: Any = {"initial_indent": "  ", "subsequent_indent": "  "}
    out.print(textwrap.fill(", ".join(supported), 118, break_on_hyphens=False, **indent))
    for status, meaning in NOT_SUPPORTED.items():
        out.print("", f"{status.capitalize()}: {meaning}")
        out.print(*(f"  {family.model_type}: {family.reason}" for family in known if family.status == status))
    out.print("", "Other classes with an LM head work too: apply_cce(model) checks the model itself, not this list.")
    out.save([{"type": x.model_type, "class": x.cls, "status": x.status, "reason": x.reason} for x in known])
    return 0


Run = Callable[[argparse.Namespace, Output], int]  # its docstring is the help
COMMANDS: dict[str, tuple[Run, Callable[[argparse.ArgumentParser], None]]] = {  # in the order of the help
    "doctor": (doctor, lambda parser: None),
    "estimate": (estimate.run, estimate.add_options),
    "check": (check, _check_options),
    "demo": (demo.run, demo.add_options),
    "bench": (bench, _bench_options),
    "gradcheck": (gradcheck, _gradcheck_options),
    "models": (models, lambda parser: None),
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="hf-cce", description="Train language models without materializing logits.")
    root.add_argument("--version", action="version", version=f"hf-cce {hf_cce.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (run, add_options) in COMMANDS.items():
        doc = inspect.getdoc(run) or ""
        subparser = commands.add_parser(
            name, help=doc.splitlines()[0], description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_options(subparser)
        subparser.add_argument(
            "--json", type=file, metavar="FILE", help="write all numbers as JSON (-: standard output)"
        )
        subparser.set_defaults(run=run)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run ``hf-cce`` and return its exit code; argparse exits with 2 on wrong arguments."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" instead of failing
    options = parser().parse_args(arguments)
    out = Output(options.json)
    try:
        return options.run(options, out)
    except KeyboardInterrupt:
        out.progress("")
        print("Interrupted.", file=sys.stderr)
        return 130
    except FAILURES as error:
        out.progress("")
        advice = "; run hf-cce doctor to see what is missing" if isinstance(error, ImportError) else ""
        print(f"Error: {str(error) or type(error).__name__}{advice}", file=sys.stderr)
        return 2
