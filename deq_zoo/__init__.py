"""Deep equilibrium models built on the public names of torchdeq."""

from typing import TYPE_CHECKING, Any

from deq_zoo.errors import CheckpointError, DataError, ZooError

if TYPE_CHECKING:
    from deq_zoo.evaluate import load

__all__ = ["CheckpointError", "DataError", "ZooError", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":  # imported when used: it needs packages of the zoo
        from deq_zoo.evaluate import load

        return load
    raise AttributeError(f"module 'deq_zoo' has no attribute {name!r}")
