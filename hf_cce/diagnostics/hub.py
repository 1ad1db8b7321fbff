"""Models and data sets by name, on the hub or in its cache. The hub is asked once; where it does not answer, one error says so.

Its own client would ask five times more, for some 25 seconds, and log each time: good for jobs at night, not for mistyped names.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any


def answers(name: str, file: str = "config.json", kind: str | None = None) -> bool:
    """Whether the hub says anything of ``name``, be it no; ``kind``: "dataset", or None for a model.

    False also where ``HF_HUB_OFFLINE`` is set: its client then refuses to ask.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=HF_HUB_ETAG_TIMEOUT)
    except HFValidationError:
        return True  # no name that could be there: whoever loads it says so
    except HfHubHTTPError as error:
        return (
            error.response.status_code < 500
        )  # no such name, or no access: likewise; from 500 on the hub is out of order
    except Exception:  # of the HTTP client, which is another one in each release of the hub's
        return False
    return True


def reachable(name: str) -> str:
    """What ``from_pretrained`` finds the model by: ``name``, or its folder in the cache where the hub does not answer.

    Not ``local_files_only=True``: Transformers 5.23 forgets it where it looks for adapters, and asks the hub all the same.

    Raises:
        OSError: it is in none of them.
    """
    if _is_path(name) and not Path(name).exists():
        raise OSError(f"{name}: no such folder")
    if Path(name).exists() or answers(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError:
        raise OSError(f"{name}: the hub does not answer, and its cache has nothing of this name") from None


def _is_path(name: str) -> bool:
    """Whether this can only be meant for a file or folder: names on the hub have no more than one slash."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def config_named(name: str, otherwise: str) -> Any:
    """The configuration of a model in a folder, in a file or on the hub; ``otherwise``: what else could have been given.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig

    path = Path(name)
    if not path.exists() and (path.suffix == ".json" or _is_path(name)):
        raise ValueError(f"{name}: no such file or folder")
    try:
        return AutoConfig.from_pretrained(reachable(name))
    except Exception as error:  # the hub's client has dozens
        raise ValueError(
            f"{name}: no configuration of a model that Transformers knows ({first_line(error)}); give a folder with a "
            f"config.json, a name on the hub (in the cache, or with a connection), or {otherwise}"
        ) from None


def model_type(name: str) -> str:
    """To end an error about ``name`` where a model type would do: an example, and those that ``name`` is close to."""
    from transformers import CONFIG_MAPPING

    near = difflib.get_close_matches(name.lower(), CONFIG_MAPPING.keys(), cutoff=0.75)
    return "a model type such as llama" + (f"; did you mean {' or '.join(near)}?" if near else "")


def first_line(error: BaseException) -> str:
    """Of its message, or its type where it has none."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
