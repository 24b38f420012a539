"""Tables and sparse matrices from files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deq_zoo.arrays import unpickle_arrays
from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError


class SparseRows:
    """A sparse matrix by rows, and the stand-in for scipy's in a pickle."""

    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]
    _shape: tuple[int, int]

    @classmethod
    def of(cls, held: dict[str, NDArray[Any]], prefix: str) -> SparseRows:
        made = cls()
        made.indices, made.indptr = held[f"{prefix}_indices"], held[f"{prefix}_indptr"]
        made.data = held.get(f"{prefix}_data", np.ones(len(made.indices)))
        rows, columns = held[f"{prefix}_shape"].tolist()
        made._shape = rows, columns
        return made

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def dense(self) -> NDArray[np.float32]:
        if len(self.indices) and self.indices.min() < 0:
            raise ValueError("a sparse matrix has a negative column")
        full = np.zeros(self.shape, dtype=np.float32)
        full[np.repeat(np.arange(self.shape[0]), np.diff(self.indptr)), self.indices] = self.data
        return full


#: What code meets that expected another content.
_UNEXPECTED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError
)  # fmt: skip
_SPARSE = {
    (module, "csr_matrix"): SparseRows for module in ("scipy.sparse.csr", "scipy.sparse._csr")
}


def read_pickle(path: Path) -> Any:
    """Read a pickle of arrays, sparse matrices, lists and dicts."""
    return unpickle_arrays(existing(path), classes=_SPARSE)


def read_table(path: Path, dtype: Any, delimiter: str | None = None) -> NDArray[Any]:
    """The numbers of a text file, by lines and columns."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            return np.loadtxt(existing(path), dtype=dtype, delimiter=delimiter, ndmin=2)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path} must hold numbers: {error}") from error


@contextmanager
def taking_apart(path: Path) -> Iterator[None]:
    """Blame the file, by name, for what cannot be made of its contents."""
    try:
        yield
    except _UNEXPECTED as error:
        raise DataError(f"{path} is not as expected: {error!r}") from error


def find_file(root: str | Path | None, names: tuple[str, ...], hint: str) -> Path:
    """The first file of one of these names in a folder or below."""
    folder = data_folder(root, "this set", hint)
    for name in names:
        for path in sorted(folder.rglob(name)):
            return path
    raise DataError(f"{root} does not hold the data: put there {hint}")


def existing(path: Path) -> Path:
    """The path, if there is such a file."""
    if not path.is_file():
        raise DataError(f"{path.name} is missing in {path.parent}")
    return path
