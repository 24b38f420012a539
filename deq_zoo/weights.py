"""Loading weights into a model, and errors for weights that do not fit or are not finite."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from deq_zoo.errors import CheckpointError
from deq_zoo.finite import find_not_finite, not_finite_by_design

_LISTED = 3  # keys of each kind that an error names
_NORM_PARTS = ("_g", "_v", "_orig", "_u")  # what a norm splits a weight into


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a newly built model; raise `CheckpointError` if they are unusable.

    The error says why they do not fit, or names the first tensor that holds NaN or infinity.

    Args:
        model: the model.
        weights: its state_dict.
        source: what the error calls the weights.
    """
    exempt = not_finite_by_design(model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        check_fits(weights, model.state_dict(), source)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source} does not fit the model: {reason}") from None
    name = find_not_finite(model, exempt)
    if name is not None:
        raise CheckpointError(
            f"{name} in {source} holds NaN or infinity: the training that wrote it diverged; use "
            "another checkpoint, or train again with a lower learning rate"
        )


def check_fits(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str, advice: str = ""
) -> None:
    """Raise `CheckpointError` unless names and shapes of weights are those of a model.

    Args:
        weights: the weights.
        expected: the state_dict of the model.
        source: what the error calls the weights.
        advice: a sentence for the end of the error.
    """
    filled = {part for key in weights for part in _filled_by(key, weights, expected)}
    shapes = [
        f"{key} is {tuple(weights[key].shape)}, the model's is {tuple(expected[key].shape)}"
        for key in sorted(weights.keys() & expected.keys())
        if weights[key].shape != expected[key].shape and not key.endswith("_extra_state")
    ]
    problems = [
        *_listed("it lacks ", sorted(expected.keys() - filled)),
        *_listed("it has, and the model lacks, ", sorted(filled - expected.keys())),
        *_listed("", shapes, between="; "),
    ]
    if problems:
        ending = f". {advice}" if advice else ""
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(problems)}{ending}")


def _filled_by(
    key: str, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[str]:
    """Return the model's keys that a weight fills; a norm splits one weight into several."""
    parts = [key + suffix for suffix in _NORM_PARTS if key + suffix in expected]
    plain = key not in expected and not any(part in weights for part in parts)
    return parts if parts and plain else [key]


def _listed(what: str, items: list[str], between: str = ", ") -> list[str]:
    """Return a phrase with the first items; nothing if there are none."""
    if not items:
        return []
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return [f"{what}{between.join(items[:_LISTED])}{more}"]
