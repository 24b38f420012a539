"""Weights of the authors' attractors, in and out.

Their names differ, the unembedding is there twice, the rotary table is a saved buffer, and their
wrappers put prefixes before every name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.lm.attractor.layers import rotary_table
from deq_zoo.lm.config import LMConfig

_PREFIXES = ("module.", "_orig_mod.", "model.", "_forward_module.")
_NAMES = {  # theirs: ours
    r"transformer\.wte\.weight": r"vocabulary.weight",
    r"transformer\.prelude\.(.*)": r"prelude.\1",
    r"transformer\.core_block\.(.*)": r"core.\1",
    r"transformer\.ln_f\.weight": r"output_norm.weight",
}
_HEAD, _TABLE, _ROTARY = "lm_head.weight", "transformer.wte.weight", "freqs_cis"


def from_authors(config: LMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of ours, without the words of the vocabulary.

    Args:
        config: the shape of the model.
        state: of their `Attractor`.
    """
    _check_vocabulary(config)
    weights: dict[str, Tensor] = {}
    theirs = {_without_prefixes(key): value for key, value in state.items()}
    if len(theirs) < len(state):
        raise CheckpointError("two weights have the same name without their prefixes")
    for key, value in theirs.items():
        if key == _HEAD:
            if _TABLE not in theirs or not torch.equal(theirs[_TABLE], value):
                raise CheckpointError(f"{key} should equal {_TABLE}: the model shares them")
        elif key == _ROTARY:
            _check_rotary(config, value)
        else:
            weights[_rename(key)] = value.detach().clone()
    return weights


def to_authors(config: LMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of ours as the authors' programs read it, with a rotary table of 2048.

    Args:
        config: the shape of the model.
        state: ours; the words of the vocabulary have no place in theirs.
    """
    _check_vocabulary(config)
    theirs: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith("_extra_state"):
            continue
        name = {"vocabulary.weight": _TABLE, "output_norm.weight": "transformer.ln_f.weight"}.get(
            key, f"transformer.{re.sub('^core', 'core_block', key)}"
        )
        theirs[name] = value.detach().clone()
    theirs[_HEAD] = theirs[_TABLE].clone()
    theirs[_ROTARY] = _rotary(config, 2048).to(theirs[_TABLE])
    return theirs


def _check_vocabulary(config: LMConfig) -> None:
    """Raise `CheckpointError` for models that the authors' programs cannot have."""
    if config.cutoffs or config.shrink > 1 or (config.embed and config.embed != config.width):
        raise CheckpointError(
            "the authors' attractors have one table of tokens, without clusters or projections: "
            "set cutoffs=(), shrink=1 and embed=0"
        )
    if config.input_rms:
        raise CheckpointError(
            "the authors' attractors take embeddings without a factor, and this model has "
            f"input_rms={config.input_rms}: set input_rms=0"
        )


def _without_prefixes(key: str) -> str:
    while True:
        for prefix in _PREFIXES:
            if key.startswith(prefix):
                key = key.removeprefix(prefix)
                break
        else:
            return key


def _rename(key: str) -> str:
    for pattern, name in _NAMES.items():
        match = re.fullmatch(pattern, key)
        if match:
            return match.expand(name)
    raise CheckpointError(f"{key} is no weight of an attractor of the authors")


def _rotary(config: LMConfig, length: int) -> Tensor:
    """Return the authors' table (1, length, 1, e / 2, 2) of cosines and sines."""
    positions = torch.arange(length, dtype=torch.float64)
    width = config.width // config.heads
    cos, sin = rotary_table(positions, width, config.rotary_base, like=positions)
    return torch.stack((cos[:, 1::2], sin[:, 1::2]), dim=2)[None, :, None]


def _check_rotary(config: LMConfig, table: Tensor) -> None:
    """Raise `CheckpointError` if a saved table is not that of the model's settings."""
    own = _rotary(config, table.shape[1] if table.dim() > 1 else 0)
    # Theirs is computed in single precision, and angles grow with the position.
    if table.shape != own.shape or bool(((table.double().cpu() - own).abs() > 1e-2).any()):
        raise CheckpointError(
            f"{_ROTARY} of shape {tuple(table.shape)} is not the rotary table of {config.heads} "
            f"heads of width {config.width // config.heads} with the base {config.rotary_base}: "
            "set heads and rotary_base"
        )
