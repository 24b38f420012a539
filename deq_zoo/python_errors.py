"""Errors of `deq_zoo.train` and `deq_zoo.fit` name arguments of Python, not flags of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from deq_zoo.errors import ZooError

_SWITCHES = ("resume", "force", "cpu")  # flags without a value
_SETTING = re.compile(r"--set (?=[\w.]+=)")
_FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)(?: [A-Z]+\b)?")  # perhaps with a word for its value


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let a `ZooError` from within the block name arguments: `force=True` instead of `--force`."""
    try:
        yield
    except ZooError as error:
        error.args = (_in_python(str(error)),)
        raise


def _in_python(text: str) -> str:
    return _FLAG.sub(_as_argument, _SETTING.sub("", text))


def _as_argument(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"{name}={True if name in _SWITCHES else '...'}"
