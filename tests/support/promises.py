"""What hf_cce promises, and the tests that fail where a promise is broken: ``docs/reference/trust.md``.

``python -m tests.support.promises`` writes the page; tests/docs/test_trust.py checks that it is fresh and that the tests exist.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE, MUTANTS = ROOT / "docs/reference/trust.md", ROOT / "tests/mutants/report.json"


class Promise(NamedTuple):
    text: str
    checks: tuple[str, ...]  # file::test below tests/
    where: str  # "CI": CPU and Triton's interpreter; "GPU": before a release, `make test-gpu`


PROMISES = {
    "Accuracy": (
        Promise(
            "Loss and gradients are as close to float64 as full logits in the same dtype",
            (
                "loss/test_loss.py::test_real_sizes",
                "loss/test_loss.py::test_any_shape",
                "loss/test_property.py::test_a_random_case_is_as_good_as_full_logits",
                "triton_kernels/test_kernels.py::test_loss_and_gradients",
            ),
            "CI",
        ),
        Promise(
            "Also in bfloat16 on a GPU, at the sizes of real models",
            ("triton_kernels/test_kernels.py::test_real_sizes_on_the_gpu",),
            "GPU",
        ),
        Promise(
            "Every supported class trains as it does unpatched",
            ("modeling/test_all_classes.py::test_trains_like_the_unpatched_model",),
            "CI",
        ),
        Promise(
            "The gradient filter keeps the error that was asked for",
            ("filter/test_filter_state.py::test_the_error_asked_for_is_reached",),
            "CI",
        ),
        Promise(
            '`gradient_filter="auto"` is no worse than full logits in bfloat16',
            (
                "filter/test_filter_gpu.py::test_bfloat16_gradients_are_no_worse_than_eager",
                "filter/test_filter_gpu.py::test_the_error_asked_for",
            ),
            "GPU",
        ),
        Promise(
            "A NaN in the hidden states is a NaN in the loss",
            ("loss/test_loss.py::test_a_nan_in_the_hidden_states_is_not_hidden",),
            "CI",
        ),
        Promise(
            "Nothing that is not finite at an ignored position reaches a gradient",
            (
                "filter/test_corrections.py::test_what_is_not_finite_in_an_ignored_token_stays_there",
                "triton_kernels/test_ways.py::test_what_comes_from_upstream_for_ignored_tokens_is_ignored",
            ),
            "CI",
        ),
    ),
    "Repeatability": (
        Promise("Same inputs, same bits", ("triton_kernels/test_kernels.py::test_results_repeat_bit_for_bit",), "CI"),
        Promise(
            "Also with the gradient filter, on a GPU",
            ("filter/test_filter_gpu.py::test_results_repeat_bit_for_bit",),
            "GPU",
        ),
        Promise(
            "A second backward pass gives the same gradients",
            (
                "loss/test_loss.py::test_second_backward_gives_the_same_again",
                "filter/test_filter_state.py::test_a_second_backward_recomputes",
            ),
            "CI",
        ),
        Promise(
            "A resumed run is the uninterrupted one",
            ("trainers/test_trainer_features.py::test_a_resumed_run_is_the_uninterrupted_one",),
            "CI",
        ),
        Promise(
            "A step can be captured in a CUDA graph", ("filter/test_filter_gpu.py::test_a_cuda_graph_of_a_step",), "GPU"
        ),
        Promise(
            "Several processes compute what one process computes",
            ("distributed/test_ranks.py::test_gradients_are_those_of_one_process",),
            "CI",
        ),
    ),
    "Memory and speed": (
        Promise("Training makes no logits", ("modeling/test_all_classes.py::test_training_makes_no_logits",), "CI"),
        Promise(
            "Scratch memory stays within `memory_budget`",
            (
                "filter/test_filter_gpu.py::test_memory_budgets_hold",
                "triton_kernels/test_kernels.py::test_memory_budget_holds",
            ),
            "GPU",
        ),
        Promise(
            "The host waits for the GPU nowhere on the training path",
            (
                "triton_kernels/test_kernels.py::test_the_training_path_does_not_synchronise_the_host",
                "filter/test_filter_gpu.py::test_no_step_waits_for_the_device",
            ),
            "GPU",
        ),
    ),
    "Faults": (
        Promise(
            "After Ctrl-C in a step or an evaluation the model trains on",
            (
                "modeling/test_within.py::test_a_model_trains_on_after_ctrl_c",
                "modeling/test_evaluation.py::test_after_an_interrupted_evaluation_the_head_is_right",
            ),
            "CI",
        ),
        Promise(
            "Where a kernel does not compile, PyTorch takes over with one warning",
            ("triton_kernels/test_compile_failure.py::test_pytorch_takes_over_with_one_warning",),
            "CI",
        ),
        Promise(
            "A label out of range is an error that names it",
            (
                "loss/test_arguments.py::test_a_wrong_type_is_named",
                "triton_kernels/test_kernels.py::test_out_of_range_labels_are_seen",
            ),
            "CI",
        ),
        Promise(
            "On a GPU it fails an assertion that names `labels`",
            ("triton_kernels/test_kernels.py::test_out_of_range_label_fails_a_named_assertion",),
            "GPU",
        ),
        Promise(
            "A file of the command is whole or not there",
            ("cli/test_common.py::test_files_are_whole_or_not_there",),
            "CI",
        ),
        Promise(
            "A wrong call gets one message, not a traceback ([the table](wrong-calls.md))",
            ("docs/test_wrong_calls.py::test_a_wrong_call_gets_its_message",),
            "CI",
        ),
    ),
    "Versions": (
        Promise(
            "No public name or option changes without a line in the changelog",
            (
                "loss/test_public_api.py::test_nothing_public_breaks",
                "loss/test_public_api.py::test_what_is_public_is_written_down",
            ),
            "CI",
        ),
        Promise(
            "Wheel and sdist install and give the loss of full logits",
            ("loss/test_packaging.py::test_the_installed_loss_is_that_of_full_logits",),
            "CI",
        ),
    ),
    "Supply chain": (
        Promise(
            "hf_cce unpickles nothing, runs no code from data and opens no connection ([SECURITY.md](../../.github/SECURITY.md))",
            ("docs/test_trust.py::test_nothing_is_unpickled_run_or_downloaded",),
            "CI",
        ),
        Promise("No code of a model repository runs", ("docs/test_trust.py::test_remote_code_is_never_trusted",), "CI"),
    ),
}
# Named in a sentence, so that nobody takes their absence for a promise.
NOT_CHECKED = (
    "a rank that dies during a step",
    "a disk that is full while Triton writes its cache, a read-only cache",
    "long runs: thousands of steps of a large model on real text, with and without the filter",
)


def versions() -> str:
    """Return the table of versions, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    python = re.findall(r'requires-python = "(.+?)"', text)
    packages = ("torch", "triton", "transformers", "accelerate", "trl", "peft")
    found = [(name, re.findall(rf'"{name}(>=[\d.]+)', text)) for name in packages]
    rows = [("Python", python[0]), *((name, versions[0]) for name, versions in found)]
    return "| package | versions |\n|---|---|\n" + "\n".join(f"| {name} | {wanted} |" for name, wanted in rows)


def mutants() -> str:
    """Return what tests/mutants/report.json says, in sentences."""
    report = json.loads(MUTANTS.read_text("utf-8"))
    ran = len(report["mutants"])
    lines = [
        "`make mutants` changes one place of a kernel or of a rule at a time: a mask, a sign, a threshold, a missing "
        f"all-reduce. Of {report['listed']} mutants {ran} have run: the tests noticed {report['killed'] + report['timeout']}, "
        f"{report['argued']} survivors are equivalent or harmless for a reason given, {report['survived']} survive."
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


def _inline(text: str) -> str:
    return " ".join(text.split())


def page() -> str:
    """Return the whole page."""
    parts = [
        "# Promises and their checks\n\n"
        "Each promise names tests that fail where it is broken. CI: they run at every change, on a CPU and in "
        "Triton's interpreter.\nGPU: `make test-gpu` runs them before a release. Written by `python -m tests.support.promises`.\n"
    ]
    for title, promises in PROMISES.items():
        rows = "\n".join(
            f"| {x.text} | {x.where} | {'<br>'.join(f'`{check}`' for check in x.checks)} |" for x in promises
        )
        parts.append(f"## {title}\n\n| promise | where | tests |\n|---|---|---|\n{rows}\n")
    parts.append(f"## Supported versions\n\n{versions()}\n")
    parts.append(f"## Mutants\n\n{mutants()}\n")
    parts.append("## Not checked yet\n\n" + "\n".join(f"- {text}" for text in NOT_CHECKED) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
