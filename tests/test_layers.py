"""Imports run downward only, and `import lowbitrl` loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lowbitrl

ROOT = Path(lowbitrl.__file__).parent
# From the ground up; a package may import itself and what stands before it.
LAYERS = [
    ("formats", "imports", "watch"),
    ("kernels",),
    ("quant",),
    ("objectives",),
    ("gguf",),
    ("models", "tasks"),
    ("upcycle",),
    ("sync",),
    ("checkpoints",),
    ("rollout",),
    ("distributed",),
    ("trainer", "evaluation"),
    ("tracking",),
    ("config", "runs"),
    ("diagnose",),
    ("faults",),
    ("engines", "held_out", "same_run"),
    ("assemble", "collect"),
    ("loop", "supervise"),
    ("bench", "compare", "demo", "doctor", "export", "settings", "sizing"),
    ("experiment",),
    ("integrations",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TOWERS = {"objectives": {"torch"}, "formats": {"torch"}}


def imported(path):
    """Absolute names of what a module imports, relative imports resolved."""
    package = ["lowbitrl", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def own(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path):
    here = own(path)
    for name in imported(path):
        if name.startswith("lowbitrl."):
            there = name.split(".")[1]
            if there in LEVEL:
                assert there == here or LEVEL[there] < LEVEL[here], f"{here} imports {name}"


@pytest.mark.parametrize("tower", TOWERS)
def test_towers_import_torch_alone(tower):
    standard = sys.stdlib_module_names | TOWERS[tower]
    for path in (ROOT / tower).rglob("*.py"):
        for name in imported(path):
            inside = name.startswith(f"lowbitrl.{tower}")
            assert inside or name.split(".")[0] in standard, f"{path.name} imports {name}"


def test_every_module_has_a_layer():
    assert {own(p) for p in MODULES} == set(LEVEL)


def test_every_module_says_why_it_exists():
    silent = [
        str(p.relative_to(ROOT))
        for p in ROOT.rglob("*.py")
        if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent


def test_lean_import():
    code = (
        "import sys, lowbitrl; print(sorted({'torch', 'triton', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_quant_and_engine_load_no_gpu_compiler_or_server():
    code = (
        "import sys, torch, lowbitrl.loop; assert not torch.cuda.is_initialized();"
        "print(sorted({'vllm', 'verl', 'trl', 'ray'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
