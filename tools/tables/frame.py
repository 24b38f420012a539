"""What a table is, where its numbers are, and how it is put into a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import JOINED
from benchmarks.storing import RESULTS

ROOT = Path(__file__).parents[2]

_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_NAME = re.compile(r"\b[0-9a-f]{7}\b")  # of a commit
_MINUS = re.compile(r"e([-+])0(\d)")


class Table(NamedTuple):
    """A table that pages may name.

    Attributes:
        make: returns its text.
        sources: files of results that it shows, without their ending, or FILE/PART for a part;
            none if its numbers are those of presets and cards.
    """

    make: Callable[[], str]
    sources: tuple[str, ...]


TABLES: dict[str, Table] = {}


def table(*sources: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Add a function that returns a table to those that pages may name, with its sources."""

    def add(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[make.__name__] = Table(make, sources)
        return make

    return add


@cache
def _file(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def read(source: str) -> Any:
    """Return the results of one benchmark, or of a part of it: FILE or FILE/PART."""
    name, _, part = source.partition("/")
    return _file(name)[part] if part else _file(name)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def power(value: float, digits: int = 0) -> str:
    """Return a number in scientific notation, with a short exponent: 6e-5."""
    return _MINUS.sub(r"e\1\2", f"{value:.{digits}e}")


def origin(sources: Sequence[str]) -> str:
    """Return the line under a table: commands with their commits and seeds, then the machine."""
    records = [read(source)["provenance"] for source in sources]
    parts = dict.fromkeys(_program(record) for record in records)
    machines = dict.fromkeys(
        record["machine"] or "machine unknown" for record in records if "source" not in record
    )
    return f"*{'; '.join((*parts, *machines))}.*"


def _program(record: dict[str, Any]) -> str:
    commit = f"commit {_commits(record['commit'])}"
    if "source" in record:
        return f"Published numbers: {record['source']}; written down in {commit}"
    command = "command unknown"
    if record["command"] is not None:
        command = " and ".join(f"`{each}`" for each in record["command"].split(" and "))
    return ", ".join((command, commit, *_seeds(record["seeds"])))


def _commits(names: str | None) -> str:
    """Return the names of commits, each with the commit that it was joined into, if it was."""
    if names is None:
        return "unknown"
    return _NAME.sub(lambda found: f"{found[0]}{_joined(found[0])}", names)


def _joined(name: str) -> str:
    return f" (now in {JOINED[name]})" if name in JOINED else ""


def _seeds(seeds: list[int] | None) -> list[str]:
    if seeds is None:
        return ["seeds unknown"]
    word = "seed" if len(seeds) == 1 else "seeds"
    return [f"{word} {', '.join(map(str, seeds))}"] if seeds else []


def write(text: str, source: str) -> str:
    """Return a page with all its tables written anew.

    Args:
        text: the page.
        source: its name, for errors.
    """

    def replace(match: re.Match[str]) -> str:
        if "<!-- table:" in match[0][len(match[1]) :]:
            raise ValueError(f"the table {match[2]!r} of {source} has no end")
        if match[2] not in TABLES:
            raise KeyError(f"{source} asks for a table {match[2]!r}; known: {', '.join(TABLES)}")
        make, sources = TABLES[match[2]]
        under = f"{origin(sources)}\n\n" if sources else ""
        return f"{match[1]}\n{make()}\n\n{under}{match[3]}"

    return _PLACE.sub(replace, text)


def pages() -> Iterator[Path]:
    """Return the pages that may have tables."""
    yield ROOT / "README.md"
    yield RESULTS / "cost.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "deq_zoo").rglob("README.md"))
