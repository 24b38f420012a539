"""Samples and inversions for the report, with a bound on the work for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.data import Images, to_bytes
from deq_zoo.diffusion.grid import GAP, montage
from deq_zoo.diffusion.inversion import Inversion
from deq_zoo.diffusion.plan import ChainPlan, draw_noise, step_noise
from deq_zoo.diffusion.sampling import Trajectory
from deq_zoo.drawing import to_png
from deq_zoo.task import Picture

_SEED = 1  # of the noise that is shown
_ROUNDS = (1, 2, 3, 4, 6, 8)
_NOISE_RANGE = 3  # standard deviations of noise that are shown as black and white


class _Bounds(NamedTuple):
    """The most that the pictures of a report show.

    Args:
        samples: images from noise.
        chain: steps of the chain.
        rounds: samples whose way to the solution is shown.
        inverted: inverted images.
        adam: steps of Adam.
    """

    samples: int
    chain: int
    rounds: int
    inverted: int
    adam: int


_LARGE = 5_000_000  # parameters of a network that takes a tenth of a second and more on a CPU
_FEW = _Bounds(samples=4, chain=10, rounds=2, inverted=1, adam=5)
_MANY = _Bounds(samples=16, chain=50, rounds=4, inverted=8, adam=20)


def draw_pictures(model: Any, plan: ChainPlan, images: Images) -> list[Picture]:
    """Return samples, their way to the solution, and inversions of test images.

    A large network gets few and short chains: its report takes at most 2,000 evaluations.

    Args:
        model: a denoiser.
        plan: its chain, with solver and inversion.
        images: test images, in random order.
    """
    large = sum(p.numel() for p in model.parameters()) > _LARGE
    bounds = _FEW if large else _MANY
    plan = plan.limited(bounds.chain, bounds.adam)
    chain = plan.make_chain(model)
    shape = (bounds.samples, model.config.channels, model.config.size, model.config.size)
    x, noise = draw_noise(chain, shape, _SEED, model)
    with torch.no_grad():
        exact, trajectory = chain.sequential(x, noise), plan.solve(chain, x, noise)
    few = slice(bounds.rounds)
    seen = _iterate(chain, x[few], None if noise is None else noise[few])
    pictures = [_draw_samples(exact, trajectory), _draw_rounds(seen, exact[few], len(chain))]
    n = min(plan.inversion.images, bounds.inverted, len(images))
    if n:
        targets = model.place(images.take(torch.arange(n)))
        inversion = plan.invert(chain, targets, step_noise(chain, targets))
        pictures.append(_draw_inversions(targets, inversion, len(chain)))
    return pictures


@torch.no_grad()
def _iterate(chain: ParallelChain, x: Tensor, noise: Tensor | None) -> dict[int, Tensor]:
    """Return the last state after some rounds of plain iteration, which needs at most T."""
    shown = {min(k, len(chain)) for k in _ROUNDS}
    Z, seen = x[:, None].expand(-1, len(chain), -1, -1, -1), dict[int, Tensor]()
    for k in range(1, max(shown) + 1):
        Z = chain(Z, x, noise)
        if k in shown:
            seen[k] = Z[:, -1]
    return seen


def _draw_samples(exact: Tensor, trajectory: Trajectory) -> Picture:
    images, work, steps = trajectory.image, trajectory.work, trajectory.states.shape[1]
    half = (len(exact) + 1) // 2
    rows = [exact[:half], images[:half], exact[half:], images[half:]]
    largest = float((images - exact).abs().max())
    caption = (
        f"Samples from {len(exact)} random noises (seed {_SEED}, none left out): each chain of "
        f"{steps} steps run step by step, and solved as one equilibrium in {work.rounds} rounds "
        f"with {work.evaluations} evaluations of the network. The largest difference of a pixel "
        f"is {largest:.1e}, on a scale from -1 (black) to 1 (white)."
    )
    labels = [
        f"{how}, noise {first}-{last}"
        for first, last in ((1, half), (half + 1, len(exact)))
        for how in ("step by step", "equilibrium")
    ]
    figure = _table(rows, labels, "", [""] * half)
    return Picture("samples", caption, to_png(figure))


def _draw_rounds(seen: dict[int, Tensor], exact: Tensor, steps: int) -> Picture:
    pages = torch.stack([*seen.values(), exact], dim=1)  # (n, rounds + 1, C, H, W)
    caption = (
        f"The last state of the first {len(exact)} of these chains, of {steps} steps, after some "
        "rounds of plain iteration from copies of the noise; the last column is the chain run step "
        "by step."
    )
    labels = [f"noise {k + 1}" for k in range(len(pages))]
    figure = _table(list(pages), labels, "rounds of plain iteration", [*seen, "step by step"])
    return Picture("rounds", caption, to_png(figure))


def _draw_inversions(targets: Tensor, inversion: Inversion, steps: int) -> Picture:
    rows = [targets, inversion.images, inversion.noise / _NOISE_RANGE]
    psnr = inversion.psnr
    caption = (
        f"Inversion of {len(targets)} test images drawn at random: the image, what a chain of "
        f"{steps} steps makes of the best noise, and that noise (black is -{_NOISE_RANGE}, white "
        f"{_NOISE_RANGE} standard deviations). After {len(inversion.history)} steps of Adam the "
        f"PSNR is {float(psnr.mean()):.1f} dB on average, {float(psnr.min()):.1f} to "
        f"{float(psnr.max()):.1f} dB; the mean summed squared error is "
        f"{float(inversion.sse.mean()):.3g}."
    )
    labels = ["image", "reconstruction", "noise"]
    figure = _table(rows, labels, "PSNR, dB", [f"{value:.1f}" for value in psnr.tolist()])
    return Picture("inversions", caption, to_png(figure))


def _table(
    rows: Sequence[Tensor], labels: Sequence[str], xlabel: str, columns: Sequence[object]
) -> Figure:
    """Return rows of images with names of rows and columns, as one image: many axes are slow."""
    height, width = rows[0].shape[-2:]
    page = montage(torch.cat([_padded(row, len(columns)) for row in rows]).cpu(), len(columns))
    figure = Figure(figsize=(0.9 * len(columns) + 1.2, 0.9 * len(labels) + 0.4), layout="tight")
    axes = figure.add_subplot()
    shown = to_bytes(page).permute(1, 2, 0).numpy()
    axes.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks(_middles(width, len(columns)), [str(name) for name in columns], fontsize=9)
    axes.set_yticks(_middles(height, len(labels)), labels, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    return figure


def _middles(side: int, n: int) -> list[float]:
    """Return the coordinates of the middles of `n` images in a montage."""
    return [k * (side + GAP) + (side - 1) / 2 for k in range(n)]


def _padded(row: Tensor, columns: int) -> Tensor:
    """Return a row of images with white ones at its end."""
    return torch.cat((row, row.new_ones(columns - len(row), *row.shape[1:])))
