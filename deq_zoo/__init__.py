"""Deep equilibrium models built on the public names of torchdeq."""

from typing import TYPE_CHECKING

from deq_zoo.errors import CheckpointError, DataError, ZooError
from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.family import Family, register_family
    from deq_zoo.fitting import fit
    from deq_zoo.loading import load
    from deq_zoo.training import train

__all__ = [
    "CheckpointError",
    "DataError",
    "Family",
    "ZooError",
    "fit",
    "load",
    "register_family",
    "train",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Family": "family",
        "fit": "fitting",
        "load": "loading",
        "register_family": "family",
        "train": "training",
    },
)
