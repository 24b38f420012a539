"""The steps of a sampling chain as coefficients of a linear recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchdeq.registry import suggest

Clip = Callable[[Tensor], Tensor]  # of predicted images, (N, C, H, W)
SPACINGS = ("uniform", "quad")
_KINDS = ("epsilon", "sample", "v_prediction")
_VARIANCES = ("fixed_small", "fixed_small_log", "fixed_large")


@dataclass(frozen=True)
class Steps:
    r"""The coefficients of $T$ steps, in float64.

    With $m_k$ the network's output at $z_k$, $\xi_k$ unit noise and `clip` the scheduler's clipping
    of the image that it predicts,

    $$\hat x_k = p_k z_k + q_k m_k, \qquad
    z_{k+1} = a_k z_k + b_k m_k + c_k \xi_k + A_k [\mathrm{clip}(\hat x_k) - \hat x_k]$$

    Args:
        t: (T,) timesteps in the order of execution, whole numbers.
        ab: product of alphas at each.
        a: of the state.
        b: of the network's output.
        c: of the noise.
        p: of the state, in the predicted image.
        q: of the output, in the predicted image.
        A: of the predicted image.
        clip: None if the scheduler does not clip the predicted image.
    """

    t: Tensor
    ab: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    p: Tensor
    q: Tensor
    A: Tensor
    clip: Clip | None = None

    def __len__(self) -> int:
        return len(self.t)

    @property
    def stochastic(self) -> bool:
        """Return whether the steps add noise."""
        return bool((self.c > 0).any())

    @classmethod
    def of(cls, scheduler: Any, timesteps: int | Sequence[int], eta: float = 0.0) -> Steps:
        """Return the steps of a `DDIMScheduler` or `DDPMScheduler` of diffusers.

        Args:
            scheduler: it is read, not changed.
            timesteps: how many, spaced as the scheduler does it; or which, in falling order. A
                repeated timestep is taken once: its step would do nothing.
            eta: of DDIM: 0 is deterministic, 1 has the variance of DDPM.
        """
        kind = _kind(scheduler)
        if not 0 <= eta < float("inf"):
            raise ValueError(f"eta must be a number >= 0, got {eta}")
        if kind == "DDPMScheduler" and eta:
            raise ValueError("eta is DDIM's: a DDPMScheduler has a variance of its own, drop eta")
        t, reached = _levels(scheduler, kind, timesteps)
        ab = scheduler.alphas_cumprod.double().cpu()[t]
        (p, q), (u, v) = _prediction(scheduler.config.prediction_type, ab)
        if kind == "DDIMScheduler":
            A, C, E, c = _ddim(ab, reached, eta)
        else:
            A, C, E, c = _ddpm(ab, reached, t, scheduler.config.variance_type)
        return cls(t, ab, A * p + C + E * u, A * q + E * v, c, p, q, A, _clip(scheduler))


def spaced(spacing: str, n: int, train_steps: int = 1000) -> list[int]:
    """Return the timesteps of the paper's experiments, falling, each once.

    `uniform` is every `train_steps // n`-th. `quad` is dense near the image and starts at 0.8
    of the training's steps; a long `quad` chain has fewer than `n` distinct timesteps.
    """
    if not 1 <= n <= train_steps:
        raise ValueError(f"a chain has 1 to {train_steps} steps, got {n}")
    if spacing == "uniform":
        return [k * (train_steps // n) for k in reversed(range(n))]
    if spacing != "quad":
        raise ValueError(f"unknown spacing {spacing!r}{suggest(spacing, SPACINGS)}")
    # With the rounding of numpy, as in the paper's code: torch's roots square to other integers.
    squares = np.linspace(0, np.sqrt(0.8 * train_steps), n) ** 2
    return sorted(set(squares.astype(int).tolist()), reverse=True)


def _kind(scheduler: Any) -> str:
    """Return the name of the scheduler's class; comparing names needs no import of diffusers."""
    for cls in type(scheduler).__mro__:
        if cls.__name__ in ("DDIMScheduler", "DDPMScheduler"):
            return cls.__name__
    raise TypeError(
        "scheduler must be a DDIMScheduler or DDPMScheduler of diffusers, got "
        f"{type(scheduler).__name__}; DDIMScheduler.from_config(scheduler.config) often fits"
    )


def _levels(scheduler: Any, kind: str, timesteps: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return timesteps, and the product of alphas that each step reaches."""
    N = scheduler.config.num_train_timesteps
    ab = scheduler.alphas_cumprod.double().cpu()
    end = ab.new_ones(())
    if kind == "DDIMScheduler":
        end = torch.as_tensor(scheduler.final_alpha_cumprod).double().cpu()
    if isinstance(timesteps, Integral):
        timesteps = int(timesteps)
        if not 1 <= timesteps <= N:
            raise ValueError(f"the scheduler allows 1 to {N} steps, got {timesteps}")
        own = type(scheduler).from_config(scheduler.config)
        own.set_timesteps(timesteps)
        t = own.timesteps.long().cpu()
        # DDIM's step goes down by N // T whatever the next timestep of the list is.
        to = t - N // timesteps if kind == "DDIMScheduler" else _next(t)
    else:
        given = _whole(timesteps)
        if not len(given) or not bool((given.diff() <= 0).all()):
            raise ValueError(f"timesteps must be falling, at least one of them, got {timesteps}")
        t = given.unique().flip(0)
        to = _next(t)
    if int(t.min()) < 0 or int(t.max()) >= N:
        raise ValueError(f"timesteps lie between 0 and {N - 1}, got {int(t.min())}, {int(t.max())}")
    return t, torch.where(to >= 0, ab[to.clamp_min(0)], end)


def _whole(timesteps: Any) -> Tensor:
    try:
        return torch.tensor([index(t) for t in timesteps], dtype=torch.long)
    except TypeError:
        raise TypeError(
            f"timesteps must be a number of steps, or a list, in whole numbers: got {timesteps!r}"
        ) from None


def _next(t: Tensor) -> Tensor:
    return torch.cat((t[1:], t.new_tensor([-1])))


def _prediction(kind: str, ab: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the coefficients of state and output in the predicted image, and in the noise."""
    s, n, one, zero = ab.sqrt(), (1 - ab).sqrt(), torch.ones_like(ab), torch.zeros_like(ab)
    if kind == "epsilon":
        return (1 / s, -n / s), (zero, one)
    if kind == "sample":
        return (zero, one), (1 / n, -s / n)
    if kind == "v_prediction":
        return (s, -n), (n, s)
    raise ValueError(f"unknown prediction type {kind!r}{suggest(kind, _KINDS)}")


Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # of predicted image, state, predicted noise, noise


def _ddim(ab: Tensor, to: Tensor, eta: float) -> Weights:
    variance = (1 - to) / (1 - ab) * (1 - ab / to)
    sigma = eta * variance.clamp_min(0).sqrt()
    left = 1 - to - sigma**2
    if bool((left < -1e-12).any()):
        raise ValueError(
            f"eta {eta} asks for more noise than a step has room for: choose at most 1"
        )
    return to.sqrt(), torch.zeros_like(ab), left.clamp_min(0).sqrt(), sigma


def _ddpm(ab: Tensor, to: Tensor, t: Tensor, variance: str) -> Weights:
    if variance not in _VARIANCES:
        raise ValueError(
            f"the scheduler's variance must be one of {', '.join(_VARIANCES)}, which have a fixed "
            f"size; got {variance!r}"
        )
    al = ab / to
    small = ((1 - to) / (1 - ab) * (1 - al)).clamp_min(1e-20)
    sigma = ((1 - al) if variance == "fixed_large" else small).sqrt()
    state = al.sqrt() * (1 - to) / (1 - ab)
    return (
        to.sqrt() * (1 - al) / (1 - ab),
        state,
        torch.zeros_like(ab),
        torch.where(t > 0, sigma, 0.0),
    )


def _clip(scheduler: Any) -> Clip | None:
    config = scheduler.config
    if config.thresholding:
        threshold: Clip = scheduler._threshold_sample
        return threshold
    if not config.clip_sample:
        return None
    return _Clamp(float(config.clip_sample_range))


@dataclass(frozen=True)
class _Clamp:
    """Clipping to an interval around 0; unlike a lambda it can be copied and pickled."""

    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp(-self.limit, self.limit)
