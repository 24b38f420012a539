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

from torchdeq import DEQConfig, StopRule, add_deq_args
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
            choices |= {"f_stop_norm": "rms"}
            value = choices.get(name, "rel" if "stop" in name else "x")
            line = f"--{flag} {value}"
        elif name in ("coupled", "sync_stop"):
            value = "adjoint" if name == "coupled" else "world"
            line = f"--{name} {value}"
        elif default is None:
            line, value = f"--{flag} 0.5", 0.5
        else:
            line, value = f"--{flag} 1", type(default)(1)
        assert getattr(DEQConfig(parse(line)), name) == value
        if isinstance(default, bool):
            assert getattr(DEQConfig(parse(f"--{name} --no-{name}")), name) is False
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
        ({"f_rtol": 1e-3, "f_tol": 1e-3}, "instead of f_tol: drop f_tol=0.001, or drop f_rtol"),
        ({"b_atol": 1e-3, "b_tol": 1e-4}, "instead of b_tol: drop b_tol=0.0001, or drop b_rtol"),
        ({"f_rtol": 1e-3, "f_stop_mode": "rel"}, "drop f_stop_mode='rel'"),
        ({"f_rtol": -1.0}, "f_rtol must be finite and >= 0, got -1.0"),
        ({"f_rtol": "1e-3"}, "f_rtol must be a number, got '1e-3'"),
        ({"f_check_every": 0}, "f_check_every must be at least 1, got 0"),
        ({"f_stop_norm": "max"}, "unknown f_stop_norm 'max'"),
        ({"coupled": "yes"}, "coupled: expected auto, true, false or adjoint, got 'yes'"),
        ({"coupled": 1}, "coupled: expected auto"),
        ({"indexing": [3, 9], "f_max_iter": 9, "grad": [1, 2, 3, 4]}, "each of the 2 states"),
    ],
)
def test_refuses_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DEQConfig(**options)


def test_one_stopping_test_becomes_the_rule_of_each_solve() -> None:
    config = DEQConfig(f_rtol=1e-3, b_rtol=1e-4, b_atol=1e-8, f_check_every=4, b_check_every=5)
    assert config.f_stop == StopRule(40, None, rtol=1e-3, atol=0.0, check_every=4)
    assert config.b_stop == StopRule(40, None, rtol=1e-4, atol=1e-8, check_every=5)
    assert DEQConfig(f_max_iter=7, b_tol=1e-3).f_stop == StopRule(7, 1e-3)
    assert DEQConfig(f_rtol=1e-3, f_tol=None).f_stop.rtol == 1e-3  # type: ignore[arg-type]
    # A command line's Namespace holds f_tol whether it was asked for or not.
    assert DEQConfig(parse("--f_rtol 1e-4 --f_atol 1e-6")).f_stop.tol is None
    with pytest.raises(ValueError, match="instead of f_tol"):
        DEQConfig(parse("--f_rtol 1e-4 --f_tol 1e-2"))
    with pytest.raises(ValueError, match="instead of f_tol"):
        config.with_options(f_tol=1e-3)


def test_the_norm_of_residuals_reaches_the_rule_of_each_solve() -> None:
    config = DEQConfig(f_stop_norm="rms")
    assert (config.f_stop.norm, config.b_stop.norm) == ("rms", "l2")


def test_coupling_is_a_word_on_the_command_line_and_a_value_in_python() -> None:
    for word, value in (("auto", None), ("true", True), ("false", False), ("adjoint", "adjoint")):
        assert DEQConfig(parse(f"--coupled {word}")).coupled is value or value == "adjoint"
        assert DEQConfig({"coupled": word}).coupled == value
        assert DEQConfig(coupled=value).coupled == value


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
