"""Suggestions for misspelt names; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAREST = 3  # names that a suggestion has at most
_LEAST = 0.6  # similarity of a name that is suggested, from 0 to 1
_SPREAD = 0.05  # how much less similar than the best a suggestion may be
_FEW = 12  # names of which an error lists all


def suggest(name: str, names: Iterable[str], all_names: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest names, or all if they are few.

    Args:
        name: the unknown name.
        names: the names that exist.
        all_names: where users read all names, e.g. "deq-zoo list shows all".
    """
    names = sorted(set(names))
    if hint := did_you_mean(name, names):
        return hint
    if names and len(names) <= _FEW:
        return f"; known: {', '.join(names)}"
    return f"; {all_names}" if all_names else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the names nearest to an unknown one, or "" if none is near."""
    near = {each: SequenceMatcher(None, each.lower(), name.lower()).ratio() for each in set(names)}
    limit = max(_LEAST, max(near.values(), default=0.0) - _SPREAD)
    best = sorted((each for each in near if near[each] >= limit), key=lambda n: (-near[n], n))
    return f"; did you mean {' or '.join(map(repr, best[:_NEAREST]))}?" if best else ""
