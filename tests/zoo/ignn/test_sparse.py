"""Products with sparse weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.ignn import ImplicitGraph
from deq_zoo.ignn.sparse import sparse_weight, times_transposed
from tests.zoo.ignn.problems import draw_graph


def draw_few_entries(m: int) -> Tensor:
    return torch.randn(m, m, dtype=torch.float64) * (torch.rand(m, m) < 0.03)


def test_a_sparse_weight_multiplies_like_a_dense_one() -> None:
    W, x = draw_few_entries(300), torch.randn(130, 300, dtype=torch.float64)  # more than one block
    rows = sparse_weight(W)
    assert rows is not None
    assert_close(times_transposed(x, W, rows), x @ W.mT)
    assert_close(times_transposed(x.mT.contiguous().mT, W, rows), x @ W.mT)
    assert times_transposed(x[:0], W, rows).shape == (0, 300)
    assert sparse_weight(torch.randn(300, 300)) is None
    assert sparse_weight(draw_few_entries(20)) is None


def test_its_gradients_are_dense_in_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deq_zoo.ignn.sparse._WIDE", 1)
    monkeypatch.setattr("deq_zoo.ignn.sparse._SPARSE", 1.0)
    W, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    W[0, 1] = W[2, 2] = 0
    rows = sparse_weight(W)
    assert rows is not None
    W, x = W.requires_grad_(), x.requires_grad_()
    product = times_transposed(x, W, rows)
    exact = x @ W.mT
    for got, want in zip(
        torch.autograd.grad(product.square().sum(), (x, W)),
        torch.autograd.grad(exact.square().sum(), (x, W)),
        strict=True,
    ):
        assert_close(got, want)  # also where W is zero
    along = lambda x: times_transposed(x, W.detach(), rows) ** 2  # noqa: E731
    assert torch.autograd.gradcheck(along, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(along, (x,))


def test_a_wide_layer_gives_the_same_states_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x = draw_graph(9, 60), torch.randn(9, 5, dtype=torch.float64)
    options = {"ift": True, "f_tol": 1e-12, "b_tol": 1e-12, "f_max_iter": 400, "b_max_iter": 400}
    layer = ImplicitGraph(5, 256, kappa=0.1, deq=options).double()
    assert sparse_weight(layer.weight(graph)) is not None
    results = []
    for wide in (256, 10_000):
        monkeypatch.setattr("deq_zoo.ignn.sparse._WIDE", wide)
        (z,), _ = layer(x, graph)
        results.append((z, *torch.autograd.grad(z.square().sum(), list(layer.parameters()))))
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_no_sparse_product(dtype: torch.dtype) -> None:
    assert sparse_weight(draw_few_entries(256).to(dtype)) is None
