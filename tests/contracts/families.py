"""Families under test, their smoke runs and their inputs."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.family import Family, families
from deq_zoo.packages import missing
from deq_zoo.preset import Preset, find_preset
from deq_zoo.run import Run

#: Families whose packages are installed.
NAMES = [name for name, family in families().items() if not missing(family)]


def family_of(name: str) -> Family:
    return families()[name]


def smoke(name: str) -> Preset:
    """Return the smoke preset of a family."""
    return find_preset(f"{name}-smoke")


def train_smoke(name: str, out: Path, *options: str) -> int:
    """Train a family's smoke preset by the command line; return the exit code."""
    return main(["train", f"{name}-smoke", "--cpu", "--quiet", "--out", str(out), *options])


def inputs_of(name: str) -> Any:
    """Return the module with a family's inputs, `predict_inputs` and `python_input`.

    It is `tests/zoo/NAME/inputs.py`, or `contract_inputs.py` beside the presets of a family from
    another package.
    """
    places = [f"tests.zoo.{name}.inputs", f"{_parent(family_of(name).presets)}.contract_inputs"]
    for place in places:
        if _exists(place):
            return import_module(place)
    raise AssertionError(f"the family {name} has no inputs for its contract: write {places[0]}")


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class SmokeRuns:
    """Smoke runs, each trained once when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = cache(self._train)

    def _train(self, name: str) -> Run:
        out = self.folder / name
        assert train_smoke(name, out) == 0
        return Run.open(out)

    def model(self, name: str) -> Any:
        return deq_zoo.load(self.run(name).path)
