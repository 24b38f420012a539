"""Denoisers by command, their data, and the pipeline."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from deq_zoo.cli import main
from deq_zoo.diffusion import Denoiser, DEQDDIMPipeline, UNetConfig, make_unet
from deq_zoo.diffusion import data as sets
from deq_zoo.diffusion.convert import from_ddpm, to_ddpm
from deq_zoo.diffusion.model import CELEBA, CIFAR10, DIGITS, LSUN
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.presets import diffusion_quick, diffusion_smoke
from deq_zoo.diffusion.task import Denoise
from deq_zoo.errors import CheckpointError, DataError, ZooError
from deq_zoo.task import WHOLE, Shard
from tests.zoo.diffusion.nets import error
from torchdeq import ConvergenceWarning

SMALL = UNetConfig(
    size=8, channels=1, widths=(8, 16), blocks=1, attention=(4,), dropout=0.0, groups=4
)


def smoke() -> Denoise:
    task = diffusion_smoke().task
    assert isinstance(task, Denoise)
    return task


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "smoke"
    assert main(["train", "diffusion-smoke", "--cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_smoke_trains_and_reports(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "equilibrium" in page
    assert "Held-out images" in page


def test_sampling_by_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(run), "--cpu", "--out", str(tmp_path), "--n", "3", "--steps", "8"]
    for solver in ("anderson", "fixed_point_iter", "sequential"):
        assert main([*words, "--solver", solver, "--eta", "0.5", "--seed", "4"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert all("3 images in" in line and "rounds" in line for line in told)
    with Image.open(tmp_path / "samples-4.png") as image:
        assert image.size == (3 * 10 - 2, 8)
    assert main([*words, "--solver", "andersen"]) == 2
    assert "did you mean 'anderson'" in capsys.readouterr().err


def test_inversion_by_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "disc.png"
    Image.fromarray((200 * np.eye(8)).astype(np.uint8)).save(path)
    assert main(["predict", str(run), str(path), "--cpu", "--out", str(tmp_path / "o")]) == 0
    assert "PSNR" in capsys.readouterr().out
    assert torch.load(tmp_path / "o" / "disc-noise.pt").shape == (1, 8, 8)
    assert (tmp_path / "o" / "disc-reconstruction.png").exists()


def test_evaluation_tells_inversion(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--cpu"]) == 0
    told = json.loads(capsys.readouterr().out)["metrics"]
    assert told.keys() == {"val_loss", "chain_error", "inversion_sse", "inversion_psnr"}
    assert told["chain_error"] < 1e-3


def test_conversion_by_command(run: Path, tmp_path: Path) -> None:
    """A UNet in the old format becomes a checkpoint that samples."""
    unet = make_unet(smoke().net)
    source, out = tmp_path / "old.pth", tmp_path / "new.safetensors"
    torch.save(to_ddpm(unet.state_dict()), source)
    words = ["convert", str(source), "--preset", "diffusion-smoke", "--out", str(out)]
    assert main(words) == 0
    assert main(["sample", str(out), "--cpu", "--out", str(tmp_path), "--n", "2"]) == 0


def test_batches_are_functions_of_the_step() -> None:
    task = smoke()
    a, b = task.train_batch(3, 0, WHOLE), task.train_batch(3, 0, WHOLE)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(a[2], task.train_batch(4, 0, WHOLE)[2])
    halves = [task.train_batch(3, 0, Shard(rank, 2)) for rank in range(2)]
    for whole, first, second in zip(a, *halves, strict=True):
        assert torch.equal(whole[0::2], first)
        assert torch.equal(whole[1::2], second)
    assert int(a[1].sum()) == 999 * 8  # timesteps in pairs


def test_average_forgets_early_weights_and_answers_in_evaluation() -> None:
    torch.manual_seed(0)
    model = Denoiser(SMALL, decay=0.9)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([5, 900])
    start = copy.deepcopy(model)
    expected = next(model.average.module.parameters()).clone()
    for n in range(3):
        with torch.no_grad():
            for p in model.unet.parameters():
                p.add_(0.1)
        model.update_average()
        now = next(model.unet.parameters())
        share = 1.0 if n == 0 else 1 - min(0.9, (1 + n) / (10 + n))
        expected = expected + share * (now - expected)
    assert error(next(model.average.module.parameters()), expected.detach()) < 1e-6
    assert not any(p.requires_grad for p in model.average.parameters())
    assert torch.equal(model.train()(x, t), model.unet(x, t).sample)
    assert torch.equal(model.eval()(x, t), model.average.module(x, t).sample)
    assert not torch.equal(model(x, t), start.eval()(x, t))
    twin = Denoiser(SMALL)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(x, t), model(x, t))


@pytest.mark.parametrize(
    ("config", "count", "tensors"), [(CIFAR10, 35_746_307, 328), (CELEBA, 78_700_803, 390)]
)
def test_parameter_counts_of_the_paper(config: UNetConfig, count: int, tensors: int) -> None:
    with torch.device("meta"):
        unet = make_unet(config)
    assert sum(p.numel() for p in unet.parameters()) == count
    assert len(list(unet.parameters())) == tensors


@pytest.mark.slow
def test_parameter_count_of_lsun() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make_unet(LSUN).parameters()) == 113_673_219


def test_conversion_is_undone_by_its_inverse() -> None:
    unet = make_unet(replace(SMALL, widths=(8, 8, 16), attention=(4, 2)))
    state = unet.state_dict()
    back = from_ddpm(to_ddpm(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert from_ddpm(state).keys() == state.keys()
    with pytest.raises(CheckpointError, match=r"conv_in\.weight"):
        from_ddpm({"head.weight": torch.zeros(1)})


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match="multiples of groups"):
        UNetConfig(widths=(30,), groups=32)
    with pytest.raises(ValueError, match="halve"):
        UNetConfig(size=14, widths=(32, 32, 32))
    with pytest.raises(ValueError, match="decay"):
        Denoiser(SMALL, decay=1.0)
    with pytest.raises(ValueError, match="batch"):
        Denoise(batch=0)


def test_digits_are_split_once_and_for_all() -> None:
    train, held = sets.digits("train"), sets.digits("val")
    assert (len(train), len(held)) == (4500, 500)
    x = train.take(torch.arange(5))
    assert x.shape == (5, 1, DIGITS.size, DIGITS.size)
    assert float(x.min()) == -1.0
    assert float(x.max()) <= 1.0
    rows = {row.numpy().tobytes() for row in held.take(torch.arange(500))}
    assert not any(row.numpy().tobytes() in rows for row in train.take(torch.arange(4500)))


def test_bytes_and_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(sets.to_bytes(sets.scaled(every)), every)
    assert sets.to_bytes(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def write(path: Path, width: int = 20, height: int = 10, level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (level, 0, 255)).save(path)


def test_folders_of_images(tmp_path: Path) -> None:
    for k in range(40):
        write(tmp_path / f"{k:02}.png", level=k)
    train, held = (sets.folder(tmp_path, split, 8, 3) for split in ("train", "val"))
    assert (len(train), len(held)) == (38, 2)
    assert train.take(torch.tensor([0])).shape == (1, 3, 8, 8)
    assert float(train.take(torch.tensor([0]))[0, 2].min()) == 1.0
    grey = sets.read_image(tmp_path / "00.png", 8, 1)
    assert grey.shape == (1, 8, 8)
    write(tmp_path / "new" / "train" / "a.png")
    write(tmp_path / "new" / "val" / "b.png")
    assert len(sets.folder(tmp_path / "new", "train", 8, 3)) == 1
    (tmp_path / "list_eval_partition.txt").write_text("00.png 0\n01.png 1\n02.png 2\n")
    assert len(sets.folder(tmp_path, "train", 8, 3)) == 1
    with pytest.raises(DataError, match="put image files there"):
        sets.folder(tmp_path / "none", "train", 8, 3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        sets.read_image(tmp_path / "bad.png", 8, 3)


def test_cifar10_in_both_forms(tmp_path: Path) -> None:
    pixels = torch.arange(2 * 3072).remainder(256).to(torch.uint8).view(2, 3, 32, 32)
    rows = pixels.view(2, -1).numpy()
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": rows, b"labels": [0, 1]}))
    read = sets.cifar10(tmp_path, "val")
    assert torch.equal(sets.to_bytes(read.take(torch.arange(2))), pixels)
    assert len(sets.cifar10(tmp_path, "train")) == 10
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(DataError, match="no array"):
        sets.cifar10(tmp_path, "val")
    other = tmp_path / "npz"
    other.mkdir()
    np.savez(other / "cifar10_test.npz", x=pixels.permute(0, 2, 3, 1).numpy())
    assert torch.equal(sets.to_bytes(sets.cifar10(other, "val").take(torch.arange(2))), pixels)
    with pytest.raises(DataError, match="cifar-10-python"):
        sets.cifar10(other, "train")
    with pytest.raises(DataError, match="--data-dir"):
        _ = Denoise().train_set


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("deq_zoo.diffusion.package.import_module", missing)
    with pytest.raises(ZooError, match=r"torchdeq\[diffusion\]"):
        make_unet(SMALL)


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    torch.manual_seed(0)
    return make_unet(SMALL).eval()


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_pipeline_gives_the_images_of_diffusers(unet: nn.Module, eta: float) -> None:
    options: Any = {"num_inference_steps": 8, "batch_size": 2, "eta": eta, "output_type": "np"}
    made = [
        kind(unet, diffusers().DDIMScheduler())(
            generator=torch.Generator().manual_seed(3), **options
        ).images
        for kind in (diffusers().DDIMPipeline, DEQDDIMPipeline)
    ]
    assert float(np.abs(made[0] - made[1]).max()) < 1e-4


def test_pipeline_is_saved_and_loaded(unet: nn.Module, tmp_path: Path) -> None:
    diffusers().DDIMPipeline(unet, diffusers().DDPMScheduler()).save_pretrained(tmp_path / "a")
    first = DEQDDIMPipeline.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    second = DEQDDIMPipeline.from_pretrained(tmp_path / "b")

    def images(pipe: Any) -> Tensor:
        (found,) = pipe(
            generator=torch.Generator().manual_seed(0), num_inference_steps=4, output_type="pt",
            return_dict=False, window=2,
        )  # fmt: skip
        return found

    assert torch.equal(images(first), images(second))
    assert isinstance(first(num_inference_steps=2).images[0], Image.Image)
    with pytest.raises(ValueError, match="output_type"):
        first(output_type="jpg")
    with pytest.warns(ConvergenceWarning):
        first(num_inference_steps=8, max_iter=2)


def test_quick_is_of_embedded_data() -> None:
    assert diffusion_quick().task.steps_per_epoch == 140
