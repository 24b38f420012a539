"""Rows that take long: each is made in a process of its own, and stored as soon as it is there.

Processes are forked from one that has imported the code at the beginning. So all rows of a run
have the code of the commit that is stored with them, whatever is edited in the meantime, and each
row has a peak memory of its own. A run that was interrupted goes on with the rows that are missing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from benchmarks.provenance import provenance, refuse_changes
from benchmarks.storing import is_kept, read, store_part

Row = dict[str, Any]


class Job(NamedTuple):
    """A row to make: its name, and a function of a module with its arguments."""

    key: str
    make: Callable[..., Row]
    arguments: tuple[Any, ...] = ()


def make_rows(
    file: Path, part: str, jobs: Iterator[Job], seeds: Sequence[int], processes: int
) -> None:
    """Make the rows of a part that its file lacks; print and store each, with its origin.

    Raises SystemExit if the rows would be kept, but the code is not that of a commit.

    Args:
        file: the file of results.
        part: name of the part.
        jobs: all rows of the part.
        seeds: see `provenance`.
        processes: rows to make at the same time.
    """
    if is_kept(file):
        refuse_changes()
    before = read(file).get(part, {})
    done: dict[str, Row] = before.get("rows", {})
    origins: dict[str, Row] = before.get("origins", {})
    missing = [job for job in jobs if job.key not in done]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sorted({job.make.__module__ for job in missing}))
    with context.Pool(processes, _end_with_parent, maxtasksperchild=1) as pool:
        for key, row in pool.imap_unordered(_make, missing):
            resumed = bool(done)
            done[key] = row
            origins[key] = _origin()
            print(f"{part}  {key}  {_show(row)}", flush=True)
            content = {"rows": done, "origins": origins}
            store_part(file, part, content, seeds, resumed=resumed, threads=1)


def _origin() -> Row:
    """Return the command, the commit and the machine of a row; those of a part may be several."""
    record = provenance(seeds=None, threads=1)
    return {name: record[name] for name in ("command", "commit", "machine")}


def _end_with_parent() -> None:
    """End this process when its parent ends: a row that nobody waits for would go on for long.

    It would also go on writing its checkpoint, beside the run that makes the row again.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _make(job: Job) -> tuple[str, Row]:
    torch.set_num_threads(1)
    return job.key, job.make(*job.arguments)


def _show(row: Row) -> str:
    short = {name: value for name, value in row.items() if not isinstance(value, (dict, list))}
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in short.items()
    )
