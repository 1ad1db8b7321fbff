"""Writes measured tables into texts, from the JSON files in ``hf_cce/bench/results``.

usage: python -m hf_cce.bench.report [README.md docs/performance.md docs/comparison.md docs/accuracy.md]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_cce.bench import loops, modes, names, newer, older
from hf_cce.bench.files import whole_file

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/performance.md", "docs/comparison.md", "docs/accuracy.md")
RESULTS = Path(__file__).parent / "results"
TRAINED = "2026-11-23-h200-bench-heads.json"
PLAIN = "2026-11-22-h200-bench-heads-plain.json"  # before the specialised tiles
SHORT = tuple(f"2026-11-22-h200-bench-heads-short-{vocabulary}.json" for vocabulary in (49152, 128256))
FLAT, QUACK = "2026-11-23-h200-bench-flat.json", "2026-11-22-h200-bench-quack.json"
STEPS = "2026-11-23-h200-steps-qwen-trained.json"
UNIFORM = "2026-11-21-h200-bench-heads-uniform.json"
FEW, ODD = "2026-11-23-h200-bench-few.json", "2026-11-23-h200-bench-odd.json"
LONG = "2026-11-23-h200-bench-32768.json"
CPU, DEMO = "2026-11-23-cpu-loss.json", "demo_cpu.json"
CURVES, LIMITED = "2026-11-23-h200-curves.json", "2026-11-21-h200-steps-31gib.json"
LOOPS = tuple(
    f"2026-11-{name}.json"
    for name in (
        "22-h200-steps-smol-plain",
        *(f"23-h200-steps-{of}" for of in ("qwen-plain", "llama-plain")),
        "22-h200-steps-qwen-trainer",
        "23-h200-steps-smol-trainer",
        "22-h200-steps-qwen-sft",
        "23-h200-steps-smol-sft",
        "23-h200-steps-smol-sft-ours-first",
    )
)
TRAINED_LOOPS = tuple(
    f"2026-11-{day}-h200-steps-{of}-trained.json"
    for day, of in (
        *((23, "smol"), (23, "qwen"), (23, "llama")),
        *((23, "smol-trainer"), (23, "llama-trainer")),
        *((23, "smol-sft"), (23, "qwen-sft"), (23, "llama-sft")),
    )
)
FITS = tuple(f"2026-11-22-h200-fits-{name}.json" for name in ("smollm2", "qwen", "llama"))
FIRST, POLICY = (f"2026-11-{name}.json" for name in ("23-h200-first-16-processors", "22-h200-log-probs"))
# Those that tables below are made of; any other file is drawn by hf_cce.bench.newer.
NAMED = {TRAINED, FLAT, QUACK, STEPS, UNIFORM, FEW, LONG, ODD, CPU, DEMO, CURVES, LIMITED}
NAMED |= {*LOOPS, *TRAINED_LOOPS, *FITS, FIRST, POLICY, *older.FILES}
PEERS = {name: names.title(name) for name in (*names.OURS, *names.OTHERS)}  # in this order in every table
SCATTERS = 1.2  # most of the times by the least, from which a median alone says too little
# On the page that compares, not in the README.
ASIDE = ("hf_cce 64 MiB", "hf_cce exact 1.25 GiB", "apple cce exact", "torch F.linear_cross_entropy")
# Why those tables have no row of theirs; said until they have.
UNMEASURED = {
    "quack": "not asked for in these runs; on trained heads it has one of its own, above",
    "trl": "not asked for in this run",
    "torch F.linear_cross_entropy": "torch has it from 2.13 on, and the machine with the GPU has 2.11",
    "apple cce exact": "not asked for in these runs",
}
NO_PEER = {
    "Axolotl's fork of CCE": "it is on GitHub alone (`git+https://github.com/axolotl-ai-cloud/ml-cross-entropy.git`), of "
    "which nothing could be fetched here; on PyPI we found none",
}
COMPARED = {  # (problem, title) of the two tables on the page that compares
    "trained head": ("trained V49152 N=8192", "8,192 tokens, trained head 49,152 × 1,024"),
    "random data": ("flat N=8192 D=896 V=151936", "8,192 tokens, random data, head 151,936 × 896"),
}


def read(name: str) -> dict[str, Any]:
    """One file of results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def _link(name: str, page: str) -> str:
    """To a file of results, from the folder that ``page`` lies in."""
    target = os.path.relpath(f"hf_cce/bench/results/{name}", os.path.dirname(page) or ".").replace(os.sep, "/")
    return f"[`{name}`]({target})"


def _packages(report: dict[str, Any]) -> str:
    known = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "trl", "quack-kernels", "nvidia-cutlass-dsl")
    return loops.versions(report, *known)


def _losses(result: dict[str, Any], title: str, leave_out: tuple[str, ...] = ()) -> list[str]:
    lines = [
        f"| {title} | forward + backward | memory above gradients | error of the gradients |",
        "|---|---|---|---|",
    ]
    for name, peer in PEERS.items():
        if name not in result["rows"] or name in leave_out:
            continue
        row: dict[str, Any] = result["rows"][name]
        if "ms" not in row:  # it failed
            continue
        errors = f"{row['grad_hidden_error']:.1e}, {row['grad_weight_error']:.1e}"
        least, most = row["ms_spread"]
        scatter = f"; {least:.1f}–{most:.1f} ms" if most > SCATTERS * least else ""
        times = f"{row['ms']:.1f} ms ({row['gemm_multiple']:.2f}{scatter})"
        lines.append(f"| {peer} | {times} | {row['extra_mib']:,.0f} MiB | {errors} |")
    return lines


def loss_table(page: str) -> str:
    """The loss alone on a trained head: time, memory, error of each peer."""
    report = read(TRAINED)
    about = report["heads"]["V49152"]
    lines = _losses(
        report["results"]["trained V49152 N=8192"],
        "loss of 8,192 tokens, trained head 49,152 × 1,024",
        ASIDE,
    )
    lines += [
        "",
        f"{report['device']}, {report['dtype']}; in brackets: time divided by that of the three matrix products that any loss "
        f"with full logits needs; a range where rounds differ by more than a fifth. Held-out "
        f"text, loss {about['held_out_loss']:.1f}; errors (hidden",
        f"states, weight) against float64. `hf-cce bench --head V49152:8192 --head-seconds 110`; {_packages(report)}: "
        f"{_link(TRAINED, page)}.",
    ]
    return "\n".join(lines)


def flat_table(page: str) -> str:
    """The same on random numbers, for a head as large as that of Qwen2.5-0.5B."""
    report = read(FLAT)
    result = report["results"]["flat N=8192 D=896 V=151936"]
    lines = _losses(result, "random data, head 151,936 × 896", ASIDE)
    return "\n".join([*lines, "", f"`hf-cce bench --shape 8192,896,151936`; numbers: {_link(FLAT, page)}."])


def most_compared(problem: str) -> str:
    """The file that has measured most of ``PEERS`` on this problem; of several, the last by name."""

    def measured(name: str) -> int:
        rows = (read(name).get("results") or {}).get(problem, {}).get("rows", {})
        return sum("ms" in rows.get(peer, {}) for peer in PEERS)

    return max((path.name for path in RESULTS.glob("*.json")), key=lambda name: (measured(name), name))


def _compared(page: str, name: str, problem: str, title: str) -> str:
    """One problem with all that was measured on it in one process."""
    report = read(name)
    result = report["results"][problem]
    lines = _losses(result, title)
    head = report["heads"].get(result["problem"].get("head"), {})
    about = f"held-out loss {head['held_out_loss']:.1f}; " if head else ""
    lines += ["", f"{report['device']}, {report['dtype']}; {about}{_packages(report)}; {_link(name, page)}."]
    return "\n".join(lines)


def compared_trained_table(page: str) -> str:
    """The trained head, for the page that compares."""
    problem, title = COMPARED["trained head"]
    return _compared(page, most_compared(problem), problem, title)


def compared_second_table(page: str) -> str:
    """The other trained head, with a larger vocabulary and a narrower model."""
    problem = "trained V128256 N=8192"
    return _compared(page, most_compared(problem), problem, "8,192 tokens, trained head 128,256 × 768")


def compared_flat_table(page: str) -> str:
    """Random numbers, likewise."""
    problem, title = COMPARED["random data"]
    return _compared(page, most_compared(problem), problem, title)


def compared_quack_table(page: str) -> str:
    """Both trained heads with Quack, which has a process of its own."""
    heads = {"V49152": "49,152 × 1,024", "V128256": "128,256 × 768"}
    return "\n\n".join(
        _compared(page, QUACK, f"trained {head} N=8192", f"8,192 tokens, trained head {size}")
        for head, size in heads.items()
    )


def not_compared_table(page: str) -> str:
    """Who is missing in those two tables, and why."""
    lines = []
    for peer, title in PEERS.items():
        reasons: dict[str, list[str]] = {}
        for data, (problem, _) in COMPARED.items():
            report = read(most_compared(problem))
            row = report["results"][problem]["rows"].get(peer, {})
            if "ms" not in row:
                found = f"it failed: {row['failed']}" if "failed" in row else report["missing"].get(peer)
                reasons.setdefault(found or UNMEASURED.get(peer, "not part of the run"), []).append(data)
        for why, where in reasons.items():
            lines.append(f"- {title}{f' ({where[0]})' if len(where) < len(COMPARED) else ''}: {why}.")
    return "\n".join([*lines, *(f"- {title}: {why}." for title, why in NO_PEER.items())])


def _steps(report: dict[str, Any], title: str) -> list[str]:
    lines = [f"| {title} | time | tokens/s | peak memory |", "|---|---|---|---|"]
    for name in names.ordered(report["results"]):
        row = report["results"][name]
        if row["status"] == "ok":
            figures = f"{row['ms']:.0f} ms | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} GiB"
        elif row["status"] == "oom":
            figures = loops.out_of_memory(row)
        else:  # it failed; the file says why
            continue
        lines.append(f"| {names.title(name)} | {figures} |")
    return lines


def steps_table(page: str) -> str:
    """Whole training steps of a 0.5B model."""
    report = read(STEPS)
    settings = report["settings"]
    tokens = f"{settings['batch']} × {settings['sequence']:,} tokens"
    lines = _steps(report, f"step of a 0.5B model, {tokens}, vocabulary 151,936")
    lines += [
        "",
        f"{report['device']}, bfloat16, Qwen2.5-0.5B's shape, trained on local text for {settings['pretrain_steps']:,} "
        "steps",
        f"({loops.losses_of(report)}), {_packages(report)}.",
        f"Numbers and command: {_link(STEPS, page)}.",
    ]
    return "\n".join(lines)


def limited_table(page: str) -> str:
    """A step of the same model and batch where PyTorch may take 31 GiB, with gradient checkpointing."""
    report = read(LIMITED)
    settings = report["settings"]
    assert not settings["pretrain_steps"], "say of which weights it is"
    title = f"the same from random weights, in {settings['memory_limit']:g} GiB with gradient checkpointing"
    lines = _steps(report, title)
    return "\n".join([*lines, "", f"{report['device']}, {_packages(report)}; {_link(LIMITED, page)}."])


def _all_modes(page: str, name: str, problem: str) -> str:
    """Forward and backward, forward alone, and with a frozen head, of every loss in one result."""
    report = read(name)
    result = report["results"][problem]
    head = report["heads"].get(result["problem"].get("head"), {})
    text = f"held-out loss {head['held_out_loss']:.1f}; " if head else ""
    about = f"{report['device']}, {report['dtype']}; {text}{_packages(report)}; {_link(name, page)}."
    return "\n".join([*modes.table(result), "", about])


def few_table(page: str) -> str:
    """Few tokens: device and wall time of ours and of full logits."""
    report = read(FEW)
    lines = [
        "| tokens × width × vocabulary | hf_cce, device | full logits, device | hf_cce, wall | full logits, wall | "
        "memory, hf_cce | memory, full logits |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in report["results"].values():
        problem, (ours, full) = result["problem"], (result["rows"][name] for name in ("hf_cce", "eager"))
        times = [f"{row[key]:.2f} ms" for key in ("ms", "wall_ms") for row in (ours, full)]
        sizes = [f"{row['extra_mib']:,.0f} MiB" for row in (ours, full)]
        shape = " × ".join(f"{problem[x]:,}" for x in "NDV")
        lines.append(f"| {shape} | {' | '.join(times + sizes)} |")
    return "\n".join([*lines, "", f"{report['device']}, {report['dtype']}, {_packages(report)}; {_link(FEW, page)}."])


def cpu_table(page: str) -> str:
    """The loss on a CPU."""
    report = read(CPU)
    lines = [
        "| tokens × width × vocabulary | hf_cce | full logits | memory, hf_cce | memory, full logits |",
        "|---|---|---|---|---|",
    ]
    for problem, result in report["results"].items():
        shape = " × ".join(f"{int(word.split('=')[1]):,}" for word in problem.split()[1:])
        rows = [result["rows"][name] for name in ("hf_cce", "eager")]
        cells = [f"{row['ms']:,.0f} ms" for row in rows] + [f"{row['extra_mib']:,.0f} MiB" for row in rows]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    about = f"{report['device']}, {report['dtype']}, torch {report['versions']['torch']}; {_link(CPU, page)}."
    return "\n".join([*lines, "", about])


def demo_table(page: str) -> str:
    """The demo's peak memory on a CPU."""
    report = read(DEMO)
    lines = ["| the demo on a CPU | without CCE | with CCE |", "|---|---|---|"]
    peaks, extras = [], []
    for run in (report["plain"], report["cce"]):
        peaks.append(f"{run['peak_bytes'] / 1e6:,.0f} MB")
        extras.append(f"{(run['peak_bytes'] - run['rest_bytes']) / 1e6:,.0f} MB")
    lines += [f"| peak memory of the process | {' | '.join(peaks)} |", f"| of which in a step | {' | '.join(extras)} |"]
    return "\n".join([*lines, "", f"{report['device']}; {_link(DEMO, page)}."])


def errors_table(page: str) -> str:
    """Errors of the gradients against float64: ours, with a filter and without, and those of full logits in the same run."""
    lines = [
        "| head | filter | kept | hidden states | weight | hidden states, frozen head |",
        "|---|---|---|---|---|---|",
    ]
    cases = (
        (TRAINED, "trained V49152 N=8192", "49,152 × 1,024"),
        (TRAINED, "trained V128256 N=8192", "128,256 × 768"),
        (SHORT[0], "trained V49152 N=8192", "49,152 × 1,024, trained for 25 s"),
        (SHORT[1], "trained V128256 N=8192", "128,256 × 768, trained for 25 s"),
        (PLAIN, "trained V49152 N=8192", "49,152 × 1,024, older estimate"),
        (PLAIN, "trained V128256 N=8192", "128,256 × 768, older estimate"),
        (UNIFORM, "trained V49152 N=8192", "49,152 × 1,024, even mass"),
        (UNIFORM, "trained V128256 N=8192", "128,256 × 768, even mass"),
        (LONG, "trained V49152 N=32768", "49,152 × 1,024, 32,768 tokens"),
    )
    for name, problem, title in cases:
        rows = read(name)["results"][problem]["rows"]
        for key in names.ordered(rows):
            if key not in ("hf_cce", "hf_cce exact", "eager", "torch.compile") and not key.startswith("hf_cce filter"):
                continue
            row = rows[key]
            if key == "torch.compile" and "eager" in rows:
                continue
            known = {
                "hf_cce": '`"auto"`',
                "hf_cce exact": "none",
                "eager": "full logits",
                "torch.compile": "full logits, compiled",
            }
            kept = f"{row['filter']['kept']:.0%}" if row.get("filter") else "–"
            frozen = f"{row['frozen_grad_hidden_error']:.1e}" if "frozen_grad_hidden_error" in row else "–"
            figures = f"{row['grad_hidden_error']:.1e} | {row['grad_weight_error']:.1e} | {frozen}"
            lines.append(f"| {title} | {known.get(key, f'`{key.split()[-1]}`')} | {kept} | {figures} |")
    return "\n".join(
        [*lines, "", "; ".join(_link(name, page) for name in (TRAINED, *SHORT, PLAIN, UNIFORM, LONG)) + "."]
    )


def curves_table(page: str) -> str:
    """The same training with one loss after the other."""
    report = read(CURVES)
    setup, versions = report["setup"], loops.versions(report, "torch", "triton", "transformers")
    seeds = setup.get("seeds", 1)
    lines = [
        *loops.curve_rows(report),
        "",
        f"{report['device']}; a Llama of {setup['layers']} layers, width {setup['dim']}, vocabulary {setup['vocab']:,}, "
        f"{setup['batch']} × {setup['sequence']:,} tokens a step,",
        f"{setup['steps']} steps, the checkpoint after {setup['checkpoint_steps']}{f'; {seeds} seeds' * (seeds > 1)}; float32 "
        f"weights, bfloat16 autocast; "
        f"{versions}; {_link(CURVES, page)}.",
    ]
    return "\n".join(lines)


def newer_table(page: str) -> str:
    """Files of results that no other table is made of."""
    found = [path.name for path in RESULTS.glob("*.json") if path.name not in NAMED]
    return newer.section({name: read(name) for name in found}, lambda name: _link(name, page))


def older_heads_table(page: str) -> str:
    """The trained heads before."""
    return older.heads(read, lambda name: _link(name, page), TRAINED)


def older_steps_table(page: str) -> str:
    """Whole steps before."""
    return older.steps(read, lambda name: _link(name, page), STEPS)


def notes_table(page: str) -> str:
    """The studies that are text."""
    return newer.notes(list(RESULTS.glob("*.txt")), lambda name: _link(name, page))


def _by_name(make: Callable[..., str], *files: str) -> Callable[[str], str]:
    """A table of hf_cce.bench.loops, made of these files."""
    return lambda page: make({name: read(name) for name in files}, lambda name: _link(name, page))


def _modes(name: str, problem: str) -> Callable[[str], str]:
    return lambda page: _all_modes(page, name, problem)


TABLES: dict[str, Callable[[str], str]] = {
    "loss": loss_table,
    "flat": flat_table,
    "compared-trained": compared_trained_table,
    "compared-second": compared_second_table,
    "compared-flat": compared_flat_table,
    "compared-quack": compared_quack_table,
    "not-compared": not_compared_table,
    "steps": steps_table,
    "steps-31gib": limited_table,
    "steps-loops": _by_name(loops.steps, *LOOPS),
    "steps-trained": _by_name(loops.steps, *TRAINED_LOOPS),
    "fits": _by_name(loops.fits, *FITS),
    "policy": _by_name(loops.policy, POLICY),
    "first": lambda page: loops.first_calls(read(FIRST), FIRST, lambda name: _link(name, page)),
    "trained-49152": _modes(TRAINED, "trained V49152 N=8192"),
    "trained-128256": _modes(TRAINED, "trained V128256 N=8192"),
    "quack-49152": _modes(QUACK, "trained V49152 N=8192"),
    "quack-128256": _modes(QUACK, "trained V128256 N=8192"),
    "trained-32768": _modes(LONG, "trained V49152 N=32768"),
    "flat-49152": _modes(FLAT, "flat N=8192 D=1024 V=49152"),
    "flat-151936": _modes(FLAT, "flat N=8192 D=896 V=151936"),
    "flat-4096": _modes(FLAT, "flat N=4096 D=4096 V=128256"),
    "odd-50257": _modes(ODD, "flat N=8192 D=768 V=50257"),
    "odd-32001": _modes(ODD, "flat N=8192 D=4096 V=32001"),
    "few": few_table,
    "cpu": cpu_table,
    "demo": demo_table,
    "errors": errors_table,
    "curves": curves_table,
    "newer": newer_table,
    "older-heads": older_heads_table,
    "older-steps": older_steps_table,
    "notes": notes_table,
}


def filled(text: str, page: str = "README.md") -> str:
    """``text`` with the tables between its markers renewed; ``page``: where it stands, from the repository's root."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} table: begin", f"<!-- {name} table: end -->"
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if found:
            text = f"{head}{begin} (python -m hf_cce.bench.report) -->\n{table(page)}\n{end}{tail}"
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
