"""What a task is: data, a model, a loss and a score; the training loop knows nothing else."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from deq_zoo.errors import DataError, MissingPackage, ZooError
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.model import Model
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.record import SolverRecord
from deq_zoo.tree import tensors
from deq_zoo.uses import GRADIENT, NORM, SOLVE, STATES, check_uses
from torchdeq import DEQConfig, SolverStat

Batch = Any  # tensors in tuples, lists and dicts, on the CPU
Split = Literal["val", "test"]
Weights = Mapping[str, Tensor]


class Score(NamedTuple):
    """The metric by which the best checkpoint is chosen, on validation data."""

    name: str
    unit: str = ""
    higher_is_better: bool = True

    def better(self, new: float, old: float | None) -> bool:
        """Return whether to prefer `new`; NaN and infinity never win."""
        if not isfinite(new):
            return False
        if old is None or not isfinite(old):
            return True
        return new > old if self.higher_is_better else new < old


class Shard(NamedTuple):
    """The part of every batch that a process takes."""

    rank: int = 0
    world: int = 1


WHOLE = Shard()


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Args:
        value: to be differentiated.
        metrics: numbers worth logging.
        stats: of the forward solve.
        carry: tensors for the next step, e.g. fixed points to start from; saved and resumed.
    """

    value: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    stats: SolverStat | None = None
    carry: Any = None


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on a split, and how its solver did."""

    metrics: Mapping[str, float]
    solver: SolverRecord


class Picture(NamedTuple):
    """Something to look at in the report.

    Args:
        name: of its file.
        caption: says which data is shown, and how it was selected.
        png: the image.
    """

    name: str
    caption: str
    png: bytes


class Converted(NamedTuple):
    """Weights of the authors as ours, with facts about the data behind them (see `Task.facts`)."""

    weights: dict[str, Tensor]
    facts: dict[str, Any]


class Task(ABC):
    """A model with its data, loss and score.

    Subclasses are frozen dataclasses whose fields are options; data is opened when it is needed. A
    subclass with a `__post_init__` of its own calls that of its base.
    """

    score: ClassVar[Score]
    #: Fields that an earlier version wrote to run folders, and their names now; None drops them.
    former_fields: ClassVar[Mapping[str, str | None]] = {}
    #: Whether `after_step` changes each row of a weight by itself, or no weight: with
    #: `parallel=fsdp` it gets the rows of its process. If False, all weights are gathered for it.
    shardwise: ClassVar[bool] = False
    deq: DEQConfig

    def __post_init__(self) -> None:
        check_uses(self)

    @property
    def uses(self) -> frozenset[str]:
        """Return the names of the DEQ's options that have an effect; see `deq_zoo.uses`."""
        return SOLVE | GRADIENT | STATES | NORM

    @property
    def validation_settings(self) -> frozenset[str]:
        """Return the fields that choose validation data out of the training data.

        An evaluation on validation data may not change them: it would score training data.
        """
        return frozenset()

    @property
    @abstractmethod
    def train_set(self) -> Any:
        """Return the training data."""

    @property
    @abstractmethod
    def val_set(self) -> Any:
        """Return the data that chooses the best checkpoint; None: the last checkpoint counts."""

    @property
    @abstractmethod
    def test_set(self) -> Any:
        """Return the data that is scored once, with the weights that were chosen."""

    def open_data(self) -> None:
        """Raise `DataError` for missing or broken data before a run folder is touched."""
        _ = self.train_set, self.val_set, self.test_set, self.steps_per_epoch

    @property
    def reads_data_dir(self) -> bool:
        """Return whether `data_dir` has an effect: data that comes with a package needs none."""
        return hasattr(self, "data_dir")

    def facts(self) -> dict[str, Any]:
        """Return facts about the data that using the model needs, e.g. names of classes.

        They are plain values, saved in every checkpoint and known to the model as `model.facts`.
        """
        return {}

    def available_facts(self) -> dict[str, Any]:
        """Return the facts; none if the data that they are about is missing."""
        try:
            return self.facts()
        except (DataError, MissingPackage):
            return {}

    @abstractmethod
    def build(self, facts: Mapping[str, Any] | None = None) -> Model:
        """Return a freshly initialised model; draws from the global random generator.

        Args:
            facts: those of a checkpoint. Without them, a model whose shape depends on the data
                looks at the data.
        """

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Return the number of training batches in one pass through the data."""

    @property
    def costly_batches(self) -> bool:
        """Return whether batches take long to make: worker processes make them then."""
        return False

    @abstractmethod
    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Batch:
        """Return batch `step` = 0, 1, ...: a function of its arguments alone, so a run can resume.

        Worker processes may call it: it must not draw from global random generators.
        """

    def batch_size(self, batch: Batch) -> int:
        """Return the number of terms in the mean that is the loss of a batch.

        It weights the gradients of processes whose parts of a batch differ in size, and is the
        number of samples of the speed shown.
        """
        return len(next(tensors(batch)))

    @abstractmethod
    def loss(self, model: Any, batch: Batch, carry: Any) -> Loss:
        """Return the loss of a batch.

        Args:
            model: as `build` returns it, or wrapped for several processes.
            batch: on the model's device.
            carry: `Loss.carry` of the step before, None at first.
        """

    @abstractmethod
    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        """Return metrics of a model, in evaluation mode and without a graph, on one split.

        Args:
            model: as `build` returns it.
            split: `val` or `test`; the metrics have the same names on both.
            thorough: add costly figures, e.g. spectral radii: at the end of a run, and on demand.
        """

    def check_length(self, batches: int) -> None:
        """Raise `ZooError` if a run of so many batches makes no use of a setting."""
        return

    def begin(self, model: Any) -> None:
        """Prepare a model when its run begins, e.g. load weights of an earlier run."""
        return

    def after_step(self, model: Any) -> None:
        """Change a model after every update, e.g. project its weights."""
        return

    def split_carry(self, carries: Sequence[Any], shard: Shard) -> Any:
        """Return the carry of one process of a run that goes on with another number of processes.

        Args:
            carries: `Loss.carry` of each process that wrote the checkpoint; none is None.
            shard: of the process that goes on.

        Returns:
            The carry, or None to begin as at the first step.
        """
        return None

    def pictures(self, model: Any) -> list[Picture]:
        """Return examples for the report."""
        return []

    def pick_state(self, content: Any) -> Weights | None:
        """Return the weights in a file of the authors' programs, e.g. the EMA of a checkpoint.

        None lets the frame look for a dict of tensors: the content itself, or under a usual key.

        Args:
            content: what the file holds: tensors, numbers and text in dicts and lists.
        """
        return None

    def from_authors(self, state: Weights) -> Converted:
        """Return a state_dict of the authors' release as one of ours."""
        raise ZooError(f"{type(self).__name__} has no released weights to convert")

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        """Return a state_dict of ours as the authors' programs read it."""
        raise ZooError(f"{type(self).__name__} has no released weights to convert to")

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        """Yield results for files, one by one; an input that cannot be read yields a `Failure`."""
        raise ZooError(f"{type(self).__name__} has nothing to predict from files")

    def sampling(self) -> Any:
        """Return the options of `sample` at their defaults: a frozen dataclass."""
        raise ZooError(f"{type(self).__name__} has nothing to sample")

    def sample(self, model: Any, options: Any, out: OutFolder) -> Iterator[Prediction]:
        """Yield what the model generates, as the options from `sampling` say."""
        raise ZooError(f"{type(self).__name__} has nothing to sample")

    def exporting(self) -> Any:
        """Return the options of `export` at their defaults: a frozen dataclass."""
        return NoOptions()

    def export(self, model: Any, options: Any) -> Exportable:
        """Return a model as other programs call it, as the options from `exporting` say."""
        raise ZooError(f"{type(self).__name__} has nothing to export")


def generator(*key: object) -> torch.Generator:
    """Return a random generator that depends on `key` alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def batch_indices(
    n: int, size: int, step: int, seed: int, shard: Shard = WHOLE, *, drop_last: bool = False
) -> Tensor:
    """Return which of `n` examples batch `step` holds; every epoch is a new permutation."""
    per_epoch = steps_in_epoch(n, size, drop_last)
    epoch, k = divmod(step, per_epoch)
    order = torch.randperm(n, generator=generator("epoch", seed, epoch))
    return order[k * size : (k + 1) * size][shard.rank :: shard.world]


def steps_in_epoch(n: int, size: int, drop_last: bool = False) -> int:
    """Return the number of batches of `size` in `n` examples."""
    return max(1, n // size if drop_last else -(-n // size))
