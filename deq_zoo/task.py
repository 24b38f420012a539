"""What a task is: data, a model, a loss and a score; the training loop knows nothing else."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.record import SolverRecord
from deq_zoo.tree import tensors
from torchdeq import DEQConfig, SolverStat

Batch = Any  # tensors in tuples, lists and dicts, on the CPU


class Score(NamedTuple):
    """The number by which a task is judged, and checkpoints are chosen."""

    name: str
    unit: str = ""
    higher_is_better: bool = True

    def better(self, new: float, old: float | None) -> bool:
        """Whether to prefer `new`; a number that is none never wins."""
        if not isfinite(new):
            return False
        if old is None or not isfinite(old):
            return True
        return new > old if self.higher_is_better else new < old


class Shard(NamedTuple):
    """Which part of every batch this process takes."""

    rank: int = 0
    world: int = 1


WHOLE = Shard()


@dataclass(frozen=True)
class Loss:
    """What one batch says.

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
    """How good a model is, and how its solver did."""

    metrics: Mapping[str, float]
    solver: SolverRecord


class Picture(NamedTuple):
    """Something to look at in the report."""

    name: str  # of its file
    caption: str
    png: bytes


class Task(ABC):
    """Subclasses are frozen dataclasses whose fields are options; data is opened when needed."""

    score: ClassVar[Score]
    deq: DEQConfig

    @abstractmethod
    def build(self) -> nn.Module:
        """A freshly initialised model; draws from the global random generator."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Training batches in one pass through the data."""

    @abstractmethod
    def train_batch(self, step: int, seed: int, shard: Shard) -> Batch:
        """Batch `step` = 0, 1, ...: a function of its arguments alone, so a run can resume."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carry: Any) -> Loss:
        """The loss of a batch; `carry` is that of the step before, None at first."""

    @abstractmethod
    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        """Judge a model in evaluation mode; `thorough` asks for spectral radii too."""

    def begin(self, model: nn.Module) -> None:
        """Called once, when a run begins, e.g. to start from weights of an earlier one."""
        return

    def after_step(self, model: nn.Module) -> None:
        """Called after every update, e.g. to project weights."""
        return

    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        """Examples for the report."""
        return []

    def samples(self, batch: Batch) -> int:
        """How many examples a batch holds, for the speed shown."""
        return len(next(tensors(batch)))

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state_dict of the authors' release as one of ours."""
        raise ZooError(f"{type(self).__name__} has no released weights to convert")

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> Iterable[str]:
        """Apply the model to files; what it yields is printed at once, one line each."""
        raise ZooError(f"{type(self).__name__} has nothing to predict from files")

    def sampling(self) -> Any:
        """The options of `sample` at their defaults: a frozen dataclass."""
        raise ZooError(f"{type(self).__name__} has nothing to sample")

    def sample(
        self, model: nn.Module, options: Any, out: Path, device: torch.device
    ) -> Iterable[str]:
        """Generate from the model as `sampling` says; what it yields is printed at once."""
        raise ZooError(f"{type(self).__name__} has nothing to sample")


def generator(*key: object) -> torch.Generator:
    """A random generator that depends on `key` alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def batch_indices(
    n: int, size: int, step: int, seed: int, shard: Shard = WHOLE, *, drop_last: bool = False
) -> Tensor:
    """Which of `n` examples batch `step` holds: every epoch is a new permutation."""
    per_epoch = steps_in_epoch(n, size, drop_last)
    epoch, k = divmod(step, per_epoch)
    order = torch.randperm(n, generator=generator("epoch", seed, epoch))
    return order[k * size : (k + 1) * size][shard.rank :: shard.world]


def steps_in_epoch(n: int, size: int, drop_last: bool = False) -> int:
    """Batches of `size` that `n` examples make."""
    return max(1, n // size if drop_last else -(-n // size))
