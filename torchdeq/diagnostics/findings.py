"""Findings: what the doctor recognises, each with its evidence and its cure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Severity(IntEnum):
    """How much a finding matters."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


class Kind(Enum):
    """What the doctor can recognise; the value is a title for people."""

    RANDOM = "f is random between calls"
    STATEFUL = "f changes from call to call"
    BATCH_STATISTICS = "f uses batch statistics (BatchNorm in training mode)"
    COUPLED = "samples depend on each other"
    IGNORES_STATE = "f ignores its state"
    CUTS_GRAPH = "no gradient reaches the state through f"
    WRITES_IN_PLACE = "f writes into its input or an earlier output"
    STALE_NORM = "normalised weights are stale: reset_norm is missing"
    OVERFLOW = "f leaves the range of its numbers"
    LOW_PRECISION = "f computes in a lower precision than its state"
    TOLERANCE_BELOW_PRECISION = "the tolerance is below the precision of f"
    NO_FIXED_POINT = "no fixed point: f has a shift direction"
    NEARLY_SINGULAR = "I - J is nearly singular"
    NOT_CONTRACTING = "plain iteration does not converge: the spectral radius is above 1"
    SLOW_CONTRACTION = "plain iteration is slow: the spectral radius is close to 1"
    NON_NORMAL = "the Jacobian is far from normal: iterates grow before they shrink"
    UNSOLVED = "no solver reached the tolerance"
    BUDGET_TOO_SMALL = "the budget of evaluations is too small"
    SEVERAL_FIXED_POINTS = "the start decides which fixed point is found"
    INEXACT_GRADIENT = "the gradient is far from the exact one"
    ADJOINT_FAILS = "the backward solve misses its tolerance"
    CONTRACTION = "f contracts well"


@dataclass(frozen=True)
class Finding:
    """One result of an examination.

    Args:
        kind: what was recognised.
        severity: how much it matters.
        evidence: the measurement behind it.
        cure: what to do; "" for a healthy result.
        flags: the same as options of `get_deq` and the command line, e.g. `("--coupled true",)`.
    """

    kind: Kind
    severity: Severity
    evidence: str
    cure: str = ""
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        cure = f" {self.cure}" if self.cure else ""
        return f"{self.kind.value}: {self.evidence}.{cure}"
