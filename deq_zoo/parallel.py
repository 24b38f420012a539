"""How the processes of a run hold its model: each the whole of it, or each a shard of every weight.

`Replicated` is one process, or several with DDP, which accelerate sets up. `Sharded`, in
`deq_zoo.sharding`, is FSDP2.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from deq_zoo.model import Model
from deq_zoo.task import Batch, Loss, Weights
from deq_zoo.weights import load_weights

if TYPE_CHECKING:
    from deq_zoo.preset import Preset
    from deq_zoo.processes import Processes


class Parallel(ABC):
    """A model and its optimiser, placed on the devices of all processes.

    Attributes:
        model: as the task has built it; its weights may be shards.
        module: what the gradients of the loss are computed for.
        optimizer: of the weights, as accelerate wraps it.
    """

    model: Model
    module: nn.Module
    optimizer: Any

    @abstractmethod
    def loss(self, batch: Batch, carry: Any) -> Loss:
        """Return the task's loss of a batch; see `Task.loss`."""

    @abstractmethod
    def after_step(self) -> None:
        """Call `Task.after_step`."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the whole state_dict, on the CPU; each process calls this, process 0 gets it."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimiser's whole state_dict; each process calls this, process 0 gets it."""

    @abstractmethod
    def restore(self, weights: Weights, optimizer: dict[str, Any], source: str) -> None:
        """Set weights and optimiser to whole state_dicts; raise `CheckpointError` if none fits."""

    @abstractmethod
    def loaded(self, weights: Weights, source: str) -> Model:
        """Return a whole model with some weights, for one process alone."""

    @abstractmethod
    def whole(self) -> Callable[[], Model]:
        """Return a function by which process 0 gets a whole model; each process calls this."""


class Replicated(Parallel):
    """A model of which every process holds the whole.

    Args:
        preset: task and optimiser.
        model: newly built.
        processes: of the run.
    """

    def __init__(self, preset: Preset, model: Model, processes: Processes) -> None:
        self._task, self._accelerator = preset.task, processes.accelerator
        optimizer = preset.optim.make_for(model)
        with warnings.catch_warnings():  # of an option that new versions of torch call otherwise
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self.module, self.optimizer = self._accelerator.prepare(model, optimizer)
        # Mixed precision is a block around the loss: accelerate's wrapper would rebuild what a
        # model returns, and lose the counts of its statistics.
        bare = self._accelerator.unwrap_model(self.module, keep_fp32_wrapper=False)
        self.model = cast(Model, bare)

    def loss(self, batch: Batch, carry: Any) -> Loss:
        return self._task.loss(self.module, batch, carry)

    def after_step(self) -> None:
        self._task.after_step(self.model)

    def weights(self) -> dict[str, Tensor]:
        weights = self._accelerator.get_state_dict(self.module)
        return {key: t.detach().to("cpu", copy=True) for key, t in weights.items()}

    def optimizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.optimizer.state_dict()
        return state

    def restore(self, weights: Weights, optimizer: dict[str, Any], source: str) -> None:
        load_weights(self.model, weights, source)
        self.optimizer.optimizer.load_state_dict(optimizer)

    def loaded(self, weights: Weights, source: str) -> Model:
        """Return the model itself, which has the weights from now on."""
        load_weights(self.model, weights, source)
        return self.model

    def whole(self) -> Callable[[], Model]:
        return lambda: self.model
