"""Imports flow one way, and the library needs neither the zoo nor anything but torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchdeq

ROOT = Path(torchdeq.__file__).parent

#: What the files of each part may import from the library.
ALLOWED = {
    "registry": set(),
    "notes": set(),
    "compat": {"notes", "registry", "compat"},
    "autocast": set(),
    "callers": set(),
    "modules": {"reach"},
    "numbers": {"_torch"},
    "reach": set(),
    "randomness": set(),
    "tracing": set(),
    "dropout": set(),
    "initial": set(),
    "aliasing": set(),
    "packing": {"aliasing", "autocast"},
    "memory": {"modules"},
    "solver": {
        *("registry", "callers", "numbers", "packing", "solver", "linear", "tracing", "compat"),
    },
    "linear": {"autocast", "numbers", "registry", "solver", "linear"},
    "grad": {
        *("registry", "callers", "packing", "modules", "notes", "numbers", "randomness"),
        *("tracing", "solver", "linear", "grad", "config", "compat"),
    },
    "functional": {
        *("_torch", "registry", "modules", "packing", "randomness", "tracing", "solver", "grad"),
    },
    "loss": {"autocast", "packing", "registry", "loss"},
    "config": {"callers", "registry", "solver"},
    "flags": {"config"},
    "norm": {"_torch", "autocast", "callers", "registry", "tracing", "config", "norm"},
    "legacy": {"packing"},
    "core": {"deq"},
}


def imports(path: Path) -> set[str]:
    """The parts of the library a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.name))
def test_imports_follow_the_arrows(path: Path) -> None:
    names = imports(path)
    assert not any(name.split(".")[0] == "deq_zoo" for name in names)
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours = {name.split(".")[1] for name in names if name.startswith("torchdeq.")}
    if part in ALLOWED:
        assert ours <= ALLOWED[part] | {"_torch"}


def test_only_newton_uses_the_linear_solvers_inside_the_solve() -> None:
    users = {
        path.name
        for path in (ROOT / "solver").glob("*.py")
        if any(name.startswith("torchdeq.linear") for name in imports(path))
    }
    assert users == {"newton_krylov.py"}


@pytest.mark.parametrize("first", ["linear", "linear.gmres", "solver", "grad", "packing"])
def test_any_part_can_be_imported_first(first: str) -> None:
    code = (
        f"import sys, types, torch; import torchdeq.{first}; import torchdeq; torchdeq.fixed_point"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_needs_torch_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import torch; known = set(sys.modules);"
        "import torchdeq, torchdeq.linear;"
        "new = {m.split('.')[0] for m in set(sys.modules) - known} - {'torchdeq'};"
        "print(sorted(m for m in new if m in ('numpy', 'scipy', 'deq_zoo', 'rich', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
