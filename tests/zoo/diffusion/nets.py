"""Small networks and the golden cases."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from deq_zoo.diffusion import UNetConfig, make_unet
from deq_zoo.diffusion.convert import from_authors
from deq_zoo.diffusion.package import diffusers
from tests.golden import load_facts, load_tensors

TINY = UNetConfig(size=16, widths=(32, 64), blocks=1, attention=(8,), dropout=0.0)


class Net(nn.Module):
    """A smooth denoiser that depends on its timestep and takes milliseconds."""

    def __init__(self, channels: int = 1, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, channels, 3, padding=1)
        self.calls: list[int] = []

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls.append(len(x))
        late = (t.to(x.dtype) / 1000).view(-1, 1, 1, 1)
        out: Tensor = self.second(torch.tanh(self.first(x) + late)) + 0.3 * x
        return out


def make_net(dtype: torch.dtype = torch.float64, seed: int = 0, channels: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net(channels).to(dtype).eval()


def make_scheduler(exact: bool = True, **options: Any) -> Any:
    """Build DDIM's scheduler; `exact` computes its coefficients in float64."""
    scheduler = diffusers().DDIMScheduler(**{"clip_sample": False, **options})
    if exact:
        scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
        scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    return scheduler


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@torch.no_grad()
def run_steps(
    unet: nn.Module,
    scheduler: Any,
    T: int,
    x: Tensor,
    eta: float = 0.0,
    noise: Tensor | None = None,
) -> Tensor:
    """Run the chain as diffusers does and return its states, (B, T, C, H, W)."""
    scheduler.set_timesteps(T)
    z, states = x, []
    for k, t in enumerate(scheduler.timesteps):
        m = unet(z, t.expand(len(z)))
        m = m if isinstance(m, Tensor) else m.sample
        extra = {} if noise is None else {"variance_noise": noise[:, k]}
        z = scheduler.step(m, int(t), z, eta=eta, **extra).prev_sample
        states.append(z)
    return torch.stack(states, dim=1)


@cache
def load_golden() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Return the tiny network with its weights, the tensors and the manifest."""
    unet = make_unet(TINY).eval()
    unet.load_state_dict(from_authors(load_tensors("deq-ddim", "weights_tiny")))
    return unet, load_tensors("deq-ddim", "io"), load_facts("deq-ddim")


def measure_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected entry."""
    return float((got - expected).abs().max() / expected.abs().max())


def write_picture(path: Path, width: int = 20, height: int = 10, level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (level, 0, 255)).save(path)
