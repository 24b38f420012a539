"""A state of two tensors: ADMM for the lasso as an equilibrium, with a penalty that is learnt.

A batch of sparse vectors is observed through one matrix. ADMM is a fixed-point iteration in the
pair (z, u), so the solution of the lasso is the equilibrium of a layer, and the gradient of the
error in the unknown penalty comes from the implicit function theorem.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from torchdeq import get_deq

UNKNOWNS, MEASUREMENTS, BATCH = 60, 40, 16
Layer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def admm(A: Tensor, b: Tensor, lam: Tensor, rho: float = 1.0) -> Layer:
    r"""Return one step of ADMM for $\min_z \frac12 |A z - b|^2 + \lambda |z|_1$, row by row.

    $$x = (A^\top A + \rho I)^{-1} (A^\top b + \rho (z - u)), \qquad
    z^+ = S_{\lambda / \rho}(x + u), \qquad u^+ = u + x - z^+$$
    """
    inverse = torch.linalg.inv(A.mT @ A + rho * torch.eye(A.shape[1]))
    Ab = b @ A  # (B, n)

    def step(z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        v = (Ab + rho * (z - u)) @ inverse + u
        new_z = v.sign() * torch.relu(v.abs() - lam / rho)
        return new_z, v - new_z

    return step


def main() -> None:
    torch.manual_seed(0)
    A = torch.randn(MEASUREMENTS, UNKNOWNS) / MEASUREMENTS**0.5
    truth = torch.randn(BATCH, UNKNOWNS) * (torch.rand(BATCH, UNKNOWNS) < 0.1)
    b = truth @ A.mT + 0.05 * torch.randn(BATCH, MEASUREMENTS)
    deq = get_deq(
        ift=True, f_solver="anderson", f_max_iter=300, f_tol=1e-5, b_solver="gmres", b_max_iter=120
    )
    log_lam = torch.tensor(-1.0, requires_grad=True)
    optimizer = torch.optim.Adam([log_lam], lr=0.2)
    z, u = torch.zeros_like(truth), torch.zeros_like(truth)
    for step in range(20):
        lam = log_lam.exp()
        (state,), stats = deq(admm(A, b, lam), (z, u))
        error = (state[0] - truth).square().sum(1).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        z, u = (t.detach() for t in state)  # the next solve starts here
        if step % 5 == 0 or step == 19:
            print(f"penalty {lam:.3f}  error {error:.3f}  NFE {stats.nfe}")
    # The lasso's own optimality condition: z is a proximal gradient step away from itself.
    moved = softshrink(z - (z @ A.mT - b) @ A, lam.item()) - z
    print(f"violation of the lasso's optimality condition {moved.abs().max():.1e}")


if __name__ == "__main__":
    main()
