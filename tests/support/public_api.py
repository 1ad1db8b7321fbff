"""The public API: names, parameters, results, and options of the command.

public_api.json holds the accepted state. ``python -m tests.support.public_api --write`` stores the current one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_suffix(".json")
METHODS = {"CCEConfig": ("of",), "FilterState": ("stats",)}
Api = dict[str, dict[str, Any]]


def _parameters(function: Any) -> list[dict[str, Any]]:
    found = []
    for p in inspect.signature(function).parameters.values():
        if p.name in ("self", "cls"):
            continue
        entry = {"name": p.name, "kind": p.kind.name, "annotation": str(p.annotation)}
        found.append(entry if p.default is p.empty else {**entry, "default": repr(p.default)})
    return found


def current() -> Api:
    """Return the current API: callables with parameters, results with fields, commands with options."""
    import hf_cce
    from hf_cce.cli.app import parser
    from hf_cce.deferred.training_call import Stats
    from hf_cce.loss import LogProbs

    api: Api = {}
    for name in hf_cce.__all__:
        value = getattr(hf_cce, name)
        if inspect.isclass(value) and issubclass(value, Warning):
            api[name] = {"kind": "warning"}
            continue
        api[name] = {"kind": "class" if inspect.isclass(value) else "function", "parameters": _parameters(value)}
        for method in METHODS.get(name, ()):
            api[f"{name}.{method}"] = {"kind": "method", "parameters": _parameters(getattr(value, method))}
    api["LogProbs"] = {"kind": "result", "fields": list(LogProbs._fields)}
    api["Stats"] = {"kind": "result", "fields": [field.name for field in dataclasses.fields(Stats)]}
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    for name, command in dict(commands.choices or {}).items():
        options = sorted(word for action in command._actions for word in action.option_strings or [action.dest])
        api[f"hf-cce {name}"] = {"kind": "command", "fields": [x for x in options if x not in ("-h", "--help")]}
    return dict(sorted(api.items()))


def stored() -> Api:
    return json.loads(STORED.read_text("utf-8"))


if __name__ == "__main__":
    STORED.write_text(json.dumps(current(), indent=1) + "\n", "utf-8")
