"""Exact gradients, inversion and interpolation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deq_zoo.diffusion import Adjoint, ParallelChain, interpolate, invert, parallel_sample
from deq_zoo.diffusion.inversion import METHODS
from tests.zoo.diffusion.nets import draw, make_net, make_scheduler, measure_error
from torchdeq import StopRule

EXACT = StopRule(60, 1e-14, "rel")


def sample_states(
    chain: ParallelChain, x: Tensor, noise: Tensor | None, adjoint: Adjoint
) -> Tensor:
    return parallel_sample(
        chain, x, noise, solver="fixed_point_iter", stop=EXACT, adjoint=adjoint,
        on_failure="ignore",
    ).states  # fmt: skip


@pytest.mark.parametrize("window", [1, 3, 0])
@pytest.mark.parametrize("solver", ["fixed_point_iter", "anderson"])
@pytest.mark.parametrize("options", [{}, {"clip_sample": True}, {"prediction_type": "sample"}])
def test_gradient_is_that_of_the_sequential_chain(
    window: int, solver: str, options: dict[str, Any]
) -> None:
    """Check a loss on every state, with respect to initial noise and noises, in chunks of 7."""
    chain = ParallelChain(make_net(), make_scheduler(**options), 8, 0.7, chunk=7)
    x = draw(2, 1, 4, 4).requires_grad_()
    noise = draw(2, 8, 1, 4, 4, seed=1).requires_grad_()
    weights = draw(2, 8, 1, 4, 4, seed=2)
    steps: list[Tensor] = []
    chain.sequential(x, noise, lambda k, z: steps.append(z))
    expected = torch.autograd.grad((torch.stack(steps, 1) * weights).sum(), (x, noise))
    adjoint = Adjoint(window=window, solver=solver, tol=1e-13, max_iter=80)
    states = sample_states(chain, x, noise, adjoint)
    got = torch.autograd.grad((states * weights).sum(), (x, noise))
    for a, b in zip(got, expected, strict=True):
        assert measure_error(a, b) < 1e-10


def test_gradcheck() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 4)
    x = draw(1, 1, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: sample_states(
            chain, z, None, Adjoint(window=2, solver="fixed_point_iter", tol=1e-13)
        ),
        (x,),
    )


def test_no_graph_without_grad_mode_and_none_for_weights() -> None:
    unet, x = make_net(), draw(1, 1, 4, 4)
    chain = ParallelChain(unet, make_scheduler(), 5)
    assert not parallel_sample(chain, x).states.requires_grad
    assert not chain.sequential(x).requires_grad
    with torch.no_grad():
        assert not parallel_sample(chain, x.requires_grad_()).states.requires_grad
    parallel_sample(chain, x).image.sum().backward()
    assert all(p.grad is None for p in unet.parameters())


def test_the_reverse_sweep_takes_a_product_for_each_step() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 6)
    x = draw(2, 1, 4, 4).requires_grad_()
    result = parallel_sample(chain, x)
    rounds, evaluations = result.work.rounds, result.work.evaluations
    result.image.sum().backward()
    assert result.work.rounds - rounds == 6
    assert result.work.evaluations - evaluations == 12


@pytest.mark.parametrize("method", METHODS)
def test_inversion_lowers_the_error_and_keeps_noise_with_its_own_error(method: Any) -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 8)
    x = chain.sequential(draw(3, 1, 4, 4))
    result = invert(chain, x, method=method, steps=12, lr=0.05, stop=StopRule(30, 1e-8, "rel"))
    assert (result.sse < 0.8 * result.history[0]).all()
    again = (chain.sequential(result.noise) - x).square().sum(dim=(1, 2, 3))
    slack = 1e-2 if method == "phantom" else 1e-6  # a damped state is not quite the chain's
    assert float(((again - result.sse) / result.history[0]).abs().max()) < slack
    assert torch.allclose(result.mse, result.sse / 16)
    assert torch.allclose(result.psnr, 10 * torch.log10(4 / result.mse))
    assert result.history.shape == (12, 3)


def test_implicit_and_sequential_inversion_take_the_same_path() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 8, 0.5)
    x, noise = draw(2, 1, 4, 4) / 3, draw(2, 8, 1, 4, 4, seed=4)
    paths = [
        invert(chain, x, method=m, steps=5, noise=noise, stop=EXACT).history
        for m in ("implicit", "sequential")
    ]
    assert measure_error(*paths) < 1e-9


def test_inversion_ends_when_asked_or_good_enough() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 5)
    x = draw(2, 1, 4, 4)
    assert len(invert(chain, x, each=lambda k, sse: k == 2).history) == 3
    assert len(invert(chain, x, enough=1e9).history) == 1
    with pytest.raises(ValueError, match="known"):
        invert(chain, x, method="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps"):
        invert(chain, x, steps=0)
    with pytest.raises(ValueError, match="x must have"):
        invert(chain, x, x=x[:1])
    for method in METHODS:
        with pytest.raises(ValueError, match=r"z0 must be .*\(2, 5, 1, 4, 4\)"):
            invert(chain, x, method=method, z0=x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite"):
        invert(chain, x / 0)


def test_keeping_states_saves_rounds() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 20)
    x = draw(2, 1, 4, 4) / 3
    work = {
        keep: invert(
            chain, x, steps=6, keep_states=keep, stop=StopRule(40, 1e-6, "rel")
        ).work.rounds
        for keep in (True, False)
    }
    assert work[True] < work[False]


def test_interpolation_keeps_ends_and_length() -> None:
    a, b = draw(2, 1, 16, 16), draw(2, 1, 16, 16, seed=1)
    path = interpolate(a, b, 5)
    assert path.shape == (5, 2, 1, 16, 16)
    assert measure_error(path[0], a) < 1e-12
    assert measure_error(path[-1], b) < 1e-12
    length = path.flatten(2).norm(dim=2)
    assert float((length / length[0]).sub(1).abs().max()) < 0.1
    assert measure_error(interpolate(a, a, 3), a.expand(3, -1, -1, -1, -1)) < 1e-12
    with pytest.raises(ValueError, match="at least 2"):
        interpolate(a, b, 1)
    with pytest.raises(ValueError, match="no direction"):
        interpolate(a, torch.zeros_like(b), 3)
    with pytest.raises(ValueError, match="both noises"):
        interpolate(a, b[:1], 3)


def test_adjoint_options_are_checked() -> None:
    with pytest.raises(ValueError, match="window"):
        Adjoint(window=-1)
