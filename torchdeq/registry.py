"""Names for things: one registry class serves solvers, backwards, norms, cores and presets."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, overload

T = TypeVar("T")
E = TypeVar("E")


def suggest(name: object, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, then all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} known: {', '.join(sorted(known)) or 'none'}"


def build(
    kind: type[T], what: str, options: Mapping[str, Any], aliases: Mapping[str, str] | None = None
) -> T:
    """A dataclass made from options; an unknown one is an error with a suggestion.

    Args:
        kind: the dataclass.
        what: how errors call it.
        options: its fields, or other names of them.
        aliases: those other names.
    """
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    given = {(aliases or {}).get(name, name): value for name, value in options.items()}
    if len(given) < len(options):
        raise TypeError(f"{what} got an option twice, under two names: {sorted(options)}")
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}{suggest(name, known)}")
    return kind(**given)


class UnknownName(KeyError):
    """A ``KeyError`` whose message reads as a sentence (``KeyError`` itself would quote it)."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(Mapping[str, T]):
    """A mapping from names to entries that explains itself when a name is unknown.

    Names present when :meth:`seal` is called are built in and cannot be replaced; a name registered
    later is the user's own, and registering it again replaces the entry with a warning.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._built_in: frozenset[str] = frozenset()

    @overload
    def register(self, name: str) -> Callable[[E], E]: ...
    @overload
    def register(self, name: str, entry: E) -> E: ...
    def register(self, name: str, entry: E | None = None) -> E | Callable[[E], E]:
        """Add ``entry`` under ``name``; without an entry, return a decorator that does so."""
        if entry is None:
            return lambda later: self.register(name, later)
        if not isinstance(name, str) or not name:
            raise TypeError(f"a {self.kind} needs a non-empty string as its name, got {name!r}")
        if name in self._built_in:
            raise ValueError(
                f"{self.kind} {name!r} is built in and cannot be replaced; choose another name"
            )
        if name in self._entries:
            warnings.warn(f"{self.kind} {name!r} was registered before; replaced", stacklevel=2)
        self._entries[name] = entry  # type: ignore[assignment]
        return entry

    def seal(self) -> None:
        """Declare every name registered so far as built in."""
        self._built_in = frozenset(self._entries)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            tail = suggest(name, self._entries)
            raise UnknownName(f"unknown {self.kind} {name!r}{tail}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
