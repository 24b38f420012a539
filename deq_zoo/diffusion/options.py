"""Options of chains, inversion and sampling, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from deq_zoo.checks import check_fields


@dataclass(frozen=True)
class ChainConfig:
    """The chain that is solved.

    Args:
        steps: how many.
        spacing: of timesteps: uniform, or quad, denser towards the image.
        eta: noise: 0 for DDIM, 1 for as much as DDPM.
        scope: what a solver takes for a sample: a trajectory or a timestep.
        window: states worked on at once; 0 for all.
        chunk: the largest batch the network gets.
    """

    steps: int = 50
    spacing: Literal["uniform", "quad"] = "uniform"
    eta: float = 0.0
    scope: Literal["trajectory", "timestep"] = "trajectory"
    window: int = 0
    chunk: int = 64

    def __post_init__(self) -> None:
        check_fields(self, 1, "steps", "chunk", finite=True)
        check_fields(self, 0, "window", finite=True)
        _check_eta(self.eta)


@dataclass(frozen=True)
class InversionConfig:
    """How images are inverted; solvers, `ift`, `grad` and `tau` are the equilibrium's.

    Args:
        images: held-out images to invert when the model is judged.
        steps: of Adam, for images of one's own.
        judged_steps: the most of them when the model is judged; as many as `steps` give numbers
            to compare with the paper's.
        lr: its rate.
        warm: whether each solve starts from the states of the one before.
        window: steps of the exact adjoint solved at once; 1 is the reverse sweep.
        enough: summed squared error at which an image is done.
    """

    images: int = 4
    steps: int = 20
    judged_steps: int = 20
    lr: float = 0.005
    warm: bool = True
    window: int = 1
    enough: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, 1, "steps", "judged_steps", finite=True)
        check_fields(self, 0, "images", "window", "enough", finite=True)
        if not 0 < self.lr < inf:
            raise ValueError(f"lr must be a number above 0, got {self.lr}")


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Args:
        n: images.
        steps: of the chain.
        eta: noise: 0 for DDIM, 1 for as much as DDPM.
        solver: by its registered name; `sequential` runs the chain step by step.
        tol: relative residual.
        window: states worked on at once; 0 for all.
        seed: of the noise.
    """

    n: int = 16
    steps: int = 50
    eta: float = 0.0
    solver: str = "anderson"
    tol: float = 1e-4
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 1, "n", "steps", finite=True)
        check_fields(self, 0, "tol", "window", finite=True)
        _check_eta(self.eta)


def _check_eta(eta: float) -> None:
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie between 0, DDIM, and 1, DDPM, got {eta}")
