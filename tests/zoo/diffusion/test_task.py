"""Denoisers as a task: batches, splits, evaluation, the model and its average."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deq_zoo.diffusion import ChainConfig, Denoiser, InversionConfig, UNetConfig, make_unet
from deq_zoo.diffusion.model import CELEBA, CIFAR10, LSUN
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.presets import diffusion_digits, diffusion_quick
from deq_zoo.errors import DataError, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.task import Shard
from deq_zoo.values import from_data, to_data
from tests.zoo.diffusion.nets import measure_error
from tests.zoo.diffusion.smoke import SMALL, make_model, make_task


def test_batches_are_functions_of_the_step() -> None:
    task = make_task()
    a, b = task.train_batch(3, 0), task.train_batch(3, 0)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(a[2], task.train_batch(4, 0)[2])
    halves = [task.train_batch(3, 0, Shard(rank, 2)) for rank in range(2)]
    for whole, first, second in zip(a, *halves, strict=True):
        assert torch.equal(whole[0::2], first)
        assert torch.equal(whole[1::2], second)
    assert int(a[1].sum()) == 999 * 8  # timesteps in pairs


def test_batches_smaller_than_the_processes_are_refused() -> None:
    with pytest.raises(ZooError, match=r"batch of 1 .* 2 processes"):
        make_task(batch=1).train_batch(0, 0, Shard(1, 2))


def test_both_splits_have_the_same_metrics_and_inversion_is_for_thorough_evaluations() -> None:
    task, model = make_task(), make_model()
    for thorough, names in ((False, {"loss", "chain_error"}), (True, None)):
        val, test = (evaluate(task, model, split, thorough) for split in ("val", "test"))
        assert val.metrics.keys() == test.metrics.keys()
        assert names is None or val.metrics.keys() == names
        assert val.metrics["loss"] != test.metrics["loss"]
        assert task.score.name in val.metrics
    assert {"inversion_sse", "inversion_psnr"} < val.metrics.keys()


def test_an_evaluation_solves_a_chain_of_fifty_steps_at_most() -> None:
    evaluations = []
    model = make_model()
    model.register_forward_hook(lambda module, args, out: evaluations.append(len(args[0])))
    task = make_task(
        chain=ChainConfig(steps=1000, spacing="quad"), previews=1, eval_images=1, limit=16
    )
    evaluate(task, model, "val", thorough=False)
    assert 50 < sum(evaluations) < 1 + 50 + 60 * 50


def test_a_thorough_evaluation_bounds_the_steps_of_adam() -> None:
    seen = []
    for eval_steps in (1, 2):
        inversion = InversionConfig(images=1, steps=1000, eval_steps=eval_steps, enough=0.0)
        task = make_task(inversion=inversion, previews=0)
        model, calls = make_model(), list[int]()
        model.register_forward_hook(lambda module, args, out, c=calls: c.append(1))
        evaluate(task, model, "test", thorough=True)
        seen.append(len(calls))
    assert seen[0] < seen[1] < 200


def test_configurations_of_earlier_versions_are_read() -> None:
    data = to_data(make_task())
    del data["val_images"]
    inversion = data["inversion"]
    inversion["judged_steps"], inversion["warm"] = inversion.pop("eval_steps"), False
    del inversion["keep_states"]
    task = from_data(data)
    assert (task.val_images, task.val_set) == (None, None)
    assert (task.inversion.eval_steps, task.inversion.keep_states) == (20, False)


def test_the_output_of_a_denoiser_serves_the_zoo_and_diffusers() -> None:
    model, x, t = make_model(), torch.randn(2, 1, 8, 8), torch.tensor([3, 700])
    out = model(x, t)
    assert torch.equal(out.prediction, out.sample)
    assert (out.state, out.stats) == (None, None)
    pipe = diffusers().DDIMPipeline(model.average.module, model.plan.scheduler)
    pipe.set_progress_bar_config(disable=True)
    assert pipe(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)


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
    assert torch.equal(model.train()(x, t).prediction, model.unet(x, t).sample)
    assert torch.equal(model.eval()(x, t).prediction, model.average.module(x, t).sample)
    assert not torch.equal(model(x, t).prediction, start.eval()(x, t).prediction)
    twin = Denoiser(SMALL)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(x, t).prediction, model(x, t).prediction)


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


@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_networks_of_another_shape_than_the_data_are_errors(data: Any, tmp_path: Path) -> None:
    task = replace(make_task(), data=data, data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"net\.size=.* and net\.channels="):
        _ = task.train_set


def test_shapes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="multiples of groups"):
        UNetConfig(widths=(30,), groups=32)
    with pytest.raises(ValueError, match="divisible by 2"):
        UNetConfig(size=14, widths=(32, 32, 32))
    with pytest.raises(ValueError, match="decay"):
        Denoiser(SMALL, decay=1.0)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr("deq_zoo.packages.import_module", raise_missing)
    with pytest.raises(ZooError, match=r"\[diffusion\]"):
        make_unet(SMALL)


def test_quick_is_of_embedded_data_and_evaluates_several_times() -> None:
    preset = diffusion_quick()
    assert preset.task.steps_per_epoch == 112
    assert preset.steps // preset.eval_every >= 4  # a curve, not a dot


def test_a_network_of_patches_is_the_small_network_on_their_channels() -> None:
    shape = {"widths": (8, 16), "blocks": 1, "attention": (), "dropout": 0.0, "groups": 4}
    torch.manual_seed(0)
    small: Any = make_unet(UNetConfig(size=4, channels=4, **shape))  # type: ignore[arg-type]
    patched: Any = make_unet(UNetConfig(size=8, channels=1, patch=2, **shape))  # type: ignore[arg-type]
    state = small.state_dict()
    for ours, theirs in (("conv_in.1", "conv_in"), ("conv_out.0", "conv_out")):
        for part in ("weight", "bias"):
            state[f"{ours}.{part}"] = state.pop(f"{theirs}.{part}")
    patched.load_state_dict(state)
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([1, 50, 900])
    expected = small(F.pixel_unshuffle(x, 2), t).sample
    torch.testing.assert_close(patched(x, t).sample, F.pixel_shuffle(expected, 2))


def test_patches_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="multiple of patch=3"):
        UNetConfig(size=8, patch=3)
    with pytest.raises(ValueError, match="counted in patches of 2"):
        UNetConfig(size=12, patch=2, widths=(32, 32, 32))
    with pytest.raises(ZooError, match="have no patches"):
        diffusion_digits().task.to_authors({})
