"""Random starts in training, for equilibria that depend less on the start.

A network trained from zero may have several equilibria, of which training has seen only one.
`mixed_init` starts half of the elements at zero and half at random, so the answer must be right
from every start (path independence, Anil et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchdeq import get_deq, mixed_init

WIDTH, STEPS = 32, 120
Start = Callable[[Tensor], Tensor]


class Regressor(nn.Module):
    """A layer whose weights start large enough for several equilibria."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.D = nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        A = torch.randn(WIDTH, WIDTH)
        with torch.no_grad():
            self.W.weight.copy_(3 * (A + A.mT) / torch.linalg.matrix_norm(A + A.mT, 2))
        self.deq = get_deq(f_max_iter=15, grad=5, tau=0.8, on_failure="ignore")

    def forward(self, x: Tensor, z0: Tensor) -> Tensor:
        u = self.U(x)
        states, _ = self.deq(lambda z: torch.tanh(self.W(z) + u), z0)
        y: Tensor = self.D(states[-1])
        return y


def trained(start: Start) -> Regressor:
    """Return a model that has learnt to fit a wave from such starts."""
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = 3 * torch.rand(64, 1) - 1.5
        loss = mse_loss(model(x, start(x)), torch.sin(3 * x))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model.eval()


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(len(x), WIDTH)


def mixed(x: Tensor) -> Tensor:
    return mixed_init((len(x), WIDTH), x.device)


@torch.no_grad()
def main() -> None:
    x = torch.linspace(-1.5, 1.5, 100)[:, None]
    target = torch.sin(3 * x)
    for name, start in (("zero:", zeros), ("mixed:", mixed)):
        with torch.enable_grad():
            model = trained(start)
        y, from_afar = model(x, zeros(x)), model(x, torch.randn(len(x), WIDTH))
        print(
            f"trained from {name:7s}error {mse_loss(y, target):.3f} from zero, "
            f"{mse_loss(from_afar, target):.3f} from a random start"
        )


if __name__ == "__main__":
    main()
