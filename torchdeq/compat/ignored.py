"""Names that torchdeq 0.1.0 accepted and ignored: accepted with a note; a misspelling is an error.

Functions of 0.1.0 ended in `**kwargs` and dropped what they did not know, so published programs
pass the options of one solver whatever the solver is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchdeq.notes import note
from torchdeq.registry import suggest

#: Options of the solvers of 0.1.0, and `beta`, which Anderson's damping was called before it.
SOLVER_OPTIONS = frozenset({"m", "lam", "tau", "beta", "LBFGS_thres", "ls"})
#: Keywords that published programs pass to a DEQ.
CALL_KEYWORDS = frozenset({"writer", "best"})


def without_ignored(
    options: Mapping[str, Any], known: Iterable[str], solver: str
) -> dict[str, Any]:
    """Return `options` without those of other solvers of 0.1.0; a note names each of them.

    Args:
        options: what a program passes to a solver. Any other unknown name stays: building the
            solver refuses it.
        known: the options that the solver has.
        solver: its name.
    """
    known = set(known)
    kept = {}
    for name, value in options.items():
        if name in known or name not in SOLVER_OPTIONS:
            kept[name] = value
        else:
            note(f"the solver {solver!r} has no option {name!r}: it is ignored, as in 0.1.0")
    return kept


def ignore_keywords(
    given: Iterable[str], what: str, ignored: Collection[str], known: Iterable[str]
) -> None:
    """Note the keywords that 0.1.0 ignored; raise `TypeError` for any other.

    Args:
        given: the names of keywords that the function does not know.
        what: how messages call the function.
        ignored: the names that are accepted.
        known: the keywords that it knows, for the suggestion.
    """
    for name in given:
        if name not in ignored:
            raise TypeError(f"{what} takes no keyword {name!r}{suggest(name, known)}")
        note(f"the keyword {name!r} of {what} has no effect, as in 0.1.0")
