"""The results that `predict` and `sample` yield, and the folder that they write to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.files import write_atomically


@dataclass(frozen=True)
class Prediction:
    """A result.

    Args:
        source: the input, e.g. the path of a file.
        text: one line for people.
        data: plain values for programs, as JSON has them.
        files: the files that were written.
    """

    source: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An input without a result, which does not end the work on the others.

    Args:
        source: the input.
        reason: why there is no result.
    """

    source: str
    reason: str


Results = Iterator[Prediction | Failure]


def predict_each(paths: Iterable[Path], predict: Callable[[Path], Prediction]) -> Results:
    """Yield the prediction of every file; a file that cannot be read yields a `Failure`."""
    for path in paths:
        try:
            yield predict(path)
        except (ZooError, OSError) as error:
            yield Failure(str(path), str(error))


class OutFolder:
    """The folder of `--out`: made when something is written, and no file in it is replaced.

    Args:
        path: the folder.
        force: replace files that are there already.
        asked: whether the user named the folder; if not, results that fit in a line need no file.
    """

    def __init__(self, path: Path, force: bool = False, *, asked: bool = True) -> None:
        if path.exists() and not path.is_dir():
            raise ZooError(f"{path} is a file: --out names a folder")
        self.path, self.force, self.asked = path, force, asked

    def check(self, names: Iterable[str]) -> None:
        """Raise `ZooError` for names that would be written twice or replace a file.

        Call it before a long computation whose names are known.
        """
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise ZooError(
                    f"two results would be written to {self.path / name}: give inputs of different "
                    "names, or one after the other with an --out each"
                )
            seen.add(name)
            self._refuse(self.path / name)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, whole or not at all; return its path."""
        path = self.path / name
        self._refuse(path)
        write_atomically(path, content)
        return path

    def _refuse(self, path: Path) -> None:
        if path.exists() and not self.force:
            raise ZooError(
                f"{path} exists already: choose another folder with --out, or replace it with "
                "--force"
            )


def results_folder(asked: Path | None, force: bool, kind: str) -> OutFolder:
    """Return the folder for results; raise `ZooError` if their listing would replace a file.

    Args:
        asked: the folder that the user named; None for the usual one.
        force: replace files that are there already.
        kind: `predictions` or `samples`, the name of the usual folder.
    """
    out = OutFolder(asked or Path(kind), force, asked=asked is not None)
    if out.asked:
        out.check([listing(kind)])
    return out


def listing(kind: str) -> str:
    """Return the name of the file that lists all results of a kind in a folder."""
    return f"{kind}.jsonl"
