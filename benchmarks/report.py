"""Write the tables of ``benchmarks/results`` into README.md and docs/, between the markers that name them.

usage: python -m benchmarks.report [README.md docs/benchmarks/tables.md …]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import names, tables
from benchmarks.files import whole_file
from benchmarks.peers import BUILDERS

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGES = (
    "README.md",
    "docs/benchmarks/summary.md",
    "docs/benchmarks/comparison.md",
    "docs/benchmarks/tables.md",
    "docs/concepts/gradient-filter.md",
)
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "trl", "quack-kernels")
HEAD_TITLES = {"V49152": "49,152 × 1,024", "V128256": "128,256 × 768"}
Table = Callable[[str], list[str]]  # page -> lines


def read(name: str) -> dict[str, Any]:
    """Load the result file ``name`` (without its extension)."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def link(name: str, page: str) -> str:
    """Return a Markdown link to a result file, relative to the folder of ``page``."""
    target = os.path.relpath(f"benchmarks/results/{name}.json", os.path.dirname(page) or ".").replace(os.sep, "/")
    return f"[`{name}.json`]({target})"


def source(page: str, *files: str, more: str = "") -> list[str]:
    """Return the closing line of a table: device, date, versions, files. A file from another device is followed by its name."""
    report = read(files[0])
    dates = sorted({read(name)["date"] for name in files})
    about = [report["device"], dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}", more]
    others = {name: device for name in files if (device := read(name)["device"]) != report["device"]}
    links = [link(name, page) + (f" ({others[name]})" if name in others else "") for name in files]
    about += [tables.versions(report, *PACKAGES), ", ".join(links)]
    return ["", "; ".join(filter(None, about)) + "."]


def _dtype(report: dict[str, Any], problem: str) -> str:
    about = report["heads"].get(report["results"][problem]["problem"].get("head"), {})
    return report["dtype"] + (f", held-out loss {about['held_out_loss']:.1f}" if about else "")


def alone(file: str, problem: str, title: str) -> Table:
    """Return a table of time, memory and error of each loss on one problem."""

    def lines(page: str) -> list[str]:
        report = read(file)
        found = tables.loss_rows(title, report["results"][problem])
        return [*found, *source(page, file, more=_dtype(report, problem))]

    return lines


def modes(file: str, problem: str) -> Table:
    """Return a table of every loss in every mode on one problem."""

    def lines(page: str) -> list[str]:
        report = read(file)
        return [*tables.mode_rows(report["results"][problem]), *source(page, file, more=_dtype(report, problem))]

    return lines


def steps(*files: str) -> Table:
    """Return a table of whole training steps."""

    def lines(page: str) -> list[str]:
        reports = [read(file) for file in files]
        weights = []
        for report in reports:
            settings = report["settings"]
            how = (
                f"{settings['pretrain_steps']:,} steps ({tables.losses_of(report)})"
                if settings["pretrain_steps"]
                else ""
            )
            loop = {"plain": ""}.get(
                settings.get("loop", "plain"), f" in {tables.LOOPS[settings.get('loop', 'plain')]}"
            )
            weights += [f"{settings['model']}{loop} {how}"] if how else []
        more = f"bfloat16, weights trained beforehand: {', '.join(weights)}" if weights else "bfloat16, random weights"
        return [*tables.step_rows(reports), *source(page, *files, more=more)]

    return lines


def one(file: str, rows: Callable[[dict[str, Any]], list[str]]) -> Table:
    """Return one table from a whole file."""
    return lambda page: [*rows(read(file)), *source(page, file)]


def several(rows: Callable[[dict[str, Any]], list[str]], *files: str) -> Table:
    """Return one table per file, one below the other."""

    def lines(page: str) -> list[str]:
        found: list[str] = []
        for file in files:
            found += [*rows(read(file)), ""]
        return [*found[:-1], *source(page, *files)]

    return lines


def policy(page: str) -> list[str]:
    """Return the table of log-probabilities, and the differences between the two implementations."""
    report = read("log_probs")
    largest, gradients = report["largest_difference"], report["relative_difference_of_gradients"]
    sentence = (
        f"Largest differences between the two: {largest['log_probs']:.1e} in a log-probability and {largest['entropy']:.1e} nats "
        f"in an entropy. Relative difference of all gradients: {gradients:.1e}."
    )
    return [*tables.policy_rows(report), "", sentence, *source(page, "log_probs")]


def errors(page: str) -> list[str]:
    """Return the table of gradient errors on trained heads."""
    lines = tables.error_rows(read("heads"), {f"trained {head} N=8192": size for head, size in HEAD_TITLES.items()})
    long = {"trained V49152 N=32768": f"{HEAD_TITLES['V49152']}, 32,768 tokens"}
    return [*lines, *tables.error_rows(read("heads_32768"), long)[2:], *source(page, "heads", "heads_32768")]


def quack(page: str) -> list[str]:
    """Return the tables of both trained heads with Quack, which runs in a process of its own."""
    report, found = read("heads_quack"), []
    for head, size in HEAD_TITLES.items():
        found += [
            *tables.loss_rows(f"8,192 tokens, trained head {size}", report["results"][f"trained {head} N=8192"]),
            "",
        ]
    return [*found[:-1], *source(page, "heads_quack")]


def not_compared(page: str) -> list[str]:
    """Return the losses that are missing on the trained head, with reasons."""
    report = read("heads")
    rows = {**read("heads_quack")["results"]["trained V49152 N=8192"]["rows"]}
    rows |= report["results"]["trained V49152 N=8192"]["rows"]
    missing = {name: report["missing"].get(name, "not included in the run") for name in BUILDERS if name not in rows}
    missing |= {name: f"failed: {found['failed']}" for name, found in rows.items() if "failed" in found}
    return [f"- {names.title(name)}: {missing[name]}." for name in names.ordered(missing)]


def summary(page: str) -> list[str]:
    """Return a short table of whole training steps: time and peak memory of full logits and of hf_cce."""
    cases = {
        "Qwen2.5-0.5B": "steps_trained_qwen",
        "Llama-3.2-1B": "steps_trained_llama",
        "Qwen2.5-0.5B, checkpointing": "steps_31gib",
    }
    lines = tables.head("one training step, bfloat16", "Transformers", "with hf_cce")
    for model, file in cases.items():
        report = read(file)
        found, settings = report["results"], report["settings"]
        name, *options = model.split(", ")
        weights = "briefly trained" if settings["pretrain_steps"] else "random weights"
        title = ", ".join((f"{name} shape", *options, weights))
        if settings.get("memory_limit"):
            title += f", at most {settings['memory_limit']:g} GiB of memory"
        title += f", {settings['batch']:,} × {settings['sequence']:,} tokens"
        lines.append(tables.row(title, *(tables.step_cell(found[name]) for name in ("eager", "hf_cce"))))
    return [*lines, *source(page, *cases.values())]


def never_slower(make_rows: Callable[[list[dict[str, Any]]], list[str]]) -> Table:
    """Return a table of the randomly drawn cases against full logits; the file is a list of rows without a header."""

    def lines(page: str) -> list[str]:
        cases: Any = read("never_slower")
        return [*make_rows(cases), "", f"{len(cases)} cases; {link('never_slower', page)}."]

    return lines


def of_loops(kind: str) -> tuple[str, ...]:
    """Return the step files for one kind of weights: the plain loop first, then the trainers."""
    found = [path.stem for path in RESULTS.glob(f"steps_{kind}_*.json")]
    models = ("smollm2", "qwen", "llama")
    return tuple(sorted(found, key=lambda name: (name.split("_")[3:], models.index(name.split("_")[2]))))


TABLES: dict[str, Table] = {
    "summary": summary,
    "compared-trained": alone("heads", "trained V49152 N=8192", "8,192 tokens, trained head 49,152 × 1,024"),
    "compared-flat": alone("flat", "flat N=8192 D=896 V=151936", "8,192 tokens, random data, head 151,936 × 896"),
    "compared-quack": quack,
    "not-compared": not_compared,
    "steps-31gib": steps("steps_31gib"),
    "steps-trained": steps(*of_loops("trained")),
    "steps-random": steps(*of_loops("random")),
    "steps-images": steps("steps_recipe_images"),
    "steps-qlora": steps("steps_recipe_qlora", "steps_recipe_qlora_offload"),
    "steps-in-turn": several(
        tables.round_rows, "alternate_1024", "alternate_2048", "alternate_trainer", "alternate_sft"
    ),
    "fits": several(tables.largest_batch_rows, "fits_smollm2", "fits_qwen", "fits_llama"),
    "log-probs": policy,
    "first": several(tables.first_rows, "first", "first_step"),
    "trained-49152": modes("heads", "trained V49152 N=8192"),
    "trained-128256": modes("heads", "trained V128256 N=8192"),
    "trained-32768": modes("heads_32768", "trained V49152 N=32768"),
    "quack-49152": modes("heads_quack", "trained V49152 N=8192"),
    "quack-128256": modes("heads_quack", "trained V128256 N=8192"),
    "flat-49152": modes("flat", "flat N=8192 D=1024 V=49152"),
    "flat-151936": modes("flat", "flat N=8192 D=896 V=151936"),
    "flat-4096": modes("flat", "flat N=4096 D=4096 V=128256"),
    "odd-50257": modes("flat_odd", "flat N=8192 D=768 V=50257"),
    "odd-32001": modes("flat_odd", "flat N=8192 D=4096 V=32001"),
    "distillation": one("divergence", tables.divergence_rows),
    "few": one("flat_few", tables.few_tokens_rows),
    "never-slower": never_slower(tables.never_slower_kinds),
    "never-slower-cases": never_slower(tables.never_slower_cases),
    "cpu": one("flat_cpu", tables.few_tokens_rows),
    "demo": one("demo", tables.demo_rows),
    "errors": errors,
    "filter-errors": one("filter_errors", tables.filter_error_rows),
    "curves": one("curves", tables.curve_rows),
}


def filled(text: str, page: str) -> str:
    """Return ``text`` with the tables between its markers rewritten; ``page`` is its path relative to the repository root."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} table: begin", f"<!-- {name} table: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if found:
            lines = "\n".join(table(page))
            text = f"{before}{begin} (python -m benchmarks.report) -->\n{lines}\n{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    for page in arguments or PAGES:
        path = ROOT / page
        text = filled(path.read_text("utf-8"), page)
        with whole_file(path) as temporary:
            temporary.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
