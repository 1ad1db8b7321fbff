"""Structure: which way imports go, what importing costs, what is public, what the style rules forbid."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "apply_cce",
    "remove_cce",
    "supported_models",
    "CCEConfig",
    "CCEWarning",
    "CCECallback",
    "FilterState",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_divergence",
    "TeacherHead",
    "TeacherTopK",
}

# The layers from the lowest up; a module may import its own layer's folder and every layer named beside it.
# The table stands in words in CONTRIBUTING.md.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "spec": set(),
    "quantized": set(),
    "kernels": {"spec"},
    "reference": {"quantized", "spec", "config"},
    "fallback": {"reference", "spec", "config"},
    "filter_state": set(),
    "strategies": {"kernels", "fallback", "reference", "spec", "filter_state", "config"},
    "dispatch": {"strategies", "fallback", "quantized", "spec", "filter_state", "config"},
    "flops": set(),
    "ops": {"dispatch", "strategies", "reference", "quantized", "spec", "filter_state", "flops"},
    "head_checks": {"quantized"},
    "sharded": {"ops", "spec"},
    "loss": {"dispatch", "reference", "spec", "head_checks", "ops", "sharded", "filter_state", "config"},
    "divergence_passes": {"kernels", "ops", "reference", "spec"},
    "divergence_topk": {"divergence_passes", "ops", "spec"},
    "divergence": {
        "divergence_passes",
        "divergence_topk",
        "loss",
        "dispatch",
        "reference",
        "spec",
        "head_checks",
        "config",
    },
    "deferred": {"loss", "head_checks", "quantized", "sharded", "filter_state", "config"},
    "patches": {"deferred", "loss", "divergence", "head_checks", "quantized", "sharded", "filter_state", "config"},
    "families": {"patches"},
    "api": {"families", "patches", "config"},
    "callback": {"api", "patches", "deferred", "config"},
    "__init__": {"api", "callback", "patches", "loss", "divergence", "filter_state", "config"},
    "diagnostics": {"__init__", "dispatch", "kernels"},
    "integrations": {"__init__"},
    "cli": {"__init__", "families", "diagnostics"},
    "__main__": {"cli"},
}
MODULES = sorted((ROOT / "hf_cce").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    """The modules of ours that ``path`` imports, anywhere in it; those under TYPE_CHECKING too: they bind as well."""
    found: set[str] = set()
    known = {name_of(p).removesuffix(".__init__") for p in MODULES} | {f"hf_cce.{layer}" for layer in MAY_IMPORT}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"{path}:{node.lineno}: write the full name of the module instead of a relative import"
            )
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    # __init__ loads lazily: it may keep the modules' names as strings
    if path.name == "__init__.py":
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
                found.add(node.value)
    return {module for module in found if module.split(".")[0] in ("hf_cce", "patches")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    layer = layer_of(name_of(path))
    assert layer in MAY_IMPORT, (
        f"{name_of(path)} is in no layer: name it in tests/loss/test_layers.py and CONTRIBUTING.md"
    )
    for module in imports_of(path):
        assert module.split(".")[0] == "hf_cce", f"{name_of(path)} imports {module}: write hf_cce.patches"
        target = layer_of(module)
        assert target == layer or target in MAY_IMPORT[layer], (
            f"{name_of(path)} imports {module}, but {layer} may import only {sorted(MAY_IMPORT[layer])}"
        )


def test_the_layers_have_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [layer for layer, below in MAY_IMPORT.items() if layer not in order and below <= set(order)]
        assert free, f"a cycle among {set(MAY_IMPORT) - set(order)}"
        order += free


def test_the_modules_have_no_cycle() -> None:
    names = {name_of(path).removesuffix(".__init__"): path for path in MODULES}
    graph = {name: imports_of(path) & set(names) - {name} for name, path in names.items()}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, below in graph.items() if name not in done and below <= done}
        assert free, f"a cycle among {sorted(set(graph) - done)}"
        done |= free


def test_diagnostics_cli_and_integrations_use_public_names_only() -> None:
    for path in MODULES:
        if layer_of(name_of(path)) in ("diagnostics", "cli", "integrations"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module == "hf_cce":
                    assert {alias.name for alias in node.names} <= PUBLIC, name_of(path)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_what_they_are_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} has no docstring"


def test_patches_copy_no_forward() -> None:
    for path in (ROOT / "hf_cce" / "patches").glob("*.py"):
        assert not re.search(r"def forward\(\s*self,\s*input_ids", path.read_text("utf-8")), path


def test_tolerances_live_in_numerics_only() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name == "numerics.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("atol", "rtol", "abs_tol", "rel_tol"):
                raise AssertionError(f"{path.name}:{node.value.lineno}: {node.arg}=…; use tests/support/numerics.py")


def test_public_names() -> None:
    import hf_cce

    assert set(hf_cce.__all__) == PUBLIC
    assert len(hf_cce.__all__) == len(PUBLIC) <= 12
    for name in PUBLIC:
        assert getattr(hf_cce, name) is not None
    assert set(dir(hf_cce)) >= PUBLIC
    with pytest.raises(AttributeError):
        hf_cce.no_such_name  # noqa: B018
    for own in (
        hf_cce.apply_cce,
        hf_cce.remove_cce,
        hf_cce.linear_cross_entropy,
        hf_cce.linear_log_probs,
        hf_cce.linear_divergence,
    ):
        assert own.__doc__, own


def run(code: str) -> str:
    """What ``code`` prints in a fresh Python."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_triton_nor_trl_nor_transformers() -> None:
    loaded = run("import sys, hf_cce; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert not {"triton", "trl", "transformers", "peft", "accelerate", "matplotlib"} & set(loaded)
    assert not {"axolotl", "swift", "llamafactory", "lightning", "pydantic"} & set(loaded)


def test_the_command_line_shows_its_help_without_torch() -> None:
    code = "import sys, hf_cce.cli.app; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    assert not {"torch", "transformers", "matplotlib", "tokenizers"} & set(run(code).split())


def test_the_loss_runs_on_a_cpu_where_triton_cannot_be_imported() -> None:
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
    assert float(run(code)) > 0


def test_what_is_made_has_a_dtype() -> None:
    """PyTorch's default is the user's to set: a buffer made by it would be of another width than kernels and products expect."""
    makers = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye")}
    found, seen = [], 0
    for path in sorted((ROOT / "hf_cce" / "kernels").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in makers:
                seen += 1
                found += [f"{path.name}:{call.lineno}"] * ("dtype" not in {given.arg for given in call.keywords})
    assert seen and found == []
