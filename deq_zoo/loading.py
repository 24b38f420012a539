"""Trained models from run folders and checkpoint files."""

from __future__ import annotations

from pathlib import Path

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.preset import Preset
from deq_zoo.run import Run, read_preset
from deq_zoo.weights import load_weights


def load(source: str | Path, best: bool = True, data_dir: str | Path | None = None) -> Model:
    """Return the trained model of a run folder or checkpoint file, in evaluation mode.

    Args:
        source: the folder or file.
        best: take the best weights of a run, not the last ones.
        data_dir: where the data is now, for old checkpoints of models whose shape depends on it.
    """
    model, _ = open_model(Path(source), best, data_dir)
    return model


def open_model(
    path: Path, best: bool = True, data_dir: str | Path | None = None
) -> tuple[Model, Preset]:
    """Return a model in evaluation mode and the preset it was trained with."""
    if path.is_dir():
        checkpoint = Run.open(path).checkpoint(best)
    elif path.exists():
        checkpoint = Checkpoint.load(path)
    else:
        raise ZooError(f"there is no run folder or checkpoint at {path}")
    preset = read_preset(checkpoint.config, str(path))
    if data_dir is not None:
        preset = preset.with_data_dir(data_dir)
    with torch.random.fork_rng(devices=[]):
        model = preset.task.build(checkpoint.facts)
    load_weights(model, checkpoint.model, str(path))
    facts = checkpoint.facts
    model.facts = preset.task.available_facts() if facts is None else facts
    model.preset = preset
    return model.eval(), preset


def open_preset(path: Path) -> tuple[str, Preset]:
    """Return the name and the preset of a run folder or checkpoint file."""
    if path.is_dir():
        run = Run.open(path)
        return run.name, run.preset()
    if not path.exists():
        raise ZooError(f"there is no run folder or checkpoint at {path}")
    config = Checkpoint.load(path).config
    return str(config.get("name")), read_preset(config, str(path))
