"""Options: published names and defaults, strict where the caller means us, nothing mutated."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from torchdeq import DEQConfig, add_deq_args
from torchdeq.config import read_config

#: Flags and defaults of torchdeq 0.1.0.
PUBLISHED: dict[str, Any] = {
    "f_solver": "fixed_point_iter", "b_solver": "fixed_point_iter",
    "f_max_iter": 40, "b_max_iter": 40, "f_tol": 1e-3, "b_tol": 1e-6,
    "f_stop_mode": "abs", "b_stop_mode": "abs", "eval_factor": 1.0, "eval_f_max_iter": 0,
    "norm_type": "weight_norm", "norm_no_scale": False, "norm_clip": False,
    "norm_clip_value": 1.0, "norm_target_norm": 1.0, "sn_n_power_iters": 1,
    "core": "sliced", "ift": False, "hook_ift": False, "n_states": 1, "indexing": [],
    "gamma": 0.8, "grad": [1], "tau": 1.0, "sup_gap": -1, "sup_loc": [],
    "jac_loss_weight": 0.0, "jac_loss_freq": 0.0, "jac_incremental": 0, "sradius_mode": False,
}  # fmt: skip


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_deq_args(parser)
    return parser.parse_args(line.split())


def test_flags_and_defaults_are_the_published_ones() -> None:
    parsed = vars(parse(""))
    assert {name: parsed[name] for name in PUBLISHED} == PUBLISHED
    assert {name: type(parsed[name]) for name in PUBLISHED} == {
        name: type(value) for name, value in PUBLISHED.items()
    }
    assert parsed == DEQConfig.defaults()


def test_every_flag_reaches_the_config() -> None:
    value: Any
    for name, default in DEQConfig.defaults().items():
        flag = {"f_solver_kwargs": "f_opt", "b_solver_kwargs": "b_opt"}.get(name, name)
        if isinstance(default, bool):
            line, value = f"--{flag}", True
        elif isinstance(default, dict):
            line, value = f"--{flag} m=3 lam=1e-4 mode=fast", {"m": 3, "lam": 1e-4, "mode": "fast"}
        elif isinstance(default, list):
            line, value = f"--{flag} 1", [1]
        elif isinstance(default, str):
            choices = {"on_failure": "raise", "backward": "ift", "b_init": "shine"}
            value = choices.get(name, "rel" if "stop" in name else "x")
            line = f"--{flag} {value}"
        else:
            line, value = f"--{flag} 1", type(default)(1)
        assert getattr(DEQConfig(parse(line)), name) == value
    assert DEQConfig(parse("--n_losses 3")).n_states == 3
    assert DEQConfig(parse("--f_opt m=1 --f_opt tau=0.5")).f_solver_kwargs == {"m": 1, "tau": 0.5}


def test_every_flag_has_help_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"--{name}" in text for name in PUBLISHED)
    assert "(default: 0.001)" in text
    with pytest.raises(SystemExit):
        parse("--f_opt m")
    assert "expected NAME=VALUE, got 'm'" in capsys.readouterr().err


def test_keywords_win_over_args_even_if_they_equal_the_default() -> None:
    args = argparse.Namespace(f_max_iter=7, f_tol=0.5)
    config = DEQConfig(args, f_max_iter=40)
    assert (config.f_max_iter, config.f_tol) == (40, 0.5)
    assert vars(args) == {"f_max_iter": 7, "f_tol": 0.5}


@pytest.mark.parametrize("source", ["namespace", "dict", "config", "object"])
def test_reads_any_source_without_touching_it(source: str) -> None:
    options = {"f_max_iter": 12, "grad": [2, 3], "n_states": 2, "f_solver_kwargs": {"m": 4}}
    before = copy.deepcopy(options)
    args: Any = {
        "namespace": lambda: argparse.Namespace(**options),
        "dict": lambda: options,
        "config": lambda: DEQConfig(**options),  # type: ignore[arg-type]
        "object": lambda: SimpleNamespace(**options),
    }[source]()
    config = DEQConfig(args, tau=0.5)
    assert (config.f_max_iter, config.grad, config.tau) == (12, [2, 3], 0.5)
    config.grad.append(9)
    config.f_solver_kwargs["x"] = 1
    assert options == before


def test_unknown_keywords_and_keys_are_errors_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="unknown option 'f_solvr'; did you mean 'f_solver'"):
        DEQConfig(f_solvr="anderson")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'stop_mode'"):
        DEQConfig({"stop_mode": "rel"})
    with pytest.raises(TypeError, match="unknown option 'f_anderson_m'"):
        read_config(None, {"f_anderson_m": 3})
    with pytest.raises(TypeError, match="got str"):
        DEQConfig("anderson")


def test_a_programs_own_attributes_are_left_alone_and_a_near_miss_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DEQConfig(argparse.Namespace(lr=0.1, batch_size=3, dropout=0.5, grad=2))
    assert config.get("lr") == 0.1
    assert config.get("epochs", 5) == 5
    with pytest.warns(UserWarning, match="'f_max_iters' is not an option .*'f_max_iter'") as seen:
        DEQConfig(argparse.Namespace(f_max_iters=3))
    assert seen[0].filename == __file__


def test_get_returns_what_was_given_or_the_callers_default() -> None:
    config = DEQConfig(f_max_iter=40)
    assert config.get("f_max_iter", 50) == 40
    assert config.get("b_max_iter", 50) == 50
    assert config.get("b_max_iter") is None
    assert DEQConfig({"n_losses": 4}).get("n_losses") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"f_max_iter": -1}, "f_max_iter must be finite and at least 0, got -1"),
        ({"f_max_iter": 2.5}, "f_max_iter must be a whole number, got 2.5"),
        ({"b_tol": -1e-3}, "b_tol"),
        ({"f_tol": "1e-3"}, "f_tol must be a number, got '1e-3'"),
        ({"f_stop_mode": "relative"}, "unknown f_stop_mode 'relative'"),
        ({"grad": 0}, r"grad takes steps >= 1, got \[0\]"),
        ({"grad": []}, r"grad takes steps >= 1, got \[\]"),
        ({"grad": "3"}, "grad must be a number, got '3'"),
        ({"tau": 0.0}, r"tau must lie in \(0, 1\], got 0.0"),
        ({"n_states": 0}, "n_states must be at least 1, got 0"),
        ({"indexing": [5, 3]}, r"rising numbers of evaluations >= 1, got \[5, 3\]"),
        ({"eval_factor": -1}, "eval_factor must be at least 0"),
        ({"on_failure": "wrn"}, "did you mean 'warn'"),
        ({"ift": True, "backward": "phantom"}, "drop one of them"),
        ({"ift": "yes"}, "ift must be True or False, got 'yes'"),
        ({"f_solver": None}, "f_solver must be a name, got None"),
        ({"f_solver_kwargs": [1]}, "f_solver_kwargs must be a dict"),
    ],
)
def test_refuses_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DEQConfig(**options)


def test_numbers_lists_and_tuples_are_alike() -> None:
    assert DEQConfig(grad=3).grad == DEQConfig(grad=(3,)).grad == [3]  # type: ignore[arg-type]
    assert DEQConfig(f_max_iter=30.0).f_max_iter == 30  # type: ignore[arg-type]
    assert DEQConfig(indexing=None).indexing == []  # type: ignore[arg-type]
    assert DEQConfig(f_tol=None).f_tol == 0.0  # type: ignore[arg-type]


def test_is_a_value() -> None:
    config = DEQConfig(ift=True)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(config)).get("ift") is True
    with pytest.raises(AttributeError):
        config.ift = False  # type: ignore[misc]
    assert config.with_options(ift=False).ift is False
    assert config.ift


def test_tools_see_every_option() -> None:
    parameters = inspect.signature(DEQConfig).parameters
    assert set(parameters) >= {"args", *DEQConfig.names()}
    assert {f.name for f in dataclasses.fields(DEQConfig)} == set(DEQConfig.names())
