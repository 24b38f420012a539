"""What exists for the interface of torchdeq 0.1.0."""

from torchdeq.compat.ignored import ignore_keywords, without_ignored

__all__ = ["ignore_keywords", "without_ignored"]
