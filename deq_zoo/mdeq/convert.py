"""Checkpoints of the authors' MDEQ, in and out: the keys are ours, the wrapping differs.

Their files are a bare state_dict, or a dict with one under ``state_dict``; the keys may start with
``module.``, as data-parallel training leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deq_zoo.convert import bare_state, read_state
from deq_zoo.errors import CheckpointError

BACKBONE = ("downsample.", "stage0.", "full_stage.")  # what segmentation takes from ImageNet
_PREFIX = "module."
_SHOWN = 3  # keys of each kind that an error names


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
        state = bare_state(checkpoint, "the checkpoint")
    else:
        state = read_state(Path(checkpoint))
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
