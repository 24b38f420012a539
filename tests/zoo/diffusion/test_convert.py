"""Weights of the authors and of diffusers, in and out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.diffusion import make_unet
from deq_zoo.diffusion.convert import from_authors, to_authors
from deq_zoo.errors import CheckpointError
from tests.zoo.diffusion.smoke import SMALL, make_model, make_task


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_file_in_the_old_format_becomes_a_checkpoint_that_predicts(tmp_path: Path) -> None:
    unet = make_unet(make_task().net)
    source, out = tmp_path / "old.pth", tmp_path / "new.safetensors"
    torch.save(to_authors(unet.state_dict()), source)
    words = ["convert", str(source), "--preset", "diffusion-smoke", "--out", str(out)]
    assert main(words) == 0
    model = deq_zoo.load(out)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 700])
    assert torch.equal(model(x, t).prediction, unet(x, t).sample)
    assert model.predict(torch.rand(8, 8)).prediction.noise.shape == (1, 8, 8)


def test_conversion_is_undone_by_its_inverse() -> None:
    state = make_unet(replace(SMALL, widths=(8, 8, 16), attention=(4, 2))).state_dict()
    assert_same(from_authors(to_authors(state)), state)
    assert_same(from_authors(state), state)
    with pytest.raises(CheckpointError, match=r"conv_in\.weight"):
        from_authors({"head.weight": torch.zeros(1)})


def test_a_model_goes_there_and_back() -> None:
    task, model = make_task(), make_model()
    state = dict(model.state_dict())
    assert_same(task.from_authors(task.to_authors(state)).weights, state)


def test_the_average_of_a_trained_model_is_written() -> None:
    task, model = make_task(), make_model()
    state = dict(model.state_dict())
    changed = {k: v + 1 if k.startswith("unet.") else v for k, v in state.items()}
    assert_same(task.to_authors(changed), task.to_authors(state))


def test_former_names_of_diffusers_convert() -> None:
    state = make_unet(SMALL).state_dict()
    former = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def to_former(key: str) -> str:
        for now, then in former.items():
            key = key.replace(f".{now}.", f".{then}.")
        return key

    given = {to_former(key): value for key, value in state.items()}
    assert given.keys() != state.keys()
    assert_same(from_authors(given), state)


def training_checkpoint(with_average: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """Return a list as the authors' training writes it, and the weights it stands for."""
    unet = make_unet(make_task().net)
    weights = to_authors(unet.state_dict())
    optimizer = torch.optim.Adam(unet.parameters())
    content: list[Any] = [{f"module.{k}": v for k, v in weights.items()}]
    content += [optimizer.state_dict(), 12, 34_000]
    if not with_average:
        return content, weights
    average = {key: value + 1 for key, value in weights.items()}
    return [*content, average], average


@pytest.mark.parametrize("with_average", [True, False])
def test_the_average_is_taken_from_a_training_checkpoint(
    with_average: bool, tmp_path: Path
) -> None:
    content, expected = training_checkpoint(with_average)
    torch.save(content, tmp_path / "ckpt.pth")
    task = make_task()
    state = task.pick_state(torch.load(tmp_path / "ckpt.pth", weights_only=True))
    assert state is not None
    assert_same(state, expected)
    converted = task.from_authors(state)
    task.build(converted.facts).load_state_dict(converted.weights)


def test_other_contents_are_left_to_the_reader_of_the_frame() -> None:
    task = make_task()
    assert task.pick_state({"state_dict": {}}) is None
    with pytest.raises(CheckpointError, match=r"training checkpoint .* got entries int, str"):
        task.pick_state([1, "a"])
    with pytest.raises(CheckpointError, match="got entries none"):
        task.pick_state([])
