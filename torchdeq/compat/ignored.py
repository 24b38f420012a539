"""Names that torchdeq 0.1.0 accepted and ignored: accepted with a note; a misspelling is an error.

Functions of 0.1.0 had `**kwargs` and ignored unknown keywords, so published programs pass options
of one solver to every solver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchdeq.notes import note
from torchdeq.registry import suggest

#: Options of the solvers of 0.1.0, and `beta`, an earlier name of Anderson's damping.
SOLVER_OPTIONS = frozenset({"m", "lam", "tau", "beta", "LBFGS_thres", "ls"})
#: Keywords that published programs pass to a DEQ.
CALL_KEYWORDS = frozenset({"writer", "best"})


def without_ignored(
    options: Mapping[str, Any], names: Iterable[str], solver: str
) -> dict[str, Any]:
    """Return `options` without those of other solvers of 0.1.0; a note names each of them.

    Args:
        options: the options that a program passes to a solver. Any other unknown name stays:
            building the solver raises an error for it.
        names: the names of the options that the solver has.
        solver: the name of the solver.
    """
    names = set(names)
    kept = {}
    for name, value in options.items():
        if name in names or name not in SOLVER_OPTIONS:
            kept[name] = value
        else:
            note(f"the solver {solver!r} has no option {name!r}: it is ignored, as in 0.1.0")
    return kept


def ignore_keywords(
    keywords: Iterable[str], what: str, ignored: Collection[str], parameters: Iterable[str]
) -> None:
    """Log a note for each keyword that 0.1.0 ignored; raise `TypeError` for any other keyword.

    Args:
        keywords: keywords of a call that are not parameters of the function.
        what: the name of the function in messages.
        ignored: the keywords that 0.1.0 ignored.
        parameters: the parameters of the function, for the suggestion.
    """
    for name in keywords:
        if name not in ignored:
            raise TypeError(f"{what} takes no keyword {name!r}{suggest(name, parameters)}")
        note(f"the keyword {name!r} of {what} has no effect, as in 0.1.0")
