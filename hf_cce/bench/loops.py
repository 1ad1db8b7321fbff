"""Tables of whole steps in several models and loops, of the batches that fit, of an RL step, of first calls and of curves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from hf_cce.bench import names

Link = Callable[[str], str]
Reports = dict[str, dict[str, Any]]
LOOPS = {"plain": "plain loop", "trainer": "Trainer", "sft": "SFTTrainer"}
# What rows of a loop are called: SFTTrainer as released has a fused head of its own, and its use_liger_kernel exchanges
# more than the loss.
IN_LOOP = {
    ("sft", "eager"): "SFTTrainer as released",
    ("sft", "liger"): "`use_liger_kernel=True` (norms and MLP too)",
    ("sft", "hf_cce"): "**hf_cce** by `CCECallback`",
    ("trainer", "hf_cce"): "**hf_cce** by `CCECallback`",
}


def versions(report: dict[str, Any], *packages: str) -> str:
    """Of these packages, those that the report has a version of."""
    return ", ".join(f"{name} {found}" for name in packages if (found := report["versions"].get(name)))


def weights_of(report: dict[str, Any]) -> str:
    """What the steps of ``report`` began with."""
    trained = report["settings"]["pretrain_steps"]
    return f"trained for {trained:,} steps" if trained else "random weights"


def losses_of(report: dict[str, Any]) -> str:
    """Where trained weights stand: the first loss is one batch's, and batches differ, so their mean stands beside it."""
    name = names.ordered(name for name, row in report["results"].items() if row["status"] == "ok")[0]
    losses = report["results"][name]["losses"]
    if len(losses) == 1:  # a trainer logs the mean of all
        return f"loss {losses[0]:.1f} on average"
    return (
        f"loss {losses[0]:.1f} in the first of the {len(losses)} steps here, {sum(losses) / len(losses):.1f} on average"
    )


def step_rows(reports: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Each model and loop with each loss that was measured in it; of ``reports`` (what to add to the model, report)."""
    lines = [
        "| model, tokens a step | loop | loss | time (least–most) | tokens/s | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for more, report in reports:
        settings, results = report["settings"], report["results"]
        loop = settings.get("loop", "plain")
        shape = f"{settings['model']}, {settings['batch']} × {settings['sequence']:,}"
        shape += ", checkpointing" if settings["gradient_checkpointing"] else ""
        shape += f", at most {settings['memory_limit']:g} GiB" if settings["memory_limit"] else ""
        shape += f", {more}" if more else ""
        for name in names.ordered(results):
            row = results[name]
            title = IN_LOOP.get((loop, name), names.title(_with_its_budget(name, row)))
            if row["status"] == "ok":
                low, high = row["ms_spread"]
                times = f"{row['ms']:.0f} ms ({low:.0f}–{high:.0f}) | {row['tokens_per_second']:,.0f}"
                figures = f"{times} | {row['peak_gib']:.2f} GiB"
            elif row["status"] == "oom":
                figures = out_of_memory(row)
            else:  # it failed; the file says why
                continue
            lines.append(f"| {shape} | {LOOPS.get(loop, loop)} | {title} | {figures} |")
    return lines


def out_of_memory(row: dict[str, Any]) -> str:
    """Time, tokens/s and peak memory of a step that found no room; not every library says what it asked for."""
    return f"out of memory, asked for {row.get('asked', 'more')} | – | –"


def _with_its_budget(name: str, row: dict[str, Any]) -> str:
    """Before the default grew with the tokens it was a number, which stands in what was installed."""
    found = re.search(r"memory_budget=(\d+)", row.get("installed", ""))
    return f"hf_cce {int(found[1]) >> 20} MiB" if found and name == "hf_cce" else name


def steps(reports: Reports, link: Link) -> str:
    """``step_rows`` with where they are from."""
    trained = []
    for report in reports.values():
        settings = report["settings"]
        if settings["pretrain_steps"]:
            trained.append(f"{settings['model']} {settings['pretrain_steps']:,} steps ({losses_of(report)})")
    report = next(iter(reports.values()))
    found = versions(report, "torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy")
    files = ", ".join(link(name) for name in reports)
    weights = f"trained before on the same text: {', '.join(trained)}" if trained else "random weights"
    return "\n".join(
        [
            *step_rows(("", report) for report in reports.values()),
            "",
            f"{report['device']}, bfloat16, {weights}; {found}; {files}.",
        ]
    )


def fit_rows(report: dict[str, Any]) -> list[str]:
    """The largest batches of one model."""
    sizes = [f"{size:g}" for size in sorted(report["settings"]["gib"])]
    lines = [
        f"| {report['settings']['model']}, rows of {report['settings']['sequence']:,} tokens | "
        + " | ".join(f"{size} GiB" for size in sizes)
        + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for name in names.ordered(report["results"]):
        row = report["results"][name]
        if row["status"] == "ok":
            lines.append(f"| {names.title(name)} | " + " | ".join(str(row["fits"][size]) for size in sizes) + " |")
    return lines


def fits(reports: Reports, link: Link) -> str:
    """The largest batches of each model."""
    lines: list[str] = []
    for name, report in reports.items():
        found = versions(report, "torch", "triton", "transformers", "liger-kernel")
        lines += [
            *fit_rows(report),
            "",
            f"{report['device']}, bfloat16, random weights, no checkpointing; {found}; {link(name)}.",
            "",
        ]
    return "\n".join(lines).rstrip()


def policy(reports: Reports, link: Link) -> str:
    """Log-probabilities and entropy of a GRPO-like step."""
    lines = ["| completions × tokens, policy | log-probabilities by | step | memory of the step |", "|---|---|---|---|"]
    for report in reports.values():
        s = report["settings"]
        shape = f"{s['groups'] * s['completions']} × {s['tokens']:,}, {s['hidden']} × {s['vocabulary']:,}"
        for name, row in report["rows"].items():
            title = "**hf_cce**, `linear_log_probs`" if name == "linear_log_probs" else name
            lines.append(f"| {shape} | {title} | {row['ms']:.0f} ms | {row['step_bytes'] / 2**30:.2f} GiB |")
    report = next(iter(reports.values()))
    apart, gradients = report["largest_difference"], report["relative_difference_of_gradients"]
    lines += [
        "",
        f"The two differ by up to {apart['log_probs']:.1e} in a log-probability and {apart['entropy']:.1e} nats in an entropy; "
        f"their gradients, of all the policy's weights as one vector, by {gradients:.1e} of its norm.",
        f"{report['device']}, {report['settings']['dtype']}, {versions(report, 'torch', 'triton')}; "
        f"{', '.join(link(name) for name in reports)}.",
    ]
    return "\n".join(lines)


def first_rows(results: dict[str, dict[str, Any]], of: str = "") -> list[str]:
    """Seconds that the first forward and backward of a process takes, of the loss or of a whole step; or why there are none."""
    title = f"whole {of}, with this loss" if "step" in of else "loss"
    lines = [f"| {title} | first process, s | later processes, s |", "|---|---|---|"]
    for name in names.ordered(results):
        if "first_s" in (result := results[name]):
            later = ", ".join(f"{seconds:.2f}" for seconds in result["later_s"])
            lines.append(f"| {names.title(name)} | {result['first_s']:.2f} | {later} |")
        else:
            lines.append(f"| {names.title(name)} | {next(iter(result.values())).strip().splitlines()[-1]} | – |")
    return lines


def turn_rows(report: dict[str, Any]) -> list[str]:
    """Of hf_cce.bench.alternate: each loss beside the first one of the same round."""
    settings, results = report["settings"], report["results"]
    reference, loop = settings["losses"][0], settings.get("loop", "plain")

    def called(name: str) -> str:
        """Ours is put in by apply_cce here, whatever the loop."""
        return names.title(name) if names.is_ours(name) else IN_LOOP.get((loop, name), names.title(name))

    shape = f"{settings['model']}, {settings['batch']} × {settings['sequence']:,}"
    shape += {"trainer": ", Trainer", "sft": ", SFTTrainer"}.get(loop, "")
    lines = [
        f"| {shape}; {settings['rounds']} rounds, {settings['steps']} steps of each loss in turn | a step, median of rounds "
        f"(least–most) | more than {called(reference)} in the same round | tokens/s |",
        "|---|---|---|---|",
    ]
    for name in names.ordered(results):
        row = results[name]
        low, high = row["ms_spread"]
        apart = row.get("apart_ms")
        more = f"{apart['median']:+.2f} ms ({apart['least']:+.2f} to {apart['most']:+.2f})" if apart else "–"
        tokens = settings["batch"] * settings["sequence"] / row["ms"] * 1e3
        lines.append(f"| {called(name)} | {row['ms']:.1f} ms ({low:.1f}–{high:.1f}) | {more} | {tokens:,.0f} |")
    return lines


def first_calls(report: dict[str, Any], name: str, link: Link) -> str:
    """``first_rows`` with where they are from, and which losses the command asked for but the file lacks."""
    shape = " × ".join(f"{report['shape'][key]:,}" for key in ("tokens", "hidden_size", "vocab_size"))
    found = versions(report, "torch", "triton", "liger-kernel", "cut-cross-entropy")
    about = f"{shape}; {report['device']}, {report['processors']} processors; {found}; {link(name)}."
    asked = {word for word in shlex.split(report["command"]) if word in names.OURS or word in names.OTHERS}
    if lacking := names.ordered(asked - set(report["results"])):
        last = names.title(list(report["results"])[-1])
        about += (
            f" {' and '.join(map(names.title, lacking))} {'was' if len(lacking) == 1 else 'were'} asked for too, but the file, "
            f"which is written after each loss, ends with {last}: the run was over before them. Why it does not say."
        )
    return "\n".join([*first_rows(report["results"]), "", about])


def curve_rows(report: dict[str, Any]) -> list[str]:
    """The same training with one loss after the other: means of the last quarter, and the distance to full logits."""
    if "over_seeds" in report:
        return _curve_rows_of_seeds(report)
    lines = [
        "| start | loss | mean loss, last quarter | mean difference to full logits | in yardsticks |",
        "|---|---|---|---|---|",
    ]
    for start, runs in report["settings"].items():
        for name in names.ordered(runs):
            run = runs[name]
            apart = "–" if name == "eager" else f"{run['mean_difference']:.4f}"
            ratio = run["mean_difference_in_yardsticks"]
            ratio = "–" if name == "eager" or ratio is None else f"{ratio:.2f}"
            lines.append(
                f"| {_start(start, report)} | {_curve(name)} | {run['late_mean_loss']:.4f} | {apart} | {ratio} |"
            )
    return lines


def _start(title: str, report: dict[str, Any]) -> str:
    """A checkpoint of a step or two is next to random weights, so how many it had is said."""
    steps = report["setup"]["checkpoint_steps"]
    return f"{title} ({steps:,} step{'s' * (steps != 1)})" if "checkpoint" in title else title


def _curve(name: str) -> str:
    return "full logits, the rows of each batch reversed" if name == "reversed" else names.title(name)


def _curve_rows_of_seeds(report: dict[str, Any]) -> list[str]:
    every = [report["settings"], *(each["settings"] for each in report["other_seeds"])]
    lines = [
        "| start | loss | mean loss, last quarter | difference to full logits | of each seed |",
        "|---|---|---|---|---|",
    ]
    for start, runs in report["settings"].items():
        for name in names.ordered(runs):
            of_seeds = [each[start][name] for each in every if name in each.get(start, {})]
            mean = report["over_seeds"][start].get(name)
            apart = "–" if mean is None else f"{mean['late_mean_difference']:+.4f} ± {mean['standard_error']:.4f}"
            one_by_one = ", ".join(f"{run['late_mean_difference']:+.4f}" for run in of_seeds) if mean else "–"
            late = sum(run["late_mean_loss"] for run in of_seeds) / len(of_seeds)
            cells = apart.replace("-", "−"), one_by_one.replace("-", "−")
            lines.append(f"| {_start(start, report)} | {_curve(name)} | {late:.4f} | {cells[0]} | {cells[1]} |")
    return lines
