"""What a family exports: a module of tensors, an example of its inputs, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class NoOptions:
    """The options of an export that has none."""


@dataclass(frozen=True)
class Exportable:
    """A model as other programs call it.

    Args:
        module: takes and returns tensors alone: `forward(*example)` returns a dict of them.
        example: inputs by name, in the order of `forward`; the batch of an open size has 2 rows.
        meanings: a sentence about each input and output, by name.
        before: how to make the inputs, in sentences.
        after: how to read the outputs, in sentences.
        facts: numbers and names that this needs, as JSON has them.
        open_batch: whether the first dimension of the inputs may have any size.
        solves: whether the module has an equilibrium.
    """

    module: nn.Module
    example: Mapping[str, Tensor]
    meanings: Mapping[str, str]
    before: str
    after: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    open_batch: bool = True
    solves: bool = True
