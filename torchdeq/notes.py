"""Notes: information for a program that it may ignore."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("torchdeq")
_written: set[str] = set()  # messages that were logged


def note(message: str) -> None:
    """Log one line at INFO level with the logger `torchdeq`, once per message.

    A note is never a Python warning: programs may turn warnings into errors. A message that the
    logger's level suppresses is not used up: it is logged once the level allows it.
    """
    if message not in _written and _LOG.isEnabledFor(logging.INFO):
        _written.add(message)
        _LOG.info(message)
