"""Arrays from files: archives, single arrays, and pickles that may hold nothing else."""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deq_zoo.errors import DataError

#: What numpy raises on a file that is damaged, or of another kind.
_BROKEN = (
    OSError, ValueError, TypeError, AttributeError, EOFError, RuntimeError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


def read_archive(path: Path, *needed: str, rest: bool = True) -> dict[str, NDArray[Any]]:
    """Read the arrays of an `.npz`.

    Args:
        path: the file.
        *needed: arrays that must be there.
        rest: whether to read other arrays, too.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DataError(f"{path} is one array, and should be an archive of several")
        with archive:
            names = list(archive.files)
            arrays = {name: archive[name] for name in names if rest or name in needed}
    except _BROKEN as error:
        raise DataError(f"cannot read {path}: {error}") from error
    require(path, names, *needed)
    return arrays


def require(path: Path, names: Collection[str], *needed: str) -> None:
    """Raise `DataError` if some arrays are not among the names in an archive."""
    lacking = [name for name in needed if name not in names]
    if lacking:
        raise DataError(f"{path} lacks {', '.join(lacking)}; it has {', '.join(names)}")


def read_array(path: Path, mapped: bool = False) -> NDArray[Any]:
    """Read the array of an `.npy`.

    Args:
        path: the file.
        mapped: whether to read pages when they are used, not the whole file at once.
    """
    try:
        array = np.load(path, allow_pickle=False, mmap_mode="r" if mapped else None)
    except _BROKEN as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive, and should be one array")
    return array


def unpickle_arrays(
    path: Path, encoding: str = "latin1", classes: Mapping[tuple[str, str], Any] | None = None
) -> Any:
    """Read a pickle of arrays, numbers, text and plain containers; run no code of its choosing.

    Args:
        path: the file.
        encoding: of strings that Python 2 wrote; `bytes` leaves them as they are.
        classes: further classes that the pickle may name by module and name, and what to use for
            them. Arrays in the attributes of their objects are read, too.
    """
    try:
        with path.open("rb") as file:
            return _with_arrays(_Unpickler(file, encoding, classes or {}).load())
    except Exception as error:  # a broken pickle may raise anything
        raise DataError(f"cannot read {path} as arrays: {error}") from error


class _Dtype:
    """Stand-in for a dtype in a pickle: numpy's own trusts the sizes and flags it is given."""

    def __init__(self, code: bytes | str, *flags: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1].decode() if isinstance(state[1], bytes) else state[1]

    def to_numpy(self) -> np.dtype[Any]:
        if not re.fullmatch(r"b1|[iuf][1248]", self.code) or self.order not in tuple("<>=|"):
            raise pickle.UnpicklingError(f"it holds an array of {self.code!r}, not of numbers")
        return np.dtype(self.order + self.code)


class _Array:
    """Stand-in for an array in a pickle."""

    array: NDArray[Any]

    def __init__(self, *empty: Any) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, data = state
        raw = data.encode("latin1") if isinstance(data, str) else data
        numbers = np.frombuffer(bytearray(raw), dtype.to_numpy())
        self.array = numbers.reshape(shape, order="F" if in_columns else "C")


def _scalar(dtype: _Dtype, data: bytes | str) -> Any:
    raw = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(raw, dtype.to_numpy())[0].item()


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes, as Python 3 writes them for Python 2; no other codec."""
    return text.encode("latin1")


def _new_object(kind: type, base: type, state: Any) -> Any:
    """Return an object of a class that Python 2 wrote; its state follows in the pickle."""
    return object.__new__(kind)


#: What Python 2 and 3 write for arrays, under the names of numpy 1 and 2, and for containers.
_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("__builtin__", "object"): object,
    ("_codecs", "encode"): _encode,
    ("copy_reg", "_reconstructor"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
}


class _Unpickler(pickle.Unpickler):
    """A reader of pickles that knows the stand-ins alone."""

    def __init__(self, file: Any, encoding: str, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file, encoding=encoding)
        self._known = {**_STAND_INS, **classes}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return self._known[module, name]


def _with_arrays(value: Any) -> Any:
    """Return a value of a pickle with its arrays in place of their stand-ins."""
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, dict):
        return {key: _with_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_arrays(item) for item in value)
    if hasattr(value, "__dict__"):
        vars(value).update({name: _with_arrays(item) for name, item in vars(value).items()})
    return value
