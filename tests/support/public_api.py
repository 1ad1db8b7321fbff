"""What a user may call: names, parameters, results, options of the command; and which changes of it break a caller.

The last that was agreed on lies in public_api.json. ``python -m tests.support.public_api --write`` stores today's.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
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
    """Of the code as it is: callables with their parameters, results with their fields, commands with their options."""
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


def breaks(old: Api, new: Api) -> list[str]:
    """What a caller of ``old`` may trip over in ``new``, in words; additions are none."""
    found = []
    for name, was in old.items():
        now = new.get(name)
        if now is None:
            found.append(f"{name} is gone")
            continue
        if was["kind"] != now["kind"]:
            found.append(f"{name} was a {was['kind']}, is a {now['kind']}")
        gone = [field for field in was.get("fields", ()) if field not in now.get("fields", ())]
        found += [f"{name} has no {field} any more" for field in gone]
        if was["kind"] == "result" and not gone and now["fields"][: len(was["fields"])] != was["fields"]:
            found.append(f"the fields of {name} are in another order")
        found += _broken_parameters(name, was.get("parameters", []), now.get("parameters", []))
    return found


def _broken_parameters(name: str, was: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    found = []
    known = {p["name"]: p for p in now}
    for p in was:
        q = known.get(p["name"])
        if q is None:
            found.append(f"{name} takes no {p['name']} any more")
            continue
        if q["kind"] != p["kind"] and not (p["kind"] == "KEYWORD_ONLY" and q["kind"] == "POSITIONAL_OR_KEYWORD"):
            found.append(f"{name}: {p['name']} was {p['kind']}, is {q['kind']}")
        if "default" in p and "default" not in q:
            found.append(f"{name}: {p['name']} has no default any more")
        elif p.get("default") != q.get("default") and "default" in p:
            found.append(f"{name}: the default of {p['name']} was {p['default']}, is {q['default']}")
        if p["annotation"] != q["annotation"]:
            found.append(f"{name}: {p['name']} was {p['annotation']}, is {q['annotation']}")
    old = {p["name"] for p in was}
    required = [
        p["name"] for p in now if p["name"] not in old and "default" not in p and not p["kind"].startswith("VAR")
    ]
    found += [f"{name} needs {each}, which is new" for each in required]
    by_place = [p["name"] for p in was if p["kind"] == "POSITIONAL_OR_KEYWORD"]
    place_now = [p["name"] for p in now if p["kind"] == "POSITIONAL_OR_KEYWORD"]
    if place_now[: len(by_place)] != by_place and set(by_place) <= set(place_now):
        found.append(f"{name}: its positional arguments are in another order")
    return found


def stored() -> Api:
    return json.loads(STORED.read_text("utf-8"))


def main(arguments: list[str]) -> int:
    old = stored() if STORED.exists() else {}
    broken = breaks(old, current())
    print("\n".join(broken) or "Nothing breaks.")
    if "--write" in arguments:
        STORED.write_text(json.dumps(current(), indent=1) + "\n", "utf-8")
        return 0
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
