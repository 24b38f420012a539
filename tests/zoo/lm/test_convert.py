"""The authors' checkpoints, there and back."""

from __future__ import annotations

import pytest
import torch

from deq_zoo.errors import CheckpointError
from deq_zoo.lm.convert import from_authors, to_authors
from tests.zoo.lm.golden import Golden
from tests.zoo.lm.nets import make_config, make_model


@pytest.mark.parametrize("design", ["original", "redesigned"])
def test_weights_go_to_the_authors_names_and_back(design: str) -> None:
    model = make_model(design)
    released = to_authors(model)
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    back = from_authors(model.config, released)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["deq-lm", "deq-seq"])
def test_golden_weights_go_round(name: str) -> None:
    golden = Golden(name)
    again = to_authors(golden.make_model())
    assert again.keys() == golden.weights.keys()
    for key, value in golden.weights.items():
        torch.testing.assert_close(again[key].float(), value, rtol=1e-6, atol=0)


def test_weights_that_are_not_the_authors_are_errors() -> None:
    model = make_model("redesigned")
    released = to_authors(model)
    released["crit.out_projs.1.weight"] += 1
    with pytest.raises(CheckpointError, match=r"out_projs\.1\.weight should equal word_emb"):
        from_authors(model.config, released)
    with pytest.raises(CheckpointError, match="other is no weight"):
        from_authors(model.config, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="convergent design is ours"):
        to_authors(make_model("convergent"))
    with pytest.raises(CheckpointError, match="the authors have no weights of it"):
        from_authors(make_config("convergent"), released)


def test_weights_of_the_other_design_or_another_size_are_errors() -> None:
    weights = {design: to_authors(make_model(design)) for design in ("original", "redesigned")}
    for released, wanted in (("original", "redesigned"), ("redesigned", "original")):
        message = f"weights of the {released} design, the preset is of the {wanted}"
        with pytest.raises(CheckpointError, match=message):
            from_authors(make_config(wanted), weights[released])
    with pytest.raises(CheckpointError, match="another size"):
        from_authors(make_config("redesigned", width=20, heads=10), weights["redesigned"])
