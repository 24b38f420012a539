"""Derivatives of any order and kind through an equilibrium, checked against each other.

`higher_order=True` makes implicit gradients differentiable; the transforms of `torch.func` work
without it. The reference is plain autograd through 400 unrolled steps, in double precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from torchdeq import get_deq

WIDTH = 6


def main() -> None:
    torch.manual_seed(0)
    W = 0.8 * torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    deq = get_deq(
        ift=True, higher_order=True, f_solver="anderson", b_solver="gmres", f_tol=1e-13, b_tol=1e-12
    )

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    def energy(x: Tensor) -> Tensor:
        """Return one number for one input (WIDTH,)."""
        u = x[None]  # a batch of one
        states, _ = deq(layer, torch.zeros_like(u), args=(u,))
        e: Tensor = states[-1].square().sum()
        return e

    def unrolled(x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(400):
            z = layer(z, x)
        return z.square().sum()

    x, v = torch.randn(2, WIDTH, dtype=torch.float64)
    slope, curvature = grad(unrolled)(x), hessian(unrolled)(x)

    leaf = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(energy(leaf), leaf, create_graph=True)
    (twice,) = torch.autograd.grad(once @ v, leaf)
    along = jvp(energy, (x,), (v,))[1]
    H = hessian(energy)(x)
    each = vmap(grad(energy))(torch.stack([x, 2 * x, -x]))  # per-sample gradients

    print("largest error")
    rows = {
        "reverse mode": once.detach() - slope,
        "forward mode (jvp)": along - slope @ v,
        "double backward": twice - curvature @ v,
        "Hessian (torch.func)": H - curvature,
        "per-sample gradients (vmap)": each - torch.stack([slope, grad(unrolled)(2 * x), -slope]),
    }
    for name, error in rows.items():
        print(f"  {name:30s}{error.abs().max():.1e}")
    lowest, *_, highest = torch.linalg.eigvalsh(H)
    print(f"eigenvalues of the Hessian from {lowest:.2f} to {highest:.2f}")


if __name__ == "__main__":
    main()
