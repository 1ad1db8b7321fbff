"""What is shipped: one copy of patches, inside hf_cce, in wheel and sdist; and that it imports from there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCHES = {f"hf_cce/patches/{path.name}" for path in (ROOT / "patches").glob("*.py")}
pytestmark = pytest.mark.slow


def build(what: str, source: Path, target: Path) -> Path:
    """The wheel or the sdist of ``source``, built by the installed setuptools, so that no network is needed."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, links kept as links, so that nothing is left in this one."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".carry")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    assert (tree / "hf_cce" / "patches").is_symlink()
    return build("sdist", tree, folder)


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel built from the tree and the one built from the sdist."""
    folder = tmp_path_factory.mktemp("wheels")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    for name in ("tree", "sdist"):
        (folder / name).mkdir()
    return {
        "tree": build("wheel", sdist.parent / "tree", folder / "tree"),
        "sdist": build("wheel", unpacked, folder / "sdist"),
    }


@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_wheel_holds_the_patches_once_and_nothing_beside_hf_cce(wheels: dict[str, Path], origin: str) -> None:
    with zipfile.ZipFile(wheels[origin]) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hf_cce"}
    assert {name for name in names if name.endswith(".py") and "patches" in name} == PATCHES
    assert "hf_cce/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    results = {f"hf_cce/bench/results/{path.name}" for path in (ROOT / "hf_cce/bench/results").glob("*.json")}
    assert results <= set(names)


def test_both_wheels_hold_the_same(wheels: dict[str, Path]) -> None:
    tree, sdist = (sorted(zipfile.ZipFile(wheels[origin]).namelist()) for origin in ("tree", "sdist"))
    assert tree == sdist


def test_installed_wheel_imports(wheels: dict[str, Path], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    done = subprocess.run([*pip, str(wheels["tree"])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "site" / "patches").exists()
    code = """
import hf_cce, hf_cce.patches, sys
assert hf_cce.__file__.startswith(sys.argv[1]) and hf_cce.patches.__file__.startswith(sys.argv[1]), hf_cce.__file__
print(hf_cce.apply_cce.__name__)
"""
    site = str(tmp_path / "site")
    # PYTHONPATH comes before an editable install of this very checkout
    done = subprocess.run(
        [sys.executable, "-c", code, site], cwd=tmp_path, env={"PYTHONPATH": site, "PATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "apply_cce"


def test_the_version_stands_in_one_place() -> None:
    import hf_cce

    files = [*(ROOT / "hf_cce").rglob("*.py"), ROOT / "pyproject.toml"]
    holders = [str(path.relative_to(ROOT)) for path in files if f'"{hf_cce.__version__}"' in path.read_text("utf-8")]
    assert holders == ["hf_cce/__init__.py"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|rc)\d+)?", hf_cce.__version__)


def test_the_changelog_knows_the_version() -> None:
    import hf_cce

    assert f"## {hf_cce.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_top_level_is_tidy() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in done.stdout.splitlines()}
    allowed = {
        "pyproject.toml", "hf_cce", "patches", "recipes", "tests", "notebooks", "README.md", "LICENSE", "CHANGELOG.md",
        "CONTRIBUTING.md", "Makefile",
    }  # fmt: skip
    assert {name for name in top if not name.startswith(".")} <= allowed
