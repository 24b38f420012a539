"""The result of the doctor: what was examined, what was found, what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.cost import CallCost
from torchdeq.diagnostics.findings import Finding, Kind, Severity
from torchdeq.diagnostics.paths import PathIndependence
from torchdeq.diagnostics.recommendation import Recommendation
from torchdeq.diagnostics.rendering import as_data, as_text, show
from torchdeq.diagnostics.spectrum import NonNormality, SingularDirections, Spectrum
from torchdeq.diagnostics.trials import BackwardTrial, SolverTrial
from torchdeq.stopping import StopRule


@dataclass(frozen=True)
class Subject:
    """The map that was examined.

    Args:
        batch: samples.
        size: numbers per sample.
        dtype: of the state.
        device: of the state.
        eps: the precision in which `f` computes.
        coupled: whether the batch was treated as one system.
        tolerance: of the trials, in words.
        budget: evaluations of a trial.
    """

    batch: int
    size: int
    dtype: str
    device: str
    eps: float
    coupled: bool
    tolerance: str
    budget: int

    @classmethod
    def of(cls, case: Case, stop: StopRule) -> Subject:
        """Return the subject of a case whose trials used a stop rule."""
        packing = case.packing
        dtype = str(packing.dtype).removeprefix("torch.")
        if stop.rtol is not None and stop.atol is not None:
            tolerance = f"{stop.atol:g} + {stop.rtol:g} |f(z)|"
        else:
            norm = ", root mean square" if stop.norm == "rms" else ""
            tolerance = f"{stop.tol:g} {'relative' if stop.mode == 'rel' else 'absolute'}{norm}"
        return cls(
            packing.batch, sum(packing.sizes), dtype, str(packing.device), case.eps, case.coupled,
            tolerance, stop.max_iter,
        )  # fmt: skip


@dataclass(frozen=True)
class Jacobian:
    """The Jacobian at the best state that a solver found.

    Args:
        spectrum: its leading eigenvalues.
        directions: the smallest singular values of `I - J`; None if they were not computed.
        normality: its norm and transient growth; None if they were not computed.
        shift: how far `f(z + t v)` is from `f(z) + t v` along the singular direction `v`, relative
            to `t`, for `t` as long as the state; the largest over samples. None if not computed.
        distance: norms of the state between it and a fixed point along `v`, by extrapolation.
        noise: what rounding may add to or take from a singular value.
    """

    spectrum: Spectrum
    directions: SingularDirections | None = None
    normality: NonNormality | None = None
    shift: float | None = None
    distance: float = 0.0
    noise: float = 0.0

    @property
    def trusted(self) -> bool:
        """Return whether the leading eigenvalue of every sample is accurate."""
        return bool(self.spectrum.converged[:, 0].all())

    @property
    def radius(self) -> float:
        """Return the largest spectral radius of a sample."""
        return float(self.spectrum.radius.nan_to_num(nan=float("inf")).max())


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found; `print` shows it as text.

    Args:
        subject: the map.
        findings: most severe first.
        cost: seconds of `f` and of products with its Jacobian.
        solvers: a trial of each solver, the caller's first.
        backwards: a trial of each backward pass, the caller's first.
        jacobian: eigenvalues and singular directions at the best state.
        paths: solutions from other starts.
        recommendation: in words and as flags.
        seconds: that the examination took.
        skipped: what there was no time for, or what `f` does not allow, with reasons.
    """

    subject: Subject
    findings: tuple[Finding, ...]
    cost: CallCost | None
    solvers: tuple[SolverTrial, ...]
    backwards: tuple[BackwardTrial, ...]
    jacobian: Jacobian | None
    paths: PathIndependence | None = field(repr=False)
    recommendation: Recommendation
    seconds: float
    skipped: tuple[str, ...]

    @property
    def kinds(self) -> frozenset[Kind]:
        """Return the kinds of all findings."""
        return frozenset(finding.kind for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """Return whether nothing worse than a note was found."""
        return all(finding.severity == Severity.NOTE for finding in self.findings)

    def __str__(self) -> str:
        return as_text(self)

    def show(self) -> None:
        """Print the diagnosis: with colours and rules if `rich` is installed, or as plain text."""
        show(self)

    def as_data(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, for JSON."""
        return as_data(self)
