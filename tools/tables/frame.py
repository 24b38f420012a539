"""What a table is, where its numbers are, and how it is put into a page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import JOINED
from benchmarks.storing import RESULTS
from deq_zoo.preset import Target, find_preset
from deq_zoo.pretrained import FOLDER, pretrained_card

ROOT = Path(__file__).parents[2]

_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_NAME = re.compile(r"\b[0-9a-f]{7}\b")  # of a commit
_MINUS = re.compile(r"e([-+])0(\d)")


#: On the first page a reader opens the line under a table.
_FOLDED = "<details><summary>Where these numbers come from</summary>\n\n{}</details>\n\n"


class Table(NamedTuple):
    """A table that pages may name.

    Attributes:
        make: returns its text.
        sources: of its numbers, as `read` takes them.
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


def _results(name: str) -> Any:
    """Return the results in a file, or in a part of it."""
    file, _, part = name.partition("/")
    return _file(file)[part] if part else _file(file)


def _target(preset: str) -> Target:
    """Return the published result of a preset."""
    target = find_preset(preset).target
    assert target is not None
    return target


#: How the kinds of sources are read, by what stands before their colon.
READERS: dict[str, Callable[[str], Any]] = {
    "": _results, "card": pretrained_card, "target": _target,
}  # fmt: skip


def read(source: str) -> Any:
    """Return what numbers come from.

    Args:
        source: FILE, without its ending, or FILE/PART: results of a benchmark, or of its part;
            `card:MODEL`: the card of a pretrained model; `target:PRESET`: a published result.
    """
    kind, _, name = source.rpartition(":")
    return READERS[kind](name)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def power(value: float, digits: int = 0) -> str:
    """Return a number in scientific notation, with a short exponent: 6e-5."""
    return _MINUS.sub(r"e\1\2", f"{value:.{digits}e}")


def origin(sources: Sequence[str], page: Path) -> str:
    """Return the line under a table: commands with commits and seeds, machines, cards, papers.

    Args:
        sources: of the table.
        page: from which the cards are linked.
    """
    kinds = {kind: [s for s in sources if s.rpartition(":")[0] == kind] for kind in READERS}
    records = [read(source)["provenance"] for source in kinds[""]]
    measured = [record for record in records if "source" not in record]
    published = [
        *(
            f"{r['source']}, written down in commit {_commits(r['commit'])}"
            for r in records
            if "source" in r
        ),
        *_papers([read(source) for source in kinds["target"]]),
    ]
    parts = (
        *map(_program, measured),
        *(record["machine"] or "machine unknown" for record in measured),
        *_cards(kinds["card"], page),
        *[f"Published numbers: {'; '.join(published)}"] * bool(published),
    )
    return f"*{'; '.join(dict.fromkeys(parts))}.*"


def _cards(sources: Sequence[str], page: Path) -> list[str]:
    """Return links to cards, which have commands, commits, seeds and machines of their own."""
    names = [source.rpartition(":")[2] for source in sources]
    folder = Path(os.path.relpath(FOLDER, page.parent)).as_posix()
    links = ", ".join(f"[`{name}`]({folder}/{name}.md)" for name in names)
    return [f"the card{'s' * (len(names) > 1)} of {links}, with commands and commit"] * bool(names)


def _papers(targets: Sequence[Target]) -> list[str]:
    """Return where published results are, each paper with its places."""
    places: dict[str, list[str]] = {}
    for target in targets:
        paper, _, place = target.source.partition(", ")
        places.setdefault(_paper(paper), []).append(place)
    return [f"{paper} ({'; '.join(dict.fromkeys(found))})" for paper, found in places.items()]


def _paper(name: str) -> str:
    """Return a paper of a target with its address; `paper` is that of TorchDEQ."""
    if name == "paper":
        return "arXiv:2310.18605"
    return f"arXiv:{name}" if re.fullmatch(r"\d{4}\.\d{5}", name) else name


def _program(record: dict[str, Any]) -> str:
    commit = f"commit {_commits(record['commit'])}"
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


def write(text: str, page: Path) -> str:
    """Return the text of a page with all its tables written anew.

    Args:
        text: of the page.
        page: its path, for links and errors.
    """

    def replace(match: re.Match[str]) -> str:
        if "<!-- table:" in match[0][len(match[1]) :]:
            raise ValueError(f"the table {match[2]!r} of {page.name} has no end")
        if match[2] not in TABLES:
            known = ", ".join(TABLES)
            raise KeyError(f"{page.name} asks for a table {match[2]!r}; known: {known}")
        make, sources = TABLES[match[2]]
        under = f"{origin(sources, page)}\n\n" if sources else ""
        if under and page == ROOT / "README.md":
            under = _FOLDED.format(under)
        return f"{match[1]}\n{make()}\n\n{under}{match[3]}"

    return _PLACE.sub(replace, text)


def pages() -> Iterator[Path]:
    """Return the pages that may have tables."""
    yield ROOT / "README.md"
    yield RESULTS / "cost.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "deq_zoo").rglob("README.md"))
