"""Two threads solve, train and evaluate with one module at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import get_deq
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit
from torchdeq.solver import SOLVERS, StopRule
from torchdeq.tracing import force_eager

CALLS = 50


class Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.1 * self.norm(self.linear(z)) + x)


def inputs(thread: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(thread)
    return [torch.randn(3, 4, generator=generator) for _ in range(CALLS)]


def solving(layer: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return fixed_point(layer, torch.zeros_like(x), (x,), solver=SOLVERS["anderson"]()).z


def training(layer: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    z = fixed_point(lambda z: layer(z, x), torch.zeros_like(x)).z
    return torch.autograd.grad(z.square().sum(), [x, *layer.parameters()])


def training_twice(layer: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    backward = Implicit(stop=StopRule(40, 1e-6), higher_order=True)
    z = fixed_point(lambda z: layer(z, x), torch.zeros_like(x), backward=backward).z
    return torch.autograd.grad(z.square().sum(), [x, *layer.parameters()])


def evaluating(layer: nn.Module, x: Tensor) -> Any:
    deq = get_deq(f_solver="broyden", f_max_iter=30, f_tol=1e-5).eval()
    with torch.inference_mode():
        return deq(lambda z: layer(z, x), torch.zeros_like(x))[0][-1]


WORK: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    work.__name__: work for work in (solving, training, training_twice, evaluating)
}


PAIRS = [
    ("solving", "solving"),
    ("training", "training"),
    ("evaluating", "evaluating"),
    ("training", "solving"),
    ("training", "evaluating"),
    ("training_twice", "training_twice"),
    pytest.param("training_twice", "solving", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_threads_get_what_each_would_alone(first: str, second: str) -> None:
    layer, start = Layer(nn.LayerNorm(4)), Barrier(2)
    work = [WORK[first], WORK[second]]
    expected = [[do(layer, x) for x in inputs(i)] for i, do in enumerate(work)]

    def run(i: int) -> list[Any]:
        start.wait()
        return [work[i](layer, x) for x in inputs(i)]

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(run, range(2)))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(isinstance(p, nn.Parameter) for p in layer.linear._parameters.values())


def test_two_threads_may_train_one_batch_norm() -> None:
    layer, start = Layer(nn.BatchNorm1d(4)), Barrier(2)
    expected = [[training(layer, x) for x in inputs(i)] for i in range(2)]
    buffers = dict(layer.named_buffers())

    def run(i: int) -> list[Any]:
        start.wait()
        return [training(layer, x) for x in inputs(i)]

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(run, range(2)))
    torch.testing.assert_close(got, expected)
    after = dict(layer.named_buffers())  # the very tensors
    assert all(after[name] is buffer for name, buffer in buffers.items())


def test_eager_blocks_of_two_threads_leave_the_compiler_on() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2)).tolist() == [1, 1]
    first, second = force_eager(), force_eager()
    first.__enter__()
    second.__enter__()  # as another thread may do meanwhile
    first.__exit__(None, None, None)
    torch.compile(lambda x: x + 2, backend=backend)(torch.zeros(2))
    assert len(graphs) == 1  # the second block lasts
    second.__exit__(None, None, None)
    torch.compile(lambda x: x + 3, backend=backend)(torch.zeros(2))
    assert len(graphs) == 2
