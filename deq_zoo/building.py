"""Building the model of a preset, with errors that users can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.preset import Preset


def try_to_build(preset: Preset, facts: Mapping[str, Any] | None = None) -> Model:
    """Return a new model of a preset; raise `ZooError` if its settings do not fit together.

    Global random generators are left as they were.

    Args:
        preset: the preset.
        facts: those of a checkpoint, see `Task.build`.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = preset.task.build(facts)
            preset.optim.make(p for p in model.parameters() if p.requires_grad)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ZooError(f"this preset cannot be built: {error}") from None
    return model
