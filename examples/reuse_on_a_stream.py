"""Frames that resemble each other: start each solve at the equilibrium of the frame before.

A fixed point does not depend on where its solver starts, so reuse changes the cost and nothing
else. In training the former state is detached: no gradient passes from frame to frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchdeq import apply_norm, get_deq, reset_norm

FRAMES, WIDTH = 30, 64


def frames() -> list[Tensor]:
    """Return frames of eight inputs that drift slowly."""
    x, drift = torch.randn(8, WIDTH), 0.02 * torch.randn(8, WIDTH)
    return [x + k * drift for k in range(FRAMES)]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    apply_norm(layer, "spectral_norm", learn_scale=False, target_norm=0.95)
    reset_norm(layer)
    stream, apart = frames(), 0.0
    for name in ("fixed_point_iter", "anderson", "broyden"):
        deq = get_deq(f_solver=name, f_max_iter=200, f_tol=1e-4, f_stop_mode="rel").eval()
        cold_nfe, warm_nfe, last = 0, 0, torch.zeros(8, WIDTH)
        for x in stream:

            def f(z: Tensor, x: Tensor = x) -> Tensor:
                return torch.tanh(layer(z) + x)

            (cold,), cold_stats = deq(f, torch.zeros_like(x))
            (last,), warm_stats = deq(f, last)
            cold_nfe, warm_nfe = cold_nfe + cold_stats.nfe, warm_nfe + warm_stats.nfe
            apart = max(apart, float((cold - last).norm() / cold.norm()))
        saved = 1 - warm_nfe / cold_nfe
        print(
            f"{name:18s}NFE per frame {cold_nfe / FRAMES:5.1f} from zero, {warm_nfe / FRAMES:5.1f} "
            f"from the last frame: {saved:.0%} saved"
        )
    print(f"the two answers differ by at most {apart:.1e}, relative")


if __name__ == "__main__":
    main()
