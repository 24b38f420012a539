"""The package diffusers, imported when it is needed."""

from __future__ import annotations

from typing import Any

from deq_zoo.packages import optional


def diffusers() -> Any:
    """Return the package, untyped: its attributes are created when they are used."""
    return optional("diffusers", "diffusion", "denoisers, schedulers and pipelines")
