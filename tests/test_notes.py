"""Notes: one line of the log, once per cause."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import torchdeq
from torchdeq import notes
from torchdeq.notes import note
from torchdeq.solver import SOLVERS, get_solver


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_written", set())
    warnings.simplefilter("error", UserWarning)


def test_a_note_is_one_line_at_info_level_once_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchdeq"):
        note("rows are coupled")  # suppressed, so it is logged later
    with caplog.at_level(logging.INFO, "torchdeq"):
        for message in ("rows are coupled", "rows are coupled", "another"):
            note(message)
    assert caplog.record_tuples == [
        ("torchdeq", logging.INFO, "rows are coupled"),
        ("torchdeq", logging.INFO, "another"),
    ]


@pytest.mark.parametrize("name", list(SOLVERS))
def test_options_of_the_solvers_of_0_1_0_are_accepted_by_every_solver(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"m": 4, "lam": 1e-4, "tau": 0.9, "beta": 1.0, "LBFGS_thres": 5, "ls": False}
    f, z0 = (lambda z: 0.5 * z + 1), torch.zeros(2, 3)
    deq = torchdeq.get_deq(f_solver=name)
    with caplog.at_level(logging.INFO, "torchdeq"):
        for training in (True, False, True):
            deq.train(training)(f, z0, solver_kwargs=given)
        get_solver(name)(f, z0, **given)
    has = {
        *getattr(SOLVERS[name], "__dataclass_fields__"),  # noqa: B009
        *SOLVERS[name].aliases,
    }
    ignored = [message for message in caplog.messages if "has no option" in message]
    assert ignored == [
        f"the solver {name!r} has no option {option!r}: it is ignored, as in 0.1.0"
        for option in given
        if option not in has
    ]
    for options in ({"taau": 1.0}, {"LBFGS": 3}, {"lamda": 1e-3}):
        with pytest.raises(TypeError, match=f"solver '{name}' has no option"):
            deq(f, z0, solver_kwargs=options)
        with pytest.raises(TypeError, match=f"solver '{name}' has no option"):
            get_solver(name)(f, z0, **options)


def test_options_that_0_1_0_did_not_have_are_strict() -> None:
    with pytest.raises(TypeError, match="'broyden' has no option 'tau'"):
        torchdeq.get_deq(f_solver="broyden", f_solver_kwargs={"tau": 0.5})
    with pytest.raises(TypeError, match="'fixed_point_iter' has no option 'm'"):
        torchdeq.get_deq(b_solver_kwargs={"m": 3})


@pytest.mark.parametrize("core", ["sliced", "indexing"])
def test_keywords_that_0_1_0_ignored_are_accepted_in_a_call(
    core: str, caplog: pytest.LogCaptureFixture
) -> None:
    f, z0 = (lambda z: 0.5 * z + 1), torch.zeros(2, 3)
    deq = torchdeq.get_deq(core=core)
    (expected,), _ = deq(f, z0)
    with caplog.at_level(logging.INFO, "torchdeq"):
        for call in ({"writer": None}, {"best": True}, {"writer": print, "best": False}):
            (z,), _ = deq(f, z0, **call)
            assert torch.equal(z, expected)
        (z,), _ = deq(func=f, z_star=z0)
        assert torch.equal(z, expected)
    assert [m.split("'")[1] for m in caplog.messages] == ["writer", "best"]
    with pytest.raises(
        TypeError, match=r"the call of a DEQ takes no keyword 'sradius'.*did you mean 'sradius_m"
    ):
        deq(f, z0, sradius=True)
    with pytest.raises(TypeError, match=r"no keyword 'f_maxiter'.*did you mean 'f_max_iter'"):
        deq(f, z0, f_maxiter=3)
    with pytest.raises(TypeError, match="z_init is missing"):
        deq(f)


def test_the_old_factory_of_backwards_takes_options_of_other_solvers() -> None:
    from torchdeq.grad import backward_factory

    options = {"max_iter": 60, "tol": 1e-10, "m": 5, "lam": 1e-3, "return_final": False}
    w = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    attach = backward_factory("ift", b_solver=get_solver("broyden"), b_solver_kwargs=options)
    (z,) = attach(None, lambda z: 0.5 * z + w, 2 * torch.ones_like(w).detach())
    assert float(torch.autograd.grad(z.sum(), w)[0]) == pytest.approx(2)
    with pytest.raises(TypeError, match=r"backward_factory takes no keyword 'hook'.*'hook_ift'"):
        backward_factory("ift", hook=True)
    assert len(backward_factory(2, f_max_iter=30)(None, torch.cos, torch.zeros(1, 1))) == 1
