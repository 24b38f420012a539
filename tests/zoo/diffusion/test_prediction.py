"""Images as users have them, inverted in Python and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn

from deq_zoo.diffusion import ChainConfig, Denoiser, InversionConfig
from deq_zoo.diffusion.data import CELEBA_BOX, read_image, to_bytes
from deq_zoo.diffusion.model import DIGITS
from deq_zoo.diffusion.plan import EXACT
from deq_zoo.diffusion.prediction import prepare
from deq_zoo.diffusion.task import Denoise
from deq_zoo.errors import DataError, ZooError
from deq_zoo.images.inputs import ImageLike, as_image
from deq_zoo.predictions import Failure, OutFolder, Prediction
from tests.zoo.diffusion.inputs import predict_inputs, python_input
from tests.zoo.diffusion.nets import write_picture
from tests.zoo.diffusion.smoke import make_model, make_task


@pytest.fixture(scope="module")
def model() -> Denoiser:
    return make_model()


def predict(model: Denoiser, paths: list[Path], out: Path, force: bool = False) -> list[Any]:
    return list(make_task().predict(model, paths, OutFolder(out, force)))


def test_one_image_in_every_form_gives_one_noise(model: Denoiser, tmp_path: Path) -> None:
    array = (200 * np.eye(8)).astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "x.png")
    floats = torch.from_numpy(array).float() / 255
    forms: list[ImageLike] = [
        tmp_path / "x.png",
        str(tmp_path / "x.png"),
        Image.fromarray(array),
        array,
        floats,
    ]
    noises = [model.predict(form).prediction.noise for form in forms]
    assert all(torch.equal(noise, noises[0]) for noise in noises)


def test_the_noise_generates_the_reconstruction(model: Denoiser) -> None:
    """Compare with the chain run step by step, and with errors typed again here."""
    output = model.train().predict(python_input())
    assert model.training
    result, chain = output.prediction, model.eval().plan.make_chain(model)
    again = chain.sequential(result.noise[None])
    assert torch.equal(to_bytes(again[0]), result.reconstruction)
    target = torch.linspace(0, 255, 64).round().view(1, 1, 8, 8) / 127.5 - 1
    assert result.sse == pytest.approx(float((again - target).square().sum()), rel=1e-3)
    assert result.mse == pytest.approx(result.sse / 64)
    assert result.psnr == pytest.approx(10 * np.log10(4 / result.mse))
    assert torch.equal(output.state[0, 0], result.noise)
    assert output.state.shape == (1, 11, 1, 8, 8)
    assert output.stats is not None
    assert output.stats.converged.all()


def test_a_second_call_goes_on_from_the_state_of_the_first(model: Denoiser) -> None:
    first = model.predict(python_input(), steps=4)
    second = model.predict(python_input(), first.state, steps=4)
    assert first.prediction.steps == 4
    assert second.prediction.sse < first.prediction.sse
    assert second.prediction.work.rounds < first.prediction.work.rounds  # nothing to encode
    with pytest.raises(ValueError, match=r"z0 must be .*\(1, 11, 1, 8, 8\)"):
        model.predict(python_input(), first.state[:, 1:])


def test_options_of_a_call_are_honoured_or_refused(model: Denoiser) -> None:
    stats = model.predict(python_input(), f_max_iter=2).stats
    assert stats is not None
    assert stats.nfe == 2
    with pytest.raises(ValueError, match="n_states would have no effect"):
        model.predict(python_input(), n_states=2)


def test_the_noises_of_a_stochastic_chain_belong_to_the_prediction(tmp_path: Path) -> None:
    task = make_task(chain=ChainConfig(steps=6, eta=0.5))
    model = make_model(task)
    result = model.predict(python_input()).prediction
    assert result.step_noise is not None
    chain = model.plan.make_chain(model)
    again = chain.sequential(result.noise[None], result.step_noise[None])
    assert torch.equal(to_bytes(again[0]), result.reconstruction)
    write_picture(tmp_path / "a.png")
    (prediction,) = task.predict(model, [tmp_path / "a.png"], OutFolder(tmp_path / "o"))
    assert isinstance(prediction, Prediction)
    with safe_open(prediction.files[0], "pt") as file:
        assert sorted(file.keys()) == ["noise", "step_noise"]


def test_files_are_written_to_the_folder_alone(model: Denoiser, tmp_path: Path) -> None:
    good, broken = predict_inputs(tmp_path / "in")
    before = sorted((tmp_path / "in").iterdir())
    results = predict(model, [broken[0], good[0], broken[1], good[1]], tmp_path / "out")
    assert [type(result) for result in results] == [Failure, Prediction, Failure, Prediction]
    assert sorted((tmp_path / "in").iterdir()) == before
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("bright-noise.safetensors", "bright-reconstruction.png"),
        *("wide-noise.safetensors", "wide-reconstruction.png"),
    }
    expected = model.predict(good[0]).prediction
    with safe_open(results[1].files[0], "pt") as file:
        assert torch.equal(file.get_tensor("noise"), expected.noise)
        assert file.metadata() == {"steps": "10", "spacing": "uniform", "eta": "0.0"}
    shown = torch.from_numpy(np.array(Image.open(results[1].files[1])))
    assert torch.equal(shown, expected.reconstruction[0])
    assert json.loads(json.dumps(results[1].data))["sse"] == expected.sse
    assert "PSNR" in results[1].text


def test_nothing_is_replaced_without_force(model: Denoiser, tmp_path: Path) -> None:
    write_picture(tmp_path / "x.png")
    predict(model, [tmp_path / "x.png"], tmp_path / "o")
    with pytest.raises(ZooError, match="--force"):
        predict(model, [tmp_path / "x.png"], tmp_path / "o")
    predict(model, [tmp_path / "x.png"], tmp_path / "o", force=True)


def test_files_of_one_stem_are_refused_before_any_work(model: Denoiser, tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.png", tmp_path / "b" / "x.png"]
    for path in paths:
        write_picture(path)
    with pytest.raises(ZooError, match="two results would be written"):
        make_task().predict(model, paths, OutFolder(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_a_solve_that_does_not_settle_is_reported(tmp_path: Path) -> None:
    task = make_task(deq=EXACT.with_options(f_max_iter=2, f_tol=1e-9))
    write_picture(tmp_path / "x.png")
    (result,) = task.predict(make_model(task), [tmp_path / "x.png"], OutFolder(tmp_path / "o"))
    assert isinstance(result, Prediction)
    assert "did not settle" in result.text
    assert result.data["settled"] is False


def test_a_chain_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    model = make_model()
    nn.init.constant_(next(model.average.module.buffers()), torch.nan)
    write_picture(tmp_path / "x.png")
    (result,) = predict(model, [tmp_path / "x.png"], tmp_path / "o")
    assert isinstance(result, Failure)
    assert "not finite" in result.reason


def test_dark_ink_on_white_is_inverted_for_models_of_digits() -> None:
    task = Denoise(
        net=DIGITS, deq=EXACT, data="digits", chain=ChainConfig(steps=4),
        inversion=InversionConfig(steps=1),
    )  # fmt: skip
    model = make_model(task)
    model.facts = task.facts()
    ink = np.zeros((28, 28), np.uint8)
    ink[4:24, 12:16] = 255
    light, dark = (model.predict(image).prediction for image in (ink, 255 - ink))
    assert (light.negative, dark.negative) == (False, True)
    assert torch.equal(light.noise, dark.noise)


def test_faces_are_cut_as_in_training(tmp_path: Path) -> None:
    facts, path = make_task(data="celeba").facts(), tmp_path / "face.png"
    noise = np.random.default_rng(0).integers(0, 256, (218, 178, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    expected = read_image(path, 8, 3, CELEBA_BOX)
    assert torch.equal(prepare(as_image(path), 8, 3, facts).pixels[0], expected)
    write_picture(path, width=64, height=64)
    with pytest.raises(DataError, match="the image is 64 x 64, too small"):
        prepare(as_image(path), 8, 3, facts)
