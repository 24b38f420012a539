"""Checkpoints of the authors' MDEQ, in and out: the keys are ours, the wrapping differs.

Their files are a bare state_dict, or a dict with one under `state_dict`; the keys may start with
`module.`, as data-parallel training leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deq_zoo.convert import bare_state, read_state
from deq_zoo.weights import check_fits

BACKBONE = ("downsample.", "stage0.", "full_stage.")  # what segmentation takes from ImageNet
_PREFIX = "module."
_ADVICE = "Build the model with the checkpoint's sizes, norm_scope and norm_type"


def load_checkpoint(
    model: nn.Module, checkpoint: str | Path | Mapping[str, Any], backbone_only: bool = False
) -> None:
    """Load a checkpoint of the authors into a model; nothing is changed if it does not fit.

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
    check_fits(state, expected, "the checkpoint", _ADVICE)
    model.load_state_dict(state, strict=False)  # only the head is missing


def from_authors(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of `model`, which is not changed."""
    check_fits(state, model.state_dict(), "the checkpoint", _ADVICE)
    return dict(state)


def to_authors(
    state: Mapping[str, Tensor], nested: bool = False, data_parallel: bool = False
) -> dict[str, Any]:
    """Return a state_dict of ours as the authors' programs read it.

    Args:
        state: ours.
        nested: put the state_dict under `state_dict`, as in their ImageNet files.
        data_parallel: let the keys start with `module.`, as there.
    """
    prefix = _PREFIX if data_parallel else ""
    theirs = {prefix + key: value.detach().clone() for key, value in state.items()}
    return {"state_dict": theirs} if nested else theirs


def _backbone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.startswith(BACKBONE)}
