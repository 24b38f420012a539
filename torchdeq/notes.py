"""Notes: log lines that a program may ignore."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("torchdeq")
_written: set[str] = set()  # messages that `note` has logged


def note(message: str) -> None:
    """Log one line at INFO level with the logger `torchdeq`, once per message.

    A note is never a Python warning: programs may turn warnings into errors. A message that the
    level of the logger suppresses does not count as logged.
    """
    if message not in _written and _LOG.isEnabledFor(logging.INFO):
        _written.add(message)
        _LOG.info(message)
