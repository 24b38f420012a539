"""Values of arguments: numbers and names, with errors that say what is expected."""

from __future__ import annotations

from argparse import ArgumentTypeError

from deq_zoo.spelling import did_you_mean


def whole(text: str) -> int:
    """Return text as a whole number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"takes a whole number, got {text!r}")
    return int(text)


def at_least_one(text: str) -> int:
    """Return text as a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"takes a whole number from 1 on, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Return text as a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number > 0:
        raise ArgumentTypeError(f"takes a number above 0, got {text!r}")
    return number


def split(text: str) -> str:
    """Return the name of a split."""
    if text not in ("val", "test"):
        hint = did_you_mean(text, ("val", "test"))
        raise ArgumentTypeError(f"is val or test, got {text!r}{hint}")
    return text
