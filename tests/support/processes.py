"""Start a script of this folder on several ranks and return its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def started(script: str, path: Path, *arguments: str, ranks: int = 2, device: str = "cpu") -> dict[str, Any]:
    """Return what the processes of ``script`` wrote to ``path``; with device "cpu", GPUs are hidden from them."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    run = subprocess.run(
        [*command, str(here / script), str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | hidden,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "unknown inputs or outputs type" not in run.stdout + run.stderr, "DeepSpeed has seen what is no tensor"
    return json.loads(path.read_text("utf-8"))
