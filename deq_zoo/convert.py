"""Weights released by the authors of the models, as checkpoints of ours."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError
from deq_zoo.preset import Preset
from deq_zoo.values import to_data
from deq_zoo.weights import load_weights


def convert_file(source: Path, preset: Preset, name: str, out: Path) -> int:
    """Convert a file for a preset; returns how many tensors it holds."""
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{source} would be overwritten: choose another --out")
    weights, facts = preset.task.from_authors(read_state(source))
    model = preset.task.build(facts)
    load_weights(model, weights, str(source))
    config = {"name": name, "preset": to_data(preset)}
    Checkpoint(0, model.state_dict(), config=config, facts=facts).save(out)
    return len(weights)


def read_state(source: Path) -> dict[str, Tensor]:
    """The state_dict in a `.safetensors` or `.pth` file; nothing but tensors is unpickled."""
    if not source.exists():
        raise CheckpointError(f"there is no file {source}")
    try:
        held: Any = load_file(source) if source.suffix == ".safetensors" else _unpickle(source)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{source} cannot be read as weights: {reason} (only tensors are read, nothing is run)"
        ) from None
    return bare_state(held, str(source))


def bare_state(held: Any, source: str) -> dict[str, Tensor]:
    """The state_dict in what a file holds: itself, or under a usual key; no `module.` prefix."""
    state = held
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"{source} should be a dict of tensors, or have one as 'state_dict': got "
            f"{sorted(map(str, held)) if isinstance(held, Mapping) else type(held).__name__}"
        )
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{key!r} in {source} is no tensor: {type(value).__name__}")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _unpickle(source: Path) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)
