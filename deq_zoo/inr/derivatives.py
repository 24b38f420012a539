"""Derivatives of a field along its coordinates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Values = Callable[[Tensor], Tensor]  # (N, d) to (N, o), each row of its own point alone


def value_and_gradient(
    field: Values, x: Tensor, create_graph: bool | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return values and their gradients $\partial y_i / \partial x_j$.

    For an equilibrium, pass `DEQField.exact`, or a forward pass with the options `ift` and
    `higher_order`: the gradient and its own derivatives are exact.

    Args:
        field: a function of points.
        x: (N, d).
        create_graph: whether the gradient can be differentiated; by default if grad mode is on.

    Returns:
        (N, o) and (N, o, d).
    """
    keep = torch.is_grad_enabled() if create_graph is None else create_graph
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = field(x)
        rows: list[Tensor] = []
        for k in range(y.shape[1]):
            last = k == y.shape[1] - 1 and not keep
            rows += torch.autograd.grad(
                y[:, k].sum(), x, create_graph=keep, retain_graph=not last, materialize_grads=True
            )
    gradient = torch.stack(rows, dim=1)
    return (y, gradient) if keep else (y.detach(), gradient)


def laplacian(field: Values, x: Tensor, create_graph: bool | None = None) -> Tensor:
    r"""Return the sum of second derivatives $\sum_j \partial^2 y_i / \partial x_j^2$, (N, o).

    Args: see `value_and_gradient`.
    """
    keep = torch.is_grad_enabled() if create_graph is None else create_graph
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        _, gradient = value_and_gradient(field, x, create_graph=True)
        sums = []
        for per_value in gradient.unbind(1):
            second = [
                torch.autograd.grad(
                    per_value[:, j].sum(), x, create_graph=keep, retain_graph=True,
                    materialize_grads=True,
                )[0][:, j]
                for j in range(x.shape[1])
            ]  # fmt: skip
            sums.append(torch.stack(second).sum(0))
    return torch.stack(sums, dim=1)
