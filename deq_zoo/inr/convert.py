"""Weights of the authors' DEQ-INR, in and out.

The names of the weights are ours. The authors' state_dicts have one more constant, `f.z_init`, from
which their first filter is computed: zeros for siren_like, ones for fourier and gabor. Newer weight
norms call g and v `original0` and `original1`.

Videos and sounds are files with one state_dict. Images are files `*_summary.pth` with many models,
each fitted to many images; see `pick_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.inr.layers import Filter
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.weights import check_fits

_CONSTANT = "f.z_init"
_NEWER = {
    ".parametrizations.weight.original0": ".weight_g",
    ".parametrizations.weight.original1": ".weight_v",
}


def from_authors(field: Field, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of `field`, which is not changed."""
    weights = {_rename(key): value.detach().clone() for key, value in state.items()}
    constant = weights.pop(_CONSTANT, None)
    filter = getattr(getattr(field, "config", None), "filter", None)
    if constant is not None and not bool((constant == (filter != "siren_like")).all()):
        raise CheckpointError(
            f"{_CONSTANT} of these weights does not belong to the filter {filter!r}: it is zero "
            "for siren_like and one for fourier and gabor; build the field with the filter of the "
            "weights"
        )
    advice = "Build the field with the authors' filter, width, layers, coordinates and channels"
    check_fits(weights, field.state_dict(), "the state_dict", advice)
    return weights


def to_authors(state: Mapping[str, Tensor], filter: Filter) -> dict[str, Tensor]:
    """Return the weights of a field as the authors' programs read them.

    Args:
        state: the state_dict of a field.
        filter: of the field.
    """
    weights = {key: value.detach().clone() for key, value in state.items()}
    if any(key.startswith("f.") for key in weights):
        decoder = weights["output_map.weight"]  # (o, width)
        constant = float(filter != "siren_like")
        weights[_CONSTANT] = decoder.new_full((1, decoder.shape[1]), constant)
    return weights


def pick_state(content: Any, net: FieldConfig, index: int) -> Mapping[str, Tensor] | None:
    """Return the state_dict of one field in the content of a summary file; None for other files.

    A summary is `{name: {"config": {...}, "state_dicts": [...], ...}}`: models of several filters
    and sizes, with and without equilibrium, each with a state_dict for every image.

    Args:
        content: of a file of the authors.
        net: the field that is looked for.
        index: the number of the image.
    """
    if not _is_summary(content):
        return None
    wanted = {
        "filter_type": net.filter,
        "interm_channels": net.width,
        "n_layers": net.layers,
        "one_pass": net.kind == "one_pass",
    }
    for entry in content.values():
        if all(entry["config"].get(key) == value for key, value in wanted.items()):
            states = entry["state_dicts"]
            if index >= len(states):
                raise CheckpointError(
                    f"the summary has {len(states)} images of this model, numbered from 0: got "
                    f"index={index}"
                )
            state: Mapping[str, Tensor] = states[index]
            return state
    raise CheckpointError(
        f"the summary has the models {', '.join(content)}, and none of filter {net.filter}, "
        f"{net.layers} layers and width {net.width}: choose one with --set filter=, layers= and "
        "width=, and net.kind=one_pass for one without DEQ in its name"
    )


def _is_summary(content: Any) -> bool:
    if not isinstance(content, Mapping) or not content:
        return False
    parts = {"config", "state_dicts"}
    return all(isinstance(entry, Mapping) and parts <= entry.keys() for entry in content.values())


def _rename(key: str) -> str:
    for newer, name in _NEWER.items():
        key = key.replace(newer, name)
    return key
