"""The pipeline for diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from deq_zoo.diffusion import make_unet
from deq_zoo.diffusion.package import diffusers
from tests.zoo.diffusion.smoke import SMALL
from torchdeq import ConvergenceWarning


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    torch.manual_seed(0)
    return make_unet(SMALL).eval()


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """Import the pipeline late: its base class brings half of diffusers with it."""
    from deq_zoo.diffusion import DEQDDIMPipeline

    return DEQDDIMPipeline


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_pipeline_gives_the_images_of_diffusers(unet: nn.Module, pipeline: Any, eta: float) -> None:
    options: Any = {"num_inference_steps": 8, "batch_size": 2, "eta": eta, "output_type": "np"}
    made = [
        kind(unet, diffusers().DDIMScheduler())(
            generator=torch.Generator().manual_seed(3), **options
        ).images
        for kind in (diffusers().DDIMPipeline, pipeline)
    ]
    assert float(np.abs(made[0] - made[1]).max()) < 1e-4


def test_pipeline_takes_a_single_step_with_eta(unet: nn.Module, pipeline: Any) -> None:
    pipe = pipeline(unet, diffusers().DDIMScheduler())
    assert pipe(num_inference_steps=1, eta=1.0, output_type="np").images.shape == (1, 8, 8, 1)


def test_pipeline_is_saved_and_loaded(unet: nn.Module, pipeline: Any, tmp_path: Path) -> None:
    diffusers().DDIMPipeline(unet, diffusers().DDPMScheduler()).save_pretrained(tmp_path / "a")
    first = pipeline.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    second = pipeline.from_pretrained(tmp_path / "b")

    def draw_images(pipe: Any) -> Tensor:
        (result,) = pipe(
            generator=torch.Generator().manual_seed(0), num_inference_steps=4, output_type="pt",
            return_dict=False, window=2,
        )  # fmt: skip
        return result

    assert torch.equal(draw_images(first), draw_images(second))
    assert isinstance(first(num_inference_steps=2).images[0], Image.Image)
    with pytest.raises(ValueError, match="output_type"):
        first(output_type="jpg")
    with pytest.warns(ConvergenceWarning):
        first(num_inference_steps=8, max_iter=2)
