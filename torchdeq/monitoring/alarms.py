"""Alarms: what goes wrong in training before the loss shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchdeq.monitoring.records import Record

_RISE = 10.0  # factor above the best record so far at which a residual counts as rising
_FAILED = 0.1  # share of samples that may fail


class AlarmKind(Enum):
    """What an alarm is about; the value is a sentence."""

    RESIDUAL_RISING = "the residual of the forward solve has grown tenfold since its best time"
    BUDGET_OUTGROWN = "most samples used to converge, and now spend the budget"
    NONFINITE = "a solve returned NaN or infinity"
    ADJOINT_FAILING = "the backward solve misses its tolerance: gradients are inexact"


@dataclass(frozen=True)
class Alarm:
    """One alarm.

    Args:
        kind: what it is about.
        record: the record that set it off.
    """

    kind: AlarmKind
    record: Record

    def __str__(self) -> str:
        r = self.record
        statuses = ", ".join(f"{name} {count}" for name, count in r.statuses.items())
        unit = "evaluations" if r.side == "forward" else "products"
        return (
            f"{r.layer or 'the DEQ'}, step {r.step}: {self.kind.value} (median residual "
            f"{r.residual:.1e}, {r.nfe:.0f} {unit}; {statuses})"
        )


class Bells:
    """The alarms of one layer; each kind rings once."""

    def __init__(self) -> None:
        self._rung: set[AlarmKind] = set()
        self._best = float("inf")  # residual
        self._least_failed = 1.0

    def ring(self, record: Record, has_goal: bool = True) -> list[Alarm]:
        """Return the alarms that a record sets off for the first time.

        Args:
            record: of a layer.
            has_goal: whether its adjoint has a tolerance; one of a fixed number of steps misses
                none.
        """
        if record.side == "forward":
            kinds = self._forward(record)
        else:
            kinds = self._backward(record, has_goal)
        new = [kind for kind in kinds if kind not in self._rung]
        self._rung.update(new)
        return [Alarm(kind, record) for kind in new]

    def _backward(self, record: Record, has_goal: bool) -> list[AlarmKind]:
        kinds = [AlarmKind.NONFINITE] if record.statuses.get("NONFINITE") else []
        if has_goal and record.failed > _FAILED:
            kinds.append(AlarmKind.ADJOINT_FAILING)
        return kinds

    def _forward(self, record: Record) -> list[AlarmKind]:
        kinds = []
        if record.statuses.get("NONFINITE"):
            kinds.append(AlarmKind.NONFINITE)
        if record.residual > _RISE * self._best and record.failed > _FAILED:
            kinds.append(AlarmKind.RESIDUAL_RISING)
        if record.failed > 0.5 and self._least_failed <= _FAILED:
            kinds.append(AlarmKind.BUDGET_OUTGROWN)
        self._best = min(self._best, record.residual)
        self._least_failed = min(self._least_failed, record.failed)
        return kinds
