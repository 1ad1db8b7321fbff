"""PEFT versions that call a model's forward without its hooks, imported only after ``apply_cce`` or not at all by the script.

Two tuners do so in every version; LoRA only in PEFT 0.18 to 0.20. If one of those is installed (`make test-oldest`), the test
processes import it. With a newer one they import a copy with one line of ``BaseTuner.forward`` restored.
"""

import importlib
import importlib.metadata
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command import python
from models import (
    assert_fused,
    assert_results_as_good,
    batch,
    float64_copy,
    loss_and_grads,
    stats,
    tiny_llama,
    with_open_gates,
)

from hf_cce import apply_cce, remove_cce
from hf_cce.patches import peft_tuner

OLD, NEW = "return self.model.forward(*args, **kwargs)", "return self.model(*args, **kwargs)"


@pytest.fixture(scope="module")
def old_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the front of ``sys.path`` with a PEFT that bypasses the hooks."""
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:
        pytest.skip("no PEFT is installed")
    source, folder = Path(spec.origin).parent, tmp_path_factory.mktemp("old")
    text = (source / "tuners" / "tuners_utils.py").read_text("utf-8")
    if OLD in text:
        return source.parent
    assert text.count(NEW) == 1, "BaseTuner.forward is no longer what it was in PEFT 0.21"
    shutil.copytree(source, folder / "peft", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "peft" / "tuners" / "tuners_utils.py").write_text(text.replace(NEW, OLD), "utf-8")
    (folder / "peft-0.20.0.dist-info").mkdir()
    (folder / "peft-0.20.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.20.0\n")
    return folder


def adapted(model: Any, tuner: str) -> Any:
    """Wrap ``model`` with an adapter; PEFT is first imported here."""
    import peft
    import torch

    lora = {"task_type": "CAUSAL_LM", "init_lora_weights": False}
    configs: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules="all-linear", **lora),
        "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_modules=["q_proj", "v_proj"], total_step=9, **lora),
        "adaption": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
    }
    torch.manual_seed(3)
    return with_open_gates(peft.get_peft_model(model, configs[tuner]()).train())


def train_in_this_process(how: str, saved: str, tuner: str) -> int:
    """Do what a user's script does: patch, then import PEFT, then train. Return how many losses were fused."""
    assert "peft" not in sys.modules
    if how == "unpickled":  # in a process that never calls apply_cce
        model = pickle.loads(Path(saved).read_bytes())
    elif how == "class":
        apply_cce(type(tiny_llama()))
        model = tiny_llama()
        remove_cce(type(model))
    else:
        model = tiny_llama() if how == "after PEFT" else apply_cce(apply_cce(tiny_llama()))
    patched = adapted(model, tuner)
    if how == "after PEFT":
        apply_cce(patched)
    if tuner == "lora":
        assert OLD in Path(str(sys.modules["peft.tuners.tuners_utils"].__file__)).read_text("utf-8")
    plain = adapted(tiny_llama(), tuner)
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    twin = loss_and_grads(plain, batch())
    reference = loss_and_grads(float64_copy(adapted(tiny_llama(), tuner)), batch(), double=True)
    assert_results_as_good(loss_and_grads(patched, batch()), twin, reference)
    assert_fused(patched, calls=1)
    assert hooked == []  # an unpatched model is called as before
    return stats(patched).fused


BYPASSING = [(how, "lora") for how in ("class", "unpickled", "after PEFT")]
CUSTOM = [(how, tuner) for tuner in ("adalora", "adaption") for how in ("instance", "unpickled")]


@pytest.mark.parametrize(
    ("how", "tuner"),
    [("instance", "lora"), *(pytest.param(*case, marks=pytest.mark.slow) for case in BYPASSING + CUSTOM)],
)
def test_late_imported_tuner(how: str, tuner: str, old_peft: Path, tmp_path: Path) -> None:
    """LoRA with an old PEFT, the others with the installed one; each in a new process, which has not imported PEFT."""
    (tmp_path / "model").write_bytes(pickle.dumps(apply_cce(tiny_llama())))
    folders = (*([old_peft] if tuner == "lora" else []), ".", "tests/support", "tests/modeling")
    given = (how, str(tmp_path / "model"), tuner)
    printed = python(f"import test_peft_late as test; print(test.train_in_this_process{given})", folders=folders)
    assert printed.splitlines()[-1] == "1"


def test_works_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = importlib.metadata.PackageNotFoundError("peft")
    monkeypatch.setattr(peft_tuner, "version", Mock(side_effect=missing))
    monkeypatch.setattr(peft_tuner, "import_module", lambda name: pytest.fail(f"imported {name}"))
    apply_cce(tiny_llama())
