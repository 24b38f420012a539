"""Weights released by the authors of the models, as checkpoints of ours."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError
from deq_zoo.evaluate import load_weights
from deq_zoo.preset import Preset
from deq_zoo.values import to_data


def convert_file(source: Path, preset: Preset, name: str, out: Path) -> int:
    """Convert a file for a preset; returns how many tensors it holds."""
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{source} would be overwritten: choose another --out")
    state = preset.task.convert(read_state(source))
    model = preset.task.build()
    load_weights(model, state, str(source))
    Checkpoint(0, model.state_dict(), config={"name": name, "preset": to_data(preset)}).save(out)
    return len(state)


def read_state(source: Path) -> dict[str, Tensor]:
    """The state_dict in a ``.safetensors`` or ``.pth`` file; nothing but tensors is unpickled."""
    if not source.exists():
        raise CheckpointError(f"there is no file {source}")
    try:
        held: Any = load_file(source) if source.suffix == ".safetensors" else _unpickle(source)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{source} cannot be read as weights: {error}") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    tensors = {k: v for k, v in held.items() if isinstance(v, Tensor)} if held else {}
    if not tensors:
        raise CheckpointError(f"{source} holds no tensors by name")
    return {key.removeprefix("module."): value for key, value in tensors.items()}


def _unpickle(source: Path) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)
