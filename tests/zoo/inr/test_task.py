"""Tasks and presets: what is learnt, evaluated, drawn, rendered, saved and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

import deq_zoo.inr.presets  # noqa: F401
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.inr import (
    DEQField,
    FieldConfig,
    FitSignal,
    GeneraliseImage,
    Rendering,
    Representation,
    Signal,
    fit,
    render,
    write_signal,
)
from deq_zoo.inr.compression import compressed
from deq_zoo.inr.convert import from_authors, to_authors
from deq_zoo.inr.data import ripples
from deq_zoo.inr.duel import Course, Duel, Pair
from deq_zoo.inr.readers import read_image, read_wav
from deq_zoo.inr.shape_task import FitShape
from deq_zoo.preset import PRESETS, find_preset
from deq_zoo.values import from_data, to_data
from tests.zoo.training import CPU, measure, train
from torchdeq import DEQConfig

NAMES = sorted(name for name in PRESETS if name.startswith("inr-"))
NET = FieldConfig(width=16, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")
EXACT = DEQConfig(
    ift=True, higher_order=True, f_tol=1e-5, b_tol=1e-5, f_stop_mode="rel", on_failure="ignore"
)


def test_every_preset_goes_to_a_file_and_back() -> None:
    assert {
        *("inr-quick", "inr-smoke", "inr-nature", "inr-text", "inr-video", "inr-audio"),
        *("inr-camera", "inr-celeba", "inr-file"),
    } <= set(NAMES)
    for name in NAMES:
        preset = find_preset(name)
        assert from_data(json.loads(json.dumps(to_data(preset)))) == preset
        assert PRESETS[name].__doc__


def test_presets_have_the_papers_numbers_of_parameters() -> None:
    for name, count in (("inr-nature", 267_779), ("inr-text", 267_779), ("inr-audio", 265_729)):
        model = find_preset(name).task.build()  # without data
        assert sum(p.numel() for p in model.parameters()) == count
    video = find_preset("inr-video")
    assert isinstance(video.task, FitSignal)
    assert video.task.deq.n_states == 2
    with torch.device("meta"):
        made = video.task.make(video.task.net)
    assert sum(p.numel() for p in made.parameters()) == 4_220_931


def test_the_smoke_preset_trains_reports_and_renders(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert main(["train", "inr-smoke", "--cpu", "--out", str(out)]) == 0
    assert "rival_psnr" in capsys.readouterr().out
    assert "<h2>Examples</h2>" in (out / "report.html").read_text()
    assert {"fit", "race"} <= {p.stem for p in (out / "pictures").glob("*.png")}
    assert main(["evaluate", str(out), "--cpu"]) == 0
    capsys.readouterr()
    assert main(["sample", str(out), "--cpu", "--scale", "4", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "64 x 64" in output
    assert "float16" in output
    assert "bits per pixel" in output
    assert read_image(tmp_path / "image.png").shape == (64, 64, 3)


@pytest.mark.parametrize("batch", [0, 60])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, batch: int) -> None:
    settings = ["--cpu", "--quiet", "--no-report", "--set", f"batch={batch}"]
    a, b = tmp_path / "a", tmp_path / "b"
    assert main(["train", "inr-smoke", "--out", str(a), *settings]) == 0
    stop = ["--max-seconds", "0"]
    assert main(["train", "inr-smoke", "--out", str(b), *settings, *stop]) == 0
    assert Checkpoint.load(b / "last.safetensors").step < 20
    again = ["train", "inr-smoke", "--resume", "--out", str(b), "--cpu", "--quiet", "--no-report"]
    assert main(again) == 0
    first, second = (Checkpoint.load(run / "last.safetensors") for run in (a, b))
    assert all(torch.equal(t, second.model[k]) for k, t in first.model.items() if "course" not in k)
    assert torch.equal(first.carry[0]["kept"], second.carry[0]["kept"])
    assert torch.equal(first.carry[0]["seen"], second.carry[0]["seen"])


@pytest.mark.parametrize("kind", ["deq", "one_pass", "siren", "ffn", "relu_pe", "mfn"])
def test_every_kind_learns_an_image(kind: Any) -> None:
    scale = {"ffn": 1.0, "relu_pe": 4.0}.get(kind, 8.0)
    filter: Any = "fourier" if kind == "mfn" else "siren_like"
    net = replace(NET, kind=kind, filter=filter, input_scale=scale)
    task = FitSignal(net=net, deq=RECIPE, data="ripples")
    model, losses, _ = train(task, 60, lr=1e-2)
    assert losses[-1] < 0.4 * losses[0]
    metrics = measure(task, model, thorough=True)
    assert metrics["psnr"] > 15
    assert [p.name for p in task.pictures(model, CPU)] == ["fit"]


def test_warm_steps_follow_the_fixed_points_of_a_solve() -> None:
    warm = FitSignal(net=NET, deq=RECIPE, data="ripples")
    solved = replace(warm, warm=False)
    a, warm_losses, carry = train(warm, 40, lr=5e-3)
    b, losses, none = train(solved, 40, lr=5e-3)
    assert none is None
    assert carry["kept"].shape == (256, 16)
    assert warm_losses[-1] == pytest.approx(losses[-1], rel=0.05)
    psnr = measure(warm, a, thorough=True)["psnr"]
    assert psnr == pytest.approx(measure(solved, b, thorough=True)["psnr"], abs=0.5)


def test_sampled_points_are_solved_once_and_then_followed() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples", batch=100)
    torch.manual_seed(0)
    model = task.build()
    carry, solves = None, []
    for step in range(6):  # an epoch is three batches
        loss = task.loss(model, task.train_batch(step, 0), carry)
        carry = loss.carry
        solves.append(loss.stats is not None)
    assert solves == [True] * 3 + [False] * 3
    assert carry is not None
    assert bool(carry["seen"].all())
    assert task.steps_per_epoch == 3


@pytest.mark.parametrize("points_at_once", [1, 37, 256, 1000])
def test_blocks_change_nothing_but_rounding(points_at_once: int) -> None:
    task = FitSignal(net=NET, deq=RECIPE.with_options(n_states=2), data="ripples", warm=False)
    torch.manual_seed(0)
    model = task.build().double()
    batch = torch.arange(0, 256, 5 if points_at_once == 1 else 1)
    grads = []
    for each in (task, replace(task, points_at_once=points_at_once)):
        model.zero_grad()
        loss = each.loss(model, batch, None)
        loss.value.backward()
        grads.append([loss.value.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6)  # blocks stop when their own points have converged


def test_the_correction_reaches_the_loss_with_its_weight() -> None:
    deq = RECIPE.with_options(n_states=2, f_max_iter=4, f_tol=0.0, gamma=0.3)
    task = FitSignal(net=NET, deq=deq, data="ripples", warm=False)
    torch.manual_seed(0)
    model = task.build()
    batch = task.train_batch(0, 0)
    from deq_zoo.inr import coordinates

    out = model(coordinates(task.signal.shape, batch))
    errors = [(v - task.signal.targets(batch)).square().mean() for v in out.values]
    assert_close(task.loss(model, batch, None).value, 0.3 * errors[0] + errors[1])


def test_generalisation_splits_the_pixels_in_three() -> None:
    task = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    rows = task.judged()
    assert len(task.fit_rows) == len(rows["psnr"]) == len(rows["val_psnr"]) == 64
    together = torch.cat((task.fit_rows, rows["psnr"], rows["val_psnr"]))
    assert len(together.unique()) == 192
    assert task.fit_rows[:3].tolist() == [0, 2, 4]
    assert rows["psnr"][:2].tolist() == [17, 19]
    assert rows["val_psnr"][:2].tolist() == [1, 3]
    model = train(task, 80, lr=1e-2).model
    metrics = measure(task, model, thorough=True)
    assert metrics["psnr"] > 12
    sound = GeneraliseImage(net=NET, deq=RECIPE).holding(Signal("audio", torch.zeros(4, 1)))
    with pytest.raises(ZooError, match="pixels of an image"):
        _ = sound.fit_rows


def test_a_duel_trains_both_as_they_would_alone() -> None:
    rival = replace(NET, kind="siren", layers=2)
    task = Duel(net=NET, rival=rival, deq=RECIPE, data="ripples")
    pair = train(task, 5, lr=5e-3).model
    assert isinstance(pair, Pair)
    alone = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    model = train(alone, 5, lr=5e-3).model
    for a, b in zip(pair.field.parameters(), model.parameters(), strict=True):
        assert_close(a, b)
    assert {"psnr", "rival_psnr", "val_psnr"} <= measure(task, pair, thorough=True).keys()


def test_a_course_thins_itself() -> None:
    course = Course()
    noted = []
    for step in range(3000):
        if course.due():
            course.note(float(step), 0.0)
            noted.append(step)
    steps = course.told()[:, 2].tolist()
    assert len(steps) <= 128
    assert steps[0] == 0
    gaps = {b - a for a, b in pairwise(steps)}
    assert len(gaps) == 1
    assert steps[-1] >= 2900


def test_an_image_from_its_gradients() -> None:
    net = FieldConfig(width=32, input_scale=4.0)
    task = FitSignal(
        net=net, deq=EXACT, data="ripples", channels=1, warm=False, supervise="gradient"
    )
    model, losses, _ = train(task, 25, lr=2e-2)
    assert losses[-1] < 0.5 * losses[0]
    untrained = measure(task, task.build(), thorough=True)["psnr"]
    assert measure(task, model, thorough=True)["psnr"] > untrained + 2
    assert task.pictures(model, CPU)


@pytest.mark.parametrize("shape", ["disc", "sphere"])
def test_a_shape_from_its_distances(shape: Any) -> None:
    task = FitShape(net=FieldConfig(width=32, input_scale=2.0), deq=EXACT, shape=shape, batch=128)
    model, losses, _ = train(task, 25, lr=2e-2)
    metrics = measure(task, model, thorough=True)
    assert losses[-1] < 0.5 * losses[0]
    assert metrics["distance_error"] < 0.15
    assert task.pictures(model, CPU)


def test_video_and_audio_are_fitted_and_rendered(tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = torch.stack([ripples(3, 12).float() * s for s in (0.5, 0.75, 1.0, 0.75)]) / 127.5 - 1
    write_signal(tmp_path / "a.mp4", frames, 8.0)
    write_signal(tmp_path / "a.wav", torch.linspace(0, 30, 500).sin()[:, None], 1000.0)
    options: dict[str, Any] = {"net": replace(NET, input_scale=8.0), "deq": RECIPE}
    video = FitSignal(file=str(tmp_path / "a.mp4"), batch=200, eval_frames=2, **options)
    model, losses, _ = train(video, 20, lr=1e-2)
    assert losses[-1] < losses[0]
    assert measure(video, model, thorough=True)["psnr"] > 8
    assert video.judged()["psnr"].shape == (2 * 144,)
    assert video.pictures(model, CPU)
    for form, size in (("mp4", (8, 24, 24)), ("gif", (8, 24, 24))):
        lines = list(video.sample(model, Rendering(scale=2, rate=16.0, format=form), tmp_path, CPU))
        assert "8 x 24 x 24" in lines[0]
        assert (tmp_path / f"video.{form}").exists()
        assert size == render(model, scale=2, rate=16.0).shape[:-1]
    audio = FitSignal(file=str(tmp_path / "a.wav"), **options)
    model = train(audio, 20, lr=1e-2).model
    assert audio.pictures(model, CPU)
    lines = list(audio.sample(model, Rendering(scale=2), tmp_path / "out", CPU))
    assert "1000 samples" in lines[0]
    assert read_wav(tmp_path / "out" / "audio.wav").rate == 2000


def test_fit_and_render_in_two_calls() -> None:
    seen: list[int] = []
    model = fit(ripples(1), 40, net=NET, lr=1e-2, progress=lambda step, loss: seen.append(step))
    assert seen == list(range(1, 41))
    assert not model.training
    whole = render(model)
    assert whole.shape == (16, 16, 1)
    middle = render(model, region=(0.0, 0.0, 0.5, 1.0), size=(8, 16))
    assert middle.shape == (8, 16, 1)
    assert_close(render(model, scale=3)[::47, ::47], whole[::15, ::15], rtol=0, atol=1e-3)
    again = fit(ripples(1), 40, net=NET, lr=1e-2)
    assert torch.equal(render(again), whole)
    assert isinstance(fit(ripples(1), 10_000, net=NET, seconds=0.0), Representation)
    with pytest.raises(ZooError, match=r"a sound \(n, 1\)"):
        fit(torch.zeros(3))


def test_a_model_is_rendered_without_its_data(tmp_path: Path) -> None:
    write_signal(tmp_path / "a.png", ripples(3).float() / 127.5 - 1)
    run, settings = tmp_path / "run", ["--set", "width=8", "--set", "steps=2"]
    file = ["--set", f"file={tmp_path / 'a.png'}"]
    assert main(["train", "inr-file", "--cpu", "--quiet", "--out", str(run), *file, *settings]) == 0
    (tmp_path / "a.png").unlink()
    out = ["--out", str(tmp_path / "s")]
    assert main(["sample", str(run), "--cpu", "--scale", "2", *out]) == 0
    assert read_image(tmp_path / "s" / "image.png").shape == (32, 32, 3)
    assert main(["train", "inr-file", "--cpu", "--out", str(tmp_path / "r2"), *file]) == 2


def test_renderings_that_cannot_be_say_why() -> None:
    model = fit(ripples(1), 1, net=NET)
    for options, message in (
        ({"size": (4,)}, "takes 2 positive numbers"),
        ({"scale": 0.0}, "must be positive"),
        ({"region": (0.0, 1.0)}, "2 starts and 2 ends"),
        ({"region": (0.5, 0.0, 0.5, 1.0)}, "2 starts and 2 ends"),
    ):
        with pytest.raises(ZooError, match=message):
            render(model, **options)
    with pytest.raises(ZooError, match=r"written as \.png, not as \.mp4"):
        list(FitSignal(data="ripples").sample(model, Rendering(format="mp4"), Path("x"), CPU))
    with pytest.raises(ZooError, match="give --size"):
        render(Representation(model.field))


def test_fewer_bits_cost_little_and_leave_the_model_alone() -> None:
    model = fit(ripples(1), 60, net=NET, lr=1e-2)
    before = render(model)
    n = sum(p.numel() for p in model.parameters())
    assert isinstance(model.field, DEQField)
    x_map = model.field.injection.x_map
    frequencies = sum(p.numel() for p in x_map.parameters())
    for precision, bits, atol in (
        ("float32", 32 * n, 0.0),
        ("float16", 16 * (n + frequencies), 0.05),
        ("int8", 16 * (n + frequencies) - 8 * 256 + 16 * 16, 0.3),
    ):
        copy, spent = compressed(model, precision)
        assert spent == bits
        assert torch.equal(copy.get_parameter("field.injection.x_map.weight"), x_map.weight)
        assert_close(render(copy), before, rtol=0, atol=atol)
    assert torch.equal(render(model), before)
    with pytest.raises(ValueError, match="precision is one of"):
        compressed(model, "int4")


@pytest.mark.parametrize("filter", ["siren_like", "fourier", "gabor"])
def test_the_authors_weights_go_round(tmp_path: Path, filter: Any) -> None:
    task = FitSignal(net=replace(NET, filter=filter, layers=2), deq=RECIPE, data="ripples")
    model: Any = task.build()
    released = to_authors(model.field)
    assert released["f.z_init"].shape == (1, 16)
    assert bool((released["f.z_init"] == (0 if filter == "siren_like" else 1)).all())
    other: Any = task.build()
    other.load_state_dict(task.convert(released))
    assert other.shape == (16, 16)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    newer = {
        k.replace(".weight_g", ".parametrizations.weight.original0").replace(
            ".weight_v", ".parametrizations.weight.original1"
        ): v
        for k, v in released.items()
    }
    assert from_authors(model.field, newer).keys() == model.field.state_dict().keys()
    wrong = released | {"f.z_init": 1 - released["f.z_init"]}
    with pytest.raises(CheckpointError, match="does not belong to the filter"):
        task.convert(wrong)
    del released["output_map.bias"]
    released["output_map.weight"] = torch.zeros(1, 16)
    with pytest.raises(CheckpointError, match=r"lacks output_map\.bias; output_map\.weight is"):
        task.convert(released)


def test_released_files_convert_by_command(tmp_path: Path) -> None:
    model: Any = find_preset("inr-celeba").task.build()
    save_file(to_authors(model.field), tmp_path / "released.safetensors")
    command = ["convert", str(tmp_path / "released.safetensors"), "--preset", "inr-celeba"]
    assert main([*command, "--out", str(tmp_path / "converted.safetensors")]) == 0
    assert main(["sample", str(tmp_path / "converted.safetensors"), "--cpu", "--size", "8,8",
                 "--out", str(tmp_path)]) == 0  # fmt: skip
    assert (tmp_path / "image.png").exists()


def test_tasks_that_cannot_be_say_why() -> None:
    for options, message in (
        ({"batch": -1}, "batch must be at least 0"),
        ({"shrink": 0}, "shrink must be at least 1"),
        ({"channels": 2}, "channels must be 1 or 3"),
        ({"supervise": "gradient"}, "ift=True, higher_order=True and warm=False"),
        ({"deq": DEQConfig(jac_loss_weight=1.0)}, "drop jac_loss_weight"),
    ):
        with pytest.raises(ValueError, match=message):
            FitSignal(**options)
    with pytest.raises(ValueError, match="takes images"):
        FitSignal(deq=EXACT, warm=False, supervise="gradient", data="audio")
    with pytest.raises(ValueError, match="eikonal loss differentiates the field twice"):
        FitShape(deq=RECIPE)
    assert FitShape(deq=RECIPE, eikonal=0.0).batch == 1024
