"""Families of models: what each one declares, and where the declarations are.

Nothing here imports torch: `deq-zoo list` and `--help` read declarations alone. A package outside
of the zoo adds a family by an entry point of the group `deq_zoo.families`:

    [project.entry-points."deq_zoo.families"]
    mine = "my_package.family:FAMILY"
"""

from __future__ import annotations

import ast
import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from deq_zoo.errors import ZooError
from deq_zoo.spelling import suggest

GROUP = "deq_zoo.families"
_BUILT_IN = ("diffusion", "flow", "ignn", "inr", "lm", "mdeq", "reason")
_registered: dict[str, Family] = {}
_log = logging.getLogger("deq_zoo")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of models with its presets, tasks and uses.

    Args:
        name: the first part of the names of its presets, before `-`.
        description: one sentence.
        presets: the module whose functions register them with `@PRESETS.register("name")`.
        tasks: the classes of its tasks, as `module:Class`.
        packages: modules that it needs beyond those of the frame.
        install: the command that installs them.
        predicts: what `predict` takes and returns or writes, in a sentence; "" without files.
        samples: what `sample` writes, in a sentence; "" if there is nothing to sample.
        converter: the module with `from_authors` and `to_authors`; "" without released weights.
        service: the module with `make_service`, for `serve`; "" if it cannot be served.
        pipeline_tag: the task of its models on the Hugging Face Hub; "" if none fits.
    """

    name: str
    description: str
    presets: str
    tasks: tuple[str, ...]
    packages: tuple[str, ...] = ()
    install: str = ""
    predicts: str = ""
    samples: str = ""
    converter: str = ""
    service: str = ""
    pipeline_tag: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a family's name is one word of letters, got {self.name!r}")

    @property
    def package(self) -> str:
        """Return the top-level package of the family."""
        return self.presets.partition(".")[0]


def register_family(family: Family) -> Family:
    """Add a family to those of this process; one of the same name is replaced, a built-in never."""
    if family.name in _BUILT_IN:
        raise ZooError(f"the zoo has a family {family.name!r} of its own: choose another name")
    _registered[family.name] = family
    return family


def families() -> dict[str, Family]:
    """Return all families by name: those of the zoo, of installed packages and of this process."""
    return {**_built_in(), **_installed(), **_registered}


def find_family(name: str) -> Family:
    """Return the family of a name, or of the preset of that name; raise if there is none."""
    by_name = families()
    family = by_name.get(name) or by_name.get(name.partition("-")[0])
    if family is None:
        raise ZooError(f"unknown family {name!r}{suggest(name, by_name)}")
    return family


def preset_summaries(family: Family) -> dict[str, str]:
    """Return the first line about each preset of a family, by name.

    The source of the module is parsed, not run, since running it would import torch. The result is
    empty unless every preset is a function with the decorator `@PRESETS.register("name")`; then
    `deq_zoo.preset.summaries` imports the module.
    """
    source = _source(family.presets)
    if source is None:
        return {}
    try:
        return _read_summaries(ast.parse(source.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError) as error:
        _log.warning("the presets of %r cannot be read: %r", family.name, error)
        return {}


@cache
def _built_in() -> dict[str, Family]:
    return {name: import_module(f"deq_zoo.{name}.family").FAMILY for name in _BUILT_IN}


@cache
def _installed() -> dict[str, Family]:
    loaded = (_load(point) for point in entry_points(group=GROUP))
    return {family.name: family for family in loaded if family is not None}


def _load(point: EntryPoint) -> Family | None:
    """Return the family of an entry point; a broken one must not end every command."""
    try:
        family = point.load()
    except Exception as error:  # code of another package may raise anything
        _log.warning("the family %r of %s cannot be loaded: %r", point.name, point.value, error)
        return None
    if not isinstance(family, Family) or family.name in _BUILT_IN:
        _log.warning("the entry point %r (%s) is no new family", point.name, point.value)
        return None
    return family


def _source(module: str) -> Path | None:
    """Return the file of a module without importing the packages around it."""
    package, *inner = module.split(".")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand
        return None
    if spec is None or not inner:
        return None if spec is None or spec.origin is None else Path(spec.origin)
    stems = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    files = (file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


def _read_summaries(tree: ast.Module) -> dict[str, str]:
    """Return the summaries of presets in a module; none if it registers one in another way."""
    summaries = {
        str(call.args[0].value): (ast.get_docstring(node) or "").partition("\n")[0]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if _registers(call) and call.args and isinstance(call.args[0], ast.Constant)
    }
    return summaries if len(summaries) == sum(map(_registers, ast.walk(tree))) else {}


def _registers(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("PRESETS.register")
