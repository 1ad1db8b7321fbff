"""Break the code in one place at a time and record which tests notice: ``make mutants``.

Each row of ``mutants.json`` replaces one text in one file; the tests it names must then fail. An existing report is continued: a
row runs again only if it has changed. ``--only WORD`` selects the rows whose file or new text contains WORD.

The parent process imports torch, Triton and Transformers once and forks a child for each mutant, which imports ``hf_cce`` and
the tests from a copy of the repository.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MUTANTS, REPORT = HERE / "mutants.json", HERE / "report.json"
TIMEOUT = 900  # seconds; a hanging mutant counts as noticed


def mutants() -> list[dict[str, Any]]:
    """Return the rows of ``mutants.json``: ``file``, ``old``, ``new``, ``tests``, and ``argued`` for accepted survivors."""
    rows: list[dict[str, Any]] = json.loads(MUTANTS.read_text("utf-8"))
    return rows


def mutated(text: str, row: dict[str, Any]) -> str:
    if text.count(row["old"]) != 1:
        raise ValueError(f"{row['file']}: {row['old']!r} occurs {text.count(row['old'])} times, expected once")
    return text.replace(row["old"], row["new"])


def copy_repository(to: Path) -> None:
    """Copy the files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if name.startswith(("hf_cce/", "tests/", "docs/", "benchmarks/", "pyproject.toml")) and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def run_tests(copy: Path, tests: str) -> int:
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Without slow tests and without plugins that start processes.
        arguments = ["-x", "-q", "--timeout=300", "--no-header", "--tb=no", "-m", "not slow"]
        arguments += ["-p", "no:cacheprovider", "-p", "no:xdist"]
        return int(pytest.main([*arguments, *tests_arguments(tests)]))


def tests_arguments(tests: str) -> list[str]:
    files, _, expression = tests.partition(" -k ")
    return [*files.split(), *(["-k", expression] if expression else [])]


def run_in_fork(copy: Path, tests: str) -> tuple[str, float]:
    """Run tests in a forked process; return ("killed", "survived", "timeout" or "error", seconds)."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            code = run_tests(copy, tests)
        finally:
            os._exit(code)
    while time.monotonic() - began < TIMEOUT:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            # 1: a test failed; 2 and 4: the test module could not be imported; negative: a crash; 5: no test ran.
            result = "survived" if code == 0 else "error" if code in (5, 70) else "killed"
            return result, time.monotonic() - began
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout", time.monotonic() - began


def write_report(found: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> Counter[str]:
    """Write the results of the existing rows; return how many there are of each kind."""
    results = [found[row_key(row)] for row in rows if row_key(row) in found]
    counts = Counter(result["result"] for result in results)
    report = {
        "listed": len(rows),
        **{name: counts[name] for name in ("killed", "timeout", "argued", "survived", "error")},
    }
    REPORT.write_text(json.dumps({**report, "mutants": results}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return counts


def row_key(row: dict[str, Any]) -> str:
    return json.dumps([row["file"], row["old"], row["new"], row["tests"]])


def load_report() -> dict[str, dict[str, Any]]:
    if not REPORT.exists():
        return {}
    return {row_key(row): row for row in json.loads(REPORT.read_text("utf-8"))["mutants"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose file or new text holds this")
    parser.add_argument("--again", action="store_true", help="also the rows that the report has")
    options = parser.parse_args()
    rows, found = mutants(), load_report()
    os.environ.update(HF_HUB_OFFLINE="1", TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    sys.dont_write_bytecode = True
    import hypothesis
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    import triton
    import triton.language  # noqa: F401

    # Do not shrink failing examples: it takes minutes.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    with tempfile.TemporaryDirectory(prefix="hf_cce_mutants") as folder:
        copy = Path(folder)
        copy_repository(copy)
        clean: dict[str, str] = {}  # if tests fail without a mutant, their failure means nothing
        for row in rows:
            path = copy / row["file"]
            text = path.read_text("utf-8")
            wanted = options.only in row["file"] or options.only in row["new"]
            is_stale = text.count(row["old"]) != 1
            if not wanted or (row_key(row) in found and not options.again and not is_stale):
                continue
            if row["tests"] not in clean:
                clean[row["tests"]] = run_in_fork(copy, row["tests"])[0]
            if clean[row["tests"]] != "survived" or is_stale:
                result, seconds = "error", 0.0
            else:
                path.write_text(mutated(text, row), "utf-8")
                result, seconds = run_in_fork(copy, row["tests"])
                path.write_text(text, "utf-8")
            if result == "survived" and row.get("argued"):
                result = "argued"
            found[row_key(row)] = {**row, "result": result, "seconds": round(seconds, 1)}
            write_report(found, rows)
            print(f"{result:9}{seconds:6.1f} s  {row['file']}: {row['old']!r} → {row['new']!r}", flush=True)
    counts = write_report(found, rows)
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    return 1 if counts["survived"] or counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
