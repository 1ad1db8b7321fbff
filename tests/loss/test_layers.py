"""Structure: direction of imports, cost of importing, public names, and style rules."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from command import ROOT, python
from public_api import current, stored

import hf_cce


def layers() -> dict[str, set[str]]:
    """Return what each layer may import, from the table in CONTRIBUTING.md; layers in one row may import each other."""
    found = {}
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| layer | holds | may import |")[2]
    for names, allowed in re.findall(r"^\| (`.+?) \| .+ \| (.+?) \|$", table, re.MULTILINE):
        row = re.findall(r"`(\w+)/?`", names)
        others = {"__init__" if name == "public names" else name for name in allowed.split(", ") if name != "nothing"}
        found.update({name: others | {*row} - {name} for name in row})
    return found


MAY_IMPORT = layers()
MODULES = sorted((ROOT / "hf_cce").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    """Return the hf_cce modules that ``path`` imports anywhere, including under TYPE_CHECKING: those are dependencies too."""
    found: set[str] = set()
    known = {name_of(p).removesuffix(".__init__") for p in MODULES}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write the full name of the module, not a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        # __init__ imports lazily and may hold the modules' names as strings
        elif path.name == "__init__.py" and isinstance(node, ast.Constant) and node.value in known:
            found.add(str(node.value))
    return {module for module in found if module.split(".")[0] in ("hf_cce", "patches")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    layer = layer_of(name_of(path))
    assert layer in MAY_IMPORT, f"{name_of(path)} is in no layer: name it in the table of CONTRIBUTING.md"
    for module in imports_of(path):
        assert module.split(".")[0] == "hf_cce", f"{name_of(path)} imports {module}: write hf_cce.patches"
        target = layer_of(module)
        assert target == layer or target in MAY_IMPORT[layer], (
            f"{name_of(path)} imports {module}, but {layer} may import only {sorted(MAY_IMPORT[layer])}"
        )


def test_no_import_cycles() -> None:
    names = {name_of(path).removesuffix(".__init__"): path for path in MODULES}
    modules = {name: imports_of(path) & set(names) - {name} for name, path in names.items()}
    layer_graph = {name: allowed - {"__main__"} for name, allowed in MAY_IMPORT.items()}  # in one row with cli
    for graph in (modules, layer_graph):
        assert graph and list(TopologicalSorter(graph).static_order())  # or CycleError


def test_commands_integrations_and_recipes_use_public_names_only() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.py"))
    outer_layers = [path for path in MODULES if layer_of(name_of(path)) in ("diagnostics", "cli", "integrations")]
    for path in [*outer_layers, *recipes]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module == "hf_cce":
                assert {alias.name for alias in node.names} <= set(hf_cce.__all__), path
            assert path not in recipes or not module.startswith("hf_cce."), path


def test_patches_copy_no_forward() -> None:
    for path in (ROOT / "hf_cce" / "patches").glob("*.py"):
        assert not re.search(r"def forward\(\s*self,\s*input_ids", path.read_text("utf-8")), path


def test_tolerances_are_only_in_numerics() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name == "numerics.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("atol", "rtol", "abs_tol", "rel_tol"):
                raise AssertionError(f"{path.name}:{node.value.lineno}: {node.arg}=…; use tests/support/numerics.py")


def test_public_api_matches_the_stored_one() -> None:
    """Names, parameters, defaults, result fields and command options: no change to them goes unnoticed."""
    assert stored() == current(), "python -m tests.support.public_api --write, with a line in CHANGELOG.md"


def test_public_names() -> None:
    assert len(hf_cce.__all__) <= 12
    assert all(getattr(hf_cce, name).__doc__ for name in hf_cce.__all__) and set(dir(hf_cce)) >= set(hf_cce.__all__)
    with pytest.raises(AttributeError):
        hf_cce.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hf_cce", "triton trl transformers peft accelerate matplotlib axolotl swift llamafactory lightning pydantic"),
        ("hf_cce.cli.app", "torch transformers matplotlib tokenizers"),  # so that --help starts quickly
    ],
)
def test_imports_load_no_optional_packages(module: str, absent: str) -> None:
    loaded = python(f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").split()
    assert not set(absent.split()) & set(loaded)


def test_the_loss_runs_on_a_cpu_without_triton() -> None:
    code = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
import torch, hf_cce
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
loss = hf_cce.linear_cross_entropy(hidden, weight, torch.arange(5))
loss.backward()
assert weight.grad.abs().sum() > 0
print(float(loss))
"""
    assert float(python(code)) > 0
