"""The authors' checkpoints, there and back."""

from __future__ import annotations

import pytest
import torch

from deq_zoo.errors import CheckpointError
from deq_zoo.lm.convert import from_authors, to_authors
from tests.zoo.lm.golden import Golden
from tests.zoo.lm.nets import made, net


@pytest.mark.parametrize("design", ["original", "redesigned"])
def test_weights_go_to_the_authors_names_and_back(design: str) -> None:
    model = made(design)
    theirs = to_authors(model)
    ours = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    back = from_authors(model.config, theirs)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], ours[key]) for key in ours)


@pytest.mark.parametrize("name", ["deq-lm", "deq-seq"])
def test_golden_weights_go_round(name: str) -> None:
    golden = Golden(name)
    again = to_authors(golden.model())
    assert again.keys() == golden.weights.keys()
    for key, value in golden.weights.items():
        torch.testing.assert_close(again[key].float(), value, rtol=1e-6, atol=0)


def test_weights_that_are_not_theirs_are_told() -> None:
    model = made("redesigned")
    theirs = to_authors(model)
    theirs["crit.out_projs.1.weight"] += 1
    with pytest.raises(CheckpointError, match=r"out_projs\.1\.weight should equal word_emb"):
        from_authors(model.config, theirs)
    with pytest.raises(CheckpointError, match="other is no weight"):
        from_authors(model.config, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="convergent design is ours"):
        to_authors(made("convergent"))
    with pytest.raises(CheckpointError, match="the authors have no weights of it"):
        from_authors(net("convergent"), theirs)


def test_weights_of_the_other_design_or_another_size_are_told() -> None:
    weights = {design: to_authors(made(design)) for design in ("original", "redesigned")}
    for theirs, ours in (("original", "redesigned"), ("redesigned", "original")):
        told = f"weights of the {theirs} design, the preset is of the {ours}"
        with pytest.raises(CheckpointError, match=told):
            from_authors(net(ours), weights[theirs])
    with pytest.raises(CheckpointError, match="another size"):
        from_authors(net("redesigned", width=20, heads=10), weights["redesigned"])
