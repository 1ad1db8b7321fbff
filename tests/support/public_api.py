"""The public API: signatures, fields of results, and options of the command.

public_api.json holds the accepted state. ``python -m tests.support.public_api --write`` stores the current one.
"""

import dataclasses
import inspect
import json
from pathlib import Path

STORED = Path(__file__).with_suffix(".json")


def current() -> dict[str, str | list[str]]:
    import hf_cce
    from hf_cce.cli.app import parser
    from hf_cce.deferred.training_call import Stats
    from hf_cce.loss import LogProbs

    public = {name: getattr(hf_cce, name) for name in hf_cce.__all__}
    public |= {"CCEConfig.of": hf_cce.CCEConfig.of, "FilterState.stats": hf_cce.FilterState.stats}
    warning = public.pop("CCEWarning")
    api: dict[str, str | list[str]] = {name: str(inspect.signature(value)) for name, value in public.items()}
    api["CCEWarning"] = [base.__name__ for base in warning.__mro__]
    api["LogProbs"] = list(LogProbs._fields)
    api["Stats"] = [field.name for field in dataclasses.fields(Stats)]
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    for name, command in dict(commands.choices or {}).items():
        options = {word for action in command._actions for word in action.option_strings or [action.dest]}
        api[f"hf-cce {name}"] = sorted(options - {"-h", "--help"})
    return dict(sorted(api.items()))


def stored() -> dict[str, str | list[str]]:
    return json.loads(STORED.read_text("utf-8"))


if __name__ == "__main__":
    STORED.write_text(json.dumps(current(), indent=1) + "\n", "utf-8")
