"""Against numbers of the original implementation: float64, 1e-9."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.ignn import GraphIGNN, Graphs, IGNNConfig, ImplicitGraph, NodeIGNN, SkipIGNN
from deq_zoo.ignn.convert import from_authors
from deq_zoo.ignn.data import chains
from deq_zoo.ignn.metrics import f1_scores
from tests.golden import assert_matches, load_facts, load_tensors, select
from tests.zoo.ignn.problems import TIGHT

CLIPPED = {**TIGHT, "norm_type": "spectral_norm", "norm_clip": True}


def read(name: str) -> dict[str, Tensor]:
    """Read one file of tensors, in float64."""
    return load_tensors("ignn", name, torch.float64)


def load_weights(model: Any, state: dict[str, Tensor]) -> Any:
    model = model.double()
    model.load_state_dict(from_authors(model, state))
    return model.eval()


@torch.no_grad()
def check_layers(
    layers: Iterable[ImplicitGraph], io: dict[str, Tensor], prefix: str, graph: Graphs
) -> None:
    """Compare every step of every layer; golden states are feature-major."""
    for k, layer in enumerate(layers):
        expected = select(io, f"{prefix}layer{k}.")
        W, B = layer.weight(graph), expected["B"].mT.contiguous()
        assert_matches(W, expected["W_eff"])
        assert_matches(layer.Omega_1, expected["Omega_1_eff"])
        start = torch.zeros_like(B) if layer.start == "zeros" else B
        assert_matches(start, expected["x0"].mT)
        image = layer.step(graph.pad(expected["z_in"].mT), W, B, graph)
        assert_matches(graph.gather(image), expected["f_z_in"].mT)


def check_states(states: list[Tensor], io: dict[str, Tensor], prefix: str) -> None:
    for k, z in enumerate(states):
        assert_matches(z, io[f"{prefix}layer{k}.z_star"].mT)


def make_ppi(**options: Any) -> tuple[SkipIGNN, Graphs, dict[str, Tensor]]:
    io = read("ppi.io")
    model = SkipIGNN(6, 5, IGNNConfig(width=4, kappa=0.98), {**CLIPPED, **options})
    return (
        load_weights(model, read("ppi.state_dict")),
        Graphs.from_edges(io["edge_index"], 20).to(torch.float64),
        io,
    )


@torch.no_grad()
def test_golden_ppi_evaluation_is_reproduced() -> None:
    model, graph, io = make_ppi()
    assert_matches(graph.rho, io["eval.adj_rho"])
    check_layers(model.ignn, io, "eval.", graph)  # type: ignore[arg-type]
    out = model(io["x"], graph)
    check_states(out.state, io, "eval.")
    assert_matches(out.prediction, io["eval.output"])
    assert all(bool(stats.converged.all()) or stats.nfe < 3000 for stats in out.layer_stats)


@pytest.mark.parametrize(
    ("case", "options"), [("train_pg5", {"grad": 5, "tau": 0.5}), ("train_ift", {"ift": True})]
)
def test_golden_ppi_training_step_is_reproduced(case: str, options: dict[str, Any]) -> None:
    model, graph, io = make_ppi(**options)
    out = model.train()(io["x"], graph)
    loss = F.binary_cross_entropy_with_logits(out.prediction, io["y"])
    assert_matches(out.prediction, io[f"{case}.output"])
    assert_matches(loss, io[f"{case}.loss"][0])
    loss.backward()
    expected = select(io, f"{case}.grad.")
    assert expected.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_matches(parameter.grad, expected[name])
    after = select(io, "train.buffer_after.")
    assert_matches(dict(model.named_buffers()), after)


@pytest.mark.parametrize("norm", ["none", "weight_norm"])
@torch.no_grad()
def test_golden_chains_are_reproduced(norm: str) -> None:
    io = read("chains.io")
    config = IGNNConfig(width=4, kappa=0.9, unit=True, start="zeros")
    model = NodeIGNN(100, 2, config, {**TIGHT, "norm_type": norm})
    load_weights(model, select(io, f"{norm}.state_dict."))
    made = chains()
    graph = Graphs.from_edges(io["data.adj_indices"], 400, io["data.adj_values"])
    assert made.x is not None
    check_layers([model.ig1], io, f"{norm}.eval.", graph)
    out = model(made.x.double(), graph)
    check_states(out.state, io, f"{norm}.eval.")
    assert_matches(out.prediction, io[f"{norm}.eval.output"])
    if norm == "none":
        model.project_(float(graph.rho[0]))
        assert_matches(model.ig1.W.data, io["none.W_param_after_forward"])


def test_golden_chains_data_are_reproduced() -> None:
    io, made = read("chains.io"), chains()
    assert made.x is not None
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(made, part), io[f"data.idx_{part}"])
    assert torch.equal(made.y, io["data.labels"])
    assert torch.equal(made.x.nonzero(), io["data.feature_nonzero_index"])
    expected = torch.zeros(400, 400, dtype=torch.float64)
    expected[tuple(io["data.adj_indices"])] = io["data.adj_values"]
    dense = made.graph().outgoing.to_dense().double()
    assert_close(dense, expected, rtol=0, atol=1e-7)


@torch.no_grad()
def test_golden_amazon_is_reproduced() -> None:
    io = read("amazon.io")
    config = IGNNConfig(width=4, kappa=load_facts("ignn")["cases"]["amazon"]["config"]["kappa"],
                        start="zeros")  # fmt: skip
    model = NodeIGNN(12, 3, config, {**TIGHT, "norm_type": "weight_norm"})
    load_weights(model, read("amazon.state_dict"))
    graph = Graphs.from_edges(io["adj_indices"], 12, io["adj_values"])
    check_layers([model.ig1], io, "eval.", graph)
    for x in (None, torch.eye(12, dtype=torch.float64)):
        out = model(x, graph)
        check_states(out.state, io, "eval.")
        assert_matches(out.prediction, io["eval.output"])


@pytest.mark.parametrize("case", ["train_adj", "test_adj"])
@torch.no_grad()
def test_golden_graph_classification_is_reproduced(case: str) -> None:
    io = read("graph.io")
    model = GraphIGNN(3, 2, IGNNConfig(width=8, kappa=0.9), TIGHT)
    load_weights(model, read("graph.state_dict"))
    sizes = io["batch"].bincount().tolist()
    graph = Graphs.from_edges(io[f"{case}.indices"], 16, io[f"{case}.values"], sizes, rho=1.0)
    check_layers((model.ig1, model.ig2, model.ig3), io, f"{case}.", graph)
    out = model(io["x"], graph)
    check_states(out.state, io, f"{case}.")
    assert_matches(out.prediction.log_softmax(1), io[f"{case}.output"])
    assert [len(stats.status) for stats in out.layer_stats] == [3, 3, 3]


def test_golden_f1_is_reproduced() -> None:
    facts = load_facts("ignn", "metrics")
    logits, y = torch.tensor(facts["logits"]), torch.tensor(facts["y"])
    scores = f1_scores(logits > 0, y)
    assert scores["micro_f1"] == pytest.approx(100 * facts["micro_f1"], rel=1e-6)
    assert scores["macro_f1"] == pytest.approx(100 * facts["macro_f1"], rel=1e-6)
