"""Warnings point at the program, not at the library."""

from __future__ import annotations

import sys


def stack_level() -> int:
    """How far up, from the caller of this, the first frame outside the library is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torchdeq", "torch", "dataclasses"):
            break
        frame, level = frame.f_back, level + 1
    return level
