"""Notes: what a program may want to know and need not act upon."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("torchdeq")
_written: set[str] = set()


def note(message: str) -> None:
    """Log one line at INFO level of the logger ``torchdeq``, once per message.

    A note is never a Python warning: programs may turn those into errors. A message that nobody
    sees, because the level is higher, is logged once the level allows it.
    """
    if message not in _written and _LOG.isEnabledFor(logging.INFO):
        _written.add(message)
        _LOG.info(message)
