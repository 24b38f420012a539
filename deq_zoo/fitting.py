"""Training a model in memory, without a run folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from deq_zoo.batches import open_batches
from deq_zoo.building import build_for_training
from deq_zoo.finite import check_loss, diverged, find_not_finite, not_finite_by_design
from deq_zoo.model import Model
from deq_zoo.precision import in_precision
from deq_zoo.preset import Preset
from deq_zoo.python_errors import naming_arguments
from deq_zoo.randomness import unchanged_randomness
from deq_zoo.task import WHOLE
from deq_zoo.update import Learner, OneDevice, check_seconds


@naming_arguments()
def fit(
    preset: Preset,
    *,
    model: Model | None = None,
    device: torch.device | str = "cpu",
    max_seconds: float | None = None,
    progress: Callable[[int, float], object] | None = None,
) -> Model:
    """Train a model in memory, without a run folder; return it in evaluation mode.

    Nothing is evaluated: the model has the weights of the last step. The global random generators
    are as before afterwards.

    Args:
        preset: task, optimiser and length.
        model: the model to train; by default a new one, drawn from the preset's seed.
        device: to train on.
        max_seconds: stop after so long.
        progress: called with the step and its loss after every step.
    """
    if not isinstance(preset, Preset):
        raise TypeError(
            f"fit takes a preset, e.g. of deq_zoo.preset.find_preset, got {type(preset).__name__}"
        )
    check_seconds(max_seconds)
    with unchanged_randomness():
        if model is None:
            model = build_for_training(preset)
            preset.task.begin(model)
        else:
            model.facts, model.preset = preset.task.facts(), preset
        torch.manual_seed(preset.seed)
        _fit(
            preset,
            in_precision(model.to(device), preset.precision),
            OneDevice(device, preset.precision),
            max_seconds,
            progress,
        )
    return model.eval()


def _fit(
    preset: Preset,
    model: Model,
    devices: OneDevice,
    max_seconds: float | None,
    progress: Callable[[int, float], object] | None,
) -> None:
    """Update a model in memory until its steps are done or the time is up."""
    exempt = not_finite_by_design(model)
    optimizer = devices.prepare(preset.optim.make_for(model))
    learner = Learner(preset, model, optimizer, devices, preset.total_steps)
    losses: deque[Tensor] = deque(maxlen=preset.accumulate)  # of the latest update
    began = time.monotonic()

    def after_update(rate: float) -> bool:
        late = max_seconds is not None and time.monotonic() - began > max_seconds
        ended = late or learner.step == learner.steps
        if progress is not None or ended or learner.step % preset.log_every == 0:
            loss = float(torch.stack(list(losses)).mean())
            check_loss(loss, learner.step)
            if progress is not None:
                progress(learner.step, loss)
        return ended

    with open_batches(preset, 0, WHOLE, pin_memory=devices.device.type != "cpu") as batches:
        learner.loop(batches, lambda loss, _: losses.append(loss.value.detach()), after_update)
    name = find_not_finite(model, exempt)
    if name is not None:
        raise diverged(f"{name} holds NaN or infinity", learner.step)
