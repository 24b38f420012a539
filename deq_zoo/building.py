"""Building the model of a preset, with errors that users can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import set_seed

from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.precision import in_precision
from deq_zoo.preset import Preset


def try_to_build(preset: Preset, facts: Mapping[str, Any] | None = None) -> Model:
    """Return a new model of a preset; raise `ZooError` if its settings do not fit together.

    Global random generators are left as they were.

    Args:
        preset: the preset.
        facts: those of a checkpoint, see `Task.build`.
    """
    with torch.random.fork_rng(devices=[]):
        return _build(preset, facts)


def build_for_training(preset: Preset) -> Model:
    """Return the model of a preset, drawn from its seed, with the facts of its data.

    Global random generators are left as initialisation leaves them; errors as in `try_to_build`.
    """
    set_seed(preset.seed)
    model = _build(preset, None)
    model.facts, model.preset = preset.task.facts(), preset
    return model


def _build(preset: Preset, facts: Mapping[str, Any] | None) -> Model:
    with refusing_settings():
        model = in_precision(preset.task.build(facts), preset.precision)
        preset.optim.make_for(model)  # checks the options
    return model


@contextmanager
def refusing_settings() -> Iterator[None]:
    """Raise `ZooError` for settings that do not fit together, whatever error shows it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ZooError(f"this preset cannot be built: {error}") from None
