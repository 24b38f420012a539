"""What each process does in the tests of distributed solves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.models import (
    PRECISE,
    WIDTH,
    Cell,
    Net,
    counted_collectives,
    data,
    joined,
    largest_error,
    loss_of,
    make_net,
    reference_gradients,
)
from torchdeq import StopRule, fixed_point, get_deq, numbers, solve
from torchdeq.distributed import collective, hold
from torchdeq.grad import Implicit
from torchdeq.linear import GMRES
from torchdeq.solver import Anderson, FixedPointIter


class Report(NamedTuple):
    """The result of two training steps in one process."""

    errors: list[float]  # of the gradients of both steps, relative to one process
    nfe: int  # evaluations of f in one forward solve
    products: int  # products in one backward solve; 0 if there is none
    forward: dict[str, int]  # collectives in the forward pass of the second step
    backward: dict[str, int]


def train(net: Net, model: nn.Module, expected: dict[str, Tensor]) -> Report:
    """Make two forward and backward passes on the data of this process."""
    layer, errors = net.layer, []
    for _ in range(2):
        net.zero_grad()
        with counted_collectives() as forward:
            loss = loss_of(model(data(dist.get_rank())))
        with counted_collectives() as backward:
            loss.backward()
        errors.append(largest_error(net, expected))
    products = layer.backward_stats[-1].nfe if layer.backward_stats else 0
    return Report(errors, layer.forward_stats[-1].nfe, products, dict(forward), dict(backward))


def data_parallel(options: dict[str, Any]) -> Report:
    """Train with DDP: nothing in f communicates, so the processes need not agree."""
    expected = reference_gradients(options)
    net = make_net(options)
    return train(net, DistributedDataParallel(net), expected)


def shard(net: Net, unit: str) -> None:
    """Shard a network; `unit` says which part of the equilibrium layer is a unit."""
    from torch.distributed.fsdp import fully_shard

    cell = net.layer.cell
    assert isinstance(cell, Cell)
    parts: dict[str, list[nn.Module]] = {
        "layer": [net.layer],
        "cell": [cell],
        "linears": [*cell.layers],
    }
    for part in parts[unit]:
        fully_shard(part)
    fully_shard(net)


def sharded(unit: str, options: dict[str, Any], checkpoint: str = "") -> Report:
    """Train with FSDP2; `checkpoint` says what is computed again in the backward pass."""
    expected = reference_gradients(options)
    net = make_net(options)
    net.layer.checkpoint = checkpoint
    shard(net, unit)
    return train(net, net, expected)


class GatherRows(torch.autograd.Function):
    """A weight from the rows that the processes hold."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


@collective
def gather_rows(rows: Tensor) -> Tensor:
    """Return a weight from the rows that the processes hold."""
    whole: Tensor = GatherRows.apply(rows)
    return whole


class GatheringCell(nn.Module):
    """A cell that keeps some rows of its weight in each process and gathers them in every call."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.init.orthogonal_(torch.empty(WIDTH, WIDTH, dtype=torch.float64)) * 0.7
        self.rows = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ gather_rows(self.rows).mT + x)


class WholeCell(nn.Module):
    """The same cell with its weight in one piece, for one process."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.init.orthogonal_(torch.empty(WIDTH, WIDTH, dtype=torch.float64)) * 0.7
        self.rows = nn.Parameter(weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.rows.mT + x)


def built(kind: type[nn.Module]) -> nn.Module:
    """Return a cell with the same weight in every process."""
    torch.manual_seed(5)
    return kind()


class Agreed(NamedTuple):
    """The result of a training step with a collective in f."""

    error: float
    nfe: int
    products: int
    same_as_alone: bool  # states, status and steps of the samples, as without other processes
    reduces: int  # all-reduces of the forward pass


def gathering(
    options: dict[str, Any], compact: bool = False, paced: bool = False, sync: Any = None
) -> Agreed:
    """Train a network with a collective in f."""
    reads_are_free = numbers.reads_are_free
    if paced:  # as on an accelerator, where check_every="auto" chooses intervals
        numbers.reads_are_free = lambda device: False
    try:
        return _gathering(options | {"sync_stop": sync}, compact)
    finally:
        numbers.reads_are_free = reads_are_free


def _gathering(options: dict[str, Any], compact: bool) -> Agreed:
    reference = make_net(options, built(WholeCell), compact=compact)
    loss_of(reference(joined())).backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    size, rank = dist.get_world_size(), dist.get_rank()
    alone = make_net(options | {"sync_stop": False}, built(WholeCell), compact=compact)
    net = make_net(options, built(GatheringCell), compact=compact)
    with torch.no_grad():
        z_alone = alone.layer(alone.encoder(data(rank)))
    with counted_collectives() as counts:
        z = net.layer(net.encoder(data(rank)))
    loss_of(net.head(z)).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None
        if name != "layer.cell.rows":
            dist.all_reduce(p.grad)
            p.grad /= size
    pieces = {n: g.chunk(size)[rank] if n == "layer.cell.rows" else g for n, g in expected.items()}
    mine, own = net.layer.forward_stats[-1], alone.layer.forward_stats[-1]
    same = torch.equal(mine.status, own.status)
    searches = options.get("f_solver_kwargs", {}).get("ls", False)
    if options["f_solver"] not in ("auto", "newton_krylov") and not searches:
        # Otherwise a step has several evaluations, as many as the slowest sample needs.
        same = same and torch.equal(mine["nstep"], own["nstep"])
    close = torch.allclose(z, z_alone, rtol=0, atol=1e-12)
    backward = net.layer.backward_stats
    return Agreed(
        largest_error(net, pieces),
        mine.nfe,
        backward[-1].nfe if backward else 0,
        same and close,
        counts["all_reduce"],
    )


@collective
class MeanOverProcesses(nn.Module):
    """The mean over the samples of all processes, as synchronised batch normalisation needs it."""

    def forward(self, z: Tensor) -> Tensor:
        total: Tensor = SumOverProcesses.apply(z.sum(0))
        return total / (len(z) * dist.get_world_size())


class SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over processes; its gradient is a sum over processes, too."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g


def mixing(options: dict[str, Any]) -> float:
    """Return the error of the gradients for an f that mixes the samples of all processes."""

    def gradients(x: Tensor, mean: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        W = (0.5 * nn.init.orthogonal_(torch.empty(5, 5, dtype=torch.float64))).requires_grad_()
        x = x.clone().requires_grad_()
        deq = get_deq(
            {"f_max_iter": 200, "f_tol": 1e-13, "b_max_iter": 200, "b_tol": 1e-13}, **options
        )
        f = lambda z: torch.tanh(z @ W + x + 0.7 * mean(z).roll(1))  # noqa: E731
        states, _ = deq(f, torch.zeros_like(x))
        (states[-1].square() * torch.arange(1.0, 6.0)).sum().backward()
        assert W.grad is not None
        assert x.grad is not None
        return W.grad, x.grad

    surely = {"f_solver": "fixed_point_iter", "b_solver": "gmres", "ift": True, "coupled": True}
    W_right, x_right = gradients(joined(), lambda z: z.mean(0), surely)
    W_grad, x_grad = gradients(data(dist.get_rank()), MeanOverProcesses(), options)
    dist.all_reduce(W_grad)
    x_right = x_right.chunk(dist.get_world_size())[dist.get_rank()]
    return max(float((W_grad - W_right).norm() / W_right.norm()),
               float((x_grad - x_right).norm() / x_right.norm()))  # fmt: skip


def tensor_parallel(options: dict[str, Any]) -> Agreed:
    """Train with the weights of f split over processes, which see the same samples."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    expected = reference_gradients(options)
    net = make_net(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = Replicate()  # tanh and the injection between the layers need whole rows
    parallelize_module(
        net.layer.cell,
        mesh,
        {
            "layers.0": ColwiseParallel(output_layouts=whole),
            "layers.1": RowwiseParallel(input_layouts=whole),
        },
    )
    net.layer.deq.sync_stop = mesh.get_group()
    with counted_collectives() as counts:
        loss = loss_of(net(joined()))
    loss.backward()
    stats, backward = net.layer.forward_stats[-1], net.layer.backward_stats[-1]
    error = largest_error(net, expected)
    return Agreed(error, stats.nfe, backward.nfe, True, counts["all_reduce"])


def dead_peer() -> str:
    """Return the error of a process whose peer never answers."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank():
        return "gone"
    stop = StopRule(50, 1e-9, sync_stop=group)
    try:
        solve(lambda z: 0.9 * z + 1, torch.zeros(2, 3), FixedPointIter(), stop)
    except RuntimeError as error:
        return str(error)
    return "no error"


def failure_of_one() -> str:
    """Return the error in each process if the solve of one of them fails."""
    rate = 0.1 if dist.get_rank() else 0.999
    stop = StopRule(20, 1e-3, sync_stop=True)
    try:
        solve(lambda z: rate * z + 1, torch.zeros(2, 3), Anderson(m=1), stop, on_failure="raise")
    except RuntimeError as error:
        return str(error)
    return "no error"


def refusals() -> list[str]:
    """Return the errors for what cannot work with units inside f."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    from torchdeq import apply_norm, reset_norm

    texts = []
    net = make_net({"ift": True, "higher_order": True})
    shard(net, "cell")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    z = distribute_tensor(torch.zeros(2, 3), mesh, [Replicate()])
    normed = nn.Sequential(nn.Linear(4, 4))
    apply_norm(normed)
    fully_shard(normed)
    for attempt in (
        lambda: net(data(0)),
        lambda: fixed_point(lambda z: 0.5 * z, z),
        lambda: reset_norm(normed),
    ):
        try:
            attempt()
            texts.append("no error")
        except (RuntimeError, TypeError) as error:
            texts.append(str(error))
    return texts


def held_twice() -> dict[str, int]:
    """Return the collectives of two solves inside one `hold`, whose numbers of calls differ."""
    net = make_net({"f_solver": "anderson"})
    shard(net, "linears")
    x = torch.full((2, WIDTH), 1.0 + dist.get_rank(), dtype=torch.float64)
    with torch.no_grad():
        net(data(dist.get_rank()))  # the first forward pass of the root
        with counted_collectives() as counts, hold(net.layer.cell):
            net.layer(x)
            for _ in range(1 + dist.get_rank()):
                net.layer.cell(x, x)
    return dict(counts)


def explicit_backward_group() -> list[int]:
    """Return the products of two backward solves that stop together, each by its own rule."""
    rate = 0.2 if dist.get_rank() else 0.9
    counts = []
    for sync in (None, True):
        w = torch.full((1, 3), rate, dtype=torch.float64, requires_grad=True)
        backward = Implicit(
            solver=GMRES() if sync is None else FixedPointIter(),
            stop=StopRule(200, 1e-8, sync_stop=True),
            writer=lambda stats: counts.append(stats.nfe),
        )
        stop = StopRule(200, 1e-8, sync_stop=sync)
        f = lambda z, w: w * z + 1  # noqa: E731
        z = fixed_point(f, torch.zeros_like(w), (w,), backward=backward, stop=stop).z
        z.sum().backward()
    return counts


def uneven(samples: tuple[int, ...], options: dict[str, Any]) -> float:
    """Return the error of the gradients for processes with different numbers of samples."""
    inputs = [data(rank).repeat(2, 1)[:n] for rank, n in enumerate(samples)]

    def gradient(x: Tensor, f: Any, options: dict[str, Any]) -> Tensor:
        torch.manual_seed(2)
        W = (0.7 * nn.init.orthogonal_(torch.empty(5, 5, dtype=torch.float64))).requires_grad_()
        deq = get_deq(PRECISE | options)
        states, _ = deq(lambda z: torch.tanh(f(z) @ W + x), torch.zeros_like(x))
        return torch.autograd.grad(states[-1].square().sum(), W)[0]

    expected = gradient(torch.cat(inputs), lambda z: z, options | {"sync_stop": False})
    found = gradient(inputs[dist.get_rank()], keep_step, options)
    dist.all_reduce(found)
    return float((found - expected).norm() / expected.norm())


class KeepStep(torch.autograd.Function):
    """The identity, at which all processes wait for each other, forward and backward."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return t.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return g.clone()


@collective
def keep_step(t: Tensor) -> Tensor:
    """Return a tensor once all processes have called this."""
    same: Tensor = KeepStep.apply(t)
    return same
