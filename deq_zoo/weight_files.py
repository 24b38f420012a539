"""Reading files with released weights; a wrong file is an error of one line that says what it is.

Files of safetensors and of `torch.save` are read, by their content, whatever they are called. No
code in a file is run: a pickle may have tensors, numbers, text and containers of them.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from deq_zoo.errors import CheckpointError

_EXPECTED = "expected a .safetensors file, or a state_dict written by torch.save"
_HEAD = 512  # bytes by which a file is recognised
_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run `git lfs pull`",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x89HDF": "an HDF5 file, e.g. of Keras or Matlab",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"BZh": "a bzip2 archive: unpack it first",
    b"\xfd7zXZ": "an xz archive: unpack it first",
    b"Rar!": "a RAR archive: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"GGUF": "a GGUF file of llama.cpp",
}


def check_file(source: Path) -> None:
    """Raise `CheckpointError` if there is no file."""
    if source.is_dir():
        raise CheckpointError(_about_folder(source))
    if not source.exists():
        raise CheckpointError(f"there is no file {source}")


def read_content(source: Path) -> Any:
    """Return what a file of weights holds; raise `CheckpointError` with what it seems to be."""
    check_file(source)
    with source.open("rb") as file:
        head = file.read(_HEAD)
    if _is_safetensors(head, source.stat().st_size):
        return _read_safetensors(source)
    if head.startswith(b"PK"):
        _check_archive(source)
        return _unpickle(source)
    if head.startswith(b"\x80"):
        return _unpickle(source)
    raise _wrong(source, _recognise(head))


def _wrong(source: Path, seems: str) -> CheckpointError:
    return CheckpointError(f"{source} cannot be read as weights: it is {seems}; {_EXPECTED}")


def _about_folder(folder: Path) -> str:
    if (folder / "log.jsonl").exists() and (folder / "config.json").exists():
        return f"{folder} is a run of this zoo: `evaluate` and `predict` take it as it is"
    inside = sorted(p.name for p in folder.rglob("*") if p.suffix in _SUFFIXES)
    hint = f": name a file in it, e.g. {inside[0]}" if inside else ""
    return f"{folder} is a folder{hint}; {_EXPECTED}"


_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")


def _recognise(head: bytes) -> str:
    """Return what a file seems to be by its first bytes."""
    if not head:
        return "empty"
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return what
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, perhaps of a site that asks to sign in: download the file again"
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    if _is_text(head):
        return "a text file" + (" with JSON" if start[:1] in b"{[" else "")
    return "of a format that is not known here, or damaged"


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # a character may be cut at the end
            return False
        text = head[: error.start].decode()
    return all(char.isprintable() or char in "\t\r\n\f" for char in text)


def _is_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file starts with the length of a JSON header, and the header."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size


def _read_safetensors(source: Path) -> Any:
    try:
        with safe_open(source, "pt") as file:
            if (file.metadata() or {}).get("format", "").startswith("deq-zoo"):
                raise CheckpointError(
                    f"{source} is a checkpoint of this zoo already: `evaluate` and `predict` take "
                    "it as it is, and --to-authors converts it to the layout of the authors"
                )
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _wrong(source, f"a damaged safetensors file ({_first_line(error)})") from None


def _check_archive(source: Path) -> None:
    """Raise unless a zip archive was written by `torch.save`."""
    try:
        with zipfile.ZipFile(source) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        raise _wrong(source, "an incomplete or damaged archive: download it again") from None
    if any("/code/" in name for name in names):
        raise _wrong(source, "a TorchScript program")
    if any(name.endswith("/data.pkl") for name in names):
        return
    if any(name.endswith(".npy") for name in names):
        raise _wrong(source, "an archive of NumPy arrays (.npz)")
    weights = [name for name in names if name.endswith(_SUFFIXES)]
    inside = f": unpack it and convert {weights[0]}" if weights else " without weights"
    raise _wrong(source, f"a zip archive{inside}")


def _harmless() -> list[Any]:
    """Return what training checkpoints often hold beside weights: arguments, and arrays of numbers.

    A pickle names a function of numpy by the module of the version that wrote it.
    """
    # The functions that numpy itself names in its pickles: no private name is spelled here.
    made: list[Any] = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    by_name = [
        (function, f"{module}.multiarray.{function.__name__}")
        for module in ("numpy.core", "numpy._core")
        for function in made
    ]
    dtypes = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8", "u1", "?")]
    return [argparse.Namespace, np.ndarray, np.dtype, *dtypes, *by_name]


def _unpickle(source: Path) -> Any:
    try:
        # A file, not a path, since torch would go by the suffix.
        with (
            source.open("rb") as file,
            torch.serialization.safe_globals(_harmless()),
            warnings.catch_warnings(action="ignore"),  # about other protocols of pickle
        ):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        names = re.search(r"GLOBAL ([\w.]+)", str(error))
        if names is None:
            raise _wrong(source, "a pickle without tensors of torch, or damaged") from None
        raise _wrong(
            source,
            f"a pickle that runs code to make {names[1]}, which may do harm and is not done: save "
            "its state_dict alone, with the program that wrote it",
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise _wrong(source, f"damaged ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
