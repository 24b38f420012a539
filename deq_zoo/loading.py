"""Trained models from run folders, saved models, checkpoint files and the package."""

from __future__ import annotations

from pathlib import Path

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.precision import in_precision
from deq_zoo.preset import Preset
from deq_zoo.pretrained import as_source, find_weights, is_pretrained
from deq_zoo.run import Run, read_preset
from deq_zoo.saved_model import WEIGHTS, is_saved_model, read_saved_model
from deq_zoo.weights import load_weights


def load(source: str | Path, best: bool = True, data_dir: str | Path | None = None) -> Model:
    """Return a trained model in evaluation mode.

    Args:
        source: a run folder, a folder that `save_pretrained` wrote, a checkpoint file, or the name
            of a pretrained model, e.g. `mdeq-digits`; a folder or file of that name wins.
        best: take the best weights of a run, not the last ones.
        data_dir: where the data is now, for old checkpoints of models whose shape depends on it.
    """
    path = as_source(source)
    check_last(path, not best, "best=False")
    model, _ = open_model(path, best, data_dir)
    return model


def open_model(
    source: str | Path, best: bool = True, data_dir: str | Path | None = None
) -> tuple[Model, Preset]:
    """Return a model in evaluation mode and the preset it was trained with; see `load`."""
    path = find_weights(as_source(source))
    file, checkpoint = _read(path, best)
    preset = read_preset(checkpoint.config, str(path))
    if data_dir is not None:
        preset = preset.with_data_dir(data_dir)
    with torch.random.fork_rng(devices=[]):
        model = in_precision(preset.task.build(checkpoint.facts), preset.precision)
    load_weights(model, checkpoint.model, str(path))
    facts = checkpoint.facts
    model.facts = preset.task.available_facts() if facts is None else facts
    model.preset, model.origin = preset, file.absolute()
    return model.eval(), preset


def open_preset(source: str | Path) -> tuple[str, Preset]:
    """Return the name of a preset and the preset that a model was trained with; see `load`."""
    path = find_weights(as_source(source))
    if path.is_dir() and not is_saved_model(path):
        run = Run.open(path)
        return run.name, run.preset()
    config = _read(path, best=True)[1].config
    return str(config.get("name")), read_preset(config, str(path))


def check_last(path: Path, last: bool, option: str = "--last") -> None:
    """Raise `ZooError` if the last weights are asked for, but one checkpoint leaves no choice.

    Args:
        path: of the model, or the name of a pretrained one.
        last: whether the last weights are asked for.
        option: how, for the error.
    """
    kinds = {
        "a pretrained model": is_pretrained(path),
        "a file": path.is_file(),
        "a saved model": is_saved_model(path),
    }
    what = next((kind for kind, true in kinds.items() if true), None)
    if last and what is not None:
        raise ZooError(f"{option} chooses a checkpoint of a run folder, and {path} is {what}")


def _read(path: Path, best: bool) -> tuple[Path, Checkpoint]:
    """Return the file of weights at a path that exists, and its checkpoint."""
    if is_saved_model(path):
        return path / WEIGHTS, read_saved_model(path)
    if path.is_dir():
        run = Run.open(path)
        return run.weights(best), run.checkpoint(best)
    return path, Checkpoint.load(path)
