"""Options that the family of a run defines, from the command line of `sample` and `export`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from deq_zoo.errors import ZooError
from deq_zoo.settings import walk, with_settings
from deq_zoo.spelling import suggest

T = TypeVar("T")


def parse_family_options(options: T, words: Sequence[str], flags: Collection[str]) -> T:
    """Return the options of a family with the values that words give to them.

    Args:
        options: the defaults.
        words: `--scale 4`, `--scale=4` or `scale=4`, as words of the command line.
        flags: those of the command itself, for suggestions.
    """
    changed: T = with_settings(options, _as_settings(options, words, flags))
    return changed


def _as_settings(options: object, words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return `--scale 4`, `--scale=4` and `scale=4` as `scale=4`."""
    names = {f"--{field.path.replace('_', '-')}" for field in walk(options)}
    settings = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        flag = f"--{name.removeprefix('--').replace('_', '-')}"
        if not equals and not word.startswith("-"):
            raise ZooError(f"options of a family read --name value or name=value, got {word!r}")
        if flag not in names:
            raise ZooError(f"unknown option {flag!r}{suggest(flag, names | {*flags})}")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ZooError(f"{word} needs a value")
            value = following
        settings.append(f"{flag.removeprefix('--').replace('-', '_')}={value}")
    return settings
