"""The peak memory of this process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def forget_peak() -> int:
    """Reset the peak of this process, if Linux allows it; return the bytes in use."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def growth_mb(before: int) -> float:
    """Return the megabytes by which the peak of this process exceeds so many bytes."""
    return (resident_peak() - before) / 2**20


def resident_peak() -> int:
    """Return the peak of the memory that this process has used, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except OSError:  # not Linux: the peak since the process began
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
