"""The folder that `--data-dir` names."""

from __future__ import annotations

from pathlib import Path

from deq_zoo.errors import DataError


def data_folder(data_dir: str | Path | None, data: str, files: str = "its files") -> Path:
    """Return the folder of a data set, or raise `DataError` if none is named or it does not exist.

    Args:
        data_dir: the folder, if one was named.
        data: the name of the data set, for the error.
        files: the files that should be in the folder, for the error.
    """
    if data_dir is None:
        raise DataError(
            f"{data} is read from disk: name the folder with {files} by --data-dir FOLDER"
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: it should contain {files} ({data})")
    return folder
