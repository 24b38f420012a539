"""Where the weights of a model come from, and which results are theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError
from deq_zoo.model import Model
from deq_zoo.model_card import family_of, without_data_dir
from deq_zoo.preset import PRESETS, Preset
from deq_zoo.pretrained import FOLDER, pretrained_card
from deq_zoo.run import Run, read_preset

_log = logging.getLogger("deq_zoo")


class Origin(NamedTuple):
    """Where the weights of a model come from.

    Args:
        name: of the preset.
        step: updates behind the weights; 0 if they are unknown.
        results: the line of the log with the results of these weights on test data, if known.
    """

    name: str
    step: int = 0
    results: dict[str, Any] | None = None


def find_origin(model: Model, preset: Preset) -> Origin:
    """Return where the weights of a model come from, with results only if these are theirs.

    A model may have changed since it was loaded: results count if the file that it came from still
    has its weights and settings.

    Args:
        model: the model.
        preset: its preset, without a folder of data.
    """
    if model.origin is None:
        return Origin(_name_of(preset))
    try:
        checkpoint = Checkpoint.load(model.origin)
    except CheckpointError as error:
        _log.warning("the saved model has no results: %s", error)
        return Origin(_name_of(preset))
    name = str(checkpoint.config.get("name"))
    former = without_data_dir(read_preset(checkpoint.config, str(model.origin)))
    if former != preset or not _same_weights(checkpoint.model, model.state_dict()):
        _log.warning(
            "the saved model has no results: its weights or settings have changed since it was "
            "loaded from %s",
            model.origin,
        )
        return Origin(name if former == preset else _name_of(preset, name))
    return Origin(name, checkpoint.step, _results(model.origin, checkpoint))


def _results(file: Path, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the results on test data of a checkpoint, from itself or from the log of its run."""
    if "results" in checkpoint.notes:
        return dict(checkpoint.notes["results"])
    if file.parent == FOLDER:
        return {"metrics": dict(pretrained_card(file.stem).scores["test"]), "solver": {}}
    run = Run(file.parent)
    if file not in (run.best, run.last):
        return None
    lines = [line for line in run.lines("test") if line["step"] == checkpoint.step]
    if not lines:
        return None
    kept = ("nfe", "residual", "spectral_radius", "statuses")
    solver = {key: lines[-1]["solver"][key] for key in kept if key in lines[-1]["solver"]}
    return {"metrics": lines[-1]["metrics"], "solver": solver}


def _name_of(preset: Preset, otherwise: str = "") -> str:
    """Return the name of a preset.

    Args:
        preset: the preset.
        otherwise: the name if none is registered for it; "" takes that of its family.
    """
    for name, make in PRESETS.items():
        if make() == preset:
            return name
    family = family_of(preset.task)
    kind = type(preset.task).__name__.lower() if family is None else family.name
    return otherwise or kind


def _same_weights(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two state_dicts have equal tensors; NaN equals itself."""

    def same(x: Any, y: Any) -> bool:
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return bool(x == y)
        y = y.detach().cpu()
        if x.is_floating_point() and y.is_floating_point():
            x = x.to(y.dtype)  # pretrained weights are stored in half precision
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)

    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
