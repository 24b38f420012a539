"""Diagnostics: why a fixed point is hard to solve, and how good its gradient is."""

from torchdeq.diagnostics.cost import CallCost, PeakMemory, call_cost, saved_bytes
from torchdeq.diagnostics.diagnosis import Diagnosis, Jacobian, Subject
from torchdeq.diagnostics.doctor import doctor
from torchdeq.diagnostics.findings import Finding, Kind, Severity
from torchdeq.diagnostics.gradients import GradientQuality, gradient_quality
from torchdeq.diagnostics.landscape import Landscape, landscape
from torchdeq.diagnostics.paths import (
    PathContraction,
    PathIndependence,
    contraction_along_path,
    path_independence,
)
from torchdeq.diagnostics.recommendation import Recommendation
from torchdeq.diagnostics.solves import FoundSolve, find_solves, recorded_solves
from torchdeq.diagnostics.spectrum import (
    NonNormality,
    SingularDirections,
    Spectrum,
    eigenvalues,
    non_normality,
    singular_directions,
)
from torchdeq.diagnostics.trials import BackwardTrial, SolverTrial

__all__ = [
    "BackwardTrial",
    "CallCost",
    "Diagnosis",
    "Finding",
    "FoundSolve",
    "GradientQuality",
    "Jacobian",
    "Kind",
    "Landscape",
    "NonNormality",
    "PathContraction",
    "PathIndependence",
    "PeakMemory",
    "Recommendation",
    "Severity",
    "SingularDirections",
    "SolverTrial",
    "Spectrum",
    "Subject",
    "call_cost",
    "contraction_along_path",
    "doctor",
    "eigenvalues",
    "find_solves",
    "gradient_quality",
    "landscape",
    "non_normality",
    "path_independence",
    "recorded_solves",
    "saved_bytes",
    "singular_directions",
]
