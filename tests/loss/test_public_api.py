"""A change that breaks a caller is reported, and so is one that is not written down."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from public_api import Api, breaks, current, stored

RENEW = "python -m tests.support.public_api --write, with a line in CHANGELOG.md"


def parameter(api: Api, name: str, of: str) -> dict[str, str]:
    return next(p for p in api[of]["parameters"] if p["name"] == name)


def test_nothing_public_breaks() -> None:
    found = breaks(stored(), current())
    assert not found, f"callers break: {found}; if that is meant: {RENEW}"


def test_what_is_public_is_written_down() -> None:
    assert stored() == current(), f"new public names or parameters: {RENEW}"


def _rename(api: Api) -> None:
    parameter(api, "labels", "linear_cross_entropy")["name"] = "targets"


def _no_default(api: Api) -> None:
    del parameter(api, "ignore_index", "linear_cross_entropy")["default"]


def _positional(api: Api) -> None:
    parameter(api, "labels", "linear_log_probs")["kind"] = "KEYWORD_ONLY"


def _swap(api: Api) -> None:
    parameters = api["linear_cross_entropy"]["parameters"]
    parameters[0], parameters[1] = parameters[1], parameters[0]


def _required(api: Api) -> None:
    api["apply_cce"]["parameters"].insert(1, {"name": "device", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "str"})


BREAKING: dict[str, Callable[[Api], object]] = {
    "remove_cce is gone": lambda api: api.pop("remove_cce"),
    "linear_cross_entropy takes no labels any more": _rename,
    "linear_cross_entropy: ignore_index has no default any more": _no_default,
    "linear_log_probs: labels was POSITIONAL_OR_KEYWORD, is KEYWORD_ONLY": _positional,
    "linear_cross_entropy: its positional arguments are in another order": _swap,
    "apply_cce needs device, which is new": _required,
    "CCEConfig: the default of gradient_filter was 'auto', is None": lambda api: parameter(
        api, "gradient_filter", "CCEConfig"
    ).update(default="None"),
    "CCEConfig: memory_budget was int | str, is int": lambda api: parameter(api, "memory_budget", "CCEConfig").update(
        annotation="int"
    ),
    "LogProbs has no entropy any more": lambda api: api["LogProbs"]["fields"].remove("entropy"),
    "the fields of LogProbs are in another order": lambda api: api["LogProbs"]["fields"].reverse(),
    "hf-cce demo has no --seed any more": lambda api: api["hf-cce demo"]["fields"].remove("--seed"),
    "FilterState.stats is gone": lambda api: api.pop("FilterState.stats"),
}


@pytest.mark.parametrize("told", BREAKING)
def test_a_break_is_told(told: str) -> None:
    changed = copy.deepcopy(current())
    BREAKING[told](changed)
    assert told in breaks(current(), changed)


def test_an_addition_is_no_break() -> None:
    changed = copy.deepcopy(current())
    changed["linear_cross_entropy"]["parameters"].append(
        {"name": "focal", "kind": "KEYWORD_ONLY", "annotation": "float", "default": "0.0"}
    )
    changed["LogProbs"]["fields"].append("kurtosis")
    changed["hf-cce demo"]["fields"].append("--again")
    changed["another"] = {"kind": "function", "parameters": []}
    assert breaks(current(), changed) == [] and changed != current()
