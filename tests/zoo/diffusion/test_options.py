"""Options of the equilibrium: each of them changes a result, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deq_zoo.cli import main
from deq_zoo.diffusion import (
    ChainConfig,
    InversionConfig,
    ParallelChain,
    UNetConfig,
    parallel_sample,
)
from deq_zoo.diffusion.options import Sampling
from deq_zoo.diffusion.plan import EXACT, ChainPlan
from deq_zoo.diffusion.presets import PUBLISHED
from deq_zoo.diffusion.task import Denoise
from tests.zoo.diffusion.nets import draw, make_net
from tests.zoo.diffusion.smoke import make_task
from torchdeq import ConvergenceError, ConvergenceWarning, DEQConfig, StopRule

BASE: dict[str, Any] = {
    "f_max_iter": 12,
    "f_tol": 1e-3,
    "f_stop_mode": "rel",
    "on_failure": "ignore",
}
EXACT_GRADIENT = BASE | {"ift": True}
# What is changed, and what it is changed from. A joint test of f_rtol and f_atol replaces f_tol.
JOINT: dict[str, Any] = {
    "f_max_iter": 12,
    "f_tol": 0.0,
    "f_rtol": 1e-3,
    "f_atol": 1e-9,
    "on_failure": "ignore",
}
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "f_solver": (BASE, "anderson"),
    "f_solver_kwargs": (BASE | {"f_solver": "anderson"}, {"m": 2}),
    "f_max_iter": (BASE, 2),
    "f_tol": (BASE, 1e-7),
    "f_stop_mode": (BASE, "abs"),
    "f_rtol": (JOINT, 1e-7),
    "f_atol": (JOINT, 10.0),
    "f_stop_norm": (BASE | {"f_stop_mode": "abs", "f_tol": 1e-2}, "rms"),
    "f_check_every": (BASE, 5),
    "backward": (BASE, "ift"),
    "ift": (BASE, True),
    "hook_ift": (BASE, True),
    "grad": (BASE, [3]),
    "tau": (BASE, 0.5),
    "b_tol": (EXACT_GRADIENT, 0.3),
}
WINDOWED = InversionConfig(steps=3, window=4, lr=0.05, enough=0.0)


def run(plan: ChainPlan) -> tuple[float, ...]:
    """Return numbers on which every option of a chain has an effect."""
    chain, x = plan.make_chain(make_net()), draw(2, 1, 4, 4)
    with torch.no_grad():
        trajectory = plan.solve(chain, x)
    inversion = plan.invert(chain, x.tanh())
    return (
        float(trajectory.states.norm()),
        trajectory.work.evaluations,
        float(inversion.sse.sum()),
        inversion.work.evaluations,
    )


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_an_option_that_is_accepted_changes_a_result(name: str) -> None:
    options, value = EFFECTS[name]
    chain = ChainConfig(steps=8)
    before, after = (
        ChainPlan(DEQConfig(**given), chain, WINDOWED)
        for given in (options, options | {name: value})
    )
    assert name in after.uses
    assert run(before) != run(after)


def test_every_accepted_option_is_among_those_that_were_tried() -> None:
    plans = [ChainPlan(deq, inversion=WINDOWED) for deq in (EXACT, PUBLISHED)]
    accepted = plans[0].uses | plans[1].uses
    assert accepted == EFFECTS.keys() | {"on_failure", "sync_stop"}  # the second: of processes


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        ("warn", lambda: pytest.warns(ConvergenceWarning)),
        ("raise", lambda: pytest.raises(ConvergenceError)),
    ],
)
def test_on_failure_decides_about_chains_that_do_not_converge(policy: str, outcome: Any) -> None:
    options = BASE | {"f_max_iter": 1, "f_tol": 1e-12, "on_failure": policy}
    for gradient in (options, options | {"ift": True}):
        plan, x = ChainPlan(DEQConfig(**gradient), ChainConfig(steps=8)), draw(2, 1, 4, 4)
        chain = plan.make_chain(make_net())
        with outcome():
            plan.solve(chain, x)
        with outcome():
            plan.invert(chain, x)


def other_value(name: str) -> Any:
    """Return a valid value that is not the default."""
    choices = {
        "b_solver": "anderson",
        "b_solver_kwargs": {"m": 2},
        "b_stop_mode": "rel",
        "b_init": "shine",
        "core": "indexing",
        "coupled": True,
        "indexing": [2],
        "norm_type": "none",
        "sup_loc": [1],
        "b_rtol": 1e-3,
        "b_atol": 1e-3,
        "tau": 0.5,
        "grad": [3],
        "b_tol": 1e-2,
        "eval_f_max_iter": 7,
    }
    default = DEQConfig.defaults()[name]
    if name in choices:
        return choices[name]
    return not default if isinstance(default, bool) else default + 1


@pytest.mark.parametrize("deq", [EXACT, PUBLISHED], ids=["exact", "phantom"])
def test_any_other_option_is_refused(deq: DEQConfig) -> None:
    task = make_task(deq=deq)
    refused = set(DEQConfig.names()) - task.uses
    assert {"jac_loss_weight", "n_states", "norm_type", "b_solver", "eval_factor"} <= refused
    for name in refused:
        with pytest.raises(ValueError, match=rf"{name}.* (would have no|and have no) effect"):
            make_task(deq=deq.with_options(**{name: other_value(name)}))


@pytest.mark.parametrize(
    "flags",
    [
        ["--jac_loss_weight", "1"],
        ["--n_states", "2"],
        ["--norm_type", "none"],
        ["--set", "b_solver=anderson"],
        ["--set", "tau=0.5"],
    ],
)
def test_flags_and_settings_without_effect_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "diffusion-smoke", *flags]) == 2
    assert "no effect" in capsys.readouterr().err


def test_the_options_of_one_gradient_have_no_effect_on_the_other() -> None:
    assert "b_tol" not in ChainPlan(EXACT).uses  # a sweep needs no tolerance
    assert "b_tol" in ChainPlan(EXACT, inversion=InversionConfig(window=0)).uses
    assert {"grad", "tau"} <= ChainPlan(PUBLISHED).uses
    with pytest.raises(ValueError, match=r"drop ift, or set tau=1"):
        ChainPlan(PUBLISHED.with_options(ift=True))
    with pytest.raises(ValueError, match="reversible"):
        ChainPlan(DEQConfig(backward="reversible"))


def test_options_of_one_call_are_checked_too() -> None:
    plan = ChainPlan(EXACT)
    assert plan.with_options(7, f_max_iter=9).deq.f_max_iter == 9
    assert plan.with_options(7).inversion.steps == 7
    with pytest.raises(ValueError, match="norm_type would have no effect"):
        plan.with_options(norm_type="none")


def test_a_window_measures_in_the_norm_of_the_stop_rule() -> None:
    """Compare a root mean square over 256 pixels with a norm, which is 16 times as large."""
    chain = ParallelChain(make_net(), ChainPlan().scheduler, 12)
    x = draw(1, 1, 16, 16)
    norm, scaled, rms = (
        parallel_sample(
            chain, x, solver="fixed_point_iter", window=4, stop=StopRule(90, tol, "abs", norm=kind)
        ).work.rounds
        for tol, kind in ((1e-2, "l2"), (16e-2, "l2"), (1e-2, "rms"))
    )
    assert scaled == rms
    assert rms < norm


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ChainConfig(steps=0),
        lambda: ChainConfig(eta=1.5),
        lambda: ChainConfig(chunk=0),
        lambda: ChainConfig(window=-1),
        lambda: InversionConfig(steps=0),
        lambda: InversionConfig(eval_steps=0),
        lambda: InversionConfig(images=-1),
        lambda: InversionConfig(lr=0.0),
        lambda: InversionConfig(lr=float("nan")),
        lambda: Sampling(n=0),
        lambda: Sampling(eta=float("nan")),
        lambda: Sampling(tol=-1e-3),
        lambda: UNetConfig(groups=0),
        lambda: UNetConfig(dropout=1.0),
        lambda: Denoise(noise_levels=10),
        lambda: Denoise(batch=0),
        lambda: Denoise(val_images=-1),
    ],
)
def test_options_out_of_range_are_refused_when_they_are_set(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must|at most"):
        wrong()


def test_limits_only_lower_the_work() -> None:
    plan = ChainPlan(chain=ChainConfig(steps=30), inversion=InversionConfig(steps=10))
    limited = plan.limited(20, 100)
    assert (limited.chain.steps, limited.inversion.steps) == (20, 10)
    assert replace(limited, chain=plan.chain) == plan
