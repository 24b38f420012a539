"""Reasoners as graphs: the packaged one answers as in Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deq_zoo.errors import ZooError
from deq_zoo.loading import open_model
from deq_zoo.reason.exporting import make_export
from deq_zoo.reason.keyed import draw_starts
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.presets import reason_smoke
from deq_zoo.reason.search import Search
from deq_zoo.reason.task import SolvePuzzles
from torchdeq import FixedPointIter, export


@pytest.mark.slow
def test_the_packaged_reasoner_answers_as_a_graph_as_in_python() -> None:
    model, preset = open_model("reason-6x6")
    assert isinstance(model, Reasoner)
    task = preset.task
    assert isinstance(task, SolvePuzzles)
    exportable = task.export(model, task.exporting())
    program = export.export(
        exportable.module, tuple(exportable.example.values()), solver=FixedPointIter()
    ).module()
    tokens = replace(task, test_puzzles=20).test_set.tokens.long()
    start = draw_starts(model, tokens, seed=0)
    with torch.no_grad():
        own, answer = exportable.module(tokens, *start), program(tokens, *start)
    torch.testing.assert_close(answer["logits"], own["logits"], atol=1e-3, rtol=1e-3)
    assert (answer["status"] == 0).float().mean() > 0.8


def test_noise_that_depends_on_the_puzzle_cannot_be_exported() -> None:
    task = reason_smoke().task
    assert isinstance(task, SolvePuzzles)
    task = replace(task, solve_noise="frozen")
    with pytest.raises(ZooError, match="--set solve_noise=off"):
        make_export(task.build(), task.facts())


def test_a_model_without_random_starts_takes_tokens_alone() -> None:
    task = reason_smoke().task
    assert isinstance(task, SolvePuzzles)
    net = replace(task.net, kind="trm", noise=0.0)
    task = replace(task, net=net, search=Search())
    found = make_export(task.build().eval(), task.facts())
    assert list(found.example) == ["tokens"]
    assert found.module(*found.example.values())["logits"].shape == (2, net.cells, net.vocab)
