"""Which values the options of a DEQ may have, each alone and together."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING

from torchdeq.checks import require, require_choice, require_damping
from torchdeq.failures import POLICIES
from torchdeq.stopping import MODES, NORMS

if TYPE_CHECKING:
    from torchdeq.config import DEQConfig


def check_config(config: DEQConfig, keywords: Collection[str]) -> None:
    """Raise `ValueError` for values out of range, and for options that exclude each other.

    Args:
        config: the options.
        keywords: those that the program has passed as keywords.
    """
    for name in ("f_max_iter", "b_max_iter", "f_tol", "b_tol"):
        value = getattr(config, name)
        require(0 <= value < inf, f"{name} must be finite and at least 0", value)
    for side in ("f", "b"):
        _check_stop(config, side, keywords)
    require_choice("f_stop_norm", config.f_stop_norm, NORMS)
    require_choice("on_failure", config.on_failure, POLICIES)
    require_choice("b_init", config.b_init, ("zeros", "shine"))
    require(config.eval_factor >= 0, "eval_factor must be at least 0", config.eval_factor)
    require(config.eval_f_max_iter >= 0, "eval_f_max_iter must be >= 0", config.eval_f_max_iter)
    require(config.n_states >= 1, "n_states must be at least 1", config.n_states)
    require(config.grad and min(config.grad) >= 1, "grad takes steps >= 1", config.grad)
    require_damping(config.tau)
    _check_states(config)
    _check_backward(config)


def _check_states(config: DEQConfig) -> None:
    """Raise `ValueError` unless there are gradient steps for the states of a training step."""
    rising = all(a < b for a, b in zip([0, *config.indexing], config.indexing, strict=False))
    require(rising, "indexing takes rising numbers of evaluations >= 1", config.indexing)
    counts = [config.n_states if config.n_states > 1 else len(config.indexing) + 1]
    if config.n_states == 1 and config.indexing[-1:] == [config.f_max_iter]:
        counts.insert(0, counts[0] - 1)  # the state at the end counts once
    what = f"grad takes one number of steps, or one for each of the {counts[0]} states"
    require(len(config.grad) in (1, *counts), what, config.grad)


def _check_backward(config: DEQConfig) -> None:
    """Raise `ValueError` if two options ask for different backward passes."""
    if config.backward == "reversible" and config.f_solver != "fixed_point_iter":
        raise ValueError(
            "backward='reversible' runs an iteration of its own: f_solver must be "
            f"'fixed_point_iter', got {config.f_solver!r}"
        )
    if (config.ift or config.hook_ift) and config.backward not in ("auto", "ift"):
        raise ValueError(
            f"ift asks for implicit differentiation and backward={config.backward!r} for another "
            "method: drop one of them"
        )


def _check_stop(config: DEQConfig, side: str, keywords: Collection[str]) -> None:
    """Raise for a wrong stopping test of one solve, or for two tests at once."""
    tol, rtol, atol, mode, every = (
        f"{side}_{name}" for name in ("tol", "rtol", "atol", "stop_mode", "check_every")
    )
    require_choice(mode, getattr(config, mode), MODES)
    interval = getattr(config, every)
    require(interval == "auto" or interval >= 1, f"{every} must be at least 1", interval)
    joint = {name: getattr(config, name) for name in (rtol, atol)}
    for name, value in joint.items():
        require(value is None or 0 <= value < inf, f"{name} must be finite and >= 0", value)
    if all(value is None for value in joint.values()):
        return
    # The Namespace of a command line has every option, whether or not the user has set it.
    is_set = tol in keywords or getattr(config, tol) != config.defaults()[tol]
    if is_set and getattr(config, tol):
        raise ValueError(
            f"{rtol} and {atol} are a stopping test instead of {tol}: drop {tol}="
            f"{getattr(config, tol)}, or drop {rtol} and {atol}"
        )
    if getattr(config, mode) != "abs":
        raise ValueError(
            f"{mode} belongs to {tol}, and {rtol} is relative already: drop {mode}="
            f"{getattr(config, mode)!r}"
        )
