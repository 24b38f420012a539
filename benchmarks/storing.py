"""Files of results: JSON, written whole, with the origin of the numbers beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock  # torch needs it, too

from benchmarks.provenance import continued, provenance
from deq_zoo.files import write_atomically

RESULTS = Path(__file__).parent / "results"
_TRIAL = "partial."  # the beginning of the names of files that git ignores


def results_file(name: str, small: bool) -> Path:
    """Return the file of results; that of a small run, to try things out, is not kept."""
    return RESULTS / f"{_TRIAL if small else ''}{name}.json"


def is_kept(file: Path) -> bool:
    """Return whether a file belongs to the repository, not to a trial run."""
    return file.parent == RESULTS and not file.name.startswith(_TRIAL)


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file of results, empty if there is no such file."""
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def store(
    file: Path,
    answers: Mapping[str, Any],
    seeds: Sequence[int] | None,
    threads: int | None = None,
) -> None:
    """Write the answers of a benchmark; see `provenance` for seeds and threads."""
    _write(file, {"provenance": provenance(seeds, threads), **answers})


def store_part(
    file: Path,
    part: str,
    answers: Mapping[str, Any],
    seeds: Sequence[int] | None,
    *,
    resumed: bool = False,
    threads: int | None = None,
) -> None:
    """Write one part of a file; the other parts stay as they are.

    Args:
        file: the file.
        part: name of the part.
        answers: its content.
        seeds: see `provenance`.
        resumed: whether the content has rows of an earlier run, whose commit is kept then.
        threads: see `provenance`.
    """
    origin = provenance(seeds, threads)
    with FileLock(file.with_suffix(".lock"), timeout=60):  # another command may write another part
        before = read(file)
        if resumed and part in before:
            origin = continued(origin, before[part].get("provenance"))
        _write(file, {**before, part: {"provenance": origin, **answers}})


def origins(results: Mapping[str, Any]) -> list[Any]:
    """Return the records of a file: one for the whole, or one for each part, None where missing."""
    if "provenance" in results:
        return [results["provenance"]]
    return [part.get("provenance") if isinstance(part, dict) else None for part in results.values()]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(content, indent=1) + "\n")
