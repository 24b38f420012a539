"""The standard streams of a command, which may be closed, full, gone or without some characters."""

from __future__ import annotations

import io
import os
import sys


def open_streams() -> None:
    """Let printing never raise for what is printed.

    A stream that is closed leads nowhere. A character that a stream cannot encode, e.g. in the name
    of a file, is escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_unwritten() -> None:
    """Forget output that cannot be written: the interpreter would complain about it at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
