"""Pictures: whose data they show, and how it was chosen."""

from __future__ import annotations

import torch

from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.pictures import state_map
from deq_zoo.ignn.set_task import GraphClassTask
from tests.zoo.ignn.tasks import make_task


def test_chains_are_drawn_with_all_their_nodes_and_the_caption_says_so() -> None:
    task = make_task()
    (picture,) = task.pictures(task.build().eval())
    assert "all 320 nodes of all 40 chains, training nodes (16) among them" in picture.caption


def test_drawn_graphs_are_test_graphs_chosen_at_random() -> None:
    task = GraphClassTask(data="rings", folds=3, net=IGNNConfig(width=4))
    states, graphs = task.pictures(task.build().eval())
    n = len(task.test_set)
    assert f"12 of {n} test graphs, drawn at random" in graphs.caption
    assert f"of all {n} test graphs" in states.caption


def test_few_states_make_no_cloud() -> None:
    assert state_map(torch.randn(2, 3), torch.arange(2), ("a", "b"), "States") == []
    assert len(state_map(torch.randn(4, 1), torch.arange(4) % 2, ("a", "b"), "States")) == 1
