"""The networks: published sizes, equations, batches, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from deq_zoo.ignn import GraphIGNN, Graphs, IGNNConfig, NodeIGNN, SkipIGNN
from deq_zoo.ignn.convert import to_authors
from tests.zoo.ignn.problems import TIGHT, draw_graph

CLIPPED: dict[str, Any] = {"norm_type": "spectral_norm", "norm_clip": True}


def count_published(model: nn.Module) -> int:
    """Count parameters as the authors do: with those that nothing depends on."""
    buffers = {name for name, _ in model.named_buffers()}
    return sum(v.numel() for k, v in to_authors(model.state_dict()).items() if k not in buffers)


def test_published_sizes() -> None:
    with torch.device("meta"):
        wide = IGNNConfig(width=256)
        clipped, plain = SkipIGNN(50, 121, wide, CLIPPED), SkipIGNN(50, 121, wide)
        assert count_published(clipped) == 4_664_206
        assert count_published(plain) == 4_656_931
        assert sum(p.numel() for p in clipped.parameters()) == 4_664_206 - 2_425
        for norm, size in (("weight_norm", 3_552), ("none", 3_504)):
            assert (
                count_published(NodeIGNN(100, 2, IGNNConfig(width=16), {"norm_type": norm})) == size
            )
        for norm, size in (("weight_norm", 85_749_248), ("none", 85_748_864)):
            amazon = NodeIGNN(334_863, 58, IGNNConfig(width=128), {"norm_type": norm})
            assert count_published(amazon) == size
        for labels, size in ((3, 33_538), (7, 34_050), (18, 35_458), (37, 37_890)):
            model = GraphIGNN(labels, 2, IGNNConfig(width=64))
            assert count_published(model) == size
        assert sum(p.numel() for p in GraphIGNN(3, 2, IGNNConfig(width=64)).parameters()) == (
            33_538 - 8_576
        )


def make_nets(**deq: Any) -> list[Any]:
    config = IGNNConfig(width=3, dropout=0.0, kappa=0.8)
    return [kind(4, 2, config, deq).double() for kind in (SkipIGNN, NodeIGNN, GraphIGNN)]


@torch.no_grad()
def test_networks_equal_their_formulas() -> None:
    graph = draw_graph(7, 9, sizes=(4, 3))
    x = torch.randn(7, 4, dtype=torch.float64)
    skip, node, whole = (model.eval() for model in make_nets(**TIGHT))
    out, y = skip(x, graph), x
    for k in range(5):
        (z,), _ = skip.ignn[k](y, graph)
        assert_close(out.state[k], z)
        y = z + y @ skip.proj[k].weight.mT + skip.proj[k].bias
        y = y if k == 4 else torch.where(y > 0, y, y.exp() - 1)
    assert_close(out.prediction, y)
    (z,), _ = node.ig1(x, graph)
    assert_close(node(x, graph).prediction, z @ node.V.weight.mT)
    unit = NodeIGNN(4, 2, IGNNConfig(width=3, kappa=0.8, unit=True), TIGHT).double().eval()
    unit.load_state_dict(node.state_dict())
    scaled = z / z.norm(dim=1, keepdim=True).clamp_min(1e-12)
    assert_close(unit(x, graph).prediction, scaled @ node.V.weight.mT)
    h = x
    for part in (whole.ig1, whole.ig2, whole.ig3):
        assert part.Omega_2 is None
        (h,), _ = part(h, graph)
    pooled = torch.stack((h[:4].sum(0), h[4:].sum(0)))
    hidden = F.linear(pooled, whole.V_0.weight, whole.V_0.bias).relu()
    assert_close(whole(x, graph).prediction, F.linear(hidden, whole.V_1.weight, whole.V_1.bias))


@torch.no_grad()
def test_a_graph_in_a_batch_is_classified_as_alone_and_states_start_the_next_solve() -> None:
    parts = [draw_graph(n, 3 * n, seed=n) for n in (5, 2)]
    x = torch.randn(7, 4, dtype=torch.float64)
    for model in (net.eval() for net in make_nets(f_tol=1e-12, f_stop_mode="rel", f_max_iter=500)):
        out = model(x, Graphs.union(parts))
        alone = torch.cat([model(x[:5], parts[0]).prediction, model(x[5:], parts[1]).prediction])
        assert_close(out.prediction, alone, rtol=1e-8, atol=1e-9)
        warm = model(x, Graphs.union(parts), out.state)
        assert sum(s.nfe for s in warm.layer_stats) < sum(s.nfe for s in out.layer_stats)


@pytest.mark.parametrize("options", [{"grad": 5, "tau": 0.5}, {"ift": True}])
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    graph, x = draw_graph(7, 9, sizes=(4, 3)), torch.randn(7, 4, dtype=torch.float64)
    for model in make_nets(**options, **CLIPPED, on_failure="ignore"):
        model(x, graph).prediction.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_projecting_the_parameters_leaves_the_network_as_it_is() -> None:
    graph, x = draw_graph(6, 20), torch.randn(6, 4, dtype=torch.float64)
    model = make_nets(**TIGHT)[1].eval()
    before = model(x, graph).prediction
    model.project_(float(graph.rho))
    assert_close(model(x, graph).prediction, before)
    assert bool((model.ig1.W.abs().sum(1) <= 0.8 / graph.rho * (1 + 1e-12)).all())


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="width must be at least 1"):
        IGNNConfig(width=0)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\)"):
        IGNNConfig(dropout=1.0)
    with pytest.raises(ValueError, match="needs features and classes, got 4 and 0"):
        NodeIGNN(4, 0, IGNNConfig())
    with pytest.raises(ValueError, match="passes one state on"):
        SkipIGNN(4, 2, IGNNConfig(), {"n_states": 3})
