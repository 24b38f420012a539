"""From an image as users have it to the noise that generates it, and files of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from deq_zoo.diffusion.adjoint import Work
from deq_zoo.diffusion.data import fit_image, scaled, to_bytes
from deq_zoo.diffusion.grid import as_png
from deq_zoo.diffusion.inversion import Inversion
from deq_zoo.diffusion.sampling import Trajectory
from deq_zoo.errors import ZooError
from deq_zoo.images.polarity import ground_of
from deq_zoo.output import unsettled
from deq_zoo.predictions import Failure, OutFolder, Prediction, predict_each


@dataclass(frozen=True)
class InvertedImage:
    """The noise that generates an image.

    Args:
        noise: (C, H, W), the initial noise.
        step_noise: (T, C, H, W), the noises of the steps; None for a deterministic chain.
        reconstruction: (C, H, W) bytes, the image that the chain makes of the noise.
        sse: squared error of the reconstruction summed over channels and pixels, of values in
            [-1, 1]; the paper calls it MSE.
        mse: mean squared error, of values in [-1, 1].
        psnr: peak signal-to-noise ratio in dB.
        steps: steps of Adam.
        work: rounds and evaluations of the network.
        negative: whether light and dark were exchanged before the model saw the image. The noise
            generates the negative, too.
    """

    noise: Tensor
    step_noise: Tensor | None
    reconstruction: Tensor
    sse: float
    mse: float
    psnr: float
    steps: int
    work: Work
    negative: bool = False

    @classmethod
    def of(
        cls,
        target: Tensor,
        inversion: Inversion,
        trajectory: Trajectory,
        noise: Tensor | None,
        negative: bool,
    ) -> InvertedImage:
        """Return the result for one target (1, C, H, W); raise if it is not finite.

        The errors are those of the trajectory that was solved from the noise, not of a state on the
        way of the search.
        """
        mse = (trajectory.image - target).double().square().mean()
        if not isfinite(float(mse)):
            raise ZooError("the image cannot be inverted: the chain of the model is not finite")
        return cls(
            noise=inversion.noise[0].cpu(),
            step_noise=None if noise is None else noise[0].cpu(),
            reconstruction=to_bytes(trajectory.image[0]).cpu(),
            sse=float(mse) * target.numel(),
            mse=float(mse),
            psnr=float(10 * (4 / mse.clamp_min(1e-30)).log10()),
            steps=len(inversion.history),
            work=Work(
                inversion.work.rounds + trajectory.work.rounds,
                inversion.work.evaluations + trajectory.work.evaluations,
            ),
            negative=negative,
        )


class Prepared(NamedTuple):
    """An image as a network takes it, (1, C, H, W) in [-1, 1], and whether it is a negative."""

    pixels: Tensor
    negative: bool


def prepare(image: Tensor, size: int, channels: int, facts: Mapping[str, Any]) -> Prepared:
    """Return an image in the form of the training images.

    Args:
        image: (3, H, W) bytes.
        size: side of the training images.
        channels: of the training images.
        facts: `box`, the part of an image that is used; `ground` of drawings, dark or light.
    """
    box = facts.get("box")
    picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
    pixels = fit_image(picture, size, channels, None if box is None else tuple(box), "the image")
    ground = ground_of(pixels) if "ground" in facts else None
    negative = ground is not None and ground != facts["ground"]
    return Prepared(scaled(255 - pixels if negative else pixels)[None], negative)


def predict_files(
    model: Any, paths: Sequence[Path], out: OutFolder
) -> Iterator[Prediction | Failure]:
    """Invert image files one by one; write the noise and the reconstruction of each."""
    out.check(name for path in paths for name in _names(path))
    return predict_each(paths, lambda path: _predict_file(model, path, out))


def _names(path: Path) -> tuple[str, str]:
    return f"{path.stem}-noise.safetensors", f"{path.stem}-reconstruction.png"


def _predict_file(model: Any, path: Path, out: OutFolder) -> Prediction:
    output = model.predict(path)
    result: InvertedImage = output.prediction
    tensors = {"noise": result.noise.contiguous()}
    if result.step_noise is not None:
        tensors["step_noise"] = result.step_noise.contiguous()
    noise, reconstruction = _names(path)
    files = (
        out.write(noise, save(tensors, _describe_chain(model))),
        out.write(reconstruction, as_png(result.reconstruction)),
    )
    notes = [f"{result.work.rounds} rounds, {result.work.evaluations} evaluations of the network"]
    if result.negative:
        notes.append("light and dark exchanged: the model was trained on a dark ground")
    if warning := unsettled(output.stats):
        notes.append(warning)
    text = (
        f"{path}: PSNR {result.psnr:.1f} dB, summed squared error {result.sse:.3g} after "
        f"{result.steps} steps of Adam ({'; '.join(notes)})"
    )
    data = {
        "sse": result.sse,
        "mse": result.mse,
        "psnr": result.psnr,
        "adam_steps": result.steps,
        "rounds": result.work.rounds,
        "evaluations": result.work.evaluations,
        "negative": result.negative,
        "settled": not warning,
    }
    return Prediction(str(path), text, data, files)


def _describe_chain(model: Any) -> dict[str, str]:
    """Return the chain that leads from a noise to its image, for the header of the file."""
    chain = model.plan.chain
    return {"steps": str(chain.steps), "spacing": chain.spacing, "eta": str(chain.eta)}
