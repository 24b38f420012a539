"""Checkpoints of the authors' HRM, TRM and EqR, in and out.

Their keys start with `model.inner.`, those of a compiled module with `_orig_mod.` somewhere. HRM
saves its weights, TRM the average of its weights, EqR both: `model`, and `ema` with a `shadow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.reason.model import Reasoner
from deq_zoo.weights import check_fits

_PREFIX = "model.inner."
_TABLE = "puzzle_emb.weights"
_STARTS = ("H_init", "L_init")
_ADVICE = "Build the model with the checkpoint's kind, mixer, position, slots and sizes"


def from_authors(model: Reasoner, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of `model`, which is not changed.

    The weights become those in training and their average.
    """
    bare = {_bare(key): value for key, value in state.items()}
    expected = to_authors(model.state_dict(), averaged=False)
    check_fits(bare, {_bare(key): t for key, t in expected.items()}, "the checkpoint", _ADVICE)
    ours = {}
    for key, value in bare.items():
        if key in (_TABLE, *_STARTS):
            ours["puzzle_rows" if key == _TABLE else key] = value
            continue
        ours[f"core.{key}"] = value
        if model.average is not None:
            ours[f"average.{key}"] = value
    return ours


def to_authors(state: Mapping[str, Tensor], averaged: bool = True) -> dict[str, Tensor]:
    """Return a state_dict of ours as the authors' programs read it.

    Args:
        state: ours.
        averaged: return the average of the weights, if there is one.
    """
    if any(".conv." in key for key in state):
        raise CheckpointError(
            "the authors' programs have no networks with a convolution (mixer=conv): their weights "
            "can be neither read nor written"
        )
    has_average = any(key.startswith("average.") for key in state)
    part = "average." if averaged and has_average else "core."
    theirs = {}
    for key, value in state.items():
        if key.startswith(part):
            theirs[_PREFIX + key.removeprefix(part)] = value.detach().clone()
        elif key == "puzzle_rows" or key in _STARTS:
            name = _TABLE if key == "puzzle_rows" else key
            theirs[_PREFIX + name] = value.detach().clone()
    return theirs


def pick_state(content: Any) -> dict[str, Tensor] | None:
    """Return the averaged weights in a checkpoint of EqR, with the buffers of its model.

    None for files of another form.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        return None
    shadow = content.get("ema")
    if isinstance(shadow, Mapping):
        shadow = shadow.get("shadow", shadow)
    if not isinstance(shadow, Mapping):
        return None
    weights = {_bare(key): value for key, value in content["model"].items()}
    average = {_bare(key): value for key, value in shadow.items() if isinstance(value, Tensor)}
    unknown = sorted(average.keys() - weights.keys())
    if unknown:
        raise CheckpointError(f"the average has {unknown[0]!r}, and the model has no such weight")
    missing = sorted(weights.keys() - average.keys() - {_TABLE, *_STARTS})
    if missing:
        raise CheckpointError(
            f"the average lacks {missing[0]!r}: it should have every trained weight of the model"
        )
    return {_PREFIX + key: value for key, value in (weights | average).items()}


def _bare(key: str) -> str:
    """Return a key of the authors without the wrappers around the networks."""
    segments = [part for part in key.split(".") if part not in ("_orig_mod", "module")]
    return ".".join(segments).removeprefix(_PREFIX)
