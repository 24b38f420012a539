"""The registry class, used for solvers, backwards, norms, cores, weight functions and presets."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, overload

__all__ = ["Registry", "UnknownName", "suggest"]

T = TypeVar("T")
E = TypeVar("E")


def suggest(name: object, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest of all names, then all."""
    names = list(names)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} known: {', '.join(sorted(names)) or 'none'}"


def build(
    kind: type[T], what: str, options: Mapping[str, Any], aliases: Mapping[str, str] | None = None
) -> T:
    """Return an instance of a dataclass; raise with a suggestion for an unknown option.

    Args:
        kind: the dataclass.
        what: the name of the dataclass in errors.
        options: values of the fields, by name or alias.
        aliases: the field names, by alias.
    """
    if not is_dataclass(kind):
        raise TypeError(
            f"{what} cannot be built: {kind.__name__} must be decorated with "
            "@dataclass(frozen=True, kw_only=True); its fields are the options"
        )
    names = [f.name for f in fields(kind) if f.init]
    values = {(aliases or {}).get(name, name): value for name, value in options.items()}
    if len(values) < len(options):
        raise TypeError(f"{what} got an option twice, under two names: {sorted(options)}")
    for name in values:
        if name not in names:
            raise TypeError(f"{what} has no option {name!r}{suggest(name, names)}")
    return kind(**values)


def check_class(kind: object, base: type, what: str, needs: str, complete: bool = True) -> None:
    """Raise `TypeError` unless `kind` is a frozen dataclass derived from `base`.

    Args:
        kind: the class that a program registers.
        base: the class that it must derive from.
        what: the name of the class in the error.
        needs: the methods that the class must define, in words.
        complete: whether the class defines these methods.
    """
    if not (isinstance(kind, type) and issubclass(kind, base)):
        problem = f"{kind!r} is not derived from {base.__name__}"
    elif not is_dataclass(kind):
        problem = f"{kind.__name__} is not a dataclass"
    elif not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        problem = f"{kind.__name__} is not frozen"
    elif undeclared := _undeclared(kind):
        problem = f"{kind.__name__} is not decorated itself, so {undeclared!r} is not a field"
    elif not complete:
        problem = f"{kind.__name__} does not define {needs}"
    else:
        return
    raise TypeError(
        f"{what} must be a class derived from {base.__name__}, decorated with @dataclass("
        f"frozen=True, kw_only=True), with its options as fields, that defines {needs}: {problem}"
    )


def _undeclared(kind: type) -> str | None:
    """Return an annotated attribute that is not a field because only a base class is decorated."""
    if "__dataclass_fields__" in vars(kind):
        return None
    return next(
        (n for n, t in inspect.get_annotations(kind).items() if "ClassVar" not in str(t)), None
    )


class UnknownName(KeyError):
    """A `KeyError` that prints its message without the quotes of `KeyError`."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(Mapping[str, T]):
    """A mapping from names to entries; an unknown name raises an error with a suggestion.

    Names that are registered before `seal` is called are built in and cannot be replaced. A name
    registered later belongs to the user: registering it again replaces the entry, with a warning.

    Args:
        kind: the kind of entries in messages, e.g. "solver".
        apart_from: another registry; neither accepts a name that the other one has.
    """

    def __init__(self, kind: str, apart_from: Registry[Any] | None = None) -> None:
        self.kind = kind
        self._others: list[Registry[Any]] = []
        if apart_from is not None:
            self._others.append(apart_from)
            apart_from._others.append(self)
        self._entries: dict[str, T] = {}
        self._built_in: frozenset[str] = frozenset()

    @overload
    def register(self, name: str) -> Callable[[E], E]: ...
    @overload
    def register(self, name: str, entry: E) -> E: ...
    def register(self, name: str, entry: E | None = None) -> E | Callable[[E], E]:
        """Add `entry` under `name`; without an entry, return a decorator that does so."""
        if entry is None:
            return lambda later: self.register(name, later)
        if not isinstance(name, str) or not name:
            raise TypeError(f"a {self.kind} needs a non-empty string as its name, got {name!r}")
        if name in self._built_in:
            raise ValueError(
                f"{self.kind} {name!r} is built in and cannot be replaced; choose another name"
            )
        for other in self._others:
            if name in other:
                raise ValueError(f"{name!r} is a {other.kind} already: choose another name")
        if name in self._entries:
            warnings.warn(f"{self.kind} {name!r} was registered before: replaced", stacklevel=2)
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
