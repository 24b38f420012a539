"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from deq_zoo.errors import ZooError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and then rename it: it is the old one or the new one."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ZooError(f"could not write {path}: {error}") from None
