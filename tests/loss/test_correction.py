"""Fixed-point correction: weights, alignment, options, loss values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchdeq.loss import WEIGHTS, fp_correction, jac_correction, jac_reg, register_weight_func


def squared(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


@pytest.fixture
def states() -> list[Tensor]:
    return [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.fixture
def own_names() -> Iterator[None]:
    """Remove the weight functions that a test registers."""
    before = dict(WEIGHTS._entries)
    yield
    WEIGHTS._entries = before


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("exp", {}, [0.64, 0.8, 1]),
        ("exp", {"gamma": 0.5}, [0.25, 0.5, 1]),
        ("linear", {}, [1 - 0.6, 1 - 0.3, 1]),
        ("linear", {"gamma": 0.3, "bias": 1.0}, [1.8, 1.9, 2]),
        ("const", {}, [1, 1, 1]),
        ("const", {"c": 0.5}, [0.5, 0.5, 0.5]),
        ("exp", {"gamma": 0.0}, [0, 0, 1]),
    ],
)
def test_weights_are_the_published_ones(
    states: list[Tensor], name: str, options: dict[str, float], weights: list[float]
) -> None:
    y = torch.randn(4, 3, dtype=torch.float64)
    losses = torch.stack([squared(x, y) for x in states])
    expected = losses @ torch.tensor(weights, dtype=torch.float64)
    loss, values = fp_correction(
        squared, (states, y), weight_func=name, return_loss_values=True, **options
    )
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    assert values == losses.tolist()
    got = torch.autograd.grad(loss, states)
    torch.testing.assert_close(got, torch.autograd.grad(expected, states))


def test_lists_go_along_with_the_states_and_anything_else_is_repeated() -> None:
    class Target(NamedTuple):
        flow: float
        valid: float

    seen: list[tuple[Any, ...]] = []

    def crit(*args: Any) -> Tensor:
        seen.append(args)
        return torch.ones(())

    target = Target(0.5, 1.0)
    fp_correction(crit, ([1, 2, 3], (4, 5, 6), [7], target, "mask"))
    assert seen == [(k, k + 3, 7, target, "mask") for k in (1, 2, 3)]


def test_a_single_state_is_the_plain_loss() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for state in (x, [x], (x,)):
        assert fp_correction(squared, (state, y)) == squared(x, y)


@pytest.mark.parametrize(
    ("args", "lengths"),
    [(([1, 2, 3], [1, 2]), r"\[3, 2\]"), (([1, 2], []), r"\[2, 0\]"), ((), r"\[\]")],
)
def test_lists_that_do_not_align_are_an_error(args: Any, lengths: str) -> None:
    with pytest.raises(ValueError, match=f"got lengths {lengths}"):
        fp_correction(squared, args)


def test_a_tensor_in_place_of_the_arguments_is_an_error() -> None:
    with pytest.raises(TypeError, match="got a tensor"):
        fp_correction(squared, torch.ones(2, 3))


def test_a_loss_without_reduction_stays_without() -> None:
    states, y = torch.randn(2, 4), torch.randn(4)
    loss = fp_correction(lambda x, y: (x - y).abs(), (list(states), y))
    torch.testing.assert_close(loss, 0.8 * (states[0] - y).abs() + (states[1] - y).abs())
    with pytest.raises(ValueError, match=r"one number per state.*got \(4,\)"):
        fp_correction(lambda x, y: (x - y).abs(), (list(states), y), return_loss_values=True)


def test_loss_values_are_floats_of_any_precision_and_keep_no_graph() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.full((1,), 0.7, dtype=dtype, requires_grad=True)
        _, values = fp_correction(lambda x: x, ([x, x],), return_loss_values=True)
        assert values == [x.item(), x.item()]
        assert all(type(value) is float for value in values)


def test_one_set_of_options_serves_every_built_in_weight(states: list[Tensor]) -> None:
    options: dict[str, Any] = {"gamma": 0.5, "bias": 0.1, "c": 2.0}
    for name in ("exp", "linear", "const"):
        assert fp_correction(squared, (states, 0.0), weight_func=name, **options).isfinite()
    with pytest.raises(TypeError, match=r"unknown option 'gama'.*'exp'; did you mean 'gamma'"):
        fp_correction(squared, (states, 0.0), gama=0.5)
    with pytest.raises(TypeError, match=r"unknown option 'scale' of weight function 'const'"):
        fp_correction(squared, (states, 0.0), weight_func="const", scale=0.5)


@pytest.mark.usefixtures("own_names")
def test_registered_weights_get_their_own_options(states: list[Tensor]) -> None:
    register_weight_func("last", lambda n, k: float(k == n - 1))
    assert fp_correction(squared, (states, 0.0), "last") == squared(states[-1], torch.zeros(()))
    with pytest.raises(TypeError, match=r"unknown option 'gamma' .* known: none"):
        fp_correction(squared, (states, 0.0), "last", gamma=0.5)

    seen = []

    def remember(n: int, k: int, **options: Any) -> float:
        seen.append((n, k, options))
        return 1.0

    register_weight_func("any", remember)
    fp_correction(squared, (states, 0.0), "any", anything=3)
    assert seen == [(3, k, {"anything": 3}) for k in range(3)]

    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    register_weight_func("learned", lambda n, k, *, power=1: scale**power)
    loss = fp_correction(squared, (states, 0.0), "learned", power=2)
    assert torch.autograd.grad(loss, scale)[0] > 0


@pytest.mark.usefixtures("own_names")
def test_names_are_guarded() -> None:
    with pytest.raises(KeyError, match="unknown weight function 'expo'; did you mean 'exp'"):
        fp_correction(squared, ([1],), "expo")
    with pytest.raises(ValueError, match="built in"):
        register_weight_func("exp", lambda n, k: 1.0)
    with pytest.raises(TypeError, match="callable"):
        register_weight_func("three", 3)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_weight_func("mine", lambda n, k: 1.0)
    with pytest.warns(UserWarning, match="'mine' was registered before"):
        register_weight_func("mine", lambda n, k: 2.0)


def test_jacobian_correction_is_the_weighted_sum_over_the_states(states: list[Tensor]) -> None:
    W = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W)

    torch.manual_seed(3)
    got = jac_correction(f, states, gamma=0.5, vecs=2)
    torch.manual_seed(3)
    leaves = [z.detach().requires_grad_() for z in states]
    expected = sum(0.5 ** (2 - k) * jac_reg(f(z), z, 2) for k, z in enumerate(leaves))
    torch.testing.assert_close(got, expected)
    grad, *to_states = torch.autograd.grad(got, [W, *states], allow_unused=True)
    assert grad.norm() > 0
    assert all(t is None for t in to_states), "the states are taken as they are"


def test_jacobian_correction_of_tuples_follows_the_grad_mode() -> None:
    w = torch.tensor(0.5, requires_grad=True)
    states = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(2)]

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return w * a, b * a.sum(1, keepdim=True)

    assert jac_correction(f, states).requires_grad
    with torch.no_grad():
        assert not jac_correction(f, states).requires_grad
    assert not states[0][0].requires_grad
    wrong: Any
    for wrong in ([], torch.ones(3)):
        with pytest.raises(ValueError, match="non-empty list of states"):
            jac_correction(f, wrong)
