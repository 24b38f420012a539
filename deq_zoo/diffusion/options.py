"""Options of chains, inversion and sampling, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from deq_zoo.checks import check_fields


@dataclass(frozen=True)
class ChainConfig:
    """The chain of sampling steps.

    Args:
        steps: the number of steps.
        spacing: of timesteps: uniform, or quad, denser towards the image.
        eta: noise: 0 for DDIM, 1 for as much as DDPM.
        scope: what a solver takes for a sample: a trajectory or a timestep.
        window: states solved at once when images are sampled; 0 for all.
        chunk: the largest batch that the network gets.
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
    """The inversion of images; its solver and gradient are options of the DEQ.

    Args:
        images: images of a split that a thorough evaluation inverts.
        steps: of Adam, in prediction.
        eval_steps: at most so many steps of Adam in evaluations; set it to `steps` for numbers to
            compare with the paper's.
        lr: the learning rate of Adam.
        keep_states: whether each solve starts from the states of the solve before it.
        window: steps of the exact adjoint solved at once; 1 is the reverse sweep, 0 is all.
        enough: summed squared error at which an image is finished.
    """

    former_fields: ClassVar[Mapping[str, str | None]] = {
        "judged_steps": "eval_steps",
        "warm": "keep_states",
    }

    images: int = 4
    steps: int = 20
    eval_steps: int = 20
    lr: float = 0.005
    keep_states: bool = True
    window: int = 1
    enough: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, 1, "steps", "eval_steps", finite=True)
        check_fields(self, 0, "images", "window", "enough", finite=True)
        if not 0 < self.lr < inf:
            raise ValueError(f"lr must be a number above 0, got {self.lr}")


@dataclass(frozen=True)
class Sampling:
    """The options of the command `sample`.

    Args:
        n: the number of images.
        steps: of the chain.
        eta: noise: 0 for DDIM, 1 for as much as DDPM.
        solver: by its registered name; `sequential` runs the chain step by step.
        tol: relative residual at which an image has converged.
        window: states solved at once; 0 for all.
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
