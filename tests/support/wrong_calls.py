"""Wrong calls of the public functions and the command, with their messages: ``docs/reference/wrong-calls.md``.

``python -m tests.support.wrong_calls`` writes the current messages; tests/docs/test_trust.py repeats every call and compares. A
new row needs only the call.
"""

import re
from pathlib import Path
from typing import Any

from tests.support.command import hf_cce

PAGE = Path(__file__).parents[2] / "docs/reference/wrong-calls.md"
REFUSALS = (TypeError, ValueError, RuntimeError)  # documented by the public functions
ROW = re.compile(r"^\| `(.+?)` \| (.*) \|$", re.MULTILINE)


def message_of_call(call: str) -> str:
    """Return "ErrorType: message" for a Python call, whose error must be of a type that the public docstrings name."""
    import torch

    import hf_cce

    names: dict[str, Any] = {"torch": torch, "math": __import__("math")}
    names.update({name: getattr(hf_cce, name) for name in hf_cce.__all__})
    torch.manual_seed(0)
    exec(re.findall(r"^Setup: `(.+)`", PAGE.read_text("utf-8"), re.MULTILINE)[0], names)
    try:
        eval(call, names)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{call} raises nothing")


def message_of_command(line: str) -> str:
    """Return the last line that a command writes to standard error, and nothing else, without a traceback."""
    done = hf_cce(*line.split()[1:])
    shown = done.stderr.strip()
    assert done.exit_code == 2 and not done.stdout and shown and "Traceback" not in shown, done
    return re.sub(r"^hf-cce( \w+)?: error: ", "error: ", shown.splitlines()[-1])


def without_versions(message: str) -> str:
    """Remove the parts of a message that depend on the version of Python, torch or Transformers."""
    message = re.sub(r"(?<=\btransformers )\d\S*\d", "…", message)
    message = re.sub(r"Expected one of .* device type", "Expected one of … device type", message)
    message = re.sub(r"no configuration found \(.*?\.\)\.", "no configuration found (…).", message)
    head, chosen, choices = message.partition("(choose from ")
    return head + chosen + choices.replace("'", "")


def table() -> dict[str, str]:
    return dict(ROW.findall(PAGE.read_text("utf-8")))


def message(line: str) -> str:
    found = message_of_command(line) if line.startswith("hf-cce") else message_of_call(line)
    return " ".join(without_versions(found).split())


if __name__ == "__main__":
    PAGE.write_text(ROW.sub(lambda row: f"| `{row[1]}` | {message(row[1])} |", PAGE.read_text("utf-8")), "utf-8")
