"""The caller outside the library: warnings point at the program's line."""

from __future__ import annotations

import sys


def stack_level() -> int:
    """Return the `stacklevel` with which `warnings.warn` points at the calling program.

    Frames of torchdeq, torch and dataclasses are skipped.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torchdeq", "torch", "dataclasses"):
            break
        frame, level = frame.f_back, level + 1
    return level
