"""Samples and inversions to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from deq_zoo.diffusion.adjoint import Work
from deq_zoo.diffusion.data import to_bytes
from deq_zoo.diffusion.inversion import Inversion
from deq_zoo.drawing import to_png
from deq_zoo.task import Picture

_GAP = 2  # pixels between images


def chains(exact: Tensor, images: Tensor, steps: int, work: Work) -> Picture:
    """Sequential samples above those of the equilibrium."""
    half = (len(exact) + 1) // 2
    rows = [exact[:half], images[:half], exact[half:], images[half:]]
    labels = ["sequential", "equilibrium"] * 2
    most = float((images - exact).abs().max())
    caption = (
        f"The same noise through {steps} steps one after the other, and as one equilibrium: "
        f"{work.rounds} rounds, {steps / work.rounds:.1f} times fewer, with {work.evaluations} "
        f"evaluations for {len(exact)} images; largest difference of a pixel {most:.1e} of 2."
    )
    return Picture("samples", caption, to_png(_table(rows, labels)))


def progress(rounds: Sequence[int], seen: Tensor) -> Picture:
    """(R, n, C, H, W): what the images look like after some rounds of plain iteration."""
    told = ", ".join(str(k) for k in rounds)
    caption = f"Images as they appear, the last state after {told} rounds of plain iteration."
    rows = seen.transpose(0, 1)
    labels = [f"image {k + 1}" for k in range(len(rows))]
    return Picture("rounds", caption, to_png(_table(rows, labels)))


def inversions(targets: Tensor, found: Inversion) -> Picture:
    """Held-out images, their reconstructions and the noises found."""
    rows = [targets, found.images.cpu(), found.noise.cpu() / 3]
    caption = (
        "Held-out images, what the chain makes of the noise found for them, and that noise: "
        f"mean PSNR {float(found.psnr.mean()):.1f} dB, mean summed squared error "
        f"{float(found.sse.mean()):.3g}, {len(found.history)} steps of Adam."
    )
    return Picture("inversions", caption, to_png(_table(rows, ["image", "found", "noise"])))


def _table(rows: Sequence[Tensor] | Tensor, labels: Sequence[str]) -> Figure:
    """Rows of images with a name each; one picture, as many axes take long to lay out."""
    columns, side = max(len(row) for row in rows), rows[0].shape[-2] + _GAP
    page = montage(torch.cat([_filled(row, columns) for row in rows]), columns)
    figure = Figure(figsize=(0.9 * columns + 1.2, 0.9 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    shown = to_bytes(page).permute(1, 2, 0).numpy()
    axes.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([side * (k + 0.5) for k in range(len(labels))], labels, fontsize=9)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    return figure


def _filled(row: Tensor, columns: int) -> Tensor:
    """White where a row has no more images."""
    return torch.cat((row, row.new_ones(columns - len(row), *row.shape[1:])))


def montage(images: Tensor, columns: int) -> Tensor:
    """(N, C, H, W) side by side, white between them: (C, height, width)."""
    columns = max(1, min(columns, len(images)))
    rows = max(1, -(-len(images) // columns))
    C, H, W = images.shape[1:]
    page = images.new_ones(C, rows * (H + _GAP) - _GAP, columns * (W + _GAP) - _GAP)
    for k, image in enumerate(images):
        top, left = k // columns * (H + _GAP), k % columns * (W + _GAP)
        page[:, top : top + H, left : left + W] = image
    return page


def write_image(path: Path, image: Tensor) -> None:
    """(C, H, W) in [-1, 1] as a PNG."""
    array = to_bytes(image.cpu()).permute(1, 2, 0).numpy()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(path)


def write_grid(path: Path, images: Tensor, columns: int = 8) -> None:
    """(N, C, H, W) in [-1, 1] as one PNG."""
    write_image(path, montage(images, columns))
