"""The task and the model of the smoke preset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deq_zoo.diffusion import Denoiser, UNetConfig
from deq_zoo.diffusion.presets import diffusion_smoke
from deq_zoo.diffusion.task import Denoise

SMALL = UNetConfig(
    size=8, channels=1, widths=(8, 16), blocks=1, attention=(4,), dropout=0.0, groups=4
)


def make_task(**changes: Any) -> Denoise:
    task = diffusion_smoke().task
    assert isinstance(task, Denoise)
    return replace(task, **changes)


def make_model(task: Denoise | None = None) -> Denoiser:
    torch.manual_seed(0)
    return (task or make_task()).build().eval()
