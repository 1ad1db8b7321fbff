"""Run notebooks from top to bottom and store their outputs, without machine-specific messages.

usage: python notebooks/execute.py [NOTEBOOK …]     (default: all in this folder; nothing is downloaded)
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # this checkout, not an installed hf_cce
from benchmarks.files import whole_file  # noqa: E402

TIMEOUT = 300  # seconds per cell


def execute(path: Path) -> Any:
    """Return the notebook at ``path`` with the outputs of a run in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message contains its traceback.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    # This checkout, not an installed hf_cce; no network; and no tqdm warning about missing widgets.
    path_of_modules = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path_of_modules,
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
        for output in cell.get("outputs", []):
            if output.output_type == "stream":  # an installed DeepSpeed reports which device it found
                lines = output.text.splitlines(keepends=True)
                output.text = "".join(line for line in lines if "real_accelerator.py" not in line)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: list[str]) -> None:
    """Execute the given notebooks, or all of them, and write each back."""
    for path in map(Path, arguments) if arguments else sorted(FOLDER.glob("*.ipynb")):
        fresh = execute(path)
        with whole_file(path) as temporary:
            nbformat.write(fresh, temporary)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
