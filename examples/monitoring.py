"""The statistics of a DEQ: the forward solve, the backward solve, the spectral radius.

The program makes a layer less and less contractive, until it loses its equilibrium. The statistics
show this for each sample, before the loss does.
"""

from __future__ import annotations

import torch

from torchdeq import SolverStat, Status, get_deq


def main() -> None:
    torch.manual_seed(0)
    W = torch.linalg.qr(torch.randn(32, 32)).Q
    x = torch.linspace(0.0, 2.0, 8)[:, None] * torch.randn(8, 32)  # from flat to saturated
    deq = get_deq(ift=True, f_max_iter=60, f_tol=1e-4, f_stop_mode="rel", on_failure="ignore")
    backward: list[SolverStat] = []

    for gain in (0.5, 0.9, 1.5):
        weight = (gain * W).requires_grad_()

        def f(z: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return torch.tanh(z @ weight + x)

        (z,), forward = deq.train()(f, torch.zeros_like(x), backward_writer=backward.append)
        z.square().mean().backward()  # the writer is called here, once
        with torch.no_grad():
            _, evaluated = deq.eval()(f, torch.zeros_like(x), sradius_mode=True)

        print(f"gain {gain}")
        print("  forward   ", forward.summary())
        print("  backward  ", backward[-1].summary())
        print("  sample     radius  evaluations  residual  status")
        for i in (0, 3, 7):
            status = Status(int(forward.status[i]))
            print(
                f"  {i:6d}     {evaluated.sradius[i]:6.2f}  {forward.nstep[i]:11.0f}"
                f"  {forward.rel_lowest[i]:8.1e}  {status.name}: {status.sentence}"
            )


if __name__ == "__main__":
    main()
