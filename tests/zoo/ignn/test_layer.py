"""The implicit layer: its equation, its constraint, its batches, its gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.ignn import Graphs, ImplicitGraph, project_rows
from tests.zoo.ignn.problems import TIGHT, draw_graph
from torchdeq import remove_norm

NORMS: list[dict[str, Any]] = [
    {},
    {"norm_type": "weight_norm"},
    {"norm_type": "spectral_norm", "norm_clip": True},
]


def make_layer(p: int = 3, m: int = 4, **options: Any) -> ImplicitGraph:
    deq = {**TIGHT, **options.pop("deq", {})}
    return ImplicitGraph(p, m, deq=deq, **options).double()


def identity(x: Tensor) -> Tensor:
    return x


@given(st.integers(1, 9), st.floats(0.05, 3.0), st.integers(0, 2**16))
def test_projection_gives_the_nearest_row_of_the_ball(m: int, radius: float, seed: int) -> None:
    W = torch.randn(4, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    P = project_rows(W, radius)
    assert bool((P.abs().sum(1) <= radius * (1 + 1e-12)).all())
    inside = W.abs().sum(1) <= radius
    assert torch.equal(P[inside], W[inside])
    # Nearest: for a convex set, (W - P) points away from it: (W - P).(Q - P) <= 0 for Q in it.
    corners = torch.cat((torch.eye(m), -torch.eye(m))).double() * radius
    for w, p in zip(W, P, strict=True):
        assert bool(((corners - p) @ (w - p) <= 1e-9).all())
    assert_close(project_rows(P, radius), P)


def test_projection_of_a_stack_has_a_ball_for_each_matrix() -> None:
    W = torch.randn(5, 5, dtype=torch.float64)
    radii = torch.tensor([0.3, 1.0, 50.0], dtype=torch.float64)
    stack = project_rows(W, radii[:, None, None])
    for k, radius in enumerate(radii.tolist()):
        assert_close(stack[k], project_rows(W, radius))
    assert torch.equal(stack[2], W)
    assert project_rows(W.bfloat16(), 0.5).dtype == torch.bfloat16
    assert bool(project_rows(torch.full((2, 2), torch.nan), 0.5).isnan().all())


@pytest.mark.parametrize("self_term", [True, False])
@torch.no_grad()
def test_fixed_point_of_a_linear_layer_equals_a_dense_solve(self_term: bool) -> None:
    graph = draw_graph(6, 15)
    model = make_layer(self_term=self_term, phi=identity).eval()
    x = torch.randn(6, 3, dtype=torch.float64)
    (z,), stats = model(x, graph)
    At, W = graph.incoming.to_dense(), model.weight(graph)
    B = At @ x @ model.Omega_1.mT
    if model.Omega_2 is not None:
        B = B + x @ model.Omega_2.mT
    system = torch.eye(24, dtype=torch.float64) - torch.kron(At, W)  # rows of Z, one after another
    assert_close(z, torch.linalg.solve(system, B.flatten()).view(6, 4), rtol=1e-9, atol=1e-11)
    assert bool(stats.converged.all())


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.integers(1, 40),
    st.floats(0.1, 100.0),
    st.sampled_from(NORMS),
    st.integers(0, 2**16),
)
def test_after_projection_every_random_graph_converges(
    sizes: list[int], edges: int, scale: float, norm: dict[str, Any], seed: int
) -> None:
    torch.manual_seed(seed)
    graph = draw_graph(sum(sizes), edges, seed, sizes)
    model = make_layer(kappa=0.9, deq={"f_tol": 1e-9, "f_max_iter": 600, **norm})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)  # as wild as training may make them
        (z,), stats = model(torch.randn(sum(sizes), 3, dtype=torch.float64), graph)
    assert bool(stats.converged.all())
    assert bool(z.isfinite().all())
    assert bool((model.well_posedness(graph).bound <= 0.9 * (1 + 1e-9)).all())


def test_without_constraint_the_same_graph_diverges_and_says_so() -> None:
    graph = draw_graph(6, 30)
    model = make_layer(kappa=None, deq={"f_max_iter": 60})
    with torch.no_grad():
        model.W.mul_(20)
        _, stats = model(torch.randn(6, 3, dtype=torch.float64), graph)
    assert bool(stats.failed.all())
    assert float(model.well_posedness(graph).bound) > 1


def test_a_fixed_spectral_norm_alone_makes_symmetric_graphs_well_posed() -> None:
    edges = torch.randint(7, (2, 20))
    graph = Graphs.from_edges(torch.cat((edges, edges.flip(0)), 1), 7).to(torch.float64)
    target = 0.9 / float(graph.rho)
    norm = {"norm_type": "spectral_norm", "norm_no_scale": True, "norm_target_norm": target}
    model = make_layer(kappa=None, deq={**norm, "f_tol": 1e-9})
    with torch.no_grad():
        model.get_parameter("W_orig").mul_(30)
        (_,), stats = model(torch.randn(7, 3, dtype=torch.float64), graph)
    assert float(torch.linalg.matrix_norm(model.W, 2)) == pytest.approx(target)
    assert bool(stats.converged.all())


@pytest.mark.parametrize("norm", NORMS, ids=["none", "weight", "spectral"])
@torch.no_grad()
def test_a_graph_does_not_depend_on_its_batch_mates(norm: dict[str, Any]) -> None:
    parts = [draw_graph(n, 3 * n, seed=n) for n in (5, 1, 8)]
    model = make_layer(deq=norm).eval()
    xs = [torch.randn(part.nodes, 3, dtype=torch.float64) for part in parts]
    (z,), stats = model(torch.cat(xs), Graphs.union(parts))
    assert stats.status.shape == (3,)
    for x, part, got in zip(xs, parts, z.split([5, 1, 8]), strict=True):
        assert_close(got, model(x, part)[0][0], rtol=1e-9, atol=1e-11)
    (shuffled,), _ = model(torch.cat(xs[::-1]), Graphs.union(parts[::-1]))
    assert_close(torch.cat(shuffled.split([8, 1, 5])[::-1]), z, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_the_largest_rho_can_be_shared_as_published() -> None:
    joined = Graphs.union([draw_graph(n, 3 * n, seed=n) for n in (5, 8)])
    tied = joined.with_rho(float(joined.rho.max()))
    model = make_layer()
    assert model.weight(joined).shape == (2, 4, 4)
    assert_close(model.weight(tied), model.weight(joined)[int(joined.rho.argmax())])


def test_padding_stays_zero_and_one_application_is_the_formula() -> None:
    graph = draw_graph(7, 9, sizes=(5, 2))
    model = make_layer()
    x, z = torch.randn(7, 3).double(), torch.randn(7, 4).double()
    W, B = model.weight(graph), model.inject(x, graph)
    image = model.step(graph.pad(z), W, B, graph)
    assert not bool(image[1, 2:].any())
    At = graph.incoming.to_dense()
    moved = torch.cat((z[:5] @ W[0].mT, z[5:] @ W[1].mT))
    assert_close(graph.gather(image), (At @ moved + B).relu())


@pytest.mark.parametrize("sizes", [(6,), (4, 2)])
@pytest.mark.parametrize("norm", NORMS, ids=["none", "weight", "spectral"])
def test_ift_equals_a_long_unrolling(sizes: tuple[int, ...], norm: dict[str, Any]) -> None:
    graph = draw_graph(6, 12, sizes=sizes)
    x = torch.randn(6, 3, dtype=torch.float64)

    def compute_gradients(**deq: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = make_layer(kappa=0.6, deq={**norm, **deq})
        (z,), _ = model(x, graph)
        return list(torch.autograd.grad(z.square().sum(), list(model.parameters())))

    for got, want in zip(
        compute_gradients(ift=True), compute_gradients(f_max_iter=0, grad=120), strict=True
    ):
        assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_gradients_pass_the_projection_straight_through() -> None:
    graph = draw_graph(6, 30)
    model = make_layer(deq={"ift": True})
    x = torch.randn(6, 3, dtype=torch.float64)
    (z,), _ = model(x, graph)
    through = torch.autograd.grad(z.sum(), model.W)[0]
    model.project_(float(graph.rho))  # now the projection has nothing to do
    (again,), _ = model(x, graph)
    assert_close(again, z)
    assert_close(torch.autograd.grad(again.sum(), model.W)[0], through)


def test_implicit_gradients_are_exact_for_features_and_twice() -> None:
    graph = draw_graph(3, 5)
    options = {"ift": True, "higher_order": True, "f_tol": 1e-12, "b_tol": 1e-12}
    smooth = make_layer(2, 2, kappa=0.3, phi=torch.tanh, deq=options)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: smooth(x, graph)[0][0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: smooth(x, graph)[0][0], (x,))


@pytest.mark.parametrize("solver", ["anderson", "broyden", "newton_krylov"])
@torch.no_grad()
def test_every_kind_of_solver_finds_the_same_states(solver: str) -> None:
    graph = draw_graph(8, 20, sizes=(5, 3))
    x = torch.randn(8, 3, dtype=torch.float64)
    model = make_layer(kappa=0.8).eval()
    other = make_layer(kappa=0.8, deq={"f_solver": solver, "f_tol": 1e-10}).eval()
    other.load_state_dict(model.state_dict())
    assert_close(other(x, graph)[0][0], model(x, graph)[0][0], rtol=1e-7, atol=1e-8)


@torch.no_grad()
def test_a_warm_start_needs_fewer_evaluations_and_starts_can_be_chosen() -> None:
    graph = draw_graph(8, 20)
    x = torch.randn(8, 3, dtype=torch.float64)
    model = make_layer(deq={"f_tol": 1e-6}).eval()
    (z,), cold = model(x, graph)
    assert model(x, graph, z)[1].nfe < cold.nfe
    zeros = make_layer(start="zeros").eval()
    zeros.load_state_dict(model.state_dict())
    assert_close(zeros(x, graph)[0][0], z, rtol=0, atol=1e-4)


def test_training_may_sample_states() -> None:
    graph = draw_graph(5, 9, sizes=(3, 2))
    model = make_layer(deq={"f_tol": 0.0, "f_max_iter": 6, "n_states": 3})
    states, stats = model(torch.randn(5, 3, dtype=torch.float64), graph)
    assert [tuple(z.shape) for z in states] == [(5, 4)] * 3
    assert stats.nfe == 6


@pytest.mark.parametrize("norm", NORMS, ids=["none", "weight", "spectral"])
def test_copies_pickles_and_state_dicts_give_the_same_answers(norm: dict[str, Any]) -> None:
    graph, x = draw_graph(5, 9), torch.randn(5, 3, dtype=torch.float64)
    model = make_layer(deq=norm)
    model(x, graph)[0][-1].sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    again = make_layer(deq=norm)
    again.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again]
    with torch.no_grad():
        expected = model.eval()(x, graph)[0][0]
        for other in copies:
            assert torch.equal(other.eval()(x, graph)[0][0], expected)
        remove_norm(model)
        assert_close(model(x, graph)[0][0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_trains(dtype: torch.dtype) -> None:
    graph = draw_graph(5, 9, dtype=torch.float32)
    model = ImplicitGraph(3, 4, deq={"on_failure": "ignore"}).to(dtype)
    (z,), _ = model(torch.randn(5, 3, dtype=dtype), graph)
    assert z.dtype == dtype
    z.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_autocast_keeps_the_state_in_the_models_precision() -> None:
    graph = draw_graph(5, 9, dtype=torch.float32)
    model = ImplicitGraph(3, 4, deq={"on_failure": "ignore"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (z,), _ = model(torch.randn(5, 3), graph)
    assert z.dtype == torch.float32
    z.sum().backward()


@torch.no_grad()
def test_a_graph_without_nodes_disturbs_nothing() -> None:
    none = Graphs.from_edges(torch.empty(2, 0, dtype=torch.int64), 0)
    some = draw_graph(3, 5)
    model = make_layer().eval()
    assert model(torch.empty(0, 3, dtype=torch.float64), none)[0][0].shape == (0, 4)
    x = torch.randn(3, 3, dtype=torch.float64)
    (z,), stats = model(x, Graphs.union([none, some]))
    assert_close(z, model(x, some)[0][0])
    assert stats.status.shape == (2,)


@torch.no_grad()
def test_odd_graphs_one_node_no_edges_non_contiguous_features() -> None:
    lonely = Graphs.from_edges(torch.empty(2, 0, dtype=torch.int64), 1)
    model = make_layer()
    (z,), stats = model(torch.ones(1, 3, dtype=torch.float64), lonely)
    assert model.Omega_2 is not None
    assert_close(z, model.Omega_2.sum(1).relu()[None])
    assert bool(stats.converged.all())
    graph = draw_graph(5, 9)
    x = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(model(x.mT, graph)[0][0], model(x.mT.contiguous(), graph)[0][0])


def test_identity_becomes_the_largest_multiple_that_is_well_posed() -> None:
    graph = draw_graph(5, 9)
    model = make_layer(init="identity", kappa=0.8)
    assert_close(model.weight(graph), 0.8 / graph.rho * torch.eye(4, dtype=torch.float64))


def test_identity_features_need_no_matrix() -> None:
    graph = draw_graph(5, 9)
    model = make_layer(5, 4).eval()
    with torch.no_grad():
        expected = model(torch.eye(5, dtype=torch.float64), graph)[0][0]
        assert_close(model(None, graph)[0][0], expected)
        with pytest.raises(ValueError, match="one for each node: built for 5, got a graph of 6"):
            model(None, draw_graph(6, 3))


def test_what_cannot_be_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kappa": 0.0}, "None for no projection, got 0.0"),
        ({"kappa": 1.0}, "kappa must lie in"),
        ({"start": "ones"}, "'injection' or 'zeros'"),
        ({"init": "zeros"}, "'uniform' or 'identity'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            ImplicitGraph(3, 4, **options)
    with pytest.raises(ValueError, match="a layer needs features"):
        ImplicitGraph(0, 4)
    with pytest.raises(ValueError, match=r"features must be \(5, 3\)"):
        make_layer()(torch.zeros(4, 3, dtype=torch.float64), draw_graph(5, 9))
    with pytest.raises(TypeError, match="norm_typ"):
        ImplicitGraph(3, 4, deq={"norm_typ": "none"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_rounds_at_the_scale_of_the_ball(dtype: torch.dtype) -> None:
    n = 72
    edges = torch.cartesian_prod(torch.arange(n), torch.arange(n)).mT
    complete = Graphs.from_edges(edges[:, edges[0] != edges[1]], n)
    model = ImplicitGraph(3, 4, init="identity", kappa=0.9).to(dtype)
    assert float(model.well_posedness(complete).bound) <= 0.9 * (1 + 2**-7)
    assert float(model.weight(complete).diagonal().min()) > 0


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("training", [True, False])
def test_well_posedness_is_that_of_the_parameters_and_changes_nothing(
    norm: str, training: bool
) -> None:
    graph = draw_graph(5, 9)
    model = make_layer(kappa=None, deq={"norm_type": norm}).train(training)
    before = model.well_posedness(graph).bound
    with torch.no_grad():
        model.get_parameter("W_g").mul_(0.5)  # as an optimiser would
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert_close(model.well_posedness(graph).bound, before / 2)
    assert all(module.training == training for module in model.modules())
    assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert model.W.requires_grad


def test_graphs_that_share_an_adjacency_cannot_leave_the_solve() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"compact=True takes finished graphs out .* but 2 share"):
        make_layer()(x, draw_graph(5, 4, sizes=(3, 2)), compact=True)
