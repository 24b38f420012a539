"""The base of the zoo's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deq_zoo.errors import ZooError
from deq_zoo.output import Output

if TYPE_CHECKING:
    from deq_zoo.preset import Preset


class Model(nn.Module):
    """A network with an equilibrium inside.

    `forward(x, z0=None, **call)` returns an `Output`; `z0` is a state to start from, `**call` are
    options of this call of the DEQ, e.g. `f_max_iter=30`.

    Attributes:
        facts: what the checkpoint says about the data the model was trained with, e.g. names of
            classes; see `Task.facts`.
        preset: the preset it was trained with, if it comes from a run or a checkpoint.
    """

    facts: Mapping[str, Any]
    preset: Preset | None

    def __init__(self) -> None:
        super().__init__()
        self.facts = {}
        self.preset = None

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def predict(self, x: Any, z0: Any = None, **call: Any) -> Output[Any, Any]:
        """Return the output for one input as users have it, e.g. the path of an image.

        Dropout is off and there is no graph; the model is left in the mode it was in. The single
        `prediction` of the output is in units of the user: names of classes, pixels, text.

        Args:
            x: the input; each family says which kinds it takes.
            z0: a state to start from, e.g. `state` of an earlier output.
            **call: options of this call of the DEQ, e.g. `f_max_iter=30`.
        """
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return self._predict(x, z0, **call)
        finally:
            self.train(training)

    def _predict(self, x: Any, z0: Any, **call: Any) -> Output[Any, Any]:
        """Implement `predict`, in evaluation mode and without a graph."""
        raise ZooError(f"{type(self).__name__} has nothing to predict")
