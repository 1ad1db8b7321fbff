"""Write the generated parts of ``docs/reference/trust.md``: ``python -m tests.support.promises``.

The promises on the page name tests; tests/docs/test_trust.py checks that these exist and that the generated parts are current.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, MUTANTS = ROOT / "docs/reference/trust.md", ROOT / "tests/mutants/report.json"
RANDOM, VERSIONS = (ROOT / f"benchmarks/results/{name}.json" for name in ("property", "versions"))


def versions() -> str:
    """Return the supported ranges, from pyproject.toml, and the environments in which tests ran, from versions.json."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    names = ("torch", "triton", "transformers", "trl", "peft", "accelerate")
    lowest = [re.findall(rf'"{name}(>=[\d.]+)', text)[0] for name in names]
    python = re.findall(r'requires-python = "(.+?)"', text)[0]
    lines = [
        "Each row below the first is an environment in which tests ran, written by `pytest --record=FILE` "
        "([versions.json](../../benchmarks/results/versions.json)). The first row is what the package accepts.",
        "",
        f"| Python | device | {' | '.join(names)} | DeepSpeed | passed | failed |",
        "|" + "---|" * (len(names) + 5),
        f"| {python} | | {' | '.join(lowest)} | | | |",
    ]
    for row in json.loads(VERSIONS.read_text("utf-8")):
        found = row["environment"]
        counts = [sum(run[key] for run in row["runs"].values()) for key in ("passed", "failed", "error")]
        packages = [found.get(name, "–") for name in (*names, "deepspeed")]
        lines.append(
            f"| {found['python']}, {found['system']} | {found['device']} | {' | '.join(packages)} | {counts[0]:,} "
            f"| {counts[1] + counts[2]} |"
        )
    return "\n".join(lines)


def mutants() -> str:
    report = json.loads(MUTANTS.read_text("utf-8"))
    ran = len(report["mutants"])
    lines = [
        "`make mutants` changes the code in one place at a time, such as a mask, a sign, a threshold or an all-reduce, and "
        f"runs the tests. Of {report['listed']} mutants, {ran} were run. The tests detected "
        f"{report['killed'] + report['timeout']}. {report['argued']} survived for an accepted reason, and "
        f"{report['survived']} survived without one."
    ]
    for kind, title in (("survived", "Survivors, each a gap in the tests:"), ("argued", "Accepted:")):
        rows = [row for row in report["mutants"] if row["result"] == kind]
        if rows:
            lines += ["", title, ""]
            lines += [
                f"- `{row['file']}`: `{_inline(row['old'])}` → `{_inline(row['new'])}`"
                + (f": {row['argued']}" if kind == "argued" else "")
                for row in rows
            ]
    return "\n".join(lines)


def random_cases() -> str:
    report = json.loads(RANDOM.read_text("utf-8"))
    failures = report["failures"]
    lines = [
        "`python -m tests.support.property` draws random shapes, strides, dtypes, options, labels and values, including "
        "infinities, logits beyond ±10⁴ and probabilities near 0 and 1. It compares the kernels with float64 by the rule in "
        "[numerics.py](../../tests/support/numerics.py). A case that fails is drawn four more times. The five draws are then "
        "judged together, with an allowance for the rounding of recomputed probabilities. "
        f"On one {report['device']}, {report['cases'] - len(failures):,} of {report['cases']:,} cases passed "
        "([property.json](../../benchmarks/results/property.json))" + (". The others:" if failures else "."),
        "",
    ]
    lines += [f"- seed {failure['case']['seed']}: {failure['argued']}" for failure in failures]
    return "\n".join(lines).strip()


def _inline(text: str) -> str:
    return " ".join(text.split())


def page() -> str:
    text = PAGE.read_text("utf-8")
    parts = {"Random cases": random_cases(), "Supported versions": versions(), "Mutants": mutants()}
    for title, part in parts.items():
        head, _, rest = text.partition(f"## {title}\n")
        text = f"{head}## {title}\n\n{part}\n\n##{rest.partition(chr(10) + '##')[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
