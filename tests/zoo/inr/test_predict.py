"""Using a field in Python: points, sizes, starts, and what a checkpoint says about its signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.inr import FieldConfig, FitSignal, Rendering, Representation, Signal, coordinates, fit
from deq_zoo.inr.data import ripples
from deq_zoo.inr.signal import Grid
from deq_zoo.predictions import OutFolder
from deq_zoo.preset import Preset
from deq_zoo.values import to_data
from torchdeq import DEQConfig

NET = FieldConfig(width=8, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")


@pytest.fixture(scope="module")
def model() -> Representation:
    return fit(ripples(3), 5, net=NET, lr=1e-2)


def test_a_signal_is_predicted_at_any_size(model: Representation) -> None:
    whole = model.predict().prediction
    assert whole.shape == (16, 16, 3)
    assert torch.equal(model.predict((16, 16)).prediction, whole)
    assert torch.equal(model.predict(Rendering()).prediction, whole)
    large = model.predict((31, 31))
    assert large.state is None
    assert_close(large.prediction[::2, ::2], whole, rtol=0, atol=1e-3)  # the same points


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_points_of_any_shape_and_precision_are_predicted(
    model: Representation, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = 2 * torch.rand(*shape, 2, dtype=dtype) - 1
    out = model.predict(x)
    with torch.no_grad():
        wanted = model(x.float()).prediction
    assert out.prediction.shape == (*shape, 3)
    assert_close(out.prediction, wanted, rtol=0, atol=1e-4)
    assert not out.prediction.requires_grad


def test_points_in_blocks_have_the_values_of_all_at_once(
    model: Representation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deq_zoo.inr.model.block_size", lambda width: 128)
    n = 3 * 128 + 7
    x = 2 * torch.rand(n, 2) - 1
    out = model.predict(x)
    with torch.no_grad():
        whole = model(x)
    assert_close(out.prediction, whole.prediction, rtol=0, atol=1e-3)  # blocks stop on their own
    assert out.state is not None
    assert out.state.shape == (n, 8)
    assert out.stats is not None
    assert len(out.stats.status) == len(out.stats["rel_lowest"]) == 3 * 64 + 7
    assert out.stats["rel_trace"].shape == (len(out.stats.status), out.stats.nfe)
    again = model.predict(x, out.state)
    assert again.stats is not None
    assert again.stats.nfe < out.stats.nfe


def test_predicting_leaves_the_mode_of_a_model_alone(model: Representation) -> None:
    model.train()
    model.predict((4, 4))
    assert model.training
    assert model.field.training
    model.eval()


def test_a_start_belongs_to_points(model: Representation) -> None:
    with pytest.raises(TypeError, match="a start z0 belongs to coordinates"):
        model.predict((4, 4), torch.zeros(16, 8))
    with pytest.raises(TypeError, match="floating point"):
        model.predict(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ZooError, match="takes 2 positive numbers"):
        model.predict((4,))


def test_an_explicit_field_predicts_without_state_and_statistics() -> None:
    siren = fit(ripples(1), 2, net=FieldConfig(kind="siren", width=8, input_scale=8.0))
    out = siren.predict(torch.zeros(3, 2))
    assert (out.state, out.stats) == (None, None)
    assert siren.predict((4, 4)).prediction.shape == (4, 4, 1)


def test_a_solve_that_did_not_settle_is_said(tmp_path: Path) -> None:
    deq = DEQConfig(f_max_iter=1, f_tol=1e-9, grad=[3], on_failure="ignore")
    task = FitSignal(net=NET, deq=deq, data="ripples")
    first, *_ = task.sample(task.build().eval(), Rendering(), OutFolder(tmp_path))
    assert "did not settle" in first.text
    assert "did not settle" in first.data["warning"]


def test_a_fit_that_diverges_raises() -> None:
    """Stop where the last loss is finite and the weights are not, and at a loss of NaN."""
    for steps in (2, 10):
        with pytest.raises(ZooError, match=r"nan|inf|finite"):
            fit(ripples(1), steps, net=NET, lr=1e9)


def save(model: dict[str, torch.Tensor], task: FitSignal, path: Path, facts: Any) -> Path:
    config = {"name": "inr-file", "preset": to_data(Preset(task, steps=1))}
    Checkpoint(1, model, config=config, facts=facts).save(path)
    return path


def test_the_grid_of_a_signal_travels_in_the_facts(tmp_path: Path) -> None:
    task = FitSignal(net=NET, deq=RECIPE, file=str(tmp_path / "gone.wav"))
    sound = task.with_signal(Signal("audio", torch.zeros(20, 1), 8000.0))
    facts = sound.facts()
    assert facts == {"shape": [20], "rate": 8000.0}
    file = save(sound.build().state_dict(), task, tmp_path / "a.safetensors", facts)
    model = deq_zoo.load(file)
    assert isinstance(model, Representation)
    assert model.grid == Grid((20,), 8000.0)
    assert model.predict().prediction.shape == (20, 1)


def test_weights_of_earlier_versions_have_the_grid_among_them(tmp_path: Path) -> None:
    task = FitSignal(net=NET, deq=RECIPE, file=str(tmp_path / "gone.png"))
    image = task.with_signal(Signal("image", ripples(3)))
    former = {**image.build().state_dict(), "frame": torch.tensor([0, 16, 16])}
    model = deq_zoo.load(save(former, task, tmp_path / "a.safetensors", None))
    assert isinstance(model, Representation)
    assert model.grid == Grid((16, 16), 0.0)
    nowhere = {**former, "frame": torch.tensor([0, 0, 0])}
    other = deq_zoo.load(save(nowhere, task, tmp_path / "b.safetensors", None))
    with pytest.raises(ZooError, match="does not know the size"):
        other.predict(None)
    x = coordinates((16, 16), torch.arange(256))
    assert_close(other.predict(x).prediction.view(16, 16, 3), model.predict().prediction)
