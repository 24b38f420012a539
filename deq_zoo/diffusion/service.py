"""Inversion of images for a server: every image is a search with many solves."""

from __future__ import annotations

from typing import Any

from deq_zoo.diffusion.model import Denoiser
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values, describe_stats, png_text


class InvertedImages(Service[Denoiser]):
    """The noise from which the chain generates an image."""

    fields = (Field("image", "image", "the picture to invert"),)

    def answer(self, values: Values) -> dict[str, Any]:
        out = self.model.predict(values["image"])
        found = out.prediction
        return {
            "prediction": f"reconstruction with PSNR {found.psnr:.2f} dB",
            "psnr": found.psnr,
            "mse": found.mse,
            "steps": found.steps,
            "negative": found.negative,
            "noise": found.noise.tolist(),
            "reconstruction_png": png_text(found.reconstruction),
            **describe_stats(out.stats),
        }


def make_service(model: Model) -> InvertedImages:
    """Return the service of a diffusion model."""
    if not isinstance(model, Denoiser):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return InvertedImages(model)
