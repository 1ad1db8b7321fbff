"""Markdown tables of result files, as lists of lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks import measure, names
from benchmarks.never_slower import misses

Report = dict[str, Any]
LOOPS = {"plain": "plain loop", "trainer": "Trainer", "sft": "SFTTrainer", "recipe": "recipes/sft.py"}
# SFTTrainer as released has its own fused head, and its use_liger_kernel replaces more than the loss.
IN_LOOP = {
    ("sft", "eager"): "SFTTrainer as released",
    ("sft", "liger"): "`use_liger_kernel=True` (norms and MLP too)",
    ("sft", "hf_cce"): "**hf_cce** by `CCECallback`",
    ("recipe", "eager"): "`HF_CCE_DISABLE=1`",
    ("recipe", "hf_cce"): "**hf_cce** by `CCECallback`",
    ("trainer", "hf_cce"): "**hf_cce** by `CCECallback`",
}
SPREAD_RATIO = 1.2  # ratio of largest to smallest time above which the median alone is not informative


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: object) -> list[str]:
    return [row(*cells), "|---" * len(cells) + "|"]


def versions(report: Report, *packages: str) -> str:
    """Return the versions of those ``packages`` that the report lists."""
    return ", ".join(f"{name} {found}" for name in packages if (found := report["versions"].get(name)))


def losses_of(report: Report) -> str:
    """Describe the first and the mean loss of trained weights: the first is that of one batch, and batches differ."""
    name = names.ordered(name for name, row in report["results"].items() if row["status"] == "ok")[0]
    losses = report["results"][name]["losses"]
    mean = f"{sum(losses) / len(losses):.1f} on average"
    if len(losses) == 1:  # a trainer logs only the mean of all steps
        return f"loss {mean}"
    return f"loss {losses[0]:.1f} in the first of the {len(losses)} steps here, {mean}"


def loss_rows(title: str, result: dict[str, Any]) -> list[str]:
    """Return time, memory and error of the loss alone, forward and backward."""
    lines = head(title, "forward + backward", "memory above gradients", "error of the gradients")
    for name in names.ordered(result["rows"]):
        figures = result["rows"][name]
        if "ms" not in figures or " filter " in name:  # failed, or part of a sweep
            continue
        least, most = figures["ms_spread"]
        spread = f"; {least:.1f}–{most:.1f} ms" if most > SPREAD_RATIO * least else ""
        time = f"{figures['ms']:.1f} ms ({figures['gemm_multiple']:.2f}{spread})"
        errors = f"{figures['grad_hidden_error']:.1e}, {figures['grad_weight_error']:.1e}"
        lines.append(row(names.title(name), time, f"{figures['extra_mib']:,.0f} MiB", errors))
    return lines


def mode_rows(result: dict[str, Any]) -> list[str]:
    """Return every loss in every mode."""
    rows = result["rows"]
    return measure.table({names.title(name): rows[name] for name in names.ordered(rows)})


def step_rows(reports: Iterable[Report]) -> list[str]:
    """Return whole training steps: each model and loop with each loss."""
    lines = head("model, tokens per step", "loop", "loss", "time (least–most)", "tokens/s", "peak memory")
    for report in reports:
        settings, results = report["settings"], report["results"]
        loop = settings.get("loop", "plain")
        shape = f"{settings['model']}, {settings['batch']} × {settings['sequence']:,}"
        shape += ", checkpointing" if settings["gradient_checkpointing"] else ""
        shape += f", at most {settings['memory_limit']:g} GiB" if settings["memory_limit"] else ""
        flags = settings.get("recipe", "")
        shape += ", QLoRA" if "--load_in_4bit" in flags else ""
        shape += ", embedding on the CPU" if '"model.embed_tokens": "cpu"' in flags else ""
        for name in names.ordered(results):
            found = results[name]
            figures: tuple[str, ...]
            if found["status"] == "ok":
                low, high = found["ms_spread"]
                time = f"{found['ms']:.0f} ms ({low:.0f}–{high:.0f})"
                figures = time, f"{found['tokens_per_second']:,.0f}", f"{found['peak_gib']:.2f} GiB"
            elif found["status"] == "oom":
                figures = f"out of memory, asked for {found.get('asked', 'more')}", "–", "–"
            else:  # failed; the file says why
                continue
            lines.append(row(shape, LOOPS[loop], IN_LOOP.get((loop, name), names.title(name)), *figures))
    return lines


def step_cell(found: dict[str, Any]) -> str:
    """Return time and peak memory of one step, or "out of memory"."""
    return f"{found['ms']:,.0f} ms, {found['peak_gib']:.1f} GiB" if found["status"] == "ok" else "out of memory"


def largest_batch_rows(report: Report) -> list[str]:
    """Return the largest batches of one model."""
    sizes = [f"{size:g}" for size in sorted(report["settings"]["gib"])]
    title = f"{report['settings']['model']}, rows of {report['settings']['sequence']:,} tokens"
    lines = head(title, *(f"{size} GiB" for size in sizes))
    for name in names.ordered(report["results"]):
        found = report["results"][name]
        if found["status"] == "ok":
            lines.append(row(names.title(name), *(found["fits"][size] for size in sizes)))
    return lines


def round_rows(report: Report) -> list[str]:
    """Return rows of benchmarks.alternate: each loss compared with the first one in the same round."""
    settings, results = report["settings"], report["results"]
    loop = settings.get("loop", "plain")

    def display_name(name: str) -> str:
        return names.title(name) if names.is_ours(name) else IN_LOOP.get((loop, name), names.title(name))

    shape = f"{settings['model']}, {settings['batch']} × {settings['sequence']:,}, {LOOPS[loop]}"
    beside = f"difference from {display_name(settings['losses'][0])} in the same round"
    lines = head(
        f"{shape}; {settings['rounds']} rounds", "time per step, median of rounds (least–most)", beside, "tokens/s"
    )
    for name in names.ordered(results):
        found = results[name]
        low, high = found["ms_spread"]
        gap = found.get("apart_ms")
        more = f"{gap['median']:+.2f} ms ({gap['least']:+.2f} to {gap['most']:+.2f})" if gap else "–"
        tokens = settings["batch"] * settings["sequence"] / found["ms"] * 1e3
        lines.append(row(display_name(name), f"{found['ms']:.1f} ms ({low:.1f}–{high:.1f})", more, f"{tokens:,.0f}"))
    return lines


def first_rows(report: Report) -> list[str]:
    """Return seconds of the first forward and backward in a process, for the loss or a whole step."""
    lines = head(report["of"], "first process, s", "later processes, s")
    for name in names.ordered(report["results"]):
        found = report["results"][name]
        if "first_s" in found:
            later = ", ".join(f"{seconds:.2f}" for seconds in found["later_s"])
            lines.append(row(names.title(name), f"{found['first_s']:.2f}", later))
    return lines


def policy_rows(report: Report) -> list[str]:
    """Return log-probabilities and entropy of a GRPO-like step."""
    s = report["settings"]
    lines = head("completions × tokens, policy", "log-probabilities by", "step", "memory of the step")
    shape = f"{s['groups'] * s['completions']} × {s['tokens']:,}, {s['hidden']} × {s['vocabulary']:,}"
    for name, found in report["rows"].items():
        title = "**hf_cce**, `linear_log_probs`" if name == "linear_log_probs" else name
        lines.append(row(shape, title, f"{found['ms']:.0f} ms", f"{found['step_bytes'] / 2**30:.2f} GiB"))
    return lines


DIVERGENCES = {"forward_kl": "forward KL", "reverse_kl": "reverse KL", "jsd": "JSD"}
DISTILLED_BY = {
    "hf_cce": "**hf_cce**, `linear_divergence`",
    "full": "full logits",
    "compile": "torch.compile",
    "liger": "Liger",
    "trl": "TRL",
}


def divergence_rows(report: Report) -> list[str]:
    """Return time, memory and errors of distillation losses; peers that did not run are left out."""
    lines = head(
        "tokens, student × teacher × vocabulary", "divergence", "computed by", "forward + backward", "memory",
        "errors (hidden states, weight)",
    )  # fmt: skip
    for found in report["results"]:
        if "failed" not in found:
            n, ds, dt, v = found["shape"]
            name, _, mib = found["peer"].partition(":")
            peer = DISTILLED_BY[name] + (f', `memory_budget="{mib}MiB"`' if mib else "")
            about = (f"{n:,}, {ds:,} × {dt:,} × {v:,}", DIVERGENCES[found["kind"]], peer)
            errors = f"{found['error_hidden']:.1e}, {found['error_weight']:.1e}"
            lines.append(row(*about, f"{found['ms']:.1f} ms", f"{found['mib']:,.0f} MiB", errors))
    return lines


def few_tokens_rows(report: Report) -> list[str]:
    """Return device and wall time of hf_cce and full logits for few tokens; on a CPU both times are equal."""
    wall = ("hf_cce, wall", "full logits, wall") if report["dtype"] != "float32" else ()
    lines = head("tokens × width × vocabulary", "hf_cce", "full logits", *wall, "memory, hf_cce", "memory, full logits")
    for result in report["results"].values():
        pair = [result["rows"][name] for name in ("hf_cce", "eager")]
        times = [f"{found[key]:,.2f} ms" for key in (("ms", "wall_ms") if wall else ("ms",)) for found in pair]
        shape = " × ".join(f"{result['problem'][x]:,}" for x in "NDV")
        lines.append(row(shape, *times, *(f"{found['extra_mib']:,.0f} MiB" for found in pair)))
    return lines


def never_slower_kinds(rows: list[dict[str, Any]]) -> list[str]:
    """Return the results of the rule by device, dtype, implementation and loss."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    names = ("device", "dtype", "implementation", "loss")
    for found in rows:
        kinds.setdefault(tuple(found[name] for name in names), []).append(found)
    lines = head(*names, "cases", "time relative to full logits, median", "largest", "slower")
    for kind, of_kind in kinds.items():
        ratios = [found["ours_ms"] / found["full_ms"] for found in of_kind if found["full_ms"]]
        slower = sum("time" in misses(found) for found in of_kind)
        lines.append(row(*kind, len(of_kind), f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}", slower or ""))
    return lines


def never_slower_cases(rows: list[dict[str, Any]]) -> list[str]:
    """Return every case that breaks the rule."""
    lines = head("case", "dtype", "implementation", "head", "loss", "hf_cce", "full logits", "memory", "rule")
    for found in sorted(rows, key=lambda found: -found["ours_ms"] / (found["full_ms"] or 1e9)):
        if misses(found):
            size = f"{found['tokens']:,} × {found['hidden_size']:,} × {found['vocab_size']:,}, {found['device']}"
            memory = f"{found['ours_mib']:,.0f} of {found['full_mib']:,.0f} MiB" if found["full_mib"] else ""
            trained = "frozen" if found["frozen"] else "trained"
            kind = (found["dtype"], found["implementation"], trained, found["loss"])
            times = (f"{found['ours_ms']:.2f} ms", f"{found['full_ms']:.2f} ms")
            lines.append(row(size, *kind, *times, memory, ", ".join(misses(found))))
    return lines


def error_rows(report: Report, titles: dict[str, str]) -> list[str]:
    """Return gradient errors of hf_cce with each filter and of full logits; ``titles``: {problem: display name}."""
    lines = head("head", "filter", "kept", "hidden states", "weight", "hidden states, frozen head")
    known = {
        "hf_cce": '`"auto"`',
        "hf_cce exact": "none",
        "eager": "full logits",
        "torch.compile": "full logits, compiled",
    }
    for problem, title in titles.items():
        rows = report["results"].get(problem, {}).get("rows", {})
        for name in names.ordered(rows):
            sweep = name.startswith("hf_cce filter ")
            if not (name in known or sweep) or (name == "torch.compile" and "eager" in rows):
                continue
            found = rows[name]
            kept = f"{found['filter']['kept']:.0%}" if found.get("filter") else "–"
            errors = [f"{found[key]:.1e}" for key in ("grad_hidden_error", "grad_weight_error")]
            frozen = f"{found['frozen_grad_hidden_error']:.1e}" if "frozen_grad_hidden_error" in found else "–"
            lines.append(row(title, f"`{name.split()[-1]}`" if sweep else known[name], kept, *errors, frozen))
    return lines


QUANTITIES = {"training": "training, last quarter", "held_out": "held-out text", "second_corpus": "second corpus"}


def curve_rows(report: Report) -> list[str]:
    """Return final losses, differences from full logits and memory of the same training with each loss."""
    seeds = "range of full logits over the seeds"
    lines = head(
        "start", "loss", "on", "mean loss", "difference from full logits", "per seed", seeds, "within that range"
    )
    for start, losses in report["summary"].items():
        for quantity, title in QUANTITIES.items():
            for name in names.ordered(name for name in losses if quantity in losses[name]):
                found = losses[name][quantity]
                cells = ["–"] * 4
                if name != "eager":
                    difference, noise, error = (found[key] for key in ("difference", "noise", "standard_error"))
                    text = f"{difference:+.4f}" + (f" ± {error:.4f}" if error is not None else "")
                    cells[:2] = [text, ", ".join(f"{each:+.4f}" for each in found["of_seeds"])]
                    if noise is not None:
                        cells[2:] = [f"{noise:.4f}", "yes" if difference <= noise else "no"]
                cells = [cell.replace("-", "−") for cell in cells]
                lines.append(row(start, names.title(name), title, f"{found['mean']:.4f}", *cells))
    scored = [run for run in report["runs"] if run["evaluations"]]
    if scored:
        lines += [
            "",
            *head("start", "loss", "seed", "memory at the first and last evaluation", "peak before each", "tiles kept"),
        ]
    for run in scored:
        ends = run["evaluations"][0], run["evaluations"][-1]
        memory = (" → ".join(f"{end[key] / 2**20:,.1f}" for end in ends) + " MiB" for key in ("bytes", "peak_bytes"))
        kept = [each["kept"] for each in run.get("filter", ()) if "kept" in each]
        tiles = f"{kept[0]:.0%} → {kept[-1]:.0%}" if kept else "–"
        lines.append(row(run["setting"], names.title(run["loss"]), run["seed"], *memory, tiles))
    return lines


def filter_error_rows(report: Report) -> list[str]:
    """Return filter errors on many heads relative to full logits'. The largest over the batches is the promised bound."""
    batches = {len(found["batches"]) for found in report["heads"].values()}
    worst = f"largest of {max(batches)} batches"
    lines = head(
        "head", "held-out loss", "tiles kept", f"hidden states, {worst}", "weight", "hidden states, frozen head"
    )
    for found in sorted(report["heads"].values(), key=lambda found: (found["vocab_size"], found["hidden_size"])):
        kept = sorted(batch["kept"] for batch in found["batches"] if batch.get("kept") is not None)
        size = f"{found['vocab_size']:,} × {found['hidden_size']:,}"
        ratios = (f"{found['worst'][key]:.2f}" for key in ("hidden", "weight", "frozen"))
        tiles = f"{kept[0]:.0%} to {kept[-1]:.0%}" if kept else "all"
        lines.append(row(size, f"{found['held_out_loss']:.2f}", tiles, *ratios))
    return lines


def demo_rows(report: Report) -> list[str]:
    """Return the results of the demo on a CPU."""
    lines = head("the demo on a CPU", "without hf_cce", "with hf_cce")
    runs = report["plain"], report["cce"]
    lines.append(row("memory that a step adds", *(f"{run['step_bytes'] / 1e6:,.0f} MB" for run in runs)))
    last = len(report["plain"]["losses"])
    return [*lines, row(f"loss, step {last}", *(f"{run['losses'][-1]:.6f}" for run in runs))]
