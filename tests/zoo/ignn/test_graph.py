"""Graphs: sparse products, batches side by side, Perron roots, what is accepted and refused."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.ignn import Graphs, as_graphs, normalised_edges, perron_roots
from deq_zoo.tree import to_device
from tests.zoo.ignn.problems import draw_graph


def to_dense(graph: Graphs) -> Tensor:
    return graph.outgoing.to_dense()


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 2**16))
def test_propagation_is_the_product_with_the_transpose(n: int, edges: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(n, (2, edges), generator=g)
    weight = torch.randn(edges, generator=g, dtype=torch.float64)
    A = torch.zeros(n, n, dtype=torch.float64)
    A.index_put_((index[0], index[1]), weight, accumulate=True)  # repeated edges add up
    graph = Graphs.from_edges(index, n, weight)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    assert_close(to_dense(graph), A)
    assert_close(graph.incoming.to_dense(), A.mT)
    assert_close(graph.propagate(x), A.mT @ x)


def test_propagation_differentiates_at_every_order_and_mode() -> None:
    graph = draw_graph(5, 12)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def cube(x: Tensor) -> Tensor:
        return graph.propagate(x) ** 3

    assert torch.autograd.gradcheck(cube, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(cube, (x,))
    jacobian = torch.func.jacrev(graph.propagate)(x.detach())
    assert_close(jacobian, torch.func.jacfwd(graph.propagate)(x.detach()))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**16))
def test_padding_and_gathering_are_inverse_and_pooling_sums(sizes: list[int], seed: int) -> None:
    graph = draw_graph(sum(sizes), 4, seed, sizes)
    x = torch.randn(sum(sizes), 3, dtype=torch.float64)
    z = graph.pad(x)
    assert z.shape == (len(sizes), max(sizes), 3)
    assert_close(graph.gather(z), x)
    assert float(z.abs().sum()) == pytest.approx(float(x.abs().sum()))
    assert_close(graph.pool(x), torch.stack([part.sum(0) for part in x.split(sizes)]))


def test_a_union_is_block_diagonal_and_estimates_nothing_again() -> None:
    parts = [draw_graph(n, 6, seed=n) for n in (4, 1, 7)]
    joined = Graphs.union(parts)
    assert_close(to_dense(joined), torch.block_diag(*map(to_dense, parts)))
    assert torch.equal(joined.rho, torch.cat([part.rho for part in parts]))
    assert joined.sizes == (4, 1, 7)
    assert not joined.alike
    assert Graphs.union([parts[0].with_rho(2.0), parts[1].with_rho(2.0)]).alike
    index = torch.tensor([[0, 1, 3], [1, 2, 4]])
    whole = Graphs.from_edges(index, 5, sizes=(3, 2))
    apart = [Graphs.from_edges(index[:, :2], 3), Graphs.from_edges(index[:, 2:] - 3, 2)]
    assert_close(to_dense(whole), to_dense(Graphs.union(apart)))
    assert_close(whole.rho, Graphs.union(apart).rho)


@given(st.integers(1, 10), st.integers(1, 40), st.integers(0, 2**16))
def test_perron_roots_of_random_graphs(n: int, edges: int, seed: int) -> None:
    index = torch.randint(n, (2, edges), generator=torch.Generator().manual_seed(seed))
    both = torch.cat((index, index.flip(0)), dim=1)
    graph = Graphs.from_edges(both, n)
    exact = torch.linalg.eigvalsh(to_dense(graph).double()).abs().max()
    assert_close(graph.rho[0], exact + 1e-5, rtol=1e-8, atol=1e-8)


def test_perron_roots_where_power_iteration_could_fail() -> None:
    star = torch.tensor([[0] * 9, list(range(1, 10))])
    assert_close(_compute_root(torch.cat((star, star.flip(0)), 1), 10), 3.0)  # bipartite: 3 and -3
    cycle = torch.tensor([[0, 1, 2], [1, 2, 0]])
    assert_close(_compute_root(cycle, 3), 1.0)  # three eigenvalues of modulus 1
    signed = Graphs.from_edges(cycle, 3, -torch.ones(3))
    assert float(signed.rho) == pytest.approx(1 + 1e-5)
    assert float(Graphs.from_edges(torch.empty(2, 0, dtype=torch.int64), 4).rho) == 1e-5
    edges, weight = normalised_edges(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    assert float(Graphs.from_edges(edges, 4, weight).rho) == pytest.approx(1 + 1e-5)


def test_a_perron_root_is_found_before_rounding_stirs_it_and_on_long_paths_is_close() -> None:
    node = torch.arange(20_000)
    ring = torch.stack((node, (node + 1) % 20_000))
    adjacency = Graphs.from_edges(torch.cat((ring, ring.flip(0)), 1), 20_000, rho=2.0).incoming
    assert_close(perron_roots(adjacency, (20_000,), steps=33).item(), 2.0)  # it stops by itself
    path = torch.stack((node[:999], node[1:1000]))
    rho = float(Graphs.from_edges(torch.cat((path, path.flip(0)), 1), 1000).rho)
    exact = 2 * math.cos(math.pi / 1001)
    assert rho == pytest.approx(exact, abs=1e-5)  # where power iteration ends at its cap


def _compute_root(edges: Tensor, n: int) -> float:
    graph = Graphs.from_edges(edges, n)
    return float(perron_roots(graph.incoming, (n,)))


def test_normalisation_is_that_of_the_paper() -> None:
    edges, weight = normalised_edges(torch.tensor([[0, 0, 1], [1, 2, 2]]), 3)
    A = torch.tensor([[1.0, 1, 1], [0, 1, 1], [0, 0, 1]], dtype=torch.float64)
    d = A.sum(1).rsqrt()
    assert_close(to_dense(Graphs.from_edges(edges, 3, weight)).double(), d[:, None] * A * d)


def test_sparse_tensors_of_any_layout_and_pyg_objects_are_graphs() -> None:
    graph = draw_graph(6, 14)
    A = to_dense(graph)
    for layout in (A.to_sparse_coo(), A.to_sparse_csr(), A.to_sparse_csc()):
        result = as_graphs(layout)
        assert_close(to_dense(result), A)
        assert_close(result.rho, graph.rho)
    edges = A.to_sparse_coo().coalesce()
    data = SimpleNamespace(edge_index=edges.indices(), edge_weight=edges.values(), num_nodes=6)
    assert_close(to_dense(as_graphs(data)), A)
    assert as_graphs(graph) is graph


def test_pyg_data_and_batches_are_graphs() -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    one = pyg.Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    two = pyg.Data(edge_index=torch.tensor([[1], [0]]), num_nodes=2)
    batch = as_graphs(pyg.Batch.from_data_list([one, two]))
    assert batch.sizes == (3, 2)
    assert_close(
        to_dense(batch), torch.block_diag(to_dense(as_graphs(one)), to_dense(as_graphs(two)))
    )


def test_graphs_of_a_batch_without_pointers_are_distinguished() -> None:
    edges, owner = torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 2, 2])
    data = SimpleNamespace(edge_index=edges, batch=owner, num_nodes=5)
    assert as_graphs(data).sizes == (3, 0, 2)
    data.num_graphs = 4
    assert as_graphs(data).sizes == (3, 0, 2, 0)
    for wrong in (owner.flip(0), owner[1:]):
        data.batch = wrong
        with pytest.raises(
            ValueError, match="the graph of each of 5 nodes, counted from 0, in rising"
        ):
            as_graphs(data)
    pyg = pytest.importorskip("torch_geometric.data")
    assert as_graphs(pyg.Data(torch.ones(5, 1), edges, batch=owner)).sizes == (3, 0, 2)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of PyG
def test_a_transposed_adjacency_of_pyg_is_a_graph() -> None:
    A = to_dense(draw_graph(5, 9))
    data = SimpleNamespace(adj_t=A.mT.to_sparse_csr(), num_nodes=5)
    assert_close(to_dense(as_graphs(data)), A)
    with pytest.raises(TypeError, match="or adj_t as a sparse tensor of torch"):
        as_graphs(SimpleNamespace(adj_t=object(), num_nodes=5))
    pyg = pytest.importorskip("torch_geometric")
    made = pyg.data.Data(torch.ones(3, 1), torch.tensor([[0, 0, 1], [1, 2, 2]]))
    expected = to_dense(as_graphs(made))
    turned = pyg.transforms.ToSparseTensor(layout=torch.sparse_csr)(made)
    assert turned.edge_index is None
    assert_close(to_dense(as_graphs(turned)), expected)


def test_weights_that_should_learn_are_refused() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    weight = torch.ones(2, requires_grad=True)
    A = torch.sparse_coo_tensor(edges, weight, (3, 3))
    data = SimpleNamespace(edge_index=edges, edge_weight=weight, num_nodes=3)
    for graph in (data, A):
        with pytest.raises(ValueError, match=r"constants and get no gradient: pass \.detach\(\)"):
            as_graphs(graph)


def test_a_graph_is_a_batch_and_can_be_copied() -> None:
    graph = draw_graph(5, 8)
    for other in (
        to_device(graph, torch.device("cpu")),
        graph.to(torch.device("cpu")),
        copy.deepcopy(graph),
        pickle.loads(pickle.dumps(graph)),
    ):
        assert isinstance(other, Graphs)
        assert_close(to_dense(other), to_dense(graph))
        assert_close(other.rho, graph.rho)
    half = graph.to(torch.float32)
    assert (half.dtype, half.rho.dtype) == (torch.float32, torch.float64)
    assert graph.propagate(torch.ones(5, 1, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_is_no_graph_is_refused() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    for arguments, message in (
        ((edges.mT, 3, None, (1, 1)), "must add up to 3 nodes"),
        ((edges[0], 3), r"must be \(2, E\) integers"),
        ((edges.float(), 3), r"must be \(2, E\) integers"),
        ((edges, 2), "join nodes 0 to 1, got 0 to 2"),
        ((edges, 3, torch.ones(3)), "each of 2 edges"),
        ((edges, 3, None, (2, 1)), "joins two of the graphs"),
        ((edges, 3, torch.tensor([1.0, torch.nan])), "must be finite"),
        ((edges, 3, torch.tensor([1.0, torch.inf])), "must be finite"),
        ((edges, 3, None, None, 0.0), "positive and finite, got rho=0.0"),
        ((edges, 3, None, None, torch.nan), "positive and finite, got rho=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Graphs.from_edges(*arguments)
    with pytest.raises(ValueError, match="positive and finite, got rho=-1"):
        Graphs.from_edges(edges, 3).with_rho(-1)
    with pytest.raises(ValueError, match="weights of node 1, with 1 for its loop, add up to -1"):
        normalised_edges(edges, 3, torch.tensor([1.0, -2.0]))
    with pytest.raises(ValueError, match="at least one graph"):
        Graphs.union([])
    with pytest.raises(TypeError, match="square sparse tensor"):
        as_graphs(torch.eye(3))
    with pytest.raises(TypeError, match="got dict"):
        as_graphs({})
