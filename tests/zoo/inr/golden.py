"""The golden cases: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deq_zoo.inr import DEQField, FieldConfig, Signal
from deq_zoo.inr.convert import from_authors
from tests.golden import load_facts, load_tensors, select

MODELS = (
    *("siren_image_1L", "siren_image_4L", "fourier_image_1L", "fourier_image_4L"),
    *("gabor_image_1L", "gabor_image_4L", "siren_video_1L", "siren_audio_1L"),
)
TIGHT: dict[str, Any] = {
    "f_max_iter": 400,
    "f_tol": 1e-12,
    "grad": 3,
    "on_failure": "ignore",
}


def read_config(name: str) -> tuple[int, int, FieldConfig]:
    """Return the dimensions of points and values, and the field's configuration."""
    config = load_facts("deq-inr")["files"][name]["config"]
    field = FieldConfig(
        filter=config["filter"],
        width=config["hidden"],
        layers=config["n_layers"],
        input_scale=config["input_scale"],
    )
    return config["in_channels"], config["out_channels"], field


def read(name: str) -> dict[str, Tensor]:
    """Read one file of tensors, in float64."""
    return load_tensors("deq-inr", name, torch.float64)


def make_model(name: str, **options: Any) -> DEQField:
    """Build a golden model in float64."""
    d, o, config = read_config(name)
    field = DEQField(d, o, config, {**TIGHT, **options}).double()
    field.load_state_dict(from_authors(field, select(read(name), "weights.")))
    return field


def make_picture() -> Signal:
    """Compute the 16 x 16 target of the training traces, a signal of [0, 1]."""
    axis = torch.linspace(-1, 1, 16, dtype=torch.float64)
    row, col = torch.meshgrid(axis, axis, indexing="ij")
    red, green = 0.5 + 0.5 * torch.sin(4 * col + row), 0.5 + 0.5 * torch.cos(3 * row)
    blue = 0.25 * (col + 1) * (row + 1)
    return Signal("image", torch.stack((red, green, blue), dim=-1).clamp(0, 1))
