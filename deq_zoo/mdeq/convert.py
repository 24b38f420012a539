"""Checkpoints of the authors' MDEQ, in and out: the keys are ours, the wrapping differs.

Their files are a bare state_dict, or a dict with one under `state_dict`; the keys may start with
`module.`, as data-parallel training leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deq_zoo.convert import bare_state, read_state
from deq_zoo.weights import check_fits

BACKBONE = ("downsample.", "stage0.", "full_stage.")  # what segmentation takes from ImageNet
_PREFIX = "module."


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
    advice = "Build the model with the checkpoint's sizes, norm_scope and norm_type"
    check_fits(state, expected, "the checkpoint", advice)
    model.load_state_dict(state, strict=False)  # only the head is missing


def authors_checkpoint(
    model: nn.Module, nested: bool = False, data_parallel: bool = False
) -> dict[str, Any]:
    """A model as the authors' programs read it.

    Args:
        model: an MDEQ classifier.
        nested: put the state_dict under `state_dict`, as in their ImageNet files.
        data_parallel: let the keys start with `module.`, as there.
    """
    prefix = _PREFIX if data_parallel else ""
    state = {prefix + key: value.detach().clone() for key, value in model.state_dict().items()}
    return {"state_dict": state} if nested else state


def write_checkpoint(
    model: nn.Module, path: str | Path, nested: bool = False, data_parallel: bool = False
) -> None:
    """Write `authors_checkpoint` to a file: `.safetensors`, or torch's format."""
    checkpoint = authors_checkpoint(model, nested, data_parallel)
    if Path(path).suffix != ".safetensors":
        torch.save(checkpoint, path)
    elif nested:
        raise ValueError("safetensors hold a bare state_dict: leave nested out, or write a .pth")
    else:
        save_file({key: value.contiguous() for key, value in checkpoint.items()}, path)


def _backbone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith(BACKBONE)}
