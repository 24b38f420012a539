"""Arrays from files: archives, tables, and pickles that may hold nothing else."""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def _encode(text: str, encoding: str) -> bytes:
    """Bytes, as Python 3 writes them for Python 2; no other codec."""
    return text.encode("latin1")


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("__builtin__", "object"): object,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, sparse rows and plain containers; anything else in a pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "csr_matrix" and module.startswith("scipy.sparse"):
            return SparseRows
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        numpy_own = name in ("_reconstruct", "ndarray", "dtype", "scalar")
        if numpy_own and module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if name == "_reconstructor" and module in ("copy_reg", "copyreg"):
            return super().find_class("copyreg", name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")


# What numpy and pickle raise on a damaged file, and what code meets that expected another content.
_BROKEN = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
_UNEXPECTED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError
)  # fmt: skip


def unpickle_arrays(path: Path) -> Any:
    """What a pickle of arrays, sparse matrices, lists and dicts holds."""
    try:
        with existing(path).open("rb") as file:
            return _ArrayUnpickler(file, encoding="latin1").load()
    except (pickle.UnpicklingError, ImportError, *_BROKEN, *_UNEXPECTED) as error:
        raise DataError(f"cannot read {path} as arrays: {error}") from error


def read_archive(path: Path, *needed: str) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz``, some of which must be there."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DataError(f"{path} is one array, and should be an archive of several")
        with archive:
            held = {name: archive[name] for name in archive.files}
    except _BROKEN as error:
        raise DataError(f"cannot read {path}: {error}") from error
    require(path, held, *needed)
    return held


def require(path: Path, held: dict[str, NDArray[Any]], *needed: str) -> None:
    """Refuse an archive that lacks some arrays."""
    lacking = [name for name in needed if name not in held]
    if lacking:
        raise DataError(f"{path} lacks {', '.join(lacking)}; it has {', '.join(held)}")


def read_array(path: Path) -> NDArray[Any]:
    """The array of an ``.npy``."""
    try:
        array = np.load(existing(path), allow_pickle=False)
    except _BROKEN as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive, and should be one array")
    return array


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
