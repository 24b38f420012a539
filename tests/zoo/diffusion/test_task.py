"""Denoisers by command, their data, and the pipeline."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from deq_zoo.cli import main
from deq_zoo.diffusion import Denoiser, Inversion, UNetConfig, Work, make_unet
from deq_zoo.diffusion import data as sets
from deq_zoo.diffusion.convert import from_ddpm, to_ddpm
from deq_zoo.diffusion.model import CELEBA, CIFAR10, LSUN
from deq_zoo.diffusion.options import ChainConfig, InversionConfig, Sampling
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.presets import diffusion_quick, diffusion_smoke
from deq_zoo.diffusion.task import Denoise
from deq_zoo.errors import CheckpointError, DataError, ZooError
from deq_zoo.task import WHOLE, Shard
from tests.zoo.diffusion.nets import measure_error, write_picture
from torchdeq import ConvergenceWarning

SMALL = UNetConfig(
    size=8, channels=1, widths=(8, 16), blocks=1, attention=(4,), dropout=0.0, groups=4
)


def make_smoke_task() -> Denoise:
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
    lines = capsys.readouterr().out.splitlines()
    assert all("3 images in" in line and "rounds" in line for line in lines)
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


def test_files_of_one_stem_are_refused_before_any_work(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a" / "x.png", tmp_path / "b" / "x.png"]
    for path in paths:
        write_picture(path)
    out = tmp_path / "o"
    assert main(["predict", str(run), *map(str, paths), "--cpu", "--out", str(out)]) == 2
    assert "several files" in capsys.readouterr().err
    assert not out.exists()


def test_wrong_options_of_sampling_are_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(run), "--cpu", "--out", str(tmp_path)]
    wrong = {"--n": "0", "--steps": "1001", "--eta": "2", "--tol": "-1", "--window": "-1"}
    for name, value in wrong.items():
        assert main([*words, name, value]) == 2
        assert capsys.readouterr().err.count("\n") < 4


def test_evaluation_tells_inversion(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--cpu"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics.keys() == {"val_loss", "chain_error", "inversion_sse", "inversion_psnr"}
    assert metrics["chain_error"] < 1e-3


def test_conversion_by_command(run: Path, tmp_path: Path) -> None:
    """Turn a UNet in the old format into a checkpoint that samples."""
    unet = make_unet(make_smoke_task().net)
    source, out = tmp_path / "old.pth", tmp_path / "new.safetensors"
    torch.save(to_ddpm(unet.state_dict()), source)
    words = ["convert", str(source), "--preset", "diffusion-smoke", "--out", str(out)]
    assert main(words) == 0
    assert main(["sample", str(out), "--cpu", "--out", str(tmp_path), "--n", "2"]) == 0


def test_batches_are_functions_of_the_step() -> None:
    task = make_smoke_task()
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
    expected = next(model.average.module.buffers()).clone()
    for n in range(3):
        with torch.no_grad():
            for p in model.unet.parameters():
                p.add_(0.1)
        model.update_average()
        now = next(model.unet.parameters())
        weight = 1.0 if n == 0 else 1 - min(0.9, (1 + n) / (10 + n))
        expected = expected + weight * (now - expected)
    assert measure_error(next(model.average.module.buffers()), expected.detach()) < 1e-6
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in model.unet.parameters())
    assert model.average.module.state_dict().keys() == model.unet.state_dict().keys()
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


def test_former_names_of_diffusers_convert() -> None:
    state = make_unet(SMALL).state_dict()
    former = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def to_former(key: str) -> str:
        for now, then in former.items():
            key = key.replace(f".{now}.", f".{then}.")
        return key

    given = {to_former(key): value for key, value in state.items()}
    assert given.keys() != state.keys()
    back = from_ddpm(given)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_look_takes_no_more_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the work whatever inversion the settings ask for."""
    task = replace(
        make_smoke_task(),
        previews=1,
        chain=ChainConfig(steps=1000, spacing="quad"),
        inversion=InversionConfig(images=500, steps=1000, judged_steps=3),
    )
    asked: list[tuple[int, int, int]] = []

    def count_work(self: Denoise, model: nn.Module, images: Tensor) -> Inversion:
        asked.append((len(images), self.inversion.steps, self.chain.steps))
        zeros = torch.zeros(len(images))
        return Inversion(images, images, zeros, zeros[None], 0.0, Work())

    monkeypatch.setattr(Denoise, "invert", count_work)
    model = task.build().eval()
    task.pictures(model, torch.device("cpu"))
    replace(task, previews=0).evaluate(model, torch.device("cpu"), thorough=True)
    assert asked == [(8, 20, 50), (64, 3, 1000)]


@pytest.mark.parametrize("count", [0, 3])
def test_few_images_make_pictures_too(count: int) -> None:
    task = replace(make_smoke_task(), inversion=InversionConfig(images=8 if count else 0, steps=1))
    task.__dict__["held_out"] = sets.InMemory(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))
    made = task.pictures(task.build().eval(), torch.device("cpu"))
    assert [picture.name for picture in made][2:] == (["inversions"] if count else [])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ChainConfig(steps=0),
        lambda: ChainConfig(eta=1.5),
        lambda: ChainConfig(chunk=0),
        lambda: ChainConfig(window=-1),
        lambda: InversionConfig(steps=0),
        lambda: InversionConfig(judged_steps=0),
        lambda: InversionConfig(images=-1),
        lambda: InversionConfig(lr=0.0),
        lambda: InversionConfig(lr=float("nan")),
        lambda: Sampling(n=0),
        lambda: Sampling(eta=float("nan")),
        lambda: Sampling(tol=-1e-3),
        lambda: UNetConfig(groups=0),
        lambda: UNetConfig(dropout=1.0),
        lambda: Denoise(noise_levels=10),
    ],
)
def test_options_out_of_range_are_refused_when_they_are_set(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must|at most"):
        wrong()


@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_networks_of_another_shape_than_the_data_are_errors(data: Any, tmp_path: Path) -> None:
    task = replace(make_smoke_task(), data=data, data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"net\.size=.* and net\.channels="):
        _ = task.train_set


def test_batches_smaller_than_the_processes_are_refused() -> None:
    with pytest.raises(ZooError, match=r"batch of 1 .* 2 processes"):
        replace(make_smoke_task(), batch=1).train_batch(0, 0, Shard(1, 2))


def test_shapes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="multiples of groups"):
        UNetConfig(widths=(30,), groups=32)
    with pytest.raises(ValueError, match="halve"):
        UNetConfig(size=14, widths=(32, 32, 32))
    with pytest.raises(ValueError, match="decay"):
        Denoiser(SMALL, decay=1.0)
    with pytest.raises(ValueError, match="batch"):
        Denoise(batch=0)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("deq_zoo.packages.import_module", raise_missing)
    with pytest.raises(ZooError, match=r"torchdeq\[diffusion\]"):
        make_unet(SMALL)


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    torch.manual_seed(0)
    return make_unet(SMALL).eval()


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """Import the pipeline late: its base class brings half of diffusers with it."""
    from deq_zoo.diffusion import DEQDDIMPipeline

    return DEQDDIMPipeline


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_pipeline_gives_the_images_of_diffusers(unet: nn.Module, pipeline: Any, eta: float) -> None:
    options: Any = {"num_inference_steps": 8, "batch_size": 2, "eta": eta, "output_type": "np"}
    made = [
        kind(unet, diffusers().DDIMScheduler())(
            generator=torch.Generator().manual_seed(3), **options
        ).images
        for kind in (diffusers().DDIMPipeline, pipeline)
    ]
    assert float(np.abs(made[0] - made[1]).max()) < 1e-4


def test_pipeline_takes_a_single_step_with_eta(unet: nn.Module, pipeline: Any) -> None:
    pipe = pipeline(unet, diffusers().DDIMScheduler())
    assert pipe(num_inference_steps=1, eta=1.0, output_type="np").images.shape == (1, 8, 8, 1)


def test_pipeline_is_saved_and_loaded(unet: nn.Module, pipeline: Any, tmp_path: Path) -> None:
    diffusers().DDIMPipeline(unet, diffusers().DDPMScheduler()).save_pretrained(tmp_path / "a")
    first = pipeline.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    second = pipeline.from_pretrained(tmp_path / "b")

    def draw_images(pipe: Any) -> Tensor:
        (result,) = pipe(
            generator=torch.Generator().manual_seed(0), num_inference_steps=4, output_type="pt",
            return_dict=False, window=2,
        )  # fmt: skip
        return result

    assert torch.equal(draw_images(first), draw_images(second))
    assert isinstance(first(num_inference_steps=2).images[0], Image.Image)
    with pytest.raises(ValueError, match="output_type"):
        first(output_type="jpg")
    with pytest.warns(ConvergenceWarning):
        first(num_inference_steps=8, max_iter=2)


def test_the_readme_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(sets.__file__).with_name("README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["inverted"].noise.shape == (2, 3, 16, 16)
    assert len(names["pictures"]) == 4


def test_quick_is_of_embedded_data() -> None:
    assert diffusion_quick().task.steps_per_epoch == 140
