"""Functions on models: which modules are normalised, their options, norms of one's own."""

from __future__ import annotations

import argparse
import importlib
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import torchdeq.norm.apply as functions
from tests.norm.layers import every_norm
from torchdeq.norm import (
    NORMS,
    SpectralNorm,
    WeightNorm,
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(3, 3)
        self.mix = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Conv1d(3, 3, 1))
        self.fuse = nn.ModuleDict({"mix": nn.Linear(3, 3)})
        self.table = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)


def normalised(model: nn.Module) -> set[str]:
    """Return the names of the modules that have a norm."""
    return {name for name, module in model.named_modules() if hasattr(module, "_deq_norm")}


@every_norm
def test_linear_and_convolutional_layers_are_normalised_and_nothing_else(norm_type: str) -> None:
    model = Block()
    state = torch.get_rng_state()
    apply_norm(model, norm_type)
    assert torch.equal(torch.get_rng_state(), state)
    assert normalised(model) == {"inject", "mix.0", "mix.2", "fuse.mix"}
    remove_norm(model)
    assert not normalised(model)
    assert set(model.state_dict()) == set(Block().state_dict())


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"filter_out": "mix"}, {"inject"}),
        ({"prefix_filter_out": "mix"}, {"inject", "fuse.mix"}),
        ({"filter_out": ["inject", "fuse"]}, {"mix.0", "mix.2"}),
        ({"prefix_filter_out": ("mix.2", "fuse"), "filter_out": "inj"}, {"mix.0"}),
        ({"filter_out": [], "prefix_filter_out": []}, {"inject", "mix.0", "mix.2", "fuse.mix"}),
    ],
)
def test_filters_match_the_names_of_modules(filters: dict[str, Any], left: set[str]) -> None:
    model = Block()
    apply_norm(model, **filters)
    assert normalised(model) == left


def test_a_filter_that_matches_nothing_warns() -> None:
    with pytest.warns(UserWarning, match="filter_out 'injekt' matches no module"):
        apply_norm(Block(), filter_out=["injekt"])
    with pytest.warns(UserWarning, match="prefix_filter_out 'ix' matches no module"):
        apply_norm(Block(), prefix_filter_out="ix")
    with pytest.raises(TypeError, match="filter_out must be a string or a list of strings"):
        apply_norm(Block(), filter_out=[3])  # type: ignore[list-item]


def test_nothing_to_normalise_warns_and_none_does_nothing() -> None:
    with pytest.warns(UserWarning, match="LayerNorm has nothing that 'weight_norm' could"):
        apply_norm(nn.LayerNorm(3))
    model = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_norm(model, "none", filter_out="no such name")
        apply_norm(model, args={"norm_type": "none"})
    assert not normalised(model)


def test_a_shared_module_is_normalised_once_and_again_is_harmless() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared})
    apply_norm(model)
    weight = shared.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_norm(model)
    assert shared.weight is weight
    different: dict[str, Any]
    for different in ({"norm_type": "spectral_norm"}, {"clip": True}):
        with pytest.raises(ValueError, match="a is normalised already, with WeightNorm"):
            apply_norm(model, **different)


def test_subclasses_are_normalised_as_their_nearest_class() -> None:
    class Own(nn.ConvTranspose1d):
        pass

    model = nn.Sequential(Own(2, 3, 1), orthogonal(nn.Linear(3, 3)), nn.MultiheadAttention(4, 2))
    apply_norm(model)
    assert normalised(model) == {"0"}
    assert model[0].weight_g.shape == (1, 3, 1)


def test_layers_without_a_weight_are_skipped_and_lazy_ones_refused() -> None:
    layer = nn.Linear(3, 3)
    layer.register_parameter("weight", None)
    apply_norm(nn.Sequential(layer))
    reset_norm(layer)
    assert layer.weight is None
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="'weight' of LazyLinear: it has no shape yet; initialise"):
        apply_norm(lazy)
    with pytest.raises(ValueError, match=r"\(3, 2\) has no dimension 2"):
        WeightNorm.apply(nn.Linear(2, 3), names="weight", dims=2)
    with pytest.raises(TypeError, match="does not know which parameter of LayerNorm"):
        WeightNorm.apply(nn.LayerNorm(3))


@pytest.mark.parametrize(
    "options",
    [
        {"learn_scale": False, "target_norm": 0.5, "clip": True, "clip_value": 2.0,
         "n_power_iterations": 3},
        {"norm_no_scale": True, "norm_target_norm": 0.5, "norm_clip": True, "norm_clip_value": 2.0,
         "sn_n_power_iters": 3},
    ],
)  # fmt: skip
def test_options_have_two_spellings(options: dict[str, Any]) -> None:
    expected = SpectralNorm(["weight"], [0], False, 0.5, True, 2.0, 3)
    layer = nn.Linear(3, 3)
    apply_norm(layer, "spectral_norm", **options)
    assert layer._deq_norm == expected


def test_options_of_a_program_count_and_win_with_a_warning() -> None:
    flags = {
        "norm_type": "spectral_norm",
        "norm_no_scale": True,
        "norm_target_norm": 0.5,
        "norm_clip": False,
        "norm_clip_value": 2.0,
        "sn_n_power_iters": 3,
    }
    layer = nn.Linear(3, 3)
    args = argparse.Namespace(**flags, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_norm(layer, args=args, target_norm=0.5)
    assert layer._deq_norm == SpectralNorm(["weight"], [0], False, 0.5, False, 2.0, 3)
    assert vars(args) == flags | {"lr": 0.1}
    remove_norm(layer)
    with pytest.warns(UserWarning, match="clip=True is overridden by norm_clip in args"):
        apply_norm(layer, args=args, clip=True)
    remove_norm(layer)
    with pytest.warns(
        UserWarning, match="'spectral_norm' is overridden by norm_type 'none' in args"
    ):
        apply_norm(layer, "spectral_norm", args={"norm_type": "none"})


def test_unknown_options_and_norms_are_errors_with_a_suggestion() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="no option 'norm_clipp'; did you mean 'norm_clip'"):
        apply_norm(layer, norm_clipp=True)
    with pytest.raises(TypeError, match="WeightNorm has no option 'n_power_iterations'"):
        apply_norm(layer, n_power_iterations=2)
    with pytest.raises(TypeError, match="set the same option"):
        apply_norm(layer, clip=True, norm_clip=True)
    with pytest.raises(KeyError, match="unknown norm 'weigth_norm'; did you mean 'weight_norm'"):
        apply_norm(layer, "weigth_norm")
    assert isinstance(layer.weight, nn.Parameter)


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the names that a test registers."""
    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))
    for cls in (WeightNorm, SpectralNorm):
        monkeypatch.setattr(cls, "_target_modules", dict(cls._target_modules))


@pytest.mark.usefixtures("own_names")
def test_a_registered_module_is_normalised_over_all_its_parameters() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.V = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 2))

    register_norm_module(Pair, "weight_norm", names=["W", "V"], dims=[0, 1])
    register_norm_module(nn.Embedding, "spectral_norm")
    pair = Pair()
    apply_norm(pair)
    assert set(pair.state_dict()) == {"W_g", "W_v", "V_g", "V_v"}
    assert pair.V_g.shape == (1, 2)
    table = nn.Embedding(5, 3)
    apply_norm(table, "spectral_norm")
    torch.testing.assert_close(
        torch.linalg.matrix_norm(table(torch.arange(5)), 2), torch.tensor(1.0)
    )
    with pytest.raises(ValueError, match="each name needs its dimension"):
        register_norm_module(Pair, "weight_norm", names=["W", "V"], dims=0)
    with pytest.raises(TypeError, match="must be a subclass of"):
        register_norm_module("Linear", "weight_norm")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="unknown norm 'wn'"):
        register_norm_module(Pair, "wn")


class HalfNorm:
    """A norm as programs for torchdeq 0.1.0 write them."""

    _target_modules: ClassVar[dict[Any, Any]] = {nn.Linear: ("weight", 0)}

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @classmethod
    def apply(cls, module: Any, deq_args: Any = None, factor: float = 0.5) -> HalfNorm:
        names, _ = cls._target_modules[type(module)]
        module.register_parameter("weight_raw", nn.Parameter(module._parameters.pop(names).data))
        norm = cls(deq_args.get("own_factor", factor))
        norm(module)
        return norm

    def __call__(self, module: Any) -> None:
        module.weight = self.factor * module.weight_raw

    def remove(self, module: Any) -> None:
        raw: Tensor = module._parameters.pop("weight_raw")
        del module.weight
        module.weight = nn.Parameter(self.factor * raw.detach())


@pytest.mark.usefixtures("own_names")
def test_norms_written_for_0_1_0_work_by_name() -> None:
    class Own(nn.Linear):
        """A subclass: norms written for 0.1.0 look the exact type up, so they skip it."""

    register_norm("half", HalfNorm)
    model: Any = nn.Sequential(nn.Linear(2, 3), Own(3, 3), nn.Conv1d(3, 3, 1))
    before = model[0].weight.detach().clone()
    apply_norm(model, "half", factor=0.25)
    assert normalised(model) == {"0"}
    torch.testing.assert_close(model[0].weight, 0.25 * before)
    with torch.no_grad():
        model[0].weight_raw.mul_(2)
    reset_norm(model)
    torch.testing.assert_close(model[0].weight, 0.5 * before)
    remove_norm(model)
    torch.testing.assert_close(model[0].weight, 0.5 * before)
    assert not normalised(model)
    layer = nn.Linear(2, 2)
    apply_norm(layer, args=argparse.Namespace(norm_type="half", own_factor=2.0))
    assert layer._deq_norm.factor == 2.0  # type: ignore[union-attr]


@pytest.mark.usefixtures("own_names")
def test_registering_checks_what_it_gets() -> None:
    with pytest.raises(ValueError, match="'weight_norm' is built in"):
        register_norm("weight_norm", HalfNorm)
    with pytest.raises(ValueError, match="'none' means no normalisation"):
        register_norm("none", HalfNorm)
    with pytest.raises(TypeError, match="a norm needs _target_modules and apply"):
        register_norm("dict", dict)


def test_published_import_paths() -> None:
    for path, names in {
        "weight_norm": ["WeightNorm"],
        "spectral_norm": ["SpectralNorm"],
        "base_norm": ["apply_norm", "reset_norm", "remove_norm", "register_norm",
                      "register_norm_module"],
    }.items():  # fmt: skip
        module = importlib.import_module(f"torchdeq.norm.{path}")
        for name in names:
            expected = getattr(functions, name, None) or getattr(
                importlib.import_module("torchdeq.norm"), name
            )
            assert getattr(module, name) is expected
