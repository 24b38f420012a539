"""Checkpoints of the authors' MDEQ, in and out: the keys are ours, the wrapping differs.

Their files are a bare state_dict, or a dict with one under ``state_dict``; the keys may start with
``module.``, as data-parallel training leaves them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deq_zoo.errors import CheckpointError

BACKBONE = ("downsample.", "stage0.", "full_stage.")  # what segmentation takes from ImageNet
_PREFIX = "module."
_SHOWN = 3  # keys of each kind that an error names


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The state_dict in a file of the authors: ``.safetensors``, or torch's format.

    Only tensors and plain containers are read; a file that needs more is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"cannot read {path} as tensors: {error}") from error
    return state_dict_of(found)


def state_dict_of(checkpoint: Any) -> dict[str, Tensor]:
    """The bare state_dict in what a file holds."""
    state = checkpoint
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            f"a checkpoint is a dict of tensors, or has one as 'state_dict': got "
            f"{sorted(checkpoint) if isinstance(checkpoint, Mapping) else type(checkpoint)}"
        )
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{key!r} of the state_dict is no tensor: {type(value).__name__}")
    return {key.removeprefix(_PREFIX): value for key, value in state.items()}


def load_checkpoint(
    model: nn.Module, checkpoint: str | Path | Mapping[str, Any], backbone_only: bool = False
) -> None:
    """Put a checkpoint of the authors into a model; nothing is changed if it does not fit.

    Args:
        model: an MDEQ, classifier or segmenter of the checkpoint's sizes.
        checkpoint: a file, or what one holds.
        backbone_only: take stem, stage0 and f, and leave the model's head as it is.
    """
    if isinstance(checkpoint, Mapping):
        state = state_dict_of(checkpoint)
    else:
        state = read_checkpoint(checkpoint)
    expected = model.state_dict()
    if backbone_only:
        state, expected = _backbone(state), _backbone(expected)
    _check_fits(state, expected)
    model.load_state_dict(state, strict=False)  # only the head is missing


def authors_checkpoint(
    model: nn.Module, nested: bool = False, data_parallel: bool = False
) -> dict[str, Any]:
    """A model as the authors' programs read it.

    Args:
        model: an MDEQ classifier.
        nested: put the state_dict under ``state_dict``, as in their ImageNet files.
        data_parallel: let the keys start with ``module.``, as there.
    """
    prefix = _PREFIX if data_parallel else ""
    state = {prefix + key: value.detach().clone() for key, value in model.state_dict().items()}
    return {"state_dict": state} if nested else state


def write_checkpoint(
    model: nn.Module, path: str | Path, nested: bool = False, data_parallel: bool = False
) -> None:
    """Write :func:`authors_checkpoint` to a file: ``.safetensors``, or torch's format."""
    checkpoint = authors_checkpoint(model, nested, data_parallel)
    if Path(path).suffix != ".safetensors":
        torch.save(checkpoint, path)
    elif nested:
        raise ValueError("safetensors hold a bare state_dict: leave nested out, or write a .pth")
    else:
        save_file({key: value.contiguous() for key, value in checkpoint.items()}, path)


def _backbone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith(BACKBONE)}


def _check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless every tensor has its place and its shape."""
    given = {part for key in state for part in _parts(key, expected)}
    problems = [
        *_named("lacks", expected.keys() - given),
        *_named("has, and the model has not,", given - expected.keys()),
        *_named(
            "differs in the shape of",
            {
                f"{key} {tuple(state[key].shape)} (the model's: {tuple(expected[key].shape)})"
                for key in state.keys() & expected.keys()
                if state[key].shape != expected[key].shape
            },
        ),
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit this model: it {'; it '.join(problems)}. "
            "Build the model with the checkpoint's sizes, norm_scope and norm_type"
        )


def _parts(key: str, expected: Mapping[str, Tensor]) -> list[str]:
    """The keys that a tensor fills: a plain weight fills both parts of a normalised one."""
    parts = [f"{key}_g", f"{key}_v"]
    return parts if key not in expected and expected.keys() >= set(parts) else [key]


def _named(what: str, keys: set[str]) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"{what} {', '.join(sorted(keys)[:_SHOWN])}{more}"]
