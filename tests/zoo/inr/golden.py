"""The golden cases: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deq_zoo.inr import DEQField, FieldConfig, Signal
from deq_zoo.inr.convert import from_authors

SHARED = Path(__file__).parents[4] / "shared"  # golden numbers and data, where present
GOLDEN = SHARED / "golden" / "deq-inr"
MODELS = (
    *("siren_image_1L", "siren_image_4L", "fourier_image_1L", "fourier_image_4L"),
    *("gabor_image_1L", "gabor_image_4L", "siren_video_1L", "siren_audio_1L"),
)
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
TIGHT: dict[str, Any] = {
    "f_max_iter": 400,
    "f_tol": 1e-12,
    "grad": 3,
    "on_failure": "ignore",
}


def facts() -> Any:
    if not GOLDEN.is_dir():
        pytest.skip("the golden data is not here")
    return json.loads((GOLDEN / "manifest.json").read_text())


def config_of(name: str) -> tuple[int, int, FieldConfig]:
    told = facts()["files"][name]["config"]
    config = FieldConfig(
        filter=told["filter"],
        width=told["hidden"],
        layers=told["n_layers"],
        input_scale=told["input_scale"],
    )
    return told["in_channels"], told["out_channels"], config


def tensors(name: str) -> dict[str, Tensor]:
    facts()
    return load_file(GOLDEN / f"{name}.safetensors")


def model(name: str, **options: Any) -> DEQField:
    """A golden model in float64."""
    d, o, config = config_of(name)
    field = DEQField(d, o, config, {**TIGHT, **options}).double()
    held = tensors(name).items()
    state = {k.removeprefix("weights."): v for k, v in held if k.startswith("weights.")}
    field.load_state_dict(from_authors(field, state))
    return field


def picture() -> Signal:
    """The 16 x 16 target of the training traces, exact, as a signal of [0, 1]."""
    axis = torch.linspace(-1, 1, 16, dtype=torch.float64)
    row, col = torch.meshgrid(axis, axis, indexing="ij")
    red, green = 0.5 + 0.5 * torch.sin(4 * col + row), 0.5 + 0.5 * torch.cos(3 * row)
    blue = 0.25 * (col + 1) * (row + 1)
    return Signal("image", torch.stack((red, green, blue), dim=-1).clamp(0, 1))
