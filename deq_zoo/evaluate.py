"""Judging a model, and getting one back from a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from deq_zoo.checkpoint import Checkpoint, random_state, restore_random_state
from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset
from deq_zoo.run import Run, read_preset
from deq_zoo.task import Evaluation, Task
from deq_zoo.weights import load_weights


def evaluate(
    task: Task, model: nn.Module, device: torch.device, thorough: bool = True
) -> Evaluation:
    """The task's own evaluation, without gradients, in evaluation mode.

    Random generators are as before afterwards: evaluating does not change how training goes on.
    """
    training, before = model.training, random_state()
    model.eval()
    try:
        with torch.no_grad():
            return task.evaluate(model, device, thorough)
    finally:
        model.train(training)
        restore_random_state(before)


def load(source: str | Path, best: bool = True, data_dir: str | Path | None = None) -> nn.Module:
    """The trained model of a run folder or checkpoint file, ready for use.

    The preset it was trained with is its attribute `preset`.

    Args:
        source: the folder or file.
        best: the best weights of a run, or the last ones.
        data_dir: where the data is now, for models whose shape depends on it.
    """
    model, _ = open_model(Path(source), best, data_dir)
    return model


def open_model(
    path: Path, best: bool = True, data_dir: str | Path | None = None
) -> tuple[nn.Module, Preset]:
    """A model in evaluation mode and the preset it was trained with."""
    if path.is_dir():
        held = Run.open(path).checkpoint(best)
    elif path.exists():
        held = Checkpoint.load(path)
    else:
        raise ZooError(f"there is no run folder or checkpoint at {path}")
    preset = read_preset(held.config, str(path))
    if data_dir is not None:
        preset = preset.with_data_dir(data_dir)
    with torch.random.fork_rng(devices=[]):
        model = preset.task.build()
    load_weights(model, held.model, str(path))
    model.preset = preset  # type: ignore[assignment]
    return model.eval(), preset
