"""Former names of options, and options of 0.1.0 without effect."""

from __future__ import annotations

OLD_NAMES = {"n_losses": "n_states"}
#: `no_stat` switched statistics off; now they cost nothing until a program reads them.
WITHOUT_EFFECT = frozenset({"no_stat"})


def current_name(option: str) -> str:
    """Return the present name of an option."""
    return OLD_NAMES.get(option, option)
