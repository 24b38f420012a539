"""Predictions of graph networks in the user's words: classes and labels by name."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from deq_zoo.output import unsettled
from torchdeq import SolverStat, StopRule

_SHOWN = 3  # classes that a line of text names
_SETTLED = 1e-3  # the relative residual to accept from a solve without a tolerance


@dataclass(frozen=True)
class _Rows(ABC):
    unit: Literal["node", "graph"]
    names: tuple[str, ...]
    probabilities: Tensor

    @property
    @abstractmethod
    def labels(self) -> Sequence[Any]:
        """Return the prediction for each row."""

    @abstractmethod
    def summary(self) -> str:
        """Return the prediction in a few words."""

    @abstractmethod
    def cells(self) -> list[str]:
        """Return the prediction for each row as text."""

    @property
    def count(self) -> str:
        """Return the number of rows with its noun."""
        n = len(self.probabilities)
        return f"{n} {self.unit}{'' if n == 1 else 's'}"

    def to_data(self) -> dict[str, Any]:
        """Return the predictions, without probabilities, as JSON can hold them."""
        return {"unit": self.unit, "labels": [*map(_plain, self.labels)]}

    def to_csv(self) -> str:
        """Return a table: number, prediction and the probability of every class."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        head = "class" if isinstance(self, Classes) else "labels"
        table.writerow([self.unit, head, *(f"probability of {name}" for name in self.names)])
        for k, (cell, row) in enumerate(zip(self.cells(), self.probabilities, strict=True)):
            table.writerow([k, cell, *(f"{p:.6g}" for p in row.tolist())])
        return text.getvalue()


@dataclass(frozen=True)
class Classes(_Rows):
    """One class for every node of a graph, or for every graph.

    Args:
        unit: what a row belongs to, `node` or `graph`.
        names: of the classes, by column.
        probabilities: (rows, classes).
    """

    @property
    def labels(self) -> list[str]:
        """Return the likeliest class of each row."""
        return [self.names[k] for k in self.probabilities.argmax(1).tolist()]

    def summary(self) -> str:
        if len(self.probabilities) == 1:
            order = self.probabilities[0].argsort(descending=True).tolist()[:_SHOWN]
            chances = self.probabilities[0].tolist()
            return ", ".join(f"{self.names[k]} {100 * chances[k]:.1f} %" for k in order)
        counts = Counter(self.labels).most_common()
        named = [f"{n} of class {name}" for name, n in counts[:_SHOWN]]
        if len(counts) > _SHOWN:
            named.append(f"{sum(n for _, n in counts[_SHOWN:])} of other classes")
        sure = 100 * float(self.probabilities.amax(1).mean())
        return f"{self.count}: {', '.join(named)}; mean probability {sure:.1f} %"

    def cells(self) -> list[str]:
        return self.labels


@dataclass(frozen=True)
class LabelSets(_Rows):
    """Any number of labels for every node of a graph.

    Args:
        unit: what a row belongs to, `node`.
        names: of the labels, by column.
        probabilities: (rows, labels), each label on its own.
    """

    @property
    def labels(self) -> list[tuple[str, ...]]:
        """Return the labels of each row that are more likely than not."""
        return [
            tuple(name for name, given in zip(self.names, row, strict=True) if given)
            for row in (self.probabilities > 0.5).tolist()
        ]

    def summary(self) -> str:
        labels = self.labels
        counts = Counter(name for row in labels for name in row).most_common(_SHOWN)
        mean = sum(map(len, labels)) / max(1, len(labels))
        often = ", ".join(f"{name} ({n})" for name, n in counts)
        return f"{self.count} with {mean:.1f} labels on average" + (
            f"; most often {often}" if often else ""
        )

    def cells(self) -> list[str]:
        return [";".join(row) for row in self.labels]


def doubts(stats: Sequence[SolverStat], rule: StopRule) -> str:
    """Return a warning for people if the solve of a layer did not settle, else "".

    A solve without a tolerance spends its whole budget; its residual decides.

    Args:
        stats: of each layer.
        rule: the stop rule of the solves.
    """
    if not (rule.tol or rule.rtol or rule.atol):
        stats = [each for each in stats if not bool((each["rel_lowest"] <= _SETTLED).all())]
    return next((doubt for doubt in map(unsettled, stats) if doubt), "")


def _plain(label: str | tuple[str, ...]) -> str | list[str]:
    return label if isinstance(label, str) else list(label)
