"""Every import path that torchdeq 0.1.0 published works, and names the same thing everywhere."""

from __future__ import annotations

from importlib import import_module

import pytest

import torchdeq

PATHS = {
    "torchdeq": "get_deq reset_deq register_deq add_deq_args apply_norm reset_norm remove_norm "
    "register_norm register_norm_module get_solver register_solver fp_correction "
    "register_weight_func jac_reg power_method mem_gc mixed_init reset_dropout "
    "VariationalDropout VariationalDropout1d VariationalDropout2d VariationalDropout3d "
    "VariationalDropToken1d VariationalDropToken2d VariationalDropToken3d",
    "torchdeq.core": "DEQBase DEQIndexing DEQSliced get_deq register_deq reset_deq",
    "torchdeq.solver": "get_solver register_solver solver_stat_from_final_step",
    "torchdeq.solver.stat": "SolverStat",
    "torchdeq.solver.anderson": "anderson_solver",
    "torchdeq.solver.broyden": "broyden_solver",
    "torchdeq.solver.fp_iter": "fixed_point_iter simple_fixed_point_iter",
    "torchdeq.norm": "apply_norm reset_norm remove_norm register_norm register_norm_module",
    "torchdeq.norm.base_norm": "apply_norm reset_norm remove_norm register_norm",
    "torchdeq.norm.weight_norm": "WeightNorm",
    "torchdeq.norm.spectral_norm": "SpectralNorm",
    "torchdeq.loss": "fp_correction register_weight_func jac_reg power_method",
    "torchdeq.dropout": "VariationalDropout reset_dropout",
    "torchdeq.utils": "add_deq_args mem_gc mixed_init",
    "torchdeq.utils.mem": "mem_gc",
    "torchdeq.utils.init": "mixed_init",
    "torchdeq.utils.config": "DEQConfig",
    "torchdeq.utils.arg_utils": "add_deq_args",
    "torchdeq.utils.layer_utils": "deq_decorator",
    "torchdeq.grad": "backward_factory",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_published_path_works(path: str) -> None:
    module = import_module(path)
    for name in PATHS[path].split():
        assert getattr(module, name) is getattr(torchdeq, name, getattr(module, name))


@pytest.mark.parametrize("package", ["", ".solver", ".grad", ".linear", ".norm", ".loss", ".core"])
def test_every_public_name_is_there(package: str) -> None:
    module = import_module(f"torchdeq{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_a_former_name_warns_and_gives_the_present_thing() -> None:
    with pytest.warns(DeprecationWarning, match=r"torchdeq\.Solution is now torchdeq\.FixedPoint"):
        assert torchdeq.Solution is torchdeq.FixedPoint
    with pytest.warns(DeprecationWarning, match=r"Reversible is now torchdeq\.experimental\."):
        assert torchdeq.Reversible is torchdeq.experimental.Reversible
    with pytest.raises(AttributeError, match="no attribute 'Sollution'"):
        torchdeq.Sollution  # noqa: B018
