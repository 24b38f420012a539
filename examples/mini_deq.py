"""A mini DEQ, from its layer to its loss: normalise, solve, correct, train.

A network with one hidden layer, iterated to its equilibrium, learns to separate two spirals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchdeq import apply_norm, fp_correction, get_deq, reset_norm

WIDTH, STEPS = 64, 80


class MiniDEQ(nn.Module):
    r"""One layer at its equilibrium, then a linear read-out.

    $$z^\star = \tanh(W z^\star + U x + b), \qquad y = D z^\star$$

    Shapes: `x` is `(B, 2)`, every prediction is `(B, 2)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH)
        self.D = nn.Linear(WIDTH, 2)
        nn.init.normal_(self.U.weight, std=2.0)
        # At most 0.9: tanh is 1-Lipschitz, so the layer contracts and its equilibrium exists.
        apply_norm(self.W, "spectral_norm", learn_scale=False, target_norm=0.9)
        self.deq = get_deq(
            core="indexing", f_solver="anderson", n_states=3, ift=True, b_solver="anderson"
        )

    def forward(self, x: Tensor) -> tuple[list[Tensor], int]:
        """Return predictions from every sampled state, and the evaluations of the layer."""
        reset_norm(self)  # the weight is computed once, not at every evaluation
        u = self.U(x)
        states, stats = self.deq(lambda z: torch.tanh(self.W(z) + u), torch.zeros_like(u))
        return [self.D(z) for z in states], stats.nfe


def spirals(n: int = 120) -> tuple[Tensor, Tensor]:
    """Return `n` points on two arms, and the arm of each."""
    arm = torch.arange(n) % 2
    radius = torch.linspace(0.2, 1.0, n)
    angle = 3 * math.pi * radius + math.pi * arm
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * radius[:, None]
    return points + 0.02 * torch.randn(n, 2), arm


def main() -> None:
    torch.manual_seed(0)
    model = MiniDEQ()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = spirals()
    for step in range(1, STEPS + 1):
        predictions, nfe = model(x)
        loss = fp_correction(cross_entropy, (predictions, y))  # earlier states count less
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss:.3f} of {len(predictions)} states  NFE {nfe}")
    model.eval()
    with torch.no_grad():
        x, y = spirals()  # new noise
        (prediction,), nfe = model(x)  # evaluation has one state, the equilibrium
    print(f"accuracy {(prediction.argmax(1) == y).float().mean():.1%} with {nfe} evaluations")


if __name__ == "__main__":
    main()
