"""MDEQ: sizes, formulas, any shape, and the life of a module."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from deq_zoo.mdeq import (
    DIGITS,
    IMAGENET_SMALL,
    LARGE,
    MDEQ,
    TINY,
    MDEQClassifier,
    MDEQConfig,
    MDEQSegmenter,
)
from tests.zoo.mdeq.nets import SMALL, compute_f
from torchdeq import DEQConfig, fp_correction, jac_reg, mem_gc, remove_norm, reset_norm

QUICK = {"f_max_iter": 4, "f_tol": 0.0}
GROUPS = {
    "downsample": (5928, 10208, 10208),
    "stage0": (0, 1088, 1088),
    "full_stage.branches": (104640, 7843200, 7843200),
    "full_stage.fuse_layers": (5904, 786112, 784512),
    "full_stage.post_fuse_layers": (1296, 88480, 88000),
    "incre_modules": (7232, 408660, 965760),
    "downsamp_modules": (18624, 1187760, 3487680),
    "final_layer": (13400, 757680, 1579008),
    "classifier": (2010, 16810, 2049000),
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
def contract(model: Any) -> None:
    """Let f vary little around a constant: norms make it blind to the scale of its state."""
    for post in model.full_stage.post_fuse_layers:
        post.gnorm.weight.mul_(0.1)
        post.gnorm.bias.normal_()


@pytest.mark.parametrize(
    ("k", "config", "total", "scales", "entries"),
    [
        (0, TINY, 159_034, 384, 100),
        (1, LARGE, 11_099_998, 4960, 240),
        (2, IMAGENET_SMALL, 16_808_456, 2880, 220),
    ],
    ids=["tiny", "large", "imagenet"],
)
def test_published_sizes(k: int, config: MDEQConfig, total: int, scales: int, entries: int) -> None:
    with torch.device("meta"):
        model: Any = MDEQClassifier(config)
    assert count(model) == total
    assert {name: count(model.get_submodule(name)) for name in GROUPS} == {
        name: counts[k] for name, counts in GROUPS.items()
    }
    assert sum(p.numel() for n, p in model.named_parameters() if n.endswith("_g")) == scales
    assert len(model.state_dict()) == entries


@pytest.mark.parametrize(
    ("channels", "expansion", "total"),
    [
        ((32, 64, 128, 256), 5, 8_965_107),
        ((80, 160, 320, 640), 5, 55_947_459),
        ((88, 176, 352, 704), 6, 79_541_195),
    ],
)
def test_published_sizes_of_segmenters(channels: Any, expansion: int, total: int) -> None:
    config = MDEQConfig(channels=channels, expansion=expansion, downsample_times=2, classes=19)
    with torch.device("meta"):
        assert count(MDEQSegmenter(config, {"norm_type": "none"})) == total


def test_the_net_for_digits_reads_small_grey_images() -> None:
    model: Any = MDEQClassifier(DIGITS, QUICK)
    assert count(model) == 40_122
    x = torch.randn(3, 1, 28, 28)
    assert [tuple(z.shape[1:]) for z in model.start(model.inject(x))] == [(16, 7, 7), (16, 4, 4)]
    assert model(x).prediction.shape == (3, 10)


def test_two_models_of_different_sizes_do_not_disturb_each_other() -> None:
    first: Any = MDEQClassifier(SMALL, QUICK).eval()
    x = torch.randn(2, 3, 8, 8)
    before = first(x).prediction
    MDEQClassifier(replace(SMALL, groups=2, expansion=3))
    assert torch.equal(first(x).prediction, before)
    assert first.full_stage.branches[0].blocks[0].gn1.num_groups == 4


SHAPES = [
    MDEQConfig(channels=(8,), groups=4, expansion=2),
    MDEQConfig(channels=(8,), blocks=3, groups=2, expansion=1, downsample_times=1),
    MDEQConfig(channels=(8, 16), blocks=(2, 1), groups=4, expansion=2, downsample_times=1),
    MDEQConfig(channels=(4, 8, 12), groups=4, expansion=2, norm_scope=("post_fuse_layers",)),
    MDEQConfig(channels=(8, 4, 8, 4), blocks=2, groups=2, downsample_times=2, norm_scope=()),
]


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"{c.channels}")
@pytest.mark.parametrize("size", [(16, 16), (17, 13), (33, 1), (5, 6)], ids=str)
@torch.no_grad()
def test_f_equals_its_formula_for_any_branches_and_any_size(
    config: MDEQConfig, size: tuple[int, int]
) -> None:
    model: Any = MDEQ(config, QUICK).double().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    u = model.inject(torch.randn(2, 3, *size, dtype=torch.float64))
    (solved,), _ = model.solve(u)
    sides = [(z.shape[2], z.shape[3]) for z in solved]
    for k, (height, width) in enumerate(sides):
        scale = 2 ** (k + config.downsample_times)
        assert (height, width) == (-(-size[0] // scale), -(-size[1] // scale))
    z = [torch.randn_like(part) for part in solved]
    assert_close(model.full_stage(*z, u), compute_f(config, model.state_dict(), z, u))


@torch.no_grad()
def test_injection_and_head_equal_their_formulas() -> None:
    config = replace(SMALL, downsample_times=1, in_channels=1, head_channels=(2, 4))
    model: Any = MDEQClassifier(config, QUICK).double().eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor))
    s = model.state_dict()
    assert "incre_modules.0.0.downsample.0.weight" not in s  # 8 = 4 * 2: the identity
    assert "incre_modules.1.0.downsample.0.weight" in s

    def apply_conv_bn(t: Any, conv: str, bn: str, stride: int = 1) -> Any:
        w = s[f"{conv}.weight"]
        t = F.conv2d(t, w, s.get(f"{conv}.bias"), stride=stride, padding=w.shape[-1] // 2)
        mean, var = s[f"{bn}.running_mean"], s[f"{bn}.running_var"]
        return F.batch_norm(t, mean, var, s.get(f"{bn}.weight"), s.get(f"{bn}.bias"))

    x = torch.randn(2, 1, 9, 8, dtype=torch.float64)
    u = apply_conv_bn(x, "downsample.0", "downsample.1", stride=2).relu()
    u = apply_conv_bn(u, "downsample.3", "downsample.4").relu()
    u = apply_conv_bn(u, "stage0.0", "stage0.1").relu()
    assert_close(model.inject(x), u)

    def apply_bottleneck(i: int, z: Any) -> Any:
        name, t = f"incre_modules.{i}.0", z
        for k in (1, 2, 3):
            t = apply_conv_bn(t if k == 1 else t.relu(), f"{name}.conv{k}", f"{name}.bn{k}")
        if i == 1:
            z = apply_conv_bn(z, f"{name}.downsample.0", f"{name}.downsample.1")
        return (t + z).relu()

    z = [torch.randn_like(part) for part in model.start(u)]
    t = apply_conv_bn(
        apply_bottleneck(0, z[0]), "downsamp_modules.0.0", "downsamp_modules.0.1", stride=2
    )
    v = apply_conv_bn(apply_bottleneck(1, z[1]) + t.relu(), "final_layer.0", "final_layer.1").relu()
    logits = v.mean((2, 3)) @ s["classifier.weight"].mT + s["classifier.bias"]
    assert_close(model.classify(z), logits)


@torch.no_grad()
def test_segmentation_head_equals_its_formula() -> None:
    model: Any = MDEQSegmenter(replace(SMALL, classes=7), QUICK).double().eval()
    assert model.last_layer[1].momentum == 0.01
    z = [torch.randn(2, 8, 6, 6).double(), torch.randn(2, 8, 3, 3).double()]
    rows = torch.linspace(0, 2, 6, dtype=torch.float64)  # corners on corners
    hat = (1 - (rows[:, None] - torch.arange(3)).abs()).clamp(min=0)  # (6, 3)
    coarse = torch.einsum("bcij,yi,xj->bcyx", z[1], hat, hat)
    first, bn, _, second = model.last_layer
    hidden = bn(torch.einsum("oc,bcyx->boyx", first.weight[..., 0, 0], torch.cat((z[0], coarse), 1))
                + first.bias[:, None, None]).relu()  # fmt: skip
    logits = torch.einsum("oc,bcyx->boyx", second.weight[..., 0, 0], hidden)
    assert_close(model.segment(z), logits + second.bias[:, None, None])
    out = model(torch.randn(1, 3, 11, 6, dtype=torch.float64)).prediction
    assert out.shape == (1, 7, 11, 6)


def test_the_config_says_which_convolutions_are_normalised() -> None:
    def list_normalised(**changes: Any) -> set[str]:
        model: Any = MDEQ(replace(SMALL, **changes), {"norm_type": norm})
        parts = (name.split(".")[1] for name, _ in model.named_parameters() if "weight_g" in name)
        return set(parts)

    norm = "weight_norm"
    assert list_normalised() == {"branches", "fuse_layers", "post_fuse_layers"}
    assert list_normalised(norm_scope=("fuse_layers",)) == {"fuse_layers"}
    assert list_normalised(norm_scope=()) == set()
    norm = "spectral_norm"
    assert list_normalised(norm_scope=("branches",)) == {"branches"}
    norm = "none"
    assert list_normalised() == set()


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "none"])
def test_initial_values_follow_the_rule_outside_f_and_pytorchs_inside(norm: str) -> None:
    config = replace(LARGE, init="cifar", in_channels=16)
    model: Any = MDEQClassifier(config, {"norm_type": norm})
    stem, head = model.downsample[0].weight, model.downsamp_modules[2][0].bias
    assert stem.std().item() == pytest.approx(0.01, rel=0.1)
    assert head.std().item() == pytest.approx(0.01, rel=0.2)
    for name in ("branches.1.blocks.0.conv2", "fuse_layers.3.0.net.2.conv"):
        conv = model.full_stage.get_submodule(name)
        bound = conv.weight[0].numel() ** -0.5
        raw = {"weight_norm": "weight_v", "spectral_norm": "weight_orig"}.get(norm, "weight")
        v = getattr(conv, raw)
        assert v.abs().max().item() == pytest.approx(bound, rel=0.01)
        if norm == "weight_norm":
            assert_close(conv.weight_g.flatten(), v.flatten(1).norm(dim=1))
    assert model.classifier.weight.abs().max().item() == pytest.approx(1680**-0.5, rel=0.01)
    plain: Any = MDEQClassifier(replace(config, init="default"))
    assert plain.downsample[0].weight.abs().max().item() == pytest.approx(144**-0.5, rel=0.01)
    for module in model.modules():
        if isinstance(module, (nn.GroupNorm, nn.BatchNorm2d)) and module.affine:
            assert bool((module.weight == 1).all() and (module.bias == 0).all())


def test_training_returns_as_many_logits_as_states_and_evaluation_one() -> None:
    model: Any = MDEQClassifier(SMALL, DEQConfig(f_max_iter=6, f_tol=0.0, n_states=3, grad=[2]))
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    out = model(x)
    assert [tuple(t.shape) for t in out.predictions] == [(4, 5)] * 3
    assert out.prediction is out.predictions[-1]
    assert not any(z.requires_grad for z in out.state)
    assert out.stats.nfe == 6
    fp_correction(F.cross_entropy, (out.predictions, y), gamma=0.8).backward()
    assert all(p.grad is not None for p in model.parameters())
    out = model.eval()(x, f_max_iter=2)
    assert (len(out.predictions), out.stats.nfe) == (1, 2)


def test_ift_gives_the_gradient_of_a_long_unrolling() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def compute_gradients(**deq: Any) -> list[Any]:
        torch.manual_seed(2)
        model: Any = MDEQClassifier(replace(SMALL, init="default"), deq).double().eval()
        contract(model)
        model.deq.train()
        logits = model(x).prediction
        return list(torch.autograd.grad(logits.square().sum(), list(model.parameters())))

    tight = {"f_max_iter": 200, "f_tol": 1e-13, "b_max_iter": 200, "b_tol": 1e-13}
    for got, want in zip(
        compute_gradients(ift=True, **tight), compute_gradients(f_max_iter=0, grad=60), strict=True
    ):
        assert_close(got, want, rtol=1e-8, atol=1e-12)


@torch.no_grad()
def test_a_batch_of_one_an_empty_batch_and_batch_order() -> None:
    model: Any = MDEQClassifier(SMALL, QUICK).double().eval()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    logits = model(x).prediction
    assert_close(model(x[1:2]).prediction, logits[1:2])
    assert_close(model(x.flip(0)).prediction, logits.flip(0))
    assert model(x[:0]).prediction.shape == (0, 5)


@torch.no_grad()
def test_memory_format_does_not_change_the_answer_and_reaches_the_state() -> None:
    model: Any = MDEQ(SMALL, QUICK).double().eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = model(x).prediction
    last = torch.channels_last
    model, x = model.to(memory_format=last), x.to(memory_format=last)
    assert all(z.is_contiguous(memory_format=last) for z in model.start(model.inject(x)))
    assert_close(model(x).prediction, expected)
    assert_close(model(x[..., ::1].transpose(2, 3).transpose(2, 3)).prediction, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_floating_dtype_trains(dtype: torch.dtype) -> None:
    model: Any = MDEQClassifier(SMALL, QUICK).to(dtype)
    logits = model(torch.randn(2, 3, 8, 8, dtype=dtype)).prediction
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_autocast_keeps_the_state_in_the_models_precision() -> None:
    model: Any = MDEQ(SMALL, QUICK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = model.inject(torch.randn(2, 3, 8, 8))
        assert {z.dtype for z in model.start(u)} == {torch.float32}
        (z,), _ = model.solve(u)
    sum(t.float().square().sum() for t in z).backward()


def test_copies_pickles_and_state_dicts_give_the_same_answers_after_training() -> None:
    model: Any = MDEQClassifier(SMALL, QUICK)
    x = torch.randn(2, 3, 8, 8)
    model(x).prediction.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    again = MDEQClassifier(SMALL, QUICK)
    again.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again]
    expected = model.eval()(x).prediction
    for other in copies:
        assert torch.equal(other.eval()(x).prediction, expected)
    remove_norm(model)
    assert_close(model(x).prediction, expected)


@torch.no_grad()
def test_a_warm_start_needs_fewer_evaluations() -> None:
    model: Any = (
        MDEQ(SMALL, {"f_max_iter": 60, "f_tol": 1e-6, "f_stop_mode": "rel"}).double().eval()
    )
    contract(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    cold = model(x)
    warm = model(x + 1e-4, z0=cold.state)
    assert warm.stats.nfe < cold.stats.nfe
    compacted = model(x, compact=True).prediction
    assert_close(compacted, cold.prediction)


def test_f_can_be_recomputed_and_regularised() -> None:
    model: Any = MDEQ(SMALL, QUICK)
    reset_norm(model.double())
    u = model.inject(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    z = [t.normal_().requires_grad_() for t in model.start(u)]
    plain = torch.autograd.grad(model.full_stage(*z, u)[0].square().sum(), z)
    again = torch.autograd.grad(mem_gc(model.full_stage, (*z, u))[0].square().sum(), z)
    assert_close(again, plain)
    assert jac_reg(model.full_stage(*z, u), z).isfinite()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, "even and at least 2, got 3"),
        ({"channels": (8, 10)}, r"multiple of groups=4, got \[10\]"),
        ({"channels": ()}, "at least one branch"),
        ({"blocks": (1, 2, 3)}, "each of the 2 branches"),
        ({"blocks": 0}, "one number >= 1"),
        ({"downsample_times": 3}, "0, 1 or 2, got 3"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"norm_scope": ("branch",)}, "did you mean 'branches'"),
        ({"init": "cifer"}, "did you mean 'cifar'"),
    ],
)
def test_refuses_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_refuses_what_is_not_an_image_or_not_a_tuple() -> None:
    with pytest.raises(TypeError, match="norm_scope must be a tuple"):
        replace(SMALL, norm_scope="branches")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many head_channels"):
        MDEQClassifier(replace(SMALL, head_channels=(2,)))
    model: Any = MDEQ(SMALL)
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\), got \(2, 1, 8, 8\)"):
        model(torch.zeros(2, 1, 8, 8))
    with pytest.raises(TypeError, match="normalise them first"):
        model(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match="f_maxiter"):
        model(torch.zeros(2, 3, 8, 8), f_maxiter=3)
