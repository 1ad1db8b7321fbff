"""The wheel and the sdist contain the patches folder once, inside hf_cce, and it imports from there."""

import json
import re
import shutil
import site
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from command import ROOT, run

import hf_cce

PATCHES = {f"hf_cce/patches/{path.name}" for path in (ROOT / "hf_cce" / "patches").glob("*.py")}
pytestmark = pytest.mark.slow


def build(what: str, source: Path, target: Path) -> Path:
    """Build the wheel or sdist of ``source`` with the installed setuptools, without a network."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    done = run([sys.executable, "-c", code, str(target)], folder=source)
    assert done.returncode == 0, done.stderr
    assert "BuildBackendWarning" not in done.stderr, done.stderr  # pip shows such warnings to users
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the tree that keeps symlinks, so that no build files are left in this tree."""
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".carry")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    assert (tree / "patches").is_symlink() and not (tree / "hf_cce" / "patches").is_symlink()
    return build("sdist", tree, folder)


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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


def tracked() -> list[str]:
    done = run(["git", "ls-files"])
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_sdist_contains_all_tracked_files(sdist: Path) -> None:
    """The sdist has documentation, notebooks, recipes and tests, the patches folder once, and no untracked files."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    found = {member.name.partition("/")[2] for member in members if member.isfile()}
    made = {name for name in found if name in ("PKG-INFO", "setup.cfg") or name.startswith("hf_cce.egg-info/")}
    expected = {name for name in tracked() if not name.startswith(".") and name != "patches"}  # the symlink
    assert expected - found == set()
    assert found - expected - made == set()
    assert sdist.stat().st_size < 3 << 20


def test_both_wheels_contain_only_hf_cce(wheels: dict[str, Path]) -> None:
    names, others = (zipfile.ZipFile(wheels[origin]).namelist() for origin in ("tree", "sdist"))
    assert sorted(names) == sorted(others) and len(names) == len(set(names))
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hf_cce"}
    assert {name for name in names if name.endswith(".py") and "patches" in name} == PATCHES
    assert "hf_cce/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    known = {"hf_cce/py.typed", *PATCHES} | {
        str(path.relative_to(ROOT)) for path in (ROOT / "hf_cce").rglob("*.py") if "patches" not in path.parts
    }
    assert {name for name in names if name.startswith("hf_cce/")} == known


def test_a_checkout_without_symlinks_builds_and_imports(wheels: dict[str, Path], tmp_path: Path) -> None:
    """On Windows and in some zip files, git's symlink `patches` is a text file containing the target."""
    tree = tmp_path / "checkout"
    tree.mkdir()
    for name in tracked():
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.write_text(str(source.readlink()), "utf-8")
        elif source.is_file():
            shutil.copyfile(source, target)
    assert (tree / "patches").is_file() and (tree / "patches").read_text("utf-8") == "hf_cce/patches"
    assert not any(path.is_symlink() for path in tree.rglob("*"))
    code = "import hf_cce, hf_cce.patches.causal_lm as patched; print(hf_cce.apply_cce.__name__, patched.__file__)"
    done = run([sys.executable, "-c", code], {"PYTHONPATH": str(tree), "PATH": ""}, tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["apply_cce", str(tree / "hf_cce/patches/causal_lm.py")]
    wheel = build("wheel", tree, tmp_path)
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(wheels["tree"]).namelist())


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the scripts folder of a fresh environment with the wheel that was built from the sdist.

    Without a network torch and other packages cannot be installed, so a .pth file adds their folder. Python does not read the
    .pth files in that folder, so an editable install of this checkout stays invisible.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.EnvBuilder(symlinks=sys.platform != "win32").create(folder)
    variables = {"base": str(folder), "platbase": str(folder)}
    where = Path(sysconfig.get_path("purelib", "venv", variables))
    others = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()])
    (where / "others.pth").write_text("\n".join(others) + "\n", "utf-8")
    scripts = Path(sysconfig.get_path("scripts", "venv", variables))
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install"]
    # ignore a version in the outer environment
    command = [*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheels["sdist"])]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert (where / "hf_cce" / "patches" / "causal_lm.py").is_file()
    assert not (where / "patches").exists() and not (where / "tests").exists()
    return scripts


def in_environment(scripts: Path, command: list[str], folder: Path) -> str:
    keep = {"HF_HUB_OFFLINE": "1", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PATH": str(scripts)}
    done = run(command, keep, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_loss_matches_full_logits(environment: Path, tmp_path: Path) -> None:
    """The self-test of ``doctor`` compares losses and gradients with float64."""
    place = "import sys, hf_cce; assert hf_cce.__file__.startswith(sys.prefix), hf_cce.__file__"
    in_environment(environment, [str(environment / "python"), "-c", place], tmp_path)
    command = str(environment / "hf-cce")
    assert in_environment(environment, [command, "--version"], tmp_path).split() == ["hf-cce", hf_cce.__version__]
    found = json.loads(in_environment(environment, [command, "doctor", "--json", "-"], tmp_path))
    checks = {check["name"]: check["status"] for check in found["checks"]}
    assert "wrong" not in checks.values(), found
    assert checks["self-test cpu"] == checks["transformers model"] == "ok"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_demo_installs_a_copy(tmp_path: Path) -> None:
    """`make demo` installs a copy, except into a development install, which it does not change."""

    def commands() -> list[str]:
        done = run(["make", "--dry-run", "demo", f"VENV={tmp_path}"])
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    (install,) = [line for line in commands() if "hf_cce" not in line and "bench" in line and "pip install" in line]
    assert install.endswith(' ".[bench]"') and " -e " not in install
    (tmp_path / ".torch").touch()
    (tmp_path / ".dev").touch()
    assert not [line for line in commands() if "pip install" in line]


def test_the_version_is_in_one_place_and_in_the_changelog() -> None:
    files = [*(ROOT / "hf_cce").rglob("*.py"), ROOT / "pyproject.toml"]
    holders = [str(path.relative_to(ROOT)) for path in files if f'"{hf_cce.__version__}"' in path.read_text("utf-8")]
    assert holders == ["hf_cce/__init__.py"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|rc)\d+)?", hf_cce.__version__)
    assert f"## {hf_cce.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
