"""Wrong calls of the public functions and the command, and the message that each gets: ``docs/reference/wrong-calls.md``.

``python -m tests.support.wrong_calls`` writes the page; tests/docs/test_wrong_calls.py makes every call again and compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/reference/wrong-calls.md"
REFUSALS = (TypeError, ValueError, RuntimeError)  # what the docstrings of public functions promise
SETUP = "H, W, Y, bias = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4), torch.zeros(11)"
CALLS = (
    "linear_cross_entropy(None, W, Y)",
    "linear_cross_entropy(H.tolist(), W, Y)",
    "linear_cross_entropy(H, None, Y)",
    "linear_cross_entropy(H, W.numpy(), Y)",
    "linear_cross_entropy(H, torch.nn.Linear(8, 11), Y)",
    "linear_cross_entropy(H, W, None)",
    "linear_cross_entropy(H, W, [0, 1, 2, 3])",
    "linear_cross_entropy(H, W.t(), Y)",
    "linear_cross_entropy(H, W[0], Y)",
    "linear_cross_entropy(H, W[:0], Y)",
    "linear_cross_entropy(H[:, :5], W, Y)",
    "linear_cross_entropy(H.long(), W, Y)",
    "linear_cross_entropy(H.half(), W, Y)",
    "linear_cross_entropy(H.to('meta'), W, Y)",
    "linear_cross_entropy(H, W, Y[:3])",
    "linear_cross_entropy(H, W, Y[:, None])",
    "linear_cross_entropy(H, W, Y.float())",
    "linear_cross_entropy(H, W, Y.to(torch.int8))",
    "linear_cross_entropy(H, W, Y + 8)",
    "linear_cross_entropy(H, W, Y - 1)",
    "linear_cross_entropy(H, W, Y, bias=[0.0] * 11)",
    "linear_cross_entropy(H, W, Y, bias=bias[:5])",
    "linear_cross_entropy(H, W, Y, bias=bias.double())",
    "linear_cross_entropy(H, W, Y, bias=torch.nn.Linear(8, 11))",
    "linear_cross_entropy(H, W, Y, logit_scale=None)",
    "linear_cross_entropy(H, W, Y, logit_scale=math.nan)",
    "linear_cross_entropy(H, W, Y, logit_scale=torch.ones(1, requires_grad=True))",
    "linear_cross_entropy(H, W, Y, softcap=0.0)",
    "linear_cross_entropy(H, W, Y, softcap=-30.0)",
    "linear_cross_entropy(H, W, Y, softcap='30')",
    "linear_cross_entropy(H, W, Y, softcap=math.inf)",
    "linear_cross_entropy(H, W, Y, ignore_index=None)",
    "linear_cross_entropy(H, W, Y, ignore_index=-100.0)",
    "linear_cross_entropy(H, W, Y, reduction='average')",
    "linear_cross_entropy(H, W, Y, reduction='sum', num_items_in_batch=4)",
    "linear_cross_entropy(H, W, Y, num_items_in_batch=-1)",
    "linear_cross_entropy(H, W, Y, num_items_in_batch='8')",
    "linear_cross_entropy(H, W, Y, num_items_in_batch=torch.ones(2))",
    "linear_cross_entropy(H, W, Y, shift='no')",
    "linear_cross_entropy(H[0], W, Y[0], shift=True)",
    "linear_cross_entropy(H, W, Y, label_smoothing=1.5)",
    "linear_cross_entropy(H, W, Y, label_smoothing='0.1')",
    "linear_cross_entropy(H, W, Y, z_loss=-1e-4)",
    "linear_cross_entropy(H, W, Y, z_loss=math.nan)",
    "linear_cross_entropy(H, W, Y, config={})",
    "linear_cross_entropy(H, W, Y, config='triton')",
    "linear_cross_entropy(H, W, Y, filter_state=3)",
    "linear_log_probs(H, W, None)",
    "linear_log_probs(H, W, Y + 8)",
    "linear_log_probs(H, W, Y, softcap=0.0)",
    "CCEConfig(implementation='cuda')",
    "CCEConfig(memory_budget=256)",
    "CCEConfig(memory_budget='256 apples')",
    "CCEConfig(memory_budget=True)",
    "CCEConfig(memory_budget=None)",
    "CCEConfig(gradient_filter=0.0)",
    "CCEConfig(gradient_filter=0.5)",
    "CCEConfig(gradient_filter='on')",
    "CCEConfig(gradient_filter=True)",
    "apply_cce(None)",
    "apply_cce(3)",
    "apply_cce('meta-llama/Llama-3.2-1B')",
    "apply_cce('lama')",
    "apply_cce('LlamaForCausalLM')",
    "apply_cce(dict)",
    "apply_cce('llama', budget=1)",
    "apply_cce('llama', config='auto')",
    "apply_cce('llama', memory_budget='much')",
    "apply_cce(torch.nn.Linear(8, 11))",
    "remove_cce(None)",
    "remove_cce('lama')",
)
COMMANDS = (
    "hf-cce",
    "hf-cce nothing",
    "hf-cce estimate",
    "hf-cce estimate tiny --batch-size 0",
    "hf-cce estimate tiny --seq-length 1.5",
    "hf-cce estimate tiny --lora --qlora",
    "hf-cce estimate tiny --gpu-memory -1",
    "hf-cce estimate tiny --gpu-memory much",
    "hf-cce estimate tiny --dtype int8",
    "hf-cce estimate tiny --memory-budget 1.2.3MiB",
    "hf-cce estimate no/such-model",
    "hf-cce estimate lama",
    "hf-cce check",
    "hf-cce check lama",
    "hf-cce check no/such-model",
    "hf-cce check llama --device teapot",
    "hf-cce gradcheck --tokens 0",
    "hf-cce gradcheck --tokens many",
    "hf-cce gradcheck --dtype float64",
    "hf-cce gradcheck --device teapot",
    "hf-cce bench --memory-budget much",
    "hf-cce bench --losses nothing --device cpu",
    "hf-cce bench --repeats 0",
    "hf-cce demo --dtype int8",
    "hf-cce demo --dataset /no/such/folder",
    "hf-cce demo --learning-rate fast",
    "hf-cce doctor --nothing",
)


def message_of_call(call: str) -> str:
    """Return "ErrorType: message" of a Python call.

    Raises:
        AssertionError: the call raises nothing.
        Exception: it raises another type than the public docstrings name.
    """
    import torch

    import hf_cce

    names: dict[str, Any] = {"torch": torch, "math": __import__("math")}
    names.update({name: getattr(hf_cce, name) for name in hf_cce.__all__})
    torch.manual_seed(0)
    exec(SETUP, names)
    try:
        eval(call, names)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{call} raises nothing")


def message_of_command(line: str) -> str:
    """Return "Exit code: last line of standard error" of a command.

    Raises:
        AssertionError: exit code 0, something on standard output, or a traceback.
    """
    from hf_cce.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(line.split()[1:])
        except SystemExit as ended:  # argparse's
            code = ended.code
    shown = err.getvalue().strip()
    assert code == 2 and not out.getvalue() and shown and "Traceback" not in shown, (code, out.getvalue(), shown)
    return re.sub(r"^hf-cce( \w+)?: error: ", "error: ", shown.splitlines()[-1])


def without_versions(message: str) -> str:
    """Return a message without what differs by the version of Python, torch or Transformers."""
    message = re.sub(r"(?<=\btransformers )\d\S*\d", "…", message)
    message = re.sub(r"Expected one of .* device type", "Expected one of … device type", message)
    message = re.sub(r"no configuration found \(.*?\.\)\.", "no configuration found (…).", message)
    head, chosen, choices = message.partition("(choose from ")
    return head + chosen + choices.replace("'", "")


def table() -> dict[str, str]:
    """Return the message of each call and command, from the page."""
    return dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE))


def message(line: str) -> str:
    """Return the message that a call or a command of the page gets today, on one line."""
    found = message_of_command(line) if line.startswith("hf-cce") else message_of_call(line)
    return " ".join(without_versions(found).split())


def page() -> str:
    """Return the whole page, with messages of today."""

    def rows(lines: tuple[str, ...]) -> str:
        return "\n".join(f"| `{line}` | {message(line)} |" for line in lines)

    return (
        "# Wrong calls\n\n"
        "The message that each of these mistakes gets. Written by `python -m tests.support.wrong_calls`; a test makes every call "
        "again.\n\n"
        f"Setup: `{SETUP}`.\n\n"
        f"| call | error |\n|---|---|\n{rows(CALLS)}\n\n"
        "The command exits with code 2, with its message on standard error and nothing on standard output.\n\n"
        f"| command | message |\n|---|---|\n{rows(COMMANDS)}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
