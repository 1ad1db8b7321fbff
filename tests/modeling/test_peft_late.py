"""PEFT that calls past the hooks of a model, imported only after ``apply_cce``: a plain loop reaches the fused loss all the same.

Two tuners call past them whatever the version; the processes of LoRA need an old one. Where PEFT 0.18 to 0.20 is installed
(`make test-oldest`), they import that one. With a newer one they import a copy in which one line is what it was: in
``BaseTuner.forward`` of ``tuners_utils.py``, ``return self.model.forward(*args, **kwargs)``, which is line 308 of PEFT 0.18.0,
311 of 0.18.1, 330 of 0.19.0 and 0.19.1, and 333 of 0.20.0.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import assert_fused, batch, exact, loss_and_grads, stats, tiny_llama, with_open_gates
from numerics import assert_as_good

from hf_cce import apply_cce, remove_cce
from hf_cce.patches import peft_tuner

ROOT = Path(__file__).parents[2]
OLD, NEW = "return self.model.forward(*args, **kwargs)", "return self.model(*args, **kwargs)"


@pytest.fixture(scope="module")
def old_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the front of ``sys.path``, in which PEFT is one that calls past the hooks."""
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


def finders() -> list[Any]:
    return [finder for finder in sys.meta_path if isinstance(finder, peft_tuner._Finder)]


def adapted(model: Any, tuner: str) -> Any:
    """With an adapter; PEFT is imported here, and not before."""
    import peft
    import torch

    configs: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False
        ),
        "adalora": lambda: peft.AdaLoraConfig(
            task_type="CAUSAL_LM", init_r=4, target_modules=["q_proj", "v_proj"], total_step=9, init_lora_weights=False
        ),
        "adaption": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
    }
    torch.manual_seed(3)
    return with_open_gates(peft.get_peft_model(model, configs[tuner]()).train())


def in_a_process(how: str, saved: str, tuner: str) -> None:
    """What a user's script does: patch, then import PEFT, then train."""
    if how == "unpickled":  # by a process in which nobody calls apply_cce
        model = pickle.loads(Path(saved).read_bytes())
    elif how == "class":
        apply_cce(type(tiny_llama()))
        model = tiny_llama()
    else:
        model = apply_cce(apply_cce(tiny_llama()))
    assert not any(name.split(".")[0] == "peft" for name in sys.modules) and len(finders()) == 1
    if how == "class":
        remove_cce(type(model))
    patched = adapted(model, tuner)
    assert finders() == []
    for module in [module for name, module in sys.modules.items() if name in (peft_tuner.BASE, *peft_tuner.TUNERS)]:
        assert module.__spec__ is not None and "exec_module" not in vars(module.__spec__.loader)
    if tuner == "lora":
        assert OLD in Path(str(sys.modules[peft_tuner.BASE].__file__)).read_text("utf-8")
    plain = adapted(tiny_llama(), tuner)
    hooked: list[str] = []
    plain.get_base_model().register_forward_pre_hook(lambda *_: hooked.append("called"))
    twin = loss_and_grads(plain, batch())
    reference = loss_and_grads(exact(adapted(tiny_llama(), tuner)), batch(), double=True)
    for name, value in loss_and_grads(patched, batch()).items():
        assert_as_good(value, twin[name], reference[name], name)
    assert_fused(patched, calls=1)
    assert hooked == []  # an unpatched model stays called as it was
    print("fused", stats(patched).fused)


def fused_in_a_process(how: str, tuner: str, first: Path | None, tmp_path: Path) -> None:
    """``first``: a folder for the front of ``sys.path``."""
    (tmp_path / "model").write_bytes(pickle.dumps(apply_cce(tiny_llama())))
    code = f"import test_peft_late as test; test.in_a_process({how!r}, {str(tmp_path / 'model')!r}, {tuner!r})"
    folders = [
        *([] if first is None else [first]),
        ROOT,
        ROOT / "tests/support",
        ROOT / "tests/modeling",
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fused", "1"]


@pytest.mark.parametrize("how", ["instance", "class", "unpickled"])
def test_a_model_patched_before_peft_is_imported(how: str, old_peft: Path, tmp_path: Path) -> None:
    fused_in_a_process(how, "lora", old_peft, tmp_path)


@pytest.mark.parametrize("how", ["instance", "unpickled"])
@pytest.mark.parametrize("tuner", ["adalora", "adaption"])
def test_a_tuner_with_a_forward_of_its_own_imported_late(tuner: str, how: str, tmp_path: Path) -> None:
    """Of the PEFT that is installed, whichever it is."""
    pytest.importorskip("peft")
    fused_in_a_process(how, tuner, None, tmp_path)


# The finder, with a module of another name, so that this process keeps its PEFT
LATE = "hf_cce_late_tuners"
CLASS = (
    "class BaseTuner:\n    def forward(self, *args, **kwargs):\n        return self.model.forward(*args, **kwargs)\n"
)


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that stands for PEFT's, of a PEFT of version 0.20."""
    monkeypatch.setattr(peft_tuner, "BASE", LATE)
    monkeypatch.setattr(peft_tuner, "TUNERS", {})
    monkeypatch.setattr(peft_tuner, "version", lambda _: "0.20.0")
    monkeypatch.setattr(sys, "meta_path", [x for x in sys.meta_path if not isinstance(x, peft_tuner._Finder)])
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (LATE, f"{LATE}_tuner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / f"{LATE}.py").write_text(CLASS)
    importlib.invalidate_caches()
    return tmp_path / f"{LATE}.py"


class Model:
    def __call__(self) -> str:
        return "hooks and all"

    def forward(self) -> str:
        return "past the hooks"


def called(module: Any, *, patched: bool) -> str:
    tuner = module.BaseTuner()
    tuner.model = Model()
    if patched:
        tuner.model._hf_cce = None
    return tuner.forward()


def test_the_finder_goes_when_it_has_done_its_work(late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    for _ in range(2):
        peft_tuner.enter("_hf_cce")
        assert len(finders()) == 1
    module = importlib.import_module(LATE)
    monkeypatch.delitem(sys.modules, LATE)
    assert sys.meta_path == before
    assert called(module, patched=True) == "hooks and all" and called(module, patched=False) == "past the hooks"


@pytest.mark.parametrize("installed", ["0.20.0", "0.21.2"])
def test_the_finder_goes_when_the_last_module_is_mended(
    installed: str, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two tuners are waited for whatever the version; the base of all of them only where it calls past the hooks."""
    monkeypatch.setattr(peft_tuner, "version", lambda _: installed)
    monkeypatch.setattr(peft_tuner, "TUNERS", {f"{LATE}_tuner": ("BaseTuner", "forward")})
    (late.parent / f"{LATE}_tuner.py").write_text(CLASS)
    importlib.invalidate_caches()
    peft_tuner.enter("_hf_cce")
    base = importlib.import_module(LATE)
    monkeypatch.delitem(sys.modules, LATE)
    assert called(base, patched=True) == ("hooks and all" if installed == "0.20.0" else "past the hooks")
    assert len(finders()) == 1
    tuner = importlib.import_module(f"{LATE}_tuner")
    monkeypatch.delitem(sys.modules, f"{LATE}_tuner")
    assert finders() == [] and "__call__" in vars(tuner.BaseTuner)


def test_an_import_that_fails_is_tried_again(late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late.write_text("import no_such_module_at_all")
    peft_tuner.enter("_hf_cce")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module(LATE)
    late.write_text(CLASS)
    importlib.invalidate_caches()
    module = importlib.import_module(LATE)
    monkeypatch.delitem(sys.modules, LATE)
    assert finders() == [] and called(module, patched=True) == "hooks and all"


def test_a_module_that_is_not_there_stays_not_there(late: Path) -> None:
    late.unlink()
    importlib.invalidate_caches()
    peft_tuner.enter("_hf_cce")
    with pytest.raises(ModuleNotFoundError, match=LATE):
        importlib.import_module(LATE)


@pytest.mark.parametrize("installed", ["0.21.0", "0.21.2", "0.30.1", "1.0.0", None])
def test_a_peft_that_calls_the_model_is_not_waited_for(
    installed: str | None, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is no PEFT at all."""

    def version(name: str) -> str:
        assert name == "peft"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(peft_tuner, "version", version)
    before = list(sys.meta_path)
    peft_tuner.enter("_hf_cce")
    assert sys.meta_path == before


@pytest.mark.parametrize("installed", ["0.18.0", "0.20.1.dev0", "from a branch"])
def test_any_other_is(installed: str, late: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_tuner, "version", lambda _: installed)
    peft_tuner.enter("_hf_cce")
    assert len(finders()) == 1
