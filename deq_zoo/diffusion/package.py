"""The package diffusers, asked for when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from deq_zoo.errors import ZooError


def diffusers() -> Any:
    """The package; its names are made on request, so that no type checker can see them."""
    try:
        return import_module("diffusers")
    except ImportError as error:
        raise ZooError(
            f"denoisers, schedulers and pipelines are those of the package diffusers: "
            f"pip install 'torchdeq[zoo]' ({error})"
        ) from None
