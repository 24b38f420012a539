"""A random budget for every training step: the model learns to be good with any budget.

With one fixed budget a network may fit its answer to that number of steps. Here the program draws
`f_max_iter` for each call, and then tests both models with more steps than in training.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchdeq import get_deq

WIDTH, STEPS, BUDGETS = 32, 200, (6, 9, 16, 32, 64)


class Regressor(nn.Module):
    """A layer without a bound on its weights: only training can make it contract."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.D = nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        nn.init.orthogonal_(self.W.weight, gain=1.3)
        # No tolerance, so every budget is spent; training adds 3 steps with a graph to it.
        self.deq = get_deq(f_tol=0.0, grad=3)

    def forward(self, x: Tensor, budget: int) -> Tensor:
        u = self.U(x)
        states, _ = self.deq(
            lambda z: torch.tanh(self.W(z) + u), torch.zeros_like(u), f_max_iter=budget
        )
        y: Tensor = self.D(states[-1])
        return y


def trained(budgets: Iterable[int]) -> Regressor:
    """Return a model that has learnt to fit a wave, with one of the budgets at each step."""
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for budget in budgets:
        x = 3 * torch.rand(64, 1) - 1.5
        loss = mse_loss(model(x, budget), torch.sin(3 * x))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def errors(model: Regressor) -> list[float]:
    """Return the mean squared error after each of the `BUDGETS`."""
    x = torch.linspace(-1.5, 1.5, 100)[:, None]
    return [float(mse_loss(model(x, budget), torch.sin(3 * x))) for budget in BUDGETS]


def main() -> None:
    drawn = torch.randint(3, 13, (STEPS,), generator=torch.Generator().manual_seed(0))
    print("evaluations in the test           " + "".join(f"{budget:9d}" for budget in BUDGETS))
    for name, budgets in {"always 6 + 3": [6] * STEPS, "3 to 12, + 3": drawn.tolist()}.items():
        row = "".join(f"{error:9.4f}" for error in errors(trained(budgets)))
        print(f"error, trained with {name:14s}{row}")


if __name__ == "__main__":
    main()
