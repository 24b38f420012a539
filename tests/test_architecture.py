"""Imports flow one way, in both packages, and the library needs nothing but torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import torchdeq

ROOT = Path(torchdeq.__file__).parents[1]

#: The parts of the library, from the ground up: a part imports only itself and parts of rows above.
LAYERS = [
    "_torch _version autocast callers coupling initial notes pytree randomness reach registry",
    "compat.names numbers",
    "aliasing arnoldi checks closures dropout option packing tracing compat.ignored",
    "distributed",
    "modules",
    "compiling memory packed stopping warm_starts",
    "trace",
    "stats",
    "failures solution",
    "config_checks",
    "config",
    "flags linear loss norm",
    "solver",
    "grad stream",
    "experimental",
    "functional compat.functions",
    "compat.backward compat.decorator export forward_pass live_options",
    "deq compat.paths compat",
    "diagnostics monitoring",
    "plots",
    "core utils",
]
LEVEL = {part: level for level, row in enumerate(LAYERS) for part in row.split()}

#: Families of models, which never import each other; `images` serves several of them.
FAMILIES = ("diffusion", "flow", "ignn", "inr", "lm", "mdeq", "reason")

Graph = dict[str, set[str]]


@cache
def modules() -> dict[str, ast.Module]:
    """Return the modules of both packages, parsed, by their names."""
    files = (path for package in ("torchdeq", "deq_zoo") for path in (ROOT / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in files
    }


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import that runs, inside functions, too."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from ((node.module, alias.name) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def import_graph() -> Graph:
    """Return, for every module of both packages, the modules of both that it imports."""
    trees = modules()
    graph: Graph = {}
    for name, tree in trees.items():
        graph[name] = set()
        for module, attribute in imported_names(tree):
            inner = f"{module}.{attribute}"
            if inner in trees or module in trees:
                graph[name].add(inner if inner in trees else module)
    return graph


def part_of(module: str) -> str:
    """Return the part of the library that a module belongs to: its longest prefix in `LEVEL`."""
    inner = module.removeprefix("torchdeq.")
    parts = [part for part in LEVEL if inner == part or inner.startswith(f"{part}.")]
    return max(parts, key=len, default="")


def family_of(module: str) -> str | None:
    """Return the family of a module of the zoo; None for the frame and for `images`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in FAMILIES else None


def violations(graph: Graph) -> list[str]:
    """Return every import that goes against an arrow, as a sentence."""
    wrong = []
    for module, imports in graph.items():
        for target in imports:
            if target.startswith("deq_zoo"):
                foreign = family_of(target) not in (None, family_of(module))
                if module.startswith("torchdeq") or foreign:
                    wrong.append(f"{module} imports {target}")
            elif module.startswith("torchdeq."):
                part, target_part = part_of(module), part_of(target)
                if part != target_part and not LEVEL[target_part] < LEVEL[part]:
                    wrong.append(f"{module} imports {target}, which is not below it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"a cycle: {' -> '.join(error.args[1])}")
    return wrong


def test_every_module_of_the_library_has_its_place() -> None:
    assert not [name for name in modules() if name.startswith("torchdeq.") and not part_of(name)]


def test_imports_follow_the_arrows() -> None:
    assert violations(import_graph()) == []


@pytest.mark.parametrize(
    ("module", "target", "complaint"),
    [
        ("torchdeq.linear.base", "torchdeq.solver.base", "which is not below it"),
        ("torchdeq.stats", "torchdeq.solver", "which is not below it"),
        ("torchdeq.grad.base", "torchdeq.functional", "which is not below it"),
        ("torchdeq.solver.base", "torchdeq.solver.loop", "a cycle"),
        ("torchdeq.norm.apply", "deq_zoo.task", "imports deq_zoo.task"),
        ("deq_zoo.training", "deq_zoo.lm.task", "imports deq_zoo.lm.task"),
        ("deq_zoo.flow.model", "deq_zoo.mdeq.layers", "imports deq_zoo.mdeq.layers"),
        ("deq_zoo.errors", "deq_zoo.cli", "a cycle"),
    ],
)
def test_a_reversed_arrow_is_detected(module: str, target: str, complaint: str) -> None:
    graph = import_graph()
    assert module in graph
    assert target in graph
    graph[module].add(target)
    assert any(complaint in sentence for sentence in violations(graph))


def test_the_zoo_uses_public_names_of_the_library_only() -> None:
    private = [
        f"{name}: {module}.{attribute}"
        for name, tree in modules().items()
        if name.startswith("deq_zoo")
        for module, attribute in imported_names(tree)
        if module.split(".")[0] == "torchdeq"
        and attribute not in ("", *getattr(importlib.import_module(module), "__all__", ()))
    ]
    assert private == []


@pytest.mark.parametrize("first", ["linear", "linear.gmres", "solver", "grad", "packing", "compat"])
def test_any_part_can_be_imported_first(first: str) -> None:
    code = f"import torchdeq.{first}; import torchdeq; torchdeq.fixed_point"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_needs_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import torchdeq;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'torchdeq'};"
        "print(sorted(m for m in new if m in ('numpy', 'scipy', 'deq_zoo', 'rich', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
