"""The golden case: weights, tensors and gradients of the original implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.convert import from_authors

SHARED = Path(__file__).parents[4] / "shared"  # golden numbers and data, where present
GOLDEN = SHARED / "golden" / "deq-flow"
DATA = SHARED / "data"


def tensors(name: str) -> dict[str, Tensor]:
    """The tensors of one file."""
    if not GOLDEN.is_dir():
        pytest.skip("the golden data is not here")
    return load_file(GOLDEN / f"{name}.safetensors")


def facts(name: str) -> Any:
    if not GOLDEN.is_dir():
        pytest.skip("the golden data is not here")
    return json.loads((GOLDEN / name).read_text())


def golden_model(
    deq: Any, gma: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> DEQFlow:
    """The tiny model with the golden weights, in evaluation mode."""
    state = tensors("weights_tiny")
    if gma:
        state |= tensors("weights_tiny_gma_extra")
    model = DEQFlow(FlowConfig(size="tiny", gma=gma, **config), deq).to(dtype)
    model.load_state_dict(from_authors(state))
    return model.eval()


def images(io: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return io["image1"].to(dtype), io["image2"].to(dtype)


def data(folder: str) -> Path:
    """A folder of real data, if it is there."""
    if not (DATA / folder).is_dir():
        pytest.skip(f"the data {folder} is not here")
    return DATA / folder
