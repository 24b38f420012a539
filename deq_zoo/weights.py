"""Whether weights fit a model, and loading those that do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from deq_zoo.errors import CheckpointError

_LISTED = 3  # keys of each kind that an error names
_NORM_PARTS = ("_g", "_v", "_orig", "_u")  # what a norm splits a weight into


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a model, or raise `CheckpointError` saying why they do not fit.

    Args:
        model: the model.
        weights: its state_dict.
        source: what the error calls the weights.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        check_fits(weights, model.state_dict(), source)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source} does not fit the model: {reason}") from None


def check_fits(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str, advice: str = ""
) -> None:
    """Raise `CheckpointError` unless every weight has its place in a model, and its shape.

    Args:
        weights: the weights.
        expected: the model's own, by the same names.
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
    """Return the model's keys that a weight fills: a plain one fills all parts of a normalised."""
    parts = [key + suffix for suffix in _NORM_PARTS if key + suffix in expected]
    plain = key not in expected and not any(part in weights for part in parts)
    return parts if parts and plain else [key]


def _listed(what: str, items: list[str], between: str = ", ") -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return [f"{what}{between.join(items[:_LISTED])}{more}"]
