"""One supervision step as the map of an equilibrium: solvers, gradients, noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deq_zoo.reason.core import States
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.search import Search
from tests.zoo.reason.nets import SETTLING, make_model, make_tokens, noisy

SOLVERS = ("fixed_point_iter", "anderson", "broyden")
TIGHT = {"f_tol": 1e-12, "f_stop_mode": "rel", "f_max_iter": 200}


def gradients(model: Reasoner, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad for name, p in model.core.named_parameters() if p.grad is not None}


def probe(logits: Tensor) -> Tensor:
    """Return a number that depends on all logits in different ways."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weights * logits).sum() + logits.square().sum()


@pytest.mark.parametrize("solver", SOLVERS)
@torch.no_grad()
def test_every_solver_finds_the_limit_of_the_recursion(solver: str) -> None:
    model, tokens = make_model(deq={"f_solver": solver}).eval(), make_tokens()
    start = model.start(3)
    out = model(tokens, start)
    assert out.stats is not None
    assert bool(out.stats.converged.all())
    limit = model.recurse(tokens, 120, start)
    torch.testing.assert_close(out.prediction, limit.prediction, rtol=1e-6, atol=1e-6)
    again = model.apply_step(out.state.y, out.state.z, model.inject(tokens))
    torch.testing.assert_close(tuple(again), tuple(out.state), rtol=1e-6, atol=1e-6)
    assert out.q is not None
    torch.testing.assert_close(out.q, model.body.halting(out.state.y))


def test_the_implicit_gradient_is_that_of_a_dense_solve() -> None:
    net = replace(SETTLING, width=4, cells=4)
    deq = {"ift": True, "b_solver": "gmres", "b_max_iter": 200, "b_tol": 1e-13, **TIGHT}
    model = make_model(net, gradient="deq", deq=deq).train()
    tokens, seen = make_tokens(1, net), list[Any]()
    start = model.start(1)
    out = model(tokens, start, backward_writer=seen.append)
    found = gradients(model, probe(out.prediction))
    assert len(seen) == 1
    assert bool(seen[0].converged.all())
    y, z = (h.clone() for h in out.state)
    size = y.numel()

    def flat(h: Tensor) -> Tensor:
        x = model.inject(tokens)
        return torch.cat([t.flatten() for t in model.apply_step(*split(h), x)])

    def split(h: Tensor) -> States:
        return States(h[:size].view_as(y), h[size:].view_as(z))

    fixed = torch.cat((y.flatten(), z.flatten()))
    J: Any = torch.autograd.functional.jacobian(flat, fixed)
    leaf = fixed.clone().requires_grad_()
    model.zero_grad()
    value = probe(model.core.read(split(leaf).y))
    value.backward()
    u = torch.linalg.solve(torch.eye(len(J), dtype=J.dtype) - J.T, leaf.grad)
    flat(fixed).backward(u)  # adds to the gradient that the head has from `value`
    for name, p in model.core.named_parameters():
        if not name.startswith("q_head"):
            torch.testing.assert_close(found[name], p.grad, rtol=1e-7, atol=1e-9)


def test_the_phantom_gradient_is_that_of_unrolled_steps() -> None:
    deq = {"backward": "phantom", "grad": [2], "tau": 1.0, **TIGHT, "f_max_iter": 5, "f_tol": 0.0}
    model = make_model(gradient="deq", deq=deq).train()
    tokens, start = make_tokens(), model.start(3)
    out = model(tokens, start)
    found = gradients(model, probe(out.prediction))
    with torch.no_grad():
        states = start
        for _ in range(5):
            states = model.apply_step(*states, model.inject(tokens))
    for _ in range(2):
        states = model.apply_step(*states, model.inject(tokens))
    expected = gradients(model, probe(model.core.read(states.y)))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("gradient", "attached"), [("round", 3), ("one_step", 2)])
@pytest.mark.parametrize("budget", [1, 4])
def test_the_last_part_alone_is_differentiated(gradient: Any, attached: int, budget: int) -> None:
    net = replace(SETTLING, rounds=2, inner=2)
    deq = {"f_max_iter": budget, "f_tol": 0.0}
    model = make_model(net, gradient=gradient, deq=deq).train()
    tokens, states = make_tokens(), model.start(3)
    out = model(tokens, states)
    found = gradients(model, probe(out.prediction))
    x, kinds = model.inject(tokens), "zzyzzy" * budget
    for k, kind in enumerate(kinds):
        if k == len(kinds) - attached:
            states = States(*(h.detach() for h in states))
        with torch.set_grad_enabled(k >= len(kinds) - attached):
            step = model.core.inner_step(states, x) if kind == "z" else None
            states = model.core.answer_step(states) if step is None else step
    expected = gradients(model, probe(model.core.read(states.y)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(out.state.z, states.z.detach())


def test_the_reversible_gradient_reaches_every_weight() -> None:
    deq = {"backward": "reversible", "f_max_iter": 4, "f_tol": 0.0}
    model = make_model(gradient="deq", deq=deq).train()
    out = model(make_tokens())
    found = gradients(model, probe(out.prediction))
    missing = {n for n, _ in model.core.named_parameters()} - found.keys()
    assert missing == {"q_head.weight", "q_head.bias"}
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in found.values())
    assert out.stats is not None
    assert out.stats.nfe == 4


@torch.no_grad()
def test_frozen_noise_has_a_fixed_point_and_fresh_noise_has_none() -> None:
    tokens = make_tokens()
    frozen = make_model(noisy(), solve_noise="frozen").eval()
    still = make_model(noisy(), solve_noise="off").eval()
    start = frozen.start(3)
    before = torch.random.get_rng_state()
    one, again = frozen(tokens, start), frozen(tokens, start)
    assert torch.equal(torch.random.get_rng_state(), before)
    frozen.search = Search(seed=1)
    other = frozen(tokens, start)
    assert one.stats is not None
    assert bool(one.stats.converged.all())
    assert torch.equal(one.prediction, again.prediction)
    assert not torch.equal(one.prediction, other.prediction)
    off = still(tokens, start)
    without = make_model(SETTLING).eval()(tokens, start)
    assert torch.equal(off.prediction, without.prediction)
    fresh = still.recurse(tokens, 60, start)
    assert fresh.stats is not None
    assert bool((fresh.stats["rel_trace"][:, -1] > 1e-3).all())


def test_the_noise_of_training_is_fresh_in_every_step() -> None:
    model = make_model(noisy()).train()
    tokens, start = make_tokens(), model.start(3)
    assert not torch.equal(model(tokens, start).prediction, model(tokens, start).prediction)
    longer = make_model(noisy(), deq={"f_max_iter": 3}, solve_noise="frozen").train()
    out = longer(tokens, start)
    assert out.stats is not None
    assert out.stats.nfe == 3  # two of the solve, and one with a graph
    assert not torch.equal(out.prediction, longer(tokens, start).prediction)


@torch.no_grad()
def test_the_spectral_radius_at_the_answer_is_that_of_the_jacobian() -> None:
    net = replace(SETTLING, width=4, cells=4)
    model = make_model(net).eval()
    tokens = make_tokens(1, net)
    out = model(tokens, model.start(1), sradius_mode=True)
    x, (y, z) = model.inject(tokens), out.state

    def flat(h: Tensor) -> Tensor:
        states = States(h[: y.numel()].view_as(y), h[y.numel() :].view_as(z))
        return torch.cat([t.flatten() for t in model.apply_step(*states, x)])

    with torch.enable_grad():
        J: Any = torch.autograd.functional.jacobian(flat, torch.cat((y.flatten(), z.flatten())))
    assert out.stats is not None
    expected = float(torch.linalg.eigvals(J).abs().max())
    assert float(out.stats["sradius"][0]) == pytest.approx(expected, rel=0.05)


def test_half_precision_leaves_no_weight_without_gradient() -> None:
    """The last round has gradients although autocast cast its weights before, without a graph."""
    net = replace(SETTLING, rounds=2)
    model = make_model(net).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(make_tokens())
        value = out.prediction.float().square().mean() + out.q.square().mean()
    value.backward()
    assert out.state.y.dtype == torch.float32
    for name, p in model.core.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.any()), name


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (torch.ones(2, 9, dtype=torch.long), ValueError),
        (torch.ones(2, 16), TypeError),
        (torch.ones(2, 16, dtype=torch.bool), TypeError),
        (torch.ones(2, 16, dtype=torch.complex64), TypeError),
        (torch.full((1, 16), 6), ValueError),
    ],
)
def test_tokens_of_another_kind_are_errors(tokens: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\(batch, 16\)|whole numbers|0 to 5"):
        make_model()(tokens)


@torch.no_grad()
def test_tokens_of_every_integer_type_are_numbers_and_no_mask() -> None:
    model, tokens = (
        make_model(replace(SETTLING, puzzle_width=8, puzzle_ids=3)).eval(),
        make_tokens(),
    )
    ids, start = torch.tensor([2, 0, 1]), model.start(3)
    expected = model(tokens, start, ids=ids).prediction
    for dtype in (torch.uint8, torch.int8, torch.int32):
        found = model(tokens.to(dtype), start, ids=ids.to(dtype)).prediction
        assert torch.equal(found, expected)
        assert torch.equal(model.inject(tokens.to(dtype)), model.inject(tokens))
    with pytest.raises(TypeError, match="ids must be whole numbers"):
        model(tokens, start, ids=ids > 0)


def test_states_of_another_batch_are_an_error() -> None:
    model, tokens = make_model(), make_tokens(2)
    for start in (model.start(1), States(model.start(2).y, model.start(2).z[:, :1])):
        for mode in (True, False):
            with pytest.raises(ValueError, match=r"two tensors \(2, 16, 8\)"):
                model.train(mode)(tokens, start)
        with pytest.raises(ValueError, match="two tensors"):
            model.recurse(tokens, 1, start)
    with pytest.raises(ValueError, match=r"two tensors \(1, 16, 8\)"):
        model.predict("1.....3..4....2.", model.start(2))


@pytest.mark.parametrize("position", ["rope", "rope2d"])
def test_a_model_trains_after_inference(position: Any) -> None:
    net = replace(SETTLING, mixer="attention", heads=2, position=position)
    model, tokens = make_model(net), make_tokens()
    with torch.inference_mode():
        model.eval()(tokens)
    probe(model.train()(tokens).prediction).backward()


def test_matrices_inside_and_outside_the_equilibrium_differ_in_kind() -> None:
    model = make_model(replace(SETTLING, puzzle_width=8))
    kinds = {name: model.weight_kind(name) for name, _ in model.named_parameters()}
    assert kinds.pop("core.lm_head.weight") == kinds.pop("core.q_head.weight") == "matrix"
    inside = {kind for name, kind in kinds.items() if "L_level" in name}
    outside = {kind for name, kind in kinds.items() if "L_level" not in name}
    assert (inside, outside) == ({"core_matrix"}, {"vector"})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kind": "hrm"}, "two networks of attention"),
        ({"slots": 2}, "set puzzle_width"),
        ({"slots": 1, "puzzle_width": 9}, "does not fit"),
        ({"position": "rope"}, "belongs to attention"),
        ({"mixer": "attention", "heads": 3}, "divisible"),
        ({"mixer": "attention", "heads": 4, "position": "rope2d"}, "divisible"),
        ({"mixer": "attention", "heads": 2, "position": "rope2d", "cells": 12}, "square board"),
        ({"mixer": "conv", "cells": 12}, "mixer=conv needs a square board"),
        ({"mixer": "conv", "puzzle_width": 8}, "mixer=conv needs a square board without slots"),
        ({"mixer": "conv", "position": "rope2d"}, "belongs to attention"),
        ({"mixer": "conv", "heads": 2}, "heads=2 would have no effect with mixer=conv"),
        ({"multiple": 0}, "multiple"),
        ({"mixer": "Conv"}, "mixer must be one of attention, mlp, conv, got 'Conv'"),
        ({"position": "2d"}, "position must be one of"),
        ({"expansion": 1e-9}, "no inner width"),
        ({"step_share": 0.0}, "step_share"),
        ({"exploration": 2.0}, "exploration"),
        ({"noise": -1.0}, "noise"),
        ({"expansion": 0.0}, "positive finite"),
        ({"expansion": float("nan")}, "positive finite"),
        ({"expansion": float("inf")}, "positive finite"),
        ({"kind": "trm", "noise": 0.2}, "noise=0.2 would have no effect with kind=trm"),
        ({"kind": "trm", "step_share": 0.5}, "step_share=0.5 would have no effect"),
        ({"heads": 2}, "heads=2 would have no effect with mixer=mlp"),
        ({"kind": "trm", "heads": 2}, "heads=2 would have no effect with mixer=mlp"),
    ],
)
def test_shapes_that_cannot_be_built_are_errors(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(SETTLING, **options)


@pytest.mark.parametrize(
    ("gradient", "deq", "steps"),
    [
        ("round", {"f_max_iter": 1}, 1),
        ("one_step", {"f_max_iter": 2}, 2),
        ("round", {"f_max_iter": 0}, 1),  # the step with a gradient is always made
        ("deq", {"f_max_iter": 1, "grad": [2]}, 3),
        ("deq", {"f_max_iter": 4, "backward": "reversible"}, 4),
        ("deq", {"f_max_iter": 4, "ift": True}, 4),
    ],
)
def test_the_depth_of_training_counts_all_steps_of_an_update(
    gradient: Any, deq: dict[str, Any], steps: int
) -> None:
    assert make_model(gradient=gradient, deq=deq).trained_depth == SETTLING.max_steps * steps
