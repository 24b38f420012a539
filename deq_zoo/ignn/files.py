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
    """A sparse matrix by rows; it stands in for scipy's class in a pickle."""

    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]
    _shape: tuple[int, int]

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]], prefix: str) -> SparseRows:
        """Return the matrix whose arrays have names that begin with `prefix`."""
        made = cls()
        made.indices, made.indptr = arrays[f"{prefix}_indices"], arrays[f"{prefix}_indptr"]
        made.data = arrays.get(f"{prefix}_data", np.ones(len(made.indices)))
        rows, columns = arrays[f"{prefix}_shape"].tolist()
        made._shape = rows, columns
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns."""
        return self._shape

    def dense(self) -> NDArray[np.float32]:
        """Return the matrix with all its zeros."""
        if len(self.indices) and self.indices.min() < 0:
            raise ValueError("a sparse matrix has a negative column")
        full = np.zeros(self.shape, dtype=np.float32)
        full[np.repeat(np.arange(self.shape[0]), np.diff(self.indptr)), self.indices] = self.data
        return full


#: Errors of code that expected another content.
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
    """Read the numbers of a text file, by lines and columns."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            return np.loadtxt(existing(path), dtype=dtype, delimiter=delimiter, ndmin=2)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path} must hold numbers: {error}") from error


@contextmanager
def taking_apart(path: Path) -> Iterator[None]:
    """Raise errors of the block as `DataError` with the name of the file."""
    try:
        yield
    except _UNEXPECTED as error:
        raise DataError(f"{path} is not as expected: {error!r}") from error


def find_file(root: str | Path | None, names: tuple[str, ...], hint: str) -> Path:
    """Return the first file of one of these names in a folder or below.

    Args:
        root: the folder.
        names: of files, the best first.
        hint: the files to put there, for the error.
    """
    folder = data_folder(root, "this set", hint)
    for name in names:
        for path in sorted(folder.rglob(name)):
            return path
    raise DataError(f"{root} does not hold the data: put there {hint}")


def existing(path: Path) -> Path:
    """Return the path; raise `DataError` if there is no such file."""
    if not path.is_file():
        raise DataError(f"{path.name} is missing in {path.parent}")
    return path
